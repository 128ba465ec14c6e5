"""Plans of unequal devices: against looking at every plan, against a search for free links, cut short, and interrupted."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import numpy as np
import pytest

from penstock.ir.cluster.cluster import Cluster, Device, Link, LinkClass
from penstock.ir.schedule_names import TRAINING
from penstock.passes.planner import argue
from penstock.passes.planner.argue import plan_chain
from penstock.passes.planner.chain import Chain
from penstock.passes.planner.cost import judge
from penstock.passes.planner.fleet import Fleet, equal_hosts, fleet_of
from penstock.passes.planner.layouts import DeviceSets
from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.planner import Planner
from penstock.passes.planner.set_search import SetSearch
from penstock.passes.planner.tables.least import least_of_groups
from penstock.support.errors import DoesNotFit

from .brute import best_of_all
from .drawn import draw_chain, draw_fleet


def unequal(rng: Random, count: int, latency: float = 1e-4) -> Fleet:
    """Devices of which no two are alike, on hosts of their own with equal links."""
    devices = tuple(Device(f"d{i}", host=f"h{i}", flops=1e9 * (1 + rng.random() * 3)) for i in range(count))
    return fleet_of(Cluster(devices, classes=(LinkClass("other-host", 1e8 if latency else 1e24, latency),)))


def draw(seed: int) -> tuple[Chain, Fleet, PlanRequest]:
    rng = Random(1000 + seed)
    chain = draw_chain(rng, rng.randint(2, 4))
    fleet = unequal(rng, 4) if rng.random() < 0.5 else draw_fleet(rng, 4, nics=False)
    schedule = rng.choice(TRAINING)
    return chain, fleet, PlanRequest(rng.choice([4, 6]), (schedule,), sizes=(1, 2), tolerance=1e-11)


CASES = [draw(seed) for seed in range(24)]
BEST = [best_of_all(chain, fleet, wanted, wanted.schedules[0]) for chain, fleet, wanted in CASES]


def steps() -> list[tuple[float, float, bool]]:
    """Step, bound and whether the plan is proven, of every case."""
    found = []
    for chain, fleet, wanted in CASES:
        outcome = Planner(chain, fleet, wanted).best(wanted.schedules[0])
        found.append((inf, inf, True) if outcome is None else (outcome.step, outcome.bound, outcome.proven(1e-9)))
    return found


def test_plans_of_unequal_devices_equal_looking_at_every_plan() -> None:
    for (step, _, proven), best in zip(steps(), BEST, strict=True):
        assert step == pytest.approx(best, rel=1e-9)
        assert proven


def test_no_stage_is_below_the_least_of_its_group() -> None:
    """Every way to run a stage, on every group and wherever it stands, takes at least what is counted without looking
    at it; and nearly nothing would be left to a bound that is a hundredth higher."""
    tight = 0
    for chain, fleet, wanted in CASES:
        planner = Planner(chain, fleet, wanted)
        stages, sets = planner._stages(wanted.schedules[0], 1, len(fleet)), planner.places()[0]
        assert isinstance(sets, DeviceSets)
        groups = [sets.devices(group) for group in range(len(sets.groups))]
        rings = [sets.ring(group) for group in range(len(sets.groups))]
        paces, _ = least_of_groups(stages, groups, rings)
        for pace, devices, ring in zip(paces, groups, rings, strict=True):
            times = len(devices) if stages.row.delay else 1
            for later, ahead in product(range(len(fleet) - len(devices) + 1), (0, 1, 2)):
                for option in stages.options(devices, later, ahead, ring):
                    real = option.pace if option.ring is None else np.maximum(option.pace, option.ring)
                    real = np.where(np.isfinite(option.pace), real, np.inf)
                    assert (times * pace <= real * (1 + 1e-9)).all()
                    tight += int((times * pace * 1.01 > real)[np.isfinite(real)].sum())
    assert tight > 1000


def losses() -> list[tuple[float, float]]:
    """The best step without each device, and without it and the next one, of some cases: by a planner of the whole fleet
    that keeps its searches, and by looking at every plan of the others."""
    rows = []
    for chain, fleet, wanted in CASES[::3]:
        planner, schedule = Planner(chain, fleet, wanted), wanted.schedules[0]
        for lost in [{i, j} for i in range(4) for j in (i, (i + 1) % 4)]:
            outcome = planner.without(lost).best(schedule)
            assert outcome is None or not lost & {*outcome.plan.devices}
            rest = fleet.only([i for i in range(4) if i not in lost])
            rows.append((inf if outcome is None else outcome.step, best_of_all(chain, rest, wanted, schedule)))
    return rows


def test_plans_without_devices_equal_looking_at_every_plan_of_the_others() -> None:
    steps, best = zip(*losses(), strict=True)
    assert steps == pytest.approx(best, rel=1e-9)
    assert sum(step < inf for step in steps) > 30


def test_control_of_one_device_more_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were one device more left out than was asked for, plans would be missed."""
    without = DeviceSets.without
    monkeypatch.setattr(DeviceSets, "without", lambda self, gone: without(self, {*gone, 3} if gone else gone))
    assert any(step > best * (1 + 1e-9) for step, best in losses())


