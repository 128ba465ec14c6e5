"""Plans of models for inference by objective: against looking at every plan, through all passes, and what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.inspection.reasons import _alternatives
from penstock.ir.cluster.cluster import SAME_HOST, Cluster, LinkClass
from penstock.models import write_gpt
from penstock.passes.planner.cost import judge, stage_times
from penstock.passes.planner.plan import PipelinePlan, StagePlan
from penstock.planning.choice import RUN, Search
from penstock.support.errors import DoesNotFit, UsageError

pytestmark = pytest.mark.usefixtures("own_cache")

# Each device is fast at one kind of work; messages take little.
CLUSTER = """
[[device]]
name = "near"
flops = 4e9
bandwidth = 1e9
[[device]]
name = "middle"
flops = 3e9
bandwidth = 4e9
[[device]]
name = "far"
flops = 2e9
bandwidth = 2e9
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "gpt.onnx"
    write_gpt(str(path), layers=1, width=32, heads=2, vocab=64, positions=16)
    return path


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def plan_text(capsys, *words):
    assert main(list(map(str, words))) == 0
    return capsys.readouterr().out


def judged(search: Search, count: int, stages: list[tuple[int, int, tuple[int, ...]]]) -> float:
    """Return the seconds of a run. Each microbatch goes to the device of a stage that would be done with it first."""
    table, fleet, size = search.result.planner.table(search.plan.size), search.result.fleet, search.plan.size

    def plan(shares: list[tuple[int, ...]]) -> PipelinePlan:
        rows = zip(stages, shares, strict=True)
        return PipelinePlan("forward", size, count, tuple(StagePlan(*stage, share) for stage, share in rows))

    alike = plan([(1,) * len(devices) for _, _, devices in stages])
    shares = []
    for number in range(len(stages)):
        times = stage_times(table, fleet, alike, number).each
        dealt = [0] * len(times)
        for _ in range(count):
            first = min(range(len(times)), key=lambda j: (dealt[j] + 1) * times[j])
            dealt[first] += 1
        shares.append(tuple(dealt))
    if not all(map(all, shares)):
        return float("inf")
    result = judge(table, fleet, plan(shares))
    return result.step if not result.against else float("inf")


def served(search: Search, count: int) -> float:
    devices = 1 if count == 1 else None
    return judged(search, count, [(s.first, s.last, s.devices[:devices]) for s in search.plan.stages])


