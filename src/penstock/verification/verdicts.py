"""Verdicts on results: right, wrong, or nothing that these inputs can tell.

A result is compared with the same in float64. It is right where it is no more than the tolerance away. Where it is
further off, rounding is asked: how far it moves the result on these very inputs (roundings.py). A result that is
further off than that is wrong. One that is not is right, unless rounding moves it by more than WIDEST on the average
(and by more than a step, where results are in steps): then a right program and a wrong one look the same, and the
verdict is that these inputs cannot tell. That is no failure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from penstock.ir.interpreter.ops import Array
from penstock.support.errors import VerifyError
from penstock.support.terminal import say, table
from penstock.support.words import counted

from .roundings import (
    MORE_RUNS,
    NOWHERE,
    RUNS,
    SIZE,
    SLACK,
    Distance,
    RoundingEffect,
    RoundingNoise,
    allowed_by,
    distance,
    same_gaps,
)
from .tolerance import Allowed

K = TypeVar("K", bound=Hashable)
OK, FAILED, UNTOLD = "ok", "FAILED", "cannot tell"
# The largest mean effect of rounding, beside which a fault would still show.
WIDEST = 1e-2


@dataclass(frozen=True)
class Comparison:
    """One result: how far it is off, how far it may be, and a line about it.

    `limit` is what rounding explains where that was asked for, else the tolerance. `empty` says that no element is
    finite on either side. Beside an effect of rounding of up to `widest` a fault would still show.
    """

    what: str
    error: Distance
    tolerance: float
    limit: Distance | None = None
    empty: bool = False
    remark: str = ""
    widest: float = WIDEST

    @property
    def verdict(self) -> str:
        """The verdict in one word or two."""
        if self.empty:
            return UNTOLD
        if self.error.worst <= self.tolerance:
            return OK
        if self.limit is None or not self.error.within(self.limit):
            return FAILED
        return UNTOLD if not self.limit.mean <= self.widest else OK

    @property
    def allowed(self) -> float:
        """The largest error that passes."""
        return self.tolerance if self.limit is None else max(self.tolerance, self.limit.worst)


class Judge(Generic[K]):
    """Results in float64, and what rounding does to them.

    `rounded` runs the program as its types say, `noisy` in float64 with noise. Neither is run before a result is off.
    `grown` may widen the effect of rounding on some results by that on others.
    """

    def __init__(
        self,
        exact: Mapping[K, Array],
        rounded: Callable[[], Mapping[K, Array]],
        noisy: Callable[[RoundingNoise], Mapping[K, Array]],
        seed: int,
        *,
        grown: Callable[[Mapping[K, Distance]], Mapping[K, Distance]] = lambda spread: spread,
    ) -> None:
        self.exact, self._rounded, self._grown = exact, rounded, grown
        self._effect = RoundingEffect(noisy, exact, seed)

    @cached_property
    def rounded(self) -> Mapping[K, Array]:
        """The results with roundings as the types say."""
        return self._rounded()

    def compare(
        self,
        what: str,
        key: K,
        computed: Array,
        tolerance: float,
        *,
        asked: bool = False,
        also: Sequence[Array] = (),
        step: float = 0.0,
    ) -> Comparison:
        """Judge a result.

        `also` are right results that round in other ways; `asked` says that the tolerance is the user's, and alone
        counts. A result in steps of quantisation can be told from others where rounding moves it by no more than one on
        the average; `step` is the size of one over the largest magnitude.
        """
        error = distance(computed, self.exact[key])
        empty = same_gaps(computed, self.exact[key])
        row = Comparison(what, error, tolerance, empty=empty, widest=max(WIDEST, step))
        if asked or row.verdict != FAILED:
            return row
        row = replace(row, limit=allowed_by(self._moved(RUNS)[key]))
        if row.verdict == OK:
            return row
        others = [distance(computed, other) for other in (self.rounded[key], *also)]
        nearest = min(others, key=lambda e: e.worst)
        if nearest.worst <= tolerance:
            return Comparison(what, nearest, tolerance, remark="as right results that are rounded, not as in float64")
        # A number that rounding moves over an edge, but seldom, takes more runs to be seen.
        for runs in (RUNS, RUNS + MORE_RUNS):
            limit = allowed_by(self._moved(runs)[key])
            if fitting := [e for e in (error, *others) if e.within(limit)]:
                return replace(row, error=fitting[0], limit=limit)
            row = replace(row, limit=limit)
        return row

    def _moved(self, runs: int) -> Mapping[K, Distance]:
        done, spread = self._effect.runs, self._effect.moved(runs)
        if done < runs:
            largest = max((one.worst for one in spread.values()), default=0.0)
            say(f"rounding alone moves results by up to {largest:.1e}, in {runs} runs of the interpreter in float64")
        return self._grown(spread)


def widened(effect: RoundingEffect[K], key: K, allowed: Allowed, errors: Sequence[Distance]) -> Allowed:
    """Return the tolerance of a value that rounding explains, or the one there was where it explains no error."""
    for runs in (RUNS, RUNS + MORE_RUNS):
        limit = allowed_by(effect.moved(runs)[key])
        if any(error.within(limit) for error in errors):
            why = (
                f"{SLACK:g} times what noise of {SIZE:g} roundings moves it by, in {runs} runs of the interpreter in "
                "float64"
            )
            return Allowed(max(allowed.error, limit.worst), why, blurred=not limit.mean <= WIDEST)
    return allowed


def report(rows: Sequence[Comparison], hint: str = "") -> int:
    """Print the comparisons, and what cannot be told; raise VerifyError where one failed."""
    wide = len({row.allowed for row in rows}) > 1 or any(row.allowed > row.tolerance for row in rows)
    cells = [
        [row.what, f"{row.error.worst:.2e}", *([f"{row.allowed:.1e}"] if wide else []), row.verdict] for row in rows
    ]
    print(table(["compared", "relative error", *(["allowed"] if wide else []), "verdict"], cells))
    for row in rows:
        if row.remark:
            print(f"{row.what}: {row.remark}")
        if row.verdict == FAILED and row.error.worst <= row.allowed:
            assert row.limit is not None
            print(
                f"{row.what}: {row.error.mean:.1e} on the average, where rounding explains {row.limit.mean:.1e}: too "
                "many elements are off"
            )
    failed = [row for row in rows if row.verdict == FAILED]
    if failed:
        most = "more than is allowed" if wide else f"more than {failed[0].allowed:g}"
        raise VerifyError(
            f"{len(failed)} of {len(rows)} comparisons are off by {most}: {', '.join(row.what for row in failed[:5])}",
            hint=hint,
        )
    untold = [row for row in rows if row.verdict == UNTOLD]
    if untold:
        print(_told(untold, len(rows)))
    return 0


def _told(untold: Sequence[Comparison], count: int) -> str:
    """Return the line on results that cannot be judged."""
    names = ", ".join(row.what for row in untold[:5])
    if all(row.empty for row in untold):
        why = "no element of them is finite"
    else:
        moved = max((row.limit.mean for row in untold if row.limit is not None), default=NOWHERE.mean)
        why = f"rounding alone may change them by {moved:.1e} on the average"
    return (
        f"cannot tell on these inputs: {len(untold)} of {counted(count, 'comparison')} ({names}), as {why}; "
        "--data FILE has inputs of your own, --seed N draws others"
    )
