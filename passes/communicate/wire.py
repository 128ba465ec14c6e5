"""Send activations and gradients between stages in 16 bits: the pass `wire`.

In: a module of stage graphs. Out: the same with casts on both sides of every boundary.

A float32 value %x that a stage returns for another one is returned as %x.bf16 (or %x.f16), rounded where it is made.
Each stage that takes it widens it again, and computes with and saves %x.wide. So the text says what travels and where
it is rounded. Messages have half the bytes in every count that is made of them. The casts are fused into the kernels
around them. The stage that makes a value goes on with the value that was not rounded.

Values exchanged once per batch (parts of gradients, norms) stay float32, as do integers and values that are in 16 bits
already. An output of the module that also travels is returned in both forms.

Known limits: each boundary rounds once, so that results depend on where a model is cut; f16 has a narrow range:
gradients below 6e-8 vanish and values above 65504 overflow, where bf16 loses digits only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import ACTION_KINDS
from penstock.ir.graph import Edge, Graph, Module, Namer, Op, Value, substitute
from penstock.ir.schedule import PER_BATCH, PHASES
from penstock.ir.sharding.between_meshes import edge_values
from penstock.ir.types import TensorType
from penstock.support.errors import UsageError
from penstock.support.words import counted, shown_bytes

from .communicate import find_edges, is_connected

WIRES = ("f32", "bf16", "f16")
_WIDE = "f32"
# The phases of a microbatch, each with the graphs of a stage that can use a value received in it.
_KNOW = {
    phase: (phase, *(kind for kind, row in ACTION_KINDS.items() if phase in row.saved_by))
    for phase in PHASES
    if phase not in PER_BATCH
}


@dataclass(frozen=True, slots=True)
class WireOptions:
    """Options of `wire`. `dtype` is the element type in which float32 values travel: bf16 or f16; f32 changes
    nothing."""

    dtype: str = "bf16"


def check_wire(name: str) -> None:
    """Raise UsageError unless values can travel in this element type."""
    if name not in WIRES:
        raise UsageError(f"values cannot travel as {name!r}, expected one of {', '.join(WIRES)}")


def wire(module: Module, options: WireOptions) -> Module:
    """Send activations and gradients between stages in 16 bits."""
    check_wire(options.dtype)
    if options.dtype == _WIDE:
        return module
    if is_connected(module):
        raise UsageError("sends and receives are there already", where="wire", hint="run the pass before communicate")
    edges = [edge for edge in find_edges(module) if edge.phase in _KNOW]
    sent = [value for edge in edges for value in edge_values(module, edge, edge.src)]
    moved = {value.name: value for value in sent if value.type.dtype == _WIDE}
    if not moved:
        return module
    namer = Namer.of(*module.graphs.values())
    low = {
        name: Value(namer.fresh(f"{name}.{options.dtype}"), v.type._replace(dtype=options.dtype))
        for name, v in moved.items()
    }
    wide = _wide_forms(edges, moved, namer)
    graphs = dict(module.graphs)
    for stage in module.stages:
        for phase, kinds in _KNOW.items():
            comes = {
                v.name for edge in edges if (edge.dst, edge.phase) == (stage.index, phase) for v in edge.values
            } & moved.keys()
            goes = {
                v.name for edge in edges if (edge.src, edge.phase) == (stage.index, phase) for v in edge.values
            } & moved.keys()
            for kind in kinds:
                graph = module.stage_graph(stage.index, kind)
                if graph is not None:
                    changed = _widened(graphs[graph.name], comes, low, wide.get(stage.index, {}), first=kind == phase)
                    graphs[graph.name] = _rounded(changed, goes, low, module.outputs) if kind == phase else changed
    before = sum(value.type.nbytes for value in moved.values())
    text = f"{counted(len(moved), 'value')}, {shown_bytes(before)} a microbatch, travel as {options.dtype}"
    # Edges between unlike meshes, which are there already.
    written = tuple(_rounded_edge(edge, low) if edge.phase in _KNOW else edge for edge in module.edges)
    return module.but(graphs=graphs, edges=written).noted("wire", text)


def _wide_forms(edges: Sequence[Edge], moved: Mapping[str, Value], namer: Namer) -> dict[int, dict[str, Value]]:
    """Name the wide form of each value on each stage that takes it: those of several stages apart."""
    forms: dict[int, dict[str, Value]] = {}
    for name, value in moved.items():
        takers = sorted({edge.dst for edge in edges if any(v.name == name for v in edge.values)})
        for stage in takers:
            form = namer.fresh(f"{name}.wide" if len(takers) == 1 else f"{name}.wide{stage}")
            forms.setdefault(stage, {})[name] = Value(form, value.type)
    return forms


def _rounded_edge(edge: Edge, low: Mapping[str, Value]) -> Edge:
    """Return an edge whose values travel in rounded form, and lie as they did."""
    forms = [low.get(value.name, value) for value in edge.values]
    values = (
        Value(form.name, value.type._replace(dtype=form.type.dtype))
        for value, form in zip(edge.values, forms, strict=True)
    )
    to = (t._replace(dtype=form.type.dtype) for t, form in zip(edge.to, forms, strict=False))
    return replace(edge, values=tuple(values), to=tuple(to))


def round_trips(unsplit: Module, parts: Module) -> Module:
    """Return the uncut model with the roundings of its stage graphs: each value that travels in `parts` is rounded and
    widened where it is made.

    The numbers are not the same, because the stage that makes a value does not round it. They are about as far from
    those without roundings.
    """
    lows = {
        v.name.removesuffix(f".{v.type.dtype}"): v.type.dtype
        for e in parts.edges
        for v in e.values
        if v.name.endswith(f".{v.type.dtype}")
    }
    graphs: dict[str, Graph] = {}
    for name, graph in unsplit.graphs.items():
        namer, new, ops = Namer.of(graph), dict[Value, Value](), list[Op]()
        for op in graph.ops:
            ops.append(op.with_ins(substitute(op.ins, new)))
            for value in (v for v in op.outs if v.name in lows and v.type.dtype == _WIDE):
                low = Value(namer.fresh(f"{value.name}.low"), value.type._replace(dtype=lows[value.name]))
                new[value] = Value(namer.fresh(f"{value.name}.wide"), value.type)
                ops += [
                    Op("cast", (value,), (low,), {"dtype": low.type.dtype}),
                    Op("cast", (low,), (new[value],), {"dtype": _WIDE}),
                ]
        graphs[name] = Graph(graph.name, graph.ins, graph.outs, tuple(ops), graph.saved)
    return unsplit.but(graphs=graphs)


def travelling(type: TensorType, dtype: str) -> int:
    """Return the bytes of an activation or gradient of this type in a message."""
    return type._replace(dtype=dtype).nbytes if type.dtype == _WIDE else type.nbytes


def _widened(
    graph: Graph, comes: Collection[str], low: Mapping[str, Value], wide: Mapping[str, Value], *, first: bool
) -> Graph:
    """Use the wide form of received values in a graph. The `first` graph of the stage takes the low form, and widens
    it."""
    names = [value.name for value in graph.ins if value.name in comes]
    if not names:
        return graph
    # Parts of a value may have other sizes here than where it is made.
    new = {v.name: Value(wide[v.name].name, v.type) for v in graph.ins if v.name in comes}
    narrow = {name: Value(low[name].name, v.type._replace(dtype=low[name].type.dtype)) for name, v in new.items()}

    def renamed(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(new.get(value.name, value) for value in values)

    ops = tuple(op.with_ins(renamed(op.ins)) for op in graph.ops)
    ins = tuple((narrow if first else new)[value.name] if value.name in new else value for value in graph.ins)
    if first:
        ops = (*(Op("cast", (narrow[name],), (new[name],), {"dtype": _WIDE}) for name in names), *ops)
    return Graph(graph.name, ins, renamed(graph.outs), ops, renamed(graph.saved))


def _rounded(graph: Graph, goes: Collection[str], low: Mapping[str, Value], outputs: Collection[str]) -> Graph:
    """Return values for other stages in rounded form, each rounded right after it is made."""
    ops: list[Op] = []
    for op in (None, *graph.ops):  # the graph's inputs first
        defined = graph.ins if op is None else op.outs
        ops += [] if op is None else [op]
        ops += [
            Op("cast", (v,), (low[v.name],), {"dtype": low[v.name].type.dtype}, op.loc if op else "")
            for v in defined
            if v.name in goes
        ]
    outs: list[Value] = []
    for value in graph.outs:
        outs += [value] if value.name not in goes or value.name in outputs else []
        outs += [low[value.name]] if value.name in goes else []
    return Graph(graph.name, graph.ins, tuple(outs), tuple(ops), graph.saved)
