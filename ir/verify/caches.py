"""The checker of caches, part of the fact `typed`: a forward graph alone stores into them and looks at them.

In: a module. Out: problems. What `put` gives is its variable and no tensor of its own, so it may go to `attend` alone.
One operation of a graph stores into a cache: so nothing depends on an order that values do not show.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.action_kinds import FORWARD
from penstock.ir.graph import CACHE, Graph, Module, Value, graph_kind, touching_ops

from .problems import Problem, op_place, op_window

# The operands of `attend` that are caches.
_LOOKED_AT = (1, 2)


def check_caches(module: Module) -> Iterator[Problem]:
    """Check every use of a cache."""
    caches = {name for name, var in module.vars.items() if var.role == CACHE}
    trained = next((name for name in module.graphs if graph_kind(name) != FORWARD), None)
    for name in sorted(caches):
        if module.vars[name].init != "zeros":
            yield Problem(f"@{name}", f"is a cache with first elements from {module.vars[name].init}, expected zeros")
        if trained is not None:
            yield Problem(f"@{name}", f"is a cache, but the module trains: it has @{trained}")
    for graph in module.graphs.values():
        yield from _check_graph(module, graph, caches)


def _check_graph(module: Module, graph: Graph, caches: set[str]) -> Iterator[Problem]:
    stored: dict[Value, str] = {}
    for i, op in touching_ops(graph):
        if op.kind != "put":
            if op.var in caches:
                what = f"{op.kind} of @{op.var}, a cache; only put may touch it"
                yield Problem(op_place(graph, i), what, op_window(graph, i))
            continue
        if op.var in module.vars and op.var not in caches:
            what = f"puts into @{op.var}, a {module.vars[op.var].role}; expected a cache"
            yield Problem(op_place(graph, i), what, op_window(graph, i))
        if op.var in stored.values():
            what = f"@{op.var} was already put into above; expected one put for a cache in a graph"
            yield Problem(op_place(graph, i), what, op_window(graph, i))
        stored |= dict.fromkeys(op.outs, op.var)
    if stored or any(op.kind == "attend" for op in graph.ops):
        yield from _check_readers(graph, stored)


def _check_readers(graph: Graph, stored: dict[Value, str]) -> Iterator[Problem]:
    for i, op in enumerate(graph.ops):
        for number, value in enumerate(op.ins):
            looks = op.kind == "attend" and number in _LOOKED_AT
            if value in stored and not looks:
                what = f"takes %{value.name}, the cache @{stored[value]} itself; expected attend alone to take it"
                yield Problem(op_place(graph, i), what, op_window(graph, i))
            elif looks and value not in stored:
                what = f"looks at %{value.name}, which no put of this graph gives"
                yield Problem(op_place(graph, i), what, op_window(graph, i))
    for what, values in (("returns", graph.outs), ("saves", graph.saved)):
        for value in values:
            if value in stored:
                yield Problem(f"@{graph.name}", f"{what} %{value.name}, which is the cache @{stored[value]} itself")
