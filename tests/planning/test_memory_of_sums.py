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
from penstock.passes.planner.fleet import Fleet, fleet_of
from penstock.passes.planner.plan import PipelinePlan, StagePlan

MIB = 1 << 20
TRAINING = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Perceptrons whose weights can be cut into two equal parts, and whose cannot."""
    folder = tmp_path_factory.mktemp("models")
    widths = {"even": (512, 1024, 1024, 64), "odd": (511, 1023, 1021, 67)}
    return {name: write_mlp(folder / f"{name}.onnx", sizes) for name, sizes in widths.items()}


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    return models["even"]


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


def _counted(plan: ps.Plan, cluster: Cluster, *stages: StagePlan) -> list[int]:
    """Return what formulas count on every device for other stages of a plan that was searched."""
    assert plan.search is not None
    chain, base = plan.search.profile.chain, plan.search.result.wanted.base
    other = PipelinePlan(plan.search.chosen.plan.schedule, 8, 8, stages, zero=1)
    judged = judge(Table(chain, 8), fleet_of(cluster), other, base)
    return [row.total for _, row in sorted(judged.memory.items())]


def _held(model: Path, cluster: Cluster, schedule: str, replicas: int, stages: int) -> list[int]:
    """Return what passes count on every rank."""
    fixed, training = ps.from_onnx(model, dims={"batch": 8}), replace(TRAINING, microbatches=8)
    plan = ps.plan(fixed, cluster, training, replicas=replicas, stages=stages, schedule=schedule, zero=1)
    assert plan.module.rank_devices() == [device.name for device in cluster.devices]
    return [row["peak"] for row in plan.as_dict()["memory"].values()]


@pytest.mark.parametrize(
    ("sizes", "schedule", "count", "hosts"),
    [
        ("even", "1f1b", 2, "h"),
        ("even", "2bw", 2, "ab"),
        ("even", "2bw", 3, "h"),
        ("even", "1f1b", 4, "ab"),
        ("odd", "1f1b", 2, "h"),
        ("odd", "2bw", 2, "ab"),
        ("odd", "1f1b", 3, "ab"),
        ("odd", "2bw", 4, "h"),
    ],
)
def test_replicas_that_share_optimiser_state_out_need_what_formulas_say(
    models: dict[str, Path], sizes: str, schedule: str, count: int, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cluster = models[sizes], _cluster(80, count, hosts)
    plan = _planned(model, cluster, 1, schedule)
    assert plan.search is not None
    shares = tuple(8 // count + (j < 8 % count) for j in range(count))
    stage = StagePlan(0, len(plan.search.profile.chain.layers), tuple(range(count)), shares)
    held = _held(model, cluster, schedule, count, 1)
    assert _counted(plan, cluster, stage) == pytest.approx([max(held)] * count, rel=0.03)
    _forgetting(monkeypatch)
    assert max(_counted(plan, cluster, stage)) < 0.8 * min(held)


@pytest.fixture(scope="module")
def near_plan(model: Path) -> ps.Plan:
    """A plan for two hosts of two devices, whose memory is too small for replicas on both."""
    return _planned(model, _cluster(26, 4, "aabb"), 1, "1f1b")


def test_replicas_of_one_host_need_no_blocks_of_others_where_there_are_more_hosts(
    model: Path, near_plan: ps.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = _cluster(26, 4, "aabb")
    assert near_plan.search is not None
    last = len(near_plan.search.profile.chain.layers)
    stages = StagePlan(0, 3, (0, 1), (4, 4)), StagePlan(3, last, (2, 3), (4, 4))
    held = _held(model, cluster, "1f1b", 2, 2)
    assert _counted(near_plan, cluster, *stages) == pytest.approx(held, rel=0.03)
    monkeypatch.setattr(Fleet, "is_apart", lambda fleet, devices: True)
    assert max(_counted(near_plan, cluster, *stages)) > 1.2 * max(held)


def test_such_replicas_are_chosen_in_little_memory(
    model: Path, near_plan: ps.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation of the search knows that they share the update out, too, as that of the compiled plan does."""
    search = near_plan.search
    assert search is not None
    assert [stage.devices for stage in search.chosen.plan.stages] == [(0, 1), (2, 3)]
    assert _step(near_plan) == pytest.approx(search.refined["1f1b"].step, rel=0.03)
    monkeypatch.setattr(Fleet, "is_apart", lambda fleet, devices: True)
    assert _step(_planned(model, _cluster(26, 4, "aabb"), 1, "1f1b")) > 1.3 * _step(near_plan)


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
