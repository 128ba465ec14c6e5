"""Plans with several stages on a device (schedules for packs), judged by the simulator.

In: a planner, a cluster, and plans with a device for every stage, such as the best ones of other schedules. Out: of
every schedule for packs the plan with the shortest time by simulation, with what it holds on every device.

The devices and their order are those of the plans that are given. For each number of stages on a device, and each size
of microbatches, cuts give the busiest device as little as can be. From the fastest of these plans on cuts are moved,
as in refine.py.

Limits: plans as small as those that refine.py simulates; no formula tells their time, so none is proven to be the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.ir.action_kinds import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.cluster.cluster import Cluster
from penstock.passes.schedules.schedule import PACK_SCHEDULES, SCHEDULES, build_packs
from penstock.support.errors import UsageError
from penstock.support.words import exact_bytes

from .chain import Floats, Table
from .cost import activation_bytes, base_of, fixed_bytes
from .fleet import Fleet
from .plan import Bytes, Judged, PipelinePlan, StagePlan
from .planner import Planner
from .refine import MOST_ACTIONS, SimulatedSteps, best_near


@dataclass(frozen=True)
class Packed:
    """The best plan of a schedule for packs. `step` are its seconds per batch by simulation; `memory` is by device."""

    plan: PipelinePlan
    step: float
    memory: Mapping[int, Bytes]


def pack(
    planner: Planner, cluster: Cluster, schedules: Sequence[str], orders: Sequence[tuple[int, ...]]
) -> dict[str, Packed]:
    """Return the best plan of every schedule for packs that one of these orders of devices has a plan for."""
    best_of = {}
    for schedule in schedules:
        judge_of = SimulatedSteps(planner, cluster, judge_packs)
        plans = [plan for order in orders for plan in _starts(planner, schedule, order)]
        starts = [plan for plan in sorted(plans, key=judge_of.step) if judge_of.step(plan) < float("inf")]
        if starts:
            best = best_near(starts, judge_of)
            memory = memory_of_packs(planner.table(best.size), planner.fleet, best, planner.wanted.base)
            best_of[schedule] = Packed(best, judge_of.step(best), memory)
    return best_of


def _starts(planner: Planner, schedule: str, order: Sequence[int]) -> Iterator[PipelinePlan]:
    """Yield plans on the devices in this order, for every size of microbatches and number of stages on a device; where
    such a plan does not fit, one that computes forwards again."""
    again = {"none": (False,), "all": (True,)}.get(planner.wanted.recompute, (False, True))
    for b in planner.wanted.microbatch_sizes():
        count, table = planner.wanted.batch // b, planner.table(b)
        for each in PACK_SCHEDULES[schedule].each:
            if count * len(order) * each > MOST_ACTIONS or len(order) < 2:
                continue
            packs = PACK_SCHEDULES[schedule].packs(len(order), each)
            at = {stage: device for device, stages in zip(order, packs, strict=True) for stage in stages}
            devices = [at[stage] for stage in range(len(at))]
            for recompute in again:
                plan = _even(planner, table, PipelinePlan(schedule, b, count, ()), devices, recompute)
                if plan is not None and not judge_packs(table, planner.fleet, plan, planner.wanted.base).against:
                    yield plan
                    break


def _even(
    planner: Planner, table: Table, plan: PipelinePlan, devices: Sequence[int], recompute: bool
) -> PipelinePlan | None:
    """Return the plan with stages on these devices whose busiest device has as little to do as moving cuts can make
    it. None where there are too few places to cut at."""
    places = np.flatnonzero(table.cut)
    if len(places) <= len(devices):
        return None
    rows = []
    for device in devices:
        forward, backward, _, again, _ = table.times(planner.fleet.devices[device])
        rows.append((forward + backward + again if recompute else forward + backward)[places])
    cuts = _even_cuts(rows, devices)
    stages = [
        StagePlan(int(places[first]), int(places[last]), (device,), (plan.count,), recompute)
        for device, first, last in zip(devices, cuts, cuts[1:], strict=False)
    ]
    return replace(plan, stages=tuple(stages))


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
    held = {}
    for rank, (device, stages) in enumerate(zip(plan.devices, packs, strict=True)):
        parts = []
        for stage in stages:
            part, where = plan.stages[stage], fleet.devices[device]
            data = table.data(part.first, part.last, where, plan.size * plan.count)
            parts.append(fixed_bytes(table, part.first, part.last, SCHEDULES["1f1b"], 1, data, 0))
        last = WEIGHTS if kind.splits else BACKWARD
        flying, most = dict.fromkeys(stages, 0), 0
        for action in program.ranks[rank].batch:
            flying[action.stage] += (action.kind == FORWARD) - (action.kind == last)
            now = sum(activation_bytes(table, plan.stages[stage], count) for stage, count in flying.items() if count)
            most = max(most, now)
        named = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
        workspace = max(part.workspace for part in parts)
        held[device] = Bytes(**named, workspace=workspace, activations=most, base=base_of(fleet.devices[device], base))
    return held


# What stages of a device hold beside each other; workspace is used by one after the other.
_SUMMED = ("weights", "gradients", "state", "buffers", "data")
