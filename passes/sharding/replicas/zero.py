"""Split variables over the replicas of their stage: the pass `zero` shards them by their types.

In: a module in local form, in which every replica holds all variables of its stage. Out: the same program, in which
each replica holds a part of the optimiser's state, of gradients from level 2 on, and of weights at level 3:

    level   weight             gradient           state              what moves
    1       f32[512,2048]      f32[512,2048]+dp   f32[512/dp,2048]   AR leaves parts of the sum of gradients, U works on
                                                                     parts, and gathers new weights
    2       f32[512,2048]      f32[512/dp,2048]   f32[512/dp,2048]   each backward scatters the sum of its gradients
    3       f32[512/dp,2048]   f32[512/dp,2048]   f32[512/dp,2048]   each graph that reads a weight gathers it

Types say it, and collectives follow from them. The dimension is the first one that divides, else the largest, whose
last parts are padded. Only parameters whose update is elementwise are split: what a product of an update needs, as
muon's, stays whole, and so do tied weights of several stages. Sums run in the order of ranks. N adds up the squares of
a rank's own parts, and one all_reduce makes them those of all ranks (norms.py). A gradient that N uses in another way
is summed whole by `AR`; U takes its part of the sum, and the parameter has level 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.ir.action_kinds import NORM_PARTS, PARTS, SUM, UPDATE
from penstock.ir.collective_calls import part_dim
from penstock.ir.graph import (
    GRAD,
    PARAM,
    REPLICAS,
    STATE,
    Graph,
    Module,
    Namer,
    Op,
    Value,
    Var,
    graph_kind,
    summed_vars,
    touching_ops,
)
from penstock.ir.ops import OPS, make
from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.types import TensorType
from penstock.passes.sharding.building import LocalWriter
from penstock.passes.sharding.reshard import own_part
from penstock.support.errors import UsageError
from penstock.support.words import counted

from .norms import Square, add_up_once, squares_of

LEVELS = (0, 1, 2, 3)
_ELEMENTWISE = ("elementwise", "optimizer", "state")


@dataclass(frozen=True, slots=True)
class ZeroOptions:
    """Options of `zero`. `level` is 0 for none, 1 for optimiser state, 2 for gradients as well, 3 for weights, too."""

    level: int = 0


@dataclass(frozen=True, slots=True)
class _Update:
    """One parameter whose update can run on parts: its variables, the values of the update, and the dimension of the
    parts. A gradient that is `summed` comes whole from AR, and has level 1. `square` is what N makes of it."""

    param: str
    grad: str
    states: tuple[str, ...]
    values: frozenset[Value]
    dim: int
    summed: bool
    level: int
    square: Square | None


def zero(module: Module, options: ZeroOptions) -> Module:
    """Hold a part of the optimiser's state, of gradients and of weights on each replica."""
    if options.level not in LEVELS:
        raise UsageError(f"there is no level {options.level} of zero", hint="levels are 0, 1, 2 and 3")
    stages = [s.index for s in module.stages if module.mesh_of(s.index).sizes.get(REPLICAS, 1) > 1]
    if not options.level or not stages or not any(module.stage_graph(stage, "U") for stage in stages):
        return module
    if options.level > 1:
        _refuse_unequal_shares(module, options.level)
    variables, graphs, left, summed = dict(module.vars), dict(module.graphs), 0, 0
    namer = Namer.of(*graphs.values())
    for stage in stages:
        updates = list(_updates(module, stage, options.level))
        held = {
            name
            for name, var in module.vars.items()
            if var.role == GRAD and name.endswith(".grad") and name in summed_vars(module, stage)
        }
        summed += sum(update.summed for update in updates)
        left += len(held - {update.grad for update in updates})
        for update in updates:
            variables |= _laid(module.vars, update)
        for name in graphs:
            if name.startswith(f"s{stage}."):
                graphs[name] = _Spread(module, graphs[name], stage, updates, namer).run()
        norm = f"s{stage}.{NORM_PARTS}"
        if counted_squares := [update.square.result for update in updates if update.square is not None]:
            graphs[norm] = add_up_once(graphs[norm], counted_squares, namer)
    after = module.but(vars=variables, graphs=graphs)
    after = after.but(schedule=_with_sums_to_do(after))
    split = sum(a is not b for a, b in zip(variables.values(), module.vars.values(), strict=True))
    text = f"level {options.level}: {counted(split, 'variable')} laid over {REPLICAS}"
    if left:
        text += f"; the update of {counted(left, 'parameter')} needs whole tensors"
    return after.noted("zero", text + (f"; sums of {summed} by AR, level 1 for these" if summed else ""))


