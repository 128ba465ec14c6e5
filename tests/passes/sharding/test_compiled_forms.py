"""Local forms as compiled kernels, in f32: operations whose parts several ranks have are those of one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from oracles.sharding.drawn_windows import KINDS, drawn_window
from oracles.sharding.laid_out import cut_out, put_together
from oracles.sharding.one_operation import types_of
from oracles.sharding.threads import run_compiled
from samples import SAMPLES

from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph, Mesh, Module, Op, Stage, Value
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.ops import make
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import Split
from penstock.ir.types import TensorType
from penstock.passes.sharding.localize import localize
from penstock.passes.sharding.propagate import allowed

TWO = Mesh("m", (("a", 2),), ("cpu:0", "cpu:1"))
FOUR = Mesh("m", (("a", 4),), tuple(f"cpu:{i}" for i in range(4)))
# An operation, the types of its operands and results, and operands.
Case = tuple[Op, Sequence[TensorType], Sequence[np.ndarray]]


def windows(first: int, count: int, mesh: Mesh = TWO) -> list[Case]:
    """Return drawn windows on a mesh, as many of each kind."""
    cases: list[Case] = []
    held = dict.fromkeys(KINDS, 0)
    number = first
    while len(cases) < count:
        case, number = drawn_window(number, "f32"), number + 1
        if case.mesh.axes == mesh.axes and held[case.op.kind] < -(-count // len(KINDS)):
            held[case.op.kind] += 1
            cases.append((case.op, case.types, [x.astype(np.float32) for x in case.arrays]))
    return cases


def row(kind: str, name: str, shapes: Sequence[tuple[int, ...]], results: int = 1, **attrs: Attr) -> Case:
    """Return an operation along a row, one of whose names is split."""
    rng = np.random.default_rng(len(kind))
    ins = tuple(Value(f"x{i}", TensorType("f32", shape)) for i, shape in enumerate(shapes))
    arrays = [rng.integers(-8, 9, shape).astype(np.float32) / 4 for shape in shapes]
    if kind == "scatter":
        ins = (ins[0], Value("x1", TensorType("i64", shapes[1])), ins[2])
        arrays[1] = rng.integers(-shapes[0][0], shapes[0][0], shapes[1])
    elif kind == "layer_norm_grad":
        arrays[4] = np.abs(arrays[4]) + 1
    op = make(kind, ins, [f"y{i}" for i in range(results)], **attrs)
    types = types_of(op, rule_of(op), {name: Split(("a",))}, TWO.sizes)
    assert types is not None
    return op, types, arrays


def rows() -> list[Case]:
    return [
        row("layer_norm", "n1", [(3, 7), (7,), (7,)], 3, axis=1),
        row("layer_norm_grad", "n1", [(3, 7), (3, 7), (7,), (3,), (3,)], axis=1),
        row("cumsum", "n", [(3, 7)], axis=1, reverse=True),
        row("cumsum", "n", [(5, 3)], axis=0, exclusive=True),
        row("topk", "n", [(3, 9, 2)], 2, k=6, axis=1),
        row("topk", "n", [(3, 9)], 2, k=4, axis=1, largest=False),
        row("argmax", "n1", [(3, 9)], axis=1),
        row("scatter", "r", [(5, 3), (4,), (4, 3)], axis=0),
    ]


def samples(mesh: Mesh) -> list[Case]:
    """Return a sample of every row that can be split on a mesh, along the first name that bears it."""
    cases: dict[str, Case] = {}
    for s in SAMPLES:
        floats = all(v.type.dtype in ("f32", "i64", "i32", "bool") for v in (*s.op.ins, *s.op.outs))
        if s.kind in cases or not floats or sum(v.type.size for v in s.op.ins) > 5000:
            continue
        rule = rule_of(s.op)
        for name in rule.sizes:
            if rule.sizes[name] and allowed(s.op, rule, name):
                types = types_of(s.op, rule, {name: Split(("a",))}, mesh.sizes)
                if types is not None and any(axes for t in types for axes in t.axes):
                    cases[s.kind] = s.op, types, s.arrays()
                    break
    return list(cases.values())


def compare(cases: Sequence[Case], folder: Path, backend: str = "tvm", wrong: bool = False, mesh: Mesh = TWO) -> None:
    """Run all operations in one graph, on all ranks, and compare each result with the operation on one device."""
    ops, arrays = list[Op](), dict[str, np.ndarray]()
    for i, (op, types, operands) in enumerate(cases):
        values = [Value(f"c{i}.{v.name}", t) for v, t in zip((*op.ins, *op.outs), types, strict=True)]
        ins, outs = tuple(values[: len(op.ins)]), tuple(values[len(op.ins) :])
        ops.append(Op(op.kind, ins, outs, op.attrs))
        arrays |= {v.name: x for v, x in zip(ins, operands, strict=True)}
    graph = Graph("s0.F", tuple(v for op in ops for v in op.ins), tuple(v for op in ops for v in op.outs), tuple(ops))
    module = Module("forms", graph.ins, meshes=(mesh,), stages=(Stage(0, "m"),), graphs={"s0.F": graph})
    parts = [
        {v.name: cut_out(arrays[v.name], v.type, mesh, place) for v in graph.ins} for place in range(len(mesh.devices))
    ]
    results = run_compiled(localize(module), parts[::-1] if wrong else parts, folder, backend)
    place = 0
    for op, _, operands in cases:
        for right in run_graph(Graph("whole", op.ins, op.outs, (op,)), operands):
            value = graph.outs[place]
            got = put_together([of_rank[place] for of_rank in results], value.type, mesh)
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5, err_msg=str(value))
            place += 1


def test_windows_and_rows_are_compiled(tmp_path: Path) -> None:
    compare([*windows(0, len(KINDS)), *rows()], tmp_path)


@pytest.mark.slow
def test_more_windows_are_compiled(tmp_path: Path) -> None:
    compare(windows(1000, 22 * len(KINDS), FOUR), tmp_path, mesh=FOUR)


@pytest.mark.slow
def test_a_sample_of_every_row_is_compiled(tmp_path: Path) -> None:
    cases = samples(FOUR)
    assert len(cases) > 50
    compare(cases, tmp_path, mesh=FOUR)


def test_control_ranks_that_have_each_others_parts_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        compare(windows(0, len(KINDS)), tmp_path, "numpy", wrong=True)
