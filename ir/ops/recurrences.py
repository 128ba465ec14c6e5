"""Recurrences: steps written one behind the other that do the same with the state that the step before left.

In: the operations of a graph, and a concatenation of the results of all steps. Out: a `Recurrence`, or None. Its steps
are all but the first one. Each has one product of the state with the same matrix, and elementwise operations and layout
changes behind it. A step reads its product, the state of the step before, and values that are the same for all steps.
It also reads slices whose places move by the same distance from step to step.

Limits: one product a step; at least four steps; states of two dimensions in float32. What depends on the state alone
(peepholes) makes steps unlike the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.ir.attrs import Attr
from penstock.ir.graph import ANNOTATIONS, Op, Value

from . import OPS, complete_attrs
from .layout import VIEWS
from .table import axis_of, ints

# Two steps tell how far slices move, the third that they go on like that; the first step is not one of them.
LEAST_STEPS = 4
# The step that stands for all others: the first one whose states were made by a step.
MODEL_STEP = 2
# Rows of larger batches fill the loops of products.
_MOST_ROWS = 64


@dataclass(frozen=True)
class Recurrence:
    """Steps that do the same, and the concatenation of their results.

    `products` and `ops` are those of steps 1, 2, ...; `ops` includes products and the concatenation, and `views` are
    the layout changes among them. `states` has the values of each state: the one before step 1, and that after each
    step. The first state is the operand of the products and the result of a step. `last` is that of the last step in
    other shapes, where these are read elsewhere. `moving` are the slices of `MODEL_STEP`, with the distance that their
    start moves with a step. With `backward` the last part of the concatenation is the first step's.
    """

    concat: Op
    products: tuple[Op, ...]
    ops: tuple[Op, ...]
    views: tuple[Op, ...]
    states: tuple[tuple[Value, ...], ...]
    last: tuple[Value, ...]
    moving: Mapping[Value, tuple[int, ...]]
    backward: bool


Makers = Mapping[Value, Op]
Readers = Mapping[Value, Sequence[Op]]


@dataclass(frozen=True)
class _Leaf:
    """An operand of a step that no step makes: a value behind slices and reshapes. `starts` are those of the slices."""

    value: Value
    base: object
    shape: tuple[object, ...]
    slices: tuple[Value, ...]
    starts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _ComparedStep:
    """The operations of a step, each behind its operands, and for each the operands: the number of another operation,
    "product", the number of a state's operation in the step before, or a leaf."""

    nodes: tuple[Op, ...]
    operands: tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class _StateOf:
    """A value of the step before: that of the operation with this number."""

    number: int


def find_recurrence(
    concat: Op, ops: Sequence[Op], makers: Makers, readers: Readers, results: frozenset[Value] | set[Value]
) -> Recurrence | None:
    """Return the recurrence whose results a concatenation joins. `ops` are in order; layout changes may be missing."""
    roots = _results_of_steps(concat, makers)
    for backward in (False, True):
        products = _products(roots[::-1] if backward else roots, readers)
        if products:
            return _Finder(ops, makers, readers, results, concat, products).find(
                roots[::-1] if backward else roots, backward
            )
    return None


def _results_of_steps(concat: Op, makers: Makers) -> list[Value]:
    parts = concat.ins
    if (
        concat.kind != "concat"
        or len(parts) < LEAST_STEPS
        or axis_of(complete_attrs(concat)["axis"], parts[0].type.rank)
    ):
        return []
    if any(part.type != parts[0].type for part in parts) or parts[0].type.dims[0] != 1:
        return []
    roots = []
    for part in parts:
        while (maker := makers.get(part)) is not None and maker.kind == "reshape":
            part = maker.ins[0]
        roots.append(part)
    same = len(set(roots)) == len(roots) and all(r.type == roots[0].type for r in roots)
    small = roots[0].type.rank == 2 and roots[0].type.size > 0 and roots[0].type.dims[0] <= _MOST_ROWS
    return roots if same and small and roots[0].type.dtype == "f32" else []


def _products(roots: Sequence[Value], readers: Readers) -> list[Op]:
    """Return the product of every step but the first with the state before it, all with one matrix."""
    products: list[Op] = []
    for root in roots[:-1]:
        of_state = [op for op in readers.get(root, ()) if op.kind == "matmul" and op.ins[0] is root]
        if len(of_state) != 1 or of_state[0].ins[1].type.rank != 2 or complete_attrs(of_state[0])["ta"]:
            return []
        if products and (of_state[0].ins[1] is not products[0].ins[1] or _attrs(of_state[0]) != _attrs(products[0])):
            return []
        products += of_state
    return products


