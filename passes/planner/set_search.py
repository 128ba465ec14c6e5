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
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .chain import Floats, Table
from .fleet import Fleet
from .layouts import DeviceSets, Numbers
from .plan import Judged, PipelinePlan, StagePlan
from .search import FREE, Floor, Found, StageSearch
from .stages import Option, Stages, UnequalOption
from .tables.cells import StageCells
from .tables.least import Singles, least_of_groups
from .tables.limits import RangeLimits

Bools = npt.NDArray[np.bool_]
# The most states with as many devices that are kept, where all choices of devices are searched and where not; the most
# rows of candidates that are made at a time; the most candidates of a search, after which it ends with what it has.
_STATES, _FEW_STATES, _ROWS, _ENOUGH = 40_000, 2000, 200_000, 60_000_000
# The most states that wait for their turn, and the most elements of a matrix over states and layers: 56 and some 60
# bytes each.
_WAITING, _CELLS = 3_000_000, 2_000_000
# The most blocks of layers, and elements, of sums over sets; those that are kept for limits that are asked for again.
_MOST_BLOCKS, _MOST_ADDED, _REMEMBERED = 30, 20_000_000, 2_000_000
# Bounds are computed in another order than what they bound.
_SLACK = 1 + 1e-9
# What stands for options that nobody asked for.
_UNASKED = -2
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
        numbers = np.flatnonzero(which) if which.dtype == np.bool_ else which
        return States(*(getattr(self, name).take(numbers) for name in self.__slots__))


class PairTable:
    """Pairs of arrays of one shape in one array, to look up elements of many at once, at first as many as `likely`."""

    def __init__(self, likely: int, shape: tuple[int, ...]) -> None:
        self.values, self._count = np.empty((2, likely, *shape)), 0

    def add(self, first: Floats, second: Floats) -> int:
        """Return the number of a new pair."""
        if self._count == self.values.shape[1]:
            self.values = np.concatenate([self.values, np.empty_like(self.values)], 1)
        self.values[0, self._count], self.values[1, self._count] = first, second
        self._count += 1
        return self._count - 1

    def look(self, numbers: Numbers, *at: Numbers) -> tuple[Floats, Floats]:
        """Return the elements of pairs at some places."""
        return self.values[0][numbers, *at], self.values[1][numbers, *at]


def _joined(parts: Sequence[States]) -> States:
    return States(*(np.concatenate([getattr(part, name) for part in parts]) for name in States.__slots__))


