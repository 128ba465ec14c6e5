"""Settings as text and as tables: `cosine{steps=1000,warmup=100}`, or the same in TOML, become a frozen dataclass, and
print back.

The fields of the class are the settings, the first words of their annotations the types that are allowed. Problems are
collected: the caller gets all of them, in the words of the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from penstock.ir.attrs import Attr, parse_literal, print_literal
from penstock.support.errors import UsageError

_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "dict": "a table",
    "list": "a list of tables",
}
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict, "list": list}
_SETTING = re.compile(r'\s*([\w\-]+)=("(?:[^"\\]|\\.)*"|[^,]*)\s*(?:,|$)')

T = TypeVar("T")


def pick(given: Mapping[str, object], kinds: Mapping[str, str], prefix: str, problems: list[str]) -> dict[str, Any]:
    """Return the entries of `given` that have the type that `kinds` names. Every other entry becomes a problem."""
    chosen: dict[str, Any] = {}
    for key, value in given.items():
        kind = kinds.get(key)
        if kind is None:
            problems.append(f"{prefix}{key} is not known, there are {', '.join(kinds)}")
        elif isinstance(value, int) and abs(value) >= 2**63:
            problems.append(f"{prefix}{key} must be below 2^63")
        elif kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
            chosen[key] = float(value)
        elif type(value) is _TYPES[kind]:
            chosen[key] = value
        else:
            problems.append(f"{prefix}{key} must be {_WORDS[kind]}, got {value!r}")
    return chosen


def make(maker: type[T], given: Mapping[str, object], prefix: str, problems: list[str]) -> T | None:
    """Return an object of a class of settings. Where the values are wrong, add entries to `problems` and return
    None."""
    fields_by_name = {f.name: f for f in fields(maker)}  # type: ignore[arg-type]
    before = len(problems)
    chosen = pick(given, {name: _kind(f) for name, f in fields_by_name.items()}, prefix, problems)
    missing = [name for name, f in fields_by_name.items() if f.default is MISSING and name not in given]
    problems += [f"{prefix}{name} is missing" for name in missing]
    if missing or any(fields_by_name[name].default is MISSING and name not in chosen for name in fields_by_name):
        return None
    try:
        result = maker(**chosen)
    except UsageError as error:
        problems += [f"{prefix}{what}" for what in error.what.split("; ")]
        return None
    return result if len(problems) == before else None


def make_kind(makers: Mapping[str, type[T]], given: Mapping[str, object], prefix: str, problems: list[str]) -> T | None:
    """Return an object of the class that `kind` in a table names. Where it is wrong, add entries to `problems` and
    return None."""
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in makers:
        reason = f"got {kind!r}" if "kind" in given else "it is missing"
        problems.append(f"{prefix}kind must be one of {', '.join(makers)}, {reason}")
        return None
    return make(makers[kind], {k: v for k, v in given.items() if k != "kind"}, prefix, problems)


def _kind(field: Field[Any]) -> str:
    return str(field.type).split(" ")[0]


def parse_call(text: str) -> tuple[str, dict[str, Attr]]:
    """Parse a name with its settings. A ValueError says what cannot be read. The settings are the last braces, so that
    the name may be any text."""
    if not text.endswith("}"):
        return text, {}
    name, brace, inside = text[:-1].rpartition("{")
    if not brace:
        raise ValueError(f"cannot read {text!r}, expected name{{setting=value,...}}")
    settings: dict[str, Attr] = {}
    at = 0
    while at < len(inside):
        match = _SETTING.match(inside, at)
        if match is None:
            raise ValueError(f"cannot read {inside[at:]!r} of {text!r}, expected setting=value")
        key = match[1].replace("-", "_")
        if key in settings:
            raise ValueError(f"{key} is given twice in {text!r}")
        settings[key] = parse_literal(match[2].strip())
        at = match.end()
    return name, settings


def print_call(name: str, settings: Mapping[str, Attr]) -> str:
    """Return the text that reads as a name with these settings."""
    return name + (f"{{{','.join(f'{k}={print_literal(v)}' for k, v in settings.items())}}}" if settings else "")


def changed(settings: object) -> dict[str, Attr]:
    """Return the settings that differ from their defaults, or have none."""
    both = {f.name: (getattr(settings, f.name), f.default) for f in fields(settings)}  # type: ignore[arg-type]
    return {name: value for name, (value, default) in both.items() if value != default}
