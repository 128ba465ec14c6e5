"""Turn whole stage graphs into what one device does: the pass `localize`.

In: a module of stage graphs in whole form, whose types say how tensors lie on the mesh of their stage. Out: the same
graphs in local form: types are plain and small, reshards are collectives, and operations whose local form is not
themselves are written in it (forms.py). Inputs `mesh.AXIS` say where a rank lies. Names stay: the local `%h` of all
ranks together is the whole `%h`. What stands outside of graphs, inputs and variables, keeps its whole type.

A value may be split over axes of which the stages at both ends of an edge have other sizes; crossings/ says how it
travels.

Where a sum runs over a dimension whose size does not divide, padding is masked unless it is known to be zero
(padding.py); so is what is written into variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.ir.action_kinds import FORWARD
from penstock.ir.attrs import Attr
from penstock.ir.graph import (
    ANNOTATIONS,
    LOCAL,
    Graph,
    Module,
    Namer,
    Op,
    Value,
    graph_kind,
    graph_stage,
)
from penstock.ir.ops import OPS, complete_attrs, integer, ints, make
from penstock.ir.schedule import COMPUTE
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import Split as Splitting
from penstock.ir.sharding.splits import SplitRule, read_split
from penstock.ir.types import TensorType
from penstock.support.errors import VerifyError

from .building import LocalWriter
from .calls import LocalCall
from .crossings.crossings import between_meshes
from .forms import FORMS
from .padding import ANYTHING, FINITE, ZERO, padding_of
from .reshard import resharded


@dataclass(frozen=True, slots=True)
class LocalizeOptions:
    """Options of `localize`, which has none: types and meshes decide."""


def localize(module: Module, options: LocalizeOptions = LocalizeOptions()) -> Module:
    """Turn every stage graph into the program of one device of its mesh."""
    module = between_meshes(module)
    namer = Namer.of(*module.graphs.values())
    # What the padding of values holds that other graphs take; that of what is fed is zero.
    padding = {value.name: ZERO for value in module.inputs}
    graphs = {}
    for name in sorted(module.graphs, key=_turn):
        graph, stage = module.graphs[name], graph_stage(name)
        if stage is None:
            raise VerifyError("is no graph of a stage; localize runs after split", where=f"@{name}")
        localizer = _Localizer(graph, module.mesh_of(stage).sizes, namer, padding)
        graphs[name] = localizer.run()
        padding |= localizer.padding
    facts = tuple(LOCAL if fact == "sharded" else fact for fact in module.facts)
    return module.but(graphs={name: graphs[name] for name in module.graphs}, facts=facts)


def _turn(name: str) -> tuple[int, int]:
    """Return a key that sorts graphs by when they run: those that make a value before those that take it."""
    kind, stage = graph_kind(name), graph_stage(name) or 0
    return COMPUTE.index(kind) if kind in COMPUTE else 0, stage if kind == FORWARD else -stage


class _Localizer:
    """The translation of one graph."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int], namer: Namer, before: Mapping[str, int]) -> None:
        self.graph, self.sizes, self.before = graph, sizes, before
        self.b = LocalWriter(namer, sizes)
        self.env: dict[str, Value] = {}
        # What the padding of a value holds; values without padding are not in it.
        self.padding: dict[str, int] = {}
        named = (*(v for op in graph.ops for v in op.ins), *graph.outs, *graph.saved)
        self.uses = Counter(value.name for value in named)

    def run(self) -> Graph:
        for value in self.graph.ins:
            state = self.before.get(value.name, ANYTHING)
            self._define(value, Value(value.name, value.type.local(self.sizes)), state)
        for op in self.graph.ops:
            self.b.loc = op.loc
            self.b.annotations = {key: x for key, x in op.attrs.items() if key in ANNOTATIONS}
            self._place(op)
        outs, saved = (tuple(self.env[v.name] for v in values) for values in (self.graph.outs, self.graph.saved))
        ins = (*(self.env[v.name] for v in self.graph.ins), *self.b.coordinates.values())
        return Graph(self.graph.name, ins, outs, tuple(self.b.ops), saved)

    def _define(self, whole: Value, local: Value, state: int) -> None:
        expected = whole.type.local(self.sizes)
        if local.type != expected:
            raise VerifyError(
                f"is {local.type} on one device, expected {expected} of {whole.type}",
                where=f"@{self.graph.name}: %{whole.name}",
            )
        self.env[whole.name] = local
        if self._is_padded(whole.type):
            self.padding[whole.name] = state

    def _is_padded(self, t: TensorType) -> bool:
        return any(self._is_uneven(t, i) for i in range(t.rank))

    def _is_uneven(self, t: TensorType, dim: int) -> bool:
        return t.dims[dim] % (self.b.parts(t.axes_of(dim)) * t.blocks_of(dim)) != 0

    def _place(self, op: Op) -> None:
        if op.kind == "reshard":
            (x,), (y,) = op.ins, op.outs
            alone = self.uses[x.name] == 1
            self._define(y, resharded(self.b, self.env[x.name], x.type, y.type, y.name, alone=alone), ZERO)
            if self.padding.get(x.name, ZERO) != ZERO and y.name in self.padding:
                self.padding[y.name] = self.padding[x.name]
        elif OPS[op.kind].family == "state":
            self._state(op)
        else:
            self._pure(op)

    def _state(self, op: Op) -> None:
        ins = tuple(self._clean(v) for v in op.ins)
        outs = tuple(Value(v.name, v.type.local(self.sizes)) for v in op.outs)
        self.b.put(Op(op.kind, ins, outs, op.attrs, op.loc))
        for whole, local in zip(op.outs, outs, strict=True):
            self._define(whole, local, ZERO)

    def _clean(self, value: Value) -> Value:
        """Return a local value whose padding is zero."""
        x = self.env[value.name]
        if self.padding.get(value.name, ZERO) == ZERO:
            return x
        for dim in range(value.type.rank):
            if self._is_uneven(value.type, dim):
                x = self.b.masked(x, dim, value.type.axes_of(dim), value.type.dims[dim])
        return x

    def _pure(self, op: Op) -> None:
        rule = rule_of(op)
        axes = _axes_of_names(op, rule, self.sizes)
        ins = self._masked(op, rule, axes)
        states = padding_of(op, [self.padding.get(v.name) for v in op.ins])
        if any(rule.has_own_form(name) for name in axes):
            if op.kind not in FORMS:
                raise VerifyError(f"has no local form for {op.outs[0].type}", where=f"@{self.graph.name}: {op.kind}")
            results = FORMS[op.kind](self.b, LocalCall(op, rule, axes, ins))
            states = tuple(FINITE if state == ZERO else state for state in states)
            for whole, local in zip(op.outs, results, strict=True):
                named = self._named(local, whole.name)
                self._define(whole, named, ANYTHING if op.kind != "iota" else FINITE)
            return
        attrs = {key: x for key, x in op.attrs.items() if key in ANNOTATIONS} | self._local_attrs(op, ins)
        local_op = make(op.kind, ins, [v.name for v in op.outs], op.loc, **attrs)
        self.b.put(local_op)
        for whole, local, state in zip(op.outs, local_op.outs, states, strict=True):
            self._define(whole, local, state)

    def _named(self, value: Value, name: str) -> Value:
        """Return a form's result under the name of the operation's."""
        for i in range(len(self.b.ops) - 1, -1, -1):
            if value in self.b.ops[i].outs:
                named = Value(name, value.type)
                table = {value: named}
                self.b.ops[i:] = [op.renamed(table) for op in self.b.ops[i:]]
                return named
        return self.b.emit("reshape", value, name=name, shape=value.type.dims)

    def _masked(self, op: Op, rule: SplitRule, axes: Mapping[str, tuple[str, ...]]) -> tuple[Value, ...]:
        """Return local operands in which nothing that a sum runs over is padding that is not zero. One factor of a
        product has to be zero there, the others finite."""
        summed = [name for name in axes if rule.leaves_sums(name) and not rule.has_own_form(name)]
        ins = [self.env[v.name] for v in op.ins]
        for name in summed:
            places = [
                (i, dim)
                for i, dims in enumerate(rule.ins)
                for dim, factors in enumerate(dims)
                if name in factors and self._is_uneven(op.ins[i].type, dim)
            ]
            states = {i: self.padding.get(op.ins[i].name, ZERO) for i, _ in places}
            if not places or (_is_no_term(op, states) and max(states.values()) <= FINITE):
                continue
            worst = [i for i in states if states[i] == ANYTHING or (i == 0 and op.kind in _SUMS_OF_FIRST)]
            worst = worst or list(states)[:1]
            for i, dim in places:
                if i in worst:
                    t = op.ins[i].type
                    ins[i] = self.b.masked(ins[i], dim, t.axes_of(dim), t.dims[dim])
        return tuple(ins)

    def _local_attrs(self, op: Op, ins: tuple[Value, ...]) -> dict[str, Attr]:
        """Return the attributes of an operation on local shapes."""
        row = OPS[op.kind]
        attrs = {key: x for key, x in op.attrs.items() if key in row.attrs}
        if "shape" in row.attrs:
            shape = op.outs[0].type.local(self.sizes).dims
            attrs = {**attrs, "shape": shape} if shape or "shape" in attrs else attrs
        if op.kind == "slice":
            attrs |= self._slice_attrs(op)
        elif op.kind == "pad":
            attrs |= self._pad_attrs(op)
        elif op.kind in ("conv", "conv_grad_input", "conv_grad_weight") and integer(complete_attrs(op)["groups"]) > 1:
            image, weight = {
                "conv": (op.ins[0], op.ins[1]),
                "conv_grad_input": (op.outs[0], op.ins[1]),
                "conv_grad_weight": (op.ins[0], op.outs[0]),
            }[op.kind]
            channels, each = (v.type.local(self.sizes).dims[1] for v in (image, weight))
            attrs["groups"] = channels // each
        return attrs

    def _slice_attrs(self, op: Op) -> dict[str, Attr]:
        """Return the bounds of a slice of whole blocks."""
        starts, stops = list(ints(op.attrs["start"])), list(ints(op.attrs["stop"]))
        for dim, whole in enumerate(op.outs[0].type.dims):
            local = op.outs[0].type.local(self.sizes).dims[dim]
            if op.outs[0].type.axes_of(dim):
                starts[dim] = starts[dim] // whole * local
                stops[dim] = starts[dim] + local
        return {"start": tuple(starts), "stop": tuple(stops)}

    def _pad_attrs(self, op: Op) -> dict[str, Attr]:
        """Return the blocks that a pad adds, in local elements."""
        low, high = list(ints(op.attrs["low"])), list(ints(op.attrs["high"]))
        t = op.ins[0].type
        for dim, (whole, local) in enumerate(zip(t.dims, t.local(self.sizes).dims, strict=True)):
            if t.axes_of(dim):
                low[dim], high[dim] = (n // whole * local for n in (low[dim], high[dim]))
        return {"low": tuple(low), "high": tuple(high)}


# Operations that sum their first operand, whatever the others are.
_SUMS_OF_FIRST = ("layer_norm_grad_weight", "gather_grad", "sum")


def _is_no_term(op: Op, states: Mapping[int, int]) -> bool:
    """Return whether a sum over padding in these states adds nothing."""
    return states.get(0) == ZERO if op.kind in _SUMS_OF_FIRST else ZERO in states.values()


def _axes_of_names(op: Op, rule: SplitRule, sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the axes that split the names of an operation, from the types of its operands and results."""
    axes: dict[str, tuple[str, ...]] = {}
    for value, dims in zip((*op.ins, *op.outs), rule.operands(), strict=True):
        for i, factors in enumerate(dims):
            split_by = value.type.axes_of(i)
            if split_by and factors:
                parts = 1
                for axis in split_by:
                    parts *= sizes.get(axis, 1)
                read = read_split(factors, Splitting(split_by, value.type.blocks_of(i)), rule.sizes, parts)
                if read is not None:
                    axes[read[0]] = split_by
    return axes
