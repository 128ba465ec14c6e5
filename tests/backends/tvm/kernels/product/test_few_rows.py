"""Products by weights that never change: a row's bits are the same alone and in company, whatever the number of rows."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.kernels.product.panels_ahead import pieces_of
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.passes.kernels.fuse import FuseOptions, fuse

from ...cases import build, difference, make_args, to_torch, value


def product(rows: int, length: int, columns: int, turned: bool, stored: str = "f32") -> Graph:
    """A product of x with a variable that is stored in some element type, and a bias behind it."""
    x = value("x", f"f32[{rows},{length}]")
    variables = {
        "w": Var(
            "w", parse_type(f"{stored}[{columns},{length}]" if turned else f"{stored}[{length},{columns}]"), "param"
        ),
        "b": Var("b", parse_type(f"f32[{columns}]"), "param"),
    }
    ops = [Op("read", (), (Value(name, var.type),), {"var": name}) for name, var in variables.items()]
    weight = ops[0].outs[0]
    if stored != "f32":
        ops.append(make("cast", [weight], ["wide"], dtype="f32"))
        weight = ops[-1].outs[0]
    ops.append(make("matmul", [x, weight], ["y"], tb=turned))
    ops.append(make("add", [ops[-1].outs[0], ops[1].outs[0]], ["z"]))
    graph = Graph(f"s0.F{rows}", (x,), ops[-1].outs, tuple(ops), ())
    return fuse(Module("m", graphs={graph.name: graph}, vars=variables), FuseOptions()).graphs[graph.name]


def unpacked(graph: Graph) -> Graph:
    return replace(graph, ops=tuple(op.with_attrs(packed=None) for op in graph.ops))


def rows_differ(graphs: Sequence[Graph], folder: Path, target: str = "host") -> list[str]:
    """The numbers of rows at which a row has other bits than in the largest product. The graphs differ in rows alone."""
    program = build(graphs, folder, target)
    x, *weights = [
        to_torch(a) for a in make_args(max(graphs, key=lambda g: g.ins[0].type.dims[0]), np.random.default_rng(7))
    ]
    (whole,) = program.call(max(graphs, key=lambda g: g.ins[0].type.dims[0]).name, [x, *weights])
    wrong = []
    for graph in graphs:
        rows = graph.ins[0].type.dims[0]
        for first in {0, x.shape[0] - rows}:
            (part,) = program.call(graph.name, [x[first : first + rows].clone(), *weights])
            if not torch.equal(part, whole[first : first + rows]):
                wrong.append(f"{rows} rows from {first} on")
    return wrong


@settings(max_examples=5, deadline=None)
@given(
    rows=st.integers(2, 40),
    length=st.integers(5, 300),
    columns=st.integers(1, 200),
    turned=st.booleans(),
    stored=st.sampled_from(["f32", "f32", "bf16", "f16"]),
    target=st.sampled_from(["host", "portable"]),
)
def test_a_row_has_the_same_bits_in_any_company(
    rows: int, length: int, columns: int, turned: bool, stored: str, target: str
) -> None:
    graphs = [product(count, length, columns, turned, stored) for count in sorted({1, min(rows, 7), rows})]
    with tempfile.TemporaryDirectory() as folder:
        assert not rows_differ(graphs, Path(folder), target)
        args = [to_torch(a) for a in make_args(graphs[-1], np.random.default_rng(8))]
        (ours,) = build(graphs[-1:], Path(folder) / "last", target).call(graphs[-1].name, args)
        assert not difference(ours, NumpyProgram(graphs[-1:]).call(graphs[-1].name, args)[0])


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize("target", ["host", "portable", "x86-64-v2"])
def test_long_sums_and_many_rows(stored: str, target: str, tmp_path: Path) -> None:
    """Sums in blocks; up to 16 rows and more; a last panel of few columns."""
    assert not rows_differ([product(m, 5000, 67, True, stored) for m in (1, 3, 16, 17, 50)], tmp_path / "long", target)
    assert not rows_differ([product(m, 130, 259, False, stored) for m in (1, 12, 33)], tmp_path / "ragged", target)


@pytest.mark.parametrize(("length", "pieces"), [(2304, 3), (2311, 1)])
def test_sums_go_on_from_piece_to_piece(length: int, pieces: int, tmp_path: Path) -> None:
    """A long panel is cut along the sum, where that comes out even, and its tiles leave their sums in memory. One row,
    which is one tile, is added up in one go: it has the same bits."""
    assert pieces_of(2, length, length * 256) == pieces
    assert pieces_of(1, length, length * 256) == 1
    graphs = [product(m, length, 150, False) for m in (1, 8, 13)]
    assert not rows_differ(graphs, tmp_path)
    args = [to_torch(a) for a in make_args(graphs[-1], np.random.default_rng(8))]
    (ours,) = build(graphs[-1:], tmp_path / "last").call(graphs[-1].name, args)
    assert not difference(ours, NumpyProgram(graphs[-1:]).call(graphs[-1].name, args)[0])


@pytest.mark.parametrize("rows", [13, 22])
def test_a_product_whose_first_operand_is_transposed(rows: int, tmp_path: Path) -> None:
    """Its rows are packed for the whole sum, and long panels are not cut."""
    x, var = value("x", f"f32[2304,{rows}]"), Var("w", parse_type("f32[2304,300]"), "param")
    read = Op("read", (), (Value("w", var.type),), {"var": "w"})
    product_op = make("matmul", [x, read.outs[0]], ["y"], ta=True)
    graph = Graph("s0.F", (x,), product_op.outs, (read, product_op), ())
    graph = fuse(Module("m", graphs={graph.name: graph}, vars={"w": var}), FuseOptions()).graphs[graph.name]
    args = [to_torch(a) for a in make_args(graph, np.random.default_rng(3))]
    (ours,) = build([graph], tmp_path).call(graph.name, args)
    assert not difference(ours, NumpyProgram([graph]).call(graph.name, args)[0])


def test_kernels_that_pack_for_themselves_differ(tmp_path: Path) -> None:
    """The control: without packed weights few rows are added up in vectors along the sum, many in order."""
    graphs = [unpacked(product(m, 300, 100, True)) for m in (1, 20)]
    assert rows_differ(graphs, tmp_path)
