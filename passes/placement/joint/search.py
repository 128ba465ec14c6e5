"""The plan with the least time per sample.

The search asks whether a plan takes no more than a given time, and closes in on the least time with a positive answer.
The question is one of a dynamic programme over sets of layers that are closed under successors: the fewest devices for
a set whose stages' data parallel degrees add up to s. The stage that is put before a set decides how many microbatches
it has in flight from its own degree and s. Of two degrees the larger is of use only where it allows a larger s. A set
is dropped where the remaining layers need more devices than are left.

It begins with the best of some plans whose stages have equal degrees and about the same work, which is what an early
interrupt leaves.

Where more than `LIMIT` sets are closed, only those along some linear orders of the layers are tried. The bound is then
the work spread over all devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from penstock.passes.placement.coarsen import deep, linear
from penstock.passes.placement.ideals import Ideals, enumerate_ideals
from penstock.passes.placement.problem import Progress
from penstock.support.errors import DoesNotFit, UsageError

from .profiles import JointPlan, JointProblem, JointStage, check_plan
from .stages import StageTables, neighbours, sets_along

LIMIT = 1_000
# The part of the value by which a better plan may be missed.
CLOSE = 1e-7
# Where so small a part is left between what is possible and what is not, any better plan is asked for. The first
# question is so much above the bound.
_NEAR, _FIRST = 0.002, 0.02
# The most plans to begin with.
_BEGUN = 8
# The numbers in tables of borders, 16 bytes for each.
_MOST_NUMBERS = 1 << 26
_SHOWN = 8
_NONE = np.int32(1 << 28)
Counts = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Fewest:
    """The fewest devices for a set by the sum of data parallel degrees, with the stage before it that leads there."""

    devices: Counts
    stage: Counts
    stages: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, behind: Counts, first: int, last: int, stage: tuple[int, int, int]) -> None:
        """Offer a stage (the smaller set, both degrees) before `behind`, for sums from `first` to `last`."""
        offered = behind[: last - first + 1] + np.int32(stage[1] * stage[2])
        better = offered < self.devices[first : last + 1]
        if better.any():
            self.devices[first : last + 1][better] = offered[better]
            self.stage[first : last + 1][better] = len(self.stages)
            self.stages.append(stage)


def plan_jointly(problem: JointProblem, limit: int = LIMIT, progress: Progress | None = None) -> JointPlan:
    """Return the plan with the least time per sample, or the best that was seen when the user interrupts."""
    _check_options(problem)
    after, before = neighbours(problem)
    sets = enumerate_ideals(after, before, limit)
    notes = []
    exact = sets is not None
    if sets is None:
        lines = [linear(after, before, float), linear(after, before, lambda v: -float(v)), deep(after, before)]
        sets = sets_along(lines, len(problem.layers))
        notes.append(f"more than {limit} sets of layers are closed: {len(sets)} of them were tried")
    width = max(len(options) for layer in problem.layers for options in layer.options.values())
    numbers = len(sets) * len(problem.layers) * width * len(problem.tensor_degrees)
    if numbers > _MOST_NUMBERS:
        raise UsageError(
            f"{len(problem.layers)} layers with up to {width} options for each of {len(problem.tensor_degrees)} tensor "
            "parallel degrees are too many for the search's tables",
            hint="let several layers be one",
        )
    return _Search(problem, sets, exact, progress).best(tuple(notes))


def _check_options(problem: JointProblem) -> None:
    """Raise DoesNotFit where layers have no options for so few devices."""
    lacking = [
        layer.name or f"layer {v}"
        for v, layer in enumerate(problem.layers)
        if not any(options for t, options in layer.options.items() if t <= problem.devices)
    ]
    if lacking:
        shown = ", ".join(lacking[:_SHOWN]) + (f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else "")
        raise DoesNotFit(f"no options with a tensor parallel degree up to {problem.devices}: {shown}")


class _Search:
    """A search over given sets. `value` is reached, `bound` is proven: no plan takes less.

    No plan is known to take less than what is `assumed`: that is more than the bound where a question was left open.
    """

    def __init__(self, problem: JointProblem, sets: Ideals, exact: bool, progress: Progress | None) -> None:
        self.problem, self.exact, self.progress = problem, exact, progress
        self.tables = StageTables(problem, sets)
        self.sums = min(problem.microbatches, problem.devices)
        self.value = inf
        self.bound = self.assumed = float(self.tables.work[-1]) / problem.devices

    def best(self, notes: tuple[str, ...]) -> JointPlan:
        stages = self._begin()
        try:
            if stages is None:
                stages = self._within(inf)
            if stages is None:
                raise DoesNotFit("no plan fits the memory of the devices", hint="add devices or memory")
            self.value = check_plan(self.problem, stages)
            for within in self._questions():
                better = self._within(within)
                if better is not None and (value := check_plan(self.problem, better)) < self.value:
                    stages, self.value = better, value
                    continue
                self.assumed = within
                proven = better is None and (not self.tables.uncertain or self._within(within, hopeful=True) is None)
                if self.exact and proven:
                    self.bound = within
        except KeyboardInterrupt:
            if stages is None:
                raise
            self.value = check_plan(self.problem, stages)
            notes = (*notes, "interrupted: the best plan until then")
        if self.assumed > self.bound and self.exact:
            notes = (*notes, "options of large stages were chosen by a relaxation")
        close = self.value - self.bound <= 2 * CLOSE * self.value
        bound = self.value if close else min(self.value, self.bound)
        return JointPlan(self.problem, tuple(stages), self.value, bound, notes)

    def _begin(self) -> list[JointStage] | None:
        """Return the best of some plans whose stages have equal degrees and about the same work: something to begin
        with."""
        rows: list[tuple[float, int, int, list[int]]] = []
        for t in self.problem.tensor_degrees:
            for d in self.problem.data_degrees:
                most = min(self.problem.devices // (t * d), self.problem.microbatches // d)
                least = self.tables.least(t, d) if most else None
                for count in (2**k for k in range(most.bit_length())):
                    sets = self._even_sets(count)
                    if least is not None and sets and all(self._fits(t, i, *pair) for i, pair in _stages(sets)):
                        rows.append((max(float(least[u, w]) for _, (u, w) in _stages(sets)), t, d, sets))
        plans = []
        for number, (bound, t, d, sets) in enumerate(sorted(rows, key=lambda row: row[0])[:_BEGUN]):
            if bound < inf:
                stages = [JointStage(t, d, self.tables.chosen(u, w, t, d, i)) for i, (u, w) in _stages(sets)][::-1]
                plans.append((check_plan(self.problem, stages), number, stages))
        return min(plans)[2] if plans else None

    def _fits(self, t: int, in_flight: int, u: int, w: int) -> bool:
        return self.tables.room_for(u, w, t) >= in_flight

    def _even_sets(self, count: int) -> list[int]:
        """Return sets of which each holds the one before, from none to all layers, with about the same work between
        them; nothing where there are too few."""
        work, places = self.tables.work, [0]
        for i in range(1, count):
            apart = np.where(self.tables.inside[:, places[-1]], np.abs(work - work[-1] * i / count), inf)
            apart[-1] = inf
            places.append(int(apart.argmin()))
            if apart[places[-1]] == inf:
                return []
        return [*places, len(work) - 1]

    def _questions(self) -> Iterator[float]:
        """Yield times to ask for, until what is possible and what is not are close.

        They grow from the bound on, as low ones are answered soon, and then lie in the middle.
        """
        growth = _FIRST
        while 0 < self.assumed * (1 + growth) < self.value:
            yield self.assumed * (1 + growth)
            growth *= 2
        while self.value - self.assumed > 2 * CLOSE * self.value:
            # Many values are optimal as soon as they are near: ask for anything better at all.
            near = self.value - self.assumed <= _NEAR * self.value
            yield self.value * (1 - CLOSE) if near else (self.assumed + self.value) / 2

    def _within(self, within: float, hopeful: bool = False) -> list[JointStage] | None:
        """Return a plan whose stages take no more than a time each."""
        tables, problem = self.tables, self.problem
        tables.uncertain = False
        spread = self._devices_left(within)
        fewest: list[_Fewest | None] = [None] * len(tables.sets)
        fewest[0] = _Fewest(np.zeros(self.sums + 1, np.int32), np.zeros(self.sums + 1, np.int32))
        degrees = sorted(
            (t * d, d, t) for t in problem.tensor_degrees for d in problem.data_degrees if t * d <= problem.devices
        )
        reach = [(t, d, tables.least(t, d) <= within * (1 + 1e-12)) for _, d, t in degrees]
        for u in range(1, len(tables.sets)):
            if self.progress is not None:
                self.progress(u, len(tables.sets), "sets of layers planned")
            here = _Fewest(np.full(self.sums + 1, _NONE), np.zeros(self.sums + 1, np.int32))
            left = problem.devices - spread[u]
            possible = np.array([table[u] for _, _, table in reach])
            for w in np.flatnonzero(possible.any(axis=0)).tolist():
                behind = fewest[w]
                if behind is not None:
                    chances = [(t, d) for (t, d, _), there in zip(reach, possible[:, w], strict=True) if there]
                    self._extend(u, w, chances, here, behind, left, within, hopeful)
            here.devices[here.devices > left] = _NONE
            if here.devices.min() < _NONE:
                here.devices = np.minimum.accumulate(here.devices)
                fewest[u] = here
        return self._stages(fewest)

    def _extend(
        self,
        u: int,
        w: int,
        degrees: list[tuple[int, int]],
        here: _Fewest,
        behind: _Fewest,
        left: int,
        within: float,
        hopeful: bool,
    ) -> None:
        """Put a stage before a set, under all degrees; those that take fewer devices come first.

        Degrees are of no use if others took no more devices, no more of the sum, and allow as large a sum.
        """
        left -= int(behind.devices[-1])
        furthest: list[tuple[int, int]] = []
        for t, d in degrees:
            if t * d > left:
                break
            best = max((last for other, last in furthest if other <= d), default=0)
            last = min(self.sums, d * self.tables.room_for(u, w, t))
            if last <= max(best, d - 1):
                continue
            in_flight = self.tables.in_flight_most(u, w, t, d, -(-last // d), within, hopeful)
            last = min(self.sums, d * in_flight)
            if last > max(best, d - 1):
                here.add(behind.devices, d, last, (w, t, d))
                furthest.append((d, last))

    def _devices_left(self, within: float) -> list[int]:
        """Return for each set how many devices all other layers need at least."""
        if within == inf:
            return [0] * len(self.tables.sets)
        others = (self.tables.work[-1] - self.tables.work) / within
        return [max(0, ceil(each * (1 - 1e-9) - 1e-9)) for each in others]

    def _stages(self, fewest: list[_Fewest | None]) -> list[JointStage] | None:
        """Follow the stages of all layers from the first on."""
        u, s = len(self.tables.sets) - 1, self.sums
        stages: list[JointStage] = []
        here = fewest[u]
        if here is None:
            return None
        while here is not None and u:
            # Counts are those of a sum and of all smaller ones.
            s = _first(here.devices, s)
            w, t, d = here.stages[here.stage[s]]
            stages.append(JointStage(t, d, self.tables.chosen(u, w, t, d, -(-s // d))))
            u, s, here = w, s - d, fewest[w]
        return stages


def _stages(sets: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the stages between sets, the last stage first: the microbatches in flight of equal degrees, and both
    sets, the larger one first."""
    for i, (smaller, larger) in enumerate(pairwise(sets)):
        yield i + 1, (larger, smaller)


def _first(counts: Counts, s: int) -> int:
    """Return the smallest sum with the count that a sum has; counts do not grow with sums."""
    return int(np.flatnonzero(counts[: s + 1] == counts[s])[0])
