"""Lines of results that convolutions ask for before they store to them: all of them, but none of other elements, whose places
are not those of the sums."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tvm import tirx

from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph

from ...cases import value
from ...test_packed import Writer

# Elements of a line.
LINE = 16
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "Min": min,
    "Max": max,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "And": operator.and_,
}
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "small image": {"x": (1, 32, 14, 14), "weight": (48, 32, 1, 1)},
    "channels in lanes": {"x": (1, 48, 14, 14), "weight": (48, 1, 3, 3), "groups": 48},
    "planes": {"x": (1, 16, 28, 28), "weight": (16, 1, 5, 5), "groups": 16},
    "planes in strips": {"x": (1, 4, 112, 112), "weight": (4, 1, 5, 5), "groups": 4},
    "tiles": {"x": (1, 32, 28, 28), "weight": (32, 32, 3, 3), "strides": (2, 2)},
}


def graph_of(x: tuple[int, ...], weight: tuple[int, ...], *, halved: bool = False, **attrs: Any) -> Graph:
    w = Writer()
    source = value("x", f"f32[{','.join(map(str, x))}]")
    given = w.read("w", f"f32[{','.join(map(str, weight))}]")
    pads = (weight[2] // 2,) * 4
    y = w("relu", w("conv", source, given, pads=pads, **attrs))
    return w.fused((source,), (w("cast", y, dtype="f16") if halved else y,))


def asked(graph: Graph) -> set[int]:
    """The lines that a kernel asks for in order to store, as elements, by running the loops around each hint."""
    (step,) = plan_kernels(graph, machine_of("skylake-avx512")).steps
    return set(_hints(step.kernel.function.body, {}))


def _hints(statement: Any, known: dict[Any, Any]) -> Iterator[int]:
    match statement:
        case tirx.SeqStmt():
            for part in statement.seq:
                yield from _hints(part, known)
        case tirx.For() if "prefetch" in str(statement):
            for turn in range(_number(statement.extent, known)):
                yield from _hints(statement.body, known | {statement.loop_var: turn})
        case tirx.IfThenElse():
            if _number(statement.condition, known):
                yield from _hints(statement.then_case, known)
            elif statement.else_case is not None:
                yield from _hints(statement.else_case, known)
        case tirx.AttrStmt():
            yield from _hints(statement.body, known)
        case tirx.Bind():
            known[statement.var] = statement.value
        case tirx.Evaluate() if "prefetch" in str(statement) and int(statement.value.args[1]):
            (place,) = statement.value.args[0].args[0].indices
            yield _number(place, known)


def _number(expr: Any, known: dict[Any, Any]) -> int:
    """The value of an index: sums, products, quotients and comparisons of variables and whole numbers."""
    if isinstance(expr, int):
        return expr
    if isinstance(expr, tirx.IntImm):
        return int(expr.value)
    if isinstance(expr, tirx.Var):
        return _number(known[expr], known)
    if isinstance(expr, tirx.Not):
        return not _number(expr.a, known)
    return OPERATORS[type(expr).__name__](_number(expr.a, known), _number(expr.b, known))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_lines_of_results_are_asked_for(name: str) -> None:
    graph = graph_of(**CONVOLUTIONS[name])
    size = graph.outs[0].type.size
    lines = {place // LINE for place in asked(graph) if 0 <= place < size}
    every = set(range(size // LINE))
    # Tiles ask for the next lines of a channel, and for the first ones not at all.
    assert len(every - lines) <= len(every) // 8, sorted(every - lines)[:9]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_control_results_of_other_elements_are_not(name: str) -> None:
    assert not asked(graph_of(**CONVOLUTIONS[name], halved=True))
