"""Split tensors over the axes of a mesh: the pass `shard` gives every value and variable a layout.

In: the graphs of a whole program, a mesh, and layouts by pattern. Out: the same program in which types say how tensors
lie, with reshards. It means what it meant: axes in types, and reshards, change no number. Programs name axes and no
sizes; the sizes of the mesh decide what divides and what is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.ir.graph import REPLICAS, Graph, Module, Value
from penstock.passes.sharding.styles.modules import about_tensors
from penstock.support.errors import UsageError

from .given import Layout, chosen_layouts, parse_given, parse_mesh
from .presets import preset_layouts
from .propagate import Suggestions
from .resolve import Resolution
from .written import PRESET, is_preset

_ORDER = ("F", "main", "B", "N", "U")


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """Options of `shard`. `mesh` has the axes of a stage's mesh, such as `dp=2,tp=2`; `given` the layouts of tensors,
    `PATTERN=[_,/tp]`, a text about modules (styles/modules.py) or `preset:NAME` each; of several that fit a name the
    first counts."""

    mesh: str = ""
    given: tuple[str, ...] = ()


def shard(module: Module, options: ShardOptions) -> Module:
    """Give every tensor a layout on the mesh: as given, spread to what can lie alike, with reshards in between."""
    if not options.mesh:
        if options.given:
            raise UsageError("layouts are given, but no mesh", hint="name its axes, such as --mesh tp=2")
        return module
    sizes = {axis: size for axis, size in parse_mesh(options.mesh).items() if axis != REPLICAS}
    graphs = graphs_in_order(module)
    layouts = given_layouts(module, options)
    suggested = Suggestions(module, graphs, layouts, sizes)
    suggested.spread()
    resolution = Resolution(module, graphs, suggested)
    laid = {graph.name: resolution.graph(graph) for graph in graphs}
    inputs = tuple(
        Value(v.name, resolution.laid[v.name].type if v.name in resolution.laid else v.type) for v in module.inputs
    )
    return module.but(
        graphs={name: laid[name] for name in module.graphs},
        vars={name: replace(var, type=resolution.var_types[name]) for name, var in module.vars.items()},
        inputs=inputs,
    )


def graphs_in_order(module: Module) -> list[Graph]:
    """Return the graphs of a whole program, that of the forward pass first."""
    order = [name for name in _ORDER if name in module.graphs]
    return [module.graphs[name] for name in (*order, *(n for n in module.graphs if n not in order))]


def given_layouts(module: Module, options: ShardOptions) -> dict[str, Layout]:
    """Return the layouts that options give: of variables, as `@name`, and of values of the forward graph, as
    `%name`."""
    mesh = parse_mesh(options.mesh)
    sizes = {axis: size for axis, size in mesh.items() if axis != REPLICAS}
    graph = next((module.graphs[name] for name in _ORDER if name in module.graphs), None)
    values = {o.name: o.type for op in graph.ops for o in op.outs} if graph is not None else {}
    written = [text for text in options.given if not is_preset(text)]
    entries = parse_given(about_tensors(module, graph, written) if graph is not None else written)
    layouts = chosen_layouts(module, values, entries, mesh)
    for text in options.given:
        if is_preset(text):
            layouts = preset_layouts(module, text.removeprefix(PRESET), sizes) | layouts
    return layouts
