"""Products of float32 on tile registers: as exact as float32, whatever the numbers are. Skipped where the processor has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.tvm.kernels.tiles import product as tile_product
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.backends.tvm.tile_permission import allow_tiles
from penstock.ir.graph import Graph
from penstock.ir.ops import make

from ...cases import build, to_torch, value

pytestmark = pytest.mark.skipif(not allow_tiles(), reason="this machine has no tile registers")

# Half a unit in the last place of f32.
U = 2.0**-24
FORMS = ("NN", "NT", "TN", "TT")
# Rows, columns, numbers along the sum: whole tiles, ragged ones, a sum in blocks, several blocks of rows beside a small B.
SIZES = {"whole": (128, 160, 128), "ragged": (141, 151, 109), "long": (128, 141, 2500), "tall": (900, 130, 300)}


def product(name: str, form: str, m: int, n: int, k: int) -> Graph:
    ta, tb = form[0] == "T", form[1] == "T"
    a, b = (
        value("a", f"f32[{k},{m}]" if ta else f"f32[{m},{k}]"),
        value("b", f"f32[{n},{k}]" if tb else f"f32[{k},{n}]"),
    )
    op = make("matmul", [a, b], ["p"], ta=ta, tb=tb, kernel="k0")
    return Graph(name, (a, b), op.outs, (op,))


GRAPHS = {f"{form}_{size}": product(f"s0.{form}_{size}", form, *SIZES[size]) for form in FORMS for size in SIZES}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    return build(list(GRAPHS.values()), tmp_path_factory.mktemp("tiles"))


def stored(form: str, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Operands as the graph wants them."""
    return [np.ascontiguousarray(a.T if form[0] == "T" else a), np.ascontiguousarray(b.T if form[1] == "T" else b)]


