"""Resolution of layouts: which splits each operation takes, and the reshards in front of it.

In: the graphs of a whole program and suggested splits (propagate.py). Out: the same operations, every value with its
layout, and a `reshard` wherever an operand lies in another way than its operation takes it.

For each operation in order, the splits of its names are chosen that cost least: bytes that reshards move, results that
have to be added up, and the operation's own time. A partial sum stays one if its only reader can take it so (`linear`);
else it is added up at once, for all readers. The sum then has the value's name, and what was not added up is called
`NAME.partial`. A view that is needed in another layout is taken of its operand in that layout, so that views of one
tensor share what was moved. Later operations that are likely to take an operand in the same layout share the bytes of
its reshard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from penstock.ir.graph import Graph, Module, Namer, Op, Value
from penstock.ir.ops import OPS, cost_of
from penstock.ir.sharding.paths import moved_bytes
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import UNSPLIT, Dimensions, Split, SplitRule, laid_out, read_split
from penstock.ir.types import TensorType

from .propagate import Suggestions, allowed, bears, fits, is_alone, settled

# What a floating-point operation, and a byte of memory that is touched, count beside a byte that is moved to another
# device: rates of a processor core and of a link between processes.
_FLOP, _TOUCHED = 1 / 50, 1 / 8
_MOST_CHOICES = 512
# Views of which every element of the operand is one of the result.
_MOVES = ("reshape", "transpose")


@dataclass(frozen=True, slots=True)
class _Choice:
    """Layouts of the operands and results of one operation, and their cost."""

    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    cost: float


class Resolution:
    """The resolution of all graphs of a module."""

    def __init__(self, module: Module, graphs: Sequence[Graph], suggested: Suggestions) -> None:
        self.suggested, self.sizes = suggested, suggested.sizes
        self.namer = Namer.of(*graphs)
        self.var_types = {
            name: var.type.laid(*_columns(settled(suggested.splits[f"@{name}"]))) for name, var in module.vars.items()
        }
        # Values as they lie, by name, across graphs.
        self.laid: dict[str, Value] = {}
        self._readers: dict[str, list[tuple[Op, int]]] = {}
        for graph in graphs:
            for op in graph.ops:
                for i, value in enumerate(op.ins):
                    self._readers.setdefault(value.name, []).append((op, i))
        self._whole = {v.name for graph in graphs for v in graph.outs}
        # The places of operations in the forward graph, by what they make.
        self.forward_places = {v.name: i for i, op in enumerate(graphs[0].ops) for v in op.outs} if graphs else {}
        # New names of results that are laid out anew at once: backward operations belong to who makes these.
        self.raw_names: dict[str, str] = {}
        # Values that are likely to be partial sums.
        self._ahead: set[str] = set()
        for graph in graphs:
            for op in graph.ops:
                if self._leaves_partial(op):
                    self._ahead |= {value.name for value in op.outs}

    def wanted(self, value: Value) -> TensorType:
        """Return the type of a value as suggested."""
        if value.name in self._whole:
            return value.type.plain
        return value.type.plain.laid(*_columns(settled(self.suggested.of(value))))

    def graph(self, graph: Graph) -> Graph:
        """Return a graph with layouts and reshards."""
        return _GraphResolution(self, graph).run()

    def _leaves_partial(self, op: Op) -> bool:
        """Return whether results are likely to be partial sums: the operation sums over a split dimension, or hands on
        partial sums."""
        if OPS[op.kind].family == "state" or op.kind == "reshard":
            return False
        rule = self.suggested.rules[id(op)]
        # For each summed name, the splits of operands along it.
        along: dict[str, list[tuple[str, ...]]] = {}
        for value, dimensions in zip(op.ins, rule.ins, strict=True):
            for split, factors in zip(self.suggested.of(value), dimensions, strict=True):
                for name in factors:
                    if rule.leaves_sums(name) and allowed(op, rule, name):
                        along.setdefault(name, []).append(split.axes if split else ())
        if any(axes[0] and len(axes) > 1 and len(set(axes)) == 1 for axes in along.values()):
            return True
        split_by = {axis for listed in along.values() for axes in listed for axis in axes}
        if split_by and not any(split_by & {a for s in self.suggested.of(v) if s for a in s.axes} for v in op.outs):
            return True
        ahead = frozenset(i for i, value in enumerate(op.ins) if value.name in self._ahead)
        return bool(ahead) and ahead in rule.linear and _keeps(op, ahead)

    def stays_partial(self, value: Value) -> bool:
        """Return whether a partial sum is added up later: its only reader can take it so. Several readers would leave a
        sum each to be added up."""
        readers = self._readers.get(value.name, [])
        return len(readers) == 1 and value.name not in self._whole and self._takes(*readers[0])

    def _takes(self, op: Op, operand: int) -> bool:
        if op.kind == "reshard" or OPS[op.kind].family == "state":
            return False
        rule = self.suggested.rules[id(op)]
        for operands in rule.linear:
            if operand in operands and all(i == operand or op.ins[i].name in self._ahead for i in operands):
                return _keeps(op, operands)
        return False


def _keeps(op: Op, operands: frozenset[int]) -> bool:
    """Return whether handing a partial sum on moves no more bytes than adding it up before."""
    return sum(v.type.nbytes for v in op.outs) <= sum(op.ins[i].type.nbytes for i in operands)


def _columns(splits: Sequence[Split]) -> tuple[list[tuple[str, ...]], tuple[str, ...], list[int]]:
    return [split.axes for split in splits], (), [split.blocks for split in splits]


def _of_put(op: Op, cache: TensorType) -> tuple[TensorType, TensorType]:
    """Return the layouts of rows and places for a cache: heads are split alike."""
    rows, places = (v.type.plain for v in op.ins)
    return rows.laid([(), cache.axes_of(2), ()], (), [1, cache.blocks_of(2), 1]), places


class _GraphResolution:
    """The resolution of one graph."""

    def __init__(self, all_graphs: Resolution, graph: Graph) -> None:
        self.all, self.graph, self.sizes = all_graphs, graph, all_graphs.sizes
        self.env: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.adapted: dict[tuple[str, TensorType], Value] = {}
        self.makers: dict[str, Op] = {}
        # The readers of values, each with the operand: views, and other operations that are still to come.
        self.readers: dict[str, list[tuple[Op, int]]] = {}
        for op in graph.ops:
            for i, value in enumerate(op.ins):
                self.readers.setdefault(value.name, []).append((op, i))

    def run(self) -> Graph:
        for value in self.graph.ins:
            laid = self.all.laid.get(value.name) or Value(value.name, self.all.wanted(value))
            self.env[value.name] = self.all.laid[value.name] = laid
        for op in self.graph.ops:
            if OPS[op.kind].family == "state":
                self._state(op)
            elif op.kind == "reshard":
                self._given_reshard(op)
            else:
                self._pure(op)
            for value in op.ins if op.kind not in _MOVES else ():
                self.readers[value.name] = [reader for reader in self.readers[value.name] if reader[0] is not op]
        outs = tuple(self._adapt(self.env[v.name], v.type.plain, None) for v in self.graph.outs)
        assert all(new.name == old.name for new, old in zip(outs, self.graph.outs, strict=True)), self.graph.name
        ins, saved = (tuple(self.env[v.name] for v in values) for values in (self.graph.ins, self.graph.saved))
        return Graph(self.graph.name, ins, outs, tuple(self.ops), saved)

    def _state(self, op: Op) -> None:
        t = self.all.var_types[op.var]
        wanted = _of_put(op, t) if op.kind == "put" else (t,) * len(op.ins)
        ins = tuple(self._adapt(self.env[v.name], laid, op) for v, laid in zip(op.ins, wanted, strict=True))
        outs = tuple(Value(v.name, t) for v in op.outs)
        self._emit(Op(op.kind, ins, outs, op.attrs, op.loc))

    def _given_reshard(self, op: Op) -> None:
        value = self.env[op.ins[0].name]
        self._emit(Op(op.kind, (value,), op.outs, op.attrs, op.loc))

    def _pure(self, op: Op) -> None:
        rule = self.all.suggested.rules[id(op)]
        here = [self.env[v.name] for v in op.ins]
        choice = self._choose(op, rule, here)
        ins = tuple(self._adapt(value, t, op) for value, t in zip(here, choice.ins, strict=True))
        outs, after = [], []
        for value, t in zip(op.outs, choice.outs, strict=True):
            to = self._final(value, t)
            final = Value(self._name(value, to), to)
            raw = final if to == t else Value(self.all.namer.fresh(f"{value.name}.{_suffix(t)}"), t)
            outs.append(raw)
            if final.name == value.name:
                self.all.raw_names[value.name] = raw.name
            if to != t:
                attrs = {"to": str(to), **({"of": op.attrs["of"]} if "of" in op.attrs else {})}
                after.append(Op("reshard", (raw,), (final,), attrs, op.loc))
        self._emit(Op(op.kind, ins, tuple(outs), op.attrs, op.loc))
        for reshard in after:
            self._emit(reshard)
        for value, raw in zip(op.outs, outs, strict=True):
            last = next((reshard.outs[0] for reshard in after if reshard.ins[0] == raw), raw)
            self.env[value.name] = last

    def _name(self, value: Value, t: TensorType) -> str:
        """Return the name of a result. What a graph makes again of a value of another graph, and that lies in another
        way here, gets a name of its own: a name has one layout."""
        known = self.all.laid.get(value.name)
        same = known is None or known.type == t
        return value.name if same else self.all.namer.fresh(f"{value.name}.again")

    def _emit(self, op: Op) -> None:
        origin = str(op.attrs.get("of", ""))
        if (name := self.all.raw_names.get(origin, origin)) != origin:
            op = op.with_attrs(of=name)
        self.ops.append(op)
        for value in op.outs:
            self.makers[value.name] = op
            self.env[value.name] = self.all.laid[value.name] = value

    def _final(self, value: Value, t: TensorType) -> TensorType:
        """Return the layout that a result gets at once: as given, added up where a reader needs the sum, else as it
        is."""
        if f"%{value.name}" in self.all.suggested.given or value.name in self.all._whole:
            return self.all.wanted(value)
        if t.partial and not self.all.stays_partial(value):
            wanted = self.all.wanted(value)
            # Only axes that are summed over may split the sum: everything else lies as the operation results it.
            free = {axis for axes in wanted.axes for axis in axes} <= {*t.partial, *(a for x in t.axes for a in x)}
            return wanted if free and _keeps_axes(t, wanted) else t.laid(t.axes, (), t.blocks)
        return t

    def _adapt(self, value: Value, t: TensorType, op: Op | None) -> Value:
        """Return the value with another layout. A number that fills a constant is written anew, and a view is taken of
        its operand in another layout."""
        if value.type == t:
            return value
        known = self.adapted.get((value.name, t))
        if known is not None:
            return known
        maker = self.makers.get(value.name)
        operand = self._viewed(maker, value, t, op) if maker is not None and maker.kind in _MOVES else None
        name = self.all.namer.fresh(f"{value.name}.laid")
        if operand is not None and maker is not None:
            later = self._later(maker, op)
            attrs = maker.attrs if later is maker else {**maker.attrs, "of": later.attrs["of"]}
            self._emit(Op(maker.kind, (operand,), (Value(name, t),), attrs, maker.loc))
        elif maker is not None and maker.kind == "const" and not isinstance(maker.attrs.get("value"), tuple):
            self._emit(Op("const", (), (Value(name, t),), maker.attrs, maker.loc))
        else:
            of = {"of": op.attrs["of"]} if op is not None and "of" in op.attrs else {}
            self._emit(Op("reshard", (value,), (Value(name, t),), {"to": str(t), **of}, op.loc if op else ""))
        self.adapted[value.name, t] = self.env[name]
        return self.env[name]

    def _viewed(self, view: Op, value: Value, t: TensorType, reader: Op | None) -> Value | None:
        """Return the operand of a view laid out so that the view of it is of type t; None where no layout does that."""
        operand = self._before_view(view, value, t)
        return self._adapt(view.ins[0], operand, self._later(view, reader)) if operand is not None else None

    def _later(self, view: Op, reader: Op | None) -> Op:
        """Return the one of a view and what reads it whose forward operation comes later. That one's stage has
        everything that the two need: gradients go from later stages to earlier ones."""
        of, reads_for = (str(op.attrs.get("of", "")) if op is not None else "" for op in (view, reader))
        place = self.all.forward_places
        later = of in place and reads_for in place and place[reads_for] > place[of]
        return reader if later and reader is not None else view

    def _before_view(self, view: Op, value: Value, t: TensorType) -> TensorType | None:
        """Return the layout of a view's operand that makes its result of type t; None where no layout does that."""
        if value.type.partial or t.partial:
            return None
        rule, splits = rule_of(Op(view.kind, view.ins, (value,), view.attrs)), dict[str, Split]()
        for dim, factors in enumerate(rule.outs[0]):
            if axes := t.axes_of(dim):
                parts = prod(self.sizes.get(axis, 1) for axis in axes)
                read = read_split(factors, Split(axes, t.blocks_of(dim)), rule.sizes, parts) if factors else None
                if read is None:
                    return None
                splits[read[0]] = read[1]
        if not _equal_factors(rule, splits, self.sizes):
            return None
        plain = view.ins[0].type.plain
        operand, result = (
            laid_out(x, dims, splits, rule.sizes) for x, dims in ((plain, rule.ins[0]), (t.plain, rule.outs[0]))
        )
        return operand if result == t else None

    # ---------------------------------------------------------------------------------------- choosing splits

    def _choose(self, op: Op, rule: SplitRule, here: Sequence[Value]) -> _Choice:
        best: _Choice | None = None
        for splits in self._candidates(op, rule, here):
            choice = self._choice(op, rule, here, splits)
            if choice is not None and (best is None or choice.cost < best.cost):
                best = choice
        assert best is not None, f"{op.kind} has no layout"
        return best

    def _candidates(self, op: Op, rule: SplitRule, here: Sequence[Value]) -> Iterator[dict[str, Split]]:
        """Yield splits of the operation's names: those of operands as they lie and of results as they are wanted, in
        all combinations; nothing split comes last."""
        options: dict[str, list[Split]] = {}
        types = [*(v.type for v in here), *(self.all.wanted(v) for v in op.outs)]
        for t, dimensions in zip(types, rule.operands(), strict=True):
            for dim, factors in enumerate(dimensions):
                axes = t.axes_of(dim)
                if not axes or not factors:
                    continue
                parts = prod(self.sizes.get(axis, 1) for axis in axes)
                read = read_split(factors, Split(axes, t.blocks_of(dim)), rule.sizes, parts)
                if read is None:
                    continue
                name, read_here = read
                for split in _coarser(read_here):
                    if bears(op, rule, name, split) and fits(
                        split, rule.sizes[name], self.sizes, is_alone(rule, name, factors)
                    ):
                        listed = options.setdefault(name, [])
                        if split not in listed:
                            listed.append(split)
        names = list(options)
        while prod(len(options[name]) + 1 for name in names) > _MOST_CHOICES:
            options[names.pop()] = []
        for splits in product(*([*options[name], UNSPLIT] for name in names)):
            yield {name: split for name, split in zip(names, splits, strict=True) if split.axes}

    def _choice(self, op: Op, rule: SplitRule, here: Sequence[Value], splits: Mapping[str, Split]) -> _Choice | None:
        used = [axis for split in splits.values() for axis in split.axes]
        if len(set(used)) < len(used):
            return None
        ins = [laid_out(v.type.plain, d, splits, rule.sizes) for v, d in zip(here, rule.ins, strict=True)]
        outs = [laid_out(v.type.plain, d, splits, rule.sizes) for v, d in zip(op.outs, rule.outs, strict=True)]
        if any(t is None for t in (*ins, *outs)) or not _equal_factors(rule, splits, self.sizes):
            return None
        passing = self._passing(op, rule, here, set(used))
        needed = [_with_partial(t, passing, i) for i, t in enumerate(ins)]
        results = [
            t.laid(t.axes, self._sums(rule, splits, dims) | passing.keys(), t.blocks)
            for t, dims in zip((t for t in outs if t is not None), rule.outs, strict=True)
        ]
        return _Choice(tuple(needed), tuple(results), self._cost(op, here, needed, results, set(used)))

    def _sums(self, rule: SplitRule, splits: Mapping[str, Split], dims: Sequence[tuple[str, ...]]) -> set[str]:
        """Return the axes over which a result is partial."""
        here = {name for factors in dims for name in factors}
        return {axis for name, s in splits.items() if name not in here and rule.leaves_sums(name) for axis in s.axes}

    def _passing(self, op: Op, rule: SplitRule, here: Sequence[Value], taken: set[str]) -> dict[str, frozenset[int]]:
        """Return the axes over which partial sums pass through the operation, with the operands that have them."""
        passing: dict[str, frozenset[int]] = {}
        for axis in sorted({axis for value in here for axis in value.type.partial}):
            operands = frozenset(i for i, value in enumerate(here) if axis in value.type.partial)
            if axis not in taken and operands in rule.linear and _keeps(op, operands):
                passing[axis] = operands
        return passing

    def _cost(
        self,
        op: Op,
        here: Sequence[Value],
        ins: Sequence[TensorType],
        outs: Sequence[TensorType],
        axes: set[str],
    ) -> float:
        moved = 0.0
        for value, t in zip(here, ins, strict=True):
            moved += self._moved(value, t, op)
        for value, t in zip(op.outs, outs, strict=True):
            # A sum that is added up later counts as one that is added up here.
            final = self._final(value, t)
            moved += moved_bytes(t, final, self.sizes) + moved_bytes(final, self.all.wanted(value), self.sizes)
        work, devices = cost_of(op), prod(self.sizes.get(axis, 1) for axis in axes)
        return moved + (work.flops * _FLOP + work.bytes * _TOUCHED) / devices

    def _moved(self, value: Value, t: TensorType, op: Op) -> float:
        """Estimate the bytes that laying a value out in another way moves for an operation: none if that was done
        before, and a share if later operations are likely to take it so, too."""
        maker = self.makers.get(value.name)
        while value.type != t and (value.name, t) not in self.adapted and maker is not None and maker.kind in _MOVES:
            operand = self._before_view(maker, value, t)
            if operand is None:
                break
            value, t = maker.ins[0], operand
            maker = self.makers.get(value.name)
        if value.type == t or (value.name, t) in self.adapted:
            return 0.0
        return moved_bytes(value.type, t, self.sizes) / len(self._takers(value, t) | {id(op)})

    def _takers(self, value: Value, t: TensorType) -> set[int]:
        """Return the operations to come that are likely to take a value, or a view of it, in a layout."""
        takers = set()
        for op, i in self.readers.get(value.name, ()) if not t.partial else ():
            if op.kind in _MOVES:
                result = self._after_view(op, t)
                takers |= self._takers(op.outs[0], result) if result is not None else set()
            elif self._expects(op, i, t):
                takers.add(id(op))
        return takers

    def _expects(self, op: Op, operand: int, t: TensorType) -> bool:
        """Return whether an operation is likely to take an operand in a layout: its results, and its other operands,
        are suggested to lie so that it has to."""
        if op.kind == "reshard" or OPS[op.kind].family == "state":
            return False
        rule, splits = self.all.suggested.rules[id(op)], dict[str, Split]()
        types = [*(self.all.wanted(v) for v in (*op.outs, *(x for i, x in enumerate(op.ins) if i != operand)))]
        dimensions = [*rule.outs, *(dims for i, dims in enumerate(rule.ins) if i != operand)]
        for other, dims in zip(types, dimensions, strict=True):
            for name, split in self._read(other, dims, rule):
                used = {axis for known in splits.values() for axis in known.axes}
                if name not in splits and used.isdisjoint(split.axes) and allowed(op, rule, name):
                    splits[name] = split
        return laid_out(t.plain, rule.ins[operand], splits, rule.sizes) == t

    def _read(self, t: TensorType, dimensions: Dimensions, rule: SplitRule) -> Iterator[tuple[str, Split]]:
        """Yield the names of a rule that the layout of an operand or result splits, with how."""
        for dim, factors in enumerate(dimensions):
            if (axes := t.axes_of(dim)) and factors:
                parts = prod(self.sizes.get(axis, 1) for axis in axes)
                read = read_split(factors, Split(axes, t.blocks_of(dim)), rule.sizes, parts)
                if read is not None:
                    yield read

    def _after_view(self, view: Op, t: TensorType) -> TensorType | None:
        """Return the layout of a view's result, of an operand that lies so; None where there is none."""
        rule = self.all.suggested.rules[id(view)]
        splits = dict(self._read(t, rule.ins[0], rule))
        if laid_out(t.plain, rule.ins[0], splits, rule.sizes) != t or not _equal_factors(rule, splits, self.sizes):
            return None
        return laid_out(view.outs[0].type.plain, rule.outs[0], splits, rule.sizes)


