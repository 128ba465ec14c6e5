"""Kernels on 16-bit floats: every row of the op table in bf16 and f16 against the interpreter in float64.

The bound: operands are taken as they are, arithmetic is that of f32, and each result is rounded once, so an element may be off by

    u * |exact| + what f32 kernels are allowed (a part of the largest element),      u = 2^-8 for bf16, 2^-11 for f16

and, for f16, by half of its smallest number. Sums that were kept in 16 bits break this bound; a control makes sure of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from samples import HALF, SAMPLES, Sample, fill, is_open, samples_of

from penstock.backends.interface import CompileOptions
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.run import load
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import machine_of
from penstock.backends.tvm.tile_permission import allow_tiles
from penstock.backends.tvm_backend import _needed
from penstock.ir.graph import Graph, Op, signature
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64
from penstock.ir.ops import make
from penstock.ir.types import FLOATS, UNIT_ROUNDOFF, numpy_dtype
from penstock.support.errors import UsageError

from ..cases import TOLERANCE, OpCase, build, make_args, tensors_of, value

SMALLEST = {"bf16": 2.0**-133, "f16": 2.0**-24}


def widened(x: torch.Tensor | np.ndarray) -> np.ndarray:
    return x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x).astype(np.float64)


def excess(found: np.ndarray, exact: np.ndarray, half: str) -> float:
    """The error as a part of what is allowed."""
    if not np.array_equal(np.isnan(found), np.isnan(exact)):
        return float("inf")
    finite = np.isfinite(exact) & np.isfinite(found)
    limit = (
        UNIT_ROUNDOFF[half] * np.abs(exact)
        + TOLERANCE["f32"] * np.abs(exact[finite]).max(initial=0.0)
        + SMALLEST[half] / 2
    )
    # Past the largest number results are infinite.
    largest = float(ml_dtypes.finfo(numpy_dtype(half)).max)
    overflown = np.isinf(found) & ~np.isinf(exact) & (np.abs(exact) > largest * (1 - UNIT_ROUNDOFF[half]))
    if not np.array_equal(np.isinf(found) & ~overflown, np.isinf(exact) & np.isinf(found)):
        return float("inf")
    return float((np.abs(found - exact)[finite] / limit[finite]).max(initial=0.0))


def problems(program, graph: Graph, arrays: Sequence[np.ndarray]) -> list[str]:
    results = signature(graph).results
    found = program.call(graph.name, tensors_of(signature(graph), arrays, shared=False))
    exact = run_graph(graph, arrays, precision=F64)
    wrong = []
    for v, a, b in zip(results, found, exact, strict=True):
        if v.type.dtype in HALF:
            off = excess(widened(a), b, v.type.dtype)
            wrong += [f"%{v.name} is {off:.2f} times as far off as it may be"] if off > 1 else []
        elif v.type.dtype in FLOATS:
            scale = np.abs(b).max(initial=1e-30)
            wrong += (
                [f"%{v.name} differs"]
                if np.abs(widened(a) - b).max(initial=0.0) > TOLERANCE[v.type.dtype] * scale
                else []
            )
        else:
            wrong += [f"%{v.name} differs"] if not np.array_equal(a.numpy(), b) else []
    return wrong


def has_half(s: Sample) -> bool:
    return bool({v.type.dtype for v in (*s.op.ins, *s.op.outs)} & set(HALF))


def in_bf16(s: Sample) -> Sample:
    types, attrs = fill(s.pattern, "bf16")
    return replace(s, types=types, attrs=attrs, dtype="bf16")  # type: ignore[arg-type]


# What the table has in 16 bits is small; these have loops of all kinds.
LARGER = (
    "matmul",
    "conv",
    "conv_grad_input",
    "conv_grad_weight",
    "softmax",
    "layer_norm",
    "layer_norm_grad",
    "max_pool_grad",
    "gather_grad",
)
CHOSEN = [s for s in SAMPLES if has_half(s)]
CHOSEN += [in_bf16(s) for kind in LARGER for s in [s for s in samples_of(kind) if s.dtype == "f32" and is_open(s)][::3]]
GRAPHS = [s.graph(f"s0.c{i}") for i, s in enumerate(CHOSEN)]
# A third of each operation's; and the rest.
_RANKS = [sum(s.kind == other.kind for other in CHOSEN[:i]) for i, s in enumerate(CHOSEN)]
PARTS = {
    "some": [(s, g) for s, g, rank in zip(CHOSEN, GRAPHS, _RANKS, strict=True) if rank % 3 == 0],
    "rest": [(s, g) for s, g, rank in zip(CHOSEN, GRAPHS, _RANKS, strict=True) if rank % 3],
}


# For tile registers: both orders of both operands, rows, columns and steps left over, batches, long sums, several blocks of rows.
PRODUCTS = [
    ((32, 32), (32, 32), ""),
    ((33, 70), (70, 50), ""),
    ((48, 33), (48, 50), "a"),
    ((40, 61), (50, 61), "b"),
    ((61, 40), (50, 61), "ab"),
    ((2, 3, 17, 40), (2, 3, 40, 19), ""),
    ((2, 3, 17, 40), (2, 3, 19, 40), "b"),
    ((20, 9000), (9000, 33), ""),
    ((1100, 2000), (2000, 64), ""),
    ((17, 16), (16, 530), ""),
    ((1700, 70), (1700, 45), "a"),
]
TILED = [
    OpCase(
        "matmul", tuple(f"bf16[{','.join(map(str, d))}]" for d in (a, b)), {"ta": "a" in turned, "tb": "b" in turned}
    ).graph(f"s0.p{i}")
    for i, (a, b, turned) in enumerate(PRODUCTS)
]
COUNT, LONG = 64, 4096
SUM = OpCase("sum", (f"bf16[3,{LONG}]",), {"axes": (1,)}).graph("s0.sum")
DOT = OpCase("matmul", (f"bf16[8,{LONG}]", f"bf16[{LONG},24]"), {}).graph("s0.dot")


def convert(a: str, b: str) -> Graph:
    return OpCase("cast", (f"{a}[{COUNT}]",), {"dtype": b}).graph(f"s0.{a}_{b}")


CONVERSIONS = [
    convert("f32", "bf16"),
    convert("bf16", "f32"),
    convert("f32", "f16"),
    convert("f16", "f32"),
    convert("bf16", "f16"),
]


def chain() -> Graph:
    """(x + y) - x in one kernel: exact in f32 for these operands, lost if the sum is rounded."""
    x, y = value("x", "bf16[40]"), value("y", "bf16[40]")
    total = make("add", [x, y], ["t"], kernel="k0")
    back = make("sub", [total.outs[0], x], ["z"], kernel="k0")
    return Graph("s0.chain", (x, y), back.outs, (total, back))


def cast_chain() -> Graph:
    """The same with a sum that is rounded on purpose."""
    x, y = value("x", "bf16[40]"), value("y", "bf16[40]")
    ops = [make("cast", [v], [v.name + "w"], dtype="f32", kernel="k0") for v in (x, y)]
    ops.append(make("add", [ops[0].outs[0], ops[1].outs[0]], ["t"], kernel="k0"))
    ops.append(make("cast", ops[2].outs, ["low"], dtype="bf16", kernel="k0"))
    ops.append(make("cast", ops[3].outs, ["again"], dtype="f32", kernel="k0"))
    ops.append(make("sub", [ops[4].outs[0], ops[0].outs[0]], ["z"], kernel="k0"))
    return Graph("s0.cast_chain", (x, y), ops[-1].outs, tuple(ops))


def accumulation() -> Graph:
    """A weight gradient as `precision` makes it: the product of 16-bit operands is added to an f32 variable, not rounded on the way."""
    x, dy = value("x", "bf16[50,20]"), value("dy", "bf16[50,33]")
    product = make("matmul", [x, dy], ["p"], ta=True, kernel="k0")
    wide = make("cast", product.outs, ["w"], dtype="f32", kernel="k0")
    return Graph(
        "s0.accumulation", (x, dy), (), (product, wide, Op("accum", wide.outs, (), {"var": "g", "kernel": "k0"}))
    )


def rounded_weight() -> Graph:
    """A product that rounds its f32 weight as it packs it."""
    x, w = value("x", "bf16[20,48]"), value("w", "f32[48,40]")
    low = make("cast", [w], ["low"], dtype="bf16", kernel="inline0")
    product = make("matmul", [x, low.outs[0]], ["y"], kernel="k0")
    return Graph("s0.weight", (x, w), product.outs, (low, product))


def state() -> Graph:
    """Variables of 16 bits: read, added to, and zeroed."""
    g = value("g", "bf16[5,33]")
    return Graph("s0.state", (g,), (), (Op("accum", (g,), (), {"var": "total"}),))


SPECIAL = [*CONVERSIONS, chain(), cast_chain(), accumulation(), rounded_weight(), state(), SUM, DOT, *TILED]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    return build([*(g for _, g in PARTS["some"]), *SPECIAL], tmp_path_factory.mktemp("halves"))


def test_every_operation_is_within_one_rounding_of_the_exact_result(program) -> None:
    wrong = [f"{s}: {w}" for s, g in PARTS["some"] for w in problems(program, g, s.arrays())]
    assert not wrong, "\n".join(wrong)
    assert {s.kind for s, _ in PARTS["some"]} >= {s.kind for s in SAMPLES if s.dtype in ("f16", "bf16")}


@pytest.mark.slow
def test_so_are_the_other_samples(tmp_path: Path) -> None:
    program = build([g for _, g in PARTS["rest"]], tmp_path)
    wrong = [f"{s}: {w}" for s, g in PARTS["rest"] for w in problems(program, g, s.arrays())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("graph", TILED, ids=lambda g: f"{g.ins[0].type}_{g.ins[1].type}")
def test_products_of_all_sizes(graph: Graph, program) -> None:
    """Between products of torch, which uses the same tile registers and must find them as it left them."""
    arrays = make_args(graph, np.random.default_rng(8))
    x = torch.randn(64, 64).to(torch.bfloat16)
    before = x @ x
    assert not problems(program, graph, arrays)
    assert torch.equal(x @ x, before)


@pytest.mark.skipif(not allow_tiles(), reason="this machine has no tile registers")
def test_tile_registers_are_used_where_there_are_some(tmp_path: Path) -> None:
    assert machine_of("host").has_tiles
    assert not machine_of("portable").has_tiles
    assert "amx" in machine_of("host").name


def test_operands_that_a_product_computes_are_not_cut_off(tmp_path: Path) -> None:
    """Packing for tile registers takes the upper halves of numbers: all of bf16, not of results in registers, which would all get smaller."""
    a, c, b = value("a", "bf16[96,160]"), value("c", "bf16[96,160]"), value("b", "bf16[160,112]")
    scaled = make("mul", [a, c], ["s"], kernel="k0")
    graph = Graph("s0.F", (a, c, b), (op := make("matmul", [*scaled.outs, b], ["p"], kernel="k0")).outs, (scaled, op))
    x, y, z = (torch.rand(v.type.dims).add(0.5).to(torch.bfloat16) for v in graph.ins)
    (found,) = build([graph], tmp_path).call("s0.F", [x, y, z])
    exact = (x.double() * y.double()) @ z.double()
    assert abs(float(((found.double() - exact) / exact).mean())) < 2.0**-11
    cut = ((x.float() * y.float()).view(torch.int32) & -65536).view(torch.float32).double() @ z.double()
    assert float(((cut - exact) / exact).mean()) < -(2.0**-10)


def test_operands_that_a_convolution_computes_are_not_cut_off(tmp_path: Path) -> None:
    """The same for a convolution and its gradient for the weight."""
    x, c, w, g = (
        value(n, f"bf16[{t}]")
        for n, t in (("x", "2,64,20,20"), ("c", "2,64,20,20"), ("w", "64,64,3,3"), ("g", "2,64,20,20"))
    )
    attrs = {"strides": (1, 1), "pads": (1, 1, 1, 1), "groups": 1, "kernel": "k0"}
    scaled = make("mul", [x, c], ["s"], kernel="k0")
    forward = make("conv", [*scaled.outs, w], ["y"], **attrs)
    backward = make("conv_grad_weight", [*scaled.outs, g], ["d"], shape=(64, 64, 3, 3), **attrs)
    graphs = [
        Graph("s0.F", (x, c, w), forward.outs, (scaled, forward)),
        Graph("s0.B", (x, c, g), backward.outs, (scaled, backward)),
    ]
    a, b, v, d = (torch.rand(t.type.dims).add(0.5).to(torch.bfloat16) for t in (x, c, w, g))
    program = build(graphs, tmp_path)
    weight = v.double().requires_grad_()
    y = torch.nn.functional.conv2d(a.double() * b.double(), weight, padding=1)
    y.backward(d.double())
    assert weight.grad is not None
    for (found,), exact in (
        (program.call("s0.F", [a, b, v]), y.detach()),
        (program.call("s0.B", [a, b, d]), weight.grad),
    ):
        assert abs(float(((found.double() - exact) / exact).mean())) < 2.0**-11


def test_tile_registers_go_by_the_name_of_the_target() -> None:
    """LLVM counts them among what these models have, but not every process there may use them, and loading looks at the name."""
    for model in ("sapphirerapids", "graniterapids"):
        assert not machine_of(model).has_tiles
        assert machine_of(f"{model}+amx-tile+amx-bf16").has_tiles
        assert not machine_of(f"{model}+amx-tile").has_tiles


def test_only_stages_with_products_ask_for_tile_registers() -> None:
    cpu = "rocketlake+amx-tile+amx-bf16"
    assert _needed(cpu, [TILED[0]]) == cpu
    assert _needed(cpu, [SUM, *CONVERSIONS]) == "rocketlake"


def test_a_library_for_tile_registers_is_refused_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_graphs([CONVERSIONS[0]], tmp_path / "s0.x86-64-v3.so", CompileOptions("portable")).path
    TvmProgram(built, [CONVERSIONS[0]])
    monkeypatch.setattr(load, "allow_tiles", lambda: False)
    TvmProgram(built, [CONVERSIONS[0]])
    with pytest.raises(UsageError, match="tile registers"):
        TvmProgram(built.rename(tmp_path / "s0.rocketlake+amx-tile+amx-bf16.so"), [CONVERSIONS[0]])


@pytest.mark.parametrize("graph", [SUM, DOT], ids=lambda g: g.name)
def test_sums_in_16_bits_would_be_noticed(graph: Graph, program) -> None:
    """Control of the bound: with partial sums rounded to bf16 the error of a long sum is many times what is allowed."""
    rng = np.random.default_rng(2)
    arrays = [(np.abs(a.astype(np.float32)) + 0.5).astype(a.dtype) for a in make_args(graph, rng)]
    assert not problems(program, graph, arrays)
    (exact,) = run_graph(graph, arrays, precision=F64)
    total = np.zeros(exact.shape, ml_dtypes.bfloat16)
    for k in range(LONG):
        total = total + (arrays[0][:, k] if graph is SUM else arrays[0][:, k : k + 1] * arrays[1][k])
    assert excess(widened(total), exact, "bf16") > 10


BITS = np.array(
    [
        0,
        0x80000000,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F800001,
        0xFFFFFFFF,
        0x7FFFFFFF,
    ]  # zeros, infinities, nans that carry
    + [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0xBF818000]  # ties to even, and their neighbours
    + [0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0xFF7FFFFF]  # past the largest bf16, and just not
    + [0x00000001, 0x00008000, 0x00018000, 0x00400000, 0x807FFFFF]  # denormals
    + [0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 0x33800000, 0x38800000, 0x387FE000]  # around the ends of f16
    + [0x3F800000 + 0x1111 * i for i in range(34)],
    np.uint32,
)


@pytest.mark.parametrize("graph", CONVERSIONS, ids=lambda g: g.name.removeprefix("s0."))
def test_conversions_round_to_nearest_even_and_keep_inf_and_nan(graph: Graph, program) -> None:
    """Bit for bit what torch does, but for nan: torch forgets its sign."""
    names = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    source, target = names[graph.ins[0].type.dtype], names[graph.outs[0].type.dtype]
    x = torch.from_numpy(BITS.view(np.int32)).view(torch.float32)
    assert len(x) == COUNT
    x = torch.clone(x if source is torch.float32 else x.to(source))
    (found,) = program.call(graph.name, [x])
    expected = x.to(target)
    nan = torch.isnan(expected)
    assert found.dtype == target
    assert torch.equal(torch.isnan(found), nan)
    bits = torch.int32 if target is torch.float32 else torch.int16
    assert torch.equal(found.view(bits)[~nan], expected.view(bits)[~nan])
    assert torch.equal(torch.signbit(found), torch.signbit(x))


def test_a_fused_chain_is_rounded_once_and_a_cast_rounds(program) -> None:
    x, y = torch.full((40,), 256.0, dtype=torch.bfloat16), torch.full((40,), 0.5, dtype=torch.bfloat16)
    assert program.call("s0.chain", [x, y])[0].tolist() == [0.5] * 40
    assert program.call("s0.cast_chain", [x, y])[0].tolist() == [0.0] * 40


def test_weight_gradients_reach_their_variable_unrounded(program) -> None:
    rng = np.random.default_rng(4)
    x, dy = (torch.from_numpy(rng.standard_normal(s)).to(torch.bfloat16) for s in ((50, 20), (50, 33)))
    total = torch.zeros(20, 33)
    for _ in range(2):
        program.call("s0.accumulation", [x, dy, total])
    exact = 2 * x.double().T @ dy.double()
    assert (total - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (exact.to(torch.bfloat16).double() - exact).abs().max() > 1e-3 * exact.abs().max()


def test_weights_are_rounded_where_a_product_packs_them(program) -> None:
    rng = np.random.default_rng(5)
    x, w = (
        torch.from_numpy(rng.standard_normal((20, 48))).to(torch.bfloat16),
        torch.from_numpy(rng.standard_normal((48, 40))).float(),
    )
    (found,) = program.call("s0.weight", [x, w])
    exact = (x.double() @ w.to(torch.bfloat16).double()).numpy()
    assert excess(widened(found), exact, "bf16") <= 1
    assert excess(widened(x.double() @ w.double()), exact, "bf16") > 0.1


def test_variables_of_16_bits_are_added_to_in_place(program) -> None:
    rng = np.random.default_rng(6)
    total, g = (torch.from_numpy(rng.standard_normal((5, 33))).to(torch.bfloat16) for _ in range(2))
    expected, place = (total.double() + g.double()).to(torch.bfloat16), total.data_ptr()
    program.call("s0.state", [g, total])
    assert torch.equal(total, expected)
    assert total.data_ptr() == place


def test_other_instruction_sets(tmp_path: Path) -> None:
    """The same where there are no tile registers, and conversions where the machine has none: x86-64 of 2003 has no f16."""
    chosen = [s for s in CHOSEN if s.kind in ("add", "cast", "matmul", "softmax")][::2]
    graphs = [s.graph(f"s0.c{i}") for i, s in enumerate(chosen)]
    program = build(graphs, tmp_path, "x86-64")
    assert not [w for s, g in zip(chosen, graphs, strict=True) for w in problems(program, g, s.arrays())]
