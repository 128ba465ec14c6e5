"""Parts of a module as modules of their own.

They print, parse and verify, so all commands that take IR files take them.

In: a module and the wanted part of it. Out: a module without facts: it lacks operations, so it claims nothing but its
types.

    excerpt       some operations; their operands from others are inputs of the graph, unused results are its outputs
    part_of_stage the graphs of a stage with their variables, and the edges from and to it
    part_of_rank  the part of its stage, with the actions of the rank alone

Devices and stages stay as they are, because stages are numbered by their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.backends.interface import stage_graphs
from penstock.ir.graph import Graph, Module, Op, Value, Var, stage_vars
from penstock.ir.schedule import Schedule

# Says whether an operation of the graph with that name is wanted.
Wanted = Callable[[str, Op], bool]


def excerpt(module: Module, wanted: Wanted) -> Module:
    """Return a module of the wanted operations, or the module itself where all are wanted.

    Empty graphs are left out.
    """
    graphs = {name: _cut(graph, [op for op in graph.ops if wanted(name, op)]) for name, graph in module.graphs.items()}
    if all(graphs[name] is graph for name, graph in module.graphs.items()):
        return module
    nonempty = [graph for graph in graphs.values() if graph.ops]
    touched = {op.var for graph in nonempty for op in graph.ops if "var" in op.attrs}
    return _part(module, nonempty, {name: var for name, var in module.vars.items() if name in touched})


def _cut(graph: Graph, ops: list[Op]) -> Graph:
    if len(ops) == len(graph.ops):
        return graph
    results = dict.fromkeys(v for op in ops for v in op.outs)
    used = dict.fromkeys(v for op in ops for v in op.ins)
    ins = dict.fromkeys([*(v for v in graph.ins if v in used), *(v for v in used if v not in results)])
    outs = dict.fromkeys([*(v for v in graph.outs if v in results), *(v for v in results if v not in used)])
    known = {*ins, *results}
    return Graph(graph.name, tuple(ins), tuple(outs), tuple(ops), tuple(v for v in graph.saved if v in known))


def part_of_stage(module: Module, stage: int) -> Module:
    """Return a module of the graphs, variables and edges of a stage."""
    part = _part(module, stage_graphs(module, stage), stage_vars(module, stage))
    return part.but(edges=tuple(edge for edge in module.edges if stage in (edge.src, edge.dst)))


def part_of_rank(module: Module, rank: int) -> Module:
    """Return a module of the stage of a rank and the actions of that rank."""
    schedule = module.schedule
    assert schedule is not None, "a module without a schedule has no ranks"
    actions = Schedule(schedule.name, schedule.microbatches, {rank: schedule.ranks[rank]})
    return part_of_stage(module, module.rank_stages()[rank]).but(schedule=actions)


def _part(module: Module, graphs: Iterable[Graph], variables: dict[str, Var]) -> Module:
    by_name = {graph.name: graph for graph in graphs}
    used: set[Value] = {v for graph in by_name.values() for v in graph.ins}
    results = {v.name for graph in by_name.values() for v in graph.outs}
    return Module(
        module.name,
        tuple(v for v in module.inputs if v in used),
        tuple(name for name in module.outputs if name in results),
        module.cluster,
        module.meshes,
        module.stages,
        variables,
        by_name,
    )
