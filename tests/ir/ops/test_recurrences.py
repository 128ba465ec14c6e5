"""Recurrences found among operations: what counts as one, and what is too different to be one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.ir.graph import Graph, Op, Value
from penstock.ir.ops import make
from penstock.ir.ops.recurrences import Recurrence, find_recurrence
from penstock.ir.types import parse_type

STEPS = 6
# Change the start of a slice, the name of an elementwise operation, or the matrix, of one step.
Change = Callable[[int], object]


def value(name: str, text: str) -> Value:
    return Value(name, parse_type(text))


def unrolled(
    start: Change = lambda t: t,
    kind: Change = lambda t: "tanh",
    matrix: Change = lambda t: "w",
    backward: bool = False,
    shown: int | None = None,
    carried: bool = False,
) -> Graph:
    """Write h = tanh(gates[t] + h w) for all steps, with `carried` also c = c * h; `shown` is a step whose sum is a
    result."""
    gates, h = value("gates", f"f32[{STEPS},2,8]"), value("h", "f32[2,8]")
    matrices = {name: value(name, "f32[8,8]") for name in ("w", "other")}
    ops: list[Op] = []

    def emit(kind: str, *ins: Value, **attrs: object) -> Value:
        ops.append(make(kind, ins, [f"v{len(ops)}"], "", **attrs))  # type: ignore[arg-type]
        return ops[-1].outs[0]

    state, memory, parts, extra = h, h, [], []
    for t in reversed(range(STEPS)) if backward else range(STEPS):
        first = int(str(start(t)))
        cut = emit("slice", gates, start=(first, 0, 0), stop=(first + 1, 2, 8), step=(1, 1, 1))
        total = emit("add", emit("reshape", cut, shape=(2, 8)), emit("matmul", state, matrices[str(matrix(t))]))
        extra += [total] if t == shown else []
        if carried:
            memory = emit("mul", memory, total)
            total = emit("add", total, memory)
        state = emit(str(kind(t)), total)
        parts.append(emit("reshape", state, shape=(1, 2, 8)))
    ys = emit("concat", *(parts[::-1] if backward else parts), axis=0)
    return Graph("s0.F", (gates, h, *matrices.values()), (ys, state, *extra), tuple(ops), ())


def found(graph: Graph) -> Recurrence | None:
    readers: dict[Value, list[Op]] = {}
    for op in graph.ops:
        for v in op.ins:
            readers.setdefault(v, []).append(op)
    (concat,) = (op for op in graph.ops if op.kind == "concat")
    return find_recurrence(concat, graph.ops, graph.producers(), readers, set(graph.results))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_all_steps_but_the_first_are_a_recurrence(backward: bool, carried: bool) -> None:
    graph = unrolled(backward=backward, carried=carried)
    recurrence = found(graph)
    assert recurrence is not None
    assert recurrence.backward is backward
    assert len(recurrence.products) == STEPS - 1
    assert [len(state) for state in recurrence.states] == [STEPS] * (2 if carried else 1)
    assert recurrence.states[0][-1] is graph.outs[1]
    ((_, move),) = recurrence.moving.items()
    assert move == ((-1, 0, 0) if backward else (1, 0, 0))
    # Everything behind the first step is inside.
    inside = {id(op) for op in (*recurrence.ops, *recurrence.views)}
    first = [op.kind for op in graph.ops if id(op) not in inside and op.kind not in ("slice", "reshape")]
    assert first == ["matmul", "add", *(["mul", "add"] if carried else []), "tanh"]


@pytest.mark.parametrize(
    "graph",
    [
        unrolled(start=lambda t: 2 if t == 3 else t),
        unrolled(kind=lambda t: "sigmoid" if t == 4 else "tanh"),
        unrolled(kind=lambda t: "sigmoid" if t == 1 else "tanh"),
        unrolled(matrix=lambda t: "other" if t == 3 else "w"),
        unrolled(shown=3),
    ],
    ids=["a slice elsewhere", "another function", "another function first", "another matrix", "a sum that is read"],
)
def test_controls_steps_that_differ_are_none(graph: Graph) -> None:
    assert found(graph) is None
