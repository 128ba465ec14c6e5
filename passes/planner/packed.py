"""Plans with several stages on a device (schedules for packs), judged by the simulator.

In: a planner, a cluster, and plans with a device for every stage, such as the best ones of other schedules. Out: of
every schedule for packs the plan with the shortest time by simulation, with what it holds on every device.

The devices and their order are those of the plans that are given. For each number of stages on a device, and each size
of microbatches, cuts give the busiest device as little as can be. From the fastest of these plans on cuts are moved,
as in refine.py. Where there are few places to cut at, all plans are tried then, and the best of all is found. A plan
is not simulated where a device alone takes longer than the best does, or longer than packs are of use: for its work,
and for its messages or the work of the stages before its first one.

Limits: plans as small as those that refine.py simulates; with more than `_MOST_PLANS` ways to cut, none is proven to be
the best. All stages compute forwards again, or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from penstock.ir.action_kinds import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.cluster.cluster import Cluster
from penstock.passes.schedules.schedule import PACK_SCHEDULES, SCHEDULES, build_packs, single_like
from penstock.support.errors import UsageError
from penstock.support.words import exact_bytes

from .chain import Floats, Table
from .cost import activation_bytes, base_of, fixed_bytes
from .fleet import Fleet
from .plan import Bytes, Judged, PipelinePlan, StagePlan
from .planner import Planner
from .refine import MOST_ACTIONS, MOST_CHANGED, MOST_SIMULATED, STARTS, SimulatedSteps, best_near

# The most stages on a device that are tried.
MOST_STAGES = max(each for kind in PACK_SCHEDULES.values() for each in kind.each)
# The most ways to cut, for a size of microbatches and a number of stages, that are all tried.
_MOST_PLANS = 400
# Moves of cuts in a row that are no faster than one that is: so many are simulated more.
_PATIENCE = 4


@dataclass(frozen=True)
class Packed:
    """The best plan of a schedule for packs that was found. `step` are its seconds per batch by simulation; `memory` is
    by device."""

    plan: PipelinePlan
    step: float
    memory: Mapping[int, Bytes]


def pack(
    planner: Planner,
    cluster: Cluster,
    schedules: Sequence[str],
    orders: Sequence[tuple[int, ...]],
    fewest: int = 1,
    below: float = math.inf,
) -> dict[str, Packed]:
    """Return the best plan of every schedule for packs that one of these orders of devices has a plan for, with the
    `fewest` stages on a device or more. Where it takes `below` seconds or longer, it is the best near some starts."""
    best_of = {}
    for schedule in schedules:
        judge_of = SimulatedSteps(planner, cluster, judge_packs, patience=_PATIENCE)
        shapes = [shape for order in orders for shape in _shapes(planner, schedule, order, fewest)]
        plans = [plan for shape in shapes if (plan := _start(planner, shape)) is not None]
        starts = judge_of.fastest(plans, STARTS)
        best = _best_near_each(starts, judge_of, MOST_SIMULATED * (2 if len(planner.fleet) <= MOST_CHANGED else 1))
        step = judge_of.step(best) if best is not None else math.inf
        best, step = _best_of_all(planner, cluster, shapes, best, step, below)
        if best is not None:
            memory = memory_of_packs(planner.table(best.size), planner.fleet, best, planner.wanted.base)
            best_of[schedule] = Packed(best, step, memory)
    return best_of


def _best_near_each(starts: Sequence[PipelinePlan], judge_of: SimulatedSteps, most: int) -> PipelinePlan | None:
    """Return the best plan that moving cuts leads to from any of some plans. Each has its part of the most that may be
    simulated."""
    near = list[PipelinePlan]()
    for number, start in enumerate(starts):
        judge_of.most = judge_of.spent + (most - judge_of.spent) / (len(starts) - number)
        near.append(best_near([start], judge_of))
    return min(near, key=judge_of.step, default=None)


@dataclass(frozen=True)
class _Shape:
    """A plan without its cuts: the devices of its stages, and the places where a stage may begin or end."""

    plan: PipelinePlan
    devices: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def ways(self) -> int:
        """The number of ways to cut."""
        return math.comb(len(self.places) - 2, len(self.devices) - 1)

    def cut(self, cuts: Sequence[int], recompute: bool) -> PipelinePlan:
        """Return the plan with stages that begin at these places, by their numbers."""
        stages = [
            StagePlan(self.places[first], self.places[last], (device,), (self.plan.count,), recompute)
            for device, (first, last) in zip(self.devices, pairwise(cuts), strict=True)
        ]
        return replace(self.plan, stages=tuple(stages))


def _shapes(planner: Planner, schedule: str, order: Sequence[int], fewest: int) -> Iterator[_Shape]:
    """Yield plans without cuts on the devices in this order, for every size of microbatches and number of stages on a
    device for which there are places to cut at. A device has the `fewest` or more."""
    for b in planner.wanted.microbatch_sizes():
        count, table = planner.wanted.batch // b, planner.table(b)
        for each in PACK_SCHEDULES[schedule].each:
            if each < fewest or count * len(order) * each > MOST_ACTIONS or (len(order) < 2 and fewest < 2):
                continue
            packs = PACK_SCHEDULES[schedule].packs(len(order), each)
            at = {stage: device for device, stages in zip(order, packs, strict=True) for stage in stages}
            places = tuple(int(place) for place in np.flatnonzero(table.cut))
            if len(places) > len(at):
                devices = tuple(at[stage] for stage in range(len(at)))
                yield _Shape(PipelinePlan(schedule, b, count, ()), devices, places)


def _again(planner: Planner) -> tuple[bool, ...]:
    """Return whether forwards may be computed again, in the order in which that is tried."""
    return {"none": (False,), "all": (True,)}.get(planner.wanted.recompute, (False, True))


def _start(planner: Planner, shape: _Shape) -> PipelinePlan | None:
    """Return the plan whose busiest device has as little to do as moving cuts can make it; where it does not fit, one
    that computes forwards again."""
    table = planner.table(shape.plan.size)
    for recompute in _again(planner):
        plan = shape.cut(_even_cuts(_rows(planner, shape, recompute), shape.devices), recompute)
        if not judge_packs(table, planner.fleet, plan, planner.wanted.base).against:
            return plan
    return None


def _rows(planner: Planner, shape: _Shape, recompute: bool) -> list[Floats]:
    """Return for each stage the seconds of a microbatch up to each place, on the device of that stage."""
    rows = []
    for device in shape.devices:
        forward, backward, _, again, _ = planner.table(shape.plan.size).times(planner.fleet.devices[device])
        rows.append((forward + backward + again if recompute else forward + backward)[list(shape.places)])
    return rows


def _best_of_all(
    planner: Planner, cluster: Cluster, shapes: Sequence[_Shape], best: PipelinePlan | None, step: float, below: float
) -> tuple[PipelinePlan | None, float]:
    """Return the fastest of all plans of shapes with few ways to cut, and its seconds, if it is faster than the best so
    far and takes less than `below`."""
    judge_of = SimulatedSteps(planner, cluster, judge_packs, most=math.inf)
    for shape in shapes:
        if shape.ways > _MOST_PLANS:
            continue
        beside = _beside(planner, cluster, shape)
        for recompute in _again(planner):
            rows = _rows(planner, shape, recompute)
            last = len(shape.places) - 1
            ways = [(0, *cuts, last) for cuts in combinations(range(1, last), len(shape.devices) - 1)]
            for least, cuts in sorted((_least(planner, shape, rows, cuts, beside), cuts) for cuts in ways):
                if least >= min(step, below):
                    break
                plan = shape.cut(cuts, recompute)
                if judge_of.step(plan) < step:
                    best, step = plan, judge_of.step(plan)
    return best, step


def _beside(planner: Planner, cluster: Cluster, shape: _Shape) -> list[tuple[float, float]]:
    """Return for each stage the seconds that its device spends on a microbatch beside computing: on calls, and on its
    ends of messages."""
    devices, calls = planner.fleet.devices, 2 + PACK_SCHEDULES[shape.plan.schedule].splits
    beside, last = [], len(shape.devices) - 1
    for stage, number in enumerate(shape.devices):
        mine = devices[number]
        near = [shape.devices[other] for other in (stage - 1, stage + 1) if 0 <= other <= last]
        # One message comes from each of the others, and one goes there.
        ends = sum(2 * cluster.message_overhead(mine.name, devices[other].name) for other in near if other != number)
        beside.append((calls * mine.call_overhead, ends))
    return beside


def _least(
    planner: Planner, shape: _Shape, rows: Sequence[Floats], cuts: Sequence[int], beside: Sequence[tuple[float, float]]
) -> float:
    """Return seconds that a batch takes at least: all that a device computes, with either its ends of messages, or once
    the computations of the stages before its first one. Both would be too much, as the last message is under way while
    its sender still works on it. Where weight gradients are apart, or the pipeline never drains, devices alone count.
    What a device saves up within a quota may make each computation shorter."""
    kind = PACK_SCHEDULES[shape.plan.schedule]
    busy, sent, before, passed = dict[int, float](), dict[int, float](), dict[int, float](), 0.0
    for row, number, (first, last), (calls, messages) in zip(rows, shape.devices, pairwise(cuts), beside, strict=True):
        device, seconds = planner.fleet.devices[number], float(row[last] - row[first]) + calls
        # F, B and W.
        saved = 3 * (1 - device.quota) * device.quota_period
        seconds = max(device.quota * seconds, seconds - saved) if saved else seconds
        busy[number] = busy.get(number, 0.0) + shape.plan.count * seconds
        sent[number] = sent.get(number, 0.0) + shape.plan.count * messages * (device.quota if saved else 1.0)
        before.setdefault(number, 0.0 if kind.splits or kind.delay else passed)
        passed += seconds
    return max(busy[device] + max(sent[device], before[device]) for device in busy)


def _even_cuts(rows: Sequence[Floats], devices: Sequence[int]) -> list[int]:
    """Return where stages begin, and where the last one ends. Row s has the seconds up to each place on the device of
    stage s.

    First each stage gets the same share of the work. Then one cut at a time is moved to its best place, until none can
    be. A place is better where the busiest device has less to do, or as much and stages are more alike.
    """
    count, last = len(rows), len(rows[0]) - 1
    shares = [int(np.searchsorted(row, row[-1] * s / count)) for s, row in enumerate(rows)]
    cuts = [0, *shares[1:], last]
    for s in range(1, count):
        cuts[s] = min(max(cuts[s], cuts[s - 1] + 1), last - (count - s))

    def worth(cuts: Sequence[int]) -> tuple[float, float]:
        loads, squares = dict.fromkeys(devices, 0.0), 0.0
        for row, device, begin, end in zip(rows, devices, cuts, cuts[1:], strict=False):
            seconds = float(row[end] - row[begin])
            loads[device] += seconds
            squares += seconds * seconds
        return max(loads.values()), squares

    best = worth(cuts)
    while True:
        moved = [
            [*cuts[:s], place, *cuts[s + 1 :]]
            for s in range(1, count)
            for place in range(cuts[s - 1] + 1, cuts[s + 1])
            if place != cuts[s]
        ]
        better = min(moved, key=worth, default=cuts)
        if worth(better) >= best:
            return cuts
        cuts, best = better, worth(better)


def judge_packs(table: Table, fleet: Fleet, plan: PipelinePlan, base: int = 0) -> Judged:
    """Tell whether a plan is legal and fits. Its `step` is what the busiest device takes."""
    try:
        memory = memory_of_packs(table, fleet, plan, base)
    except UsageError as error:
        return Judged(float("inf"), float("inf"), against=(error.what,))
    busy = dict.fromkeys(plan.devices, 0.0)
    for stage in plan.stages:
        forward, backward, _, again, _ = table.times(fleet.devices[stage.devices[0]])
        sums = forward + backward + (again if stage.recompute else 0.0)
        busy[stage.devices[0]] += plan.count * float(sums[stage.last] - sums[stage.first])
    against = [
        f"{fleet.devices[device].name} needs {exact_bytes(held.total)}, it has {exact_bytes(limit)}"
        for device, held in memory.items()
        if (limit := fleet.devices[device].memory) is not None and held.total > limit
    ]
    step = max(busy.values())
    return Judged(step, step, {}, memory, tuple(against))


def memory_of_packs(table: Table, fleet: Fleet, plan: PipelinePlan, base: int) -> dict[int, Bytes]:
    """Return the bytes that every device holds. Activations are counted along the program of its rank."""
    kind, packs = PACK_SCHEDULES[plan.schedule], PACK_SCHEDULES[plan.schedule].packs(len(plan.devices), plan.packs)
    program = build_packs(plan.schedule, packs, plan.count)
    single, held = SCHEDULES[single_like(plan.schedule)], {}
    for rank, (device, stages) in enumerate(zip(plan.devices, packs, strict=True)):
        parts = []
        for stage in stages:
            part, where = plan.stages[stage], fleet.devices[device]
            data = table.data(part.first, part.last, where, plan.size * plan.count)
            parts.append(fixed_bytes(table, part.first, part.last, single, 1, data, 0))
        last = WEIGHTS if kind.splits else BACKWARD
        flying, most = dict.fromkeys(stages, 0), 0
        for action in (*program.ranks[rank].start, *program.ranks[rank].batch):
            flying[action.stage] += (action.kind == FORWARD) - (action.kind == last)
            now = sum(activation_bytes(table, plan.stages[stage], count) for stage, count in flying.items() if count)
            most = max(most, now)
        named = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
        workspace = max(part.workspace for part in parts)
        held[device] = Bytes(**named, workspace=workspace, activations=most, base=base_of(fleet.devices[device], base))
    return held


# What stages of a device hold beside each other; workspace is used by one after the other.
_SUMMED = ("weights", "gradients", "state", "buffers", "data")