def _attrs(op: Op) -> tuple[tuple[str, Attr], ...]:
    kept = {k: v for k, v in complete_attrs(op).items() if k not in ANNOTATIONS}
    return tuple(sorted(kept.items(), key=lambda item: item[0]))


class _Finder:
    """The comparison of the steps behind products."""

    def __init__(
        self,
        ops: Sequence[Op],
        makers: Makers,
        readers: Readers,
        results: frozenset[Value] | set[Value],
        concat: Op,
        products: Sequence[Op],
    ) -> None:
        self.makers, self.readers, self.results = makers, readers, results
        self.concat, self.products = concat, products
        # The last step that a value depends on; 0 for those in front of step 1.
        self.level: dict[Value, int] = {product.outs[0]: t for t, product in enumerate(products, 1)}
        for op in ops:
            if op.outs and op.outs[0] not in self.level:
                level = max((self._level(v) for v in op.ins), default=0)
                self.level |= dict.fromkeys(op.outs, level)

    def _level(self, value: Value) -> int:
        if value not in self.level:
            maker = self.makers.get(value)
            inside = maker is not None and maker.kind in VIEWS
            self.level[value] = max((self._level(v) for v in maker.ins), default=0) if inside and maker else 0
        return self.level[value]

    def find(self, roots: Sequence[Value], backward: bool) -> Recurrence | None:
        steps: list[_ComparedStep] = []
        numbers: dict[Value, int] = {}
        for t, root in enumerate(roots[1:], 1):
            step = self._step(root, t, numbers)
            if step is None or (t > MODEL_STEP and not _alike(steps[MODEL_STEP - 1], step)):
                return None
            steps.append(step)
            numbers = {op.outs[0]: i for i, op in enumerate(step.nodes)}
        model = steps[MODEL_STEP - 1]
        before = _states_before(steps[0], model, len(model.nodes) - 1, roots[0])
        moving = _moving(steps)
        if before is None or moving is None:
            return None
        states = tuple((value, *(step.nodes[number].outs[0] for step in steps)) for number, value in before.items())
        if any(value.type != roots[0].type for state in states for value in state):
            return None
        nodes = [op for step in steps for op in step.nodes]
        of_parts, last = self._views_of_parts(roots)
        views = [op for op in nodes if op.kind in VIEWS] + of_parts
        inside = [*self.products, *(op for op in nodes if op.kind not in VIEWS), *last, self.concat]
        left = {state[-1] for state in states} | {op.outs[0] for op in last}
        if not self._is_closed([*inside, *views], left):
            return None
        return Recurrence(
            self.concat,
            tuple(self.products),
            tuple(inside),
            tuple(views),
            states,
            tuple(op.outs[0] for op in last),
            moving,
            backward,
        )

    def _views_of_parts(self, roots: Sequence[Value]) -> tuple[list[Op], list[Op]]:
        """Return the reshapes between the results of steps and the concatenation, but for the first step's; apart from
        them, those of the last step that something else reads."""
        views: list[Op] = []
        last: list[Op] = []
        for part in self.concat.ins:
            chain = []
            while part not in roots:
                chain.append(self.makers[part])
                part = self.makers[part].ins[0]
            for op in chain if part is not roots[0] else ():
                others = {id(r) for r in self.readers.get(op.outs[0], ())} - {id(o) for o in (*chain, self.concat)}
                shown = part is roots[-1] and (others or op.outs[0] in self.results)
                (last if shown else views).append(op)
        return views, last

    def _is_closed(self, ops: Sequence[Op], states: set[Value]) -> bool:
        """Return whether nothing else reads what the steps make, but their last states and the concatenation."""
        inside = {id(op) for op in ops}
        return all(
            v in states
            or op is self.concat
            or (v not in self.results and all(id(r) in inside for r in self.readers.get(v, ())))
            for op in ops
            for v in op.outs
        )

    def _step(self, root: Value, t: int, earlier: Mapping[Value, int]) -> _ComparedStep | None:
        """Collect the operations between a product and the result of its step, by a walk without recursion."""
        product = self.products[t - 1].outs[0]
        nodes: list[Op] = []
        numbers: dict[Value, int] = {}
        stack = [(root, False)]
        while stack:
            value, ready = stack.pop()
            if value in numbers or value is product or self._level(value) != t:
                continue
            op = self.makers[value]
            if len(op.outs) != 1 or not (op.kind in ("slice", "reshape") or OPS[op.kind].family == "elementwise"):
                return None
            if ready:
                numbers[value] = len(nodes)
                nodes.append(op)
                continue
            stack.append((value, True))
            stack += [(v, False) for v in reversed(op.ins)]
        operands = []
        for op in nodes:
            refs = tuple(self._operand(v, t, product, numbers, earlier) for v in op.ins)
            if any(ref is None for ref in refs) or (op.kind in VIEWS and isinstance(refs[0], _StateOf)):
                return None
            operands.append(refs)
        return _ComparedStep(tuple(nodes), tuple(operands)) if nodes and nodes[-1].outs[0] is root else None

    def _operand(
        self, value: Value, t: int, product: Value, numbers: Mapping[Value, int], earlier: Mapping[Value, int]
    ) -> object:
        if value is product:
            return "product"
        if value in numbers:
            return numbers[value]
        if value in earlier:
            return _StateOf(earlier[value])
        return self._leaf(value) if self._level(value) == 0 else None

    def _leaf(self, value: Value) -> _Leaf:
        base, shape, slices, starts = value, [], [], []
        while (maker := self.makers.get(base)) is not None and maker.kind in ("slice", "reshape"):
            attrs = dict(_attrs(maker))
            if maker.kind == "slice":
                start, stop = ints(attrs.pop("start")), ints(attrs.pop("stop"))
                starts.append(start)
                slices.append(base)
                attrs["size"] = tuple(b - a for a, b in zip(start, stop, strict=True))
            shape.append((maker.kind, tuple(sorted(attrs.items(), key=lambda item: item[0]))))
            base = maker.ins[0]
        maker = self.makers.get(base)
        constant = _attrs(maker) if maker is not None and maker.kind == "const" else base
        return _Leaf(value, constant, tuple(shape), tuple(slices), tuple(starts))


