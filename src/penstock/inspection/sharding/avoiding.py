"""Given layouts that would avoid a collective, found by trying them.

In: the whole program of a bundle, with layouts and reshards; its mesh and the layouts that it was given; the values
that collectives result in. Out: for each of them, layouts that, given before all others, leave no exchange there.

A collective moves something because parameters, inputs and values with given layouts are split that lie behind it.
From the value back, as far as tensors are split over the same axes, these are collected. What is tried is to have all
of them whole along these axes, and then each alone. A trial runs the pass `shard` over the program. Values of layers
that are alike, whose names differ in numbers only, are tried once or twice. Other exchanges may take the place of one
that is avoided.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape

from penstock.ir.attrs import Attr
from penstock.ir.graph import REPLICAS, Graph, Module, Op, Value
from penstock.ir.sharding.paths import moved_bytes
from penstock.ir.types import TensorType
from penstock.passes.sharding.given import parse_mesh
from penstock.passes.sharding.shard import ShardOptions, given_layouts, shard
from penstock.support.errors import UsageError

# The most layouts that are given together, and of them tried alone, the most tries of values that are alike, and the
# most operations of a program that is tried.
_TOGETHER, _ALONE, _TRIES, _MOST = 6, 4, 2, 6000


@dataclass(frozen=True)
class _Behind:
    """Parameters and inputs behind a value, each with the layout in which nothing of it is split over the axes."""

    texts: tuple[str, ...]


def avoiding_layouts(
    whole: Module, mesh: str, given: Sequence[str], results: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return layouts that would avoid the exchange behind each value; none for values that no layout helps."""
    sizes = {axis: size for axis, size in parse_mesh(mesh).items() if axis != REPLICAS}
    if sum(len(graph.ops) for graph in whole.graphs.values()) > _MOST:
        return {}
    plain = _without_layouts(whole)
    exchanges = _exchanges(whole, sizes)
    laid = given_layouts(plain, ShardOptions(mesh, tuple(given)))
    tracer = _Tracer(whole, {node[1:] for node in laid if node.startswith("%")})
    chosen: dict[str, tuple[int, ...] | None] = {}
    tries: dict[str, int] = {}
    avoiding: dict[str, tuple[str, ...]] = {}
    for result in results:
        if result not in exchanges:
            continue
        behind = tracer.behind(exchanges[result])
        likeness = re.sub(r"\d+", "#", result)
        if chosen.get(likeness) is None and tries.get(likeness, 0) < _TRIES:
            tries[likeness] = tries.get(likeness, 0) + 1
            chosen[likeness] = _try(plain, mesh, given, result, behind, sizes)
        numbers = chosen[likeness]
        if numbers is not None and all(number < len(behind.texts) for number in numbers):
            avoiding[result] = tuple(behind.texts[number] for number in numbers)
    return avoiding


def _try(
    plain: Module, mesh: str, given: Sequence[str], result: str, behind: _Behind, sizes: Mapping[str, int]
) -> tuple[int, ...] | None:
    """Return the places of the layouts that avoid an exchange: of one alone, else of all; None where they do not."""
    every = tuple(range(len(behind.texts)))

    def avoids(numbers: Sequence[int]) -> bool:
        texts = [behind.texts[number] for number in numbers]
        names = {text.rpartition("=")[0] for text in texts}
        others = [text for text in given if text.rpartition("=")[0] not in names]
        try:
            laid = shard(plain, ShardOptions(mesh, (*texts, *others)))
        except UsageError:  # what was given needs these tensors split
            return False
        return result not in _exchanges(laid, sizes)

    if not every or len(every) > _TOGETHER or not avoids(every):
        return None
    return next(((number,) for number in every[:_ALONE] if len(every) > 1 and avoids((number,))), every)


def _exchanges(module: Module, sizes: Mapping[str, int]) -> dict[str, Op]:
    """Return the reshards that move something, by the value that they result in."""
    return {
        op.outs[0].name: op
        for graph in module.graphs.values()
        for op in graph.ops
        if op.kind == "reshard" and moved_bytes(op.ins[0].type, op.outs[0].type, sizes) > 0
    }


