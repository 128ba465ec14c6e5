"""The operations of a graph that its results and effects need, what comes from state alone, and what changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .graph import Graph, Op, Value, touched_vars, written_vars
from .ops import OPS


def live_ops(ops: Sequence[Op], results: Iterable[Value]) -> list[Op]:
    """Return the operations that `results` and changes of variables depend on, in order."""
    needed = set(results)
    live = []
    for op in reversed(ops):
        changes = OPS[op.kind].effect and op.kind != "read"
        if changes or not needed.isdisjoint(op.outs):
            live.append(op)
            needed.update(op.ins)
    return live[::-1]


def drop_dead(graph: Graph) -> Graph:
    """Return the graph without operations that no result, saved value or effect needs."""
    ops = live_ops(graph.ops, (*graph.outs, *graph.saved))
    return graph if len(ops) == len(graph.ops) else Graph(graph.name, graph.ins, graph.outs, tuple(ops), graph.saved)


def from_state_alone(graph: Graph) -> set[Value]:
    """Return the values that depend on constants and variables, but on no input and on nothing that the graph itself
    changes. They can be computed at any place and time."""
    values: set[Value] = set()
    moving = written_vars(graph)
    for op in graph.ops:
        if (op.kind == "read" and op.var not in moving) or (not OPS[op.kind].effect and values.issuperset(op.ins)):
            values.update(op.outs)
    return values


def changed_vars(graphs: Iterable[Graph]) -> set[str]:
    """Return the variables whose values graphs change. A cache is only filled: what is made of other variables stays
    right."""
    return {name for graph in graphs for name in touched_vars(graph, "write", "accum", "take")}
