"""Every row of the op table, compiled, against the NumPy interpreter on the whole table of samples; vector functions at their ends."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import HALF, SAMPLES, Sample, touched

from penstock.backends.tvm.kernels import MAIN
from penstock.backends.tvm.kernels.tools import arithmetic
from penstock.backends.tvm.kernels.tools.elements import INDEXED, POINTWISE
from penstock.ir.graph import Graph, Value
from penstock.ir.interpreter.ops import NUMPY
from penstock.ir.ops import OPS, make
from penstock.ir.types import numpy_dtype

from ..cases import OpCase, build, compare, difference, make_args, value


def has_half(s: Sample) -> bool:
    return bool({v.type.dtype for v in (*s.op.ins, *s.op.outs)} & set(HALF))


CHOSEN = [s for s in SAMPLES if not has_half(s)]
GRAPHS = [s.graph(f"s0.c{i}") for i, s in enumerate(CHOSEN)]
# Kernels that take long to compile. Smaller samples, and the tests of products, convolutions and attention, come by all of their code.
LARGE = (
    "attention(f32[1,2,37,16]",
    "attention_grad(f32[1,2,37,16]",
    "attention_grad(f32[2,3,9,5]",
    "avg_pool_grad(f32[2,3,5,20], include_pad=False",
    "conv(f32[2,16,7,7]",
    "conv(f32[2,48,8,9]",
    "conv(f32[2,6,14,15]",
    "conv(f32[2,9,16,16]",
    "conv_grad_input(f32[2,24,6,5]",
    "conv_grad_input(f32[2,32,4,4]",
    "conv_grad_input(f32[2,64,8,9]",
    "conv_grad_weight(f32[2,16,10,11]",
    "conv_grad_weight(f32[2,16,7,7]",
    "conv_grad_weight(f32[2,6,14,15]",
    "conv_grad_weight(f32[2,9,16,16]",
    "matmul(f32[2,19,62]",
    "matmul(f32[20,1100]",
    "matmul(f32[31,35]",
)
# Every second sample of f32 of each operation and every sixth of the others, but the large ones; and the rest.
_ALIKE = [(s.kind, s.dtype == "f32") for s in CHOSEN]
_IS_SOME = [
    _ALIKE[:i].count(of) % (2 if of[1] else 6) == 0 and not str(s).startswith(LARGE)
    for i, (s, of) in enumerate(zip(CHOSEN, _ALIKE, strict=True))
]
PARTS = {
    "some": [(s, g) for s, g, some in zip(CHOSEN, GRAPHS, _IS_SOME, strict=True) if some],
    "rest": [(s, g) for s, g, some in zip(CHOSEN, GRAPHS, _IS_SOME, strict=True) if not some],
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory):
    """All samples of a part in one library."""
    return cache(lambda part: build([g for _, g in PARTS[part]], tmp_path_factory.mktemp("ops")))


def kinds_of(part: str) -> list[object]:
    marks = pytest.mark.slow if part == "rest" else ()
    return [
        pytest.param(part, kind, marks=marks, id=f"{part}-{kind}") for kind in sorted({s.kind for s, _ in PARTS[part]})
    ]


def test_every_row_of_the_table_has_a_kernel() -> None:
    assert {name for name, row in OPS.items() if row.family not in ("state", "collective") or name == "put"} == {
        *POINTWISE,
        *INDEXED,
        *MAIN,
    }


@pytest.mark.parametrize(("part", "kind"), [*kinds_of("some"), *kinds_of("rest")])
def test_compiled_operations_agree_with_the_interpreter(part: str, kind: str, programs) -> None:
    pairs = [(s, g) for s, g in PARTS[part] if s.kind == kind]
    assert not [f"{s}: {w}" for s, g in pairs for w in compare(programs(part), g, s.arrays())]


def test_some_samples_are_of_every_operation_and_every_type() -> None:
    some = [s for s, _ in PARTS["some"]]
    assert {large for s, _ in PARTS["rest"] for large in LARGE if str(s).startswith(large)} == set(LARGE)
    assert {s.kind for s in some} == {s.kind for s in SAMPLES}
    assert {s.dtype for s in some} == {s.dtype for s in CHOSEN}


@pytest.mark.parametrize("target", ["portable", "x86-64"])
def test_other_instruction_sets(target: str, tmp_path: Path) -> None:
    """The same kernels for machines with shorter vectors and fewer registers; they run here as well."""
    kinds = ("matmul", "softmax", "gelu", "sum", "layer_norm", "conv")
    chosen = [s for s in CHOSEN if s.kind in kinds and s.dtype == "f32"][::3]
    graphs = [s.graph(f"s0.c{i}") for i, s in enumerate(chosen)]
    program = build(graphs, tmp_path, target)
    assert not [w for s, g in zip(chosen, graphs, strict=True) for w in compare(program, g, s.arrays())]


@pytest.mark.parametrize(("part", "kind"), [*kinds_of("some"), *kinds_of("rest")])
def test_control_one_wrong_element_is_noticed(part: str, kind: str, programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the interpreter's rule another one, or the kernel: each sample with anything in it must see it."""
    monkeypatch.setitem(NUMPY, kind, touched(NUMPY[kind]))
    pairs = [(s, g) for s, g in PARTS[part] if s.kind == kind and s.op.outs[0].type.size]
    assert not [str(s) for s, g in pairs if not compare(programs(part), g, s.arrays())]