def _coarser(split: Split) -> Iterator[Split]:
    """Yield a split, and those over its major axes alone: what is left of it where its minor axes are gathered."""
    for count in range(len(split.axes), 0, -1):
        yield Split(split.axes[:count], split.blocks)


def _with_partial(t: TensorType | None, passing: Mapping[str, frozenset[int]], operand: int) -> TensorType:
    assert t is not None
    return t.laid(t.axes, [axis for axis, operands in passing.items() if operand in operands], t.blocks)


def _equal_factors(rule: SplitRule, splits: Mapping[str, Split], sizes: Mapping[str, int]) -> bool:
    """Return whether names are split into equal parts that need them, such as factors beside others."""
    for dimensions in rule.operands():
        for factors in dimensions:
            for name in factors:
                equal = name in splits and not is_alone(rule, name, factors)
                if equal and not fits(splits[name], rule.sizes[name], sizes, alone=False):
                    return False
    return True


def _keeps_axes(before: TensorType, after: TensorType) -> bool:
    """Return whether what splits the partial sum splits the sum in the same way."""
    return all(
        set(before.axes_of(i)) <= set(after.axes_of(i)) and before.blocks_of(i) == after.blocks_of(i)
        for i in range(before.rank)
    )


def _suffix(t: TensorType) -> str:
    return "partial" if t.partial else "unlaid"
