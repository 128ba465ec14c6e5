"""The dimension that samples lie along, of every input and output of a model.

In: a model of one graph, and names of dimensions that have the same size for a reason (symbols of its file). Out: the
inputs and outputs whose samples lie elsewhere than along the first dimension, as `Module.batch` has them.

A dimension of an input is followed through the graph both ways, by the names that rules of operations give dimensions
(rules.py). It is one of samples if it reaches every input, and on its way no operation mixes what lies along it or
takes it apart, and no parameter has it. Sums over it are allowed: a loss is one. Of several such dimensions one counts
that outputs have, and the first of them.

    x [batch, time, width]   state [2, batch, 64]   ->   `batch %state 1`: the recurrence adds rows of both

Where no dimension is like this, samples are taken to lie along the first one, as is usual, unless something speaks
against it: a parameter has it, slices are cut of it, or the inputs do not agree. Then the input is `whole`, and a
microbatch is one sample.

Limits: operations say nothing about a dimension of size 1; there symbols alone count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from penstock.ir.graph import PARAM, Graph, Module, Op, Value, Var
from penstock.ir.ops import OPS

from .rules import rule_of
from .splits import Factors, Split, SplitRule, read_split, split_of

# For every input or output of a model the symbols of its dimensions; empty where a dimension has none.
Symbols = Mapping[str, Sequence[str]]
_SAMPLES = ("samples",)
_NO_SYMBOLS: Symbols = {}

# Reasons why a dimension is none of samples.
_MIXED, _APART, _SLICED, _LEARNT, _UNKNOWN = "mixed", "apart", "sliced", "learnt", "unknown"
# Those that speak against the first dimension even where no other one is known.
_STRONG = {_SLICED, _LEARNT}


@dataclass(frozen=True, slots=True)
class _Dimension:
    """A dimension of a value, and the number of its blocks that have a part of every sample each."""

    value: Value
    dim: int
    blocks: int = 1


@dataclass(slots=True)
class _Followed:
    """The values that a dimension reaches. `against` are reasons why it is none of samples."""

    size: int
    at: dict[Value, _Dimension] = field(default_factory=dict)
    against: set[str] = field(default_factory=set)

    def dim_of(self, value: Value) -> int | None:
        place = self.at.get(value)
        return place.dim if place is not None and place.blocks == 1 else None


class _Follower:
    """A graph, and the operations that every value belongs to."""

    def __init__(self, variables: Mapping[str, Var], graph: Graph, symbols: Symbols) -> None:
        self._learnt = {name for name, var in variables.items() if var.role == PARAM}
        self._ops: dict[Value, list[Op]] = {}
        self._rules: dict[int, SplitRule] = {}
        for op in graph.ops:
            for value in dict.fromkeys((*op.ins, *op.outs)):
                self._ops.setdefault(value, []).append(op)
        self._named: dict[str, list[tuple[Value, int]]] = {}
        for value in dict.fromkeys((*graph.ins, *graph.outs)):
            for dim, symbol in enumerate(symbols.get(value.name, ())):
                if symbol and dim < value.type.rank:
                    self._named.setdefault(symbol, []).append((value, dim))
        self._symbols = {place: name for name, places in self._named.items() for place in places}

    def follow(self, value: Value, dim: int) -> _Followed:
        """Follow a dimension of an input as far as it goes."""
        reached = _Followed(value.type.dims[dim])
        waiting: list[_Dimension] = []
        _arrive(reached, waiting, _Dimension(value, dim))
        while waiting:
            place = waiting.pop()
            if place.blocks == 1:
                # The shape that a file declares of an output may be wrong.
                for other, there in self._named.get(self._symbols.get((place.value, place.dim), ""), ()):
                    if other not in reached.at and other.type.dims[there] == reached.size:
                        _arrive(reached, waiting, _Dimension(other, there))
            if reached.size > 1:
                for op in self._ops.get(place.value, ()):
                    self._pass(op, place, reached, waiting)
        if reached.size == 1 and len(reached.at) == 1:
            reached.against.add(_UNKNOWN)
        return reached

    def _pass(self, op: Op, place: _Dimension, reached: _Followed, waiting: list[_Dimension]) -> None:
        """Go from a value to the others of an operation."""
        if OPS[op.kind].family == "state":
            reached.against.add(_LEARNT if op.var in self._learnt else _MIXED)
            return
        rule = self._rules.setdefault(id(op), rule_of(op))
        values = (*op.ins, *op.outs)
        for value, dimensions in zip(values, rule.operands(), strict=True):
            if value != place.value:
                continue
            read = read_split(dimensions[place.dim], Split(_SAMPLES, place.blocks), rule.sizes, reached.size)
            if read is None or rule.sizes[read[0]] % (reached.size * read[1].blocks):
                reached.against.add(_SLICED if op.kind == "slice" else _APART)
                continue
            name, split = read
            if not rule.may_split(name) or (rule.has_own_form(name) and _has(rule.outs, name)):
                reached.against.add(_MIXED)
            if not rule.may_split(name):
                continue
            for other, there in zip(values, rule.operands(), strict=True):
                for at in _places(other, there, name, split, rule):
                    _arrive(reached, waiting, at)


def values_with(graph: Graph, value: Value, dim: int) -> set[Value]:
    """Return the values that have a dimension of an input, as far as it can be followed."""
    return set(_Follower({}, graph, _NO_SYMBOLS).follow(value, dim).at)


def _arrive(reached: _Followed, waiting: list[_Dimension], place: _Dimension) -> None:
    """Note a place. A value that has the dimension twice compares samples with each other."""
    known = reached.at.get(place.value)
    if known is None:
        reached.at[place.value] = place
        waiting.append(place)
    elif known != place:
        reached.against.add(_MIXED)


def _has(listed: Sequence[Sequence[Factors]], name: str) -> bool:
    return any(name in factors for dimensions in listed for factors in dimensions)


def _places(
    value: Value, dimensions: Sequence[Factors], name: str, split: Split, rule: SplitRule
) -> Iterator[_Dimension]:
    for dim, factors in enumerate(dimensions):
        if name in factors and (whole := split_of(factors, {name: split}, rule.sizes)) is not None:
            yield _Dimension(value, dim, whole.blocks)


# ------------------------------------------------------------------------------------------------ the model


def with_batch_dims(module: Module, symbols: Symbols = _NO_SYMBOLS) -> Module:
    """Return a model of one graph with the dimensions of samples that are not the first; the same one if all are."""
    graph = module.graphs["main"]
    names = {v.name for v in module.data_inputs}
    inputs = [v for v in graph.ins if v.type.rank and v.name in names]
    if not inputs:
        return module
    dims = _Choice(_Follower(module.vars, graph, symbols), inputs, graph).dims()
    return module if dims == module.batch else module.but(batch=dims)


class _Choice:
    """The choice of a dimension of samples."""

    def __init__(self, follower: _Follower, inputs: Sequence[Value], graph: Graph) -> None:
        self._follower, self._inputs, self._outs = follower, inputs, graph.outs
        self._known: list[_Followed] = []

    def dims(self) -> dict[str, int | None]:
        best = self._best()
        if best is not None:
            axes = {v.name: best.dim_of(v) for v in self._inputs}
            return {name: dim for name, dim in axes.items() if dim} | self._of_outputs(best, axes)
        alike = [f for f in self._known if all(f.dim_of(v) == 0 for v in self._inputs)]
        if alike:
            return dict.fromkeys((v.name for v in self._inputs), None) if alike[0].against & _STRONG else {}
        return {} if gcd(*(v.type.dims[0] for v in self._inputs)) == 1 else self._apart()

    def _best(self) -> _Followed | None:
        """Return the dimension of samples that all inputs have; of several one that outputs have, and that lies
        first."""
        outs = [v for v in self._outs if v.type.rank]
        best: tuple[tuple[bool, int], _Followed] | None = None
        for followed in self._all():
            dims = [followed.dim_of(v) for v in self._inputs]
            if followed.against or any(dim is None for dim in dims):
                continue
            summed = bool(outs) and not any(followed.dim_of(v) is not None for v in outs)
            place = (summed, sum(dim or 0 for dim in dims))
            if best is None or place < best[0]:
                best = place, followed
            if place == (False, 0):
                break
        return None if best is None else best[1]

    def _all(self) -> Iterator[_Followed]:
        """Yield every dimension of an input once, the first ones first."""
        for dim in range(max(v.type.rank for v in self._inputs)):
            for value in self._inputs:
                if dim < value.type.rank and not any(
                    f.size == value.type.dims[dim] and f.dim_of(value) == dim for f in self._known
                ):
                    self._known.append(self._follower.follow(value, dim))
                    yield self._known[-1]

    def _of_outputs(self, best: _Followed, axes: Mapping[str, int | None]) -> dict[str, int | None]:
        """Return where the samples of outputs lie, if not where rows of the first dimension suggest."""
        samples = gcd(*(v.type.dims[axes[v.name] or 0] for v in self._inputs))
        dims: dict[str, int | None] = {}
        for value in self._outs:
            dim = best.dim_of(value)
            suggested = 0 if value.type.rank and value.type.dims[0] % samples == 0 else None
            if dim != suggested and value.type.rank and (best.size > 1 or dim is not None):
                dims[value.name] = dim
        return dims

    def _apart(self) -> dict[str, int | None]:
        """Return the dimensions of inputs that do not agree on one. The samples of those that nothing is known about
        are taken to be as many rows, if all have as many."""
        clean = [f for f in self._known if not f.against]
        chosen = max([*clean, self._known[0]], key=lambda f: sum(f.dim_of(v) is not None for v in self._inputs))
        dims = {v.name: chosen.dim_of(v) for v in self._inputs}
        others = [v for v in self._inputs if dims[v.name] is None]
        first = {v.type.dims[0] for v in self._inputs}
        if len(first) == 1 and not any(dims.values()) and not any(self._is_taken_apart(v) for v in others):
            return {}
        return {name: dim for name, dim in dims.items() if dim != 0}

    def _is_taken_apart(self, value: Value) -> bool:
        known = [f for f in self._known if f.dim_of(value) == 0 and f.size == value.type.dims[0]]
        return bool((_STRONG | {_APART}) & known[0].against) if known else True
