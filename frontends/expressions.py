"""Expressions of symbolic dimensions, as ONNX files name them: sizes that follow from others.

In: a name, and sizes by name. Out: the size that follows.

    past + seq      2*batch      (heads + 1) * 4        sums and products of names and whole numbers

The size of an expression follows from its parts, if all of them have a size. Without them it may be given itself, as
any other name. Text that is no expression is a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import prod

_TOKEN = re.compile(r"\s*(?:([A-Za-z_][\w.]*)|(\d{1,18})|([-+*()]))")


class Expression:
    """A sum or product of names and numbers: a list of products with their signs."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"{text!r} is no expression")
            self._tokens.append(match[0].strip())
            at = match.end()
        self.parts = tuple(dict.fromkeys(t for t in self._tokens if t[0].isalpha() or t[0] == "_"))
        self._at = 0
        self._sizes: Mapping[str, int] = dict.fromkeys(self.parts, 1)
        self.size(self._sizes)

    def size(self, sizes: Mapping[str, int]) -> int:
        """Return the value for sizes of all its parts."""
        self._at, self._sizes = 0, sizes
        total = self._sum(0)
        if self._at < len(self._tokens):
            raise ValueError(f"{self._tokens[self._at]} does not go on an expression")
        return total

    def _sum(self, depth: int) -> int:
        total = self._product(depth)
        while (sign := self._next("+", "-")) is not None:
            total += self._product(depth) * (1 if sign == "+" else -1)
        return total

    def _product(self, depth: int) -> int:
        factors = [self._factor(depth)]
        while self._next("*") is not None:
            factors.append(self._factor(depth))
        return prod(factors)

    def _factor(self, depth: int) -> int:
        if self._next("(") is not None:
            if depth > 16:
                raise ValueError("too many parentheses")
            inner = self._sum(depth + 1)
            if self._next(")") is None:
                raise ValueError("a parenthesis is not closed")
            return inner
        token = self._next(*self._tokens)
        if token is None or token in "+-*()":
            raise ValueError("an operand is missing")
        return int(token) if token.isdigit() else self._sizes[token]

    def _next(self, *wanted: str) -> str | None:
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return self._tokens[self._at - 1]
        return None


def expression_of(name: str) -> Expression | None:
    """Return a name as an expression of several parts; None where it is a name, or nothing to compute."""
    if len(name) > 200:
        return None
    try:
        expression = Expression(name)
    except ValueError:
        return None
    return expression if expression.parts and name not in expression.parts else None


def with_derived(sizes: Mapping[str, int], names: Collection[str]) -> dict[str, int]:
    """Return the sizes, and those of names that are expressions of them."""
    derived = dict(sizes)
    for name in sorted(set(names) - sizes.keys()):
        expression = expression_of(name)
        if expression is not None and all(part in sizes for part in expression.parts):
            derived[name] = expression.size(sizes)
    return derived
