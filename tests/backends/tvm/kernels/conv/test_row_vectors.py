"""Convolutions of few terms with positions of a row in lanes, against the interpreter: strides, borders, dilations,
tiles and panels that are left over, epilogues, weights that change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.kernels.conv import conv
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph

from ...cases import ON_TARGETS, build, compare, difference, make_args, to_torch, value
from ...test_packed import Writer


def graph_of(name: str, x: str, filters: int, kernel: tuple[int, ...], **attrs: Attr) -> Graph:
    w = Writer()
    source = value("x", x)
    weight = w.read("w", f"{source.type.dtype}[{filters},{source.type.dims[1]},{','.join(map(str, kernel))}]")
    y = w("conv", source, weight, **attrs)
    bias = w.read("b", f"{y.type.dtype}[{filters},{','.join('1' for _ in kernel)}]")
    graph = w.fused((source,), (w("relu", w("add", y, bias)),))
    return Graph(name, graph.ins, graph.outs, graph.ops, graph.saved)


PADDED = {"pads": (1, 1, 1, 1)}
# Output rows are whole vectors of 16 lanes, or of 8 where these are doubles.
CASES: dict[str, Graph] = {
    name: graph_of(f"s0.v{i}", x, filters, kernel, **attrs)  # type: ignore[arg-type]
    for i, (name, (x, filters, kernel, attrs)) in enumerate(
        {
            "strided": ("f32[1,3,20,32]", 19, (3, 3), {"strides": (2, 2), **PADDED}),
            "many panels": ("f32[2,2,9,112]", 11, (3, 3), PADDED),
            "one row": ("f32[1,2,1,64]", 8, (1, 3), {"pads": (0, 1, 0, 1)}),
            "no border": ("f32[1,3,12,64]", 33, (4, 4), {"strides": (4, 4)}),
            "dilated": ("f32[1,2,13,36]", 9, (3, 3), {"dilations": (2, 2), "strides": (1, 1)}),
            "uneven": ("f32[1,3,11,33]", 16, (2, 3), {"strides": (3, 2), "pads": (2, 0, 1, 0)}),
            "one dimension": ("f32[2,4,96]", 12, (7,), {"strides": (2,), "pads": (3, 3)}),
            "double": ("f64[1,3,10,16]", 10, (3, 3), PADDED),
        }.items()
    )
}


@pytest.mark.parametrize(("target", "step"), [row for row in ON_TARGETS if "x86-64-v2" not in str(row)])
def test_rows_in_lanes_are_the_interpreters(target: str, step: int, tmp_path: Path) -> None:
    chosen = dict(list(CASES.items())[::step])
    program = build(list(chosen.values()), tmp_path, target)
    for name, graph in chosen.items():
        assert not compare(program, graph, make_args(graph, np.random.default_rng(3))), name


def test_the_cases_have_few_terms_and_others_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Graph] = []
    emit = conv.row_vectors.emit_row_vectors
    monkeypatch.setattr(conv.row_vectors, "emit_row_vectors", lambda *given: (taken.append(graph), emit(*given)))
    for graph in CASES.values():
        plan_kernels(graph, machine_of("skylake-avx512"))
    assert {graph.name for graph in taken} == {graph.name for graph in CASES.values()}
    taken.clear()
    # Rows that are no whole vectors, many terms, few filters.
    for x, filters in (("f32[1,3,8,40]", 16), ("f32[1,16,8,32]", 16), ("f32[1,3,8,32]", 4)):
        graph = graph_of("s0.F", x, filters, (3, 3), **PADDED)  # type: ignore[arg-type]
        plan_kernels(graph, machine_of("skylake-avx512"))
    assert not taken


def test_control_weights_of_another_filter_are_noticed(tmp_path: Path) -> None:
    graph = CASES["strided"]
    program = build([graph], tmp_path)
    args = make_args(graph, np.random.default_rng(1))
    others = [*args]
    # The first slot is the weight.
    others[1] = np.roll(args[1], 1, axis=0)
    (given,) = program.call(graph.name, [to_torch(a) for a in args])
    (wrong,) = NumpyProgram([graph]).call(graph.name, [torch.tensor(a) for a in others])
    assert difference(given, wrong)
