"""Merge parallel convolutions for inference: convolutions of one input whose results are added become one.

In: a module that computes and does not train. Out: the same meaning. The terms of a sum that are merged are

  * convolutions by variables, with or without a bias and a `batch_norm` with stored statistics behind it,
  * `batch_norm` of the input itself: one factor for a channel, a kernel of one tap.

They have one input, equal strides, dilations and groups, and results of one type. Their taps lie on one grid: the
smaller kernel is padded with zeros to the place where it lies in the bigger one. Every value between input and sum is
used once. A set of terms grows as long as the merged kernel has no more taps than its terms have together.

The merged weight and bias are expressions of the variables, which stay as they are: bundles take the weights of any
checkpoint. Statistics that are constants become variables with these elements. `packed` on the new convolution says
that its weight never changes. On a CPU `fuse` then has it computed once, when it is packed (passes/kernels/ahead.py).
On other devices it would be computed with every call: a module for those is left alone, and so is one with meshes.

Limit: float32. Rounding differs from that of the terms, as sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from penstock.ir.graph import BUFFER, Graph, Module, Namer, Op, Value, Var
from penstock.ir.liveness import drop_dead
from penstock.ir.ops import OPS, VIEWS, Window, complete_attrs, integer, window_of
from penstock.support.words import counted

from .decompose import Expansion


@dataclass(frozen=True, slots=True)
class MergeConvolutionsOptions:
    """Options of `merge-convolutions`: none."""


def merge_convolutions(module: Module, options: MergeConvolutionsOptions) -> Module:
    """Make one convolution of parallel ones whose results are added, for inference on CPUs."""
    main = module.graphs.get("main")
    changes = any(OPS[op.kind].effect and op.kind != "read" for graph in module.graphs.values() for op in graph.ops)
    cpus = module.cluster is None or all(device.kind == "cpu" for device in module.cluster.devices)
    if main is None or changes or not cpus or module.meshes:
        return module
    merging = _Merging(main, module.vars)
    graph = merging.run()
    if not merging.merged:
        return module
    note = f"{counted(merging.merged, 'convolution')} made of {merging.terms} terms of sums"
    changed = module.but(graphs={**module.graphs, "main": drop_dead(graph)}, vars={**module.vars, **merging.made})
    return changed.noted("merge-convolutions", note)


@dataclass(frozen=True)
class _Term:
    """A term of a sum: a convolution with a bias or without, or the input itself; and the norm behind it."""

    value: Value
    source: Value
    conv: Op | None
    biases: tuple[Value, ...]
    norm: Op | None

    @property
    def window(self) -> Window:
        """The window of the convolution; that of the input itself is one tap."""
        if self.conv is not None:
            return window_of(complete_attrs(self.conv), self.conv.ins[1].type.dims[2:])
        ones, zeros = (1,) * (self.source.type.rank - 2), (0,) * (self.source.type.rank - 2)
        return Window(ones, ones, zeros, zeros, ones)

    @property
    def taps(self) -> int:
        return prod(self.window.kernel) if self.conv is not None else 0


@dataclass(frozen=True)
class _Grid:
    """The taps of a merged convolution: the first one's place before the position, and their number."""

    low: tuple[int, ...]
    kernel: tuple[int, ...]

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    def joined(self, term: _Term, dilations: Sequence[int]) -> _Grid | None:
        """Return the least grid with the taps of a term, too; None where they lie between those of this one."""
        window = term.window
        if any((a - b) % d for a, b, d in zip(self.low, window.low, dilations, strict=True)):
            return None
        low = tuple(map(max, self.low, window.low))
        sizes = []
        for begin, mine, n, its, k, d in zip(
            low, self.low, self.kernel, window.low, window.kernel, dilations, strict=True
        ):
            sizes.append(max((begin - mine) // d + n, (begin - its) // d + k))
        return _Grid(low, tuple(sizes))

    def high(self, window: Window, sizes: Sequence[int], out: Sequence[int]) -> tuple[int, ...] | None:
        """Return the padding behind an input of some sizes; None where no padding gives results of sizes `out`."""
        highs = []
        rows = zip(sizes, out, self.low, self.kernel, window.strides, window.dilations, window.high, strict=True)
        for n, o, low, k, s, d, theirs in rows:
            least = max(0, (o - 1) * s + (k - 1) * d + 1 - n - low)
            # The padding of the largest term, where it fits.
            fitting = [h for h in (theirs, least) if low >= 0 and (n + low + h - (k - 1) * d - 1) // s + 1 == o]
            if not fitting:
                return None
            highs.append(fitting[0])
        return tuple(highs)


class _Merging:
    """The merging of one graph. `merged` counts new convolutions, `terms` what they were made of."""

    def __init__(self, graph: Graph, variables: Mapping[str, Var]) -> None:
        self.graph, self.namer, self.variables = graph, Namer.of(graph), variables
        # Variables with the elements of constants.
        self.made: dict[str, Var] = {}
        self.makers = graph.producers()
        self.readers: dict[Value, list[Op]] = {}
        for op in graph.ops:
            for value in op.ins:
                self.readers.setdefault(value, []).append(op)
        self.results = set(graph.results)
        self.merged = self.terms = 0

    def run(self) -> Graph:
        ops: list[Op] = []
        for op in self.graph.ops:
            ops += (self._sum(op) if self._is_outer(op) else None) or [op]
        return replace(self.graph, ops=tuple(ops))

    # ------------------------------------------------------------------------------ terms

    def _is_once(self, value: Value) -> bool:
        return len(self.readers.get(value, ())) == 1 and value not in self.results

    def _is_outer(self, op: Op) -> bool:
        """Return whether the operation is a sum of images, and no term of another sum."""
        if op.kind != "add" or op.outs[0].type.rank < 3 or op.outs[0].type.dtype != "f32":
            return False
        users = self.readers.get(op.outs[0], [])
        once = self._is_once(op.outs[0])
        return not (once and users[0].kind == "add" and users[0].outs[0].type == op.outs[0].type)

    def _is_fixed(self, value: Value) -> bool:
        """Return whether the value is a variable, whatever its layout."""
        maker = self.makers.get(value)
        while maker is not None and maker.kind in VIEWS:
            maker = self.makers.get(maker.ins[0])
        return maker is not None and maker.kind == "read"

    def _is_steady(self, value: Value) -> bool:
        """Return whether the value is a variable, or a constant."""
        maker = self.makers.get(value)
        return self._is_fixed(value) or (maker is not None and maker.kind == "const")

    def _is_bias(self, value: Value, kind: Value) -> bool:
        """Return whether the value is a variable with one element for each channel of `kind`."""
        dims, rank = value.type.dims, kind.type.rank
        wanted = (1, kind.type.dims[1], *(1,) * (rank - 2))
        return len(dims) <= rank and (1,) * (rank - len(dims)) + dims == wanted and self._is_fixed(value)

    def _addends(self, op: Op) -> list[Value]:
        """Return what a sum of sums adds, in order."""
        addends: list[Value] = []
        for value in op.ins:
            maker = self.makers.get(value)
            if maker is not None and maker.kind == "add" and value.type == op.outs[0].type and self._is_once(value):
                addends += self._addends(maker)
            else:
                addends.append(value)
        return addends

    def _term(self, value: Value) -> _Term | None:
        """Return a value as a term that can be merged; None for other values."""
        maker = self.makers.get(value)
        if maker is None or not self._is_once(value):
            return None
        if maker.kind != "batch_norm":
            return self._conv(value)
        if not all(map(self._is_steady, maker.ins[1:])):
            return None
        inner = self._conv(maker.ins[0])
        return replace(inner, value=value, norm=maker) if inner else _Term(value, maker.ins[0], None, (), maker)

    def _conv(self, value: Value) -> _Term | None:
        maker = self.makers.get(value)
        if maker is None or not self._is_once(value) or maker.kind not in ("conv", "add"):
            return None
        if maker.kind == "conv":
            source, weight = maker.ins
            known = self._is_fixed(weight) and min(_Term(value, source, maker, (), None).window.low, default=0) >= 0
            return _Term(value, source, maker, (), None) if known else None
        biases = [v for v in maker.ins if self._is_bias(v, value)]
        others = [v for v in maker.ins if v not in biases]
        inner = self._conv(others[0]) if len(others) == 1 and others[0].type == value.type else None
        return replace(inner, value=value, biases=(*inner.biases, *biases)) if inner else None

    # ------------------------------------------------------------------------------ sums

    def _sum(self, op: Op) -> list[Op] | None:
        """Return the operations of a sum with its parallel terms merged; None where there are none."""
        (out,) = op.outs
        addends = self._addends(op)
        biases = [v for v in addends if self._is_bias(v, out)]
        terms = [t for v in addends if v.type == out.type and (t := self._term(v)) is not None]
        emit = _Emitting(op, self.namer)
        done: list[Value] = []
        for alike in self._alike(terms):
            for chosen, grid, high in _sets(alike):
                added = biases if not done else []
                chosen = [self._with_variables(term, emit) for term in chosen]
                done.append(emit.merged(chosen, grid, high, added))
                self.merged, self.terms = self.merged + 1, self.terms + len(chosen)
                addends = [v for v in addends if v not in {t.value for t in chosen} and v not in added]
        return emit.total([*done, *addends]) if done else None

    def _with_variables(self, term: _Term, emit: _Emitting) -> _Term:
        """Return a term whose norm reads no lists of numbers: a weight that is packed is computed of variables."""
        ins = [] if term.norm is None else list(term.norm.ins)
        for place, value in enumerate(ins[1:], 1):
            maker = self.makers[value]
            if maker.kind == "const" and isinstance(maker.attrs["value"], tuple):
                name = value.name
                while name in self.variables or name in self.made:
                    name += ".list"
                elements = tuple(float(x) for x in maker.attrs["value"])
                self.made[name] = Var(name, value.type, BUFFER, init=elements)
                ins[place] = emit.read(self.made[name])
        return term if term.norm is None else replace(term, norm=term.norm.with_ins(tuple(ins)))

    def _alike(self, terms: Sequence[_Term]) -> list[list[_Term]]:
        """Return the convolutions with one input, equal strides, dilations and groups, the largest first, and behind
        them the input itself."""
        groups: dict[object, list[_Term]] = {}
        for term in sorted(terms, key=lambda t: -t.taps):
            if term.conv is not None:
                attrs, window = complete_attrs(term.conv), term.window
                key = (term.source, window.strides, window.dilations, attrs["groups"])
                groups.setdefault(key, []).append(term)
        for term in terms:
            fits = (g for g in groups.values() if g[0].source is term.source and set(g[0].window.strides) == {1})
            if term.conv is None and (group := next(fits, None)) is not None:
                group.append(term)
        return list(groups.values())


def _sets(terms: Sequence[_Term]) -> list[tuple[list[_Term], _Grid, tuple[int, ...]]]:
    """Return sets of terms that pay as one convolution, each with its taps and the padding behind its input."""
    sets = []
    left = list(terms)
    while len(left) > 1:
        first = left[0]
        window = first.window
        chosen, grid = [first], _Grid(window.low, window.kernel)
        high: tuple[int, ...] = ()
        for term in left[1:]:
            joined = grid.joined(term, window.dilations)
            if joined is None or joined.taps > grid.taps + term.taps:
                continue
            behind = joined.high(window, first.source.type.dims[2:], first.value.type.dims[2:])
            if behind is not None:
                grid, high = joined, behind
                chosen.append(term)
        left = [t for t in left if t not in chosen]
        if len(chosen) > 1:
            sets.append((chosen, grid, high))
    return sets


class _Emitting(Expansion):
    """The operations in place of a sum, collected as they are emitted."""

    def read(self, var: Var) -> Value:
        """Emit the read of a variable."""
        value = Value(self.namer.fresh(var.name), var.type)
        self.ops.append(Op("read", (), (value,), {"var": var.name, **self.annotations}, self.op.loc))
        return value

    def total(self, values: Sequence[Value]) -> list[Op]:
        """Return all operations, with a sum of values that has the results of the sum they are in place of."""
        total = values[0]
        for value in values[1:]:
            total = self.emit("add", total, value)
        assert self.ops[-1].outs == (total,), "the sum is the last operation"
        return self.done()

    def merged(self, terms: Sequence[_Term], grid: _Grid, high: tuple[int, ...], biases: Sequence[Value]) -> Value:
        """Emit the convolution that terms become, with its bias and the biases of the sum."""
        first = terms[0]
        assert first.conv is not None, "a convolution is first"
        attrs, window = complete_attrs(first.conv), first.window
        weight = self._added([self._weight(term, grid, window, first.conv) for term in terms])
        groups = integer(attrs["groups"])
        strides, dilations = window.strides, window.dilations
        pads = (*grid.low, *high)
        result = self.emit(
            "conv",
            first.source,
            weight,
            groups=groups,
            strides=strides,
            dilations=dilations,
            pads=pads,
            packed=True,
        )
        shifts = [shift for term in terms if (shift := self._shift(term)) is not None]
        shifts += [self._per_channel(bias) for bias in biases]
        if not shifts:
            return result
        column = (1, result.type.dims[1], *(1,) * (result.type.rank - 2))
        return self.emit("add", result, self.emit("reshape", self._added(shifts), shape=column))

    def _added(self, values: Sequence[Value]) -> Value:
        total = values[0]
        for value in values[1:]:
            total = self.emit("add", total, value)
        return total

    def _per_channel(self, value: Value) -> Value:
        """Emit a bias as a list with one element for each channel."""
        return value if value.type.rank == 1 else self.emit("reshape", value, shape=(value.type.size,))

    def _factor(self, norm: Op) -> Value:
        """Emit what a norm multiplies each channel by."""
        eps = self.emit("const", value=complete_attrs(norm)["eps"], dtype="f32")
        return self.emit("mul", norm.ins[1], self.emit("rsqrt", self.emit("add", norm.ins[4], eps)))

    def _shift(self, term: _Term) -> Value | None:
        """Emit what a term adds to each channel; None where it adds nothing."""
        inner = self._added([self._per_channel(b) for b in term.biases]) if term.biases else None
        if term.norm is None:
            return inner
        _, _, bias, mean, _ = term.norm.ins
        centred = self.emit("sub", inner, mean) if inner is not None else self.emit("neg", mean)
        return self.emit("add", self.emit("mul", centred, self._factor(term.norm)), bias)

    def _weight(self, term: _Term, grid: _Grid, window: Window, first: Op) -> Value:
        """Emit the weight of a term, at its place among the taps of the merged kernel."""
        rows, columns = first.ins[1].type.dims[:2]
        ones = (1,) * len(grid.kernel)
        factor = None
        if term.norm is not None:
            factor = self.emit("reshape", self._factor(term.norm), shape=(rows, 1, *ones))
        if term.conv is not None:
            weight = term.conv.ins[1]
            weight = weight if factor is None else self.emit("mul", weight, factor)
        else:
            assert factor is not None, "the input itself has a norm behind it"
            weight = self._diagonal(factor, rows, columns, ones)
        before = [(a - b) // d for a, b, d in zip(grid.low, term.window.low, window.dilations, strict=True)]
        behind = [n - k - b for n, k, b in zip(grid.kernel, term.window.kernel, before, strict=True)]
        if not any((*before, *behind)):
            return weight
        return self.emit("pad", weight, low=(0, 0, *before), high=(0, 0, *behind))

    def _diagonal(self, factor: Value, rows: int, columns: int, ones: tuple[int, ...]) -> Value:
        """Emit the kernel of one tap that multiplies each channel by its factor; `columns` are the channels of a
        group."""
        if columns == 1:
            return factor
        row = self.emit("iota", dtype="i32", shape=(rows, 1, *ones), axis=0)
        if columns < rows:
            row = self.emit("rem", row, self.emit("const", value=columns, dtype="i32"))
        column = self.emit("iota", dtype="i32", shape=(1, columns, *ones), axis=1)
        zero = self.emit("const", value=0.0, dtype="f32")
        return self.emit("where", self.emit("equal", row, column), factor, zero)
