"""Plans of replicas whose devices have little memory: formulas and passes count what sums of gradients take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Device, LinkClass
from penstock.models import write_mlp
from penstock.passes.planner.chain import At, Ints, Sums, Table
from penstock.passes.planner.cost import judge
from penstock.passes.planner.fleet import fleet_of
from penstock.passes.planner.plan import PipelinePlan, StagePlan

MIB = 1 << 20
TRAINING = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlp(tmp_path_factory.mktemp("model") / "model.onnx", (512, 1024, 1024, 64))


def _cluster(mib: int, count: int = 2, hosts: str = "h") -> Cluster:
    spaces = (("ram", mib * MIB),)
    devices = [Device(f"cpu:{i}", host=hosts[i % len(hosts)], flops=2e9, spaces=spaces) for i in range(count)]
    return Cluster(tuple(devices), classes=(LinkClass("other-host", 1e10, 1e-6),))


def _planned(model: Path, cluster: Cluster, zero: int, *schedules: str) -> ps.Plan:
    return ps.plan_best(
        lambda size: ps.from_onnx(model, dims={"batch": size}), cluster, TRAINING, batch=64, sizes=(8, 16),
        schedules=schedules, shard="none", zero=zero,
    )  # fmt: skip


def _step(plan: ps.Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step


def _counted_and_held(plan: ps.Plan) -> list[tuple[int, int]]:
    """Return what formulas and passes count on every device."""
    assert plan.search is not None
    counted = [row.total for _, row in sorted(plan.search.chosen.judged.memory.items())]
    held = [row["peak"] for row in plan.as_dict()["memory"].values()]
    by_device = sorted(zip(plan.module.rank_devices(), held, strict=True))
    return [(nbytes, peak) for nbytes, (_, peak) in zip(counted, by_device, strict=True)]


@pytest.fixture(scope="module")
def plans(model: Path) -> list[ps.Plan]:
    return [_planned(model, _cluster(mib), 0, "1f1b", "2bw") for mib in (28, 30, 40, 44)]


def test_more_memory_makes_no_plan_slower(plans: list[ps.Plan]) -> None:
    steps = [_step(plan) for plan in plans]
    assert steps == sorted(steps, reverse=True)
    # There is something to choose: without replicas, and with one and two versions of weights.
    assert len({round(step, 6) for step in steps}) == 3


def test_formulas_count_as_much_as_passes(plans: list[ps.Plan]) -> None:
    for plan in plans:
        for counted, held in _counted_and_held(plan):
            assert counted == pytest.approx(held, rel=0.03)


def _forgetting(patch: pytest.MonkeyPatch) -> None:
    """Let formulas forget what is exchanged."""

    def exchanged(table: Table, first: At, last: At, sums: Sums) -> tuple[Ints, Ints]:
        workspace = table.workspace[first, last]
        return 0 * workspace, workspace

    patch.setattr(Table, "exchanged", exchanged)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize(("count", "hosts"), [(2, "h"), (4, "h"), (2, "ab"), (4, "ab")])
def test_replicas_that_share_optimiser_state_out_need_what_formulas_say(
    model: Path, schedule: str, count: int, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = _cluster(80, count, hosts)
    search = _planned(model, cluster, 1, schedule).search
    assert search is not None
    chain, base, shares = search.profile.chain, search.result.wanted.base, (8 // count,) * count
    stage = StagePlan(0, len(chain.layers), tuple(range(count)), shares)

    def counted() -> set[int]:
        plan = PipelinePlan(schedule, 8, 8, (stage,), zero=1)
        return {row.total for row in judge(Table(chain, 8), fleet_of(cluster), plan, base).memory.values()}

    training = replace(TRAINING, microbatches=8)
    fixed = ps.from_onnx(model, dims={"batch": 8})
    plan = ps.plan(fixed, cluster, training, replicas=count, stages=1, schedule=schedule, zero=1)
    held = {row["peak"] for row in plan.as_dict()["memory"].values()}
    assert list(counted()) == [pytest.approx(max(held), rel=0.03)]
    _forgetting(monkeypatch)
    assert max(counted()) < 0.8 * min(held)


def test_plans_of_other_schedules_come_before_slower_ones_of_the_first(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where formulas count too little, passes refuse the fastest schedule. Its plan without replicas is slower than
    1f1b with them."""
    cluster = _cluster(40)
    plan = _planned(model, cluster, 0, "1f1b", "2bw")
    _forgetting(monkeypatch)
    other = _planned(model, cluster, 0, "1f1b", "2bw")
    assert other.search is not None
    assert "2bw" in other.search.refused
    assert _step(other) == _step(plan) < 0.9 * _step(_planned(model, cluster, 0, "2bw"))
