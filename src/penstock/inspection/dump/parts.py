"""Parts of a module that are modules of their own: they print, parse and verify, so all commands that take IR files take them.

In: a module, and what of it is wanted. Out: a module without facts: what a part leaves out is missing
from it, so it claims nothing but its types.

    excerpt       some operations; what they take from others is an input of the graph, what nobody takes any more is a result
    part_of_stage the graphs of a stage with their variables, and the edges from and to it
    part_of_rank  those of its stage, and its own actions alone

Devices and stages stay as they are, for stages are numbered by their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.backends.interface import stage_graphs
from penstock.ir.graph import Graph, Module, Op, Value, Var, stage_vars
from penstock.ir.schedule import Schedule

# Of an operation in the graph of that name: whether it is wanted.
Wanted = Callable[[str, Op], bool]


def excerpt(module: Module, wanted: Wanted) -> Module:
    """The operations that are wanted; the module itself where all of them are. Graphs that have none are left out."""
    graphs = {name: _cut(graph, [op for op in graph.ops if wanted(name, op)]) for name, graph in module.graphs.items()}
    if all(graphs[name] is graph for name, graph in module.graphs.items()):
        return module
    kept = [graph for graph in graphs.values() if graph.ops]
    touched = {op.var for graph in kept for op in graph.ops if "var" in op.attrs}
    return _part(module, kept, {name: var for name, var in module.vars.items() if name in touched})


def _cut(graph: Graph, ops: list[Op]) -> Graph:
    if len(ops) == len(graph.ops):
        return graph
    made = dict.fromkeys(v for op in ops for v in op.outs)
    used = dict.fromkeys(v for op in ops for v in op.ins)
    ins = dict.fromkeys([*(v for v in graph.ins if v in used), *(v for v in used if v not in made)])
    outs = dict.fromkeys([*(v for v in graph.outs if v in made), *(v for v in made if v not in used)])
    known = {*ins, *made}
    return Graph(graph.name, tuple(ins), tuple(outs), tuple(ops), tuple(v for v in graph.saved if v in known))


def part_of_stage(module: Module, stage: int) -> Module:
    """What a stage computes."""
    part = _part(module, stage_graphs(module, stage), stage_vars(module, stage))
    return part.but(edges=tuple(edge for edge in module.edges if stage in (edge.src, edge.dst)))


def part_of_rank(module: Module, rank: int) -> Module:
    """What a rank computes, and when."""
    schedule = module.schedule
    assert schedule is not None, "a module without a schedule has no ranks"
    own = Schedule(schedule.name, schedule.microbatches, {rank: schedule.ranks[rank]})
    return part_of_stage(module, module.rank_stages()[rank]).but(schedule=own)


def _part(module: Module, graphs: Iterable[Graph], variables: dict[str, Var]) -> Module:
    own = {graph.name: graph for graph in graphs}
    taken: set[Value] = {v for graph in own.values() for v in graph.ins}
    given = {v.name for graph in own.values() for v in graph.outs}
    return Module(
        module.name,
        tuple(v for v in module.inputs if v in taken),
        tuple(name for name in module.outputs if name in given),
        module.cluster,
        module.meshes,
        module.stages,
        variables,
        own,
    )
