"""Convolutions of bytes against NumPy's 64-bit integers, on every instruction set: each sum is exact, controls noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.tvm.kernels.conv.integers import choose
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.passes.kernels.fuse import FuseOptions, fuse

from ....cases import build, value

TARGETS = ["host", "portable", "x86-64-v2", pytest.param("skylake-avx512", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Shape:
    """The sizes of a convolution: of x and of the weight, their element types and attributes."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    kinds: tuple[str, str] = ("u8", "i8")
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    groups: int = 1
    # The zero points of the weight are known to be zero.
    symmetric: bool = False


SHAPES = (
    Shape((1, 1, 1), (1, 1, 1)),
    Shape((2, 20, 9, 11), (13, 20, 1, 1), symmetric=True),
    Shape((1, 7, 9, 21), (10, 7, 3, 3), ("i8", "u8"), pads=(1, 1, 1, 1)),
    Shape((2, 8, 7, 7), (17, 8, 3, 3), pads=(1, 1, 1, 1), symmetric=True),
    Shape((1, 5, 13, 40), (6, 5, 3, 3), ("u8", "u8"), strides=(2, 2), pads=(1, 0, 1, 2)),
    Shape((1, 4, 8, 70), (5, 4, 1, 1), strides=(2, 2)),
    Shape((1, 3, 23, 23), (9, 3, 7, 7), strides=(2, 2), pads=(3, 3, 3, 3)),
    Shape((1, 4, 3, 70), (5, 4, 2, 2), pads=(0, 1, 1, 0)),
    Shape((1, 1, 12, 12), (6, 1, 5, 5), ("i8", "i8")),
    Shape((1, 3, 16, 16), (5, 3, 8, 8), strides=(8, 8)),
    Shape((1, 12, 6, 9), (9, 4, 2, 3), groups=3, dilations=(2, 1), pads=(0, 1, 1, 1)),
    Shape((2, 6, 30), (7, 6, 4), strides=(3,), pads=(2, 1)),
    Shape((1, 4, 34, 1), (5, 4, 1, 1)),
    Shape((1, 4, 3, 5, 1), (5, 4, 1, 1, 1)),
    Shape((1, 2, 40, 3), (6, 2, 3, 3), strides=(1, 2)),
    Shape((1, 4, 5, 6, 7), (5, 4, 3, 2, 3), strides=(1, 1, 2), pads=(1, 0, 1, 1, 1, 1)),
    # Strides with so much padding that the output is as large as the image.
    Shape((1, 4, 3, 3), (5, 4, 1, 1), strides=(2, 2), pads=(0, 0, 2, 2)),
    Shape((1, 4, 2, 2), (5, 4, 2, 2), strides=(2, 2), pads=(0, 0, 2, 2)),
)
# For outputs in lanes: parts of panels, chunks and tiles.
MORE = (
    Shape((1, 5, 9, 15), (41, 5, 3, 3), pads=(1, 1, 1, 1)),
    Shape((2, 3, 21, 38), (33, 3, 3, 3), pads=(1, 1, 1, 1)),
    Shape((1, 4, 30, 30), (20, 4, 1, 1)),
)


def convolution(s: Shape) -> Graph:
    """A convolution whose sums become floats and are scaled in the same kernel, beside the sums."""
    x, w = s.kinds
    data, zero = value("x", f"{x}[{','.join(map(str, s.x))}]"), value("zero", f"{x}[]")
    filters = s.w[0]
    types = {
        "w": f"{w}[{','.join(map(str, s.w))}]",
        "z": f"{w}[{filters}]",
        "f": f"f32[1,{filters},{','.join('1' * (len(s.w) - 2))}]",
    }
    variables = {name: Var(name, parse_type(t), "buffer") for name, t in types.items()}
    ops = [Op("read", (), (Value(name, var.type),), {"var": name}) for name, var in variables.items()]
    weight, zeros, factors = (op.outs[0] for op in ops)
    if s.symmetric:
        del ops[1]
        ops.append(make("const", [], ["none"], value=0 if w == "i8" else 128, dtype=w, shape=(filters,)))
        zeros = ops[-1].outs[0]
    attrs = {"strides": s.strides, "pads": s.pads, "dilations": s.dilations, "groups": s.groups}
    ops.append(make("conv_bytes", [data, weight, zero, zeros], ["sums"], **attrs))
    ops.append(make("cast", [ops[-1].outs[0]], ["floats"], dtype="f32"))
    ops.append(make("mul", [ops[-1].outs[0], factors], ["scaled"]))
    graph = Graph("s0.F0", (data, zero), (ops[-3].outs[0], ops[-1].outs[0]), tuple(ops), ())
    fused = fuse(Module("m", graphs={graph.name: graph}, vars=variables), FuseOptions())
    return fused.graphs[graph.name]


