"""Plans with several stages on a device beside those with one on each: the faster one is taken, as carried out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Device, LinkClass
from penstock.ir.schedule_names import ALL_SYNCHRONOUS, PACKED
from penstock.models import write_mlp
from penstock.planning import search as searching
from penstock.planning.explain import argument


def cluster(bandwidth: float) -> Cluster:
    devices = (Device("a", host="x", flops=2e7), Device("b", host="y", flops=1.5e7))
    return Cluster(devices, classes=(LinkClass("other-host", bandwidth, 1e-5),))


SLOW, FAST = cluster(1e6), cluster(1e9)


def best(path: Path, where: Cluster, **options: Any) -> ps.Plan:
    model = ps.from_onnx(write_mlp(path / "model.onnx", [64] * 9, batch=16))
    training = ps.Training(loss="cross_entropy", microbatches=4)
    return ps.plan_best(lambda size: model, where, training, batch=64, explained=False, shard="none", **options)


def schedule_of(plan: ps.Plan) -> str:
    assert plan.module.schedule is not None
    return plan.module.schedule.name


def test_packs_are_taken_where_they_are_faster_as_carried_out(tmp_path: Path) -> None:
    plan, alone = best(tmp_path, SLOW), best(tmp_path, SLOW, schedules=("1f1b", "zb-1f1b"))
    assert schedule_of(plan) in PACKED
    assert plan.predicted.step < alone.predicted.step * (1 - searching.WORTH)
    assert plan.search is not None
    assert plan.search.taken is not None


def test_late_gradients_of_packs_are_told(tmp_path: Path) -> None:
    """The control: interleaved has none."""
    for kind, late in (("interleaved-2bw", True), ("interleaved", False)):
        plan = best(tmp_path, SLOW, schedules=(kind,))
        assert schedule_of(plan) == kind
        assert plan.search is not None
        said = [line for line in argument(plan.search) if "one update late" in line]
        assert [f"under {kind}" in line for line in said] == [True] * late


def test_packs_that_were_simulated_too_fast_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation of layers says a tenth of what they take, where they are worth little. The control is the test above."""
    usual = searching.pack

    def hopeful(*arguments: Any) -> Any:
        return {kind: replace(one, step=one.step / 10) for kind, one in usual(*arguments).items()}

    monkeypatch.setattr(searching, "pack", hopeful)
    assert schedule_of(best(tmp_path, SLOW)) in PACKED
    synchronous = tuple(kind for kind in PACKED if kind in ALL_SYNCHRONOUS)
    plan, packed = best(tmp_path, FAST), best(tmp_path, FAST, schedules=synchronous)
    assert schedule_of(plan) not in PACKED
    assert packed.predicted.step > plan.predicted.step * (1 - searching.WORTH)
    assert plan.search is not None
    assert plan.search.taken is None
    (reason,) = (reason for kind, reason in plan.search.refused.items() if kind in PACKED)
    assert "one stage on each device" in reason
    assert any("it was refused: with all passes it takes" in line for line in argument(plan.search))