def _refuse_unequal_shares(module: Module, level: int) -> None:
    """Refuse replicas with unequal shares: they meet in every microbatch."""
    assert module.schedule is not None
    for teams in module.schedule.teams().values():
        programs = [[action.kind for action in module.schedule.ranks[team[0]].batch] for team in teams]
        if any(sorted(kinds) != sorted(programs[0]) for kinds in programs):
            raise UsageError(
                f"level {level} of zero lets replicas meet in every microbatch, and they have unequal shares",
                hint="give equal shares, or take level 1",
            )


def _updates(module: Module, stage: int, level: int) -> Iterator[_Update]:
    """Yield the parameters of a stage whose update is elementwise, and has a dimension to split."""
    graph = module.stage_graph(stage, "U")
    sums = set(summed_vars(module, stage))
    norm = module.stage_graph(stage, NORM_PARTS)
    squares = squares_of(norm) if norm is not None else {}
    used = {op.var for kind in (PARTS, NORM_PARTS) for _, op in touching_ops(module.stage_graph(stage, kind))}
    for ops in _components(graph) if graph is not None else ():
        names = dict.fromkeys(op.var for op in ops if "var" in op.attrs)
        by_role = {role: [n for n in names if module.vars[n].role == role] for role in (PARAM, GRAD, STATE)}
        if len(by_role[PARAM]) != 1 or len(by_role[GRAD]) != 1 or by_role[GRAD][0] not in sums:
            continue
        grad = by_role[GRAD][0]
        if len(names) != sum(map(len, by_role.values())) or any(OPS[op.kind].family not in _ELEMENTWISE for op in ops):
            continue
        dim = part_dim(module.vars[by_role[PARAM][0]].type, module.mesh_of(stage).sizes)
        if dim is None:
            continue
        square = squares.get(grad)
        summed = grad in used and square is None
        values = frozenset(v for op in ops for v in (*op.ins, *op.outs) if v.type.rank)
        at = 1 if summed else level
        yield _Update(by_role[PARAM][0], grad, tuple(by_role[STATE]), values, dim, summed, at, square)


def _components(graph: Graph) -> list[list[Op]]:
    """Return the operations of an update apart: those that hang together by values that are no scalars."""
    names: dict[Value, int] = {}
    parts: dict[int, list[Op]] = {}
    for number, op in enumerate(graph.ops):
        values = [v for v in (*op.ins, *op.outs) if v.type.rank]
        joined = sorted({names[v] for v in values if v in names})
        parts[number] = [other for part in joined for other in parts.pop(part)] + [op]
        for value in (v for other in parts[number] for v in (*other.ins, *other.outs) if v.type.rank):
            names[value] = number
    return [ops for ops in parts.values() if len({v.type.shape for op in ops for v in (*op.ins, *op.outs)} - {()}) == 1]


def _laid(variables: Mapping[str, Var], update: _Update) -> dict[str, Var]:
    """Return the variables of an update with their types at its level."""
    level = update.level
    split = [*update.states, *([update.grad] if level > 1 else []), *([update.param] if level > 2 else [])]
    laid = {name: replace(variables[name], type=_parted(variables[name].type, update.dim)) for name in split}
    if level == 1 and not update.summed:
        t = variables[update.grad].type
        laid[update.grad] = replace(variables[update.grad], type=t.laid(t.axes, (*t.partial, REPLICAS), t.blocks))
    return laid


def _parted(t: TensorType, dim: int) -> TensorType:
    axes = [(*t.axes_of(i), REPLICAS) if i == dim else t.axes_of(i) for i in range(t.rank)]
    return t.laid(axes, t.partial, [t.blocks_of(i) for i in range(t.rank)])


