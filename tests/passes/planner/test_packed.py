"""Plans with several stages on a device: against every plan there is, and against the numbers of the passes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import pytest

from penstock.commands.parser import main
from penstock.ir.cluster.cluster import Cluster, Device, LinkClass
from penstock.models import write_mlp
from penstock.passes.planner import packed
from penstock.passes.planner.chain import Amount, Chain, Layer, Times
from penstock.passes.planner.fleet import fleet_of
from penstock.passes.planner.packed import Packed, judge_packs, pack
from penstock.passes.planner.plan import PipelinePlan, PlanRequest, StagePlan
from penstock.passes.planner.planner import Planner
from penstock.passes.planner.refine import SimulatedSteps, refine
from penstock.passes.schedules.schedule import PACK_SCHEDULES


def even(devices: int, layers: int, count: int, memory: int | None = None) -> tuple[Planner, Cluster]:
    """Layers of one length on equal devices that are connected for nothing: a forward and a backward take 1 + 2."""
    each = tuple([1.0] * layers)
    times = Times(each, tuple([2.0] * layers), each, each, tuple([0.0] * layers))
    layer = [Layer(f"l{i}", params=4, grads=4, saved=Amount(100), out=Amount(1), back=Amount(1)) for i in range(layers)]
    spaces = () if memory is None else (("ram", memory),)
    listed = tuple(
        Device(f"d{i}", host=f"h{i}", spaces=spaces, message_overhead=0.0, socket_bandwidth=1e18, call_overhead=0.0)
        for i in range(devices)
    )
    cluster = Cluster(listed, classes=(LinkClass("other-host", 1e18, 0.0),))
    wanted = PlanRequest(count, ("1f1b",), "none", (1,), replicas=1)
    return Planner(Chain(tuple(layer), timer=lambda *given: times), fleet_of(cluster), wanted), cluster


@pytest.mark.parametrize(("d", "m", "each"), [(2, 4, 2), (2, 8, 4), (4, 4, 3), (4, 8, 4)])
def test_interleaved_divides_the_bubble_where_stages_are_equal(d: int, m: int, each: int) -> None:
    """m t + (d-1) t / v, where t = 3 layers / d; the best v is the one that divides the layers of a device evenly."""
    planner, cluster = even(d, d * each, m)
    found = pack(planner, cluster, ("interleaved",), [tuple(range(d))])["interleaved"]
    whole = 3.0 * each
    assert found.plan.packs == each
    assert found.step == pytest.approx(m * whole + (d - 1) * whole / each)
    # The control: one stage on a device.
    outcome = planner.best("1f1b")
    assert outcome is not None
    alone = refine(planner, cluster, outcome, range(d))
    assert alone is not None
    # Unequal stages may be a little faster.
    assert found.step < alone.step <= (m + d - 1) * whole * (1 + 1e-9)


def test_a_schedule_that_never_drains_has_no_bubble_and_two_versions_of_weights() -> None:
    planner, cluster = even(2, 4, 4)
    found = {kind: pack(planner, cluster, (kind,), [(0, 1)])[kind] for kind in ("interleaved", "interleaved-2bw")}
    assert found["interleaved-2bw"].step == pytest.approx(4 * 3.0 * 2)
    assert found["interleaved-2bw"].step < found["interleaved"].step
    weights = {kind: [held.weights for held in one.memory.values()] for kind, one in found.items()}
    assert weights["interleaved-2bw"] == [2 * nbytes for nbytes in weights["interleaved"]]
    # Four devices have six forwards ahead, so four microbatches are too few.
    planner, cluster = even(4, 8, 4)
    assert not pack(planner, cluster, ("interleaved-2bw",), [(0, 1, 2, 3)])


def test_activations_are_counted_along_the_program() -> None:
    """With d = 4 and v = 2 the first device holds 11 microbatches of single stages, where 1f1b holds 4 whole ones."""
    planner, cluster = even(4, 8, 8)
    found = pack(planner, cluster, PACK_SCHEDULES.keys(), [(0, 1, 2, 3)])  # type: ignore[arg-type]
    plan = PipelinePlan("interleaved", 1, 8, tuple(StagePlan(s, s + 1, (s % 4,), (8,)) for s in range(8)))
    held = judge_packs(planner.table(1), planner.fleet, plan).memory
    assert [held[d].activations for d in range(4)] == [1100, 900, 700, 500]
    # zb-v holds at most d whole microbatches.
    assert max(one.activations for one in found["zb-v"].memory.values()) <= 4 * 200
    tight = max(one.total for one in held.values())
    for memory, fits in ((tight, True), (tight - 1, False)):
        small, _ = even(4, 8, 8, memory)
        assert (not judge_packs(small.table(1), small.fleet, plan).against) == fits


def every_plan(planner: Planner, schedule: str, count: int, each: int = 2) -> list[PipelinePlan]:
    layers, order = len(planner.chain.layers), range(len(planner.fleet))
    packs = PACK_SCHEDULES[schedule].packs(len(order), each)
    at = {stage: device for device, stages in zip(order, packs, strict=True) for stage in stages}
    return [
        PipelinePlan(
            schedule, 1, count, tuple(StagePlan(a, b, (at[s],), (count,)) for s, (a, b) in enumerate(pairwise(ends)))
        )
        for cuts in combinations(range(1, layers), len(at) - 1)
        for ends in [[0, *cuts, layers]]
    ]


def unequal(
    rng: Random, devices: int, layers: int, beside: Sequence[float] = (0.0,), quotas: Sequence[float] = (1.0,)
) -> tuple[Planner, Cluster]:
    """Layers of unequal length on devices of unequal speed, with links that matter. Calls and ends of messages take
    seconds `beside` what is computed. Of those and of `quotas` devices have one each, in turns."""
    seconds, speeds = [rng.uniform(0.2, 1.0) for _ in range(layers)], [rng.uniform(0.5, 1.0) for _ in range(devices)]
    rows = {
        f"d{i}": Times(*(tuple(part * t / speed for t in seconds) for part in (1.0, 2.0, 1.0, 1.0, 0.1)))
        for i, speed in enumerate(speeds)
    }
    out = [rng.randint(1, 40) for _ in range(layers)]
    chain = [
        Layer(f"l{i}", params=8, grads=8, saved=Amount(8), out=Amount(out[i]), back=Amount(20)) for i in range(layers)
    ]
    listed = tuple(
        Device(
            f"d{i}",
            host=f"h{i}",
            target=f"d{i}",
            message_overhead=beside[i % len(beside)],
            call_overhead=beside[i % len(beside)],
            socket_bandwidth=1e12,
            quota=quotas[i % len(quotas)],
            quota_period=0.5 if quotas[i % len(quotas)] < 1 else 0.0,
        )
        for i in range(devices)
    )
    cluster = Cluster(listed, classes=(LinkClass("other-host", 100.0, 0.05),))
    wanted = PlanRequest(4, ("1f1b",), "none", (1,), replicas=1, tolerance=1e-6)
    return Planner(
        Chain(tuple(chain), timer=lambda chain, device, b: rows[device.target]), fleet_of(cluster), wanted
    ), cluster


@pytest.mark.parametrize("beside", [(0.0,), (0.2,), (0.01, 0.5)], ids=["nothing", "alike", "unlike"])
@pytest.mark.parametrize("schedule", list(PACK_SCHEDULES))
def test_cuts_are_the_best_of_all(schedule: str, beside: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of up to eight packs, for every number of them on a device. The control: without a look at all plans, cuts are not
    always the best."""
    rng, near = Random(7), []
    shapes = [(2, 7), (3, 8), (2, 9), (2, 6), (4, 9), (3, 7)]
    # Four microbatches are too few for one that never drains on four devices.
    most = 3 if PACK_SCHEDULES[schedule].delay else 4
    for devices, layers in (shape for shape in shapes if shape[0] <= most):
        planner, cluster = unequal(rng, devices, layers, beside)
        order = tuple(range(devices))
        judge_of = SimulatedSteps(planner, cluster, judge_packs, most=float("inf"))
        best = min(
            judge_of.step(plan)
            for each in PACK_SCHEDULES[schedule].each
            if each * devices <= min(8, layers)
            for plan in every_plan(planner, schedule, 4, each)
        )
        found: Packed = pack(planner, cluster, (schedule,), [order])[schedule]
        assert found.step == pytest.approx(judge_of.step(found.plan))
        assert found.step == pytest.approx(best)
        with monkeypatch.context() as patch:
            patch.setattr(packed, "_MOST_PLANS", 0)
            near.append(pack(planner, cluster, (schedule,), [order])[schedule].step / best)
    assert all(ratio >= 1 - 1e-9 for ratio in near)
    assert max(near) > 1.005