def groups_of(devices: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Yield the ways to cut a row of devices into stages, each with its devices in order."""
    if not devices:
        yield []
    for count in range(1, len(devices) + 1):
        if list(devices[:count]) == sorted(devices[:count]):
            yield from ([devices[:count], *rest] for rest in groups_of(devices[count:]))


def every_plan(search: Search, count: int, replicas: bool) -> float:
    """The least seconds of a run over all cuts and all devices in every order, a stage each, or several."""
    layers = len(search.profile.starts)
    return min(
        judged(search, count, [*zip((0, *cuts), (*cuts, layers), groups, strict=True)])
        for used in (1, 2, 3)
        for devices in permutations(range(len(search.result.fleet)), used)
        for groups in groups_of(devices)
        if replicas or len(groups) == used
        for cuts in combinations(range(1, layers), len(groups) - 1)
    )


@pytest.mark.parametrize(("objective", "count"), [("latency", 1), ("throughput", RUN)])
def test_a_plan_is_the_best_of_all_cuts_on_all_devices(file, cluster, objective, count):
    model = ps.from_onnx(file, dims={"batch": 1})
    search = ps.plan(model, Cluster.load(cluster), objective=objective).search
    assert search is not None
    best = every_plan(search, count, replicas=count > 1)
    assert served(search, count) == pytest.approx(best, rel=2e-4)
    plans = search.objective.plans
    assert plans[objective].proven
    assert plans[objective].bound <= best * (1 + 1e-9)
    # The other objective's plan is not the best by this one: a swap of the two would show.
    swapped = plans[search.objective.other]
    other = swapped.latency if objective == "latency" else swapped.pace * RUN
    assert other > best * 1.01
    # Control: with one device for a stage no plan has that throughput.
    assert count == 1 or every_plan(search, count, replicas=False) > best * 1.05


def test_the_command_says_what_the_other_objective_would_take(file, cluster, tmp_path, capsys):
    words = ("plan", file, "--dim", "batch=1", "--cluster", cluster, "--objective")
    facts = {name: json.loads(plan_text(capsys, *words, name, "--json")) for name in ("latency", "throughput")}
    latency, throughput = (facts[name]["planner"]["objective"]["plans"] for name in ("latency", "throughput"))
    assert latency == throughput
    assert latency["latency"]["latency_s"] < latency["throughput"]["latency_s"]
    assert latency["throughput"]["pace_s"] < latency["latency"]["pace_s"]
    for name, planned in facts.items():
        assert planned["schedule"] == "forward"
        assert ["+".join(stage["devices"]) for stage in planned["stages"]] == latency[name]["devices"]
        # The program, whose costs know nothing of the formulas: one microbatch for latency, and all those that devices
        # take turns with for throughput.
        predicted, count = planned["predicted"], planned["microbatches"]
        row, longest = latency[name], max(predicted["busy_s"].values())
        alone = name == "latency"
        assert (count == 1) == alone
        assert (predicted["drained_s"] if alone else longest) == pytest.approx(
            row["latency_s"] if alone else count * row["pace_s"], rel=0.1
        )
        reasons = list(_alternatives(planned, planned["planner"]))
        assert any(line.startswith(f"for {name} it is ") for line in reasons)
        assert any("per 1 microbatch" in line for line in reasons) == (name == "latency")
    out = plan_text(capsys, *words, "latency")
    assert "planner: for latency, by its formulas: " in out
    assert "planner: for throughput it would be " in out
    assert "planner: left out: far, because 1 microbatch would take " in out
    assert "recomputation" not in out


def test_devices_that_take_turns_compute_as_one(file, tmp_path):
    """What requests get is what one device computes, bit for bit, however many devices a stage has."""
    model = ps.from_onnx(file, dims={"batch": 1})
    devices = Cluster.local(3).devices
    fast = replace(devices[0], flops=3 * devices[1].flops, bandwidth=3 * devices[1].bandwidth)
    plan = ps.plan(model, Cluster((fast, *devices[1:])), objective="throughput")
    (stage,) = plan.as_dict()["stages"]
    assert stage["devices"] == [device.name for device in devices]
    assert stage["shares"][0] > stage["shares"][1] >= 1
    alone = ps.plan(model, Cluster.local(1))
    tokens = np.random.default_rng(0).integers(0, 64, (11, 16))
    results = []
    for number, each in enumerate((plan, alone)):
        with ps.open(ps.compile(each, tmp_path / f"bundle{number}", backend="numpy")) as job:
            results.append(job.infer({job.module.data_inputs[0].name: tokens}))
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])


def test_devices_of_other_code_are_no_replicas(file):
    model = ps.from_onnx(file, dims={"batch": 1})
    cpu = Cluster.local(2).devices
    plan = ps.plan(model, Cluster((cpu[0], replace(cpu[1], target="x86-64-v3"))), objective="throughput")
    assert all(len(stage["devices"]) == 1 for stage in plan.as_dict()["stages"])


def test_what_does_not_go_with_an_objective_is_refused_at_once(file, cluster, capsys):
    model = ps.from_onnx(file, dims={"batch": 1})
    with pytest.raises(UsageError, match="--stages, --mesh with --objective latency"):
        ps.plan(model, Cluster.load(cluster), objective="latency", stages=2, mesh="tp=2")
    for words in (("--loss", "cross_entropy"), ("--loss", "cross_entropy", "--batch", "4")):
        assert main([*map(str, ("plan", file, "--dim", "batch=1", "--objective", "latency", *words))]) == 2
    tiny = Cluster(tuple(replace(d, spaces=(("ram", 1000),)) for d in Cluster.load(cluster).devices))
    with pytest.raises(DoesNotFit, match="no plan fits"):
        ps.plan(model, tiny, objective="latency")


def test_words_that_no_setting_has_are_refused_at_once(file):
    model = ps.from_onnx(file, dims={"batch": 1})
    with pytest.raises(UsageError) as refused:
        ps.plan(model, Cluster.local(2), objective="speed", split_by="modul", wire="f8")
    assert "--objective is one of throughput, latency, not 'speed'" in str(refused.value)
    assert "--split-by is one of operation, module, not 'modul'" in str(refused.value)
    assert "--wire is one of" in str(refused.value)


def test_devices_that_take_turns_add_up_no_gradients(file):
    """Replicas of a training sum gradients over their links. Those of a stage for inference have no link at all."""
    near = Cluster.local(3)
    far = replace(near, classes=(LinkClass(SAME_HOST, 1e6, 10.0),))
    model = ps.from_onnx(file, dims={"batch": 1})
    quick, slow = (ps.plan(model, each, objective="throughput").search.objective.plans for each in (near, far))
    assert slow["throughput"] == quick["throughput"]
    assert slow["throughput"].devices == ("cpu:0+cpu:1+cpu:2",)
    # Control: trainings pay for them.
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1))
    steps = [ps.plan(model, each, replace(training, microbatches=3), replicas=3).predicted.step for each in (near, far)]
    assert steps[1] > 10 * steps[0]
