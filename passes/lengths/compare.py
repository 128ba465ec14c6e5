"""The comparison of one model at two sizes: where a bounded dimension begins, and what the size is used for besides.

In: graphs of a model that differ in the size along one dimension. Out: `grown`, the dimensions of results that follow
the size although no operand has them; `ends`, the slices that take the last element; and problems: numbers, tables and
variables that depend on the size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph, Op, Value
from penstock.ir.ops import ints
from penstock.ir.types import TensorType

from .walk import LengthWalk


@dataclass
class SizeFindings:
    """The findings of a comparison. `dims` are the dimensions of every value that follow the size, `grown` those that
    no operand has; `ends` are results of slices that take the last element; `rows` says that rows do not see each
    other."""

    dims: dict[str, tuple[int, ...]] = field(default_factory=dict)
    grown: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    rows: bool = False
    ends: tuple[str, ...] = ()


def alike(a: Graph, b: Graph) -> bool:
    """Return whether two graphs have the same operations on the same values, but for shapes."""
    if len(a.ops) != len(b.ops) or [v.name for v in a.outs] != [v.name for v in b.outs]:
        return False
    return all(
        x.kind == y.kind
        and [v.name for v in x.ins] == [v.name for v in y.ins]
        and [v.name for v in x.outs] == [v.name for v in y.outs]
        for x, y in zip(a.ops, b.ops, strict=True)
    )


def first_difference(a: Graph, b: Graph) -> str:
    """Return the first operation of a graph that another one has not at its place, or the number of them."""
    for x, y in zip(a.ops, b.ops, strict=False):
        if x.kind != y.kind or [v.name for v in (*x.ins, *x.outs)] != [v.name for v in (*y.ins, *y.outs)]:
            return f"{x.kind} {x.loc or '%' + x.outs[0].name}, there {y.kind} {y.loc or '%' + y.outs[0].name}"
    return f"{len(a.ops)} operations, there {len(b.ops)}"


def compare(
    graph: Graph, other: Graph, name: str, sizes: tuple[int, int], places: Mapping[str, Sequence[int]]
) -> SizeFindings:
    """Compare graphs that are alike, of these two sizes along dimension `name`."""
    findings = SizeFindings()
    for op, also in zip(graph.ops, other.ops, strict=True):
        where = f"{op.kind} {op.loc or '%' + op.outs[0].name}"
        for value, smaller in zip(op.outs, also.outs, strict=True):
            dims, problem = _following(value.type, smaller.type, name, sizes)
            if problem:
                findings.problems.append(f"{where}: {problem}")
            if dims:
                findings.dims[value.name] = dims
        if _takes_last(op, also):
            findings.ends = (*findings.ends, op.outs[0].name)
        elif problem := _numbers(op, also, findings.dims, name):
            findings.problems.append(f"{where}: {problem}")
    if not findings.problems:
        walk = LengthWalk(graph, name, sizes[0], places, findings.grown, expected=findings.dims, ends=findings.ends)
        walk.run()
        findings.problems += walk.problems
        findings.rows = not walk.mixes
    return findings


def by_name(
    graph: Graph, findings: SizeFindings, name: str, size: int, places: Mapping[str, Sequence[int]]
) -> SizeFindings:
    """Return findings for a graph of a special size, which has fewer operations than those of sizes beside it: values
    of equal names follow the size alike."""
    values = {value.name for op in graph.ops for value in op.outs}
    dims = {value: listed for value, listed in findings.dims.items() if value in values}
    walk = LengthWalk(graph, name, size, places, {}, expected=dims, by_name=True, ends=findings.ends)
    walk.run()
    return SizeFindings(dims, walk.grown, walk.problems, findings.rows and not walk.mixes, findings.ends)


def _takes_last(op: Op, other: Op) -> bool:
    """Return whether a slice takes the last element of a dimension at both sizes, and follows no size besides."""
    if op.kind != "slice":
        return False
    ours, theirs = (
        list(zip(ints(x.attrs["start"]), ints(x.attrs["stop"]), ints(x.attrs["step"]), x.ins[0].type.dims, strict=True))
        for x in (op, other)
    )
    moved = [(a, b) for a, b in zip(ours, theirs, strict=True) if a[0] != b[0]]
    return len(moved) == 1 and all(stop == n == start + 1 for start, stop, _, n in moved[0])


def _following(a: TensorType, b: TensorType, name: str, sizes: tuple[int, int]) -> tuple[tuple[int, ...], str]:
    if a.rank != b.rank or a.dtype != b.dtype:
        return (), f"is {a} at {name} {sizes[0]} and {b} at {sizes[1]}"
    dims = tuple(i for i, (m, n) in enumerate(zip(a.dims, b.dims, strict=True)) if m != n)
    for i in dims:
        if a.dims[i] * sizes[1] != b.dims[i] * sizes[0]:
            return dims, (
                f"its dimension {i} is {a.dims[i]} at {name} {sizes[0]} and {b.dims[i]} at {sizes[1]}, "
                f"which is no multiple of {name}"
            )
    return dims, ""


def _numbers(op: Op, other: Op, dims: Mapping[str, tuple[int, ...]], name: str) -> str:
    """Return how attributes follow the size in other ways than shapes do; nothing if they do not."""
    for key in dict.fromkeys([*op.attrs, *other.attrs]):
        a, b = op.attrs.get(key), other.attrs.get(key)
        if a == b or key == "shape":
            continue
        if op.kind == "slice" and key == "stop" and op.attrs["start"] == other.attrs["start"]:
            moved = [
                i for i, (m, n) in enumerate(zip(ints(op.attrs[key]), ints(other.attrs[key]), strict=True)) if m != n
            ]
            if set(moved) <= set(dims.get(op.outs[0].name, ())):
                continue
            return f"takes elements up to an end that follows {name}"
        if op.kind == "slice" and key == "start":
            return f"takes elements that are counted from the end of {name}, and not the last one alone"
        if op.kind == "const" and key == "value" and _begins_alike(a, b, op.outs[0], other.outs[0]):
            continue
        return f"uses {name} as a number: its {key} is {_short(a)} or {_short(b)}"
    return ""


def _short(value: Attr | None) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _begins_alike(a: Attr | None, b: Attr | None, value: Value, other: Value) -> bool:
    """Return whether the smaller one of two tables is the beginning of the larger one."""
    if not isinstance(a, tuple) or not isinstance(b, tuple):
        return False
    x, y = np.array(a).reshape(value.type.dims), np.array(b).reshape(other.type.dims)
    both = tuple(slice(0, min(m, n)) for m, n in zip(x.shape, y.shape, strict=True))
    return bool(np.array_equal(x[both], y[both]))
