"""What a search over sets of devices looks up: against loops over every group, range of layers and set of devices."""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest

from penstock.passes.planner import stages as stages_module
from penstock.passes.planner.cost import judge
from penstock.passes.planner.layouts import DeviceSets
from penstock.passes.planner.plan import PipelinePlan, PlanRequest, StagePlan
from penstock.passes.planner.planner import Planner
from penstock.passes.planner.stages import Stages, UnequalOption
from penstock.passes.planner.tables.cells import StageCells
from penstock.passes.planner.tables.limits import RangeLimits

from ..drawn import draw_chain, draw_fleet


def drawn_paces(seed: int, groups: int = 7, layers: int = 9) -> np.ndarray:
    """Random paces of ranges of layers, of which longer ones may take less, and some are not allowed."""
    random = np.random.default_rng(seed)
    paces = random.random((groups, layers + 1, layers + 1)).astype(np.float32)
    paces[:, *np.tril_indices(layers + 1)] = np.inf
    paces[random.random(paces.shape) < 0.2] = np.inf
    return paces


def reached(paces: np.ndarray, group: int, at: int, limit: float) -> int:
    """How far a group gets from a layer or from one before it, layer by layer."""
    ends = [x for y in range(at + 1) for x in range(len(paces[0])) if paces[group, y, x] <= limit]
    return max([at, *ends])


@pytest.mark.parametrize("asked", [1, 10**6])
def test_reach_is_the_furthest_of_all_ranges(asked: int) -> None:
    for seed in range(5):
        paces = drawn_paces(seed)
        for limit in (0.0, 0.05, 0.3, 0.9, inf):
            reach = RangeLimits(paces).reach(limit, asked)
            group, at = (every.ravel() for every in np.indices(paces.shape[:2]))
            expected = [reached(paces, g, y, np.float32(limit)) for g, y in zip(group, at, strict=True)]
            assert reach(group, at).tolist() == expected


def test_first_layers_are_those_of_all_ranges() -> None:
    for seed in range(5):
        paces = drawn_paces(seed)
        for limit in (0.0, 0.05, 0.3, 0.9):
            expected = [
                [next((y for y, pace in enumerate(row) if pace <= np.float32(limit)), len(row)) for row in group.T]
                for group in paces
            ]
            assert RangeLimits(paces).begins(limit).tolist() == expected


