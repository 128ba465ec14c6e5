"""Texts that facts repeat: each is written once, and named by its number everywhere else."""

from __future__ import annotations


class Strings:
    """Numbers of texts, in the order in which they were first named."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def listed(self) -> list[str]:
        return list(self._numbers)
