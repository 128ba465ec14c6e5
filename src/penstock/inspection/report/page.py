"""The writer of the page: one file of HTML.

In: facts. Out: the page, with its styles, scripts and data inside.

The data are JSON in a script element that no browser runs. `<` is written as an escape there, so that no text can end
the element, and a number that is not finite is null. The page allows its own script and styles by their hashes, and
nothing else: smuggled code would not run, and nothing can be loaded from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib import resources
from typing import Any

import msgspec

from penstock.support.gc_pause import nothing_collected

from .facts import gather
from .material import Material

_PARTS = resources.files(__package__).joinpath("page")
# In the order in which they are needed.
SCRIPTS = (
    "dom",
    "facts",
    "parts",
    "layout",
    "graph",
    "passes",
    "placement",
    "why",
    "timeline",
    "schedule",
    "memory",
    "links",
    "kernels",
    "overview",
    "details",
    "search",
    "main",
)


def render(facts: dict[str, Any]) -> str:
    """Return the page that shows these facts."""
    script = "\n".join(['"use strict";', "(() => {", *(_part(f"{name}.js") for name in SCRIPTS), "})();"])
    style = _part("style.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; base-uri "
        "'none'; form-action 'none'"
    )
    # msgspec does not know the numbers of NumPy.
    data = msgspec.json.encode(facts, enc_hook=float).decode().replace("<", "\\u003c")
    parts = {
        "title": html.escape(facts["summary"]["model"]),
        "policy": html.escape(policy, quote=True).replace("&#x27;", "'"),
        "style": style,
        "script": script,
        "data": data,
    }
    # One substitution for all parts: braces in an inserted part stay as they are.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))


def page_of(material: Material, *, plain: bool = False) -> str:
    """Return the page of a report.

    With `plain` predictions depend on the module alone, not on measurements of this machine.
    """
    with nothing_collected():
        return render(gather(material, plain))


def _part(name: str) -> str:
    return _PARTS.joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
