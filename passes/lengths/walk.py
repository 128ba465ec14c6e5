"""A walk through a graph along one bounded dimension: which values have it, and which operations need masks.

A bounded dimension is treated as one that is split over an axis, by the rules of ir/sharding/rules.py. Names of a rule
without a mark are free: their elements do not see each other, and padding changes nothing. A name that is summed over
gets zeros for padding where it may hold something else. A name with an own form gets that of forms.py. Everything else
is a problem, and so are operations that do not follow these rules. All problems are gathered.

In: a graph, the bounded dimensions of its inputs, and `grown`: bounded dimensions of values that no operand has, such
as that of a table that is cut to the length. The walk adds to it where it knows what is `expected`: the bounded
dimensions of every value, or of some `by_name`. `ends` are results of slices that take the last element. Out: the graph
with masks, the layout of every value, and problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.ir.graph import Graph, Namer, Op, Value
from penstock.ir.ops import ints
from penstock.ir.sharding.rules import rule_apart
from penstock.ir.sharding.splits import UNSPLIT, Dimensions, Split, SplitRule, read_split, split_of
from penstock.ir.types import TensorType
from penstock.passes.sharding.padding import ANYTHING, FINITE, ZERO, padding_of

from .forms import FORMS, attention, last
from .masks import MaskWriter

# Operations whose results may have a bounded dimension that no operand has.
GROWING = ("const", "iota", "broadcast", "slice")
# Finite numbers make finite numbers, too: a norm divides by more than its epsilon.
_FINITE_OF_FINITE = ("layer_norm", "batch_norm", "softmax", "gather", "attention")


class LengthWalk:
    """The walk through one graph."""

    def __init__(
        self,
        graph: Graph,
        name: str,
        size: int,
        places: Mapping[str, Sequence[int]],
        grown: dict[str, tuple[int, ...]],
        *,
        expected: Mapping[str, Sequence[int]] | None = None,
        by_name: bool = False,
        ends: Sequence[str] = (),
    ) -> None:
        self.graph, self.name, self.size, self.places, self.grown = graph, name, size, places, grown
        self._expected, self._by_name, self._ends = expected, by_name, ends
        self.masks = MaskWriter(Namer.of(graph), name, size)
        self.problems: list[str] = []
        # Values whose elements are all one number: they have any layout.
        self._uniform: set[str] = set()
        # Values that follow from no input: their padding is what the model computes at this size.
        self._own: set[str] = set()
        self._axis = "bounded"
        # Set once an operation's result in one row depends on another row.
        self.mixes = False

    def run(self, *, clean: bool = False) -> Graph:
        """Walk through the graph. With `clean` its inputs get zeros for padding first."""
        b, replaced = self.masks, dict[str, Value]()
        for value in self.graph.ins:
            dims = self.places.get(value.name, ())
            self._define(value, self._with(value.type, dims), ANYTHING)
            if dims and clean:
                cleaned = b.with_padding(value, dims, 0.0)
                self._define(cleaned, self._with(value.type, dims), ZERO)
                replaced[value.name] = cleaned
        for op in self.graph.ops:
            b.loc = op.loc
            if any(x.name in replaced for x in op.ins):
                op = op.with_ins(tuple(replaced.get(x.name, x) for x in op.ins))
            before = len(b.ops)
            reason = self._take(op)
            if reason is not None:
                del b.ops[before:]
                b.ops.append(op)
                self.problems.append(f"{op.kind} {op.loc or '%' + op.outs[0].name}: {reason}")
                for value in op.outs:
                    self._define(value, value.type, ANYTHING)
        for value in self.graph.outs:
            if any(b.blocks_of(value, dim) > 1 for dim in b.dims_of(value)):
                self.problems.append(f"output %{value.name}: mixes {self.name} with other dimensions")
        ins = (*self.graph.ins, b.live) if b.used else self.graph.ins
        return Graph(self.graph.name, ins, self.graph.outs, tuple(b.ops), self.graph.saved)

    def dims_of(self, name: str, rank: int) -> list[int]:
        """Return the bounded dimensions of a value."""
        laid = self.masks.laid.get(name)
        return [] if laid is None else [dim for dim in range(rank) if laid.axes_of(dim)]

    # ------------------------------------------------------------------------------------ layouts

    def _with(self, t: TensorType, dims: Sequence[int]) -> TensorType:
        return t.laid([(self._axis,) if i in dims else () for i in range(t.rank)])

    def _define(self, value: Value, laid: TensorType, padding: int) -> None:
        if not laid.is_plain:
            self.masks.laid[value.name] = laid
            self.masks.padding[value.name] = padding

    def _split_at(self, value: Value, dim: int) -> Split:
        laid = self.masks.laid.get(value.name)
        return UNSPLIT if laid is None else Split(laid.axes_of(dim), laid.blocks_of(dim))

    def _take(self, op: Op) -> str | None:
        """Write one operation; return why it cannot be bounded, or None."""
        self._note_constant(op)
        marked = [x for x in op.ins if x.name in self.masks.laid]
        if not marked:
            return self._grow(op)
        rule = rule_apart(op)
        splits, problem = self._splits(op, rule)
        problem = problem or self._write(op, rule, splits)
        if problem:
            return problem
        results = [
            _laid(v.type, dimensions, splits, rule.sizes) for v, dimensions in zip(op.outs, rule.outs, strict=True)
        ]
        laid = []
        for value, result in zip(op.outs, results, strict=True):
            if result is None:
                return "joins two bounded dimensions into one"
            whole, problem = self._grown(op, value, result)
            if problem:
                return problem
            laid.append(whole)
        for value, result, state in zip(op.outs, laid, self._states(op, laid), strict=True):
            self._define(value, result, state)
        if all(x.name in self._own for x in marked):
            self._own.update(v.name for v in op.outs)
        return None

    def _grown(self, op: Op, value: Value, laid: TensorType) -> tuple[TensorType, str | None]:
        """Return a layout with the bounded dimensions that no operand has, and what is wrong with it."""
        if self._expected is not None and (not self._by_name or value.name in self._expected):
            have, want = {i for i in range(laid.rank) if laid.axes_of(i)}, set(self._expected.get(value.name, ()))
            if have - want or (want - have and op.kind not in GROWING and not self._by_name):
                return laid, f"does not follow {self.name} as its operands do"
            if want - have:
                self.grown[value.name] = tuple(sorted(want - have))
        if more := self.grown.get(value.name, ()):
            axes = [(self._axis,) if laid.axes_of(i) or i in more else () for i in range(laid.rank)]
            laid = value.type.laid(axes, (), [laid.blocks_of(i) for i in range(laid.rank)])
        for dim in range(laid.rank):
            if laid.axes_of(dim) and laid.dims[dim] // laid.blocks_of(dim) % self.size:
                return laid, f"makes a dimension of {laid.dims[dim]}, which is no multiple of {self.name}"
        return laid, None

    def _grow(self, op: Op) -> str | None:
        """Write an operation none of whose operands is bounded; its results may be."""
        self.masks.ops.append(op)
        for value in op.outs:
            laid, problem = self._grown(op, value, value.type)
            if problem:
                return problem
            self._define(value, laid, FINITE)
            self._own.add(value.name)
        return None

    def _splits(self, op: Op, rule: SplitRule) -> tuple[dict[str, Split], str | None]:
        """Return how the names of a rule are split by the operands, and what is wrong."""
        splits: dict[str, Split] = {}
        sure: dict[str, bool] = {}
        for value, dimensions in zip(op.ins, rule.ins, strict=True):
            for dim in self.dims_of(value.name, value.type.rank):
                split = self._split_at(value, dim)
                if op.kind == "slice" and (part := self._cut(op, dim)) is not None:
                    if part:
                        return splits, part
                    continue
                read = read_split(dimensions[dim], split, rule.sizes, 1) if dimensions[dim] else None
                if read is None:
                    return splits, f"mixes {self.name} with other dimensions, or changes its size"
                factor, known = read[0], splits.get(read[0])
                certain = value.name not in self._uniform
                if known is not None and known != read[1] and certain and sure[factor]:
                    return splits, "takes operands that are padded in different places"
                if known is None or (certain and not sure[factor]):
                    splits[factor], sure[factor] = read[1], certain
        return splits, None

    def _cut(self, op: Op, dim: int) -> str | None:
        """Look at the part of a bounded dimension that a slice takes: None for all of it, "" for elements that every
        request has, else what is wrong."""
        start, stop, step = (ints(op.attrs[key])[dim] for key in ("start", "stop", "step"))
        if (start, stop, step) == (0, op.ins[0].type.dims[dim], 1):
            return None
        one_block = self._split_at(op.ins[0], dim).blocks == 1
        if one_block and (stop <= self.masks.least or self._last_of(op) == dim):
            return ""
        return f"takes elements {start} to {stop - 1}, which a request of size {self.masks.least} does not have"

    def _last_of(self, op: Op) -> int | None:
        """Return the bounded dimension of which a slice takes the last element, or None."""
        if op.kind != "slice" or op.outs[0].name not in self._ends:
            return None
        sizes = [int(n) for n in op.ins[0].type.dims]
        start, stop = ints(op.attrs["start"]), ints(op.attrs["stop"])
        dims = self.dims_of(op.ins[0].name, op.ins[0].type.rank)
        return next((dim for dim in dims if sizes[dim] > 1 and stop[dim] == sizes[dim] == start[dim] + 1), None)

    # ------------------------------------------------------------------------------------ operations

    def _write(self, op: Op, rule: SplitRule, splits: Mapping[str, Split]) -> str | None:
        b = self.masks
        if (dim := self._last_of(op)) is not None:
            self.mixes = True
            return last(b, op, dim)
        if op.kind == "attention":
            if splits.keys() & {"d", "e"}:
                return f"sums over {self.name} inside of its scores"
            self.mixes |= bool(splits.keys() & {"s", "t"})
            return attention(b, op, set(splits))
        formed = [name for name in splits if rule.has_own_form(name)]
        summed = [name for name in splits if rule.leaves_sums(name) and name not in formed]
        refused = [name for name in splits if not rule.may_split(name)]
        if refused or (formed and op.kind not in FORMS):
            return f"works along {self.name}, and has no form for sizes that change"
        self.mixes |= bool(formed or summed)
        if formed or (op.kind == "sum" and summed):
            dims = [d for d, factors in enumerate(rule.ins[0]) if any(name in (*formed, *summed) for name in factors)]
            dims = [d for d in dims if d in self.dims_of(op.ins[0].name, op.ins[0].type.rank)]
            return FORMS[op.kind](b, self._guarded(op), dims)
        if summed:
            return self._summed(op, rule, summed)
        b.ops.append(self._guarded(op))
        return None

    def _guarded(self, op: Op) -> Op:
        """Return a look-up none of whose indices is what padding holds."""
        if op.kind != "gather" or not (dims := self.dims_of(op.ins[1].name, op.ins[1].type.rank)):
            return op
        if self.masks.padding[op.ins[1].name] == ZERO or op.ins[1].name in self._own:
            return op
        return op.with_ins((op.ins[0], self.masks.with_padding(op.ins[1], dims, 0.0)))

    def _summed(self, op: Op, rule: SplitRule, summed: Sequence[str]) -> str | None:
        """Write an operation that sums products. One factor has to be zero in padding, all others finite."""
        b, ins = self.masks, list(op.ins)
        for name in summed:
            places = [
                (i, dim)
                for i, dimensions in enumerate(rule.ins)
                for dim, factors in enumerate(dimensions)
                if name in factors and dim in self.dims_of(op.ins[i].name, op.ins[i].type.rank)
            ]
            states = {i: b.padding[op.ins[i].name] for i, _ in places}
            if ZERO in states.values() and max(states.values()) <= FINITE:
                continue
            worst = [i for i in states if states[i] == ANYTHING] or list(states)[:1]
            for i, dim in places:
                if i in worst:
                    ins[i] = b.masked(ins[i], dim, b.blocks_of(op.ins[i], dim), 0.0)
        b.ops.append(op.with_ins(tuple(ins)))
        return None

    # ------------------------------------------------------------------------------------ elements

    def _note_constant(self, op: Op) -> None:
        if op.kind == "const":
            value = op.attrs["value"]
            elements = value if isinstance(value, tuple) else (value,)
            self.masks.constants[op.outs[0].name] = tuple(float(x) for x in elements if not isinstance(x, str))
            if not isinstance(value, tuple):
                self._uniform.add(op.outs[0].name)
        elif op.kind in ("broadcast", "reshape", "transpose") and op.ins[0].name in self._uniform:
            self._uniform.add(op.outs[0].name)
        elif op.kind in ("reshape", "cast") and op.ins[0].name in self.masks.constants:
            self.masks.constants[op.outs[0].name] = self.masks.constants[op.ins[0].name]

    def _states(self, op: Op, laid: Sequence[TensorType]) -> tuple[int, ...]:
        """Return what the padding of results holds."""
        b = self.masks
        known = [b.padding.get(x.name) for x in op.ins]
        worst = max((state for state in known if state is not None), default=FINITE)
        if (
            op.kind == "div"
            and (constant := b.constants.get(op.ins[1].name))
            and known[1] is None
            and 0 not in constant
        ):
            return (max(worst, FINITE),)
        if op.kind in _FINITE_OF_FINITE and worst <= FINITE:
            return (FINITE,) * len(op.outs)
        ins = tuple(Value(x.name, b.laid.get(x.name, x.type)) for x in op.ins)
        outs = tuple(Value(x.name, t) for x, t in zip(op.outs, laid, strict=True))
        return padding_of(Op(op.kind, ins, outs, op.attrs, op.loc), known)


def _laid(
    t: TensorType, dimensions: Dimensions, splits: Mapping[str, Split], sizes: Mapping[str, int]
) -> TensorType | None:
    """Return a result's type with the given splits of names; None where two of them meet in one dimension. Unlike an
    axis of devices, the bounded size may be that of several dimensions."""
    chosen = [split_of(factors, splits, sizes) for factors in dimensions]
    if any(split is None for split in chosen):
        return None
    kept = [split or UNSPLIT for split in chosen]
    return t.laid([split.axes for split in kept], (), [split.blocks for split in kept])