class _Spread:
    """The rewriting of one graph: parts where types say parts, and collectives where whole tensors are needed."""

    def __init__(self, module: Module, graph: Graph, stage: int, updates: Iterable[_Update], namer: Namer) -> None:
        self.graph, self.namer = graph, namer
        self.sizes = module.mesh_of(stage).sizes
        self.b = LocalWriter(namer, self.sizes)
        self.kind = graph_kind(graph.name)
        # Graphs that work on parts, after the sums of a batch.
        self.on_parts = self.kind in (NORM_PARTS, UPDATE)
        self.by_var = {name: u for u in updates for name in (u.param, u.grad, *u.states)}
        self.by_value = {v: u for u in updates for v in self._values(u)}
        # Values whose parts stand for them.
        self.parts: dict[Value, Value] = {}

    def _values(self, update: _Update) -> frozenset[Value]:
        """Return the values of the graph that parts stand for."""
        if self.kind == UPDATE:
            return update.values
        return update.square.values if self.kind == NORM_PARTS and update.square is not None else frozenset()

    def run(self) -> Graph:
        for op in self.graph.ops:
            self.b.loc = op.loc
            update = self.by_var.get(op.var) if "var" in op.attrs else None
            if update is not None and not (self.kind == NORM_PARTS and update.square is None):
                self._touch(op, update)
            elif any(v in self.by_value for v in (*op.ins, *op.outs)):
                operands = [self.parts.get(v, v) for v in op.ins]
                local = make(op.kind, operands, [v.name for v in op.outs], op.loc, **op.attrs)
                self.b.put(local)
                self.parts |= dict(zip(op.outs, local.outs, strict=True))
            else:
                self.b.put(op)
        known = {value.name for value in self.graph.ins}
        ins = (*self.graph.ins, *(v for v in self.b.coordinates.values() if v.name not in known))
        ops = _numbers_first(self.b.ops) if self.kind == UPDATE else self.b.ops
        return Graph(self.graph.name, ins, self.graph.outs, tuple(ops), self.graph.saved)

    def _touch(self, op: Op, update: _Update) -> None:
        """Write an operation on a variable of an update."""
        held_in_parts = op.var in update.states or (update.level > 1 and op.var == update.grad)
        held_in_parts |= update.level > 2 and op.var == update.param
        match op.kind:
            case "read" | "take":
                self._get(op, update, held_in_parts)
            case "write":
                value = self.parts[op.ins[0]]
                self._put(op, value if held_in_parts else self._gathered(value, op.ins[0], update, ""))
            case _:
                self._put(op, self._scattered(op.ins[0], update, "") if held_in_parts else op.ins[0])

    def _put(self, op: Op, value: Value) -> None:
        self.b.put(Op(op.kind, (value,), (), op.attrs, op.loc))

    def _get(self, op: Op, update: _Update, held_in_parts: bool) -> None:
        (whole,) = op.outs
        if held_in_parts:
            small = _smaller(whole.type, update.dim, self.sizes[REPLICAS])
            name = whole.name if self.on_parts else self.namer.fresh(f"{whole.name}.part")
            held = Value(name, small)
            self.b.put(Op(op.kind, (), (held,), op.attrs, op.loc))
            if self.on_parts:
                self.parts[whole] = held
            else:
                self._gathered(held, whole, update, whole.name)
        elif not self.on_parts:
            self.b.put(op)
        else:
            held = Value(self.namer.fresh(f"{whole.name}.whole"), whole.type)
            self.b.put(Op(op.kind, (), (held,), op.attrs, op.loc))
            self.parts[whole] = own_part(self.b, held, update.dim, (REPLICAS,))

    def _scattered(self, value: Value, update: _Update, name: str) -> Value:
        """Write the sum of the replicas' values, of which each gets its part."""
        return self.b.emit(
            "reduce_scatter", value, name=name, axis=update.dim, over=REPLICAS, parts=self.sizes[REPLICAS]
        )

    def _gathered(self, part: Value, whole: Value, update: _Update, name: str) -> Value:
        """Write the whole tensor of the replicas' parts."""
        size = whole.type.dims[update.dim]
        return self.b.emit("all_gather", part, name=name, axis=update.dim, over=REPLICAS, size=size)


def _smaller(t: TensorType, dim: int, parts: int) -> TensorType:
    return t.with_shape(tuple(-(-n // parts) if i == dim else n for i, n in enumerate(t.dims)))


def _with_sums_to_do(module: Module) -> Schedule | None:
    """Return the schedule without AR where nothing is left to sum up. An update of an earlier batch comes before AR, as
    the new weights that it gathers would share the link with a sum that has all of the next batch."""
    schedule = module.schedule
    if schedule is None:
        return None
    summing = {s.index for s in module.stages if summed_vars(module, s.index)}
    ranks = {}
    for rank, program in schedule.ranks.items():
        start, batch = (
            tuple(_updates_first([a for a in actions if a.kind != SUM or a.stage in summing]))
            for actions in (program.start, program.batch)
        )
        ranks[rank] = Program(start, batch)
    return Schedule(schedule.name, schedule.microbatches, ranks)


def _updates_first(actions: Sequence[Action]) -> list[Action]:
    """Return actions in which no sum stands right in front of the update of an earlier batch of its stage."""
    ordered = list(actions)
    for i, (one, other) in enumerate(pairwise(actions)):
        if one.kind == SUM and other.kind == UPDATE and one.stage == other.stage and other.mb < one.mb:
            ordered[i : i + 2] = [other, one]
    return ordered


def _numbers_first(ops: Sequence[Op]) -> list[Op]:
    """Return the operations of an update with writes of numbers right behind what they need.

    The kernel that counts updates ends with such a write, and all updates wait for it. Behind all other operations it
    would let the parts of all parameters be made before the first update lets go of one.
    """
    numbers = [op for op in ops if op.kind == "write" and not op.ins[0].type.rank]
    ordered = [op for op in ops if op not in numbers]
    for write in numbers:
        needed = (i for i, op in enumerate(ordered) if write.ins[0] in op.outs or op.attrs.get("var") == write.var)
        ordered.insert(max(needed, default=-1) + 1, write)
    return ordered
