"""Plans for inference, of one microbatch alone and of a run of many: against looking at every plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations
from math import inf
from random import Random

import pytest

from penstock.ir.cluster.cluster import Cluster, Device, Link, LinkClass
from penstock.passes.planner.chain import Amount, Chain, Layer, PhaseWork, Times
from penstock.passes.planner.fleet import Fleet, fleet_of
from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.planner import Outcome, Planner

from .brute import Brute
from .drawn import draw_chain, draw_fleet

MANY = 512


class Alone(Brute):
    """Every plan whose stages have one device each: every order of some devices, with every cut."""

    def run(self) -> float:
        layers = len(self.layers)
        for count in range(1, min(len(self.fleet), layers) + 1):
            for devices in permutations(range(len(self.fleet)), count):
                for cuts in combinations(range(1, layers), count - 1):
                    if all(self.layers[c].cut for c in cuts):
                        self._try(tuple((device,) for device in devices), (0, *cuts, layers))
        return self.best


def forward_only(chain: Chain) -> Chain:
    """The chain of a model that is not trained."""
    layers = [
        replace(x, grads=0, state=0, saved=Amount(), back=Amount(), backward=PhaseWork(), weight=PhaseWork())
        for x in chain.layers
    ]

    def timer(chain: Chain, device: Device, b: int) -> Times:
        times = plain.timer(plain, device, b)
        return replace(times, update=(0.0,) * len(layers))

    plain = Chain(tuple(layers), entry=chain.entry)
    return replace(plain, timer=timer)


def draw(seed: int) -> tuple[Chain, Fleet]:
    rng = Random(seed)
    fleet = draw_fleet(rng, rng.randint(2, 4), nics=rng.random() < 0.3)
    if rng.random() < 0.4:
        few = [rng.choice([3e5, 6e5, 1e6, 2e6]) for _ in fleet.devices]
        fleet = fleet.but([replace(d, spaces=(("ram", int(n)),)) for d, n in zip(fleet.devices, few, strict=True)])
    return forward_only(draw_chain(rng, rng.randint(3, 6))), fleet


CASES = [draw(seed) for seed in range(40)]


def best_plan(chain: Chain, fleet: Fleet, count: int) -> Outcome | None:
    wanted = PlanRequest(2 * count, ("forward",), "none", (2,), replicas=1, tolerance=1e-11)
    return Planner(chain, fleet, wanted).best("forward")


def every_plan(chain: Chain, fleet: Fleet, count: int) -> float:
    return Alone(chain, fleet, "forward", 2, count, 0, "none").run()


@pytest.mark.parametrize("count", [1, MANY])
def test_plans_equal_looking_at_every_plan(count: int) -> None:
    stages, fitted = set[int](), 0
    for chain, fleet in CASES:
        outcome, best = best_plan(chain, fleet, count), every_plan(chain, fleet, count)
        assert (inf if outcome is None else outcome.step) == pytest.approx(best, rel=1e-9)
        if outcome is not None:
            fitted += 1
            stages.add(len(outcome.plan.stages))
            assert outcome.bound <= best * (1 + 1e-9)
            assert outcome.proven(1e-9) or any(fleet.path(0, i).shares for i in range(1, len(fleet)))
    # Memory and speeds make plans of one stage and of several, and where memory is too small none.
    assert len(stages) > 2
    assert 20 < fitted < len(CASES)


def test_the_objectives_differ() -> None:
    """A plan for many microbatches is not that for one: to take the one for the other would fail the test above."""
    differ = 0
    for chain, fleet in CASES:
        one, many = best_plan(chain, fleet, 1), best_plan(chain, fleet, MANY)
        if one is not None and many is not None:
            differ += one.plan.stages != tuple(replace(s, shares=(1,)) for s in many.plan.stages)
    assert differ > 10


def crossed() -> tuple[Chain, Fleet]:
    """Two layers, each of which is three times as fast on one of two devices."""
    layers = tuple(
        Layer(f"l{i}", out=Amount(1), back=Amount(), forward=PhaseWork(Amount(*work[:1]), Amount(*work[1:])))
        for i, work in enumerate(((3 * 10**9, 10**8), (10**9, 3 * 10**8)))
    )
    devices = (Device("a", flops=3e9, bandwidth=1e8), Device("b", flops=1e9, bandwidth=3e8))
    return Chain(layers), fleet_of(Cluster(devices, (Link("a", "b", 1e12, 0.0),)))


@pytest.mark.parametrize(("schedule", "count"), [("forward", 1), ("1f1b", 1), ("1f1b", 2), ("gpipe", 4)])
def test_no_bound_takes_one_device_for_the_fastest_at_every_layer(schedule: str, count: int) -> None:
    chain, fleet = crossed()
    wanted = PlanRequest(count, (schedule,), "none", (1,), replicas=1, tolerance=1e-11)
    planner = Planner(chain, fleet, wanted)
    outcome, best = planner.best(schedule), Alone(chain, fleet, schedule, 1, count, 0, "none").run()
    assert outcome is not None
    assert outcome.step == pytest.approx(best, rel=1e-9)
    assert planner.floor(schedule, 1).step <= best * (1 + 1e-9)
    alone = min(Alone(chain, fleet.only([i]), schedule, 1, count, 0, "none").run() for i in range(2))
    # One device alone takes twice as long, which a bound by the faster one would be above.
    assert outcome.step < 0.7 * alone


@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("size", [8, 16])
def test_unlike_devices_are_proven_within_the_tolerance(size: int, count: int) -> None:
    """Devices of which no two are alike, each too small for the model, and most faster than others on some layers
    only. No plan that is drawn is below the bound."""
    rng = Random(7)
    chain = forward_only(draw_chain(rng, 24))
    need = sum(x.params for x in chain.layers)
    devices = tuple(
        Device(
            f"d{i}",
            host=f"h{i}",
            flops=1e9 * (1 + rng.random() * 3),
            bandwidth=1e8 * (1 + rng.random() * 3),
            spaces=(("ram", int(need * rng.uniform(0.15, 0.4))),),
        )
        for i in range(size)
    )
    fleet = fleet_of(Cluster(devices, classes=(LinkClass("other-host", 1e8, 1e-4),)))
    wanted = PlanRequest(2 * count, ("forward",), "none", (2,), replicas=1)
    outcome = Planner(chain, fleet, wanted).best("forward")
    assert outcome is not None
    assert len(outcome.plan.stages) > 2
    assert outcome.proven(wanted.tolerance)
    drawn = Alone(chain, fleet, "forward", 2, count, 0, "none")
    cuttable = [i for i in range(1, len(chain.layers)) if chain.layers[i].cut]
    for _ in range(500):
        stages = rng.randint(3, size)
        cuts = sorted(rng.sample(cuttable, stages - 1))
        drawn._try(tuple((device,) for device in rng.sample(range(size), stages)), (0, *cuts, len(chain.layers)))
    assert outcome.bound <= outcome.step <= drawn.best < inf
    # The control: drawn plans are not as good.
    assert drawn.best > 1.05 * outcome.step
