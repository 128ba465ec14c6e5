"""Families of models for `verify`: small networks of torch, with weights from a seed, exported to ONNX.

Some are ill-conditioned on purpose: sums that cancel, logarithms of almost nothing, long chains, numbers that are
rounded to steps or that decide between two ways. Each has inputs of its own kind, too: what it would be given.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = dict[str, Tensor]


class Residual(nn.Module):
    """A layer beside which its input goes on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Convolutions(nn.Module):
    """Convolutions with statistics of batches, as for images."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1, groups=4), nn.Hardswish(),
            nn.MaxPool2d(2), nn.Conv2d(8, 12, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 7),
        )  # fmt: skip
        for name, buffer in self.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.1, 2.0)
            elif name.endswith("running_mean"):
                buffer.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Spectrogram(nn.Module):
    """The logarithm of the power of short-time spectra, of which noise leaves some almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        t, f = torch.arange(64.0), torch.arange(33.0)[:, None]
        window = 0.5 - 0.5 * torch.cos(2 * math.pi * t / 64)
        self.register_buffer("real", (torch.cos(2 * math.pi * f * t / 64) * window)[:, None])
        self.register_buffer("imaginary", (torch.sin(2 * math.pi * f * t / 64) * window)[:, None])
        self.head = nn.Conv1d(33, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        power = F.conv1d(x, self.real, stride=16) ** 2 + F.conv1d(x, self.imaginary, stride=16) ** 2
        level = torch.log(power + 1e-12)
        return self.head((level - level.mean(-1, keepdim=True)) / level.std(-1, keepdim=True))


class Bytes(nn.Module):
    """Bytes as a one-hot of 257 columns, whose sums are almost cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(257, 16, 5, padding=2), nn.Linear(16, 4)
        with torch.no_grad():
            self.conv.bias.add_(500)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(F.one_hot(x, 257).float().transpose(1, 2))
        y = (y - y.mean(-1, keepdim=True))[..., ::2].mean(-1) * 1e2
        return self.head(y)


class Transformer(nn.Module):
    """Attention over tokens, some of which a mask hides."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(29, 16), nn.Parameter(torch.randn(6, 16))
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 29)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.table(tokens) + self.places
        q, k, v = (p.unflatten(-1, (2, 8)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 8**0.5 + (1 - mask[:, None, None, :]) * -1e4
        return self.head(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


class Recurrent(nn.Module):
    """Two recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(6, 10, batch_first=True), nn.GRU(10, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[0])[0]


class Cancelling(nn.Module):
    """The differences of large sums that are nearly equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(64, 32)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight + 1e-5 * torch.randn(32, 64))
            self.second.bias.copy_(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) - self.second(x)) * 1e4


class Iterated(nn.Module):
    """The same map over and over: a difference grows at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(12, 12)
        with torch.no_grad():
            self.map.weight.mul_(5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.sin(self.map(x))
        return x


class Routed(nn.Module):
    """Each sample takes the way that scores best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.ways = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        scores, which = self.gate(x).softmax(-1).topk(2, -1)
        return (torch.einsum("ni,nkij->nkj", x, self.ways[which]) * scores[..., None]).sum(1)


class Narrow(nn.Module):
    """Standardised columns that hardly vary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = 100 + 1e-3 * self.inner(x)
        return F.layer_norm(y, (10,), eps=1e-12)


class Logarithms(nn.Module):
    """Geometric means of what is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(torch.exp(self.inner(torch.log(x))))


class Enlarging(nn.Module):
    """Upsampling and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.LeakyReLU(), nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(6, 3, 3, padding=1), nn.InstanceNorm2d(3), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Positions(nn.Module):
    """Sines of large angles, and running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(100 * torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.cumsum(x, 1) * self.rate)


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), Residual(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.ELU())), nn.Linear(24, 5)
    )  # fmt: skip


def _images() -> Tensor:
    return torch.randint(0, 256, (2, 3, 16, 16)).float() / 255


@dataclass(frozen=True)
class Family:
    """How a model is made, and the inputs it would be given."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    quantised: bool = False


FAMILIES: dict[str, Family] = {
    "perceptron": Family(_perceptron, lambda: {"x": torch.rand(4, 12) * 10}),
    "convolutions": Family(Convolutions, lambda: {"x": _images()}),
    "spectrogram": Family(Spectrogram, lambda: {"x": torch.sin(torch.arange(512) * torch.rand(1))[None, None]}),
    "bytes": Family(Bytes, lambda: {"x": torch.randint(97, 123, (2, 40))}),
    "transformer": Family(
        Transformer,
        lambda: {"tokens": torch.randint(0, 29, (3, 6)), "mask": (torch.arange(6) < torch.randint(1, 7, (3, 1))).float()},
    ),
    "recurrent": Family(Recurrent, lambda: {"x": torch.rand(2, 9, 6)}),
    "cancelling": Family(Cancelling, lambda: {"x": torch.rand(8, 64)}),
    "iterated": Family(Iterated, lambda: {"x": torch.rand(4, 12)}),
    "routed": Family(Routed, lambda: {"x": torch.rand(16, 8)}),
    "narrow": Family(Narrow, lambda: {"x": torch.rand(4, 10)}),
    "logarithms": Family(Logarithms, lambda: {"x": torch.rand(6, 9) + 1e-3}),
    "enlarging": Family(Enlarging, lambda: {"x": torch.rand(1, 4, 6, 6)}),
    "positions": Family(Positions, lambda: {"x": torch.rand(2, 30, 12)}),
    "quantised convolutions": Family(Convolutions, lambda: {"x": _images()}, quantised=True),
    "quantised perceptron": Family(_perceptron, lambda: {"x": torch.rand(4, 12) * 10}, quantised=True),
}  # fmt: skip


def write_family(name: str, seed: int, folder: Path) -> tuple[Path, Path]:
    """Write a model of a family as ONNX, and inputs of its own kind as npz."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    module, inputs = family.make().eval(), family.inputs()
    stem = f"{name.replace(' ', '_')}_{seed}"
    path, data = folder / f"{stem}.onnx", folder / f"{stem}.npz"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(inputs.values()), path, input_names=list(inputs), dynamo=False, opset_version=17
        )
    np.savez(data, **{key: x.numpy() for key, x in inputs.items()})
    if family.quantised:
        path = quantise(path, data)
    return path, data


def quantise(path: Path, data: Path) -> Path:
    """Quantise a model to integers of 8 bits by onnxruntime, with ranges from data."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            arrays = dict(np.load(data))
            generator = np.random.default_rng(0)
            noise = {name: generator.standard_normal(x.shape).astype(x.dtype) for name, x in arrays.items()}
            self.batches = iter([arrays, noise])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    target = path.with_name(f"{path.stem}_int8.onnx")
    quantize_static(
        path,
        target,
        Reader(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return target
