"""What stages have to agree on once per batch, in real workers: copies of a tied parameter. The judge is the recurrence in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.ir.interp import run_recurrence
from penstock.passes.schedules import SCHEDULES
from penstock.runtime.control import FetchParameters

STEPS = 12
WIDTH, VOCAB, LENGTH, ROWS = 16, 29, 6, 2


class Tied(torch.nn.Module):
    """Blocks of a network between an embedding and a head that are one parameter."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wte = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x) @ self.wte.weight.T


def batches(m: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    return [{name: rng.integers(0, VOCAB, (ROWS * m, LENGTH)) for name in ("tokens", "labels")} for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("d", "m", "schedule", "precision"),
    [
        (2, 2, "1f1b", "f32"),
        (2, 3, "2bw", "f32"),
        (4, 3, "2bw", "f32"),
        (4, 6, "eager-2bw", "f32"),
        (2, 2, "2bw", "bf16"),
        (4, 5, "zb-1f1b", "f32"),
    ],
)
def test_copies_of_a_tied_parameter_stay_equal(tmp_path: Path, d: int, m: int, schedule: str, precision: str) -> None:
    model = ps.from_torch(Tied(2 * d), (torch.zeros(ROWS, LENGTH, dtype=torch.long),))
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=3e-3), microbatches=m, precision=precision)
    cuts = [f"layers.{2 * i}/linear_{2 * i}" for i in range(1, d)]
    plan = ps.plan(model, ps.Cluster.local(d), training, schedule=schedule, split_at=cuts)
    assert any("each has a copy" in note.text for note in plan.module.notes)
    assert not any("wte" in v.name and v.type.dims == (VOCAB, WIDTH) for e in plan.module.edges if e.phase in "FB" for v in e.values)
    data = batches(m)
    with ps.open(ps.compile(plan, tmp_path / "bundle")) as job:
        found = [loss for step in job.steps(data) for loss in step.losses]
        copies = [arrays["wte.weight"] for _, arrays in job._ask(FetchParameters()) if "wte.weight" in arrays]
    assert len(copies) == 2
    np.testing.assert_array_equal(*copies)
    delay = SCHEDULES[schedule].delay
    weights = plan.model.imported.weights
    expected = run_recurrence(plan.reference, weights, data, delay=delay).losses
    np.testing.assert_allclose(found, expected, rtol=1e-5 if precision == "f32" else 2e-2)
    if precision == "f32":
        other = run_recurrence(plan.reference, weights, data, delay=1 - delay).losses
        assert not np.allclose(found, other, rtol=1e-4)
