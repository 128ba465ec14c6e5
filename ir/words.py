"""Words of messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `2 microbatches`."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
