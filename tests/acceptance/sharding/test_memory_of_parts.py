"""The memory of ranks that share variables out is what the plan says. Judges are the system's counts of resident pages.

The model is wide, so that the libraries' own memory (docs/performance.md) is a small share of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.ir.memory.exchanges import exchange_bytes
from penstock.ir.memory.predict import measure_memory
from penstock.runtime.telemetry.resident import WRITTEN, board_bytes, borrowed_bytes

WIDTH, LAYERS, BATCH, STEPS = 2560, 6, 8, 3
TOLERANCE = 0.05


def planned(level: int) -> ps.Plan:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    net = nn.Sequential(*(layer for linear in layers for layer in (linear, nn.Tanh())))
    model = ps.from_torch(net, (torch.randn(BATCH, WIDTH),))
    return ps.plan(
        model, ps.Cluster.local(2), ps.Training("mse", ps.AdamW(lr=1e-3), 2), replicas=2, stages=1, zero=level
    )


def batches(plan: ps.Plan) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    names = [value.name for value in plan.module.data_inputs]
    return [{name: rng.normal(size=(2 * BATCH, WIDTH)).astype(np.float32) for name in names} for _ in range(STEPS)]


@pytest.mark.parametrize(
    "level", [1, 3, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_ranks_hold_what_the_plan_says(level: int, tmp_path: Path) -> None:
    plan = planned(level)
    rows = measure_memory(plan.module)
    with ps.open(ps.compile(plan, tmp_path / "bundle")) as job:
        list(job.run(iter(batches(plan))))
        measured = [peak - base for peak, base in zip(job.peak_bytes, job.base_bytes, strict=True)]
        processes = job.workers.process_ids()
        boards = [board_bytes(process, WRITTEN) for process in processes]
        borrowed = [borrowed_bytes(process) for process in processes]
    lent = rows[0].gradients if level == 1 else 0
    for rank, size in enumerate(measured):
        blocks = exchange_bytes(plan.module, rank, [0])
        assert (blocks > 0) == (borrowed[rank] > 0) == (level > 0)
        assert abs(size / rows[rank].peak - 1) < TOLERANCE
        # Blocks begin on pages, and one of each size is spare.
        assert lent + blocks / 2 <= boards[rank] <= lent + blocks + 2**20
        if level in (1, 3):
            # The controls: memory of the other rank counted here as well, and no account of blocks.
            assert (size + borrowed[rank]) / rows[rank].peak - 1 > TOLERANCE
            assert level == 1 or size / (rows[rank].peak - blocks) - 1 > TOLERANCE
