"""Collectives between the ranks of a mesh, against the whole tensor they are parts of."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from penstock.ir.graph import Graph, Mesh, Value
from penstock.ir.interpreter.collectives import cut, joined
from penstock.ir.interpreter.graphs import run_graph, run_team
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.support.errors import VerifyError

MESHES = [
    Mesh("m", (("tp", 2),), ("a", "b")),
    Mesh("m", (("dp", 2), ("tp", 3)), tuple("abcdef")),
    Mesh("m", (("x", 2), ("tp", 2), ("y", 2)), tuple("abcdefgh")),
]


def run(kind: str, operands: list[np.ndarray], mesh: Mesh, **attrs: object) -> list[np.ndarray]:
    x = Value("x", TensorType("f64", operands[0].shape))
    op = make(kind, (x,), ["y"], **attrs)  # type: ignore[arg-type]
    graph = Graph("s0.F", (x,), op.outs, (op,))
    return [results[0] for results in run_team(graph, [{"x": x} for x in operands], mesh)]


def group_of(mesh: Mesh, place: int, over: tuple[str, ...]) -> list[int]:
    """Return the group of a place by the definition: equal coordinates off the axes, in the order of the axes."""
    own = mesh.coordinates(place)
    others = [
        p
        for p in range(len(mesh.devices))
        if all(at == own[axis] for axis, at in mesh.coordinates(p).items() if axis not in over)
    ]
    return sorted(others, key=lambda p: [mesh.coordinates(p)[axis] for axis in over])


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.sizes))
def test_places_and_groups_follow_the_definition(mesh: Mesh) -> None:
    axes = [axis for axis, _ in mesh.axes]
    every = list(product(*(range(size) for _, size in mesh.axes)))
    assert [tuple(mesh.coordinates(p).values())[::-1] for p in range(len(every))] == every
    for over in [(a,) for a in axes] + [(a, b) for a in axes for b in axes if a != b]:
        assert all(list(mesh.group(p, over)) == group_of(mesh, p, over) for p in range(len(every)))
    assert sorted(p for team in mesh.teams() for p in team) == list(range(len(every)))
    assert all(len({mesh.coordinates(p).get("dp", 0) for p in team}) == 1 for team in mesh.teams())


@pytest.mark.parametrize("size", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("over", ["tp", ("tp", "x"), ("y", "tp")])
def test_parts_of_a_tensor_join_to_the_tensor(size: int, blocks: int, over: str | tuple[str, ...]) -> None:
    mesh, names = MESHES[2], (over,) if isinstance(over, str) else over
    whole = np.random.default_rng(size).normal(size=(2, size * blocks))
    parts = [cut(whole, 1, len(g := group_of(mesh, p, names)), g.index(p), blocks) for p in range(len(mesh.devices))]
    assert all(
        np.array_equal(y, whole)
        for y in run("all_gather", parts, mesh, axis=1, over=over, size=size * blocks, blocks=blocks)
    )


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.sizes))
def test_sums_and_their_parts_follow_the_definition(mesh: Mesh) -> None:
    rng, count = np.random.default_rng(3), len(mesh.devices)
    xs = [rng.normal(size=(6, 2)) for _ in range(count)]
    groups = [group_of(mesh, p, ("tp",)) for p in range(count)]
    totals = [sum(xs[q] for q in group) for group in groups]
    assert all(np.array_equal(y, t) for y, t in zip(run("all_reduce", xs, mesh, over="tp"), totals, strict=True))
    largest = run("all_reduce", xs, mesh, over="tp", by="max")
    assert all(np.array_equal(y, np.max([xs[q] for q in g], 0)) for y, g in zip(largest, groups, strict=True))
    scattered = run("reduce_scatter", xs, mesh, axis=0, over="tp", parts=len(groups[0]))
    assert all(
        np.array_equal(y, cut(t, 0, len(g), g.index(p)))
        for p, (y, t, g) in enumerate(zip(scattered, totals, groups, strict=True))
    )


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.sizes))
def test_all_to_all_changes_the_dimension_that_is_split_and_a_shift_moves_on(mesh: Mesh) -> None:
    groups = [group_of(mesh, p, ("tp",)) for p in range(len(mesh.devices))]
    whole = np.arange(35.0).reshape(5, 7)
    by_columns = [cut(whole, 1, len(g), g.index(p)) for p, g in enumerate(groups)]
    by_rows = [cut(whole, 0, len(g), g.index(p)) for p, g in enumerate(groups)]
    turned = run("all_to_all", by_columns, mesh, split=0, join=1, over="tp", parts=len(groups[0]), size=7)
    assert all(np.array_equal(a, b) for a, b in zip(turned, by_rows, strict=True))
    xs = [np.full(1, float(p)) for p in range(len(groups))]
    moved = run("shift", xs, mesh, by=1, over="tp")
    assert [float(x[0]) for x in moved] == [g[(g.index(p) - 1) % len(g)] for p, g in enumerate(groups)]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match="do not make a dimension of 2"):
        run("all_gather", [np.zeros(3)] * 2, MESHES[0], axis=0, over="tp", size=2)
    x = Value("x", TensorType("f64", (3,)))
    op = make("all_reduce", (x,), ["y"], over="tp")
    with pytest.raises(VerifyError, match="has no group"):
        run_graph(Graph("F", (x,), op.outs, (op,)), [np.zeros(3)])
    with pytest.raises(VerifyError, match="not all of which run the graph"):
        run_team(Graph("F", (x,), op.outs, (op,)), [{"x": np.zeros(3)}], MESHES[0], places=[1])


def test_control_another_order_of_parts_is_another_tensor() -> None:
    parts = [cut(np.arange(6.0), 0, 2, i) for i in range(2)]
    assert not np.array_equal(joined(parts[::-1], 0, 6), np.arange(6.0))
