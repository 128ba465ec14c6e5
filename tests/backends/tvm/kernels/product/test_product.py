"""Matrix products of every shape class, compiled, against NumPy in float64: few rows, ragged edges, panels that are packed while they are
multiplied, long sums, results that are added to variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import tirx

from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph, Op, Slot, signature
from penstock.ir.ops import make

from ...cases import build, make_args, to_torch, value

FORMS = ("NN", "NT", "TN", "TT")
# Largest error over the largest magnitude.
CLOSE = {"f32": 1e-5, "f64": 1e-13}


def product(name: str, form: str, m: int, n: int, k: int, dtype: str = "f32", batch: tuple[int, ...] = ()) -> Graph:
    """One product, and its sum with a row, so that something stands behind it."""
    ta, tb = form[0] == "T", form[1] == "T"

    def text(*dims: int) -> str:
        return f"{dtype}[{','.join(map(str, (*batch, *dims)))}]"

    a, b = value("a", text(*((k, m) if ta else (m, k)))), value("b", text(*((n, k) if tb else (k, n))))
    row = value("row", f"{dtype}[{n}]")
    op = make("matmul", [a, b], ["p"], ta=ta, tb=tb, kernel="k0")
    total = make("add", [op.outs[0], row], ["y"], kernel="k0")
    return Graph(name, (a, b, row), (op.outs[0], total.outs[0]), (op, total))


def gradient(name: str, form: str, m: int, n: int, k: int) -> Graph:
    """A product that is added to a variable."""
    plain = product(name, form, m, n, k)
    op = plain.ops[0]
    effect = Op("accum", op.outs, (), {"var": "w", "kernel": "k0"})
    return Graph(name, plain.ins[:2], (), (op, effect))


def worst(program, graph: Graph) -> float:
    """The largest error of a graph's results, as a part of what is allowed."""
    op = graph.ops[0]
    args = [to_torch(x) for x in make_args(graph, np.random.default_rng(len(graph.name)))]
    a, b = (args[i].double().numpy() for i in range(2))
    exact = np.matmul(np.swapaxes(a, -1, -2) if op.attrs["ta"] else a, np.swapaxes(b, -1, -2) if op.attrs["tb"] else b)
    rest = args[2].double().numpy()
    expected = [exact, exact + rest] if graph.outs else [exact + rest]
    results = program.call(graph.name, args)
    if not graph.outs:
        assert signature(graph).slots == (Slot("w", ""),)
        results = [args[2]]
    allowed = CLOSE[graph.ins[0].type.dtype]
    errors = [
        np.abs(r.double().numpy() - e).max() / max(np.abs(e).max(), 1e-30) / allowed
        for r, e in zip(results, expected, strict=True)
    ]
    return float(max(errors))


def wrong(graphs: list[Graph], folder: Path, target: str = "host") -> list[str]:
    program = build(graphs, folder, target)
    found = {g.name: worst(program, g) for g in graphs}
    return [f"{name}: {error:.1f} of what is allowed" for name, error in found.items() if not error <= 1]


# Rows up to 16 beside matrices with whole and ragged vectors, fewer steps than are taken together, and blocks of columns.
FEW = [
    (m, n, k)
    for m in (1, 2, 4, 5, 16)
    for n, k in ((128, 24), (301, 37), (145, 7), (4113, 9))
    if m < 16 or n < 4000
] + [(13, 2200, 26), (16, 129, 1), (3, 128, 768), (1, 1000, 1100), (5, 1003, 1100)]  # fmt: skip
# Rows shared by threads for want of panels, with and without rows left over. The first tile packs: with rows left over and without, a last panel of one vector, of several, ragged; long sums, several blocks of rows; sums of up to four.
MANY = [
    (18, 64, 20),
    (20, 128, 33),
    (96, 200, 17),
    (97, 131, 53),
    (31, 447, 5),
    (17, 70, 4500),
    (64, 64, 3),
    (37, 85, 4),
    (19, 71, 1),
    (21, 16, 2),
    (2100, 24, 40),
    (700, 100, 9),
    (520, 150, 11),
]


