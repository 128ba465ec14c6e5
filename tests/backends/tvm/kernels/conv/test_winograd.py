"""Convolutions by sums and differences of squares: against torch, exactly on whole numbers, and within rounding on others.

Points of weights are quarters of whole numbers, so with weights that are multiples of four all of the arithmetic is exact, and so is direct
summation: any other bit is an error in a coefficient or an address."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.interface import CompileOptions
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.kernels.conv import winograd as conv_winograd
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import machine_of
from penstock.backends.tvm.tile_permission import allow_tiles
from penstock.ir.graph import Graph, Op
from penstock.ir.ops import make
from penstock.passes.costs.prices import CONVOLUTIONS, SQUARES, family_of

from ...cases import ConvCase, build, compare, difference, make_args, value

pytestmark = pytest.mark.skipif(
    machine_of("host").lanes <= 4, reason="convolutions by squares are for vectors of eight floats or more"
)

SAME = (1, 1, 1, 1)
CASES = {
    "bands for each thread": ConvCase((1, 32, 32, 64), (32, 32, 3, 3), pads=SAME),
    "threads share a band": ConvCase((1, 96, 14, 14), (160, 96, 3, 3), pads=SAME),
    "odd sizes": ConvCase((2, 40, 15, 27), (72, 40, 3, 3), pads=SAME),
    "odd sizes, eight images": ConvCase((8, 32, 21, 13), (32, 32, 3, 3), pads=SAME),
    "bands and a rest": ConvCase((1, 32, 50, 66), (48, 32, 3, 3), pads=SAME),
    "images together": ConvCase((8, 256, 7, 7), (256, 256, 3, 3), pads=SAME),
    "images together, two bands": ConvCase((6, 256, 11, 13), (256, 256, 3, 3), pads=SAME),
    "no border": ConvCase((1, 33, 18, 16), (64, 33, 3, 3)),
    "wide border": ConvCase((1, 32, 9, 11), (32, 32, 3, 3), pads=(2, 3, 4, 2)),
    "border on one side": ConvCase((1, 32, 12, 12), (32, 32, 3, 3), pads=(2, 0, 0, 1)),
    "long rows": ConvCase((1, 32, 6, 300), (32, 32, 3, 3), pads=SAME),
    "double": ConvCase((1, 32, 13, 16), (40, 32, 3, 3), pads=SAME, dtype="f64"),
}
GRAPHS = {
    (n, g): c.graph(f"s0.{'d' if g else 'f'}{i}", g) for i, (n, c) in enumerate(CASES.items()) for g in (False, True)
}


def is_by_squares(graph: Graph, target: str = "host") -> bool:
    """Whether the kernel multiplies points. Its buffers are called so."""
    return "points" in str(plan_kernels(graph, machine_of(target)).steps[0].kernel.function)


# Every case forward or backward, in turn; and the other way round, which `make test` has no time to compile.
SOME = [((name, gradient), i % 2 == gradient) for i, name in enumerate(CASES) for gradient in (False, True)]
EVERY_CASE = pytest.mark.parametrize(
    ("name", "gradient"),
    [
        pytest.param(*key, marks=() if some else pytest.mark.slow, id=f"{key[0]}-{'gradient' if key[1] else 'forward'}")
        for key, some in SOME
    ],
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], TvmProgram]:
    """The library with a case; there is one for those of `make test`, and one for the others."""

    @cache
    def made(some: bool) -> TvmProgram:
        return build([GRAPHS[key] for key, is_some in SOME if is_some == some], tmp_path_factory.mktemp("winograd"))

    return lambda name, gradient: made(dict(SOME)[name, gradient])


def whole_numbers(graph: Graph, multiple_of: int = 4) -> list[torch.Tensor]:
    rng = np.random.default_rng(3)
    x, w = graph.ins
    source, weight = rng.integers(-8, 9, x.type.dims), rng.integers(-8, 9, w.type.dims) * multiple_of
    dtype = torch.float64 if x.type.dtype == "f64" else torch.float32
    return [torch.tensor(source, dtype=dtype), torch.tensor(weight, dtype=dtype)]


@EVERY_CASE
def test_whole_numbers_are_exact(name: str, gradient: bool, programs: Callable[[str, bool], TvmProgram]) -> None:
    graph, case = GRAPHS[name, gradient], CASES[name]
    assert allow_tiles() or is_by_squares(graph)
    assert family_of(graph.ops[0]) == SQUARES
    ins = whole_numbers(graph)
    (found,) = programs(name, gradient).call(graph.name, ins)
    expected = (case.backward if gradient else case.forward)(*(t.double() for t in ins))
    assert torch.equal(found.double(), expected)
    # The numbers tell positions and channels apart: with one moved, most of the result is another.
    moved = (case.backward if gradient else case.forward)(ins[0].double().roll(1, -1), ins[1].double())
    assert (found.double() != moved).double().mean() > 0.5


@EVERY_CASE
def test_other_numbers_are_within_rounding(
    name: str, gradient: bool, programs: Callable[[str, bool], TvmProgram]
) -> None:
    graph = GRAPHS[name, gradient]
    assert not compare(programs(name, gradient), graph, make_args(graph, np.random.default_rng(4)))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_is_rounded_once(dtype: str, tmp_path: Path) -> None:
    graph = ConvCase((1, 32, 14, 14), (64, 32, 3, 3), pads=SAME, dtype=dtype).graph("s0.F", False)
    assert allow_tiles() or is_by_squares(graph)
    native = torch.float16 if dtype == "f16" else torch.bfloat16
    ins = [t / 64 for t in whole_numbers(graph)]
    (found,) = build([graph], tmp_path).call("s0.F", [t.to(native) for t in ins])
    expected = torch.nn.functional.conv2d(*(t.double() for t in ins), padding=1)
    assert torch.equal(found, expected.to(native))


def behind(residual: bool) -> Graph:
    """A convolution of what a relu leaves, with a bias, a residual and a relu behind it."""
    x, w, b, r = (
        value("x", "f32[2,32,15,14]"),
        value("w", "f32[48,32,3,3]"),
        value("b", "f32[48,1,1]"),
        value("r", "f32[2,48,15,14]"),
    )
    ops: list[Op] = []

    def then(kind: str, *ins: object, **attrs: object) -> object:
        ops.append(make(kind, ins, [f"v{len(ops)}"], "", **attrs, kernel="k0"))  # type: ignore[arg-type]
        return ops[-1].outs[0]

    made = then("add", then("conv", then("relu", x), w, pads=SAME), b)
    made = then("relu", then("add", made, r) if residual else made)
    return Graph("s0.F", (x, w, b, r) if residual else (x, w, b), (made,), tuple(ops))  # type: ignore[arg-type]


@pytest.mark.parametrize("residual", [False, True])
def test_what_stands_before_and_behind_is_fused(residual: bool, tmp_path: Path) -> None:
    graph = behind(residual)
    (step,) = plan_kernels(graph, machine_of("host")).steps
    assert allow_tiles() or "points" in str(step.kernel.function)
    assert not compare(build([graph], tmp_path), graph, make_args(graph, np.random.default_rng(5)))


def test_what_is_too_small_or_has_another_window_is_summed_directly() -> None:
    base = {"x": (1, 64, 14, 14), "w": (64, 64, 3, 3), "pads": SAME}
    assert allow_tiles() or is_by_squares(ConvCase(**base).graph("s0.F", False))  # type: ignore[arg-type]
    others = (
        {"strides": (2, 2)},
        {"dilations": (2, 2), "pads": (2, 2, 2, 2)},
        {"groups": 2, "w": (64, 32, 3, 3)},
        {"w": (64, 64, 3, 5)},
        {"x": (1, 64, 7, 7)},
        {"x": (1, 16, 14, 14), "w": (64, 16, 3, 3)},
        {"w": (8, 64, 3, 3)},
        {"x": (1, 64, 1, 100)},
    )
    for other in others:
        graph = ConvCase(**{**base, **other}).graph("s0.F", False)  # type: ignore[arg-type]
        assert not is_by_squares(graph)
        # Costs are estimated so, but for images of one row.
        assert (family_of(graph.ops[0]) == CONVOLUTIONS) == ("x" not in other or other["x"][2] > 1)
    assert is_by_squares(ConvCase(**base).graph("s0.F", False), "portable")  # type: ignore[arg-type]
    assert not is_by_squares(ConvCase(**base).graph("s0.F", False), "x86-64-v2")  # type: ignore[arg-type]


def test_processors_without_wide_vectors(tmp_path: Path) -> None:
    graph = GRAPHS["odd sizes", False]
    ins = whole_numbers(graph)
    (found,) = build([graph], tmp_path, "portable").call(graph.name, ins)
    assert torch.equal(found.double(), CASES["odd sizes"].forward(*(t.double() for t in ins)))


@pytest.mark.parametrize("rule", ["_of_source", "_of_weights", "_outputs"])
def test_a_wrong_coefficient_would_be_noticed(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the last two points swapped at one of the three places."""
    right = getattr(conv_winograd, rule)
    monkeypatch.setattr(conv_winograd, rule, lambda *args: [*right(*args)[:-2], *reversed(right(*args)[-2:])])
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    case = CASES["border on one side"]
    graph = case.graph("s0.F", False)
    ins = whole_numbers(graph)
    built = build_graphs([graph], tmp_path / "stage.so", CompileOptions("host", jobs=1))
    (found,) = TvmProgram(built.path, [graph]).call("s0.F", ins)
    assert allow_tiles() or difference(found, case.forward(*ins))


@settings(max_examples=4, deadline=None)
@given(
    images=st.integers(1, 3),
    channels=st.integers(32, 50),
    filters=st.integers(32, 80),
    sizes=st.tuples(st.integers(9, 40), st.integers(9, 70)),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    gradient=st.booleans(),
)
def test_all_sizes(
    images: int,
    channels: int,
    filters: int,
    sizes: tuple[int, int],
    pads: tuple[int, int, int, int],
    gradient: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    case = ConvCase((images, channels, *sizes), (filters, channels, 3, 3), pads=pads)
    graph = case.graph("s0.F", gradient)
    ins = whole_numbers(graph)
    (found,) = build([graph], tmp_path_factory.mktemp("sizes")).call("s0.F", ins)
    assert torch.equal(found.double(), (case.backward if gradient else case.forward)(*(t.double() for t in ins)))
