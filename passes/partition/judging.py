"""The last step of cutting: cuts that several sums prefer, and others near them, judged by simulation.

No sum of a stage's seconds says exactly what filling, draining, waiting for messages and their ends take (cuts.py). So
cuts are simulated with the estimates that the sums are made of. From the fastest on, one cut at a time moves by some
operations, as passes/planner/refine.py moves layers.

Limits: one device for each stage, a backward pass in one part, and so many simulations that they take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from penstock.ir.action_kinds import BACKWARD, FORWARD, UPDATE
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.schedule import MESSAGES, Action
from penstock.passes.schedules.late_updates import sum_late
from penstock.passes.schedules.schedule import SCHEDULES, build_schedule
from penstock.passes.simulator.machine import machine_of
from penstock.passes.simulator.simulate import simulate
from penstock.passes.simulator.wiring import wire_chain
from penstock.support.errors import VerifyError

from .cuts import CutSearch, by_operation, extra_seconds

_BATCHES = 4
# The limit of all simulations together, in microbatches on ranks, and the numbers of operations that cuts move by.
_ENOUGH = 4000
_MOVES = (8, 4, 2, 1)
# How far messages travel during computations in the sums that offer cuts: not at all, with a forward in hand for each
# stage behind, with two, and with so many that no message is waited for.
_EAGERNESS = (0, 1, 2, 1 << 20)

Judge = Callable[[Sequence[int]], float]


def refined(search: CutSearch, stages: list[int], judge: Judge | None, weight: int) -> list[int]:
    """Return the fastest of some stages of operations near these. A judgement counts for so much `weight`."""
    if judge is None:
        return stages
    known: dict[tuple[int, ...], float] = {}

    def step(stages: Sequence[int]) -> float:
        key = tuple(stages)
        if key not in known:
            known[key] = judge(stages) if len(known) * weight < _ENOUGH else float("inf")
        return known[key]

    others = (replace(search, eagerness=k).best() for k in _EAGERNESS)
    best = min((stages, *(by_operation(cuts, len(stages)) for cuts in others if cuts)), key=step)
    while True:
        moved = min(_neighbours(search, best), key=step, default=best)
        if step(moved) >= step(best):
            return best
        best = moved


def _neighbours(search: CutSearch, stages: list[int]) -> Iterator[list[int]]:
    """Yield stages with one cut moved, where stages are ranges."""
    if stages != sorted(stages):
        return
    starts, allowed = [stages.index(s) for s in range(search.count)], search.allowed()
    ends = [*starts[1:], len(stages)]
    for s in range(1, search.count):
        for move in (*_MOVES, *(-n for n in _MOVES)):
            cut = starts[s] + move
            if starts[s - 1] < cut < ends[s] and allowed[s][cut]:
                yield by_operation([*starts[:s], cut, *starts[s + 1 :]], len(stages))


def judge_of(
    search: CutSearch, schedule: str, microbatches: int, names: Sequence[str], cluster: Cluster
) -> Judge | None:
    """Return what gives the seconds of a batch where every operation has a stage, on the devices `names`; None where
    nothing can."""
    kind = SCHEDULES.get(schedule)
    if kind is None or not kind.trains or kind.splits or microbatches * len(names) > _ENOUGH:
        return None
    try:
        program = wire_chain(sum_late(build_schedule(schedule, len(names), microbatches), kind.delay))
    except VerifyError:
        return None
    costs, machine = search.costs, machine_of(cluster, dict(enumerate(names)))

    def step(stages: Sequence[int]) -> float:
        spent = []
        for stage in range(len(names)):
            mine = np.equal(stages, stage)
            forward, update = float(costs.forward[stage][mine].sum()), float(costs.updates[stage][mine].sum())
            back = costs.of_stage(stage, stages)[0] - forward + float(costs.sums[stage][mine].sum())
            back += extra_seconds(search.needs, stage, stages) if search.needs is not None else 0.0
            spent.append({FORWARD: forward, BACKWARD: back, UPDATE: update})
        if not np.isfinite([back for stage in spent for back in stage.values()]).all():
            return float("inf")
        parted = [costs.one_way(stage, stages) if stage else 0.0 for stage in range(len(names))]

        def seconds(rank: int, action: Action) -> float:
            if action.kind in MESSAGES:
                assert action.peer is not None
                return cluster.message_overhead(names[rank], names[action.peer])
            duration = spent[action.stage].get(action.kind)
            return 0.0 if duration is None else duration + cluster.device(names[rank]).call_overhead

        return simulate(
            program, _BATCHES, seconds, lambda phase, source, target: parted[max(source, target)], machine
        ).step_seconds

    return step