@pytest.mark.parametrize("quotas", [(1.0,), (1.0, 0.5)], ids=["whole", "quotas"])
@pytest.mark.parametrize("beside", [(0.0,), (0.2,), (0.01, 0.5), (0.5, 0.01)], ids=["nothing", "alike", "up", "down"])
@pytest.mark.parametrize("schedule", list(PACK_SCHEDULES))
def test_no_plan_is_faster_than_its_bound(schedule: str, beside: Sequence[float], quotas: Sequence[float]) -> None:
    """Of all ways to cut. The control: the bound is near the simulation of some plan."""
    rng, ratios = Random(11), list[float]()
    for devices, layers in ((2, 6), (3, 7)):
        planner, cluster = unequal(rng, devices, layers, beside, quotas)
        judge_of = SimulatedSteps(planner, cluster, judge_packs, most=float("inf"))
        for shape in packed._shapes(planner, schedule, tuple(range(devices)), 1):
            rows, ends = packed._rows(planner, shape, False), packed._beside(planner, cluster, shape)
            last = len(shape.places) - 1
            for inner in combinations(range(1, last), len(shape.devices) - 1):
                cuts = (0, *inner, last)
                least = packed._least(planner, shape, rows, cuts, ends)
                ratios.append(least / judge_of.step(shape.cut(cuts, False)))
    assert max(ratios) <= 1 + 1e-9
    assert max(ratios) > 0.75


