"""Fifty steps of packs are those of a device for each stage, to the last bit, and checkpoints load both ways.

Four models: layers with clipping, a decoder of ONNX, a decoder of torch with dropout and a tied embedding, and a
network with running statistics. Under zb-v both readers of the tied embedding are on one device. The oracle has four
devices, and knows no packs: it trains by 1f1b, for those that never drain by 2bw. Ranks are worker processes, with compiled
code or with the NumPy back end. Kernels of a backward whose weight gradients are apart may round otherwise, so compiled
code under zb-v is held to zb-1f1b.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.graph import Module
from penstock.models import write_gpt, write_mlp

STEPS, HALF, M, EACH = 50, 25, 4, 2
WIDTH, VOCABULARY, POSITIONS = 16, 24, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class TiedDecoder(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.places.weight))


class Normed(nn.Module):
    """Convolutions whose norms keep running statistics."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ((3, 8), (8, 8), (8, 8))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in pairs)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


# Where the stages of each model begin.
MODELS = {
    "layers": ("fc2.product", "fc3.product", "y.product"),
    "decoder": ("h.0.mlp.fc", "h.1.attn.qkv", "h.1.mlp.fc"),
    "tied": ("layers.0.down/linear_1", "layers.1.down/linear_3", "layers.2.down/linear_5"),
    "normed": ("convs.1/convolution_1", "convs.2/convolution_2", "head/linear"),
}


def model_of(name: str, folder: Path) -> ps.Model:
    torch.manual_seed(0)
    if name == "layers":
        return ps.from_onnx(write_mlp(folder / "m.onnx", [8, 16, 16, 16, 5], batch=EACH))
    if name == "decoder":
        shape = {"layers": 2, "width": WIDTH, "heads": 2, "vocab": VOCABULARY, "positions": POSITIONS}
        return ps.from_onnx(write_gpt(folder / "m.onnx", **shape, batch=EACH))
    if name == "tied":
        return ps.from_torch(TiedDecoder().train(), (torch.zeros(EACH, POSITIONS, dtype=torch.int64),))
    return ps.from_torch(Normed().train(), (torch.zeros(EACH, 3, 8, 8),))


class Runs:
    """The bundles of one model, cut at the same places, by schedule."""

    def __init__(self, name: str, backend: str, folder: Path) -> None:
        self.name, self.backend, self.folder = name, backend, folder
        self.model = model_of(name, folder)

    def compiled(self, schedule: str, packs: int) -> Path:
        """Compile four stages on four devices, or on fewer."""
        training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=3e-3), microbatches=M, clip=0.5)
        cuts = {"packs": packs, "stages": 4 // packs, "split_at": MODELS[self.name]}
        plan = ps.plan(self.model, ps.Cluster.local(4 // packs), training, schedule=schedule, **cuts)
        return ps.compile(plan, self.folder / schedule, backend=self.backend)


def batches_of(module: Module, seed: int = 0) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    top = VOCABULARY if any(value.type.dims[-1] == POSITIONS for value in module.data_inputs) else 5
    found = []
    for _ in range(STEPS):
        batch = {}
        for value in module.data_inputs:
            dims = (value.type.dims[0] * M, *value.type.dims[1:])
            whole = value.type.dtype == "i64"
            batch[value.name] = draw.integers(0, top, dims) if whole else draw.standard_normal(dims).astype("f4")
        found.append(batch)
    return found


class Trained:
    """Losses and norms of every step, and the parameters behind the last one."""

    def __init__(self, path: Path, batches: list[dict[str, np.ndarray]], resume: Path | None, save: Path | None):
        self.steps: list[tuple[object, object]] = []
        with ps.open(path, timeout=60, **({} if resume is None else {"resume": resume})) as job:
            halves = [batches] if save is None else [batches[:HALF], batches[HALF:]]
            for number, half in enumerate(halves):
                self.steps += [(step.losses, step.grad_norm) for step in job.steps(half)]
                if save is not None and not number:
                    job.save(save)
            self.parameters = job.parameters()

    def is_like(self, other: Trained) -> bool:
        """Say whether the other one's last steps and parameters are these, bit for bit."""
        same = self.steps[-len(other.steps) :] == other.steps[-len(self.steps) :]
        return same and all(np.array_equal(x, other.parameters[name]) for name, x in self.parameters.items())


def exchanged(module: Module) -> bool:
    assert module.schedule is not None
    return any(action.kind == "SP" for action in module.schedule.actions())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tvm", "numpy"])
@pytest.mark.parametrize("name", MODELS)
def test_packs_train_as_devices_of_one_stage_do(name: str, backend: str, tmp_path: Path) -> None:
    runs = Runs(name, backend, tmp_path)
    alike = {"interleaved": "1f1b", "zb-v": "zb-1f1b" if backend == "tvm" else "1f1b", "interleaved-2bw": "2bw"}
    alike |= {"wrap": "1f1b", "wrap-2bw": "2bw"}
    for schedule, of_single_stages in alike.items():
        whole = runs.compiled(of_single_stages, 1)
        packed = runs.compiled(schedule, 2)
        alone, together = open_bundle(whole).module, open_bundle(packed).module
        assert [len(stages) for stages in together.rank_packs()] == [2, 2]
        assert exchanged(alone) == (name == "tied")
        # The readers of the tied embedding are in the first stage and in the last.
        assert exchanged(together) == (name == "tied" and schedule != "zb-v")
        batches, places = batches_of(alone), (tmp_path / f"of-whole-{schedule}", tmp_path / f"of-{schedule}")
        expected = Trained(whole, batches, None, places[0])
        assert len(expected.steps) == STEPS
        assert Trained(packed, batches, None, places[1]).is_like(expected)
        assert Trained(packed, batches[HALF:], places[0], None).is_like(expected)
        assert Trained(whole, batches[HALF:], places[1], None).is_like(expected)
    # The control: the same steps from another checkpoint.
    assert not Trained(whole, batches[HALF:], None, None).is_like(expected)
