"""The search over sets of devices: the best plan of one schedule and microbatch size, whatever devices its stages take.

In: matrices of stages (stages.py), sets and groups of devices (layouts.py). Out: plans and a lower bound.

Stages are placed from the last one to the first, as in search.py. A state is the set of devices used, the group placed
last, its forwards in hand, and the first layer of its stage. Only states that can still become a plan are kept:

    reach        Without messages, group g gets from layer y to some layer at most, under the limit T. A dynamic
                 programme over sets says how far each set gets from layer 0. A state whose first layer is further than
                 what the devices that are left can reach has no plan below T.
    remainder    For schedules that drain: the sum so far, and the layers left, each on the fastest device left.

Both are bounds, so nothing is lost. States are merged where they differ in the group placed last alone, and messages to
either are alike. Where more states are left than are kept, those go whose remaining layers are most for the devices
left; then the search proves nothing (`complete` is false), and its bound is that of `reach`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .chain import Floats, Table
from .fleet import Fleet
from .layouts import DeviceSets, Numbers
from .plan import Judged, PipelinePlan, StagePlan
from .search import FREE, Floor, Found, StageSearch
from .stages import Option, Stages

Bools = npt.NDArray[np.bool_]
# The most states with as many devices that are kept, where all choices of devices are searched and where not; the most
# rows of candidates that are made at a time; the most candidates of a search, after which it ends with what it has.
_STATES, _FEW_STATES, _ROWS, _ENOUGH = 40_000, 2000, 200_000, 60_000_000
# The most states that wait for their turn, and the most elements of a matrix over states and layers: 56 and some 60
# bytes each.
_WAITING, _CELLS = 3_000_000, 2_000_000
# The most blocks of layers, and elements, of sums over sets.
_MOST_BLOCKS, _MOST_ADDED = 40, 20_000_000
# The most elements of sums over sets that are kept, for limits that are asked for again.
_REMEMBERED = 2_000_000
# Bounds are computed in another order than what they bound.
_SLACK = 1 + 1e-9
# The first limits, as multiples of the bound, and the precision of that.
_FIRST = (1.01, 1.05, 1.15, 1.4, 2.0, 4.0)
_PRECISION, _ROUGH = 1e-5, 5e-3


@dataclass(frozen=True, slots=True)
class States:
    """States with equally many devices: set, group placed last, forwards in hand, first layer, value; the number of the
    state behind, and of the option of its stage."""

    used: Numbers
    group: Numbers
    ahead: Numbers
    first: Numbers
    value: Floats
    behind: Numbers
    option: Numbers

    def __len__(self) -> int:
        return len(self.used)

    def only(self, which: Numbers | Bools) -> States:
        return States(*(getattr(self, name)[which] for name in self.__slots__))


def _joined(parts: Sequence[States]) -> States:
    return States(*(np.concatenate([getattr(part, name) for part in parts]) for name in States.__slots__))


class SetSearch(StageSearch):
    """The search over every set of devices at which a plan may end: `ends` says which these are."""

    def __init__(self, table: Table, fleet: Fleet, stages: Stages, sets: DeviceSets, ends: Bools) -> None:
        super().__init__(table, fleet, stages)
        self.sets, self.ends = sets, ends
        self.candidates = 0
        self._reached: dict[float, tuple[Numbers, Numbers]] = {}
        self._sums: dict[float, Floats] = {}
        self._options: dict[tuple[int, int, int], list[Option]] = {}
        # The boundaries between groups: their numbers, and their round trips and loads.
        self._crossings = np.full((len(sets.groups), len(sets.groups)), -1, np.int64)
        self._numbers: dict[int, int] = {}
        self._rows = np.zeros((2, 16, table.count + 1))
        trips = self._least_trips()
        # What no stage of each group is below for layers y .. x - 1, as [group, y, x].
        self.paces, self.costs = self._least(trips)
        # The first positions of blocks, for sums over sets.
        self.blocks = np.unique(
            np.linspace(0, table.count, min(table.count, _MOST_BLOCKS) + 1).round().astype(np.int64)
        )
        self.foresees = len(sets.source) * len(self.blocks) ** 2 <= _MOST_ADDED and not self.delayed
        self.remainder = np.zeros((sets.count, table.count + 1)) if self.delayed else self._remainder(trips)
        self.speeds = self._speeds()

    # -------------------------------------------------------------------------------------------- bounds

    def _least_trips(self) -> Floats:
        """Return the least round trip that a message over each boundary can take."""
        ways = {hop.ways: hop for hop in self.sets.single_hops()}
        return np.min([self._boundary(hop)[0] for hop in ways.values()], 0) if ways else np.zeros(self.table.count + 1)

    def _least(self, trips: Floats) -> tuple[Floats, Floats]:
        groups = range(len(self.sets.groups))
        pace, cost = self.stages.least([self.sets.devices(g) for g in groups], [self.sets.ring(g) for g in groups])
        if not self.delayed and self.row.bounded:
            waits = (-(-self.count // self.sets.replicas) - 1)[:, None, None]
            pace += waits * trips
        cost += trips
        return pace, cost

    def _remainder(self, trips: Floats) -> Floats:
        """Return the least sum that stages with the first x layers add, with the message behind them, on the devices
        that are not in a set: each layer on the fastest one."""
        kinds = [members[0] for members in self.sets.classes]
        rows = np.stack([self.stages.least_sum(kind) for kind in kinds])
        left = self.sets.digits < np.array([len(members) for members in self.sets.classes])
        layers = np.full((self.sets.count, rows.shape[1]), np.inf)
        for column, row in zip(left.T, rows, strict=True):
            layers[column] = np.minimum(layers[column], row)
        sums = np.concatenate([np.zeros((len(layers), 1)), np.cumsum(layers, 1)], 1)
        sums = np.maximum(sums, 0.0) + trips
        sums[:, 0] = 0.0
        return np.asarray(sums, np.float64)

    def least_sum(self, limit: float) -> float:
        """Return what no sum under a limit is below."""
        return float(self._left(limit)[0, -1])

    def _left(self, limit: float) -> Floats:
        """Return the same under a limit: no group takes more layers than it allows."""
        if not self.foresees:
            return self.remainder
        if limit not in self._sums:
            each = np.where(self.paces <= limit * _SLACK, self.costs, np.inf)
            ends = np.append(self.blocks[1:], each.shape[1]) - 1
            for axis in (1, 2):
                parts = [self.blocks + k for k in range(int((ends - self.blocks).max()) + 1)]
                each = np.minimum.reduce([each.take(np.minimum(part, ends), axis) for part in parts])
            block = np.searchsorted(self.blocks, np.arange(self.table.count + 1), "right") - 1
            while self._sums and (len(self._sums) + 1) * self.remainder.size > _REMEMBERED:
                del self._sums[next(iter(self._sums))]
            self._sums[limit] = np.maximum(self.sets.sums(each)[::-1][:, block], self.remainder)
        return self._sums[limit]

    def _speeds(self) -> tuple[Floats, Floats]:
        """Return the time of the first x layers on a typical device, and how many of these the devices outside of each
        set are."""
        rows = [self.stages.least_sum(members[0]) for members in self.sets.classes]
        totals = np.array([max(float(row.sum()), 1e-300) for row in rows])
        left = np.array([len(members) for members in self.sets.classes]) - self.sets.digits
        typical = rows[int(totals.argmin())]
        return np.concatenate([[0.0], np.cumsum(typical)]), np.asarray(left @ (totals.min() / totals))

    def _reach(self, limit: float) -> tuple[Numbers, Numbers]:
        """Return how many of the first layers each set of devices gets through under a limit, without waiting for
        messages; and the first layer with which each group gets to each layer."""
        if limit not in self._reached:
            positions = np.arange(self.table.count + 1)
            fits = self.paces <= limit * _SLACK
            last = np.where(fits, positions, 0).max(2)
            reach = np.maximum.accumulate(np.maximum(last, positions), 1)
            lowest = np.where(fits.any(1), fits.argmax(1), self.table.count + 1)
            self._reached = {limit: (self.sets.reached(reach), lowest)}
        return self._reached[limit]

    def _passes(self, limit: float) -> bool:
        return bool(self._reach(limit)[0][-1] >= self.table.count)

    def least(self, low: float, below: float) -> float:
        """Return a limit below which there is no plan, `below` where there is none below that."""
        high = below if np.isfinite(below) else FREE
        if not self._passes(high):
            return below
        if self._passes(low):
            return low
        # Where groups are left out no bound follows from it.
        precision = _PRECISION if self.sets.complete else _ROUGH
        while high > low * (1 + precision) and high - low > 1e-15:
            middle = min((low * high) ** 0.5 if low > 0 and high / low > 4 else (low + high) / 2, high)
            if self._passes(middle):
                high = middle
            else:
                low = middle
        return low

    def best(self, below: float, floor: Floor, tolerance: float) -> Found:
        """Return the plan that takes least, to a part of `tolerance`, if any takes less than `below`."""
        if self.delayed:
            floor = Floor(self.least(floor.step, below), floor.pace, floor.fill)
        else:
            fill = max(floor.fill, self.least_sum(max(below, 0.0)))
            pace = self.least(floor.pace, max(below - fill, 0.0))
            floor = Floor(max(floor.step, pace + fill), pace, fill)
        if floor.step >= below * (1 - tolerance):
            return Found(None, None, min(floor.step, below))
        tolerance = tolerance if self.sets.complete else max(tolerance, _ROUGH)
        first = self._first(below, floor)
        better = super().best(min(below, first.step), floor, tolerance)
        return better if better.step < first.step else Found(first.plan, first.judged, better.bound)

    def _first(self, below: float, floor: Floor) -> Found:
        """Return a good plan under a limit close to the bound, where there is none yet."""
        if np.isfinite(below):
            return Found(None, None, below)
        low = floor.step if self.delayed else floor.pace
        for times in _FIRST if low else ():
            plan = self.under(low * times)
            if plan is not None:
                return Found(plan, self._judged(plan), 0.0)
        return Found(None, None, below)

    # -------------------------------------------------------------------------------------------- states

    def any(self) -> tuple[PipelinePlan, Judged] | None:
        """Return a plan that fits into memory, if there is one."""
        # What fits depends on how many devices the stage behind has, not on which.
        plan = self._states(FREE, np.inf, self.sets.replicas)
        return None if plan is None else (plan, self._judged(plan))

    def under(self, limit: float, most: float = np.inf) -> PipelinePlan | None:
        """Return the plan with the least sum (or round trip), if at most `most`, whose parts stay below the limit."""
        return self._states(limit, most, self.sets.alike)

    def _states(self, limit: float, most: float, alike: Numbers) -> PipelinePlan | None:
        """Search the states under a limit. Those are merged whose groups placed last are `alike`."""
        self.complete = self.candidates < _ENOUGH
        if not self.complete:
            self.dropped = True
            return None
        nothing, start = np.zeros(1, np.int64), np.array([self.table.count], np.int64)
        waiting: list[list[States]] = [[] for _ in range(len(self.fleet) + 1)]
        waiting[0] = [States(nothing, nothing - 1, nothing, start, np.zeros(1), nothing - 1, nothing)]
        kept, base, best, count = list[States](), 0, None, 0
        for level in range(len(self.fleet)):
            if not waiting[level]:
                continue
            count -= sum(map(len, waiting[level]))
            states = self._promising(self._merged(_joined(waiting[level]), alike))
            waiting[level] = []
            kept.append(states)
            for placed in self._placed(states, base, level, limit, most):
                ended = np.flatnonzero(placed.first == 0)
                if len(ended):
                    end = placed.only(ended[[placed.value[ended].argmin()]])
                    best = end if best is None or end.value[0] < best.value[0] else best
                more = placed.only(placed.first > 0)
                for size in np.unique(self.sets.used[more.used]):
                    waiting[size].append(more.only(self.sets.used[more.used] == size))
                count += len(more)
                if count > _WAITING:
                    waiting = [self._fewer(parts, alike) for parts in waiting]
                    count = sum(len(part) for parts in waiting for part in parts)
            base += len(states)
        if best is None:
            return None
        self.value = float(best.value[0])
        return self._traced(_joined(kept), best)

    def _fewer(self, parts: list[States], alike: Numbers) -> list[States]:
        """Return waiting states without those that another one is as good as, and no more than are waited for."""
        if not parts:
            return parts
        states = self._merged(_joined(parts), alike)
        return [states if len(states) * 2 * len(self.fleet) < _WAITING else self._promising(states)]

    def _merged(self, states: States, alike: Numbers) -> States:
        """Return the states without those that another one is as good as."""
        groups = np.where(states.group < 0, 0, alike[states.group])
        key = np.ravel_multi_index(
            (states.used, groups, states.ahead, states.first),
            (self.sets.count, int(groups.max()) + 1, int(states.ahead.max()) + 1, self.table.count + 1),
        )
        order = np.lexsort((states.value, key))
        return states.only(order[np.flatnonzero(np.diff(key[order], prepend=-1))])

    def _promising(self, states: States) -> States:
        """Return the states, where they are too many the most promising of them."""
        most = _STATES if self.sets.complete else _FEW_STATES
        if len(states) > most:
            self.complete, self.dropped = False, True
            whole, speeds = self.speeds
            needed = whole[states.first] / np.maximum(speeds[states.used], 1e-9)
            scale = max(float(needed.min()), 1e-300)
            promise = needed / scale + (0.0 if self.delayed else states.value / (self.count * scale))
            states = states.only(np.sort(np.argsort(promise, kind="stable")[:most]))
        return states

    def _placed(self, states: States, base: int, level: int, limit: float, most: float) -> Iterator[States]:
        """Yield the states that one more stage leads to; `base` is the number of the first of `states`."""
        sets, (far, lowest) = self.sets, self._reach(limit)
        degrees = sets.begin[states.used + 1] - sets.begin[states.used]
        rows = np.cumsum(degrees)
        for chunk in np.split(np.arange(len(states)), np.flatnonzero(np.diff(rows // _ROWS)) + 1):
            degree = degrees[chunk]
            which = np.repeat(chunk, degree)
            begun = np.repeat(sets.begin[states.used[chunk]] - (np.cumsum(degree) - degree), degree)
            pairs = begun + np.arange(len(which))
            group, used = sets.group[pairs], sets.target[pairs]
            top = far[sets.count - 1 - used]
            able = (lowest[group, states.first[which]] <= top) & ((top > 0) | self.ends[used])
            which, group, used, top = which[able], group[able], used[able], top[able]
            self.candidates += len(which)
            ready = np.where(states.group[which] < 0, 0, sets.replicas[states.group[which]])
            ahead = -(-(states.ahead[which] + 1) * ready // sets.replicas[group]) if level else 0 * group
            span = int(ahead.max(initial=0)) + 1
            order = np.argsort(group * span + ahead, kind="stable")
            case = (group * span + ahead)[order]
            for part in self._cases(order, case):
                at, to = which[part], used[part]
                one_case = States(
                    to, group[part], ahead[part], states.first[at], states.value[at], at, states.group[at]
                )
                yield from self._choices(one_case, top[part], level, limit, most, base)

    def _cases(self, order: Numbers, case: Numbers) -> Iterator[Numbers]:
        """Yield the rows of one case after another, of large cases some rows at a time."""
        most = max(1, _CELLS // (self.table.count + 1))
        for part in np.split(order, np.flatnonzero(np.diff(case)) + 1) if len(order) else ():
            yield from (part[start : start + most] for start in range(0, len(part), most))

    def _choices(
        self, rows: States, top: Numbers, level: int, limit: float, most: float, base: int
    ) -> Iterator[States]:
        """Yield the states of stages on one group with so many forwards in hand. In `rows` first layer, value, number
        and group are those of the stage behind; `top` is the last layer that a stage may begin at."""
        group, ahead, last = int(rows.group[0]), int(rows.ahead[0]), rows.first
        replicas, m = int(self.sets.replicas[group]), self.count
        low, high = int(self._reach(limit)[1][group, last].min()), int(top.max()) + 1
        columns = np.arange(low, high)
        trips, loads = self._crossed(group, rows.option, last)
        legal = (columns <= top[:, None]) & ((columns > 0) | self.ends[rows.used][:, None])
        more = (-(-m // replicas) - 1) * trips if self.row.bounded else 0.0 * trips
        if self.delayed:
            follow = np.where(rows.option < 0, 0, self.sets.replicas[rows.option])
            waits = np.maximum(m * trips + rows.value - self.kept * limit * follow, 0.0)
            start = np.where(m * loads <= limit, np.where(follow > 0, waits, rows.value), np.inf)
        else:
            start = np.where((m - 1) * loads <= limit, rows.value + trips, np.inf)
        for which, option in enumerate(self._options_of(group, level, ahead)):
            sums = option.cost[low:high, last].T + start[:, None]
            if self.delayed:
                allowed = legal & (sums <= limit * replicas)
                if option.ring is not None:
                    allowed &= limit * replicas >= option.ring[low:high, last].T
            else:
                allowed = legal & (option.pace[low:high, last].T + more[:, None] <= limit)
                allowed &= sums + self._left(limit)[rows.used, low:high] <= most * _SLACK
            row, column = np.nonzero(allowed)
            if len(row):
                yield States(
                    rows.used[row],
                    rows.group[row],
                    rows.ahead[row],
                    column + low,
                    sums[row, column],
                    base + rows.behind[row],
                    np.full(len(row), which),
                )

    def _options_of(self, group: int, level: int, ahead: int) -> list[Option]:
        """Return the options of a stage on a group, in front of so many devices."""
        key = group, level if self.row.splits else 0, ahead
        if key not in self._options:
            self._options[key] = self.stages.options(self.sets.devices(group), level, ahead, self.sets.ring(group))
        return self._options[key]

    def _crossed(self, group: int, behind: Numbers, at: Numbers) -> tuple[Floats, Floats]:
        """Return round trip and load of a message from a group to each of the groups behind it, at these layers."""
        if behind[0] < 0:
            return np.zeros(len(at)), np.zeros(len(at))
        numbers = self._crossings[group, behind]
        if (numbers < 0).any():
            for other in np.unique(behind[numbers < 0]):
                self._crossings[group, other] = self._number(self._boundary(self.sets.hop(group, int(other))))
            numbers = self._crossings[group, behind]
        return self._rows[0, numbers, at], self._rows[1, numbers, at]

    def _number(self, row: tuple[Floats, Floats]) -> int:
        """Return the number of a row of round trips and loads, which is kept once."""
        number = self._numbers.setdefault(id(row), len(self._numbers))
        if number == self._rows.shape[1]:
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)], 1)
        self._rows[:, number] = row
        return number

    def _traced(self, states: States, end: States) -> PipelinePlan:
        stages: list[StagePlan] = []
        state, at, first = end, 0, 0
        while state.behind[at] >= 0:
            group, ahead, behind = int(state.group[at]), int(state.ahead[at]), int(state.behind[at])
            used, last = int(states.used[behind]), int(states.first[behind])
            devices, later = self.sets.devices(group, used), int(self.sets.used[used])
            option = self._options_of(group, later, ahead)[int(state.option[at])]
            stages.append(self._stage(devices, later, ahead, option, first, last))
            state, at, first = states, behind, last
        return self._plan(stages)
