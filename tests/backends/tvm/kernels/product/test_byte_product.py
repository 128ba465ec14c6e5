"""Products of bytes against NumPy's 64-bit integers, on every instruction set: each sum is exact, controls noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.passes.kernels.fuse import FuseOptions, fuse

from ...cases import build, value

# Rows, terms, columns; types of x and of the weight.
SHAPES = ((1, 1, 1, "u8", "i8"), (13, 67, 50, "u8", "i8"), (7, 130, 33, "i8", "u8"), (5, 64, 16, "u8", "u8"))
TARGETS = ["host", "portable", "x86-64-v2", pytest.param("skylake-avx512", marks=pytest.mark.slow)]


def product(rows: int, k: int, n: int, x: str, w: str) -> Graph:
    """A product whose sums become floats and are scaled in the same kernel, beside the sums."""
    data, zero = value("x", f"{x}[{rows},{k}]"), value("zero", f"{x}[]")
    variables = {name: Var(name, parse_type(t), "buffer") for name, t in (("w", f"{w}[{k},{n}]"), ("z", f"{w}[{n}]"))}
    ops = [Op("read", (), (Value(name, var.type),), {"var": name}) for name, var in variables.items()]
    weight, zeros = (op.outs[0] for op in ops)
    ops.append(make("matmul_bytes", [data, weight, zero, zeros], ["sums"]))
    ops.append(make("cast", [ops[-1].outs[0]], ["floats"], dtype="f32"))
    graph = Graph("s0.F0", (data, zero), (ops[-2].outs[0], ops[-1].outs[0]), tuple(ops), ())
    fused = fuse(Module("m", graphs={graph.name: graph}, vars=variables), FuseOptions())
    return fused.graphs[graph.name]


def operands(shape: tuple[int, int, int, str, str]) -> list[np.ndarray]:
    """x, its zero point, the weight and its zero points: all numbers, then rows and columns of the ends of the range."""
    rows, k, n, *kinds = shape
    rng = np.random.default_rng(1)
    ranges = [np.iinfo("int8" if kind == "i8" else "uint8") for kind in kinds]
    x, w = (
        rng.integers(r.min, r.max + 1, dims).astype(r.dtype)
        for r, dims in zip(ranges, ((rows, k), (k, n)), strict=True)
    )
    x[0], w[:, 0], w[:, -1] = ranges[0].max, ranges[1].max, ranges[1].min
    x[-1] = ranges[0].min
    zeros = rng.integers(ranges[1].min, ranges[1].max + 1, n).astype(w.dtype)
    zeros[0], zeros[-1] = ranges[1].min, ranges[1].max
    return [x, np.asarray(ranges[0].max, x.dtype), w, zeros]


def exact(x: np.ndarray, zero: np.ndarray, w: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    return (x.astype(np.int64) - zero) @ (w.astype(np.int64) - zeros)


@pytest.mark.parametrize("target", TARGETS)
def test_sums_are_exact(target: str, tmp_path: Path) -> None:
    for number, shape in enumerate(SHAPES):
        program = build([product(*shape)], tmp_path / str(number), target)
        arrays = operands(shape)
        sums, floats = program.call("s0.F0", [torch.tensor(a) for a in arrays])
        right = exact(*arrays)
        np.testing.assert_array_equal(sums.numpy(), right)
        np.testing.assert_array_equal(floats.numpy(), right.astype(np.float32))
        for wrong in ([arrays[0], arrays[1] * 0, *arrays[2:]], [*arrays[:3], np.roll(arrays[3] + 1, 1)]):
            assert not np.array_equal(sums.numpy(), exact(*wrong)), (
                "control: a zero point is left out, or a neighbour's"
            )


def test_the_weight_is_packed_once_with_the_sums_of_its_columns(tmp_path: Path) -> None:
    graph, (x, zero, w, zeros) = product(*SHAPES[1]), (torch.tensor(a) for a in operands(SHAPES[1]))
    (step,) = plan_kernels(graph, machine_of("host")).steps
    assert step.kernel.packing is not None
    assert [v.name for v in step.kernel.packing.sources] == ["w"]
    program = build([graph], tmp_path)
    program.hold(graph.name, [w, zeros])
    right = exact(*(t.numpy() for t in (x, zero, w, zeros)))
    w.zero_()
    np.testing.assert_array_equal(program.bind(graph.name, [w, zeros])([x, zero])[0].numpy(), right)


def test_a_weight_that_is_computed_is_packed_in_the_kernel(tmp_path: Path) -> None:
    graph = product(*SHAPES[2])
    inner = tuple(op.with_attrs(packed=None) for op in graph.ops)
    arrays = operands(SHAPES[2])
    program = build([replace(graph, ops=inner)], tmp_path)
    np.testing.assert_array_equal(program.call("s0.F0", [torch.tensor(a) for a in arrays])[0].numpy(), exact(*arrays))