def operands(s: Shape) -> list[np.ndarray]:
    """x, its zero point, the weight, its zero points and factors; the ends of the ranges are among the numbers."""
    rng = np.random.default_rng(1)
    ranges = [np.iinfo("int8" if kind == "i8" else "uint8") for kind in s.kinds]
    x, w = (rng.integers(r.min, r.max + 1, dims).astype(r.dtype) for r, dims in zip(ranges, (s.x, s.w), strict=True))
    x[:, 0], w[0], w[-1] = ranges[0].max, ranges[1].max, ranges[1].min
    zeros = rng.integers(ranges[1].min, ranges[1].max + 1, s.w[0]).astype(w.dtype)
    if s.symmetric:
        zeros[:] = 0 if s.kinds[1] == "i8" else 128
    factors = rng.standard_normal((1, s.w[0], *(1,) * (len(s.w) - 2))).astype(np.float32)
    return [x, np.asarray(ranges[0].max - 3, x.dtype), w, zeros, factors]


def exact(
    s: Shape, x: np.ndarray, zero: np.ndarray, w: np.ndarray, zeros: np.ndarray, outs: tuple[int, ...]
) -> np.ndarray:
    """Sums over the taps of every window, in 64-bit integers."""
    rank = len(s.x) - 2
    strides, dilations, pads = s.strides or (1,) * rank, s.dilations or (1,) * rank, s.pads or (0,) * 2 * rank
    data = np.pad(x.astype(np.int64) - zero, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    weight = w.astype(np.int64) - zeros.astype(np.int64).reshape(-1, *(1,) * (rank + 1))
    result = np.zeros((s.x[0], s.w[0], *outs), np.int64)
    each = s.w[0] // s.groups
    for o, tap in product(range(s.w[0]), product(*map(range, s.w[2:]))):
        group = data[:, o // each * s.w[1] : (o // each + 1) * s.w[1]]
        where = tuple(
            slice(t * d, t * d + (n - 1) * st + 1, st)
            for t, d, n, st in zip(tap, dilations, outs, strides, strict=True)
        )
        result[:, o] += np.einsum(
            "nc...,c->n...", group[(slice(None), slice(None), *where)], weight[(o, slice(None), *tap)]
        )
    return result


@pytest.mark.parametrize("target", TARGETS)
def test_sums_are_exact(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "turns_outputs", lambda *sizes: False)
    _check(SHAPES, target, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_sums_are_exact_with_outputs_in_lanes(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "turns_outputs", lambda *sizes: True)
    _check([replace(s, symmetric=True) for s in (*SHAPES[1::2], SHAPES[10], *MORE)], target, tmp_path)


def _check(shapes: Sequence[Shape], target: str, folder: Path) -> None:
    graphs = [replace(convolution(s), name=f"s0.F{i}") for i, s in enumerate(shapes)]
    program = build(graphs, folder, target)
    for graph, s in zip(graphs, shapes, strict=True):
        arrays = operands(s)
        fed = [a for i, a in enumerate(arrays) if not (s.symmetric and i == 3)]
        sums, scaled = program.call(graph.name, [torch.tensor(a) for a in fed])
        outs = tuple(sums.shape[2:])
        right = exact(s, *arrays[:4], outs)
        np.testing.assert_array_equal(sums.numpy(), right, err_msg=str(s))
        np.testing.assert_allclose(scaled.numpy(), right.astype(np.float32) * arrays[4], rtol=1e-6)
        assert not np.array_equal(right, exact(s, arrays[0], arrays[1] - 1, *arrays[2:4], outs)), (
            "control: a zero point"
        )
        if s.w[0] > 1:
            wrong = exact(s, *arrays[:3], np.roll(arrays[3], 1) + s.symmetric, outs)
            assert not np.array_equal(right, wrong), "control: the zero points of neighbours"