@pytest.mark.parametrize("by", [-1, 1])
def test_control_a_bisection_that_is_off_by_one_is_noticed(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count = RangeLimits._count
    monkeypatch.setattr(RangeLimits, "_count", lambda self, rows, most: count(self, rows, most) + by)
    with pytest.raises(AssertionError):
        test_reach_is_the_furthest_of_all_ranges(10**6)


def drawn_sets(seed: int) -> DeviceSets:
    """The sets of four devices, some of which may be alike."""
    chain, fleet = draw_chain(Random(seed), 4), draw_fleet(Random(seed), 4, nics=False)
    sets = Planner(chain, fleet, PlanRequest(4, ("1f1b",), sizes=(1,))).places()[0]
    assert isinstance(sets, DeviceSets)
    return sets


def drawn_stages(seed: int) -> Stages:
    chain, fleet = draw_chain(Random(seed), 4), draw_fleet(Random(seed), 4, nics=False)
    return Planner(chain, fleet, PlanRequest(6, ("1f1b",), sizes=(1,)))._stages("1f1b", 1, 3)


def sums_of(sets: DeviceSets, each: np.ndarray) -> np.ndarray:
    """The least sum with which each set, or a part of it, gets from the first position to every other: one group after
    another."""
    positions, sizes = each.shape[1], [len(members) for members in sets.classes]
    least = {(0,) * len(sizes): np.where(np.arange(positions) == 0, 0.0, inf)}
    found = np.full((sets.count, positions), inf)
    waiting = [*least]
    while waiting:
        counts = waiting.pop()
        for g, group in enumerate(sets.groups):
            more = tuple(a + b for a, b in zip(counts, group, strict=True))
            if any(n > size for n, size in zip(more, sizes, strict=True)):
                continue
            sums = [min(least[counts][y] + each[g, y, x] for y in range(x + 1)) for x in range(positions)]
            before = least.get(more, np.full(positions, inf))
            if (np.array(sums) < before).any():
                least[more] = np.minimum(sums, before)
                waiting.append(more)
    for u in range(sets.count):
        parts = [row for counts, row in least.items() if (np.array(counts) <= sets.digits[u]).all()]
        found[u] = np.min(parts, 0)
    return found


def test_sums_over_sets_are_the_least_of_all_ways() -> None:
    for seed in range(6):
        sets = drawn_sets(seed)
        each = np.random.default_rng(seed).random((len(sets.groups), 5, 5))
        each[:, *np.tril_indices(5, -1)] = inf
        assert sets.sums(each) == pytest.approx(sums_of(sets, each), rel=1e-12)
        less = sums_of(sets, np.where(np.arange(len(sets.groups))[:, None, None] == 0, 0.5 * each, each))
        assert not np.allclose(less, sets.sums(each))


def test_boundaries_have_the_numbers_of_their_ways_and_loads() -> None:
    """Asked for in any order, also where devices are left out."""
    different = 0
    for seed in range(12):
        whole = drawn_sets(seed)
        for sets in (whole, whole.without([1])):
            pairs = [(sets.group[p], b) for p in range(len(sets.source)) for b in sets.group[: sets.begin[1]]]
            able = [(a, b) for a, b in pairs if (np.add(sets.groups[a], sets.groups[b]) <= sets.digits[-1]).all()]
            group, behind = np.array(Random(seed).sample(able, len(able))).T
            numbers, hops = sets.hop_numbers(group, behind)
            for a, b, number in zip(group, behind, numbers, strict=True):
                hop = sets.hop(int(a), int(b))
                assert (hops[number].ways, hops[number].busy) == (hop.ways, hop.busy)
            different += len(hops) > 2
    assert different > 5


def dealt(option: UnequalOption, first: int, last: int) -> float:
    """The least time of the slowest replica over all ways to deal out the microbatches of a batch."""
    stages, (replicas, recompute, full, apart) = option.stages, option.case
    each = [float(stages.times(kind, option.recompute)[0][first, last]) for kind in option.kinds]
    held = [stages.count] * len(each)
    if full is not None:
        rooms = stages.most_shares(option.kinds, full, recompute, replicas, apart)
        held = [int(most[first, last]) for most in rooms]
    ways = combinations_with_replacement(range(len(each)), stages.count)
    shares = {tuple(way.count(j) for j in range(len(each))) for way in ways}
    return min(
        max((n - stages.head) * t for n, t in zip(share, each, strict=True))
        for share in shares
        if all(option.least <= n <= most for n, most in zip(share, held, strict=True))
    )


def beside(option: UnequalOption, first: int, last: int) -> float:
    """What the pace of a stage has beside its slowest replica: updates, weight gradients, the sum of gradients."""
    stages = option.stages
    rows = [[float(row[first, last]) for row in stages.times(kind, option.recompute)] for kind in option.kinds]
    _, weight, update = (max(column) for column in zip(*rows, strict=True))
    if stages.row.delay:
        return update
    sums = option.sums.fixed + option.sums.each * float(stages.grads[first, last])
    return update + sums + (2 * weight if stages.row.splits else 0.0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw", "zb-1f1b"])
def test_cells_have_the_times_of_all_ways_to_deal_microbatches_out(schedule: str) -> None:
    """Looked up in any order and again. The cost model says what a plan of one stage takes."""
    looked, refused = 0, 0
    for seed in range(12):
        rng = Random(seed)
        chain, fleet = draw_chain(rng, 4), draw_fleet(rng, 3, nics=False)
        planner = Planner(chain, fleet, PlanRequest(6, (schedule,), sizes=(1,)))
        stages, sets = planner._stages(schedule, 1, 3), planner.places()[0]
        assert isinstance(sets, DeviceSets)
        cells = StageCells(stages, 1)
        for group in range(len(sets.groups)):
            devices = sets.devices(group)
            for option in stages.options(devices, 0, 0, sets.ring(group)):
                number = cells.number(option)
                assert cells.number(option) == number
                ranges = [(y, x) for y in range(5) for x in range(y + 1, 5)]
                first, last = (np.array(row) for row in zip(*rng.sample(ranges, 6), strict=True))
                half = cells.look(np.full(3, number), first[:3], last[:3])
                costs, others = cells.look(np.full(6, number), first, last)
                assert np.array_equal(half, (costs[:3], others[:3]))
                if not isinstance(option, UnequalOption):
                    continue
                for cost, other, y, x in zip(costs, others, first, last, strict=True):
                    if not option.fits[y, x]:
                        refused += 1
                        assert other == inf
                        continue
                    looked += 1
                    slowest = (cost / len(devices) if stages.row.delay else other) - beside(option, y, x)
                    assert slowest == pytest.approx(dealt(option, y, x), rel=1e-9, abs=1e-12)
                    if (y, x) == (0, 4):
                        shares = stages.shares(devices, 0, 0, option.recompute, y, x)
                        plan = PipelinePlan(schedule, 1, 6, (StagePlan(0, 4, devices, shares, option.recompute),))
                        step = judge(planner.table(1), fleet, plan).pipe
                        real = max(cost, other) / len(devices) if stages.row.delay else cost + other
                        assert real == pytest.approx(step, rel=1e-9)
    assert looked > 50
    assert refused > 0


def test_control_of_shares_that_are_dealt_to_other_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = stages_module._shares
    monkeypatch.setattr(stages_module, "_shares", lambda each, *rest: shares(each[::-1], *rest))
    with pytest.raises(AssertionError):
        test_cells_have_the_times_of_all_ways_to_deal_microbatches_out("gpipe")


class Interrupted(list[Any]):
    """A list to which nothing can be added before the second try."""

    tried = False

    def append(self, item: Any) -> None:
        if not self.tried:
            self.tried = True
            raise KeyboardInterrupt
        super().append(item)


@pytest.mark.parametrize("name", ["options", "_hops"])
def test_a_search_after_an_interrupt_finds_the_same(name: str) -> None:
    """An option or a boundary that was not listed whole is listed anew."""
    sets = drawn_sets(0)
    stages = drawn_stages(0)
    cells, option = StageCells(stages, 1), next(iter(stages.options((0, 1), 0, 0, sets.ring(0))))
    groups = np.arange(len(sets.groups)), np.arange(len(sets.groups))[::-1]

    def asked() -> object:
        if name == "options":
            return cells.look(np.array([cells.number(option)]), np.array([0]), np.array([2]))[0].tolist()
        numbers, hops = sets.hop_numbers(*groups)
        return [hops[number] for number in numbers.tolist()]

    setattr(cells if name == "options" else sets, name, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        asked()
    found = asked()
    sets, cells = drawn_sets(0), StageCells(stages, 1)
    assert found == asked()
