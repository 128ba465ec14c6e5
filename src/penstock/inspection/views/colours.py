"""Colours for a terminal.

In: Penstock's own text. Out: the same text with escape sequences around its words, or the text itself without colours.

Colours are on where standard output is a terminal that has them. NO_COLOR turns them off, as everywhere (no-color.org).
"""

from __future__ import annotations

import os
import re
import sys

_STYLES = {
    "value": "36",
    "variable": "33",
    "type": "2",
    "keyword": "1",
    "op": "34",
    "loc": "2;3",
    "text": "32",
    "gone": "31",
    "new": "32",
    "changed": "33",
    "rail": "35",
    "head": "1",
    "warning": "31",
    **{f"version{i}": code for i, code in enumerate(("36", "33", "35", "32"))},
}
_IR = re.compile(
    r"""(?P<loc>\ ;\ .*$)
    |(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<value>%[\w./:\-]+)
    |(?P<variable>@[\w./:\-]+)
    |(?P<type>\b(?:bool|[fiu]\d+|bf16)\[[\w,/]*\](?:\+\w+)*)
    |(?P<op>\b[a-z]\w*(?=\())
    |(?P<keyword>^\s*(?:module|links|host|device|link|mesh|stage|input|output|var|edge|graph|schedule|note|save|return
        |rank)\b)""",
    re.VERBOSE,
)
_ACTION = re.compile(r"\b(?:\d+)?[A-Z]{1,2}\d+@(\d+)")


def wanted() -> bool:
    """Return whether standard output should have colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str) -> str:
    """Colour a text in a style."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if text else text


def paint_ir(text: str) -> str:
    """Colour lines of IR: values, variables, types, operations and their source locations."""
    return "\n".join(_IR.sub(_painted, line) for line in text.split("\n"))


def paint_changes(text: str) -> str:
    """Colour lines as `penstock diff` prints them."""
    return "\n".join(_paint_change(line) for line in text.split("\n"))


def paint_schedule(text: str) -> str:
    """Colour a grid or list of actions: each weight version has a colour."""
    return _ACTION.sub(lambda match: paint(match[0], f"version{int(match[1]) % 4}"), text)


def _painted(match: re.Match[str]) -> str:
    assert match.lastgroup is not None
    return paint(match[0], match.lastgroup)


def _paint_change(line: str) -> str:
    style = {"-": "gone", "+": "new", "~": "changed"}.get(line.lstrip()[:1])
    return paint(line, style) if style is not None else line
