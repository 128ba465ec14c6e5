"""Layouts by name: what `preset:NAME` stands for in a given model, found by its structure.

    megatron    pairs of products by parameters between which every dimension can be split: the columns of the first
                and the rows of the second are, so that each pair costs one sum. Large vocabularies are split as well
    sequence    the same, and what lies between the pairs is split along the dimension before the last
    batch       inputs are split along their first dimension
    spatial     images are split along their height: inputs that convolutions take, along the first spatial dimension
    context     inputs are split along the positions that attention looks at, in folded order where it is causal

A preset uses the axis `tp`, or the only axis of the mesh beside dp; `context` uses the axis `cp` where there is one.
Known limits: only products with a parameter as their second operand are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

from penstock.ir.graph import MICROBATCH, PARAM, REPLICAS, Graph, Module, Op, Value
from penstock.ir.ops import OPS
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import UNSPLIT, Split, read_split, split_of
from penstock.support.errors import UsageError
from penstock.support.words import itemised, meant

from .forms import FOLDED
from .given import Layout
from .propagate import fits, is_alone
from .rings.ring import POSITIONS

# Rows of a table, or columns of the last product, from which a vocabulary is split.
VOCABULARY = 4096
# The axes that presets use which may stand beside others.
_OWN_AXES = {"context": "cp"}


def axis_for(sizes: Mapping[str, int], preset: str) -> str:
    """Return the axis that a preset splits over."""
    axes = [axis for axis in sizes if axis != REPLICAS]
    for axis in (_OWN_AXES.get(preset, "tp"), "tp"):
        if axis in axes:
            return axis
    if len(axes) != 1:
        raise UsageError(
            f"preset {preset} needs one axis beside {REPLICAS}, the mesh has {', '.join(axes) or 'none'}",
            hint="name the axis tp, or give layouts",
        )
    return axes[0]


def preset_layouts(module: Module, preset: str, sizes: Mapping[str, int]) -> dict[str, Layout]:
    """Return the layouts of a preset, by node: `@name` of variables, `%name` of values."""
    if preset not in PRESETS:
        raise UsageError(
            f"there is no preset {preset!r}", hint=meant(preset, PRESETS) or f"there are {', '.join(PRESETS)}"
        )
    graph = module.graphs.get("F") or module.graphs["main"]
    return PRESETS[preset](_Model(module, graph, axis_for(sizes, preset), dict(sizes)))


@dataclass(slots=True)
class _Columns:
    """Parameters whose columns a trial splits, with the split of the dimension."""

    splits: dict[str, tuple[int, Split]] = field(default_factory=dict)


class _Model:
    """The forward graph of a model, and its products by parameters."""

    def __init__(self, module: Module, graph: Graph, axis: str, sizes: dict[str, int]) -> None:
        self.module, self.graph, self.axis, self.sizes = module, graph, axis, sizes
        self.makers = graph.producers()
        self.reads = {op.outs[0]: op.var for op in graph.ops if op.kind == "read"}
        self.rows: dict[str, Op] = {}

    def parameter(self, value: Value) -> str | None:
        """Return the parameter that a value is, perhaps in another element type."""
        while (op := self.makers.get(value)) is not None and op.kind == "cast":
            value = op.ins[0]
        name = self.reads.get(value)
        return name if name is not None and self.module.vars[name].role == PARAM else None

    def products(self) -> list[tuple[Op, str]]:
        listed = [(op, self.parameter(op.ins[1])) for op in self.graph.ops if op.kind == "matmul"]
        return [(op, name) for op, name in listed if name is not None]

    def layout(self, name: str, dim: int, split: Split) -> Layout:
        rank = self.module.vars[name].type.rank
        return tuple(split if i == dim else UNSPLIT for i in range(rank))

    def pairs(self) -> dict[str, Layout]:
        """Return the layouts of all pairs of products: columns of the first, rows of the second."""
        layouts: dict[str, Layout] = {}
        for op, name in self.products():
            columns = _Columns()
            lhs = op.ins[0]
            dim = lhs.type.rank - (2 if op.attrs.get("ta") else 1)
            if f"@{name}" in layouts or not self._follow(lhs, dim, Split((self.axis,)), columns, set()):
                continue
            if not columns.splits or any(f"@{other}" in layouts for other in columns.splits):
                continue
            for other, (at, split) in columns.splits.items():
                layouts[f"@{other}"] = self.layout(other, at, split)
            inner = op.ins[1].type.rank - (1 if op.attrs.get("tb") else 2)
            layouts[f"@{name}"] = self.layout(name, inner, Split((self.axis,)))
            self.rows[name] = op
        return layouts

    def _follow(self, value: Value, dim: int, split: Split, columns: _Columns, seen: set[tuple[str, int]]) -> bool:
        """Follow a split dimension back to columns of products by parameters; return whether all ways lead there."""
        if (value.name, dim) in seen:
            return True
        seen.add((value.name, dim))
        op = self.makers.get(value)
        if op is None or (op.kind == "read" and self.parameter(value) is None):
            return False
        # Of constants, such as the places that dropout draws for, each rank takes its part; that moves nothing.
        if op.kind in ("read", "const", "iota"):
            return True
        rule, parts = rule_of(op), self.sizes[self.axis]
        place = next(i for i, v in enumerate(op.outs) if v == value)
        factors = rule.outs[place][dim]
        read = read_split(factors, split, rule.sizes, parts) if factors else None
        if read is None:
            return False
        name, of_name = read
        if not rule.may_split(name) or rule.leaves_sums(name) or rule.has_own_form(name):
            return False
        if not fits(of_name, rule.sizes[name], self.sizes, is_alone(rule, name, factors)):
            return False
        operands = [(i, d) for i, dims in enumerate(rule.ins) for d, listed in enumerate(dims) if name in listed]
        if op.kind == "matmul" and (weight := self.parameter(op.ins[1])) is not None and all(i for i, _ in operands):
            columns.splits[weight] = (operands[0][1], of_name)
            return True
        for i, d in operands:
            before = split_of(rule.ins[i][d], {name: of_name}, rule.sizes)
            if before is None or not self._follow(op.ins[i], d, before, columns, seen):
                return False
        return bool(operands)

    def vocabulary(self, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
        """Return the layouts of large tables, and of the last product where it has many columns."""
        added: dict[str, Layout] = {}
        enough = max(VOCABULARY, prod(self.sizes.values()))
        for op in self.graph.ops:
            name = self.parameter(op.ins[0]) if op.kind == "gather" else None
            if name and op.ins[0].type.rank == 2 and op.attrs.get("axis", 0) == 0 and op.ins[0].type.dims[0] >= enough:
                added[f"@{name}"] = self.layout(name, 0, Split((self.axis,)))
        products = self.products()
        if products:
            op, name = products[-1]
            dim = op.ins[1].type.rank - (2 if op.attrs.get("tb") else 1)
            if op.outs[0].type.dims[-1] >= enough and f"@{name}" not in layouts:
                added.setdefault(f"@{name}", self.layout(name, dim, Split((self.axis,))))
        return {node: layout for node, layout in added.items() if node not in layouts}

    def positions(self, value: Value, dim: int, split: Split) -> dict[str, tuple[int, Split]]:
        """Return the inputs of which a dimension of a value is one, whatever is computed of them in between, with that
        dimension and how it is split."""
        inputs: dict[str, tuple[int, Split]] = {}
        ways, seen = [(value, dim, split)], set[tuple[str, int]]()
        while ways:
            value, dim, split = ways.pop()
            op = self.makers.get(value)
            if (value.name, dim) in seen:
                continue
            seen.add((value.name, dim))
            if op is None:
                inputs[value.name] = dim, split
                continue
            rule = rule_of(op)
            factors = rule.outs[op.outs.index(value)][dim]
            read = read_split(factors, split, rule.sizes, 1) if factors else None
            if read is None or not rule.may_split(read[0]):
                continue
            for v, dimensions in zip(op.ins, rule.ins, strict=True):
                for d, listed in enumerate(dimensions):
                    before = split_of(listed, {read[0]: read[1]}, rule.sizes) if read[0] in listed else None
                    if before is not None:
                        ways.append((v, d, before))
        return {name: at for name, at in inputs.items() if any(v.name == name for v in self.module.data_inputs)}

    def images(self) -> dict[str, int]:
        """Return the inputs that convolutions take, with the dimension that is the first spatial one there: as they
        are, or behind views and operations on single elements."""
        images: dict[str, int] = {}
        ways = [(op.ins[0], 2) for op in self.graph.ops if op.kind == "conv"]
        while ways:
            value, dim = ways.pop()
            op = self.makers.get(value)
            if op is None:
                images.setdefault(value.name, dim)
            elif OPS[op.kind].family in ("elementwise", "layout"):
                rule = rule_of(op)
                factors = rule.outs[0][dim]
                ways += [
                    (v, d)
                    for v, dims in zip(op.ins, rule.ins, strict=True)
                    for d, listed in enumerate(dims)
                    if factors and listed == factors
                ]
        return {name: dim for name, dim in images.items() if any(v.name == name for v in self.module.data_inputs)}


def _context(model: _Model) -> dict[str, Layout]:
    count = model.sizes[model.axis]
    places = [place for op in model.graph.ops if (place := _positions_of(op, model.axis)) is not None]
    # Folded order counts more where an input serves both kinds: attention to all positions may take it, too.
    places.sort(key=lambda place: place[2].blocks < 0)
    inputs = {name: split for place in places for name, split in model.positions(*place).items()}
    if not inputs:
        raise UsageError(
            "preset context finds no attention of a sequence to itself whose positions are a dimension of an input; "
            "attention with dropout is none",
            hint=f"give layouts, such as --shard 'tokens=[_,/{model.axis}]'",
        )
    types = {v.name: v.type for v in model.module.inputs}
    uneven = [
        f"%{name} has {types[name].dims[dim]} positions, which are not {abs(split.blocks) * count} equal parts"
        for name, (dim, split) in inputs.items()
        if not fits(split, types[name].dims[dim], model.sizes, alone=False)
    ]
    if uneven:
        raise UsageError("preset context cannot split:" + itemised(uneven))
    return {
        f"%{name}": tuple(split if i == dim else None for i in range(types[name].rank))
        for name, (dim, split) in inputs.items()
    }


def _positions_of(op: Op, axis: str) -> tuple[Value, int, Split] | None:
    """Return the queries of an attention of a sequence to itself, with the dimension of positions and its split."""
    if op.kind != "attention" or not rule_of(op).has_own_form("s"):
        return None
    return op.ins[0], POSITIONS, Split((axis,), FOLDED if op.attrs.get("causal") else 1)


def _megatron(model: _Model) -> dict[str, Layout]:
    layouts = model.pairs()
    if not layouts:
        raise UsageError(
            f"preset megatron finds no pair of products that {model.sizes[model.axis]} devices can split",
            hint="give layouts, such as --shard 'h.*.weight=[_,/tp]'",
        )
    return layouts | model.vocabulary(layouts)


def _sequence(model: _Model) -> dict[str, Layout]:
    layouts = _megatron(model)
    for op in model.rows.values():
        t = op.outs[0].type
        if t.rank >= 3 and t.dims[-2] >= model.sizes[model.axis]:
            layouts[f"%{op.outs[0].name}"] = tuple(
                Split((model.axis,)) if i == t.rank - 2 else UNSPLIT for i in range(t.rank)
            )
    return layouts


def _batch(model: _Model) -> dict[str, Layout]:
    inputs = [v for v in model.module.inputs if v.type.rank and v.name != MICROBATCH]
    count, dims = model.sizes[model.axis], {v.name: model.module.batch.get(v.name, 0) for v in inputs}
    whole = [name for name, dim in dims.items() if dim is None]
    if whole:
        raise UsageError(f"preset batch: %{whole[0]} has no dimension that its samples are known to lie along")
    small = [v for v in inputs if v.type.dims[dims[v.name] or 0] < count]
    if small:
        raise UsageError(f"preset batch: %{small[0].name} is {small[0].type}, too few samples for {count} devices")
    return {
        f"%{v.name}": tuple(Split((model.axis,)) if i == dims[v.name] else None for i in range(v.type.rank))
        for v in inputs
    }


def _spatial(model: _Model) -> dict[str, Layout]:
    images, count = model.images(), model.sizes[model.axis]
    if not images:
        raise UsageError("preset spatial finds no input that a convolution takes", hint="there is preset batch")
    types = {v.name: v.type for v in model.module.inputs}
    small = [name for name, dim in images.items() if types[name].dims[dim] < count]
    if small:
        raise UsageError(f"preset spatial: %{small[0]} is {types[small[0]]}, too few rows for {count} devices")
    return {
        f"%{name}": tuple(Split((model.axis,)) if i == dim else None for i in range(types[name].rank))
        for name, dim in images.items()
    }


PRESETS: dict[str, Callable[[_Model], dict[str, Layout]]] = {
    "megatron": _megatron,
    "sequence": _sequence,
    "batch": _batch,
    "spatial": _spatial,
    "context": _context,
}
