"""The planner: from a chain of layers and a fleet to the best plan, with a bound on its distance from the optimum.

For every schedule that may be used and every microbatch size a search finds the best plan. Where there are few sets of
devices, up to exchange of those that are alike, it is that over sets (set_search.py). With every group of devices as a
stage `bound` is that of the search, and a plan that reaches it is the best of the stated model (cost.py). With some
groups only, and in larger fleets, which are searched by rows of devices (layouts.py), the bound is

    m * seconds of a microbatch on the fastest device
      / sum over devices of how many times as fast as that one they can be on any layer

which no schedule and no cut can beat. NICs that several stages use are part of a plan's seconds and not of the search's
bound. So a plan may be above its bound in spite of a complete search. `proven` only holds for a plan that is not.

An interrupt ends a search, not planning: the best plan until then stays, with the bound that is known without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.passes.schedules.schedule import SCHEDULES
from penstock.support.errors import UsageError

from .chain import Chain, Table
from .fleet import Fleet
from .layouts import DeviceLayout, DeviceSets, device_sets, in_a_row, one_after_another, rows
from .plan import Judged, PipelinePlan, PlanRequest
from .search import Floor, Found, LayoutSearch, StageSearch, reaches
from .set_search import Bools, SetSearch
from .stages import Stages

# The most numbers of replicas that are tried for a row of devices.
_SIZES = 16
# The tolerance of a first, coarse search: its plan ends most of the fine searches at once.
_COARSE = 0.03
# The most elements of matrices of searches that are kept, eight bytes each.
_KEPT = 40_000_000
# The tolerance of searches in haste, and the most states of each of their steps where not every choice is searched.
_HURRIED, _HURRIED_STATES = 0.01, 300
# The most elements of a matrix over groups and ranges of layers with which each change is searched in full.
_QUICK = 1_000_000


Devices = Callable[[frozenset[int]], bool]
# Called with the number of cases done, the number of all cases, and a description of the current one.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best plan found of one schedule, among the choices of devices `layout`. No plan of it takes less than `bound`
    seconds per batch."""

    plan: PipelinePlan
    judged: Judged
    bound: float
    layout: DeviceLayout | DeviceSets

    @property
    def step(self) -> float:
        return self.judged.step

    def gap(self) -> float:
        """Return by which part of its time the plan may be slower than the best."""
        return max(0.0, 1 - self.bound / self.step)

    def proven(self, tolerance: float) -> bool:
        return self.layout.complete and self.gap() <= 2 * tolerance


