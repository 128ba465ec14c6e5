"""The norm of gradients that replicas have in parts: each part is counted once.

In: graph N of a stage, which adds up the squares of its gradients. Out: the same graph, in which the sums of squares of
parts are added up on each rank, in float64, and then over the replicas, by one all_reduce. Gradients that are whole on
every replica are counted by themselves, as before.

    %w.grad.part -> square -> sum -> cast   \
                                             add -> all_reduce over dp -> what the first of them was added to
    %v.grad.part -> square -> sum -> cast   /
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.ir.graph import REPLICAS, Graph, Namer, Op, Value
from penstock.ir.ops import OPS, make

# What may stand between the squares of one gradient and the sum of all: operations on one number.
_ON_NUMBERS = ("cast", "all_reduce")


@dataclass(frozen=True, slots=True)
class Square:
    """The values that N makes of one gradient as long as they are tensors, and the number that it makes of them."""

    values: frozenset[Value]
    result: Value


def squares_of(graph: Graph) -> dict[str, Square]:
    """Return, by gradient, what is made of it, where parts of it can be counted apart: elementwise, then summed over
    all dimensions, and added to the sum of others."""
    readers: dict[Value, list[Op]] = {}
    for op in graph.ops:
        for value in dict.fromkeys(op.ins):
            readers.setdefault(value, []).append(op)
    squares = {}
    for op in graph.ops:
        if op.kind == "read" and op.outs[0].type.rank and (square := _square(op.outs[0], readers, graph)) is not None:
            squares[op.var] = square
    return squares


def _square(grad: Value, readers: dict[Value, list[Op]], graph: Graph) -> Square | None:
    values, results, ahead = {grad}, set[Value](), [grad]
    while ahead:
        for op in readers.get(ahead.pop(), ()):
            whole = any(v.type.rank and v not in values for v in op.ins) or len(op.outs) != 1
            if whole or not (OPS[op.kind].family == "elementwise" or op.kind == "sum"):
                return None
            (out,) = op.outs
            if op.kind == "sum" and out.type.rank:
                return None
            if not out.type.rank:
                results.add(out)
            elif out not in values:
                values.add(out)
                ahead.append(out)
    if len(results) != 1:
        return None
    (result,) = results
    while len(behind := readers.get(result, [])) == 1 and behind[0].kind in _ON_NUMBERS:
        (result,) = behind[0].outs
    added = all(op.kind in ("add", "accum") for op in readers.get(result, ())) and result not in graph.outs
    return Square(frozenset(values), result) if added else None


def add_up_once(graph: Graph, squares: Sequence[Value], namer: Namer) -> Graph:
    """Return the graph in which the last of these numbers is the sum of all of them over the replicas, and nothing
    stands for the others."""
    left, gone = list(squares), set[Value]()
    ops: list[Op] = []
    total: Value | None = None
    table: dict[Value, Value] = {}
    for op in graph.ops:
        ins = tuple(table.get(v, v) for v in op.ins if v not in gone)
        if len(ins) < len(op.ins):
            # An addition of nothing: what is left of it stands for its result.
            table |= dict.fromkeys(op.outs, ins[0]) if ins else {}
            gone |= set() if ins else set(op.outs)
            continue
        ops.append(op.with_ins(ins))
        for value in (v for v in op.outs if v in left):
            left.remove(value)
            total = value if total is None else _emit(ops, namer, "add", total, value)
            if left:
                gone.add(value)
            else:
                table[value] = _emit(ops, namer, "all_reduce", total, over=REPLICAS)
    # What the graph hands out keeps its name.
    names = {table[v]: v for v in graph.outs if v in table}
    return replace(graph, ops=tuple(op.renamed(names) for op in ops))


def _emit(ops: list[Op], namer: Namer, kind: str, *ins: Value, **attrs: str) -> Value:
    ops.append(make(kind, ins, [namer.fresh(f"{ins[0].name}.{kind}")], **attrs))
    return ops[-1].outs[0]
