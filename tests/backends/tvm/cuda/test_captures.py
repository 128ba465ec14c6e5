"""Whether calls of a graph may be captured, as far as the graph and the environment say. The calls themselves run in tests/gpu/rank/test_captures.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import api
from penstock.backends.tvm.cuda.captures import is_wanted
from penstock.frontends.training import Training
from penstock.inspection.kernels.kernels import format_report, kernel_rows
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.memory.captured import never_captured
from penstock.ir.training.optimizers import AdamW
from penstock.models import write_gpt
from penstock.support.errors import UsageError


@pytest.mark.parametrize(("mesh", "stages"), [("tp=2", 1), ("", 2)])
def test_graphs_with_collectives_are_launched_kernel_by_kernel(tmp_path: Path, mesh: str, stages: int) -> None:
    model = write_gpt(tmp_path / "gpt.onnx", layers=2, width=16, heads=2, vocab=20, positions=8)
    training = Training(loss="cross_entropy", optimizer=AdamW(lr=1e-3), microbatches=2)
    cluster = Cluster.listed("sm_90,sm_90")
    shard = ["preset:megatron"] if mesh else []
    plan = api.plan(api.from_onnx(model, dims={"batch": 4}), cluster, training, stages=stages, mesh=mesh, shard=shard)
    report = format_report(kernel_rows(plan.module), plan.module)
    told = [
        line
        for line in report.splitlines()
        if line.endswith("never a CUDA graph, as its collectives wait for other ranks")
    ]
    having = [graph.name for graph in plan.module.graphs.values() if never_captured(graph)]
    assert [line.split(":")[0] for line in told] == having
    assert bool(having) == bool(mesh)


def test_the_environment_turns_captures_on() -> None:
    assert not is_wanted({})
    assert is_wanted({"PENSTOCK_CUDA_GRAPHS": "1"})
    with pytest.raises(UsageError, match="PENSTOCK_CUDA_GRAPHS must be 0 or 1, got 'no'"):
        is_wanted({"PENSTOCK_CUDA_GRAPHS": "no"})