class Planner:
    """The planner of one chain on one fleet. It runs searches, and keeps tables and layouts between them."""

    def __init__(self, chain: Chain, fleet: Fleet, wanted: PlanRequest, progress: Progress | None = None) -> None:
        if not len(fleet):
            raise UsageError("there are no devices to plan for")
        self.chain, self.fleet, self.wanted, self.progress = chain, fleet, wanted, progress
        self.kinds = fleet.kinds()
        self._tables: dict[int, Table] = {}
        self._speeds: dict[int, list[float]] = {}
        self._wholes: dict[int, float] = {}
        self._leasts: dict[int, float] = {}
        self._places: list[DeviceLayout | DeviceSets] = []
        self._costs: dict[tuple[str, int, int], Stages] = {}
        self._parts: Planner | None = None
        # An interrupt ends the search of the planner that is asked for the plan, and keeps what it saw. Planners that
        # are made of it compare: they leave interrupts to their callers.
        self.keeps_seen, self.stopped = True, False
        # Of a planner for good plans in a short time (`hurried`), the microbatches that plans may have.
        self.in_haste: tuple[int, ...] = ()
        # Whether a limit ended any search early.
        self._dropped = False
        # Devices that no plan may use. Of a part of a fleet without them, the numbers of its devices in the whole.
        self.left_out: frozenset[int] = frozenset()
        self._numbers: tuple[int, ...] = ()
        # Searches over sets of one schedule, for plans that leave devices out.
        self._kept: dict[tuple[str, int, int], SetSearch] = {}

    @property
    def sees_all(self) -> bool:
        """Return whether there is no plan where no search until now found one."""
        every = not self._dropped and not self.in_haste and self.places()[0].complete
        return every and (self._parts is None or self._parts.sees_all)

    @property
    def is_quick(self) -> bool:
        """Return whether every choice of devices is searched, and that takes so little that it may be done again for
        each change."""
        sets = self.places()[0]
        return (
            isinstance(sets, DeviceSets) and sets.complete and len(sets.groups) * len(self.chain.layers) ** 2 < _QUICK
        )

    def but(self, wanted: PlanRequest | None = None, memory: float = 1.0, progress: Progress | None = None) -> Planner:
        """Return a planner for another request, or for devices with so many times their memory. Tables and layouts that
        still hold are shared."""
        fleet = self.fleet if memory == 1 else self.fleet.with_memory(memory)
        other = Planner(self.chain, fleet, wanted or self.wanted, progress or self.progress)
        other._tables, other.keeps_seen, other.in_haste = self._tables, False, self.in_haste
        other.left_out, other._numbers = self.left_out, self._numbers
        places = self.places()
        if isinstance(places[0], DeviceSets) and other.wanted.replicas == self.wanted.replicas:
            # Memory is less for all devices alike, so those that are alike stay so.
            other._places = places
            wanted = other.wanted
            alike = replace(wanted, schedules=self.wanted.schedules, sizes=self.wanted.sizes)
            if memory == 1 and replace(alike, tolerance=self.wanted.tolerance) == self.wanted:
                other._kept = self._kept
        return other

    def hurried(self, plan: PipelinePlan) -> Planner:
        """Return a planner for good plans beside one that is there, where a search takes long: with the same
        microbatches, few states, and no search for what is better by less than some percent."""
        sizes, tolerance = self.wanted.microbatch_sizes(), max(self.wanted.tolerance, _HURRIED)
        other = self.but(replace(self.wanted, sizes=(plan.size,), tolerance=tolerance))
        other.in_haste = sizes
        return other

    def without(self, devices: Collection[int]) -> Planner:
        """Return a planner for the same fleet, whose plans leave some devices out, but not all. Where every choice of
        devices is searched, or in haste, it shares searches, too."""
        gone = self.left_out | set(devices)
        sets = self.places()[0]
        if isinstance(sets, DeviceSets) and (self.in_haste or sets.complete):
            other = self.but()
            other.left_out, other._places = gone, [sets.without(gone)]
            return other
        remaining = tuple(i for i in range(len(self.fleet)) if i not in gone)
        other = self.on(self.fleet.only(remaining))
        other._numbers = remaining
        return other

    def on(self, fleet: Fleet) -> Planner:
        """Return a planner for a fleet with other devices or paths. Tables are shared: times are those of devices."""
        other = Planner(self.chain, fleet, self.wanted)
        other._tables, other.keeps_seen, other.in_haste = self._tables, False, self.in_haste
        return other

    def of(self, chain: Chain) -> Planner:
        """Return a planner for the same request and fleet, of a chain with other costs."""
        other = Planner(chain, self.fleet, self.wanted)
        other.keeps_seen, other.in_haste = False, self.in_haste
        return other

    def alike(self) -> list[list[int]]:
        """Return groups of devices of which one stands for all: interchangeable devices, in large fleets all of one
        kind."""
        if isinstance(self.places()[0], DeviceSets):
            return self.fleet.classes()
        return [[i for i, k in enumerate(self.kinds) if k == kind] for kind in dict.fromkeys(self.kinds)]

    @property
    def orders_alike(self) -> bool:
        """Return whether plans with the replicas of a stage in another order take as long: where stages have one
        device, or all paths are alike."""
        count = len(self.fleet)
        if self.wanted.replicas == 1 or count < 3:
            return True
        first = self.fleet.path(0, 1)
        return all(self.fleet.path(a, b) == first for a in range(count) for b in range(count) if a != b)

    def table(self, b: int) -> Table:
        if b not in self._tables:
            self._tables[b] = Table(self.chain, b)
        return self._tables[b]

    def places(self) -> list[DeviceLayout | DeviceSets]:
        """Return the choices of devices to search: sets of them, or in large fleets rows."""
        if not self._places:
            speeds = self.speeds(min(self.wanted.microbatch_sizes()))
            sets = device_sets(self.fleet, speeds, self.wanted.replicas, len(self.chain.layers))
            self._places = list(self._rows(speeds)) if sets is None else [sets.without(self.left_out)]
        return self._places

    def _rows(self, speed: list[float]) -> Iterator[DeviceLayout]:
        fleet, layers = self.fleet, len(self.chain.layers)
        most = self.wanted.replicas or len(fleet)
        for name, row in rows(fleet, speed):
            # A row too long for as many layers and replicas leaves devices out. Fewer replicas than use all devices
            # are for many stages on microbatches that are few.
            sizes = sorted({min(len(row) // d, most) for d in range(1, min(layers, len(row)) + 1)})
            fewer = {-(-sizes[0] // 2**k) for k in range(1, sizes[0].bit_length() + 1)} - {sizes[0]}
            for size in (*sorted(fewer), *_thinned(sizes)):
                yield in_a_row(self.kinds, row, (size,), f"{name}, stages of {size}", layers)

    def speeds(self, b: int) -> list[float]:
        """Return how many times as fast as the fastest device each one can be on any layer, in microbatches of b
        samples; 1 for that device, up to 1 for slower ones."""
        if b not in self._speeds:
            self._speeds[b] = self._compared(self.table(b))
        return self._speeds[b]

    def _compared(self, table: Table) -> list[float]:
        times = {kind: table.times(self.fleet.devices[kind]) for kind in dict.fromkeys(self.kinds)}
        rows = {kind: forward + backward for kind, (forward, backward, *_) in times.items()}
        reference = np.diff(min(rows.values(), key=lambda sums: float(sums[-1])))
        speed_of = {}
        for kind, sums in rows.items():
            seconds = np.diff(sums)
            share = np.where(seconds > 0, reference / np.maximum(seconds, 1e-300), np.where(reference > 0, np.inf, 0.0))
            speed_of[kind] = float(share.max())
        return [speed_of[kind] for kind in self.kinds]

    def _least(self, b: int) -> float:
        """Return the seconds of a microbatch with every layer on the device that is fastest for it."""
        if b not in self._leasts:
            rows = [self.table(b).times(self.fleet.devices[kind]) for kind in dict.fromkeys(self.kinds)]
            self._leasts[b] = float(np.minimum.reduce([np.diff(row[0] + row[1]) for row in rows]).sum())
        return self._leasts[b]

    def _whole(self, b: int) -> float:
        """Return the seconds of a microbatch on the fastest device."""
        if b not in self._wholes:
            rows = [self.table(b).times(self.fleet.devices[kind]) for kind in dict.fromkeys(self.kinds)]
            self._wholes[b] = min(float(forward[-1] + backward[-1]) for forward, backward, *_ in rows)
        return self._wholes[b]

    def _in_parts(self, schedule: str) -> Planner | None:
        """Return the planner for recomputation in parts, for requests that nothing fits otherwise. Where
        weight gradients run apart, it counts on none."""
        if self.wanted.recompute != "auto" or not SCHEDULES[schedule].recomputes:
            return None
        if self._parts is None:
            self._parts = self.but(replace(self.wanted, recompute="parts"))
            self._parts.keeps_seen = self.keeps_seen
        return self._parts

    def best(self, schedule: str, using: Devices | None = None, below: float = np.inf) -> Outcome | None:
        """Return the best plan of one schedule on a set of devices that `using` allows, or None where none fits; with a
        limit on its time, None where none takes less."""
        outcome = self._best(schedule, using, below)
        return outcome if outcome is None or not self._numbers else _numbered(outcome, self._numbers)

    def _best(self, schedule: str, using: Devices | None, below: float) -> Outcome | None:
        tolerance, in_sets = self.wanted.tolerance, isinstance(self.places()[0], DeviceSets)
        outcome = self._pass(schedule, using, None, tolerance if in_sets else max(tolerance, _COARSE), below)
        if outcome is not None and not in_sets and tolerance < _COARSE and not self.stopped:
            outcome = self._pass(schedule, using, outcome, tolerance, below)
        if (
            outcome is None
            and not self.stopped
            and not np.isfinite(below)
            and (parts := self._in_parts(schedule)) is not None
        ):
            outcome = parts._best(schedule, using, np.inf)
            self.stopped = parts.stopped
        return outcome

    def candidates(self, schedule: str, within: float) -> list[Outcome]:
        """Return the best plans of all microbatch sizes and layouts that take no more than `within` times the best, the
        fastest first.

        They are for a judge that sees more than the cost model, such as the simulator.
        """
        best = self.best(schedule)
        if best is None:
            return []
        if any(stage.in_parts for stage in best.plan.stages) and (parts := self._in_parts(schedule)) is not None:
            return parts.candidates(schedule, within)
        outcomes = {best.plan: best}
        for b in self.wanted.microbatch_sizes():
            for layout in self.places():
                floor = self.floor(schedule, b, layout)
                if floor.step < best.step * within:
                    for search in self._searches(schedule, b, layout, None):
                        other = search.best(best.step * within, floor, _COARSE)
                        if other.plan is not None and other.judged is not None and other.step <= best.step * within:
                            outcomes.setdefault(other.plan, Outcome(other.plan, other.judged, best.bound, layout))
        return sorted(outcomes.values(), key=lambda outcome: outcome.step)

    def in_order(self, schedule: str, b: int, order: Sequence[int]) -> PipelinePlan | None:
        """Return the best plan whose stages take these devices in this order, one each."""
        outcome = self.in_groups(schedule, b, [(device,) for device in order], frozenset(order).__eq__)
        return None if outcome is None else outcome.plan

    def in_groups(
        self,
        schedule: str,
        b: int,
        groups: Sequence[tuple[int, ...]],
        using: Devices | None = None,
        below: float = np.inf,
    ) -> Outcome | None:
        """Return the best plan whose stages take these groups of devices in this order, on a set of devices that
        `using` allows, if it takes less than `below`. The first groups may stay without a stage."""
        layout = one_after_another(self.kinds, groups, "in order")
        floor, best = self.floor(schedule, b, layout), None
        for search in self._searches(schedule, b, layout, using):
            result = search.best(below, floor, self.wanted.tolerance)
            if result.plan is not None and result.judged is not None and result.step < below:
                best, below = Outcome(result.plan, result.judged, 0.0, layout), result.step
        if best is None and not np.isfinite(below) and (parts := self._in_parts(schedule)) is not None:
            return parts.in_groups(schedule, b, groups, using)
        return best

    def least(self, schedule: str) -> float:
        """Return what no plan of a schedule takes less than, whatever memory says."""
        return min(self.floor(schedule, b).step for b in self.in_haste or self.wanted.microbatch_sizes())

    def fits(self, schedule: str) -> Outcome | None:
        """Return any plan of the schedule that fits into memory."""
        for b in reversed(self.wanted.microbatch_sizes()):
            self._tell(schedule, b)
            for layout in self.places():
                for search in self._searches(schedule, b, layout, None):
                    fitting = search.any()
                    self._dropped |= search.dropped
                    if fitting is not None:
                        return Outcome(*fitting, 0.0, layout)
        parts = self._in_parts(schedule)
        return None if parts is None else parts.fits(schedule)

    def _pass(
        self, schedule: str, using: Devices | None, known: Outcome | None, tolerance: float, below: float
    ) -> Outcome | None:
        """Search everything for plans that are better than the known one."""
        best, bound = known, np.inf
        cases = [
            (self.floor(schedule, b, place), b, place)
            for b in self.wanted.microbatch_sizes()
            for place in self.places()
        ]
        drains = 0 if SCHEDULES[schedule].delay else 1
        # What no plan at all is below, by samples of a microbatch: a sum over all devices.
        leasts = {b: self.floor(schedule, b).step for b in self.wanted.microbatch_sizes()}
        # What is likely to be fast goes first. Of equals those of small microbatches are closest to their bounds.
        order = {b: drains * self._whole(b) for b in self.wanted.microbatch_sizes()}
        for floor, b, place in sorted(
            cases, key=lambda case: (max(case[0].step, case[0].pace + order[case[1]]), case[1])
        ):
            step = best.step if best is not None else below
            least = floor.step if place.complete else leasts[b]
            if self.stopped or floor.step >= step:
                bound = min(bound, least)
                continue
            try:
                self._tell(schedule, b)
                for search in self._searches(schedule, b, place, using):
                    step = best.step if best is not None else below
                    result = self._searched(search, step, floor, tolerance)
                    self._dropped |= search.dropped
                    bound = min(bound, result.bound if place.complete else least)
                    if result.plan is not None and result.judged is not None and result.step < step:
                        best = Outcome(result.plan, result.judged, 0.0, place)
            except KeyboardInterrupt:
                if best is None or not self.keeps_seen:
                    raise
                self.stopped, bound = True, min(bound, least)
        return replace(best, bound=min(bound, best.step)) if best is not None else None

    def forget(self) -> None:
        """Drop the matrices of searches. They are made again where they are asked for."""
        self._kept.clear()
        self._costs = {}
        if self._parts is not None:
            self._parts.forget()

    def _searched(self, search: StageSearch, below: float, floor: Floor, tolerance: float) -> Found:
        """Search, and end early at an interrupt, with what was seen until then."""
        try:
            return search.best(below, floor, tolerance)
        except KeyboardInterrupt:
            if not self.keeps_seen or (not np.isfinite(below) and search.seen is None):
                raise
            self.stopped = True
            plan, judged = search.seen or (None, None)
            return Found(plan, judged, floor.step)

    def _tell(self, schedule: str, b: int) -> None:
        if self.progress is not None:
            cases = [(each, size) for each in self.wanted.schedules for size in self.wanted.microbatch_sizes()]
            done = cases.index((schedule, b)) if (schedule, b) in cases else 0
            self.progress(done, len(cases), f"{schedule}, microbatches of {b}")

    def floor(self, schedule: str, b: int, layout: DeviceLayout | DeviceSets | None = None) -> Floor:
        """Return lower bounds for all plans, or for those of a layout.

        Its devices share the work; replicas with (n_j - 1) t_j <= T run m <= r + T * sum 1/t_j microbatches; and before
        a pipeline is full it has gone through the whole model once.
        """
        count, seconds, speeds = self.wanted.batch // b, self._whole(b), self.speeds(b)
        if isinstance(layout, DeviceLayout):
            together, most = sum(speeds[kind] * n for kind, n in layout.used), layout.most
        else:
            together = sum(speed for i, speed in enumerate(speeds) if i not in self.left_out)
            most = len(speeds) if layout is None else int(layout.replicas.max())
        busy = count * seconds / max(together, 1e-300)
        pace = busy * max(0, count - most) / count
        fill = self._least(b) if SCHEDULES[schedule].fills_whole else 0.0
        return Floor(max(busy, pace + fill), pace, fill)

    def _searches(
        self, schedule: str, b: int, place: DeviceLayout | DeviceSets, using: Devices | None
    ) -> Iterator[StageSearch]:
        """Yield the searches to run. That is one search. Where weight gradients are split off and memory is limited, it
        is one for each number of devices, on which the microbatches in flight depend.

        There is no search where nothing fits.
        """
        apart = SCHEDULES[schedule].splits and not self._stages(schedule, b, 0).roomy
        if isinstance(place, DeviceSets):
            ends, unused = place.ends(using), place.used[place.left_out]
            for total in range(1, len(self.fleet) - int(unused) + 1) if apart else (0,):
                within = ends & (place.used - unused == total) if total else ends
                if within.any():
                    yield self._set_search((schedule, b, total), place, within)
            return
        total = max(map(len, place.placed)) if apart else 0
        nodes = [node for node, placed in enumerate(place.placed) if placed and (using is None or using(placed))]
        nodes = [node for node in nodes if len(place.placed[node]) == total] if total else nodes
        if reaches(stages := self._stages(schedule, b, total), place, nodes):
            yield LayoutSearch(self.table(b), self.fleet, stages, place, nodes)

    def _set_search(self, case: tuple[str, int, int], sets: DeviceSets, ends: Bools) -> SetSearch:
        """Return the search over sets of a case: schedule, samples of a microbatch, number of devices. What does not
        depend on the devices left out is kept for other such searches."""
        if any(kept[0] != case[0] for kept in self._kept):
            self._kept.clear()
        # They grow while they run. Cases come again in the same order: to drop the oldest for the newest would keep
        # none.
        others = [kept for kept in self._kept if kept != case]
        while others and sum(kept.elements for kept in self._kept.values()) > _KEPT:
            del self._kept[others.pop()]
        if case not in self._kept:
            self._kept[case] = SetSearch(self.table(case[1]), self.fleet, self._stages(*case), sets, ends)
        search = self._kept[case].without(sets, ends)
        search.few_states = _HURRIED_STATES if self.in_haste else search.few_states
        return search

    def _stages(self, schedule: str, b: int, total: int) -> Stages:
        key = (schedule, b, total)
        if key not in self._costs:
            # The stages of one schedule and b serve all layouts; keeping more would only take memory.
            kept = {k: v for k, v in self._costs.items() if k[:2] == key[:2]}
            self._costs = kept | {
                key: Stages(self.table(b), self.fleet, self.kinds, schedule, self.wanted.batch // b, self.wanted, total)
            }
        return self._costs[key]


def _numbered(outcome: Outcome, numbers: Sequence[int]) -> Outcome:
    """Return the plan of a part of a fleet in the numbers of the whole."""
    stages = tuple(replace(s, devices=tuple(numbers[i] for i in s.devices)) for s in outcome.plan.stages)
    memory = {numbers[i]: held for i, held in outcome.judged.memory.items()}
    return replace(outcome, plan=replace(outcome.plan, stages=stages), judged=replace(outcome.judged, memory=memory))


def _thinned(sizes: list[int]) -> list[int]:
    """Return at most _SIZES of the sizes, each about as many times as large as the one before."""
    if len(sizes) <= _SIZES:
        return sizes
    ratio = (sizes[-1] / sizes[0]) ** (1 / (_SIZES - 1))
    return sorted({min(sizes, key=lambda size: abs(size - sizes[0] * ratio**k)) for k in range(_SIZES)})
