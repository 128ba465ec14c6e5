"""Convolutions of one tap on small images with weights packed ahead, and at a single position, against the interpreter:
single positions behind whole vectors, tiles that are left over, groups, epilogues."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.kernels.conv import conv, small_images
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph, Module, Value, Var
from penstock.ir.text import print_module

from ...cases import ON_TARGETS, build, compare, difference, make_args, to_torch, value
from ...test_packed import Writer

Epilogue = Callable[[Writer, Value], Value]


def bare(_: Writer, y: Value) -> Value:
    return y


def short(w: Writer, y: Value) -> Value:
    """A bias, a residual and relu."""
    bias = w.read("b", f"{y.type.dtype}[{y.type.dims[1]},{','.join('1' for _ in y.type.dims[2:])}]")
    return w("relu", w("add", w("add", y, bias), w.read("rest", str(y.type))))


def long(w: Writer, y: Value) -> Value:
    for kind in ("sigmoid", "tanh", "abs", "neg", "sigmoid", "tanh", "gelu", "abs"):
        y = w(kind, y)
    return w("mul", y, w.read("scale", f"{y.type.dtype}[{y.type.dims[1]},1,1]"))


def by_row(w: Writer, y: Value) -> Value:
    """An operand that differs from row to row: positions are no joint dimension."""
    return w("mul", y, w.read("rows", f"{y.type.dtype}[{y.type.dims[2]},1]"))


def turned(w: Writer, y: Value) -> Value:
    n, c, h, v = y.type.dims
    return w("transpose", w("reshape", w("relu", y), shape=(n, c, h * v)), perm=(0, 2, 1))


def graph_of(name: str, x: str, filters: int, epilogue: Epilogue = short, groups: int = 1) -> Graph:
    w = Writer()
    source = value("x", x)
    dims = source.type.dims
    ones = ",".join("1" for _ in dims[2:])
    weight = w.read("w", f"{source.type.dtype}[{filters},{dims[1] // groups},{ones}]")
    graph = w.fused((source,), (epilogue(w, w("conv", source, weight, groups=groups)),))
    return Graph(name, graph.ins, graph.outs, graph.ops, graph.saved)


# On 16 lanes: vectors and single positions of an image are 3+1, 12+4, 4, 2+4, 6+4, 1, 1+1.
SIZES = {
    "7x7": ("f32[1,11,7,7]", 20),
    "14x14": ("f32[2,10,14,14]", 17),
    "8x8": ("f32[1,12,8,8]", 30),
    "6x6": ("f32[1,9,6,6]", 25),
    "10x10": ("f32[1,9,10,10]", 9),
    "4x4": ("f32[3,5,4,4]", 14),
    "one row": ("f32[2,6,1,17]", 5),
    "one output": ("f32[1,6,7,7]", 1),
    "double": ("f64[1,11,7,7]", 20),
    "one dimension": ("f32[1,8,64]", 21),
    "shared by threads": ("f32[1,40,14,14]", 70),
}
GRAPHS: dict[str, Graph] = {
    **{name: graph_of(f"s0.s{i}", *given) for i, (name, given) in enumerate(SIZES.items())},
    "groups": graph_of("s0.groups", "f32[2,12,7,7]", 30, short, 3),
    **{
        epilogue.__name__: graph_of(f"s0.{epilogue.__name__}", "f32[2,7,7,7]", 19, epilogue)
        for epilogue in (bare, long, by_row, turned)
    },
}


# One position: products of few rows, the last of them with weights that are asked for beforehand.
ROWS = {
    f"{dims}, {filters}, {epilogue.__name__}": graph_of(f"s0.r{i}", dims, filters, epilogue)
    for i, (dims, filters, epilogue) in enumerate(
        [
            ("f32[1,70,1,1]", 21, short),
            ("f32[1,64,1,1]", 32, long),
            ("f32[3,40,1,1]", 9, short),
            ("f32[4,33,1]", 5, bare),
            ("f32[5,33,1,1]", 7, bare),
            ("f64[2,19,1,1]", 12, long),
            ("f32[1,301,1,1]", 301, turned),
        ]
    )
}


@pytest.mark.parametrize(("target", "step"), [row for row in ON_TARGETS if "x86-64-v2" not in str(row)])
def test_small_images_are_the_interpreters(target: str, step: int, tmp_path: Path) -> None:
    chosen = dict(list({**GRAPHS, **ROWS}.items())[::step])
    program = build(list(chosen.values()), tmp_path, target)
    for name, graph in chosen.items():
        assert not compare(program, graph, make_args(graph, np.random.default_rng(3))), name


# The number of threads belongs to a process. Each thread goes over all panels of an image with tiles of its own.
ON_TWO_THREADS = """
import sys, numpy as np, torch
from pathlib import Path
from penstock.backends.tvm.run.load import TvmProgram
from penstock.ir.text import parse_module
library, text, arrays, out = map(Path, sys.argv[1:])
(graph,) = parse_module(text.read_text()).graphs.values()
args = [torch.tensor(array) for array in np.load(arrays).values()]
(result,) = TvmProgram(library, [graph], threads=2).call(graph.name, args)
np.save(out, result.numpy())
"""


def test_two_threads_compute_what_one_does(tmp_path: Path) -> None:
    graph = GRAPHS["shared by threads"]
    args = make_args(graph, np.random.default_rng(3))
    library = build_graphs([graph], tmp_path / "stage.so").path
    text, arrays, out = (tmp_path / name for name in ("module.ir", "arrays.npz", "out.npy"))
    variables = {op.var: Var(op.var, op.outs[0].type, "param") for op in graph.ops if op.kind == "read"}
    text.write_text(print_module(Module("m", vars=variables, graphs={graph.name: graph})))
    np.savez(arrays, *args)
    command = [sys.executable, "-c", ON_TWO_THREADS, *map(str, (library, text, arrays, out))]
    subprocess.run(command, check=True, timeout=120)
    (expected,) = TvmProgram(library, [graph]).call(graph.name, [to_torch(a) for a in args])
    assert np.array_equal(np.load(out), expected.numpy())


def test_the_cases_are_small_images_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Graph] = []
    emit = small_images.emit_small_images
    monkeypatch.setattr(conv.small_images, "emit_small_images", lambda *given: (taken.append(graph), emit(*given)))
    for graph in GRAPHS.values():
        plan_kernels(graph, machine_of("skylake-avx512"))
    assert {graph.name for graph in taken} == {graph.name for graph in GRAPHS.values()}
    taken.clear()
    for dims in ("f32[1,8,5,5]", "f32[1,8,16,16]", "f32[1,8,3,3]", "bf16[1,8,7,7]"):
        graph = graph_of("s0.F", dims, 16, bare)
        plan_kernels(graph, machine_of("skylake-avx512"))
    assert not taken


def test_control_one_weight_in_another_place_is_noticed(tmp_path: Path) -> None:
    graph = GRAPHS["7x7"]
    program = build([graph], tmp_path)
    args = make_args(graph, np.random.default_rng(1))
    others = [*args]
    # The first slot is the weight.
    others[1] = np.roll(args[1], 1, axis=0)
    (found,) = program.call(graph.name, [to_torch(a) for a in args])
    (wrong,) = NumpyProgram([graph]).call(graph.name, [torch.tensor(a) for a in others])
    assert difference(found, wrong)
