"""Bounds on stages: what no stage of a group of devices is below, for all ranges of layers at once.

In: the stages of one table, schedule and number of microbatches (stages.py), groups of devices, their sums of
gradients. Out: pace and cost by group, first layer, last layer + 1. Microbatches of unequal replicas may be divided
here, and a stage may stand wherever memory is largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..chain import Floats, Ints
from ..fleet import Ring
from ..stages import Bools, Stages

Singles = npt.NDArray[np.float32]
# The factor by which bounds are lower, so that none is too high once it is rounded to single precision.
_DOWN = 1 - 4e-7


def least_of_groups(
    stages: Stages, groups: Sequence[Sequence[int]], rings: Sequence[Ring], trips: Floats | None = None
) -> tuple[Singles, Singles]:
    """Return for every group of devices and range of layers what no stage there is below: pace and cost, in single
    precision, rounded down. `trips` are the least round trips of messages behind each layer; nothing is below theirs
    either."""
    kinds = list(dict.fromkeys(stages.kinds))
    ranges = np.nonzero(stages.allowed[0])
    cells = np.flatnonzero(stages.allowed[0])
    several = stages.allowed[1][ranges]
    behind = None if trips is None else trips[ranges[1]]
    paces, costs = (np.full((len(groups), stages.allowed[0].size), np.inf, np.float32) for _ in range(2))
    numbers = [tuple(sorted(kinds.index(stages.kinds[i]) for i in devices)) for devices in groups]
    ways = [_Sums(stages, kinds, ranges, recompute) for recompute in stages.recomputations()]
    # Groups with the same first kinds follow each other, and share their sums.
    for g in sorted(range(len(groups)), key=numbers.__getitem__):
        best: tuple[Floats, Floats] | None = None
        apart = stages.members(groups[g]).apart
        for way in ways:
            fits = _all_fits(stages, way, numbers[g], apart, several)
            if fits is not None and not fits.any():
                continue
            pace, cost = way.below(numbers[g], rings[g], behind)
            if fits is not None:
                pace[~fits] = cost[~fits] = np.inf
            if best is not None:
                pace, cost = np.minimum(pace, best[0]), np.minimum(cost, best[1])
            best = pace, cost
            if fits is None:
                # To compute again takes no less.
                break
        if best is not None:
            paces[g, cells], costs[g, cells] = best[0] * _DOWN, best[1] * _DOWN
    shape = len(groups), *stages.allowed[0].shape
    return paces.reshape(shape), costs.reshape(shape)


def _all_fits(stages: Stages, way: _Sums, kinds: Sequence[int], apart: bool, several: Bools) -> Bools | None:
    """Return by range of layers what memory allows a group of devices, `apart` or not, wherever its stage stands; None
    where that is all of it. `several` are the ranges that several devices may have."""
    replicas, warm = len(kinds), stages.row.warm_up(0)
    full, least = stages.row.in_flight(stages.count, warm, 0, replicas), stages.row.least_share(warm)
    able = several if replicas > 1 else np.ones_like(several)
    if replicas * least > stages.count:
        return np.zeros_like(able)
    limited = any(device.memory is not None for device in stages.fleet.devices)
    if limited and not (stages.roomy and not way.recompute):
        held, room = way.held(replicas, full, apart)
        if kinds[0] == kinds[-1]:
            able = able & (room[kinds[0]] >= stages.needed(replicas, full))
        else:
            able = able & (sum(held[kind] for kind in kinds) >= stages.count)
            for kind in dict.fromkeys(kinds):
                able &= held[kind] >= least
    return None if able.all() else able


class _Sums:
    """Bounds of groups of devices by range of layers, for groups that are asked for in the order of their kinds: sums
    over the first devices of a group stay for the next one. `kinds` are all kinds of devices."""

    def __init__(self, stages: Stages, kinds: Sequence[int], ranges: tuple[Ints, ...], recompute: bool) -> None:
        self.stages, self.kinds, self.ranges, self.recompute = stages, kinds, ranges, recompute
        rows = [stages.times(kind, recompute) for kind in kinds]
        self.each, self.weight, self.update = ([row[k][ranges] for row in rows] for k in range(3))
        self.speed = [1.0 / np.maximum(each, 1e-30) for each in self.each]
        self.grads = stages.grads[ranges]
        # For the first devices of the last group: kind, speed together, and most seconds of each of these kinds.
        self.first: list[tuple[int, tuple[Floats, ...]]] = []
        self._held: dict[tuple[int, bool], tuple[list[Ints], list[Ints]]] = {}

    def held(self, replicas: int, full: int, apart: bool) -> tuple[list[Ints], list[Ints]]:
        """Return for each kind how many microbatches of a batch one of so many replicas may run, at most a batch, and
        how many it has room for."""
        key = replicas, apart
        if key not in self._held:
            stages, way = self.stages, (self.recompute, replicas, apart)
            held = [most[self.ranges] for most in stages.most_shares(self.kinds, full, *way)]
            room = [stages.most_in_flight(kind, *way)[self.ranges] for kind in self.kinds]
            self._held[key] = [np.minimum(most, stages.count) for most in held], room
        return self._held[key]

    def below(self, group: Sequence[int], ring: Ring, trips: Floats | None) -> tuple[Floats, Floats]:
        """Return pace and cost of a group, whose kinds are numbers among all kinds in ascending order."""
        stages, replicas = self.stages, len(group)
        count, head, row = stages.count, stages.head, stages.row
        together, each, update, weight = self._over(group)
        if group[0] == group[-1]:
            pace = (-(-count // replicas) - head) * each
        else:
            pace = max(count - head * replicas, 0) / together
        # Only the part of an update that is shared out is divided, which is more.
        pace += update / stages.holders(replicas)
        cost = each.copy()
        if row.splits:
            heaviest = 2 * weight
            pace += heaviest
            cost = np.maximum(cost - heaviest, 0.0, out=heaviest)
        if replicas > 1:
            sums = ring.fixed + ring.each * self.grads
            pace = np.maximum(pace, sums, out=sums) if row.delay else np.add(pace, sums, out=sums)
        if trips is not None:
            if row.bounded and not row.delay:
                pace += (-(-count // replicas) - 1) * trips
            cost += trips
        return pace, cost

    def _over(self, group: Sequence[int]) -> tuple[Floats, ...]:
        """Return speed together and most seconds of a group."""
        same = next((n for n, (kind, _) in enumerate(self.first[: len(group)]) if kind != group[n]), len(group))
        del self.first[min(same, len(self.first)) :]
        for kind in group[len(self.first) :]:
            rows: tuple[Floats, ...] = self.speed[kind], self.each[kind], self.update[kind], self.weight[kind]
            if self.first:
                speed, *most = self.first[-1][1]
                rows = speed + rows[0], *map(np.maximum, most, rows[1:])
            self.first.append((kind, rows))
        return self.first[-1][1]