@pytest.mark.parametrize("shape", [(6, 20), (6, 128), (6, 600), (20, 6)])
@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
def test_masked_rows(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """Masked elements get exactly 0 (or -inf), however they are masked; a row with nothing else in it is as in torch."""
    axis = 1 if shape[1] > 6 else 0
    graph = OpCase(kind, (f"f32[{shape[0]},{shape[1]}]",), {"axis": axis}).graph("s0.F")
    rows = np.random.default_rng(8).standard_normal((6, max(shape))).astype(np.float32)
    for row, mask in enumerate((-np.inf, -1e30, -90.0, np.inf, np.nan)):
        rows[row, row::3] = mask
    rows[1] = -np.inf
    x = np.ascontiguousarray(rows if axis else rows.T)
    (found,) = build([graph], tmp_path).call("s0.F", [torch.from_numpy(x)])
    expected = getattr(torch, kind)(torch.from_numpy(x).double(), axis)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-7, equal_nan=True)
    if kind == "softmax":
        assert (found.T if not axis else found)[0, 0::3].eq(0).all()


# What is so for real numbers only, as TVM sees it: the operation and its operands, `x` for the argument.
SETTLED_KINDS = ("add", "sub", "mul", "div", "rem", "pow", "minimum", "maximum", "equal", "less", "less_equal")
SETTLED = tuple(
    product(
        SETTLED_KINDS,
        (("x", "x"), ("x", 0.0), (0.0, "x"), ("x", -0.0), ("x", 1.0), (1.0, "x"), ("x", math.inf), (math.nan, "x")),
    )
)


def _settled(dtype: str) -> tuple[Graph, np.ndarray]:
    ends = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.5, 2.5, 3e-5, 6e4], numpy_dtype(dtype))
    x, ops = value("x", f"{dtype}[{len(ends)}]"), []

    def operand(given: str | float, kernel: str) -> Value:
        if given == "x":
            return x
        ops.append(make("const", (), [f"c{len(ops)}"], value=given, dtype=dtype, shape=(), kernel=kernel))
        return ops[-1].outs[0]

    outs = []
    for kind, (a, b) in SETTLED:
        kernel = f"k{SETTLED_KINDS.index(kind)}"
        ops.append(make(kind, [operand(a, kernel), operand(b, kernel)], [f"{kind}.{len(ops)}"], kernel=kernel))
        outs.append(ops[-1].outs[0])
    return Graph("s0.F", (x,), tuple(outs), tuple(ops)), ends


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
def test_nothing_is_settled_before_the_operands_are_known(dtype: str, tmp_path: Path) -> None:
    """x == x, x - x, 0 * x, 0 / x and the like depend on x, which may be nan or infinite; x / 0 is a number like others."""
    graph, ends = _settled(dtype)
    with np.errstate(all="ignore"):
        assert not compare(build([graph], tmp_path), graph, [ends])


@pytest.mark.parametrize("kind", ["equal", "sub"])
def test_control_what_tvm_settles_is_noticed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_same_float", lambda x, y: False)
    x = value("x", "f32[2]")
    op = make(kind, [x, x], ["y"])
    graph = Graph("s0.F", (x,), op.outs, (op,))
    assert compare(build([graph], tmp_path), graph, [np.array([1.0, np.nan], np.float32)])


def test_a_wrong_kernel_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison must fail when a kernel is wrong: here gelu's slope is that of the other approximation."""
    monkeypatch.setitem(POINTWISE, "gelu_grad", lambda f, a, x, dy: dy * f.gelu_slope(x, "tanh"))
    x = value("x", "f32[64]")
    op = make("gelu_grad", [x, value("dy", "f32[64]")], ["y"])
    graph = Graph("s0.F", op.ins, op.outs, (op,))
    assert compare(build([graph], tmp_path), graph, make_args(graph, np.random.default_rng(6)))
    assert difference(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) == "nan in different places"
    assert not difference(torch.tensor([1.0]), torch.tensor([1.0]))
