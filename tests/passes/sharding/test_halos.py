"""Convolutions and pools split along their spatial dimensions: rows of neighbours, masks and offsets are right.

Padding of operands is nan here, so that nothing that lies beyond a tensor may reach a result."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from oracles.sharding.drawn_windows import DrawnWindow, drawn_window
from oracles.sharding.one_operation import compare, local_module

from penstock.ir.graph import Graph, Op
from penstock.ir.ops import ints, make

QUICK, ALL, STEP = 350, 2100, 50


def hold(case: DrawnWindow) -> None:
    compare(case.op, case.arrays, case.mesh, case.types, padding=np.nan)


@pytest.mark.parametrize("first", range(0, QUICK, STEP))
def test_drawn_windows_on_many_ranks_are_those_of_one(first: int) -> None:
    for number in range(first, first + STEP):
        hold(drawn_window(number))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, ALL, STEP))
def test_more_drawn_windows_on_many_ranks_are_those_of_one(first: int) -> None:
    for number in range(first, first + STEP):
        hold(drawn_window(number))


def mutated(case: DrawnWindow, kind: str) -> Graph | None:
    """Return the local form with one operation of a kind made wrong; None where it has none."""
    graph = local_module(case.op, case.types, case.mesh)[1].graphs["s0.F"]
    at = next((i for i, op in enumerate(graph.ops) if op.kind == kind), None)
    if at is None:
        return None
    op = graph.ops[at]
    (y,) = op.outs
    if kind == "shift":
        # The rank's own rows instead of its neighbour's.
        wrong = Op("shift", op.ins, op.outs, {**op.attrs, "by": 0})
    elif kind == "where":
        # No mask: what is there stays.
        wrong = make("reshape", (op.ins[1],), [y.name], shape=y.type.dims)
    elif kind == "gather":
        # Rows from one row too early on, beginning anew at the end.
        one = make("const", (), ["one"], dtype="i64", value=1)
        earlier = make("sub", (op.ins[1], *one.outs), ["earlier"])
        return replaced(graph, at, (one, earlier, Op("gather", (op.ins[0], *earlier.outs), op.outs, op.attrs)))
    else:
        # Rows from one row too late on, or too early on at the end.
        starts, stops = list(ints(op.attrs["start"])), list(ints(op.attrs["stop"]))
        dims = op.ins[0].type.dims
        dim = next(i for i, n in enumerate(dims) if stops[i] - starts[i] != n)
        step = 1 if stops[dim] < dims[dim] else -1
        starts[dim], stops[dim] = starts[dim] + step, stops[dim] + step
        wrong = Op(op.kind, op.ins, op.outs, {**op.attrs, "start": tuple(starts), "stop": tuple(stops)})
    return replaced(graph, at, (wrong,))


def replaced(graph: Graph, at: int, ops: tuple[Op, ...]) -> Graph:
    return Graph(graph.name, graph.ins, graph.outs, (*graph.ops[:at], *ops, *graph.ops[at + 1 :]))


@pytest.mark.parametrize("kind", ["shift", "where", "slice", "gather"])
def test_control_a_wrong_halo_is_noticed(kind: str) -> None:
    """Rows of no neighbour, a missing mask, rows at another place: most of them change some number. A mask of rows that
    no window meets, as strides pass them over, changes none."""
    found = Counter[bool]()
    for number in range(120):
        case = drawn_window(number)
        graph = mutated(case, kind)
        if graph is None:
            continue
        try:
            compare(case.op, case.arrays, case.mesh, case.types, graph, padding=np.nan)
            found[False] += 1
        except AssertionError:
            found[True] += 1
    assert found.total() >= 15
    assert found[True] >= (0.6 if kind == "where" else 0.8) * found.total(), found