# Less than half a vector of columns, alone and behind panels: one step along k left over, several, none; a single row in the last tile.
NARROW = [(40, 1, 33), (50, 2, 64), (29, 65, 31), (13, 68, 16), (45, 7, 19), (33, 72, 23), (300, 131, 12)]


@pytest.mark.parametrize(
    ("target", "every"),
    [("host", 2), *(pytest.param(target, 1, marks=pytest.mark.slow) for target in ("host", "x86-64-v3", "x86-64-v2"))],
)
def test_products_with_few_columns_at_the_end(target: str, every: int, tmp_path: Path) -> None:
    graphs = [product(f"s0.NN{i}", "NN", *size) for i, size in enumerate(NARROW)]
    graphs += [product(f"s0.NT{i}", "NT", *size) for i, size in enumerate(NARROW[::every])]
    graphs += [product(f"s0.d{i}", "NN", *size, "f64") for i, size in enumerate(NARROW[every // 2 :: every])]
    graphs += [product("s0.b", "NN", 20, 67, 18, "f32", (3,)), gradient("s0.g", "NT", 40, 131, 21)]
    assert not wrong(graphs, tmp_path, target)


@pytest.mark.parametrize("place", [0, 15, 16, 17, 18])
def test_nothing_is_multiplied_that_a_row_does_not_have(place: int, tmp_path: Path) -> None:
    """Infinite elements stay infinite where columns are padded and steps along k left over, and nan stays in its own row."""
    graph = product("s0.p", "NN", 14, 67, 19)
    a, b, row = (to_torch(x) for x in make_args(graph, np.random.default_rng(3)))
    a[4, place], a[9, place] = torch.inf, torch.nan
    found = build([graph], tmp_path).call(graph.name, [a, b, row])[0]
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("form", "every"),
    [("NN", 1), ("TN", 3), *(pytest.param(form, 1, marks=pytest.mark.slow) for form in ("TN", "NT", "TT"))],
)
def test_products_of_few_and_many_rows(form: str, every: int, tmp_path: Path) -> None:
    few = FEW if form in ("NN", "NT") else FEW[::4]
    assert not wrong([product(f"s0.p{i}", form, *size) for i, size in enumerate([*few, *MANY[::every]])], tmp_path)


def stores(statement: object) -> Iterator[tirx.BufferStore]:
    if isinstance(statement, tirx.BufferStore):
        yield statement
    for part in (
        *getattr(statement, "seq", ()),
        getattr(statement, "body", None),
        getattr(statement, "then_case", None),
    ):
        if part is not None:
            yield from stores(part)


def over_the_end(graph: Graph) -> list[str]:
    """Vectors that a kernel stores at fixed places of arrays, past their ends."""
    found = []
    for store in stores(plan_kernels(graph, machine_of("host")).steps[0].kernel.function.body):
        place, size = store.indices[0], store.buffer.shape[0]
        if (
            isinstance(place, tirx.Ramp)
            and isinstance(place.base, tirx.IntImm)
            and int(place.base) + int(place.lanes) > int(size)
        ):
            found.append(f"{place.lanes} at {place.base} of {store.buffer.name}, which has {size}")
    return found


@pytest.mark.parametrize("n", [145, 301, 1000])
def test_last_columns_are_within_their_arrays(n: int) -> None:
    graph = product("s0.p", "NN", 2, n, 37)
    assert len(list(stores(plan_kernels(graph, machine_of("host")).steps[0].kernel.function.body))) > 10
    assert not over_the_end(graph)


# All sizes with all forms; or every form and every size, but not with one another.
WHOLE = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])


@WHOLE
def test_products_of_batches_and_doubles(whole: bool, tmp_path: Path) -> None:
    batches, rows = ((3, 20, 70, 9), (2, 3, 150, 20)), (2, 9, 33)
    graphs = []
    for i, form in enumerate(FORMS):
        graphs += [
            product(f"s0.b{form}{b}", form, m, n, k, "f32", (b,))
            for b, m, n, k in (batches if whole else batches[i % 2 :][:1])
        ]
        graphs += [product(f"s0.d{form}{m}", form, m, 83, 30, "f64") for m in (rows if whole else rows[i % 3 :][:1])]
    assert not wrong(graphs, tmp_path)


