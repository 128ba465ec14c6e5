"""The search for layouts: an option for every choice, with the least sum of seconds, within a number of bytes.

In: choices with options, each with seconds and bytes, and crossings. A choice stands for operations that are alike, so
its seconds are those of all of them. A crossing is a value between operations: its seconds depend on the state in which
its maker gives it, and on the states in which takers need it. A state that several takers need is made once. Out: one
option for every choice. The integer programme has

    x[c, o] = 1 where choice c has option o          y[g, n] >= z[t, g, n] for every taker t of a crossing
    sum over o of x[c, o] = 1                        sum over n of z[t, g, n] = sum of x[maker, o] that give g
    sum of bytes * x <= room                         sum over g of z[t, g, n] = sum of x[t, o] that need n

and minimises seconds * x + seconds * y. It runs with one thread, a fixed seed and a limit on nodes of its search tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from penstock.passes.placement.problem import Progress
from penstock.passes.placement.programme import Programme

Array = npt.NDArray[np.float64]

NODES = 2_000


@dataclass(frozen=True, slots=True, eq=False)
class Taker:
    """A choice that takes a value, with the state that each of its options needs it in."""

    choice: int
    needs: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MovedValue:
    """A value between operations. `gives` has the state for each option of its maker, `seconds[g, n]` those from state
    g to state n, of all values that are alike."""

    maker: int
    gives: tuple[int, ...]
    takers: tuple[Taker, ...]
    seconds: Array

    def spent(self, options: Sequence[int]) -> float:
        """Return the seconds of this value, with an option for every choice."""
        state = self.gives[options[self.maker]]
        return float(sum(self.seconds[state, n] for n in {taker.needs[options[taker.choice]] for taker in self.takers}))


@dataclass(frozen=True, slots=True, eq=False)
class LayoutCosts:
    """The seconds and bytes of every choice by option, the crossings between them, and the bytes that there are."""

    seconds: Sequence[Sequence[float]]
    nbytes: Sequence[Sequence[float]]
    crossings: Sequence[MovedValue]
    room: float = inf

    def total(self, options: Sequence[int]) -> float:
        """Return the seconds of all choices, each with the option of this number."""
        alone = sum(seconds[option] for seconds, option in zip(self.seconds, options, strict=True))
        return alone + sum(crossing.spent(options) for crossing in self.crossings)

    def held(self, options: Sequence[int]) -> float:
        """Return the bytes of all choices, each with the option of this number."""
        return sum(nbytes[option] for nbytes, option in zip(self.nbytes, options, strict=True))


@dataclass(frozen=True, slots=True)
class BestOptions:
    """The options of a search, and what no options take less than; none where none are within the room."""

    options: tuple[int, ...] | None
    bound: float
    nodes: int


def best_options(costs: LayoutCosts, nodes: int = NODES, progress: Progress | None = None) -> BestOptions:
    """Return an option for every choice, with the least seconds within the room."""
    model = _OptionProgramme(costs)
    answer = model.programme.minimise((), nodes, progress)
    if not answer.values:
        return BestOptions(None, answer.bound * model.scale, answer.nodes)
    options = tuple(max(range(len(xs)), key=lambda o: answer.values[xs[o]]) for xs in model.chosen)
    return BestOptions(options, min(answer.bound * model.scale, costs.total(options)), answer.nodes)


@dataclass(slots=True, eq=False)
class _OptionProgramme:
    """The integer programme, with the meaning of its variables."""

    costs: LayoutCosts
    programme: Programme = field(default_factory=Programme)
    chosen: list[list[int]] = field(default_factory=list)
    scale: float = 1.0

    def __post_init__(self) -> None:
        costs, programme = self.costs, self.programme
        # Seconds are in units of what first options take, so that tolerances mean the same in all models.
        self.scale = costs.total([0] * len(costs.seconds)) or 1.0
        level = programme.variable()
        self.chosen = [[programme.variable(0.0, 1.0, whole=True) for _ in options] for options in costs.seconds]
        terms = [(level, -1.0)]
        for xs, seconds in zip(self.chosen, costs.seconds, strict=True):
            programme.row(((x, 1.0) for x in xs), least=1.0, most=1.0)
            terms += [(x, spent / self.scale) for x, spent in zip(xs, seconds, strict=True) if spent]
        for crossing in costs.crossings:
            terms += self._crossing(crossing)
        programme.row(terms, most=0.0)
        if costs.room < inf:
            held = [
                (x, n) for xs, ns in zip(self.chosen, costs.nbytes, strict=True) for x, n in zip(xs, ns, strict=True)
            ]
            unit = costs.room or 1.0
            programme.row(((x, n / unit) for x, n in held), most=costs.room / unit)

    def _crossing(self, crossing: MovedValue) -> list[tuple[int, float]]:
        """Add the rows of a value; return its part of the seconds."""
        moves: dict[tuple[int, int], int] = {}
        for taker in crossing.takers:
            pairs = [(state, needed) for state in sorted({*crossing.gives}) for needed in sorted({*taker.needs})]
            ways = {at: self.programme.variable(0.0, 1.0) for at in pairs}
            for at, way in ways.items():
                if crossing.seconds[at]:
                    if at not in moves:
                        moves[at] = self.programme.variable(0.0, 1.0)
                    self.programme.row(((moves[at], 1.0), (way, -1.0)), least=0.0)
            self._balance(crossing.maker, crossing.gives, ways, 0)
            self._balance(taker.choice, taker.needs, ways, 1)
        return [(moves[at], float(crossing.seconds[at]) / self.scale) for at in moves]

    def _balance(self, choice: int, states: Sequence[int], ways: dict[tuple[int, int], int], end: int) -> None:
        for state in sorted({*states}):
            xs = [(x, -1.0) for x, other in zip(self.chosen[choice], states, strict=True) if other == state]
            self.programme.row(
                [*((way, 1.0) for at, way in ways.items() if at[end] == state), *xs], least=0.0, most=0.0
            )
