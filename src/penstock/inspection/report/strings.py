"""The texts that facts repeat: each is written once, and referred to by its number."""

from __future__ import annotations


class Strings(dict[str, int]):
    """A table of texts by number, in the order of their first use."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number
