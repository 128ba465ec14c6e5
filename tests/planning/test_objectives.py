"""Plans of models for inference by objective: against looking at every plan, through all passes, and what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, permutations

import pytest

import penstock as ps
from penstock.commands.parser import main
from penstock.inspection.reasons import _alternatives
from penstock.ir.cluster.cluster import Cluster
from penstock.models import write_gpt
from penstock.passes.planner.cost import judge
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


def served(search: Search, plan: PipelinePlan, count: int) -> float:
    stages = tuple(StagePlan(s.first, s.last, s.devices, (count,)) for s in plan.stages)
    table = search.result.planner.table(plan.size)
    judged = judge(table, search.result.fleet, PipelinePlan("forward", plan.size, count, stages))
    return judged.step if not judged.against else float("inf")


def every_plan(search: Search, count: int) -> float:
    """The least seconds of a run over all cuts and all devices in every order, a stage each."""
    layers = len(search.profile.starts)
    plans = (
        PipelinePlan(
            "forward",
            search.plan.size,
            count,
            tuple(
                StagePlan(a, z, (d,), (count,)) for a, z, d in zip((0, *cuts), (*cuts, layers), devices, strict=True)
            ),
        )
        for stages in (1, 2, 3)
        for devices in permutations(range(len(search.result.fleet)), stages)
        for cuts in combinations(range(1, layers), stages - 1)
    )
    return min(served(search, plan, count) for plan in plans)


@pytest.mark.parametrize(("objective", "count"), [("latency", 1), ("throughput", RUN)])
def test_a_plan_is_the_best_of_all_cuts_on_all_devices(file, cluster, objective, count):
    model = ps.from_onnx(file, dims={"batch": 1})
    search = ps.plan(model, Cluster.load(cluster), objective=objective).search
    assert search is not None
    best = every_plan(search, count)
    assert served(search, search.plan, count) == pytest.approx(best, rel=2e-4)
    plans = search.objective.plans
    assert plans[objective].proven
    assert plans[objective].bound <= best * (1 + 1e-9)
    # The other objective's plan is not the best by this one: a swap of the two would show.
    swapped = plans[search.objective.other]
    other = swapped.latency if objective == "latency" else swapped.pace * RUN
    assert other > best * 1.01


def test_the_command_says_what_the_other_objective_would_take(file, cluster, tmp_path, capsys):
    words = ("plan", file, "--dim", "batch=1", "--cluster", cluster, "--objective")
    facts = {name: json.loads(plan_text(capsys, *words, name, "--json")) for name in ("latency", "throughput")}
    latency, throughput = (facts[name]["planner"]["objective"]["plans"] for name in ("latency", "throughput"))
    assert latency == throughput
    assert latency["latency"]["latency_s"] < latency["throughput"]["latency_s"]
    assert latency["throughput"]["pace_s"] < latency["latency"]["pace_s"]
    for name, planned in facts.items():
        assert planned["schedule"] == "forward"
        assert [stage["devices"] for stage in planned["stages"]] == [[d] for d in latency[name]["devices"]]
        # The simulator, which knows nothing of the formulas, plays one microbatch through the compiled program.
        assert planned["predicted"]["drained_s"] == pytest.approx(latency[name]["latency_s"], rel=0.1)
        reasons = list(_alternatives(planned, planned["planner"]))
        assert any(line.startswith(f"for {name} it is ") for line in reasons)
        assert any("per 1 microbatch" in line for line in reasons) == (name == "latency")
    out = plan_text(capsys, *words, "latency")
    assert "planner: for latency, by its formulas: " in out
    assert "planner: for throughput it would be " in out
    assert "planner: left out: far, because 1 microbatch would take " in out
    assert "recomputation" not in out


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
