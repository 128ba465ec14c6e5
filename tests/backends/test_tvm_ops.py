"""Every row of the op table, compiled, against the NumPy interpreter: ragged sizes, broadcasting, single elements, other element types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tvm_cases import OpCase, build, compare, difference, make_args, value

from penstock.backends.tvm.kernels import MAIN
from penstock.backends.tvm.kernels.elements import INDEXED, POINTWISE
from penstock.ir.graph import Graph, Op
from penstock.ir.ops import OPS, infer_op, make

CASES: list[OpCase] = []


def case(kind: str, *types: str, positive: bool = False, **attrs: object) -> None:
    CASES.append(OpCase(kind, types, attrs, positive))  # type: ignore[arg-type]


for kind in ("neg", "abs", "sign", "floor", "exp", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "gelu"):
    for t in ("f32[3,37]", "f64[5]", "f32[]"):
        case(kind, t)
for kind in ("log", "sqrt", "rsqrt"):
    for t in ("f32[3,37]", "f64[5]"):
        case(kind, t, positive=True)
for kind, t in (("neg", "i64[33]"), ("abs", "i32[4,5]"), ("sign", "i64[7]"), ("relu", "i64[7]"), ("not", "bool[35]")):
    case(kind, t)
case("gelu", "f32[64]", approximate="tanh")
for a, b in (
    ("f32", "i64"),
    ("i64", "f32"),
    ("f32", "bool"),
    ("bool", "f32"),
    ("i32", "bool"),
    ("bool", "i64"),
    ("f32", "f64"),
    ("f64", "f32"),
    ("i64", "i32"),
):
    case("cast", f"{a}[3,21]", dtype=b)
for kind in ("add", "sub", "mul", "div", "pow", "minimum", "maximum", "equal", "less", "less_equal"):
    for a, b in (
        ("f32[4,37]", "f32[4,37]"),
        ("f32[4,1]", "f32[37]"),
        ("f32[2,3,16]", "f32[3,1]"),
        ("f64[]", "f64[]"),
        ("f32[1,1]", "f32[5]"),
    ):
        case(kind, a, b, positive=kind == "pow")
for kind in ("add", "sub", "mul", "minimum", "maximum", "equal", "less", "less_equal"):
    case(kind, "i64[3,5]", "i64[5]")
for kind in ("and", "or"):
    case(kind, "bool[3,20]", "bool[20]")
case("where", "bool[3,1]", "f32[3,20]", "f32[]")
case("where", "bool[17]", "i64[17]", "i64[17]")
case("relu_grad", "f32[5,20]", "f32[5,20]")
case("gelu_grad", "f32[50]", "f32[50]")
case("gelu_grad", "f32[50]", "f32[50]", approximate="tanh")
case("gelu_grad", "f64[5]", "f64[5]")

case("reshape", "f32[4,6,10]", shape=(8, 30))
case("reshape", "f32[4,6,10]", shape=(240,))
case("reshape", "f32[1,1]", shape=())
case("transpose", "f32[4,6,10]", perm=(2, 0, 1))
case("transpose", "f32[4,6,32]", perm=(1, 0, 2))
case("transpose", "f32[33,45]", perm=(1, 0))
case("broadcast", "f32[3,1]", shape=(2, 3, 20))
case("slice", "f32[8,20]", start=(1, 2), stop=(7, 19), step=(2, 3))
case("pad", "f32[3,5]", low=(1, 2), high=(0, 3), value=1.5)
case("pad", "f32[3,5]", low=(1, 2), high=(0, 3), inner=(1, 2))
case("pad", "i64[5]", low=(1,), high=(0,), value=7.0)
case("concat", "f32[2,3]", "f32[4,3]", axis=0)
case("concat", "f32[2,3]", "f32[2,17]", "f32[2,1]", axis=-1)
case("const", value=2.5, dtype="f32", shape=(3, 4))
case("const", value=(1, 2, 3), dtype="i64", shape=(3,))
case("const", value=True, dtype="bool", shape=())
case("iota", dtype="i64", shape=(3, 20), axis=1)

for kind in ("sum", "mean", "max"):
    for t, axes in (
        ("f32[4,37]", (1,)),
        ("f32[4,37]", (0,)),
        ("f32[300,200]", (0,)),
        ("f32[2,3,40]", (0, 2)),
        ("f32[2,3,40]", (1,)),
        ("f32[2,3,4,5]", (0, 2)),
        ("f32[5,1]", (0,)),
        ("f64[3,20]", (1,)),
    ):
        case(kind, t, axes=axes)
    case(kind, "f32[4,37]", axes=(-1,), keep=True)
    case(kind, "f32[64]", axes=(0,))
case("sum", "i64[3,20]", axes=(0,))
case("max", "i64[3,20]", axes=(0,))
for t, axis in (("f32[4,37]", 1), ("f32[4,37]", 0), ("f32[2,40,3]", 1), ("i64[3,20]", -1)):
    case("argmax", t, axis=axis)

for a, b, transposed in (
    ("f32[33,48]", "f32[48,50]", ""),
    ("f32[33,48]", "f32[50,48]", "b"),
    ("f32[48,33]", "f32[48,50]", "a"),
    ("f32[48,33]", "f32[50,48]", "ab"),
    ("f32[2,3,17,8]", "f32[2,3,8,9]", ""),
    ("f32[2,3,17,8]", "f32[8,9]", ""),
    ("f32[17,8]", "f32[2,1,8,9]", ""),
    ("f32[1,100]", "f32[100,70]", ""),
    ("f32[1,100]", "f32[70,100]", "b"),
    ("f32[4,100]", "f32[70,100]", "b"),
    ("f32[20,5000]", "f32[5000,33]", ""),
    ("f32[9000,20]", "f32[9000,33]", "a"),
    ("f32[1100,20]", "f32[20,64]", ""),
    ("f32[20,1100]", "f32[20,64]", "a"),
    ("f64[20,30]", "f64[30,20]", ""),
    ("i64[3,4]", "i64[4,5]", ""),
    ("f32[1,1]", "f32[1,1]", ""),
    ("f32[3,1]", "f32[1,4]", ""),
    # Strips of panels and a shorter last one, tiles of few rows, squares transposed in registers with rows and columns left over.
    ("f32[31,20]", "f32[20,333]", ""),
    ("f32[31,35]", "f32[167,35]", "b"),
    ("f32[19,68]", "f32[19,205]", "a"),
    ("f32[2,19,62]", "f32[2,19,67]", "a"),
    ("f32[41,77]", "f32[150,41]", "ab"),
    ("f64[21,37]", "f64[90,21]", "ab"),
    ("f64[29,21]", "f64[90,21]", "b"),
):
    case("matmul", a, b, ta="a" in transposed, tb="b" in transposed)

case("conv", "f32[2,4,9,11]", "f32[6,4,3,3]", pads=(1, 1, 1, 1))
case("conv", "f32[2,4,9,11]", "f32[6,2,3,3]", groups=2, strides=(2, 2), dilations=(2, 1))
case("conv", "f32[2,3,20]", "f32[5,3,4]")
case("conv_grad_input", "f32[2,6,9,11]", "f32[6,4,3,3]", shape=(2, 4, 9, 11), pads=(1, 1, 1, 1))
case("conv_grad_input", "f32[2,6,3,6]", "f32[6,2,3,3]", shape=(2, 4, 9, 11), groups=2, strides=(2, 2), dilations=(2, 1), pads=(0, 1, 0, 1))
case("conv_grad_weight", "f32[2,4,9,11]", "f32[2,6,9,11]", shape=(6, 4, 3, 3), pads=(1, 1, 1, 1))
case("conv_grad_weight", "f32[2,4,9,11]", "f32[2,6,3,6]", shape=(6, 2, 3, 3), groups=2, strides=(2, 2), dilations=(2, 1), pads=(0, 1, 0, 1))


def convolution(
    x: tuple[int, ...], filters: int, kernel: tuple[int, ...], groups: int = 1, dtype: str = "f32", **window: tuple[int, ...]
) -> None:
    """A convolution and both its gradients."""

    def text(dims: tuple[int, ...]) -> str:
        return f"{dtype}[{','.join(map(str, dims))}]"

    w = (filters, x[1] // groups, *kernel)
    attrs = {**window, "groups": groups}
    out = infer_op(Op("conv", (value("x", text(x)), value("w", text(w))), (), attrs), {})[0].dims
    case("conv", text(x), text(w), **attrs)
    case("conv_grad_input", text(out), text(w), shape=x, **attrs)
    case("conv_grad_weight", text(x), text(out), shape=w, **attrs)


# Channels fill lanes, one panel and several, the last one partly; odd sizes; tiles of one row and of several.
convolution((2, 5, 13, 17), 40, (3, 3), pads=(1, 1, 1, 1))
convolution((2, 16, 7, 7), 64, (3, 3), pads=(1, 1, 1, 1))
convolution((1, 3, 33, 31), 32, (7, 7), strides=(2, 2), pads=(3, 3, 3, 3))
convolution((2, 6, 14, 15), 24, (2, 3), strides=(3, 3), pads=(2, 0, 1, 1))
convolution((2, 18, 12, 19), 33, (3, 5), strides=(2, 1), pads=(0, 4, 2, 0), dilations=(1, 2))
convolution((2, 9, 16, 16), 17, (3, 3), strides=(2, 2), pads=(2, 2, 2, 2), dilations=(2, 2))
convolution((2, 12, 14, 14), 36, (3, 3), strides=(3, 2), pads=(1, 1, 1, 1), dilations=(2, 3))
# Windows that leave rows and columns unread, and border that no window reads.
convolution((2, 16, 10, 11), 32, (1, 1), strides=(3, 3))
convolution((2, 16, 10, 11), 32, (2, 2), strides=(4, 5), pads=(3, 3, 3, 3))
# Groups, depthwise, and few output channels.
convolution((2, 64, 9, 10), 48, (3, 3), groups=2, pads=(1, 1, 1, 1))
convolution((2, 20, 9, 40), 20, (3, 3), groups=20, pads=(1, 1, 1, 1))
convolution((2, 20, 11, 37), 40, (5, 5), groups=20, strides=(2, 2), pads=(2, 2, 2, 2))
convolution((2, 8, 11, 11), 8, (3, 3), groups=8, strides=(3, 3), dilations=(2, 2), pads=(0, 1, 2, 3))
convolution((2, 16, 20, 50), 3, (3, 3), pads=(1, 1, 1, 1))
# No border to copy, no taps but one, one and three spatial dimensions, other element types.
convolution((2, 48, 8, 9), 64, (1, 1))
convolution((2, 24, 17, 19), 30, (1, 1))
convolution((1, 1100, 16, 17), 20, (1, 1), groups=2)
convolution((3, 32, 17), 32, (4,), strides=(2,), pads=(1, 2))
convolution((2, 4, 5, 6, 7), 6, (3, 2, 3), strides=(1, 2, 1), pads=(1, 0, 1, 1, 1, 1))
convolution((1, 8, 9, 9), 24, (3, 3), dtype="f64", pads=(1, 1, 1, 1))

WINDOW = {"window": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
case("max_pool", "f32[2,3,9,11]", **WINDOW)
case("max_pool", "f32[2,3,8,20]", window=(2, 2), strides=(2, 2))
case("max_pool", "f32[2,3,8]", window=(3,), dilations=(2,))
case("max_pool", "i64[2,3,8]", window=(3,), pads=(1, 1))
for counted in (False, True):
    case("avg_pool", "f32[2,3,9,40]", include_pad=counted, **WINDOW)
    case("avg_pool_grad", "f32[2,3,5,20]", include_pad=counted, shape=(2, 3, 9, 40), **WINDOW)

for t, axis in (("f32[6,37]", -1), ("f32[6,600]", -1), ("f32[3,20,5]", 1), ("f32[2,3,20]", 0), ("f64[3,9]", 1)):
    for kind in ("softmax", "log_softmax"):
        case(kind, t, axis=axis)
        case(f"{kind}_grad", t, t, axis=axis)
for t, w, s, axis in (
    ("f32[6,48]", "f32[48]", "f32[6]", -1),
    ("f32[2,3,5,7]", "f32[5,7]", "f32[2,3]", 2),
    ("f64[3,10]", "f64[10]", "f64[3]", 1),
):
    case("layer_norm", t, w, w, axis=axis)
    case("layer_norm_grad", t, t, w, s, s, axis=axis)
    case("layer_norm_grad_weight", t, t, s, s, axis=axis)
case("batch_norm", "f32[2,3,5,7]", *["f32[3]"] * 4, positive=True)
case("gather", "f32[10,33]", "i64[4,5]")
case("gather", "f32[3,10]", "i32[4]", axis=1)
case("gather", "f32[10]", "i64[]")
case("gather_grad", "f32[4,5,33]", "i64[4,5]", shape=(10, 33))
case("gather_grad", "f32[3,4]", "i32[4]", shape=(3, 10), axis=1)
case("cross_entropy", "f32[6,50]", "i64[6]")
case("cross_entropy", "f32[2,3,700]", "i64[2,3]")
case("cross_entropy_grad", "f32[6,50]", "i64[6]", "f32[6]", "f32[]")
case("mse", "f32[6,50]", "f32[6,50]")
case("mse", "f64[3]", "f64[3]")
W = "f32[5,33]"
case("sgd", W, W, "f32[]", weight_decay=0.1)
case("momentum", W, W, W, "f32[]", nesterov=True, weight_decay=0.1)
case("momentum", W, W, W, "f32[]")
case("adamw", W, W, W, W, "f32[]", "f32[]", "f32[]", weight_decay=0.1, positive=True)

# Lowered by `decompose` before it comes here.
COMPOSITE = {"attention"}
# Compared below with operands that belong together.
APART = {"max_pool_grad"}


@pytest.fixture(scope="module")
def graphs() -> list[Graph]:
    return [c.graph(f"s0.c{i}") for i, c in enumerate(CASES)]


@pytest.fixture(scope="module")
def program(graphs: list[Graph], tmp_path_factory: pytest.TempPathFactory):
    return build(graphs, tmp_path_factory.mktemp("ops"))


def test_every_row_of_the_table_has_a_kernel_and_a_case() -> None:
    computed = {name for name, row in OPS.items() if row.family != "state"} - COMPOSITE
    assert computed == (set(POINTWISE) | set(INDEXED) | set(MAIN))
    assert computed - {c.kind for c in CASES} == APART


@pytest.mark.parametrize("kind", sorted({c.kind for c in CASES}))
def test_compiled_operations_agree_with_the_interpreter(kind: str, graphs, program) -> None:
    rng = np.random.default_rng(1)
    wrong = []
    for c, graph in zip(CASES, graphs, strict=True):
        if c.kind == kind:
            wrong += [f"{c}: {w}" for w in compare(program, graph, make_args(graph, rng, c.positive))]
    assert not wrong


@pytest.mark.parametrize("target", ["portable", "x86-64"])
def test_other_instruction_sets(target: str, tmp_path: Path) -> None:
    """The same kernels for machines with shorter vectors and fewer registers; they run here as well."""
    chosen = [c for c in CASES if c.kind in ("matmul", "softmax", "gelu", "sum", "layer_norm", "conv") and c.types[0].startswith("f32")][
        ::2
    ]
    graphs = [c.graph(f"s0.c{i}") for i, c in enumerate(chosen)]
    program = build(graphs, tmp_path, target)
    rng = np.random.default_rng(2)
    assert not [w for c, g in zip(chosen, graphs, strict=True) for w in compare(program, g, make_args(g, rng, c.positive))]


def test_max_pool_gradient_goes_to_the_first_largest(tmp_path: Path) -> None:
    t, small = "f32[2,3,9,11]", "f32[2,3,5,6]"
    graph = OpCase("max_pool_grad", (t, small, small), WINDOW).graph("s0.F")  # type: ignore[arg-type]
    # Few different values, so that windows have ties.
    x = np.random.default_rng(3).integers(0, 3, (2, 3, 9, 11)).astype(np.float32)
    y = torch.nn.functional.max_pool2d(torch.from_numpy(x), 3, 2, 1).numpy()
    dy = np.random.default_rng(4).standard_normal((2, 3, 5, 6)).astype(np.float32)
    assert not compare(build([graph], tmp_path), graph, [x, y, dy])


EXTREMES = np.array(
    [0.0, -0.0, 1e-40, -1e-40, 1e-30, -5.0, 88.7, 89.0, -87.0, -100.0, -104.0, 1e30, -1e30, 3e38, np.inf, -np.inf, np.nan] * 2, np.float32
)
FUNCTIONS = {
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "log": np.log,
    "erf": lambda x: torch.erf(torch.from_numpy(x)).numpy(),
}
# Units in the last place, of the result.
ULPS = {"exp": 3, "tanh": 6, "sigmoid": 4, "log": 3, "erf": 8}


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory):
    graphs = [OpCase(k, (f"f32[{n}]",), {}).graph(f"s0.{k}{n}") for k in FUNCTIONS for n in (len(EXTREMES), 4096)]
    return build(graphs, tmp_path_factory.mktemp("functions"))


@pytest.mark.parametrize("kind", sorted(FUNCTIONS))
def test_vector_functions_are_accurate_and_right_at_the_ends(kind: str, functions) -> None:
    with np.errstate(all="ignore"):
        for x in (EXTREMES, np.linspace(-20, 20, 4096, dtype=np.float32)):
            exact = FUNCTIONS[kind](x.astype(np.float64))
            (found,) = functions.call(f"s0.{kind}{len(x)}", [torch.from_numpy(x.copy())])
            found = found.numpy()
            expected = exact.astype(np.float32)
            assert np.array_equal(np.isnan(found), np.isnan(expected))
            assert np.array_equal(np.isinf(found), np.isinf(expected))
            finite = np.isfinite(expected)
            # Below 1e-30 (and for log next to its zero) the absolute error counts.
            place = np.spacing(np.maximum(np.abs(expected[finite]), 1e-3 if kind == "log" else 1e-30).astype(np.float32))
            error = np.abs(found[finite].astype(np.float64) - exact[finite]) / place
            assert error.max() <= ULPS[kind], (x[finite][error.argmax()], error.max())


@pytest.mark.parametrize("kind", ["maximum", "minimum", "sign", "relu", "softmax", "max", "argmax"])
def test_nan_is_not_lost(kind: str, tmp_path: Path) -> None:
    attrs = {"max": {"axes": (1,)}, "argmax": {"axis": 1}}.get(kind, {})
    graph = OpCase(kind, ("f32[3,20]",) * (2 if kind in ("maximum", "minimum") else 1), attrs).graph("s0.F")  # type: ignore[arg-type]
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((3, 20)).astype(np.float32) for _ in graph.ins]
    arrays[0][0, 3] = arrays[0][0, 7] = np.nan
    arrays[-1][1, 19] = np.nan
    assert not compare(build([graph], tmp_path), graph, arrays)


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


def test_a_wrong_kernel_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison must fail when a kernel is wrong: here gelu's slope is that of the other approximation."""
    monkeypatch.setitem(POINTWISE, "gelu_grad", lambda f, a, x, dy: dy * f.gelu_slope(x, "tanh"))
    x = value("x", "f32[64]")
    op = make("gelu_grad", [x, value("dy", "f32[64]")], ["y"])
    graph = Graph("s0.F", op.ins, op.outs, (op,))
    assert compare(build([graph], tmp_path), graph, make_args(graph, np.random.default_rng(6)))
    assert difference(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) == "nan in different places"
    assert not difference(torch.tensor([1.0]), torch.tensor([1.0]))
