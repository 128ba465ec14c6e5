"""The search: find the best plan of one schedule, microbatch size and layout. In: matrices of stages (stages.py), a
layout. Out: plans and a lower bound.

A dynamic programme places stages from the last one to the first. State: a node of the layout (devices used, devices of
the stage placed last) and the first layer of that stage. Under a limit T on what must not be exceeded it minimises one
number per state. Every quantity of the cost model is either such a limit or grows with that number, so the state holds
nothing else:

    2bw, eager-2bw   limits: r x <= T, A <= T, m l <= T. The number is the worst round trip that ends here,
                     e = r x + max(0, m c + e' - k T r'), which must stay below r T: e' and r' are those of the stage
                     behind. A plan exists iff some state at layer 0 is left: bisection finds the least T.
    the others       limits: the maximum of the formula of cost.py <= T. The number is its sum, so sum + T bounds all
                     plans whose maximum is at most T; intervals of T are split until none can hold a better plan
                     (branch and bound).

Both end when no plan is better by more than `tolerance`. The search does not see the sums of stages on one NIC
(`Judged.pipe`): the bound leaves them out, plans are compared with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from penstock.passes.schedules.schedule import SCHEDULES

from .chain import Floats, Table
from .cost import hop_of, judge, ring_of
from .fleet import Fleet, Hop
from .layouts import DeviceLayout, LayoutEdge
from .plan import Judged, PipelinePlan, StagePlan
from .stages import Option, Stages, UnequalOption


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan of a search with its evaluation. No plan of this search takes less than `bound`."""

    plan: PipelinePlan | None
    judged: Judged | None
    bound: float

    @property
    def step(self) -> float:
        return self.judged.step if self.judged is not None else np.inf


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds on the seconds of all plans: per batch, and, for schedules that drain, in the maximum and in the
    sum."""

    step: float
    pace: float
    fill: float


def reaches(stages: Stages, layout: DeviceLayout, ends: Sequence[int]) -> bool:
    """Return whether any plan of a layout fits into memory, at a small part of the cost of a `LayoutSearch`."""
    reachable = np.zeros((len(layout.last), stages.table.count + 1), np.bool_)
    reachable[0, -1] = True
    for edge in layout.edges:
        behind = reachable[edge.source]
        if behind.any():
            reachable[edge.target] |= (stages.fitting(edge.devices, edge.later, edge.ahead) & behind).any(1)
    return any(reachable[end, 0] for end in ends)


# A limit that no plan reaches, in seconds; finite, so that sums and differences are.
FREE = 1e30


# An interval of the maximum is wide that is so large a part of the best time.
_WIDE = 0.04
# An interval is searched again at once where the last search took at least so much of it away.
_SHRUNK = 0.2


class StageSearch:
    """The search over one schedule and m. Its dynamic programme, `under` a limit, is that of its kind. It is `complete`
    where it left nothing out; without, no bound follows from what it did not find. `dropped` says whether any pass
    of it left something out."""

    def __init__(self, table: Table, fleet: Fleet, stages: Stages) -> None:
        self.table, self.fleet, self.stages = table, fleet, stages
        self.schedule, self.count, self.wanted = stages.schedule, stages.count, stages.wanted
        self.row = SCHEDULES[self.schedule]
        self.delayed, self.kept = bool(self.row.delay), float(self.row.eagerness)
        self.value, self.complete, self.dropped, self.foresees = 0.0, True, False, False
        # The best plan so far.
        self.seen: tuple[PipelinePlan, Judged] | None = None
        self._trips: dict[object, tuple[Floats, Floats]] = {}

    def under(self, limit: float, most: float = np.inf) -> PipelinePlan | None:
        """Return the plan with the least sum (or round trip) whose parts stay below the limit. One with a sum above
        `most` need not be found."""
        raise NotImplementedError

    def least_sum(self, limit: float) -> float:
        """Return what no sum under a limit is below, where the search `foresees` that."""
        return 0.0

    def _boundary(self, hop: Hop) -> tuple[Floats, Floats]:
        """Return round trips and loads of a microbatch at every position."""
        key = hop.ways, hop.busy
        if key not in self._trips:
            out, back = self.table.out.astype(np.float64), self.table.back.astype(np.float64)
            outward = np.max([np.where(out > 0, latency + out / speed, 0.0) for latency, speed, _, _ in hop.ways], 0)
            homeward = np.max([np.where(back > 0, latency + back / speed, 0.0) for _, _, latency, speed in hop.ways], 0)
            load = np.max([(out * forward + back * backward) / speed for forward, backward, speed in hop.busy], 0)
            self._trips[key] = outward + homeward, load
        return self._trips[key]

    # ---------------------------------------------------------------------------------- bisection, branch and bound

    def best(self, below: float, floor: Floor, tolerance: float) -> Found:
        """Return the plan that takes least, to a part of `tolerance`, if any takes less than `below`."""
        return self._bisect(below, floor.step, tolerance) if self.delayed else self._branch(below, floor, tolerance)

    def any(self) -> tuple[PipelinePlan, Judged] | None:
        """Return a plan that fits into memory, if there is one."""
        plan = self.under(FREE)
        return None if plan is None else (plan, self._judged(plan))

    def _bisect(self, below: float, low: float, tolerance: float) -> Found:
        best = Found(None, None, below)
        high, proven = below, low
        first = True
        while first or high - low > tolerance * high:
            # The first step tests whether any better plan exists.
            limit = min(high * (1 - tolerance), FREE) if first else (low + high) / 2
            first = False
            plan = self.under(limit)
            if plan is None:
                if limit == FREE:
                    return Found(None, None, np.inf if self.complete else proven)
                low = limit
                proven = low if self.complete else proven
                continue
            judged = self._judged(plan)
            assert judged.pipe <= limit * (1 + 1e-9), (judged.pipe, limit, plan)
            high = min(judged.pipe, limit)
            if judged.step < best.step:
                best = Found(plan, judged, 0.0)
        return Found(best.plan, best.judged, min(proven, below))

    def _branch(self, below: float, floor: Floor, tolerance: float) -> Found:
        best, bar = Found(None, None, below), below
        # Intervals (bound, lower end, upper end) of the maximum, the most promising first.
        heap: list[tuple[float, float, float]] = []
        # The least bound of the intervals that were not searched completely.
        unproven = np.inf

        def explore(low: float, high: float) -> None:
            nonlocal best, bar, unproven
            while high > low:
                plan = self.under(high, bar * (1 - tolerance) - low)
                if not self.complete:
                    unproven = min(unproven, max(floor.step, low + floor.fill))
                if plan is None:
                    return
                judged, total, before = self._judged(plan), self.value, high
                bar = min(bar, judged.pipe)
                if judged.step < best.step:
                    best = Found(plan, judged, 0.0)
                # Plans with a maximum above that of this plan are no better than it, nor those for which maximum and
                # this sum are too much.
                high = min(judged.pipe - total, bar * (1 - tolerance) - total, high)
                if low < high and before - high < _SHRUNK * (before - low):
                    middle = (low + high) / 2
                    heappush(heap, (max(floor.step, total + middle), middle, high))
                    heappush(heap, (max(floor.step, total + low), low, middle))
                    return

        heappush(heap, (floor.step, floor.pace, min(below - floor.fill, FREE)))
        while heap:
            bound, low, high = heappop(heap)
            if bound >= bar * (1 - tolerance):
                break
            if self.foresees and high - low > _WIDE * bar:
                # Without a search, as one of narrow intervals leaves much more out.
                middle = (low + high) / 2
                heappush(heap, (max(bound, middle + self.least_sum(high)), middle, high))
                heappush(heap, (max(bound, low + self.least_sum(middle)), low, middle))
            else:
                explore(low, high)
        return Found(best.plan, best.judged, min(bar * (1 - tolerance), below, unproven))

    def _judged(self, plan: PipelinePlan) -> Judged:
        judged = judge(self.table, self.fleet, plan, self.wanted.base)
        assert not judged.against, (judged.against, plan)
        if self.seen is None or judged.step < self.seen[1].step:
            self.seen = plan, judged
        return judged

    def _plan(self, stages: Sequence[StagePlan]) -> PipelinePlan:
        level = self.wanted.zero if any(len(stage.devices) > 1 for stage in stages) else 0
        return PipelinePlan(self.schedule, self.table.b, self.count, tuple(stages), level)

    def _stage(
        self, devices: tuple[int, ...], later: int, ahead: int, option: Option | UnequalOption, first: int, last: int
    ) -> StagePlan:
        shares = self.stages.shares(devices, later, ahead, option.recompute, first, last)
        return StagePlan(first, last, devices, shares, option.recompute, option.recompute and self.stages.in_parts)


class LayoutSearch(StageSearch):
    """The search over one layout. `ends` are the nodes at which a plan may end."""

    def __init__(self, table: Table, fleet: Fleet, stages: Stages, layout: DeviceLayout, ends: Sequence[int]) -> None:
        super().__init__(table, fleet, stages)
        self.layout, self.ends = layout, ends
        self.work: list[tuple[LayoutEdge, list[Option | UnequalOption], Floats, Floats]] = []
        zero = np.zeros(table.count + 1)
        for edge in layout.edges:
            options = stages.options(edge.devices, edge.later, edge.ahead, ring_of(fleet, edge.devices))
            if options:
                hop = hop_of(fleet, edge.devices, edge.behind) if edge.behind else None
                self.work.append((edge, options, *(self._boundary(hop) if hop is not None else (zero, zero))))

    # -------------------------------------------------------------------------------------------- the dynamic programme

    def under(self, limit: float, most: float = np.inf) -> PipelinePlan | None:
        """Return the plan with the least sum (or round trip) whose parts stay below the limit, whatever its sum."""
        positions = self.table.count + 1
        values = np.full((len(self.layout.last), positions), np.inf)
        values[0, -1] = 0.0
        came_from = np.zeros((len(self.layout.last), positions, 3), np.int64)
        rows = np.arange(positions)
        for number, (edge, options, trips, loads) in enumerate(self.work):
            reached = np.flatnonzero(np.isfinite(values[edge.source]))
            if not len(reached):
                continue
            # Only between these layers does the stage behind begin; this one begins in front of them.
            span = slice(reached[0], reached[-1] + 1)
            behind, target = values[edge.source, span], values[edge.target, : span.stop]
            for which, sums in self._placed(edge, options, (trips[span], loads[span], behind), limit, span):
                at = sums.argmin(1)
                best = sums[rows[: span.stop], at]
                better = np.flatnonzero(best < target)
                if len(better):
                    target[better] = best[better]
                    came_from[edge.target, better, 0] = number
                    came_from[edge.target, better, 1] = which
                    came_from[edge.target, better, 2] = at[better] + span.start
        if not self.ends:
            return None
        end = min(self.ends, key=lambda n: values[n, 0])
        self.value = float(values[end, 0])
        return self._traced(end, came_from) if np.isfinite(self.value) else None

    def _placed(
        self,
        edge: LayoutEdge,
        options: list[Option | UnequalOption],
        behind: tuple[Floats, Floats, Floats],
        limit: float,
        span: slice,
    ) -> Iterator[tuple[int, Floats]]:
        """Yield for every option of the edge the new values, by first layer and by first layer of the stage behind,
        which is in a span. There are round trips, loads and values of these, and no stage begins after the span."""
        replicas, m = len(edge.devices), self.count
        trips, loads, values = behind
        cells = slice(span.stop), span
        if self.delayed:
            follow = len(self.layout.last[edge.source])
            waits = np.maximum(m * trips + values - self.kept * (limit * follow), 0.0) if follow else values
            waits = np.where(m * loads <= limit, waits, np.inf)
            for which, option in enumerate(options):
                sums = option.cost[cells] + waits[None, :]
                allowed = sums <= limit * replicas
                if option.ring is not None:
                    allowed &= option.ring[cells] <= limit * replicas
                yield which, np.where(allowed, sums, np.inf)
            return
        more = (-(-m // replicas) - 1) * trips if self.row.bounded else 0.0 * trips
        start = np.where((m - 1) * loads <= limit, values + trips, np.inf)
        for which, option in enumerate(options):
            allowed = option.pace[cells] + more[None, :] <= limit
            yield which, np.where(allowed, option.cost[cells] + start[None, :], np.inf)

    def _traced(self, end: int, came_from: np.ndarray) -> PipelinePlan:
        stages: list[StagePlan] = []
        node, first = end, 0
        while node:
            number, which, last = (int(x) for x in came_from[node, first])
            edge, options, _, _ = self.work[number]
            stages.append(self._stage(edge.devices, edge.later, edge.ahead, options[which], first, last))
            node, first = edge.source, last
        return self._plan(stages)
