"""Eight models with ties, branches and modules that are called twice: stages between modules compute bit for bit what one
device does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Value
from penstock.ir.interpreter.schedules import run_schedule
from penstock.models import write_bert, write_gpt, write_resnet
from penstock.planning.model import Model
from penstock.support.errors import UsageError

from .test_tree import Tied


class Towers(nn.Module):
    """One tower over two inputs, and what both make together."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.abs(self.tower(left) - self.tower(right)))


class Skips(nn.Module):
    """Down and up again, with a way beside each level."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = nn.Linear(16, 8), nn.Linear(8, 4), nn.Linear(4, 4)
        self.up2, self.up1 = nn.Linear(8, 8), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down1(x))
        second = torch.relu(self.down2(first))
        up = torch.relu(self.up2(torch.cat([second, self.middle(second)], -1)))
        return self.up1(torch.cat([first, up], -1))


class Experts(nn.Module):
    """Branches that a gate weighs, and a last layer whose weight is that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8, bias=False)
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        shares = torch.softmax(self.gate(x), -1)
        mixed = sum(expert(x) * shares[:, i : i + 1] for i, expert in enumerate(self.experts))
        return functional.linear(mixed, self.enter.weight)


class Repeated(nn.Module):
    """One block over and over, and its results of each time side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(24, 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.enter(x), []
        for _ in range(3):
            x = self.norm(x + torch.tanh(self.block(x)))
            seen.append(x)
        return self.head(torch.cat(seen, -1))


TORCH: dict[str, tuple[type[nn.Module], tuple[Tensor, ...]]] = {
    "tied": (Tied, (torch.zeros(2, 3, dtype=torch.int64),)),
    "towers": (Towers, (torch.zeros(2, 8), torch.zeros(2, 8))),
    "skips": (Skips, (torch.zeros(2, 16),)),
    "experts": (Experts, (torch.zeros(2, 8),)),
    "repeated": (Repeated, (torch.zeros(2, 6),)),
}
ONNX: dict[str, Callable[[Path], Path]] = {
    "gpt": lambda path: write_gpt(path, layers=2, width=16, heads=2, vocab=32, positions=8, batch=2),
    "bert": lambda path: write_bert(path, layers=2, width=16, heads=2, vocab=40, positions=8, batch=2),
    "resnet": lambda path: write_resnet(path, 2, blocks=(1, 1), width=4, size=16, classes=5),
}


def model_of(name: str, folder: Path) -> Model:
    torch.manual_seed(0)
    if name in ONNX:
        return ps.from_onnx(ONNX[name](folder / "model.onnx"))
    kind, args = TORCH[name]
    return ps.from_torch(kind(), args)


def fed(value: Value, draw: np.random.Generator, count: int) -> np.ndarray:
    shape = (value.type.dims[0] * count, *value.type.dims[1:])
    return draw.integers(0, 5, shape) if value.type.dtype == "i64" else draw.standard_normal(shape)


def outputs(model: Model, devices: int, weights: Mapping[str, np.ndarray], **options: object) -> list[np.ndarray]:
    plan = ps.plan(model, Cluster.local(devices), microbatches=2, **options)
    assert len(plan.module.stages) == devices
    draw = np.random.default_rng(0)
    batch = {value.name: fed(value, draw, 2) for value in model.module.data_inputs}
    made = run_schedule(plan.module, weights, [batch]).outputs
    return [made[mb][name] for mb in sorted(made) for name in sorted(made[mb])]


@pytest.mark.parametrize("name", [*TORCH, *ONNX])
def test_stages_between_modules_compute_what_one_device_does(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    weights = model.imported.weights
    alone = outputs(model, 1, weights)
    assert alone
    assert all(np.isfinite(array).all() and np.ptp(array) > 0 for array in alone)
    counts = 0
    for devices in (2, 3, 4):
        try:
            several = outputs(model, devices, weights, split_by="module")
        except UsageError as error:
            assert "one after the other, the model has" in str(error)  # noqa: PT017
            continue
        counts += 1
        assert [array.tobytes() for array in several] == [array.tobytes() for array in alone]
    assert counts >= 2
    # Control: the largest weights are a hundred-thousandth larger.
    changed = {name: array.copy() for name, array in weights.items()}
    largest = max(changed, key=lambda name: changed[name].size)
    changed[largest] *= 1 + 1e-5
    other = outputs(model, 2, changed, split_by="module")
    assert [array.tobytes() for array in other] != [array.tobytes() for array in alone]