def run(program, name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (y,) = program.call(GRAPHS[name].name, [to_torch(x) for x in stored(name[:2], a, b)])
    return y.numpy()


def bound(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What may be off: every product and every addition of a sum by half a unit in the last place, twice over."""
    magnitudes = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    # A sum of k numbers in f32 is off by up to k u, in practice by some sqrt(k) u.
    return 2 * U * (2 + np.sqrt(a.shape[1])) * magnitudes


def excess(found: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    exact = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.max(np.abs(found.astype(np.float64) - exact) / bound(a, b)))


DRAWN: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "around zero": lambda rng, shape: rng.standard_normal(shape),
    "positive": lambda rng, shape: rng.random(shape) + 0.5,
    "of many magnitudes": lambda rng, shape: rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape),
    "all bits used": lambda rng, shape: 1 + rng.integers(0, 1 << 23, shape) * 2.0**-23,
    # Just below and above the middle between two bf16, in the first and in the second part.
    "between bf16": lambda rng, shape: (
        1 + 2.0**-8 + rng.integers(-2, 3, shape) * 2.0**-23 + rng.integers(0, 2, shape) * 2.0**-16
    ),
    # The first part is 1, the second 2**-9, the third positive.
    "third parts agree": lambda rng, shape: 1 + 2.0**-9 + rng.integers(38, 60, shape) * 2.0**-23,
}


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("name", GRAPHS)
def test_products_are_as_exact_as_float32(name: str, drawn: str, program) -> None:
    m, n, k = SIZES[name[3:]]
    rng = np.random.default_rng(1)
    a, b = (DRAWN[drawn](rng, shape).astype(np.float32) for shape in ((m, k), (k, n)))
    assert excess(run(program, name, a, b), a, b) <= 1


def test_kernels_use_tiles_here() -> None:
    """What the other tests say of tiles is said of tiles."""
    for graph in GRAPHS.values():
        assert "tdpbf16ps" in plan_kernels(graph, machine_of("host")).steps[0].kernel.function.script()
    assert "tdpbf16ps" not in plan_kernels(GRAPHS["NN_whole"], machine_of("portable")).steps[0].kernel.function.script()


@pytest.mark.parametrize("pairs", [((1, 1), (0, 1), (0, 0), (1, 0)), ((0, 0),)], ids=["two parts", "one part"])
def test_fewer_parts_would_be_noticed(pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the bound: without the third parts products have the exactness of 16 bits."""
    monkeypatch.setitem(tile_product.ORDER, 3, pairs)
    graph = product("s0.fewer", "NN", *SIZES["whole"])
    rng = np.random.default_rng(1)
    a, b = (DRAWN["third parts agree"](rng, shape).astype(np.float32) for shape in ((128, 128), (128, 160)))
    (y,) = build([graph], tmp_path).call(graph.name, [to_torch(a), to_torch(b)])
    assert excess(y.numpy(), a, b) > 1


def test_whole_numbers_are_exact(program) -> None:
    rng = np.random.default_rng(3)
    a, b = (
        rng.integers(-4000, 4000, (128, 128)).astype(np.float32),
        rng.integers(-16, 16, (128, 160)).astype(np.float32),
    )
    assert np.array_equal(run(program, "NN_whole", a, b), a.astype(np.float64) @ b.astype(np.float64))


SPECIAL = {
    "inf": np.inf,
    "minus inf": -np.inf,
    "nan": np.nan,
    "largest": float(np.finfo(np.float32).max),
    # Rounds up to infinity as a bf16; the next one down does not.
    "too large": float(np.array(0x7F7F8000, np.uint32).view(np.float32)),
    "just not": float(np.array(0x7F7F7FFF, np.uint32).view(np.float32)),
}


@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("name", [n for n in GRAPHS if n.startswith(("NN", "TT"))])
def test_numbers_without_parts(name: str, special: str, where: str, program) -> None:
    """One such number among small ones: the result is what float32 has, in every place."""
    m, n, k = SIZES[name[3:]]
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(shape).astype(np.float32) * np.float32(0.01) for shape in ((m, k), (k, n)))
    a, b = np.clip(a, -0.05, 0.05), np.clip(b, -0.05, 0.05)
    target = a if where == "a" else b
    target[target.shape[0] // 2, target.shape[1] // 3] = SPECIAL[special]
    found = run(program, name, a, b)
    expected = (torch.tensor(a).double() @ torch.tensor(b).double()).float().numpy()
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    assert np.allclose(found[finite], expected[finite], rtol=1e-5, atol=1e-5)


def test_small_numbers(program) -> None:
    """Parts of numbers below 2**-102 may be lost, which shows below 2**-126 times the other operand only."""
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((128, 128)).astype(np.float32), rng.standard_normal((128, 160)).astype(np.float32)
    for power in (-100, -115, -126, -140):
        small = a * np.float32(2.0) ** power
        exact = small.astype(np.float64) @ b.astype(np.float64)
        lost = 2.0**-125 * np.abs(b).sum(axis=0, dtype=np.float64) + 2.0**-126
        assert np.all(np.abs(run(program, "NN_whole", small, b) - exact) <= bound(small, b) + lost)


@pytest.mark.parametrize("power", [-51, -54, -58, -62])
def test_small_results(power: int, program) -> None:
    """Each of six products of parts may be lost below 2**-126. Control: that is more than f32 would be off."""
    rng = np.random.default_rng(6)
    a, b = (np.ldexp(rng.random(shape) + 0.5, power).astype(np.float32) for shape in ((128, 128), (128, 160)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    off = np.abs(run(program, "NN_whole", a, b) - exact)
    assert np.all(off <= bound(a, b) + 6 * 128 * 2.0**-126)
    assert np.any(off > bound(a, b)) == (power <= -58)


def test_results_near_the_largest(program) -> None:
    """Of numbers that are less than their first parts. Control: nearer to the largest there is no result."""
    a, b = np.zeros((128, 128), np.float32), np.zeros((128, 160), np.float32)
    b[0, 0] = 1 + 2.0**-8 + 2.0**-20
    largest = np.finfo(np.float32).max / b[0, 0]
    for share, there in ((1 - 2.0**-7, True), (1 - 2.0**-11, False)):
        a[0, 0] = largest * share
        exact = a.astype(np.float64) @ b.astype(np.float64)
        found = run(program, "NN_whole", a, b)
        assert np.isfinite(found[0, 0]) == there
        assert not there or np.all(np.abs(found - exact) <= bound(a, b))