def test_packs_of_no_use_are_not_all_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below twice the time of the best, that is found. Where only faster ones would be of use, few are looked at."""
    simulated, usual = list[PipelinePlan](), SimulatedSteps._simulated

    def told(self: SimulatedSteps, plan: PipelinePlan) -> float:
        simulated.append(plan)
        return usual(self, plan)

    planner, cluster = unequal(Random(7), 3, 8, (0.2,))
    monkeypatch.setattr(SimulatedSteps, "_simulated", told)
    steps, counts = [], []
    for below in (float("inf"), 2.0, 0.5):
        simulated.clear()
        best = steps[0] if steps else 1.0
        steps.append(pack(planner, cluster, ("interleaved",), [(0, 1, 2)], below=below * best)["interleaved"].step)
        counts.append(len(simulated))
    assert steps[0] == steps[1] <= steps[2]
    assert counts[0] == counts[1] > counts[2]


def test_there_are_no_packs_on_one_device_or_of_too_few_layers() -> None:
    planner, cluster = even(2, 3, 4)
    assert not pack(planner, cluster, ("interleaved", "zb-v"), [(0, 1)])
    planner, cluster = even(1, 8, 4)
    assert not pack(planner, cluster, ("interleaved", "zb-v"), [(0,)])
    # Nine microbatches make no two equal groups for four devices.
    planner, cluster = even(4, 8, 9)
    assert "interleaved" not in pack(planner, cluster, ("interleaved",), [(0, 1, 2, 3)])


CLUSTER = (
    "".join(
        f'[[device]]\nname = "cpu:{i}"\nhost = "h{i}"\nflops = 1e9\nmessage_overhead = "0 us"\n\n' for i in range(2)
    )
    + '[links]\nother-host = { bandwidth = "100 GB/s", latency = "0 us" }\n'
)


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict, int]:
    code = main(["plan", *map(str, arguments), "--json"])
    out = capsys.readouterr()
    assert code == 0 or not out.out
    return (json.loads(out.out) if code == 0 else {"error": out.err}), code


def test_the_planner_takes_packs_where_they_are_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster = write_mlp(tmp_path / "mlp.onnx", [256] * 17, batch=8), tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    training = ("--loss", "mse", "--batch", 32, "--replicas", 1, "--cluster", cluster)
    found, code = planned(capsys, model, *training)
    assert code == 0, found
    facts = found["planner"]["packs"]
    [kind] = [kind for kind, row in facts.items() if row["taken"]]
    assert found["schedule"] == kind
    assert facts[kind]["step_s"] < 0.98 * min(found["planner"]["simulated"].values())
    # What was foretold is what the very program takes by simulation, and the passes hold what formulas do.
    assert found["predicted"]["step_s"] == pytest.approx(facts[kind]["step_s"], rel=0.02)
    devices = {stage["devices"][0] for stage in found["stages"]}
    assert len(found["stages"]) == facts[kind]["stages_on_a_device"] * len(devices)
    # Its plan is carried out again from a file, and the same plan without packs is slower.
    (tmp_path / "plan.json").write_text(json.dumps(found))
    again, _ = planned(capsys, model, "--loss", "mse", "--cluster", cluster, "--plan", tmp_path / "plan.json")
    assert again["stages"] == found["stages"]
    assert again["predicted"]["step_s"] == found["predicted"]["step_s"]
    plain, _ = planned(capsys, model, *training, "--schedule", "1f1b")
    assert "packs" not in plain["planner"]
    assert plain["predicted"]["step_s"] > found["predicted"]["step_s"]
    # A file that deals stages otherwise is refused.
    found["stages"][0]["devices"], found["stages"][1]["devices"] = (found["stages"][i]["devices"] for i in (1, 1))
    (tmp_path / "plan.json").write_text(json.dumps(found))
    wrong, code = planned(capsys, model, "--loss", "mse", "--cluster", cluster, "--plan", tmp_path / "plan.json")
    assert code != 0
    assert "stage" in wrong["error"]


def test_packs_that_are_asked_for_are_planned_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_mlp(tmp_path / "mlp.onnx", [16] * 6, batch=4)
    found, _ = planned(
        capsys, model, "--loss", "mse", "--batch", 16, "--devices", 2, "--schedule", "zb-v", "--shard", "none"
    )
    assert found["schedule"] == "zb-v"
    assert [stage["devices"] for stage in found["stages"]] == [["cpu:0"], ["cpu:1"], ["cpu:1"], ["cpu:0"]]
    # Nine microbatches make no equal groups for four devices, but for three.
    nine = (
        "--loss",
        "mse",
        "--batch",
        36,
        "--devices",
        4,
        "--schedule",
        "interleaved",
        "--replicas",
        1,
        "--shard",
        "none",
    )
    found, _ = planned(capsys, write_mlp(tmp_path / "deep.onnx", [16] * 8, batch=4), *nine)
    assert len({stage["devices"][0] for stage in found["stages"]}) == 3
    none, code = planned(capsys, model, "--loss", "mse", "--batch", 16, "--devices", 1, "--schedule", "zb-v")
    assert code != 0
    assert "there is no plan of zb-v" in none["error"]
    # Nothing that was not asked for is taken where nothing fits.
    (tmp_path / "small.toml").write_text(CLUSTER.replace("flops", 'memory = "4 KiB"\nflops'))
    none, code = planned(
        capsys, model, "--loss", "mse", "--batch", 16, "--cluster", tmp_path / "small.toml", "--schedule", "zb-v"
    )
    assert code != 0
    assert "there is no plan of zb-v" in none["error"]


def test_a_plan_file_says_what_is_in_another_memory_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_mlp(tmp_path / "mlp.onnx", [16] * 6, batch=4)
    training = ("--loss", "mse", "--optimizer", "adamw", "--devices", 2)
    packs = ("--packs", 2, "--schedule", "interleaved", "--microbatches", 4)
    found, _ = planned(capsys, model, *training, *packs, "--offload", "state", "--spill", tmp_path)
    assert (found["offload"], found["spill"]) == ("state", str(tmp_path))
    (tmp_path / "plan.json").write_text(json.dumps(found))
    again, _ = planned(capsys, model, *training, "--plan", tmp_path / "plan.json")
    assert again["memory"] == found["memory"]
    assert "offload{space=disk}" in again["pipeline"]
    # The control: without it the same plan needs more.
    del found["offload"], found["spill"]
    (tmp_path / "plan.json").write_text(json.dumps(found))
    more, _ = planned(capsys, model, *training, "--plan", tmp_path / "plan.json")
    assert more["memory"]["0"]["state"] > again["memory"]["0"]["state"]
    # One stage on each device is no pack.
    found["stages"] = found["stages"][:2]
    (tmp_path / "plan.json").write_text(json.dumps(found | {"offload": "everything"}))
    wrong, code = planned(capsys, model, *training, "--plan", tmp_path / "plan.json")
    assert code != 0
    assert "offload 'everything' is none of none, state" in wrong["error"]