@WHOLE
def test_products_added_to_variables(whole: bool, tmp_path: Path) -> None:
    sizes = ((3, 140), (40, 131), (770, 30))
    graphs = [
        gradient(f"s0.g{form}{m}", form, m, n, 21)
        for i, form in enumerate(FORMS)
        for m, n in (sizes if whole else sizes[i % 3 :][:1])
    ]
    # Larger than what stays in cache, so that their lines are asked for beforehand.
    graphs += [gradient(f"s0.large{form}", form, 661, 405, 24) for form in ("NN", "TN")]
    assert not wrong(graphs, tmp_path)


# Panels that ask for the next one: whole panels, a ragged last one; steps along k that do and do not fill a line; rows
# left over, few rows, and an operand that stays in the second cache.
SEVERAL = [(60, 768, 400), (57, 700, 425), (20, 768, 400), (60, 128, 64)]


def asked_for(graph: Graph, target: str) -> int:
    """The prefetches into the second cache in the kernel of a graph."""
    return str(plan_kernels(graph, machine_of(target)).steps[0].kernel.function).count(", 0, 2, 1)")


def test_products_that_ask_for_the_next_panel(tmp_path: Path) -> None:
    graphs = [product(f"s0.{form}{i}", form, *size) for form in FORMS for i, size in enumerate(SEVERAL)]
    assert all(asked_for(graph, "skylake-avx512") for graph in graphs)
    # A single tile of rows, panels that do not stay in the second cache, and a single panel.
    alone = (("NN", (11, 768, 400)), ("NT", (60, 400, 1100)), ("NN", (60, 400, 2100)), ("NN", (60, 64, 128)))
    assert not any(asked_for(product("s0.p", form, *size), "skylake-avx512") for form, size in alone)
    assert asked_for(product("s0.p", "NN", 60, 400, 1100), "skylake-avx512")
    assert not wrong(graphs, tmp_path)


def test_sums_of_nothing_are_zeros_wherever_they_go(tmp_path: Path) -> None:
    """The rest of the kernel finds every element's own place: of a row that is added, of a result that is stored transposed."""
    graphs = [product(f"s0.n{form}{m}", form, m, 130, 0) for form in FORMS for m in (5, 20)]
    op = product("s0.p", "NN", 5, 130, 0).ops[0]
    turned = make("transpose", op.outs, ["t"], perm=(1, 0), kernel="k0")
    graph = Graph("s0.turned", op.ins, turned.outs, (op, turned))
    assert not wrong(graphs, tmp_path)
    (found,) = build([graph], tmp_path / "turned").call(graph.name, [torch.zeros(5, 0), torch.zeros(0, 130)])
    assert torch.equal(found, torch.zeros(130, 5))


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v2"])
def test_products_for_other_instruction_sets(target: str, tmp_path: Path) -> None:
    graphs = [
        product(f"s0.t{form}{i}", form, *size)
        for form in ("NN", "TN")
        for i, size in enumerate([*FEW[1::5], *MANY[:4]])
        if form == "NN" or i % 2
    ]
    assert not wrong(graphs, tmp_path, target)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FORMS), st.integers(1, 70), st.integers(1, 300), st.integers(1, 90))
def test_products_of_any_size(tmp_path_factory: pytest.TempPathFactory, form: str, m: int, n: int, k: int) -> None:
    assert not wrong([product(f"s0.{form}", form, m, n, k)], tmp_path_factory.mktemp("any"))


def test_control_an_operand_changed_in_one_place_is_noticed(tmp_path: Path) -> None:
    graph = product("s0.p", "NN", 20, 70, 9)
    program = build([graph], tmp_path)

    class Spoiled:
        def call(self, name, args):  # type: ignore[no-untyped-def]
            changed = [args[0].clone(), *args[1:]]
            changed[0][7, 3] += 1e-2
            return program.call(name, changed)

    assert worst(program, graph) <= 1 < worst(Spoiled(), graph)
