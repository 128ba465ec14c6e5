"""Comparing compiled graphs with the NumPy interpreter: building, running, and the comparison itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from penstock.backends.interface import CompileOptions, StageSources
from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.run.load import TvmProgram
from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph, Op, Signature, Value, signature, slot_types
from penstock.ir.ops import infer_op, make
from penstock.ir.types import FLOATS, TensorType, numpy_dtype, parse_type

# Largest error allowed, as a part of the largest value of the result.
TOLERANCE = {"f32": 2e-5, "f64": 1e-12}

# Targets of a test, with every how-manieth of its cases: machines with shorter vectors run a few, and all of them in
# slow tests.
ON_TARGETS = [
    ("host", 1),
    *((target, 5) for target in ("x86-64-v3", "x86-64-v2")),
    *(pytest.param(target, 1, marks=pytest.mark.slow) for target in ("x86-64-v3", "x86-64-v2")),
]


def value(name: str, text: str) -> Value:
    return Value(name, parse_type(text))


def chain(name: str, *kinds: str, type: str = "f32[4,20]", prefix: str = "", **attrs: object) -> Graph:
    """Operations one behind the other, each a kernel of its own."""
    x = value(f"{prefix}x", type)
    ops: list[Op] = []
    for i, kind in enumerate(kinds):
        given = ops[-1].outs if ops else (x,)
        ops.append(make(kind, given, [f"{prefix}{i}"], f"line {i}", **(attrs if kind == "softmax" else {})))  # type: ignore[arg-type]
    return Graph(name, (x,), ops[-1].outs, tuple(ops))


@dataclass(frozen=True)
class OpCase:
    """One operation on operands of given types."""

    kind: str
    types: tuple[str, ...]
    attrs: Mapping[str, Attr]
    positive: bool = False

    def graph(self, name: str) -> Graph:
        ins = tuple(value(f"x{i}", t) for i, t in enumerate(self.types))
        count = len(infer_op(Op(self.kind, ins, (), self.attrs), {}))
        op = make(self.kind, ins, [f"y{i}" for i in range(count)], "", **self.attrs)
        return Graph(name, ins, op.outs, (op,))

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(self.types)}{''.join(f', {k}={v}' for k, v in self.attrs.items())})"


@dataclass(frozen=True)
class ConvCase:
    """A convolution, and its gradient for the input: as torch computes them, and as a graph."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    dilations: tuple[int, ...] = (1, 1)
    groups: int = 1
    dtype: str = "f32"

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rank = len(self.strides)
        # torch wants the last dimension first.
        border = [self.pads[i + side] for i in reversed(range(rank)) for side in (0, rank)]
        return (F.conv2d if rank == 2 else F.conv1d)(
            F.pad(x, border), w, None, self.strides, 0, self.dilations, self.groups
        )  # type: ignore[operator]

    def backward(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(self.x, dtype=dy.dtype, requires_grad=True)
        (dx,) = torch.autograd.grad(self.forward(x, w), x, dy)
        return dx

    def graph(self, name: str, gradient: bool) -> Graph:
        attrs = {
            "strides": self.strides,
            "pads": self.pads,
            "dilations": self.dilations,
            "groups": self.groups,
            "kernel": "k0",
        }
        x, w = (
            value("x", f"{self.dtype}[{','.join(map(str, self.x))}]"),
            value("w", f"{self.dtype}[{','.join(map(str, self.w))}]"),
        )
        op = make("conv", [x, w], ["y"], **attrs)
        if gradient:
            dy = value("dy", str(op.outs[0].type))
            op = make("conv_grad_input", [dy, w], ["dx"], shape=self.x, **attrs)
        return Graph(name, op.ins, op.outs, (op,))


def random_array(rng: np.random.Generator, t: TensorType, positive: bool = False) -> np.ndarray:
    if t.dtype == "bool":
        return np.asarray(rng.random(t.dims) > 0.5)
    if t.dtype in FLOATS:
        drawn = np.asarray(rng.standard_normal(t.dims)).astype(numpy_dtype(t.dtype))
        return np.abs(drawn) + drawn.dtype.type(0.1) if positive else drawn
    return np.asarray(rng.integers(0, 5, t.dims)).astype(numpy_dtype(t.dtype))


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor of torch's own memory, which is aligned."""
    return (
        torch.tensor(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == numpy_dtype("bf16")
        else torch.tensor(array)
    )


def make_args(graph: Graph, rng: np.random.Generator, positive: bool = False, shared: bool = True) -> list[np.ndarray]:
    """Random arguments; with `shared`, `latest` and `next` of a variable start out equal, as they will be one buffer."""
    sig, types = signature(graph), slot_types(graph)
    args = [random_array(rng, v.type, positive) for v in sig.ins]
    by_var: dict[str, np.ndarray] = {}
    for slot in sig.slots:
        drawn = random_array(rng, types[slot], positive or slot.var.endswith("adam_v"))
        args.append(by_var.setdefault(slot.var, drawn).copy() if shared else drawn)
    return args


def tensors_of(sig: Signature, arrays: Sequence[np.ndarray], shared: bool) -> list[torch.Tensor]:
    tensors = [to_torch(a) for a in arrays]
    if shared:
        by_var: dict[str, torch.Tensor] = {}
        for i, slot in enumerate(sig.slots, len(sig.ins)):
            if slot.slot in ("latest", "next"):
                tensors[i] = by_var.setdefault(slot.var, tensors[i])
    return tensors


def build(graphs: Sequence[Graph], folder: Path, target: str = "host") -> TvmProgram:
    built = build_graphs(graphs, folder / "stage.so", CompileOptions(target))
    return TvmProgram(built.path, graphs)


def difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> str:
    """What is wrong with a result; empty if nothing is. A tolerance of its own is for numbers made of rounded ones."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if not expected.dtype.is_floating_point:
        wrong = int((found != expected).sum())
        return f"{wrong} of {expected.numel()} elements differ" if wrong else ""
    a, b = found.double().numpy(), expected.double().numpy()
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return "nan in different places"
    if not np.array_equal(np.where(np.isinf(a), np.sign(a), 0), np.where(np.isinf(b), np.sign(b), 0)):
        return "inf in different places"
    finite = np.isfinite(b)
    scale = np.abs(b[finite]).max(initial=0.0)
    error = np.abs(a[finite] - b[finite]).max(initial=0.0)
    limit = (tolerance or TOLERANCE["f64" if expected.dtype == torch.float64 else "f32"]) * max(scale, 1e-30)
    return f"error {error:.2e} at scale {scale:.2e}" if error > limit else ""


def compare(program: TvmProgram, graph: Graph, arrays: Sequence[np.ndarray], shared: bool = True) -> list[str]:
    """Run a graph compiled and interpreted; everything that differs, results and slots."""
    sig = signature(graph)
    ours, reference = tensors_of(sig, arrays, shared), tensors_of(sig, arrays, shared)
    found = program.call(graph.name, ours)
    expected = NumpyProgram([graph]).call(graph.name, reference)
    pairs = [(f"%{v.name}", a, b) for v, a, b in zip(sig.results, found, expected, strict=True)]
    pairs += [(f"@{s.var} {s.slot}", ours[i], reference[i]) for i, s in enumerate(sig.slots, len(sig.ins))]
    return [f"{graph.name} {name}: {wrong}" for name, a, b in pairs if (wrong := difference(a, b))]


class Shown:
    """A viewer that keeps what it is shown."""

    def __init__(self) -> None:
        self.stages: dict[str, StageSources] = {}
        self.steps: list[str] = []

    def step(self, name: str) -> AbstractContextManager[list[str]]:
        self.steps.append(name)
        return nullcontext([])

    def sources(self, stage: str, found: StageSources) -> None:
        self.stages[stage] = found
