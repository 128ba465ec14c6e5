"""Plans of replicas whose devices have little memory: formulas and passes count what sums of gradients take."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.models import write_mlp

MIB = 1 << 20


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[ps.Plan]:
    path = write_mlp(tmp_path_factory.mktemp("model") / "model.onnx", (512, 1024, 1024, 64))
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3))

    def plan(mib: int) -> ps.Plan:
        spaces = (("ram", mib * MIB),)
        cluster = Cluster(tuple(Device(f"cpu:{i}", host="h", flops=2e9, spaces=spaces) for i in range(2)))
        return ps.plan_best(
            lambda size: ps.from_onnx(path, dims={"batch": size}), cluster, training, batch=64, sizes=(8, 16),
            schedules=("1f1b", "2bw"), shard="none",
        )  # fmt: skip

    return [plan(mib) for mib in (28, 30, 40, 44)]


def test_more_memory_makes_no_plan_slower(plans: list[ps.Plan]) -> None:
    steps = [plan.predicted.step for plan in plans if plan.predicted is not None]
    assert steps == sorted(steps, reverse=True)
    # There is something to choose: without replicas, and with one and two versions of weights.
    assert len({round(step, 6) for step in steps}) == 3


def test_formulas_count_as_much_as_passes(plans: list[ps.Plan]) -> None:
    for plan in plans:
        assert plan.search is not None
        counted = [row.total for _, row in sorted(plan.search.chosen.judged.memory.items())]
        devices = plan.module.rank_devices()
        held = [row["peak"] for row in plan.as_dict()["memory"].values()]
        for nbytes, peak in zip(counted, (peak for _, peak in sorted(zip(devices, held, strict=True))), strict=True):
            assert nbytes == pytest.approx(peak, rel=0.03)
