"""Attributes of operations: their types, and their text form. In: a literal of the grammar (text.py): numbers, words,
strings, lists of them. Out: the value, and back, exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

Scalar = bool | int | float | str
Attr = Scalar | tuple[Scalar, ...]
Attrs = Mapping[str, Attr]

_WORDS_TAKEN = ("true", "false", "inf", "nan")
_WORD = re.compile(r"[A-Za-z_][\w.\-]*")
_NUMBER = re.compile(r"[+-]?(?:\d+|inf|nan|(?:\d+\.\d*|\.\d+|\d+)(?:e[+-]?\d+)?)")
_ITEM = re.compile(r'\s*((?:[^,\["]|"(?:[^"\\]|\\.)*"|\[(?:[^\]"]|"(?:[^"\\]|\\.)*")*\])+)\s*(?:,|$)')


def print_literal(value: Attr) -> str:
    """Return an attribute value as text; `parse_literal` is the inverse."""
    if isinstance(value, str):
        return _print_word(value)
    if isinstance(value, tuple):
        return "[" + ",".join(map(print_literal, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


@lru_cache(maxsize=1 << 14)
def _print_word(text: str) -> str:
    return text if _WORD.fullmatch(text) and text not in _WORDS_TAKEN else json.dumps(text)


def split_items(text: str) -> Iterator[str]:
    """Split at commas that are outside strings and brackets."""
    at = 0
    while at < len(text):
        match = _ITEM.match(text, at)
        if match is None:
            raise ValueError(f"cannot read {text[at:]!r}, expected arguments separated by commas")
        yield match[1].strip()
        at = match.end()


def parse_literal(text: str) -> Attr:
    """Return the value that prints as `text`."""
    return _known_literal(text) if len(text) <= _SHORT else _read_literal(text)


def _read_literal(text: str) -> Attr:
    if text.startswith("["):
        if not text.endswith("]"):
            raise ValueError(f"bad list {text!r}, expected ']' at the end")
        parts = tuple(parse_literal(part) for part in split_items(text[1:-1]))
        if any(isinstance(part, tuple) for part in parts):
            raise ValueError(f"lists do not nest: {text!r}")
        return parts  # type: ignore[return-value]
    return parse_scalar(text)


# Large modules have few different literals that are short.
_SHORT = 64
_known_literal = lru_cache(maxsize=1 << 14)(_read_literal)


def parse_scalar(text: str) -> Scalar:
    if text in ("true", "false"):
        return text == "true"
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    if text.startswith('"'):
        loaded = json.loads(text)
        if isinstance(loaded, str):
            return loaded
    if _WORD.fullmatch(text):
        return text
    raise ValueError(f"bad literal {text!r}, expected true, false, a number, a word, a JSON string or a list")
