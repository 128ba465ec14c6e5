"""Tests of the reasons of a plan: devices left out, the effect of changes, and the nearest change that fits, each
against a new plan or search."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from math import inf
from random import Random

import pytest

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.passes.planner import argue
from penstock.passes.planner.argue import PlanChange, Result, counterfactuals, plan_chain
from penstock.passes.planner.chain import Amount, Chain, Layer, PhaseWork, Times
from penstock.passes.planner.fleet import fleet_of
from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.profile import Profile
from penstock.planning.choice import Search
from penstock.support.errors import DoesNotFit

from .brute import best_of_all
from .drawn import draw_chain, draw_fleet

BASE = 1000


@functools.cache
def drawn_results() -> tuple[Result, ...]:
    found, seed = list[Result](), 1000
    while len(found) < 12:
        seed += 1
        rng = Random(seed)
        chain, fleet = draw_chain(rng, rng.randint(2, 5)), draw_fleet(rng, 3, False)
        try:
            found.append(
                plan_chain(chain, fleet, PlanRequest(4, ("1f1b", "2bw"), sizes=(1, 2), base=BASE, tolerance=1e-11))
            )
        except DoesNotFit:
            continue
    return tuple(found)


def test_counterfactuals_are_what_planning_again_gives() -> None:
    checked = 0
    for result in drawn_results():
        schedule = result.best.plan.schedule
        for change in counterfactuals(result):
            step = inf if change.step is None else change.step
            if change.name.startswith("recomputation"):
                assert step == pytest.approx(
                    best_of_all(result.chain, result.fleet, result.wanted, schedule, change.name.split()[-1]), rel=1e-9
                )
            elif change.name.startswith("schedule"):
                assert step == pytest.approx(
                    best_of_all(result.chain, result.fleet, result.wanted, change.name.split()[-1]), rel=1e-9
                )
            elif change.name.startswith("without"):
                lost = next(i for i, d in enumerate(result.fleet.devices) if d.name == change.name.split()[1])
                rest = result.fleet.only([i for i in range(3) if i != lost])
                assert step == pytest.approx(best_of_all(result.chain, rest, result.wanted, schedule), rel=1e-9)
            elif change.name.startswith("memory"):
                free = result.fleet.but([replace(d, spaces=()) for d in result.fleet.devices])
                assert step == pytest.approx(best_of_all(result.chain, free, result.wanted, schedule), rel=1e-9)
            if not change.name.startswith("schedule") and ("twice" in change.name or "memory" in change.name):
                assert step <= result.best.step * (1 + 1e-9)
            checked += 1
    assert checked > 60


def test_other_times() -> None:
    """Half the operations, as with 16-bit floats, are a chain of their own."""
    layers = tuple(
        Layer(f"l{i}", 10, 10, 0, forward=PhaseWork(Amount(0, 1000)), backward=PhaseWork(Amount(0, 2000)))
        for i in range(4)
    )
    half = Chain(
        tuple(replace(x, forward=PhaseWork(Amount(0, 500)), backward=PhaseWork(Amount(0, 1000))) for x in layers)
    )
    result = plan_chain(
        Chain(layers), Cluster((Device("a", flops=1e6, bandwidth=1e12),)), PlanRequest(4, ("1f1b",), sizes=(1,))
    )
    (change,) = [c for c in counterfactuals(result, {"bf16": half}) if c.name == "bf16"]
    assert change.step == pytest.approx(result.best.step / 2, rel=1e-3)
    # A precision may join layers: then the plan's ranges are no ranges of the other chain.
    joined = replace(
        half.layers[0], name="all", forward=PhaseWork(Amount(0, 2000)), backward=PhaseWork(Amount(0, 4000))
    )
    (change,) = [c for c in counterfactuals(result, {"joined": Chain((joined,))}) if c.name == "joined"]
    assert change.step == pytest.approx(result.best.step / 2, rel=1e-3)


def test_one_of_a_kind_is_no_plural() -> None:
    layers = tuple(
        Layer(f"l{i}", 10, 10, 0, forward=PhaseWork(Amount(0, 1000)), backward=PhaseWork(Amount(0, 2000)))
        for i in range(4)
    )
    for devices, said in (
        (1, []),
        (2, ["without d0 (or the other one like it)"]),
        (3, ["without d0 (or one of 2 like it)"]),
    ):
        fleet = fleet_of(Cluster(tuple(Device(f"d{i}", flops=1e6, bandwidth=1e12) for i in range(devices))))
        result = plan_chain(Chain(layers), fleet, PlanRequest(24, ("1f1b",)))
        assert [c.name for c in counterfactuals(result) if "like it" in c.name] == said


def test_says_why_devices_are_left_out() -> None:
    devices = (
        Device("a", flops=1e6, bandwidth=1e12),
        Device("tiny", flops=1e6, bandwidth=1e12, spaces=(("ram", 10),)),
        Device("snail", flops=10.0, bandwidth=1e12),
    )
    layers = tuple(
        Layer(f"l{i}", 1000, 1000, 0, forward=PhaseWork(Amount(0, 1000)), backward=PhaseWork(Amount(0, 2000)))
        for i in range(4)
    )
    result = plan_chain(Chain(layers), fleet_of(Cluster(devices)), PlanRequest(4, ("1f1b",)))
    assert result.left_out["tiny"] == "no plan that uses it fits"
    assert re.fullmatch(
        r"a batch would take \d+\.\d{3} m?s with it instead of \d+\.\d{3} m?s", result.left_out["snail"]
    )
    assert result.left_out.keys() == {"tiny", "snail"}
    assert result.with_idle["tiny"] is None


@pytest.mark.parametrize("rate", [10.0, 9e5])
def test_says_what_each_device_contributes(rate: float) -> None:
    """Against plans of the devices that are left; the control is the device that hurts, when it is fast."""
    devices = (
        Device("a", flops=1e6, bandwidth=1e12),
        Device("tiny", flops=1e6, bandwidth=1e12, spaces=(("ram", 10),)),
        Device("other", flops=rate, bandwidth=1e12),
    )
    layers = tuple(
        Layer(f"l{i}", 1000, 1000, 0, forward=PhaseWork(Amount(0, 1000)), backward=PhaseWork(Amount(0, 2000)))
        for i in range(4)
    )

    def planned(*used: Device) -> Result:
        return plan_chain(Chain(layers), fleet_of(Cluster(used)), PlanRequest(4, ("1f1b",)))

    result = planned(*devices)
    search = Search(Profile(Chain(layers), (), 4, 0.25), result, result.best, {})
    rows = {row.device: row for row in search.contributions}
    assert (rows["tiny"].used, rows["tiny"].effect, rows["tiny"].with_it) == (False, "unfit", None)
    alone, other = planned(devices[0]).best.step, rows["other"]
    if rate == 10.0:
        assert (rows["a"].used, other.used, other.effect) == (True, False, "hurts")
        assert other.without_it == pytest.approx(alone)
        assert other.with_it is not None
        assert other.gain == pytest.approx(alone / other.with_it - 1)
        assert other.gain < -0.5
    else:
        assert (other.used, other.effect) == (True, "helps")
        assert other.without_it == pytest.approx(alone)
        assert other.gain == pytest.approx(alone / result.best.step - 1)
        assert rows["a"].effect == "helps"
        # Searched in haste, the plan without it may be slower than the best one: "helps" needs a bound that says so.
        usual = search.usual
        for bound, effect in ((0.0, "helps"), (1.2 * usual, "helps"), (1.001 * usual, "unknown")):
            change = PlanChange("without other", 1.3 * usual, devices=("other",), bound=bound)
            again = replace(search)
            vars(again)["what_if"] = [change]
            assert next(row.effect for row in again.contributions if row.device == "other") == effect


def test_what_does_not_fit_says_what_would() -> None:
    """The memory it names is enough, and a percent less is not."""
    found, short, named, units = 0, 0, set[str](), {"B": 1, "KiB": 1024, "MiB": 1 << 20}
    numbers = set[int]()
    for seed in range(2000, 2040):
        rng = Random(seed)
        chain, fleet = draw_chain(rng, 3), draw_fleet(rng, 2, False)
        wanted = PlanRequest(4, ("2bw",), "none", (2,), base=BASE)
        try:
            plan_chain(chain, fleet, wanted)
            continue
        except DoesNotFit as error:
            said = error
        assert said.exit_code == 4
        factor, hint = float(said.what.split("with ")[1].split()[0]), said.hint
        # What fills the device is all of what it holds, but for what is rounded to tenths of a unit; the control is what was listed once.
        rows = re.findall(r"(holds|\n[a-z]+) +([\d.]+) (B|KiB|MiB)\b", said.what)
        held, rounded = (
            {name.strip(): float(n) * units[unit] for name, n, unit in rows},
            sum(0.05 * units[unit] for _, _, unit in rows),
        )
        whole = held.pop("holds")
        assert abs(whole - sum(held.values())) <= rounded
        short += whole - sum(held.get(name, 0.0) for name in ("weights", "gradients", "state", "activations")) > rounded
        named |= held.keys()
        for part, fits in ((factor, True), (factor * 0.99, False)):
            grown = fleet.but(
                [replace(d, spaces=(("ram", int(d.memory * part)),)) if d.memory else d for d in fleet.devices]
            )
            assert (best_of_all(chain, grown, wanted, "2bw", "none") < inf) == fits
        spared = re.search(r"give \S+ and the others ([\d.]+) times their memory, \S+ ([\d.]+) (B|KiB|MiB)$", hint)
        assert spared is not None
        assert float(spared[1]) == pytest.approx(factor * 1.05, abs=1e-3)
        assert float(spared[2]) * units[spared[3]] >= (whole - 0.05 * units[rows[0][2]]) * 1.05
        if (more := re.search(r"add (\d+) devices? like", hint)) and int(more[1]) <= 2:
            for count, fits in ((int(more[1]), True), (int(more[1]) - 1, False)):
                grown = argue._grown(fleet.with_memory(1 / 1.05), count)
                assert (best_of_all(chain, grown, wanted, "2bw", "none") < inf) == fits
            numbers.add(int(more[1]))
        recomputes = best_of_all(chain, fleet, wanted, "2bw", "auto") < inf
        assert recomputes == ("recompute activations" in hint.split("; or "))
        smaller = best_of_all(chain, fleet, replace(wanted, sizes=(1, 2, 4)), "2bw", "none") < inf
        assert smaller == ("use smaller microbatches" in hint.split("; or "))
        assert (best_of_all(chain, fleet, wanted, "1f1b", "none") < inf) == (
            "keep one version of the weights (1f1b)" in hint.split("; or ")
        )
        found += 1
    assert found >= 8
    assert short
    assert numbers == {1, 2}
    assert {"weights", "gradients", "state", "activations", "boundary", "workspace", "base"} <= named


def test_memory_is_named_where_sizes_have_rows_of_their_own() -> None:
    """Which device is fast, and so the order of devices in a row, may depend on the size of a microbatch: what is enough for one size by itself
    may not be found among the rows of all."""
    speed = {("A", 1): 1.0, ("B", 1): 2.0, ("C", 1): 3.0, ("A", 8): 3.0, ("B", 8): 2.0, ("C", 8): 1.0}
    memory, several = {"A": 800_000, "B": 20, "C": 400_000}, {"A": 3, "B": 30, "C": 3}
    layers = tuple(
        Layer(
            f"l{i}", params=10**6, grads=10**6, saved=Amount(10**6, 50_000), out=Amount(0, 1000), back=Amount(0, 1000)
        )
        for i in range(6)
    )

    def timer(chain: Chain, device: Device, b: int) -> Times:
        t, count = b * 1e-3 / speed[device.target, b], len(chain.layers)
        return Times((t,) * count, (2 * t,) * count, (t,) * count, (t,) * count, (0.0,) * count)

    devices = [
        Device(f"{k}{i}", host=f"h{k}", target=k, spaces=(("ram", memory[k]),))
        for k in "BAC"
        for i in range(several[k])
    ]
    wanted = PlanRequest(8, ("gpipe",), "none", (1, 8), replicas=1)
    with pytest.raises(DoesNotFit, match=r"with [\d.]+ times of it something would"):
        plan_chain(Chain(layers, timer=timer), Cluster(tuple(devices)), wanted)


def test_what_is_looked_for_is_told() -> None:
    """Cases of the search, then what could be otherwise; an error that need not be explained comes without the second."""
    chain, fleet = draw_chain(Random(3), 3), draw_fleet(Random(3), 2, False)
    none = fleet.but([replace(device, spaces=(("ram", 1000),)) for device in fleet.devices])
    wanted = PlanRequest(4, ("1f1b", "2bw"), sizes=(1, 2), base=BASE)
    told: dict[bool, list[tuple[int, int, str]]] = {True: [], False: []}
    for explained, lines in told.items():
        with pytest.raises(DoesNotFit, match="no plan fits into the memory of the devices") as error:
            plan_chain(chain, none, wanted, explained=explained, progress=lambda *row, lines=lines: lines.append(row))
        assert bool(error.value.hint) is explained
        assert all(done < total for done, total, _ in lines)
    cases = {f"{schedule}, microbatches of {b}" for schedule in ("1f1b", "2bw") for b in (1, 2)}
    assert {what for _, _, what in told[False]} == cases
    asked = {what.split("? ")[0] for _, _, what in told[True]} - cases
    assert {
        "nothing fits; more devices",
        "nothing fits; more memory",
        "nothing fits; keep one version of the weights (1f1b)",
    } <= asked


def test_what_was_given_is_not_proposed() -> None:
    """Recomputation to who asked for all of it, one version of the weights to who has one."""
    hints: dict[str, list[str]] = {"none": [], "all": []}
    for seed in range(2000, 2020):
        rng = Random(seed)
        chain, fleet = draw_chain(rng, 3), draw_fleet(rng, 2, False)
        for schedule, recompute in (("zb-1f1b", "none"), ("1f1b", "all")):
            try:
                plan_chain(chain, fleet, PlanRequest(4, (schedule,), recompute, (2,), base=BASE))
            except DoesNotFit as error:
                hints[recompute].append(error.hint)
    assert min(map(len, hints.values())) >= 4
    assert not [hint for hint in (*hints["none"], *hints["all"]) if "keep one version" in hint]
    assert not [hint for hint in hints["all"] if "recompute activations" in hint]
    assert [hint for hint in hints["none"] if "recompute activations" in hint]