def _alike(model: _ComparedStep, step: _ComparedStep) -> bool:
    """Return whether two steps do the same, wherever their slices lie."""
    if len(model.nodes) != len(step.nodes):
        return False
    return all(
        a.kind == b.kind and _attrs(a) == _attrs(b) and all(map(_same, ours, theirs))
        for a, b, ours, theirs in zip(model.nodes, step.nodes, model.operands, step.operands, strict=True)
    )


def _same(a: object, b: object) -> bool:
    if isinstance(a, _Leaf) and isinstance(b, _Leaf):
        return (a.base, a.shape) == (b.base, b.shape)
    return a == b


def _states_before(first: _ComparedStep, model: _ComparedStep, result: int, root: Value) -> dict[int, Value] | None:
    """Return the numbers of the operations that make states, with the value of each before step 1: the first step has
    leaves where later ones read states. None where the first step does something else."""
    before = {result: root}
    if len(first.nodes) != len(model.nodes):
        return None
    for a, b, ours, theirs in zip(first.nodes, model.nodes, first.operands, model.operands, strict=True):
        if a.kind != b.kind or _attrs(a) != _attrs(b):
            return None
        for x, y in zip(ours, theirs, strict=True):
            if isinstance(y, _StateOf):
                if not isinstance(x, _Leaf) or before.setdefault(y.number, x.value) is not x.value:
                    return None
            elif not _same(x, y):
                return None
    return before


def _moving(steps: Sequence[_ComparedStep]) -> dict[Value, tuple[int, ...]] | None:
    """Return the slices of the model step with the distance that they move from step to step; None where it differs."""
    moving: dict[Value, tuple[int, ...]] = {}
    model = steps[MODEL_STEP - 1]
    for i, operands in enumerate(model.operands):
        for k, leaf in enumerate(operands):
            if not isinstance(leaf, _Leaf):
                continue
            rows = [step.operands[i][k] for step in steps]
            starts = [row.starts for row in rows if isinstance(row, _Leaf)]
            for s, value in enumerate(leaf.slices):
                ways = {tuple(b - a for a, b in zip(x[s], y[s], strict=True)) for x, y in pairwise(starts)}
                if len(ways) != 1 or moving.setdefault(value, next(iter(ways))) not in ways:
                    return None
    return moving
