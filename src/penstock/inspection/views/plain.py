"""Facts of a program as JSON.

In: frozen dataclasses of numbers, words, tuples and mappings. Out: the same as text that any JSON reader takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def plain(facts: object) -> Any:
    """Return dataclasses as objects, tuples as lists, keys as text."""
    if is_dataclass(facts) and not isinstance(facts, type):
        return {field.name: plain(getattr(facts, field.name)) for field in fields(facts)}
    if isinstance(facts, Mapping):
        return {str(key): plain(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [plain(item) for item in facts]
    assert facts is None or isinstance(facts, bool | int | float | str), f"{type(facts).__name__} is no plain fact"
    return facts


def as_json(facts: object) -> str:
    """Return facts as JSON text."""
    return json.dumps(plain(facts), indent=2, allow_nan=False)