class _Tracer:
    """The makers of all values of a program, and the layouts of what they read."""

    def __init__(self, module: Module, given: set[str]) -> None:
        self.module, self.given = module, given
        self.makers = {value.name: op for graph in module.graphs.values() for op in graph.ops for value in op.outs}
        self.inputs = {value.name: value.type for value in module.data_inputs}

    def behind(self, reshard: Op) -> _Behind:
        source = reshard.ins[0]
        axes = {*source.type.partial} or {axis for split in source.type.axes for axis in split}
        texts: dict[str, None] = {}
        seen, queue = {source.name}, [source]
        while queue:
            value = queue.pop(0)
            maker = self.makers.get(value.name)
            if value.name in self.inputs:
                texts[_whole_along(value.name, self.inputs[value.name], axes)] = None
            elif maker is not None and maker.kind == "read":
                texts[_whole_along(maker.var, self.module.vars[maker.var].type, axes)] = None
            elif value.name in self.given:
                texts[_whole_along(value.name, value.type, axes)] = None
                continue
            for operand in maker.ins if maker is not None else ():
                if operand.name not in seen and axes & _all_axes(operand.type):
                    seen.add(operand.name)
                    queue.append(operand)
        return _Behind(tuple(texts))


def _all_axes(t: TensorType) -> set[str]:
    return {*t.partial, *(axis for split in t.axes for axis in split)}


def _whole_along(name: str, t: TensorType, axes: set[str]) -> str:
    """Return the layout of a tensor without these axes, as a text."""
    dims = []
    for dim in range(t.rank):
        kept = [axis for axis in t.axes_of(dim) if axis not in axes]
        blocks = f"{t.blocks_of(dim)}*" if kept and t.blocks_of(dim) != 1 else ""
        dims.append(blocks + "".join(f"/{axis}" for axis in kept) or "_")
    return f"{escape(name)}=[{','.join(dims)}]"


# ------------------------------------------------------------------------------------------------ without layouts


def _without_layouts(module: Module) -> Module:
    """Return the program before `shard`: without axes and reshards."""
    names = _names_before(module)
    graphs = {name: _plain_graph(graph, names) for name, graph in module.graphs.items()}
    return module.but(
        graphs=graphs,
        vars={name: replace(var, type=var.type.plain) for name, var in module.vars.items()},
        inputs=tuple(Value(v.name, v.type.plain) for v in module.inputs),
        facts=tuple(fact for fact in module.facts if fact != "sharded"),
    )


def _names_before(module: Module) -> dict[str, str]:
    """Return the names of values that reshards made or took: of both, the one that is the value's own."""
    names: dict[str, str] = {}
    for op in (op for graph in module.graphs.values() for op in graph.ops if op.kind == "reshard"):
        source, result = op.ins[0].name, op.outs[0].name
        if source.startswith(f"{result}."):
            names[source] = result
        else:
            names[result] = source
    return names


def _plain_graph(graph: Graph, names: Mapping[str, str]) -> Graph:
    def plain(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(Value(_own(value.name, names), value.type.plain) for value in values)

    ops = [
        Op(op.kind, plain(op.ins), plain(op.outs), dict(_attributes(op, names)), op.loc)
        for op in graph.ops
        if op.kind != "reshard"
    ]
    saved = tuple(dict.fromkeys(plain(graph.saved)))
    return Graph(graph.name, tuple(dict.fromkeys(plain(graph.ins))), plain(graph.outs), tuple(ops), saved)


def _own(name: str, names: Mapping[str, str]) -> str:
    while name in names:
        name = names[name]
    return name


def _attributes(op: Op, names: Mapping[str, str]) -> Iterator[tuple[str, Attr]]:
    for key, value in op.attrs.items():
        yield key, _own(value, names) if key == "of" and isinstance(value, str) else value
