"""The benchmark of chosen plans with timed kernels: its clusters, the plans it lists, its timed stages, its verdict."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles.repository import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import best_of_all
import timed_stages
from best_of_all import CLUSTERS, COUNT, MICROBATCHES, draw

import penstock as ps
from penstock.backends.interface import stage_graphs
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import graph_kind
from penstock.models import write_mlp
from penstock.passes.costs.prices import rank_seconds


def test_clusters_are_drawn_once() -> None:
    assert tuple(draw()) == CLUSTERS
    assert len(CLUSTERS) == COUNT
    assert {len(drawn.hosts) * drawn.each for drawn in CLUSTERS} == {2, 3, 4}
    assert sum(drawn.each == 2 for drawn in CLUSTERS) == COUNT // 4
    cells = best_of_all.cells()
    assert len({best_of_all.cell_name(*cell) for cell in cells}) == len(cells) == 3 * COUNT


def test_devices_are_slower_but_their_messages_are_not() -> None:
    measured = Cluster((Device("one", flops=8e9, bandwidth=8e8, message_overhead=1e-4), Device("two")))
    for drawn in CLUSTERS:
        cluster = drawn.cluster(measured)
        speeds = [speed for speed in drawn.speeds for _ in range(drawn.each)]
        assert [device.flops for device in cluster.devices] == pytest.approx([1e9 * speed for speed in speeds])
        assert {device.message_overhead for device in cluster.devices} == {1e-4}
        assert len({device.host for device in cluster.devices}) == len(drawn.speeds)


@pytest.mark.slow
def test_all_plans_are_listed(tmp_path: Path) -> None:
    """Counted by hand for three devices of which no two are alike, and for two that are."""
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [64] * 9, batch=8))
    cluster = Cluster(tuple(Device(name, flops=speed) for name, speed in (("a", 3e8), ("b", 2e8), ("c", 1e8))))
    listed, count = best_of_all.contenders(model, 8, cluster, random.Random(0))
    search = listed[best_of_all.ALONE].search
    assert search is not None
    plans = list(best_of_all.every_plan(search))
    assert len(set(plans)) == len(plans) == count
    cuts, dealt = len(best_of_all.places_of(search)), MICROBATCHES - 1
    assert cuts == best_of_all.PLACES
    alone, pairs = 3, 3 * dealt
    two = 6 * cuts + 2 * 3 * dealt * cuts
    three = 6 * comb(cuts, 2)
    packed = 6 * comb(cuts, 3) + 6 * comb(cuts, 5)
    assert len(plans) == len(best_of_all.SCHEDULES) * (alone + pairs + two + three) + 2 * packed
    assert {(stage.first, plan.stages[-1].last) for plan in plans for stage in plan.stages[:1]} == {
        (0, len(search.profile.chain.layers))
    }
    assert all(a.last == b.first for plan in plans for a, b in pairwise(plan.stages))
    # By simulation the best plan of all is no slower than those behind it, and none is much faster than what was chosen.
    steps = [listed[f"simulated {i}"].predicted.step for i in range(1, best_of_all.BEST + 1)]
    assert steps[0] <= 1.01 * min(steps)
    assert listed[best_of_all.CHOSEN].predicted.step <= 1.02 * steps[0]
    assert all(listed[name].predicted.step >= 0.99 * steps[0] for name in listed if name.startswith("drawn"))


def test_devices_that_can_be_exchanged_are_listed_one_way(tmp_path: Path) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [64] * 9, batch=8))
    plan = ps.plan_best(lambda size: model, Cluster.local(2), best_of_all._training(), batch=32, shard="none")
    listed = list(best_of_all.every_plan(plan.search))
    assert {devices for one in listed for devices in [tuple(stage.devices for stage in one.stages)]} == {
        ((0,),), ((0, 1),), ((0,), (1,)), ((0,), (1,), (0,), (1,)), ((0,), (1,), (1,), (0,)),
    }  # fmt: skip


def timed(plan: ps.Plan, monkeypatch: pytest.MonkeyPatch, exchange: Any) -> tuple[timed_stages.TimedStage, list[float]]:
    """A stage of rank 0 whose sleeps are noted instead, on a clock that they move."""
    clock, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(timed_stages, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep))
    return timed_stages.TimedStage(plan.module, 0, 0, exchange), slept


def arguments(stage: timed_stages.TimedStage, graph: str) -> list[torch.Tensor]:
    return [torch.zeros(1)] * len(stage._signatures[graph].ins)


def test_a_call_takes_what_the_plan_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [32] * 5, batch=4))
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(), microbatches=2)
    plan = ps.plan(model, Cluster.local(2), training, schedule="zb-1f1b")
    stage, slept = timed(plan, monkeypatch, None)
    predicted = rank_seconds(plan.module)
    assert {kind for rank, kind in predicted if rank == 0} >= {"F", "B", "U"}
    for kind in (kind for rank, kind in predicted if rank == 0):
        slept.clear()
        for graph in (graph for graph in stage_graphs(plan.module, 0) if graph_kind(graph.name) == kind):
            results = stage.call(graph.name, arguments(stage, graph.name))
            assert [tuple(result.shape) for result in results] == [value.type.dims for value in graph.results]
        assert sum(slept) == pytest.approx(predicted[0, kind])


def test_a_collective_waits_where_its_result_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "model.onnx", [32] * 5, batch=4))
    training = ps.Training(loss="cross_entropy", microbatches=2)
    plan = ps.plan(model, Cluster.local(2), training, mesh="tp=2", shard="preset:megatron", stages=1)
    seen = list[tuple[str, float]]()

    class Exchange:
        def begin(self, call: Any, x: torch.Tensor, out: torch.Tensor) -> None:
            seen.append(("begin", sum(slept)))

        def wait(self, call: Any) -> None:
            seen.append(("wait", sum(slept)))

    stage, slept = timed(plan, monkeypatch, Exchange())
    stage.call("s0.F", arguments(stage, "s0.F"))
    # What the plan counts for collectives themselves is what they really take.
    assert 0 < sum(slept) < rank_seconds(plan.module)[0, "F"]
    assert [what for what, _ in seen][:2] == ["begin", "wait"]
    begins, waits = ([at for what, at in seen if what == kind] for kind in ("begin", "wait"))
    assert len(begins) == len(waits) > 0
    # Kernels before a collective have taken their time when it begins.
    assert 0 < begins[0] < sum(slept)


def row(chosen: float, best: float, predicted: float) -> dict[str, Any]:
    plans = {
        name: {"schedule": "1f1b", "devices": [["h0.0"]], "predicted": predicted, "seconds": s, "steps": [s]}
        for name, s in ((best_of_all.CHOSEN, chosen), ("simulated 1", best))
    }
    return {"cell": "0-mlp", "cluster": "1 0.5", "listed": 10, "plans": plans}


def test_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert best_of_all.judge([row(1.0, 0.95, 1.05)]) == 0
    assert "at most 1.053 of the best rival" in capsys.readouterr().out
    for missed in (row(1.2, 1.0, 1.2), row(1.0, 1.0, 1.3)):
        assert best_of_all.judge([missed]) == 1
