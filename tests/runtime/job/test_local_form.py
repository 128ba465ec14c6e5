"""Tests of runs whose stages are split over several ranks: a tensor-parallel model trains as on one device, whatever the
mesh, and a trace has its collectives."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.oracles.sharding.local_modules import local_mlp

import penstock as ps
from penstock.backends.bundle.writer import write_bundle
from penstock.backends.interface import CompileOptions
from penstock.backends.registry import backend_of
from penstock.ir.collective_calls import calls_of
from penstock.runtime.telemetry.trace import write_trace


def bundle_of(case, folder, backend="numpy", module=None):
    module = module or case.local
    stages = [stage.index for stage in module.stages]
    names = backend_of(backend).compile_stages(module, stages, folder / "code", CompileOptions(jobs=1))
    files = {stage: [folder / "code" / name for name in of_stage] for stage, of_stage in names.items()}
    weights = {name: array.astype(np.float32) for name, array in case.weights.items()}
    return write_bundle(folder / "bundle", module, files, weights, backend=backend, plan={}).path


def trained(path, case):
    """The losses of three steps."""
    with ps.open(path, timeout=60) as job:
        return [job.step({"x": batch["x"].astype(np.float32), "labels": batch["labels"]}) for batch in case.batches(3)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one device."""
    case = local_mlp(tp=1)
    return trained(bundle_of(case, tmp_path_factory.mktemp("alone")), case)


@pytest.mark.parametrize(
    ("stages", "dp", "tp", "backend"),
    [
        (1, 1, 2, "tvm"),
        (1, 1, 3, "numpy"),
        (1, 2, 2, "numpy"),
        pytest.param(2, 1, 2, "tvm", marks=pytest.mark.slow),
        pytest.param(2, 2, 2, "numpy", marks=pytest.mark.slow),
    ],
)
def test_a_split_model_trains_as_on_one_device(stages, dp, tp, backend, alone, tmp_path):
    case = local_mlp(stages=stages, dp=dp, tp=tp)
    losses = trained(bundle_of(case, tmp_path, backend), case)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_a_sum_that_is_left_out_trains_otherwise(alone, tmp_path):
    """The control."""
    case = local_mlp(tp=2)
    graph = case.local.stage_graph(0, "F")
    first = calls_of(graph)[0].op
    ops = tuple(op.with_attrs(by="max") if op is first else op for op in graph.ops)
    wrong = case.local.with_graph(type(graph)(graph.name, graph.ins, graph.outs, ops, graph.saved))
    losses = trained(bundle_of(case, tmp_path, module=wrong), case)
    assert not np.allclose(losses, alone, rtol=1e-3)


def test_a_trace_has_a_row_of_collectives(tmp_path):
    done = [[("0F3, %y = all_reduce(%p, over=tp) #0", 1.0, 1.5, 2.0)], []]
    write_trace(tmp_path / "trace.json", [[("0F3", 0.5, 2.5)], [("0F3", 0.5, 2.5)]], collectives=done)
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    row = [entry for entry in entries if entry.get("tid") == 1]
    assert [entry["ph"] for entry in row] == ["M", "b", "e"]
    assert {entry["pid"] for entry in row} == {0}
    assert row[1]["name"] == done[0][0][0]
    assert (row[1]["ts"], row[2]["ts"], row[1]["args"]["waited us"]) == (5e5, 15e5, 5e5)
