"""From a file to a file: after three steps of AdamW every constant has the bits that it had, and every parameter others.

torch takes the same steps, and has the same parameters then.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.frontends.onnx.constants import rules

from .exported import asked_of_torch, export, lifted

STEPS, BATCH, SAMPLES, HIDDEN = 3, 4, 16, 8


class Listener(nn.Module):
    """A spectrum of fixed kernels, a bound, a GELU by its formula, learnt layers and norms, and one learnt number."""

    def __init__(self) -> None:
        super().__init__()
        window = torch.hann_window(SAMPLES)
        basis = np.fft.fft(np.eye(SAMPLES))[: SAMPLES // 2 + 1]
        self.register_buffer(
            "kernels", torch.tensor(np.concatenate([basis.real, basis.imag]).T.copy(), dtype=torch.float32)
        )
        self.register_buffer("taper", window)
        self.inner, self.norm, self.head = nn.Linear(18, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 1)
        self.alpha = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.maximum((x * self.taper) @ self.kernels, torch.tensor(-0.4))
        h = self.norm(self.inner(h).tanh())
        h = h * 0.5 * (1 + torch.erf(h / 2**0.5)) * self.alpha
        return self.head(torch.maximum(h, torch.tensor(-0.4)))


def batches() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    shapes = {"x0": (BATCH, SAMPLES), "labels": (BATCH, 1)}
    return [
        {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(STEPS)
    ]


def bits(path: Path) -> dict[str, bytes]:
    return {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in onnx.load(path).graph.initializer}


def trained_file(folder: Path) -> tuple[Path, Path, nn.Module]:
    """Train a file for three steps. Return it, what is exported then, and torch's module before any step."""
    torch.manual_seed(0)
    module = Listener().eval()
    path = lifted(export(module, folder / "model.onnx", torch.randn(BATCH, SAMPLES)), other=True)
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01, weight_decay=0.1))
    plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(2), training, stages=2)
    bundle = ps.compile(plan, folder / "bundle", backend="numpy")
    with ps.open(bundle, timeout=20) as job:
        list(job.run(batches()))
        job.save(folder / "ckpt")
    ps.export(bundle, checkpoint=folder / "ckpt", onnx=folder / "out.onnx")
    return path, folder / "out.onnx", module


def test_constants_keep_their_bits_and_parameters_are_torchs(tmp_path: Path) -> None:
    path, out, module = trained_file(tmp_path)
    before, after = bits(path), bits(out)
    changed = {name for name in before if before[name] != after[name]}
    floats = {t.name for t in onnx.load(path).graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    assert {"kernels", "taper", "k0", "k1", "k2", "k3", "k4"} <= floats - changed
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    for batch in batches():
        optimizer.zero_grad()
        F.mse_loss(module(torch.tensor(batch["x0"])), torch.tensor(batch["labels"])).backward()
        optimizer.step()
    arrays = {t.name: numpy_helper.to_array(t) for t in onnx.load(out).graph.initializer}
    named = dict(module.named_parameters())
    assert changed <= set(named)
    assert changed == asked_of_torch(module)
    for name in changed:
        np.testing.assert_allclose(arrays[name], named[name].detach().numpy(), rtol=1e-4, atol=1e-5)
    # The file computes what torch's trained module does: no statistic moved with a weight.
    x = batches()[0]["x0"]
    (found,) = _run(out, x)
    np.testing.assert_allclose(found, module(torch.tensor(x)).detach().numpy(), rtol=1e-4, atol=1e-5)


def _run(path: Path, x: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x0": x}))


def test_without_the_rules_constants_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(rules, "RULES", ())
    path, out, _ = trained_file(tmp_path)
    before, after = bits(path), bits(out)
    assert {"kernels", "taper", "k0"} <= {name for name in before if before[name] != after[name]}
