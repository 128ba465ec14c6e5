"""Partition into stages that need not follow the order of the graph: search for better sets of operations than the best
ranges.

In: the operations of a chain in the order of the graph, the costs that ranges have too, and the value of the best
ranges. Out: a stage for every operation, or None where nothing is better.

Stages depend forward only: the operations of the first s stages are an ideal of the graph. Let T_s be the seconds of
operations on stage s, and X_s(I) those of transfers over a cut behind ideal I. Transfers are values made in the ideal
and used outside, and gradients of parameters that both sides read. Then

    load(s, I' - I) = T_s(I') - T_s(I) + X_s(I)

For the ideals that are ranges that is the cost of ranges. The dynamic programme over ideals is that of
placement/sweep.py. Operations that touch a variable that the graph changes are on one stage. Where there are more than
LIMIT ideals, neighbours in the order of the graph are merged, lightest first. No merge spans a cut of the best ranges.

Known limit: no memory term; partition.py refuses a result that does not fit as well as ranges do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.passes.placement.coarsen import clusters
from penstock.passes.placement.ideals import Ideals, bits, enumerate_ideals
from penstock.passes.placement.problem import DeviceKind
from penstock.passes.placement.sweep import Fillings, Places, Reals, Tables, sweep
from penstock.passes.placement.units import Units, circles

LIMIT = 4_000
_SHRINK = 0.75
# A result must be better by more than rounding.
_BETTER = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class OperationWork:
    """The work of operations and the traffic between them.

    `seconds[stage][i]` are those of operation i; `edges` lead from maker to user; `together` are on one stage; `values`
    are (operations, bytes): the traffic of a cut that parts the operations. `transfer(stage, bytes)` is the time that
    the stage takes to receive so many bytes from the one before.
    """

    seconds: Sequence[Reals]
    edges: Iterable[tuple[int, int]]
    together: Sequence[Sequence[int]]
    values: Sequence[tuple[frozenset[int], float]]
    transfer: Callable[[int, float], float]


def better_stages(work: OperationWork, cuts: Sequence[int], value: float) -> list[int] | None:
    """Return the stage of every operation if the slowest stage is faster than `value`, that of the ranges between
    `cuts`; else None."""
    units = _units_of(work)
    order = sorted(range(len(units)), key=lambda u: units.nodes[u][0])
    before, _ = units.neighbours()
    coarse = units
    ideals = enumerate_ideals(*coarse.neighbours(), LIMIT)
    if ideals is None:
        # Cycles may have put units before their predecessors: then there is no such linear order, and the ranges stand.
        place = {u: i for i, u in enumerate(order)}
        if any(place[a] > place[b] for b, earlier in enumerate(before) for a in earlier):
            return None
        weights = [min(times) for times in units.times]
        starts = {sum(units.nodes[u][0] < cut for u in order) for cut in cuts}
        count = len(units)
        while ideals is None:
            if count <= len(cuts):
                return None
            count = max(len(cuts), int(count * _SHRINK))
            coarse = units.merged(clusters(weights, order, starts, count))
            ideals = enumerate_ideals(*coarse.neighbours(), LIMIT)
    best = sweep(_Stages(coarse, ideals, work), Fillings.in_order(len(work.seconds)), value * _BETTER)
    if best is None:
        return None
    stage_of = [-1] * len(work.seconds[0])
    for stage, part in enumerate(best[1]):
        for unit in bits(part.units):
            for i in coarse.nodes[unit]:
                stage_of[i] = stage
    return stage_of


def _units_of(work: OperationWork) -> Units:
    """Make units of the operations: those that must be together are one."""
    count = len(work.seconds[0])
    edges = set(work.edges)
    for group in work.together:
        edges |= {*pairwise(group), (group[-1], group[0])}
    single = Units(
        tuple(DeviceKind(f"stage {s}", 1, pays_transfers=False) for s in range(len(work.seconds))),
        tuple(zip(*(seconds.tolist() for seconds in work.seconds), strict=True)),
        (0.0,) * count,
        tuple(sorted((a, b) for a, b in edges if a != b)),
        (),
        tuple((i,) for i in range(count)),
        tuple(range(count)),
    )
    return single.merged(circles(count, edges))


class _Stages(Tables):
    """Loads of stages: computation, and the transfers to the stage."""

    def __init__(self, units: Units, ideals: Ideals, work: OperationWork) -> None:
        super().__init__(units, ideals)
        unit_of = {i: u for u, nodes in enumerate(units.nodes) for i in nodes}
        crossing = np.zeros(len(self))
        for operations, count in work.values:
            held = [self.rows[u] for u in sorted({unit_of[i] for i in operations})]
            crossing += count * (np.bitwise_or.reduce(held) > np.bitwise_and.reduce(held))
        amounts, which = np.unique(crossing, return_inverse=True)
        stages = range(len(work.seconds))
        self._travel = [np.array([work.transfer(s, float(n)) if s else 0.0 for n in amounts])[which] for s in stages]

    def loads(self, i: int, kind: int, among: Places, upper: float) -> tuple[Places, Reals]:
        among, cost = super().loads(i, kind, among, upper)
        cost = cost + self._travel[kind][i]
        fine = cost < upper
        return among[fine], cost[fine]
