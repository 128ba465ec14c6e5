"""Lookups in padded values, as uneven parts of weights have them: no memory for the padding, and the same results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.interface import CompileOptions
from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.run.load import TvmProgram
from penstock.ir.graph import Graph, Op, Value
from penstock.ir.memory.workspace import INLINE
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.passes.kernels.fuse import choose_kernels

PARTS = 3


def part(axis: int, *, also_read: bool = False) -> Graph:
    """One of three parts of f32[7,5] along an axis, the last of them padded. `also_read`: by something else, too."""
    x, number = Value("x", parse_type("f32[7,5]")), Value("number", parse_type("i64[]"))
    ops: list[Op] = []

    def emit(kind: str, *ins: Value, **attrs: object) -> Value:
        ops.append(make(kind, list(ins), [f"v{len(ops)}"], **attrs))  # type: ignore[arg-type]
        return ops[-1].outs[0]

    dims = x.type.dims
    size = -(-dims[axis] // PARTS)
    high = tuple(PARTS * size - n if i == axis else 0 for i, n in enumerate(dims))
    padded = emit("pad", x, low=(0, 0), high=high)
    parted = emit("reshape", padded, shape=(*dims[:axis], PARTS, size, *dims[axis + 1 :]))
    picked = emit("gather", parted, number, axis=axis)
    results = (emit("mul", picked, picked), *((emit("exp", padded),) if also_read else ()))
    return choose_kernels(Graph("s0.U", (x, number), results, tuple(ops), ()))


def kernel_of(graph: Graph, kind: str) -> str:
    return next(str(op.attrs["kernel"]) for op in graph.ops if op.kind == kind)


def test_padding_that_only_lookups_read_has_no_memory() -> None:
    for axis in (0, 1):
        graph = part(axis)
        assert kernel_of(graph, "pad").startswith(INLINE)
        assert kernel_of(graph, "reshape").startswith(INLINE)


def test_control_padding_that_others_read_lies_in_memory() -> None:
    assert not kernel_of(part(0, also_read=True), "pad").startswith(INLINE)


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_are_those_of_the_interpreter(axis: int, tmp_path: Path) -> None:
    graph = part(axis)
    x = torch.tensor(np.random.default_rng(3).standard_normal((7, 5)).astype(np.float32))
    program = TvmProgram(build_graphs([graph], tmp_path / "stage.so", CompileOptions("host")).path, [graph])
    for number in range(PARTS):
        (expected,) = NumpyProgram([graph]).call(graph.name, [x, torch.tensor(number)])
        assert torch.equal(program.call(graph.name, [x, torch.tensor(number)])[0], expected)
        # The last part alone has padding.
        assert bool((expected == 0).any()) == (number == PARTS - 1)
