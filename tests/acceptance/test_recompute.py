"""Training in real processes with and without recomputation: the same losses, with compiled code and dropout, and less memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.passes.memory.test_offload import let_sets_go
from torch import Tensor, nn

import penstock as ps
from penstock.ir.cluster.cluster import Link
from penstock.ir.memory.predict import measure_memory
from penstock.ir.memory.saved_sets import saved_set
from penstock.passes.memory.repeated import DRAWS
from penstock.runtime.worker.worker import describe_failure

ROWS, MICROBATCHES, BATCHES, TIMEOUT = 8, 4, 5, 60


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.dropout = (
            nn.LayerNorm(width),
            nn.Linear(width, 64),
            nn.Linear(64, width),
            nn.Dropout(0.2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def model(statistics: bool = False) -> ps.Model:
    torch.manual_seed(2)
    blocks = [Block(24) for _ in range(4)]
    layers = [layer for block in blocks for layer in ([nn.BatchNorm1d(24), block] if statistics else [block])]
    return ps.from_torch(nn.Sequential(*layers, nn.Linear(24, 5)).train(), (torch.zeros(ROWS, 24),))


def planned(stages: int, schedule: str, recompute: str, offload: str = "none", statistics: bool = False) -> ps.Plan:
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=0.01), microbatches=MICROBATCHES)
    devices = ps.Cluster.local(stages).devices
    # Links that cost nothing, so that a small model is cut evenly.
    cluster = ps.Cluster(devices, tuple(Link(a.name, b.name, 1e15, 1e-12) for a, b in pairwise(devices)))
    settings = {"schedule": schedule, "recompute": recompute, "offload": offload}
    return ps.plan(model(statistics), cluster, training, **settings)


def trained(plan: ps.Plan, folder: Path, backend: str) -> tuple[list[float], dict[int, int]]:
    """The loss of every microbatch, and the most bytes of values that each rank's store held."""
    rng = np.random.default_rng(4)
    data = [
        {
            "input": rng.standard_normal((ROWS * MICROBATCHES, 24)).astype(np.float32),
            "labels": rng.integers(0, 5, ROWS * MICROBATCHES),
        }
        for _ in range(BATCHES)
    ]
    with ps.open(ps.compile(plan, folder, backend=backend), timeout=TIMEOUT) as job:
        losses = [loss for step in job.steps(data) for loss in step.losses]
        return losses, {rank: audit.activation_bytes for rank, audit in enumerate(job.audit())}


@pytest.mark.parametrize(
    ("stages", "schedule", "backend"),
    [(2, "1f1b", "numpy"), *(pytest.param(*case, "tvm", marks=pytest.mark.slow) for case in ((2, "1f1b"), (4, "2bw")))],
)
def test_losses_are_the_same_in_processes(stages: int, schedule: str, backend: str, tmp_path: Path) -> None:
    whole, again = (planned(stages, schedule, mode) for mode in ("none", "all"))
    expected, held = trained(whole, tmp_path / "whole", backend)
    found, less = trained(again, tmp_path / "again", backend)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    before, after = (measure_memory(plan.module) for plan in (whole, again))
    last = stages - 1
    for rank in range(last):
        assert less[rank] < held[rank]
        assert after[rank].activations < before[rank].activations
    # The control: where a backward follows its forward at once, nothing is done again.
    assert again.module.stage_graph(last, "R") is None
    assert again.module.stage_graph(0, "R") is not None


@pytest.mark.parametrize("backend", ["numpy", pytest.param("tvm", marks=pytest.mark.slow)])
def test_draws_are_elsewhere_where_all_else_is_made_again(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With running statistics beside, which no R reads: what is taken off by them is saved."""
    let_sets_go(monkeypatch)
    settings = {"statistics": True}
    whole = planned(2, "gpipe", "none", **settings)
    both = planned(2, "gpipe", "all", "activations", **settings)
    saved, forward, again = saved_set(both.module, 0), *(both.module.graphs[name] for name in ("s0.F", "s0.R"))
    assert saved is not None
    drawn = {v.name for op in forward.ops if op.kind in DRAWS for v in op.outs}
    assert drawn & {v.name for v in forward.saved} <= saved.values.keys()
    assert drawn & {v.name for v in again.ins}
    moved = {op.var for op in forward.ops if op.kind == "write"}
    assert moved
    assert moved.isdisjoint(op.var for op in again.ops if op.kind == "read")
    # The control: without moves the masks of all microbatches are on the device.
    less, more = (
        measure_memory(planned(2, "gpipe", "all", kind, **settings).module)[0] for kind in ("activations", "none")
    )
    assert less.activations < more.activations
    expected, held = trained(whole, tmp_path / "whole", backend)
    found, fewer = trained(both, tmp_path / "both", backend)
    assert found == expected
    assert fewer[0] < held[0]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_a_worker_without_memory_says_so(error: Exception) -> None:
    failed = describe_failure(error)
    assert failed.error == "DoesNotFit"
    assert "gave no more memory" in failed.what
    assert "--recompute" in failed.hint
    assert describe_failure(RuntimeError("another")).error == "Internal"
