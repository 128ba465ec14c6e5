"""The learning rate as data: kinds of schedules, the table that each becomes, and what a table means.

The update graph reads the rate from two variables of role `setting`, so that no kernel knows it: @lr, the rate itself,
and @lr.curve, what it is multiplied by. The curve has ROWS rows of five numbers, all float64:

    start, length, from, to, shape

The row in force at step t (from 0, one per batch) is the last one whose start is not after t, or the first. With s = (t
- start) / length, between 0 and 1,

    shape 0   from + (to - from) s                             shape 1   to + (from - to) (1 + cos(pi s)) / 2
    shape 2   from * to^floor((t - start) / length)            without an end

Rows that are not needed start where no step comes to. Limit: at most ROWS pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, floor, isfinite, pi
from typing import ClassVar

from penstock.support.errors import UsageError

from .settings import changed, make_kind, parse_call, print_call

LR, CURVE = "lr", "lr.curve"
ROWS, COLUMNS = 4, 5
_NEVER = 1e18
LINEAR, COSINE, STEP = 0.0, 1.0, 2.0
# Schedules as users write them, for help texts.
EXAMPLES = "constant{warmup=100}, linear{steps=1000}, cosine{steps=1000,warmup=100,end=0.1} or step{every=300}"

Piece = tuple[float, float, float, float, float]


def _check(kind: str, *rules: tuple[str, float, str, bool]) -> None:
    wrong = [
        f"{name} must be {range_words}, got {value!r}"
        for name, value, range_words, holds in rules
        if not (isfinite(value) and holds)
    ]
    if wrong:
        raise UsageError("; ".join(wrong), where=f"rate {kind}")


class _Rate(ABC):
    """The base of all kinds: a linear warm-up of `warmup` steps, whose last one has the full rate, then a curve of the
    kind."""

    kind: ClassVar[str]
    warmup: int

    def __str__(self) -> str:
        return print_call(self.kind, changed(self))

    @abstractmethod
    def after(self) -> Piece:
        """Return the curve from the end of the warm-up on."""

    def table(self) -> tuple[float, ...]:
        """Return the elements of @lr.curve."""
        w = float(self.warmup)
        rising: list[Piece] = [(0.0, w - 1 or 1.0, 1 / w, 1.0, LINEAR)] if self.warmup else []
        pieces = [*rising, self.after()]
        unused: Piece = (_NEVER, 1.0, 1.0, 1.0, LINEAR)
        return tuple(x for piece in [*pieces, *[unused] * (ROWS - len(pieces))] for x in piece)


@dataclass(frozen=True)
class Constant(_Rate):
    """lr, after the warm-up."""

    kind: ClassVar[str] = "constant"
    warmup: int = 0

    def __post_init__(self) -> None:
        _check(self.kind, ("warmup", self.warmup, "0 or more", self.warmup >= 0))

    def after(self) -> Piece:
        return float(self.warmup), 1.0, 1.0, 1.0, LINEAR


@dataclass(frozen=True)
class _ToEnd(_Rate):
    """From lr to `end` * lr, which it reaches at step `steps` and keeps; `steps` counts the warm-up."""

    steps: int
    warmup: int = 0
    end: float = 0.0

    def __post_init__(self) -> None:
        _check(
            self.kind,
            ("warmup", self.warmup, "0 or more", self.warmup >= 0),
            ("steps", self.steps, "more than warmup", self.steps > self.warmup),
            ("end", self.end, "0 or more", self.end >= 0),
        )


@dataclass(frozen=True)
class Linear(_ToEnd):
    """A straight line from lr to `end` * lr at step `steps`."""

    kind: ClassVar[str] = "linear"

    def after(self) -> Piece:
        return float(self.warmup), float(self.steps - self.warmup), 1.0, self.end, LINEAR


@dataclass(frozen=True)
class Cosine(_ToEnd):
    """Half a cosine from lr to `end` * lr at step `steps`."""

    kind: ClassVar[str] = "cosine"

    def after(self) -> Piece:
        return float(self.warmup), float(self.steps - self.warmup), 1.0, self.end, COSINE


@dataclass(frozen=True)
class Steps(_Rate):
    """lr * `factor`^n after n times `every` steps, counted from the end of the warm-up."""

    kind: ClassVar[str] = "step"
    every: int
    factor: float = 0.1
    warmup: int = 0

    def __post_init__(self) -> None:
        _check(
            self.kind,
            ("every", self.every, "1 or more", self.every >= 1),
            ("factor", self.factor, "above 0", self.factor > 0),
            ("warmup", self.warmup, "0 or more", self.warmup >= 0),
        )

    def after(self) -> Piece:
        return float(self.warmup), float(self.every), 1.0, self.factor, STEP


Rate = Constant | Linear | Cosine | Steps
RATES: dict[str, type[Constant] | type[Linear] | type[Cosine] | type[Steps]] = {
    c.kind: c for c in (Constant, Linear, Cosine, Steps)
}


def rate_of(given: dict[str, object], prefix: str, problems: list[str]) -> Rate | None:
    """Return the schedule that a table with `kind` describes. Where it is wrong, add entries to `problems` and return
    None."""
    return make_kind(RATES, given, prefix, problems)


def parse_rate(text: str) -> Rate:
    """Return the schedule that prints as `text`. One UsageError lists all that is wrong with it."""
    problems: list[str] = []
    rate = None
    try:
        kind, settings = parse_call(text)
        rate = rate_of({**settings, "kind": kind}, "", problems)
    except ValueError as error:
        problems.append(str(error))
    if rate is None:
        raise UsageError(
            "; ".join(problems), where=f"learning rate {text!r}", hint="e.g. cosine{steps=1000,warmup=100}"
        )
    return rate


def curve_at(table: Sequence[float], step: float) -> float:
    """Return the value of a curve at a step: the meaning of the operation `ramp`, and what metrics report."""
    rows = [tuple(table[i : i + COLUMNS]) for i in range(0, len(table), COLUMNS)]
    start, length, first, last, shape = [row for i, row in enumerate(rows) if not i or row[0] <= step][-1]
    done = (step - start) / length
    if shape == STEP:
        return float(first * last ** floor(done))
    done = max(0.0, min(done, 1.0))
    return float(last + (first - last) * (1 + cos(pi * done)) / 2 if shape == COSINE else first + (last - first) * done)
