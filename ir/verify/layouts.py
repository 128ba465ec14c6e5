"""The checkers of layouts: facts `sharded`, of whole graphs with axes in their types, and `local`, of what one device
does.

Sharded: every operation obeys its rule (ir/sharding/rules.py). Dimensions with one name are split alike, and may be
split. Partial sums pass linear operands only. What a sum over a split dimension leaves is partial. Variables and
outputs lie as they are declared.

Local: for every value and axis of the mesh, ranks have the *same* or it *varies*. Coordinates, what is read of split
variables, and inputs that are split vary; an all_reduce or all_gather makes same what varied along its axes. What is
declared whole has to be the same: variables that are written or added to, and outputs of the module. That refuses a
gradient of a replicated parameter that was not added up.

A sum over ranks that have the same would multiply it by their number. It is refused, unless a number that fills a
tensor, a broadcast or a count is among what the operand is made of: ranks have equal parts of these, and each its
summand.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod

from penstock.ir.graph import COORDINATE, REPLICAS, Graph, Module, Op, Value, graph_stage, made_values
from penstock.ir.ops import OPS, Exact, attrs_of, axes_over, exact_attrs
from penstock.ir.sharding.between_meshes import arriving_values, moved_axes, travels_in_tiles
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import Split, SplitRule, laid_out, read_split
from penstock.ir.types import TensorType

from .problems import Problem, op_place, op_window

# ------------------------------------------------------------------------------------------------ sharded


def check_sharded(module: Module) -> Iterator[Problem]:
    """Check the layouts of whole graphs."""
    for graph in module.graphs.values():
        stage = graph_stage(graph.name)
        sizes = module.mesh_of(stage).sizes if stage is not None and module.stages else {}
        for i, op in enumerate(graph.ops):
            for what in () if _is_known_to_obey(op, sizes) else _layout_problems(module, op, sizes):
                yield Problem(op_place(graph, i), what, op_window(graph, i))
    outputs = set(module.outputs)
    for graph in module.graphs.values():
        for value in graph.outs:
            if value.name in outputs and not value.type.is_plain:
                yield Problem(f"@{graph.name}", f"returns {value!r}, an output of the module, which has to be whole")


def _is_known_to_obey(op: Op, sizes: Mapping[str, int]) -> bool:
    """Return whether an operation of the same kind with the same types was found to obey its rule. Those of variables
    and constants are looked at each time."""
    if op.kind == "reshard" or OPS[op.kind].family in ("state", "source"):
        return False
    ins, outs = ([v.type for v in values] for values in (op.ins, op.outs))
    return _obeys(op.kind, tuple(ins), tuple(outs), exact_attrs(op.attrs), tuple(sizes.items()))


# Large modules have few different operations, but for names.
@lru_cache(maxsize=1 << 14)
def _obeys(
    kind: str,
    ins: tuple[TensorType, ...],
    outs: tuple[TensorType, ...],
    attrs: Exact,
    sizes: tuple[tuple[str, int], ...],
) -> bool:
    values = [tuple(Value(f"x{i}", t) for i, t in enumerate(types)) for types in (ins, outs)]
    op = Op(kind, values[0], values[1], attrs_of(attrs))
    return next(_layout_problems(Module("m"), op, dict(sizes)), None) is None


def _layout_problems(module: Module, op: Op, sizes: Mapping[str, int]) -> Iterator[str]:
    for value in op.outs:
        axes = [axis for listed in value.type.axes for axis in listed] + list(value.type.partial)
        if len(set(axes)) < len(axes):
            yield f"%{value.name} : {value.type} names an axis twice"
            return
    if op.kind == "reshard":
        return
    if OPS[op.kind].family == "state":
        expected = module.vars[op.var].type
        for value in op.outs if op.kind == "put" else (*op.ins, *op.outs):
            if value.type != expected:
                yield f"%{value.name} is {value.type}, @{op.var} is {expected}; reshard it first"
        if op.kind != "put":
            return
    rule = rule_of(op)
    splits: dict[str, Split] = {}
    for value, dims in zip((*op.ins, *op.outs), rule.operands(), strict=True):
        yield from _read_names(value.type, dims, rule, sizes, splits, f"%{value.name}")
    used_axes = [axis for split in splits.values() for axis in split.axes]
    for axis in sorted({axis for axis in used_axes if used_axes.count(axis) > 1}):
        names = " and ".join(name for name, split in splits.items() if axis in split.axes)
        yield f"splits two dimensions, {names}, over {axis}, so that no rank has what belongs together"
    values = [*op.ins, *op.outs]
    for value, dims in zip(values, rule.operands(), strict=True):
        expected_type = laid_out(value.type.plain, dims, splits, rule.sizes)
        bare = value.type.laid(value.type.axes, (), value.type.blocks)
        if expected_type != bare:
            yield f"%{value.name} is {bare}, by its operation's rule {expected_type or 'it cannot lie on this mesh'}"
    yield from _partial_problems(op, rule, splits)


def _read_names(
    t: TensorType,
    dims: tuple[tuple[str, ...], ...],
    rule: SplitRule,
    sizes: Mapping[str, int],
    splits: dict[str, Split],
    what: str,
) -> Iterator[str]:
    """Read the splits of names off the type of an operand or result."""
    for dim, factors in enumerate(dims):
        axes = t.axes_of(dim)
        if not axes:
            continue
        parts = prod(sizes.get(axis, 1) for axis in axes)
        read = read_split(factors, Split(axes, t.blocks_of(dim)), rule.sizes, parts) if factors else None
        if read is None:
            yield f"dimension {dim} of {what} : {t} cannot be split here"
            continue
        name, split = read
        if not rule.may_split(name):
            yield f"dimension {dim} of {what} : {t} has to be whole; reshard it first"
        elif rule.needs_equal(name) and rule.sizes[name] % (parts * split.blocks):
            yield f"dimension {dim} of {what} : {t} does not lie in {parts} equal parts; reshard it first"
        if splits.setdefault(name, split) != split:
            yield f"dimension {dim} of {what} : {t} is split over {'/'.join(axes)}, its like otherwise"


def _partial_problems(op: Op, rule: SplitRule, splits: Mapping[str, Split]) -> Iterator[str]:
    passing: set[str] = set()
    for axis in sorted({axis for value in op.ins for axis in value.type.partial}):
        operands = frozenset(i for i, value in enumerate(op.ins) if axis in value.type.partial)
        if operands not in rule.linear:
            names = ", ".join(f"%{op.ins[i].name}" for i in sorted(operands))
            yield f"takes {names}, a sum that is not added up over {axis}; {op.kind} is not linear in it alone"
        passing.add(axis)
    for value, dims in zip(op.outs, rule.outs, strict=True):
        here = {name for factors in dims for name in factors}
        sums = {
            axis for name, split in splits.items() if name not in here and rule.leaves_sums(name) for axis in split.axes
        }
        if set(value.type.partial) != sums | passing:
            expected = "".join(f"+{axis}" for axis in sorted(sums | passing)) or "no partial sum"
            yield f"%{value.name} is {value.type}, expected {expected}"


# ------------------------------------------------------------------------------------------------ local

_SAME_AFTER = ("all_reduce", "all_gather")
_VARIES_AFTER = ("reduce_scatter", "all_to_all", "shift")
_SUMS = ("all_reduce", "reduce_scatter")
# Operations whose local results may be parts of one whole, though ranks have the same, with the least number of their
# dimensions: a count along the only dimension differs between parts.
_FILLS = {"const": 1, "broadcast": 1, "iota": 2}


def check_local(module: Module) -> Iterator[Problem]:
    """Check that everything declared whole is the same on all ranks of a team."""
    axes_of = {
        s.index: {axis for axis, size in module.mesh_of(s.index).axes if size > 1 and axis != REPLICAS}
        for s in module.stages
    }
    varies: dict[str, frozenset[str]] = {}
    for value in module.inputs:
        varies[value.name] = frozenset(axis for axes in value.type.axes for axis in axes)
    graphs = [(graph, stage) for graph in module.graphs.values() if (stage := graph_stage(graph.name)) is not None]
    makers = {value.name: stage for graph, stage in graphs for value in made_values(graph.ops)}
    before: dict[str, frozenset[str]] = {}
    while before != varies:
        before = dict(varies)
        for graph, stage in graphs:
            _follow(module, graph, varies, _seen(module, graph, stage, varies, makers), axes_of[stage])
    alike = _alike_parts(graphs, axes_of)
    yield from _leaving_problems(module, varies, axes_of)
    for graph, stage in graphs:
        seen = _seen(module, graph, stage, varies, makers)
        yield from _same_problems(module, graph, seen, axes_of[stage])
        yield from _sums_of_the_same(graph, seen, alike, axes_of[stage])


def _seen(
    module: Module, graph: Graph, stage: int, varies: dict[str, frozenset[str]], makers: Mapping[str, int]
) -> Mapping[str, frozenset[str]]:
    """Return what varies of the values of a graph. What comes from a stage with another mesh, and varies along an axis
    on which ranks lie elsewhere here, may vary along all such axes."""
    mesh, arriving = module.mesh_of(stage), dict[str, frozenset[str]]()
    # What travels in tiles arrives as its edge says.
    laid = {
        value.name: value.type
        for edge in module.edges
        if edge.dst == stage and travels_in_tiles(edge)
        for value in arriving_values(edge)
    }
    for value in graph.ins:
        if value.name in laid:
            arriving[value.name] = frozenset(a for a in laid[value.name].every_axis if mesh.sizes.get(a, 1) > 1)
            continue
        moved = moved_axes(module.mesh_of(makers.get(value.name, stage)), mesh)
        if lost := varies.get(value.name, frozenset()) & moved:
            arriving[value.name] = (varies[value.name] - lost) | {a for a in moved if mesh.sizes.get(a, 1) > 1}
    return ChainMap(arriving, varies)


def _leaving_problems(
    module: Module, varies: Mapping[str, frozenset[str]], axes_of: Mapping[int, set[str]]
) -> Iterator[Problem]:
    """Check that what travels in tiles is the same on ranks that have the same tile."""
    for edge in module.edges:
        for value in edge.values if travels_in_tiles(edge) else ():
            axes = (varies.get(value.name, frozenset()) & axes_of[edge.src]) - set(value.type.every_axis)
            if axes:
                listed = ", ".join(sorted(axes))
                what = (
                    f"%{value.name} may differ along {listed} between the ranks of a team, but leaves as {value.type}"
                )
                yield Problem(f"edge {edge.src}>{edge.dst} {edge.phase}", what)


def _alike_parts(graphs: Sequence[tuple[Graph, int]], axes_of: Mapping[int, set[str]]) -> dict[str, frozenset[str]]:
    """Return the axes along which values may be made of parts that are equal on all ranks."""
    alike: dict[str, frozenset[str]] = {}
    before: dict[str, frozenset[str]] | None = None
    while before != alike:
        before = dict(alike)
        for graph, stage in graphs:
            for op in graph.ops:
                here = frozenset[str]().union(*(alike.get(v.name, frozenset()) for v in op.ins))
                if op.kind in _FILLS and op.outs[0].type.rank >= _FILLS[op.kind]:
                    here = frozenset(axes_of[stage])
                elif op.kind in _SAME_AFTER:
                    here -= frozenset(axes_over(op.attrs["over"]))
                alike |= dict.fromkeys((v.name for v in op.outs), here)
    return alike


def _sums_of_the_same(
    graph: Graph, varies: Mapping[str, frozenset[str]], alike: Mapping[str, frozenset[str]], axes: set[str]
) -> Iterator[Problem]:
    for i, op in enumerate(graph.ops):
        if op.kind not in _SUMS or op.attrs.get("by", "sum") != "sum":
            continue
        name = op.ins[0].name
        same = (frozenset(axes_over(op.attrs["over"])) & axes) - varies[name] - alike.get(name, frozenset())
        if same:
            listed = ", ".join(sorted(same))
            what = f"%{name} is the same along {listed} on all ranks of a team; {op.kind} would multiply it"
            yield Problem(op_place(graph, i), what, op_window(graph, i))


def _follow(
    module: Module,
    graph: Graph,
    varies: dict[str, frozenset[str]],
    seen: Mapping[str, frozenset[str]],
    axes: set[str],
) -> None:
    """Add what varies of the values of a graph, to which values are `seen` as they arrive."""
    for value in graph.ins:
        if value.name.startswith(COORDINATE):
            varies[value.name] = frozenset({value.name.removeprefix(COORDINATE)}) & axes
    for op in graph.ops:
        here = frozenset[str]().union(*(seen.get(v.name, frozenset()) for v in op.ins))
        if "var" in op.attrs:
            here |= frozenset(axis for listed in module.vars[op.var].type.axes for axis in listed) & axes
        elif op.kind in _SAME_AFTER:
            here -= frozenset(axes_over(op.attrs["over"]))
        elif op.kind in _VARIES_AFTER:
            here |= frozenset(axes_over(op.attrs["over"])) & axes
        for value in op.outs:
            varies[value.name] = here


def _same_problems(
    module: Module, graph: Graph, varies: Mapping[str, frozenset[str]], axes: set[str]
) -> Iterator[Problem]:
    makers = {v.name: op for op in graph.ops for v in op.outs}
    for i, op in enumerate(graph.ops):
        if op.kind not in ("write", "accum", "put"):
            continue
        t = module.vars[op.var].type
        split = {axis for listed in t.axes for axis in listed}
        for number, value in enumerate(op.ins):
            # Places are those of whole rows, however their heads are split.
            different = (varies.get(value.name, frozenset()) & axes) - (split if number == 0 else set())
            if different:
                listed = ", ".join(sorted(different))
                what = (
                    f"%{value.name} may differ along {listed} between the ranks of a team, but @{op.var} : {t} is the "
                    f"same there; is a collective missing{_behind(makers, value.name)}?"
                )
                yield Problem(op_place(graph, i), what, op_window(graph, i))
    returned = {v.name for v in made_values(graph.ops)}
    for value in graph.outs:
        different = varies.get(value.name, frozenset()) & axes
        if value.name in module.outputs and value.name in returned and different:
            listed = ", ".join(sorted(different))
            yield Problem(
                f"@{graph.name}",
                f"returns the output %{value.name}, which may differ along {listed} between the ranks of a team",
            )


def _behind(makers: Mapping[str, Op], name: str) -> str:
    op = makers.get(name)
    return f" behind {op.kind} {op.loc}".rstrip() if op is not None else ""
