"""Products by weights of 8 and 4 bits against the interpreter, on every instruction set: whole numbers exact, controls noticed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.group import PACKED
from penstock.backends.tvm.kernels.product.quantised_packing import QuantisedPanels
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.passes.kernels.fuse import FuseOptions, fuse

from ...cases import build, difference, value

LIMIT = 1e-5
# Rows, elements of a row, columns, group, element type of scales.
SHAPES = ((1, 128, 40, 32, "f16"), (5, 256, 33, 64, "f32"), (13, 128, 16, 128, "f16"), (2, 64, 7, 32, "f16"))
FORMS = tuple(product((8, 4), ("i8", "f32"), (False, True)))


def linear(
    rows: int, k: int, n: int, group: int, scale: str = "f16", *, bits: int, act: str, zeros: bool = False
) -> Graph:
    """x times a weight of few bits, and a bias."""
    x, ops = value("x", f"f32[{rows},{k}]"), list[Op]()
    types = {"q": f"i8[{n},{k}]" if bits == 8 else f"u8[{n},{k // 2}]", "s": f"{scale}[{n},{k // group}]"}
    if zeros:
        types["z"] = f"u8[{n},{k // group}]"
    types["b"] = f"f32[{n}]"
    variables = {name: Var(name, parse_type(text), "param") for name, text in types.items()}
    ops += [Op("read", (), (Value(name, var.type),), {"var": name}) for name, var in variables.items()]
    *weight, bias = (op.outs[0] for op in ops)
    ops.append(make("matmul_q", [x, *weight], ["y"], bits=bits, group=group, act=act))
    ops.append(make("add", [ops[-1].outs[0], bias], ["o"]))
    graph = Graph(f"s0.F{rows}", (x,), ops[-1].outs, tuple(ops), ())
    return fuse(Module("m", graphs={graph.name: graph}, vars=variables), FuseOptions()).graphs[graph.name]


def operands(graph: Graph, seed: int = 1) -> list[torch.Tensor]:
    """x, and every element that a weight can have."""
    rng = np.random.default_rng(seed)
    x = graph.ins[-1]
    reads = [op.outs[0].type for op in graph.ops if op.kind == "read"]
    drawn = [torch.tensor(rng.standard_normal(x.type.dims).astype(np.float32))]
    for i, t in enumerate(reads):
        if t.dtype in ("i8", "u8"):
            low, high = (-128, 128) if t.dtype == "i8" else (0, 256 if i == 0 or graph_bits(graph) == 8 else 16)
            drawn.append(torch.tensor(rng.integers(low, high, t.dims).astype("int8" if low else "uint8")))
        else:
            kind = torch.float16 if t.dtype == "f16" else torch.float32
            drawn.append(torch.tensor(rng.uniform(0.001, 0.01, t.dims)).to(kind))
    return drawn


def graph_bits(graph: Graph) -> int:
    return next(int(op.attrs["bits"]) for op in graph.ops if op.kind in ("matmul_q", "gather_q"))  # type: ignore[call-overload]


def expected(graph: Graph, args: list[torch.Tensor]) -> torch.Tensor:
    return NumpyProgram([graph]).call(graph.name, args)[0]


@pytest.mark.parametrize(
    "target", ["host", *(pytest.param(t, marks=pytest.mark.slow) for t in ("portable", "x86-64-v2"))]
)
@pytest.mark.parametrize(("bits", "act", "zeros"), FORMS)
def test_products_agree_with_the_interpreter(bits: int, act: str, zeros: bool, target: str, tmp_path: Path) -> None:
    for number, (rows, k, n, group, scale) in enumerate(SHAPES):
        graph = linear(rows, k, n, group, scale, bits=bits, act=act, zeros=zeros)
        args = operands(graph)
        (ours,) = build([graph], tmp_path / str(number), target).call(graph.name, args)
        assert not difference(ours, expected(graph, args), LIMIT)


@pytest.mark.parametrize(
    "target", ["host", "portable", "x86-64-v2", pytest.param("skylake-avx512", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_whole_numbers_are_exact(bits: int, target: str, tmp_path: Path) -> None:
    """Scales of 1 and groups whose largest number is 127: every element is a sum of whole numbers, the extreme ones too."""
    graph = linear(7, 256, 19, 128, "f32", bits=bits, act="i8")
    x, q, scales, bias = operands(graph)
    x = torch.tensor(np.random.default_rng(3).integers(-127, 128, x.shape).astype(np.float32))
    x[:, ::128] = 127.0
    x[0], x[1] = 127.0, -127.0
    q[0], q[1] = (-128, 127) if bits == 8 else (0, 255)
    args = [x, q, torch.ones_like(scales), torch.zeros_like(bias)]
    (ours,) = build([graph], tmp_path, target).call(graph.name, args)
    numbers = q.long() if bits == 8 else torch.stack([q & 15, q >> 4], -1).flatten(1).long() - 8
    assert torch.equal(ours.long(), x.long() @ numbers.T)
    assert torch.equal(ours, expected(graph, args))


@pytest.mark.parametrize(("bits", "act"), [(8, "i8"), (4, "i8"), (4, "f32")])
def test_a_row_has_the_same_bits_in_any_company(bits: int, act: str, tmp_path: Path) -> None:
    graphs = [linear(rows, 192, 50, 32, bits=bits, act=act) for rows in (1, 2, 6, 17, 40)]
    program = build(graphs, tmp_path)
    x, *weight = operands(graphs[-1])
    (whole,) = program.call(graphs[-1].name, [x, *weight])
    for graph in graphs:
        rows = graph.ins[0].type.dims[0]
        assert torch.equal(program.call(graph.name, [x[-rows:].clone(), *weight])[0], whole[-rows:])


def test_groups_without_a_finite_largest_value(tmp_path: Path) -> None:
    """Zeros and the smallest numbers count as zeros; nan and infinity spoil their row alone."""
    graph = linear(6, 64, 20, 32, bits=8, act="i8")
    x, *weight = operands(graph)
    x[0, :32], x[1, 5], x[2, 40], x[3, :32], x[4] = 0.0, float("nan"), float("-inf"), 1e-40, 3e30
    (ours,) = build([graph], tmp_path).call(graph.name, [x, *weight])
    assert torch.equal(ours.isnan().any(1), torch.tensor([False, True, True, False, False, False]))
    assert not difference(ours, expected(graph, [x, *weight]), LIMIT)


def test_the_weight_is_packed_once_with_its_scales(tmp_path: Path) -> None:
    graph = linear(1, 128, 40, 32, bits=4, act="i8", zeros=True)
    (step,) = plan_kernels(graph, machine_of("host")).steps
    assert step.kernel.packing is not None
    assert [v.name for v in step.kernel.packing.sources] == ["q", "s", "z"]
    program, (x, *weight) = build([graph], tmp_path), operands(graph)
    (before,) = program.call(graph.name, [x, *weight])
    program.hold(graph.name, weight)
    weight[0].zero_()
    assert torch.equal(program.bind(graph.name, weight)([x])[0], before)


@pytest.mark.parametrize("bits", [8, 4])
def test_control_wrong_scales_and_swapped_halves_are_noticed(bits: int, tmp_path: Path) -> None:
    graph = linear(3, 128, 24, 32, bits=bits, act="i8")
    program, (x, q, scales, bias) = build([graph], tmp_path), operands(graph)
    right = expected(graph, [x, q, scales, bias])
    assert not difference(program.call(graph.name, [x, q, scales, bias])[0], right, LIMIT)
    assert difference(program.call(graph.name, [x, q, scales.roll(1, 1), bias])[0], right, LIMIT)
    swapped = (q >> 4) | (q << 4) if bits == 4 else q.roll(1, 1)
    assert difference(program.call(graph.name, [x, swapped, scales, bias])[0], right, LIMIT)


# ------------------------------------------------------------------------------------------------ tied tables


def tied(words: int, width: int, scale: str, *, bits: int, zeros: bool, number: int = 2) -> Graph:
    """Rows of a table are looked up, and multiplied."""
    tokens, x = value("tokens", f"i64[{number},1]"), value("x", f"f32[3,{width}]")
    types = {"q": f"i8[{words},{width}]" if bits == 8 else f"u8[{words},{width // 2}]"}
    types |= {"s": f"{scale}[{words},{width // 32}]"} | ({"z": f"u8[{words},{width // 32}]"} if zeros else {})
    variables = {name: Var(name, parse_type(text), "param") for name, text in types.items()}
    ops = [Op("read", (), (Value(name, var.type),), {"var": name}) for name, var in variables.items()]
    table = [op.outs[0] for op in ops]
    ops.append(make("gather_q", [tokens, *table], ["row"], bits=bits, group=32))
    ops.append(make("neg", ops[-1].outs, ["found"]))
    ops.append(make("matmul_q", [x, *table], ["head"], bits=bits, group=32, act="i8"))
    graph = Graph("s0.F", (tokens, x), (ops[-2].outs[0], ops[-1].outs[0]), tuple(ops), ())
    return fuse(Module("m", graphs={graph.name: graph}, vars=variables), FuseOptions()).graphs[graph.name]


def tied_operands(graph: Graph) -> list[torch.Tensor]:
    """The last row and the first one, counted from the end, then those of a product."""
    x, *table = operands(graph)
    words = table[0].shape[0]
    return [torch.tensor([[words - 1], [-words]]), x, *table]


def packed_kernels(graph: Graph, target: str = "host") -> int:
    return sum(step.kernel.packing is not None for step in plan_kernels(graph, machine_of(target)).steps)


@pytest.mark.parametrize(
    "target", ["host", "x86-64-v2", *(pytest.param(t, marks=pytest.mark.slow) for t in ("portable", "skylake-avx512"))]
)
@pytest.mark.parametrize(
    ("bits", "zeros", "scale"), [(8, False, "f16"), (8, True, "f32"), (4, False, "f16"), (4, True, "f16")]
)
def test_a_tied_table_is_there_once(
    bits: int, zeros: bool, scale: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are looked up in the panels of the product, the last ones too; what is looked up is exact."""
    graph = tied(107, 96, scale, bits=bits, zeros=zeros)
    assert packed_kernels(graph, target) == 2
    program, args = build([graph], tmp_path, target), tied_operands(graph)
    assert program.unread({graph.name: ["q", "s"]}) == {"q", "s"}
    assert len({form.key for form in program._forms.graphs[graph.name].forms}) == 1
    (row, head), (right, numbers) = program.call(graph.name, args), NumpyProgram([graph]).call(graph.name, args)
    assert torch.equal(row, right)
    assert not difference(head, numbers, LIMIT)
    # The control: the element beside it.
    place = QuantisedPanels._element
    monkeypatch.setattr(QuantisedPanels, "_element", lambda panels, column, k: place(panels, column, (k + 1) % 96))
    assert not torch.equal(build([graph], tmp_path / "wrong", target).call(graph.name, args)[0], right)


def test_tables_that_are_looked_up_where_they_lie() -> None:
    """Many rows, a table that is not multiplied, and one that is read as it is, too."""
    table = {"bits": 8, "zeros": False}
    assert packed_kernels(tied(107, 128, "f16", **table)) == 2
    assert packed_kernels(tied(107, 128, "f16", number=7, **table)) == 1
    graph = tied(107, 128, "f16", **table)
    alone = replace(graph, ops=tuple(op for op in graph.ops if op.kind != "matmul_q"), outs=graph.outs[:1])
    whole = make("cast", [graph.ops[0].outs[0]], ["whole"], dtype="i32")
    beside = replace(graph, ops=(*graph.ops, whole), outs=(*graph.outs, *whole.outs))
    for other in (alone, beside):
        variables = {op.var: Var(op.var, op.outs[0].type, "param") for op in graph.ops if op.kind == "read"}
        fused = fuse(Module("m", graphs={other.name: other}, vars=variables), FuseOptions()).graphs[other.name]
        assert not any(op.attrs.get(PACKED) for op in fused.ops if op.kind == "gather_q")
