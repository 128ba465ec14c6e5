"""Let values travel between stages with unlike meshes, or on other hosts.

In: a module of stage graphs in whole form. Out: the same, with edges between unlike meshes, and reshards where a value
leaves or arrives in another layout than its graph has it in.

Three ways are tried in this order (arrivals.py):

1. Takers of the same part are on one host, and other hosts send. Each is sent a share, and they gather the part.
2. Ranks at the same places of both teams have the same parts, or would have if the value were split over other axes,
   and takers are on one host. Each sends its part, and the stage that takes the value gathers what it needs. No edge is
   written.
3. Each rank is sent the tiles that it needs. So is a value that more hosts take than have it: they may hand it on.

Where an edge is needed for one value, it names all values from the one stage to the other, whole, with their layouts at
both ends (ir/sharding/tile_messages.py). The pass `communicate` chooses who sends.

Sums of parts are added up before they leave. Where they arrive, the first rank along the axes of the sum has them, and
the others have zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.ir.action_kinds import ACTION_KINDS
from penstock.ir.graph import Edge, Graph, Module, Namer, Value, graph_stage, substitute
from penstock.ir.ops import make
from penstock.ir.schedule import PER_BATCH, PHASES, TAKERS

from .arrivals import Landing, arrival, leaving


def between_meshes(module: Module) -> Module:
    """Let values travel between stages whose meshes or hosts differ."""
    graphs = dict(module.graphs)
    namer = Namer.of(*graphs.values())
    crossings = [_Crossing(module, phase, stage, value) for phase in PHASES for stage, value in _sent(module, phase)]
    for crossing in crossings:
        crossing.write(graphs, namer)
    edges = []
    for phase in PHASES:
        of_phase = [crossing for crossing in crossings if crossing.phase == phase]
        for ends in sorted({(c.source, target) for c in of_phase for target in c.arrivals}):
            ways = [c for c in of_phase if c.source == ends[0] and ends[1] in c.arrivals]
            if any(c.arrivals[ends[1]].in_tiles for c in ways):
                values = tuple(c.sent for c in ways)
                to = tuple(c.arrivals[ends[1]].type for c in ways)
                # Values that are whole on both sides travel in tiles where the edge says how they arrive.
                is_told = all(value.type.is_plain for value in values)
                edges.append(Edge(*ends, phase, values, to if is_told or to != tuple(v.type for v in values) else ()))
    return module.but(graphs=graphs, edges=tuple(edges)) if edges or graphs != module.graphs else module


def _sent(module: Module, phase: str) -> Iterator[tuple[int, Value]]:
    """Yield what stages hand out in a phase."""
    for stage in module.stages:
        graph = module.stage_graph(stage.index, phase)
        for value in graph.outs if graph is not None else ():
            yield stage.index, value


class _Crossing:
    """A value that a stage hands out, and how it arrives at each other stage that takes it."""

    def __init__(self, module: Module, phase: str, source: int, value: Value) -> None:
        self.phase, self.source, self.value = phase, source, value
        self._maker = f"s{source}.{phase}"
        self._takers = _takers(module, source, value, phase)
        mesh = module.mesh_of(source)
        targets = {stage: module.mesh_of(stage) for stage in self._takers if stage != source}
        unlike = any(target.axes != mesh.axes for target in targets.values())
        left = leaving(value.type, mesh) if unlike else value.type
        # What travels; it gets a name of its own where it is not what the graph makes.
        self.sent = Value(value.name, left)
        self.arrivals: dict[int, Landing] = {
            stage: arrival(left, value.type, (mesh, target), module.cluster) for stage, target in targets.items()
        }

    def write(self, graphs: dict[str, Graph], namer: Namer) -> None:
        """Rewrite the graphs at both ends where the value lies otherwise there."""
        value = self.value
        if self.sent.type != value.type:
            self.sent = Value(namer.fresh(f"{value.name}.sum"), self.sent.type)
            graphs[self._maker] = _returning(graphs[self._maker], value, self.sent)
        for stage, takers in self._takers.items():
            t = self.arrivals[stage].type if stage in self.arrivals else self.sent.type
            if t == value.type:
                continue
            part, arrived = Value(namer.fresh(f"{value.name}.part"), value.type), Value(self.sent.name, t)
            for name in [name for name in graphs if graph_stage(name) == stage and name != self._maker]:
                graphs[name] = _taking(graphs[name], value, part, arrived if name in takers else None)


def _takers(module: Module, source: int, value: Value, phase: str) -> dict[int, list[str]]:
    """Return the graphs that take a value that a stage hands out, by stage: those of other stages, and what stages hand
    out once per batch is for their own, too."""
    takers: dict[int, list[str]] = {}
    for stage in (s.index for s in module.stages if s.index != source or phase in PER_BATCH):
        for kind in TAKERS[phase]:
            graph = module.stage_graph(stage, kind)
            savers = [module.stage_graph(stage, saver) for saver in ACTION_KINDS[kind].saved_by]
            saved = any(value in saver.saved for saver in savers if saver is not None)
            if graph is not None and value in graph.ins and not saved:
                takers.setdefault(stage, []).append(graph.name)
    return takers


def _returning(graph: Graph, value: Value, left: Value) -> Graph:
    """Return a graph that hands out a value in another layout."""
    maker = next((op for op in graph.ops if value in op.outs), None)
    laid = make("reshard", [value], [left.name], maker.loc if maker is not None else "", to=str(left.type))
    return replace(graph, outs=substitute(graph.outs, {value: left}), ops=(*graph.ops, laid))


def _taking(graph: Graph, value: Value, part: Value, arrived: Value | None) -> Graph:
    """Return a graph that reads a part in place of a value, and makes it of what arrives where it takes that."""
    table = {value: part}
    ins, outs, saved = (substitute(values, table) for values in (graph.ins, graph.outs, graph.saved))
    ops = tuple(op.with_ins(substitute(op.ins, table)) if value in op.ins else op for op in graph.ops)
    if arrived is not None:
        loc = next((op.loc for op in graph.ops if value in op.ins), "")
        ops = (make("reshard", [arrived], [part.name], loc, to=str(part.type)), *ops)
        ins = substitute(ins, {part: arrived})
    return Graph(graph.name, ins, outs, ops, saved)
