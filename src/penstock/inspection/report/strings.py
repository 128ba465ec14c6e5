"""Texts that facts repeat: each is written once, and named by its number everywhere else."""

from __future__ import annotations


class Strings(dict[str, int]):
    """Numbers of texts, in the order in which they were first asked for."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number