class SetSearch(StageSearch):
    """The search over every set of devices at which a plan may end: `ends` says which these are."""

    def __init__(self, table: Table, fleet: Fleet, stages: Stages, sets: DeviceSets, ends: Bools) -> None:
        super().__init__(table, fleet, stages)
        self.sets, self.ends = sets, ends
        self.candidates, self.few, self.few_states = 0, False, _FEW_STATES
        self._reached: dict[float, Numbers] = {}
        self._lowest: dict[float, Numbers] = {}
        self._sums: dict[float, Floats] = {}
        self._options: dict[tuple[int, int, int], list[Option | UnequalOption]] = {}
        self._cells = StageCells(stages, len(sets.groups))
        # The numbers of options there, by devices of later stages: as [option, group, forwards in hand].
        self._numbers: dict[int, Numbers] = {}
        # Round trips and loads of boundaries between groups, and the row of each boundary here by its number.
        self._trip_rows, self._row_of = PairTable(16, (table.count + 1,)), np.full(16, -1)
        trips = self._least_trips()
        # What no stage of each group is below for layers y .. x - 1, as [group, y, x].
        self.paces, costs = self._least(trips)
        self.costs = costs if not self.delayed else costs[:0]
        self._limits = RangeLimits(self.paces)
        # The first positions of blocks, for sums over sets.
        self.blocks = np.unique(
            np.linspace(0, table.count, min(table.count, _MOST_BLOCKS) + 1).round().astype(np.int64)
        )
        self.foresees = len(sets.source) * len(self.blocks) ** 2 <= _MOST_ADDED and not self.delayed
        self.remainder = np.zeros((sets.count, table.count + 1)) if self.delayed else self._remainder(trips)

    # -------------------------------------------------------------------------------------------- bounds

    def _least_trips(self) -> Floats:
        """Return the least round trip that a message over each boundary can take."""
        ways = {hop.ways: hop for hop in self.sets.single_hops()}
        return np.min([self._boundary(hop)[0] for hop in ways.values()], 0) if ways else np.zeros(self.table.count + 1)

    def _least(self, trips: Floats) -> tuple[Singles, Singles]:
        groups = range(len(self.sets.groups))
        return least_of_groups(
            self.stages, [self.sets.devices(g) for g in groups], [self.sets.ring(g) for g in groups], trips
        )

    def _remainder(self, trips: Floats) -> Floats:
        """Return the least sum that stages with the first x layers add, with the message behind them, on the devices
        that are not in a set: each layer on the fastest one."""
        kinds = [members[0] for members in self.sets.classes]
        rows = np.stack([self.stages.least_sum(kind) for kind in kinds])
        layers = np.full((1, rows.shape[1]), np.inf)
        for members, row in zip(self.sets.classes, rows, strict=True):
            # Sets of the classes until now, with no, one, ... devices of this one; the last ones have every one of it.
            layers = np.concatenate([*[np.minimum(layers, row)] * len(members), layers])
        sums = np.concatenate([np.zeros((len(layers), 1)), np.cumsum(layers, 1)], 1)
        sums = np.maximum(sums, 0.0) + trips
        sums[:, 0] = 0.0
        return np.asarray(sums, np.float64)

    def least_sum(self, limit: float) -> float:
        """Return what no sum under a limit is below."""
        return float(self._left(limit)[self.sets.left_out, -1])

    def _left(self, limit: float) -> Floats:
        """Return the same under a limit: no group takes more layers than it allows."""
        if not self.foresees:
            return self.remainder
        if limit not in self._sums:
            pace, cost = self._block_least
            each = np.where(pace <= limit * _SLACK, cost, np.inf)
            block = np.searchsorted(self.blocks, np.arange(self.table.count + 1), "right") - 1
            while self._sums and (len(self._sums) + 1) * self.remainder.size > _REMEMBERED:
                del self._sums[next(iter(self._sums))]
            self._sums[limit] = np.maximum(self.sets.sums(each)[::-1][:, block], self.remainder)
        return self._sums[limit]

    @cached_property
    def _block_least(self) -> tuple[Floats, Floats]:
        """Return for each group what no stage from one block of layers to another is below: pace and cost."""
        parts = [slice(*ends) for ends in pairwise([*self.blocks.tolist(), self.table.count + 1])]

        def least_of(each: Singles) -> Floats:
            rows = np.stack([each[:, part].min(1) for part in parts])
            columns = np.ascontiguousarray(rows.transpose(2, 1, 0))
            return np.stack([columns[part].min(0) for part in parts], 2).astype(np.float64)

        return least_of(self.paces), least_of(self.costs)

    @cached_property
    def speeds(self) -> tuple[Floats, Floats]:
        """Return the time of the first x layers on a typical device, and how many of these the devices outside of each
        set are."""
        rows = [self.stages.least_sum(members[0]) for members in self.sets.classes]
        totals = np.array([max(float(row.sum()), 1e-300) for row in rows])
        left = np.array([len(members) for members in self.sets.classes]) - self.sets.digits
        typical = rows[int(totals.argmin())]
        return np.concatenate([[0.0], np.cumsum(typical)]), np.asarray(left @ (totals.min() / totals))

    def _reach(self, limit: float) -> Numbers:
        """Return how many of the first layers each set of devices gets through under a limit, without waiting for
        messages."""
        if limit not in self._reached:
            reach = self._limits.reach(limit * _SLACK, len(self.sets.source))
            self._reached = {limit: self.sets.reached(reach)}
        return self._reached[limit]

    def _begins(self, limit: float) -> Numbers:
        """Return the first layer with which each group gets to each layer under a limit."""
        if limit not in self._lowest:
            self._lowest = {limit: self._limits.begins(limit * _SLACK)}
        return self._lowest[limit]

    def _passes(self, limit: float) -> bool:
        return bool(self._reach(limit)[self.sets.count - 1 - self.sets.left_out] >= self.table.count)

    @property
    def elements(self) -> int:
        """Return about how many elements its matrices and those of its stages have."""
        return 2 * self.paces.size + self.remainder.size + self._cells.elements + self.stages.elements()

    def without(self, sets: DeviceSets, ends: Bools) -> SetSearch:
        """Return the same search for plans that leave devices out, or end with other sets."""
        other = copy(self)
        other.sets, other.ends = sets, ends
        other._reached, other._sums = {}, {}
        other.candidates, other.seen, other.complete, other.dropped = 0, None, True, False
        return other

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
        if not low and (plan := self._among_few()) is not None:
            return Found(plan, self._judged(plan), 0.0)
        return Found(None, None, below)

    def _among_few(self) -> PipelinePlan | None:
        """Return the plan with the least sum among few states. A search of all of them begins with what it takes."""
        whether, self.few = (self.candidates, self.complete, self.dropped), True
        plan = self.under(FREE)
        (self.candidates, self.complete, self.dropped), self.few = whether, False
        return plan

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
        unused = int(self.sets.used[self.sets.left_out])
        waiting[unused] = [
            States(nothing + self.sets.left_out, nothing - 1, nothing, start, np.zeros(1), nothing - 1, nothing)
        ]
        kept, base, best, count = list[States](), 0, None, 0
        for level in range(len(self.fleet)):
            if not waiting[level]:
                continue
            count -= sum(map(len, waiting[level]))
            states = self._promising(self._merged(_joined(waiting[level]), alike))
            waiting[level] = []
            kept.append(states)
            for placed in self._placed(states, base, level - unused, limit, most):
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
        order = np.argsort(key)
        starts = np.flatnonzero(np.diff(key[order], prepend=-1))
        value = states.value[order]
        least = np.repeat(np.minimum.reduceat(value, starts), np.diff(starts, append=len(order)))
        # Of equals the first.
        return states.only(np.minimum.reduceat(np.where(value == least, order, len(order)), starts))

    def _promising(self, states: States) -> States:
        """Return the states, where they are too many the most promising of them."""
        most = _STATES if self.sets.complete and not self.few else self.few_states
        if len(states) > most:
            self.complete, self.dropped = False, True
            if self.count == 1 and not self.delayed:
                # Nothing works side by side.
                promise = states.value + self.remainder[states.used, states.first]
            else:
                whole, speeds = self.speeds
                needed = whole[states.first] / np.maximum(speeds[states.used], 1e-9)
                scale = max(float(needed.min()), 1e-300)
                promise = needed / scale + (0.0 if self.delayed else states.value / (self.count * scale))
            states = states.only(np.sort(np.argsort(promise, kind="stable")[:most]))
        return states

    def _placed(self, states: States, base: int, level: int, limit: float, most: float) -> Iterator[States]:
        """Yield the states that one more stage leads to, in front of `level` devices; `base` is the number of the first
        of `states`."""
        sets, far, lowest = self.sets, self._reach(limit), self._begins(limit)
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
            low = lowest[group, states.first[which]]
            for part in self._by_cells(top + 1 - low):
                at, to = which[part], used[part]
                behind = States(to, group[part], ahead[part], states.first[at], states.value[at], at, states.group[at])
                yield from self._choices(behind, low[part], top[part], level, limit, most, base)

    def _by_cells(self, counts: Numbers) -> Iterator[Numbers]:
        """Yield rows one after another, so many at a time as do not have too many cells."""
        sums = np.cumsum(counts)
        yield from np.split(np.arange(len(counts)), np.flatnonzero(np.diff(sums // _CELLS)) + 1) if len(counts) else ()

    def _choices(
        self, rows: States, low: Numbers, top: Numbers, level: int, limit: float, most: float, base: int
    ) -> Iterator[States]:
        """Yield the states of one more stage. In `rows` first layer, value, number and group are those of the stage
        behind, the others its own; it begins between the layers `low` and `top`."""
        replicas, m = self.sets.replicas[rows.group], self.count
        trips, loads = self._crossed(rows.group, rows.option, rows.first)
        if self.delayed:
            follow = np.where(rows.option < 0, 0, self.sets.replicas[rows.option])
            waits = np.maximum(m * trips + rows.value - self.kept * limit * follow, 0.0)
            start = np.where(m * loads <= limit, np.where(follow > 0, waits, rows.value), np.inf)
        else:
            start = np.where((m - 1) * loads <= limit, rows.value + trips, np.inf)
        more = (-(-m // replicas) - 1) * trips if self.row.bounded else 0.0 * trips
        counts = top + 1 - low
        row = np.repeat(np.arange(len(rows)), counts)
        column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - low, counts)
        legal = (column > 0) | self.ends[rows.used[row]]
        row, column = row[legal], column[legal]
        for which, numbers in enumerate(self._numbered(rows, level)):
            has = numbers[row] >= 0
            if not has.any():
                continue
            at, first = (row, column) if has.all() else (row[has], column[has])
            cost, other = self._cells.look(numbers[at], first, rows.first[at])
            sums = cost + start[at]
            if self.delayed:
                allowed = np.maximum(sums, other) <= limit * replicas[at]
            else:
                allowed = (other + more[at] <= limit) & (
                    sums + self._left(limit)[rows.used[at], first] <= most * _SLACK
                )
            at, first, sums = at[allowed], first[allowed], sums[allowed]
            if len(at):
                yield States(
                    rows.used[at],
                    rows.group[at],
                    rows.ahead[at],
                    first,
                    sums,
                    base + rows.behind[at],
                    np.full(len(at), which),
                )

    def _numbered(self, rows: States, level: int) -> Numbers:
        """Return the numbers of the options of the stage of each row, as [option, row]; -1 where it has fewer."""
        level = level if self.row.splits else 0
        known, most = self._numbers.get(level), int(rows.ahead.max(initial=0)) + 1
        if known is None or known.shape[2] < most:
            # A stage has two options at most: computed again or not.
            known = np.full((2, len(self.sets.groups), 2 * most), _UNASKED)
            self._numbers[level] = known
        if (new := np.flatnonzero(known[0, rows.group, rows.ahead] == _UNASKED)).size:
            for group, ahead in {*zip(rows.group[new].tolist(), rows.ahead[new].tolist(), strict=True)}:
                numbers = [self._cells.number(option) for option in self._options_of(group, level, ahead)]
                known[:, group, ahead] = [*numbers, -1, -1][:2]
        return known[:, rows.group, rows.ahead]

    def _options_of(self, group: int, level: int, ahead: int) -> list[Option | UnequalOption]:
        """Return the options of a stage on a group, in front of so many devices."""
        key = group, level if self.row.splits else 0, ahead
        if key not in self._options:
            self._options[key] = self.stages.options(self.sets.devices(group), level, ahead, self.sets.ring(group))
        return self._options[key]

    def _crossed(self, group: Numbers, behind: Numbers, at: Numbers) -> tuple[Floats, Floats]:
        """Return round trip and load of a message from each group to the one behind it, at these layers."""
        if not len(at) or behind[0] < 0:
            return np.zeros(len(at)), np.zeros(len(at))
        numbers, hops = self.sets.hop_numbers(group, behind)
        if len(hops) > len(self._row_of):
            self._row_of = np.concatenate([self._row_of, np.full(len(hops), -1)])
        for number in np.unique(numbers[self._row_of[numbers] < 0]).tolist():
            self._row_of[number] = self._trip_rows.add(*self._boundary(hops[number]))
        return self._trip_rows.look(self._row_of[numbers], at)

    def _traced(self, states: States, end: States) -> PipelinePlan:
        stages: list[StagePlan] = []
        state, at, first = end, 0, 0
        unused = self.sets.used[self.sets.left_out]
        while state.behind[at] >= 0:
            group, ahead, behind = int(state.group[at]), int(state.ahead[at]), int(state.behind[at])
            used, last = int(states.used[behind]), int(states.first[behind])
            devices, later = self.sets.devices(group, used), int(self.sets.used[used] - unused)
            option = self._options_of(group, later, ahead)[int(state.option[at])]
            stages.append(self._stage(devices, later, ahead, option, first, last))
            state, at, first = states, behind, last
        return self._plan(stages)