def test_the_part_of_a_large_fleet_has_the_numbers_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not every choice is searched, plans without a device are those of the others alone."""
    monkeypatch.setattr("penstock.passes.planner.layouts._MOST_PAIRS", 2)
    for chain, fleet, wanted in CASES[:6]:
        part = fleet.only([0, 2, 3])
        alone = Planner(chain, part, wanted).best(wanted.schedules[0])
        outcome = Planner(chain, fleet, wanted).without([1]).best(wanted.schedules[0])
        assert (outcome is None) == (alone is None)
        if outcome is not None and alone is not None:
            assert outcome.step == alone.step
            assert 1 not in outcome.plan.devices
            assert {*outcome.judged.memory} == {*outcome.plan.devices}


def test_control_of_a_bound_that_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were devices said to reach one layer less, plans would be missed."""
    reached = DeviceSets.reached
    monkeypatch.setattr(DeviceSets, "reached", lambda self, reach: np.maximum(reached(self, reach) - 1, 0))
    assert any(step > best * (1 + 1e-9) for (step, _, _), best in zip(steps(), BEST, strict=True))


def test_control_of_a_sum_that_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = DeviceSets.sums
    monkeypatch.setattr(DeviceSets, "sums", lambda self, each: 1.5 * sums(self, each))
    assert any(step > best * (1 + 1e-9) for (step, _, _), best in zip(steps(), BEST, strict=True))


