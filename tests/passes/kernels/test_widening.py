"""Bytes that later kernels make floats: which kernels there are, what lies in memory between them, and their results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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


def residual(*, early: bool = False) -> Graph:
    """Sums of rows become bytes; these, as floats, are added to later sums of them. `early`: to x in the first kernel."""
    x = Value("x", parse_type("f32[6,40]"))
    ops: list[Op] = []

    def emit(kind: str, *ins: Value, **attrs: object) -> Value:
        ops.append(make(kind, list(ins), [f"v{len(ops)}"], **attrs))  # type: ignore[arg-type]
        return ops[-1].outs[0]

    def floats(codes: Value) -> Value:
        whole = emit("sub", emit("cast", codes, dtype="i32"), emit("const", value=7, dtype="i32", shape=()))
        return emit("mul", emit("cast", whole, dtype="f32"), emit("const", value=0.25, dtype="f32", shape=()))

    scaled = emit("mul", emit("softmax", x, axis=1), emit("const", value=200.0, dtype="f32", shape=()))
    codes = emit("cast", emit("round", scaled), dtype="u8")
    again = floats(codes)
    other = x if early else emit("softmax", emit("cast", codes, dtype="f32"), axis=0)
    result = emit("add", again, other)
    return Graph("s0.F", (x,), (codes, result) if early else (result,), tuple(ops), ())


def kernels(graph: Graph) -> dict[str, str]:
    """The kernel of each value between the bytes and the sum, by kind and type."""
    return {
        f"{op.kind} {op.outs[0].type.dtype}": str(op.attrs["kernel"])
        for op in choose_kernels(graph).ops
        if op.kind in ("sub", "mul", "add", "cast")
    }


def test_a_later_kernel_makes_floats_of_bytes() -> None:
    chosen = kernels(residual())
    assert all(chosen[what].startswith(INLINE) for what in ("sub i32", "mul f32"))
    assert chosen["cast u8"] != chosen["add f32"]


def test_control_the_kernel_of_the_bytes_goes_on_with_them_itself() -> None:
    chosen = kernels(residual(early=True))
    assert chosen["cast u8"] == chosen["sub i32"] == chosen["mul f32"] == chosen["add f32"]


def test_results_are_those_of_the_interpreter(tmp_path: Path) -> None:
    graph = choose_kernels(residual())
    x = torch.tensor(np.random.default_rng(2).standard_normal((6, 40)).astype(np.float32))
    program = TvmProgram(build_graphs([graph], tmp_path / "stage.so", CompileOptions("host")).path, [graph])
    (expected,) = NumpyProgram([graph]).call(graph.name, [x])
    torch.testing.assert_close(program.call(graph.name, [x])[0], expected, rtol=1e-6, atol=1e-6)
    assert len(expected.unique()) > 40
