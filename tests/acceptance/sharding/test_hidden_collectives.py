"""Collectives of level 3 hide behind computations: with kernels and a link that take the seconds of a model, at most a
quarter of the time of collectives is left for a rank to wait.

Time passes for real: a thread is the link, which moves one collective after another, and the rank sleeps where it would
compute. It waits where it first reads a result. The control is the order before the pass `overlap`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

import penstock as ps
from penstock.ir.graph import Graph, Op
from penstock.ir.ops import EXCHANGES, cost_of
from penstock.models import write_gpt
from penstock.passes import pipelines
from penstock.passes.pipelines import PipelineEntry

# Operations and bytes per second, and the seconds that a link takes for nothing.
FLOPS, BYTES, LATENCY = 8e9, 1.6e8, 1e-4
MOST = 0.25


@cache
def model(folder: Path) -> ps.Model:
    return ps.from_onnx(
        write_gpt(folder / "gpt.onnx", layers=2, width=256, heads=4, vocab=512, positions=128, batch=16)
    )


def graphs(folder: Path) -> list[Graph]:
    training = ps.Training("cross_entropy", ps.AdamW(lr=1e-3), 2)
    plan = ps.plan(model(folder), ps.Cluster.local(2), training, replicas=2, stages=1, zero=3)
    return [plan.module.graphs[name] for name in ("s0.F", "s0.B")]


def seconds_of(op: Op) -> float:
    if op.kind in EXCHANGES:
        return LATENCY + max(op.ins[0].type.nbytes, op.outs[0].type.nbytes) / 2 / BYTES
    return cost_of(op).flops / FLOPS if op.kind in ("matmul", "attention", "attention_grad") else 0.0


def waited(graph: Graph) -> tuple[float, float]:
    """Run the order of a graph in time; return the seconds of its collectives, and those in which the rank waits."""
    under_way: dict[str, Future[None]] = {}
    total = exposed = 0.0

    def wait(names: Mapping[str, Future[None]]) -> float:
        begun = time.perf_counter()
        for future in names.values():
            future.result()
        return time.perf_counter() - begun

    with ThreadPoolExecutor(1) as link:
        for op in graph.ops:
            needed = {v.name: under_way.pop(v.name) for v in op.ins if v.name in under_way}
            exposed += wait(needed)
            seconds = seconds_of(op)
            if op.kind in EXCHANGES:
                total += seconds
                under_way[op.outs[0].name] = link.submit(time.sleep, seconds)
            elif seconds:
                time.sleep(seconds)
        exposed += wait(under_way)
    return total, exposed


def share(folder: Path) -> float:
    times = [waited(graph) for graph in graphs(folder)]
    return sum(exposed for _, exposed in times) / sum(total for total, _ in times)


def test_at_most_a_quarter_of_the_time_of_collectives_is_exposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert share(tmp_path) < MOST
    monkeypatch.setattr(pipelines, "_overlap", lambda options: PipelineEntry("overlap", {}, "", wanted=False))
    assert share(tmp_path) > 0.75