@pytest.mark.parametrize("limit", ["set_search._STATES", "layouts._MOST_PAIRS"])
def test_what_is_left_out_is_not_said_to_be_proven(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few states, and with few groups of devices: no plan is better than the best, and no bound is above it."""
    monkeypatch.setattr(f"penstock.passes.planner.{limit}", 2)
    monkeypatch.setattr("penstock.passes.planner.set_search._FEW_STATES", 2)
    found = steps()
    for (step, bound, proven), best in zip(found, BEST, strict=True):
        assert bound * (1 - 1e-9) <= best <= step * (1 + 1e-9) or bound == step == inf
        if proven and step < inf:
            assert step == pytest.approx(best, rel=1e-9)
    assert not all(proven for _, _, proven in found)


def test_what_waits_may_be_merged_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few waiting states and small matrices: the same plans, all proven."""
    monkeypatch.setattr("penstock.passes.planner.set_search._WAITING", 5)
    monkeypatch.setattr("penstock.passes.planner.set_search._CELLS", 8)
    assert all(proven for _, _, proven in steps())
    assert [step for step, _, _ in steps()] == pytest.approx(BEST, rel=1e-9)


def test_a_search_that_a_limit_ended_does_not_say_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, fleet, wanted = next(case for case, best in zip(CASES, BEST, strict=True) if best < inf)
    monkeypatch.setattr("penstock.passes.planner.set_search._ENOUGH", 0)
    with pytest.raises(DoesNotFit, match="no plan was found"):
        plan_chain(chain, fleet, wanted)


def slowest_of_free_links(times: np.ndarray) -> float:
    """The least time of the slowest stage, one device each in any order: for limits, how far each set of devices gets."""
    sums = np.concatenate([np.zeros((len(times), 1)), np.cumsum(times, 1)], 1)
    layers, full = times.shape[1], 1 << len(times)

    def enough(limit: float) -> bool:
        reach = np.array([np.searchsorted(row, row + limit * (1 + 1e-12), "right") - 1 for row in sums])
        far = np.zeros(full, int)
        for used in range(1, full):
            far[used] = max(reach[d][far[used ^ (1 << d)]] for d in range(len(times)) if used >> d & 1)
        return bool(far[-1] == layers)

    limits = sorted({float(row[z] - row[a]) for row in sums for a in range(layers) for z in range(a + 1, layers + 1)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(limits[middle]) else (middle + 1, high)
    return limits[low]


@pytest.mark.parametrize("count", [7, 9])
def test_single_devices_on_free_links_equal_a_search_for_the_slowest_stage(count: int) -> None:
    rng = Random(count)
    chain, fleet = draw_chain(rng, 12), unequal(rng, count, latency=0.0)
    chain = replace(chain, layers=tuple(replace(layer, cut=True) for layer in chain.layers))
    wanted = PlanRequest(64, ("2bw",), sizes=(1,), replicas=1, tolerance=1e-9)
    planner = Planner(chain, fleet, wanted)
    found = planner.best("2bw")
    assert found is not None
    table = planner.table(1)
    rows = [table.times(device) for device in fleet.devices]
    times = np.stack([64 * np.diff(forward + backward) + np.diff(update) for forward, backward, _, _, update in rows])
    assert found.step == pytest.approx(slowest_of_free_links(times), rel=1e-6)
    assert found.proven(1e-6)


def test_sixteen_unequal_devices_are_proven_without_replicas() -> None:
    rng = Random(16)
    found = Planner(draw_chain(rng, 20), unequal(rng, 16), PlanRequest(32, sizes=(1,), replicas=1)).best("2bw")
    assert found is not None
    assert found.proven(1e-4)


def test_the_same_devices_give_the_same_plan() -> None:
    chain, fleet, wanted = CASES[0]
    plans = [Planner(chain, fleet, wanted).best(wanted.schedules[0]) for _ in range(2)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].plan == plans[1].plan


@pytest.mark.parametrize("after", [1, 3, 8])
def test_an_interrupt_keeps_the_best_plan_until_then(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(5)
    chain, fleet = draw_chain(rng, 6), unequal(rng, 5)
    wanted = PlanRequest(16, ("1f1b", "2bw"))
    whole = plan_chain(chain, fleet, wanted)
    seen, under = [], SetSearch._judged

    def judged(self: SetSearch, plan: object) -> object:
        if len(seen) == after:
            raise KeyboardInterrupt
        seen.append(plan)
        return under(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(SetSearch, "_judged", judged)
    part = plan_chain(chain, fleet, wanted)
    assert part.stopped
    assert not whole.stopped
    best = part.outcomes["1f1b"]
    assert not judge(part.planner.table(best.plan.size), fleet, best.plan).against
    assert best.bound <= whole.outcomes["1f1b"].step * (1 + 1e-9) <= best.step * (1 + 2e-4)


def test_an_interrupt_before_the_first_plan_ends_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: SetSearch, plan: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(SetSearch, "_judged", interrupted)
    chain, fleet, wanted = CASES[0]
    with pytest.raises(KeyboardInterrupt):
        plan_chain(chain, fleet, wanted)


@pytest.mark.parametrize("replicas", [0, 1, 2, 3])
def test_devices_that_nothing_fits_on_are_told(replicas: int) -> None:
    chain = draw_chain(Random(4), 4)
    small = Cluster(tuple(Device(f"d{i}", spaces=(("ram", 1000),)) for i in range(3)))
    with pytest.raises(DoesNotFit, match="no plan fits"):
        plan_chain(chain, small, PlanRequest(8, ("1f1b",), sizes=(1,), replicas=replicas))


@pytest.mark.parametrize(("replicas", "most"), [(1, 6), (3, 18)])
def test_of_more_devices_than_layers_take_some_are_left_out(replicas: int, most: int) -> None:
    chain, many = draw_chain(Random(5), 6), Cluster(tuple(Device(f"d{i}") for i in range(40)))
    wanted = PlanRequest(64, ("1f1b",), sizes=(1,), replicas=replicas)
    best = plan_chain(chain, many, wanted).best
    assert 1 < len(best.plan.devices) <= most
    assert max(len(stage.devices) for stage in best.plan.stages) <= replicas


def test_an_interrupt_while_reasons_are_searched_keeps_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, fleet, wanted = CASES[0]
    whole = plan_chain(chain, fleet, wanted)
    assert not whole.stopped

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(argue, "_left_out", interrupted)
    result = plan_chain(chain, fleet, wanted)
    assert result.stopped
    assert result.left_out == {}
    assert result.best.plan == whole.best.plan


def test_planners_that_compare_leave_interrupts_to_their_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that was cut short has no figure: an interrupt of it is no "nothing fits"."""
    chain, fleet, wanted = CASES[0]
    planner = Planner(chain, fleet, wanted)
    schedule = wanted.schedules[0]
    assert planner.best(schedule) is not None

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SetSearch, "_judged", interrupted)
    for other in (planner.on(fleet), planner.but(wanted)):
        with pytest.raises(KeyboardInterrupt):
            other.best(schedule)


def test_another_order_of_replicas_is_not_claimed_to_be_worse() -> None:
    """Links between pairs are slow: a ring that goes round them is faster, and no plan has it. The plan says so."""
    alike = Cluster(tuple(Device(f"d{i}", host=f"h{i}") for i in range(4)))
    links = (Link("d0", "d1", 1e6, 0.0), Link("d2", "d3", 1e6, 0.0))
    unlike = replace(alike, links=links)
    wanted = PlanRequest(8, ("1f1b",), sizes=(1,))
    chain = draw_chain(Random(6), 2)
    assert Planner(chain, fleet_of(alike), wanted).orders_alike
    assert not Planner(chain, fleet_of(unlike), wanted).orders_alike
    assert Planner(chain, fleet_of(unlike), replace(wanted, replicas=1)).orders_alike


def test_paths_of_a_fleet_are_those_of_its_cluster() -> None:
    """Those of devices that are alike are asked for once: on hosts with network cards, with GPUs, and with named links."""
    equal = equal_hosts(3, 2, Device("d", host="h"), (1e10, 1e-6), (1e9, 1e-5))
    devices = (*equal.devices[:4], *(replace(d, kind="cuda", target="sm_90") for d in equal.devices[4:]))
    for cluster in (
        equal,
        replace(equal, devices=devices),
        replace(equal, links=(Link("h0:0", "h1:1", 1e6, 1e-2), Link("h0:0", "h0:1", 1e7, 1e-3))),
        Cluster((Device("a"), Device("b", socket_bandwidth=1e7), Device("c"))),
    ):
        names, fleet = [device.name for device in cluster.devices], fleet_of(cluster)
        for a, b in product(range(len(names)), repeat=2):
            assert fleet.path(a, b) == cluster.path(names[a], names[b]), (a, b)
