"""Row operations: each needs a few sums or maxima over one axis before the first element of the result is known.

In: softmax, log_softmax, layer_norm, cross_entropy and their gradients along any axis. Out: one loop over rows, in it
one pass over the axis per reduction and one for the results; `Body.finish` runs in the last pass, so a residual
addition behind a layer norm is free. If the axis is the last one, vectors run along it and are folded at the end of a
pass; otherwise vectors run across rows and nothing is folded.

layer_norm: mean = sum(x) / n, rstd = 1 / sqrt(sum((x - mean)^2) / n + eps), in two passes, so no cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.elements import (
    Index,
    axis_of,
    bound_index,
    has_element_rule,
    number,
    table_row,
    unravel,
    zero,
)
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, cast, literal
from penstock.backends.tvm.kernels.tools.loops import RowLoops
from penstock.backends.tvm.kernels.tools.sweep import Combine
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs
from penstock.ir.types import FLOATS

from .sums import LOWEST, ColumnTotals, add, cover, fold

# Independent accumulators of a reduction: enough to keep both units busy through the latency of an addition.
_STREAMS = 4


class Rows:
    """Loops over all rows of a tensor along some consecutive axes: outer dimensions, the axis (one run), inner
    dimensions."""

    # True where `top_and_total` passes over a row once.
    in_one_pass = False

    def __init__(self, body: Body, shape: tuple[int, ...], first: int, last: int, values: Sequence[Value]) -> None:
        self.body, self.emit, self.shape = body, body.emit, shape
        self.outer, self.axis, self.inner = shape[:first], shape[first:last], shape[last:]
        self.length = prod(self.axis)
        self.across = prod(self.inner) > 1
        self.lanes = body.lanes
        others = [op for op in body.group.ops if has_element_rule(op.kind)]
        self._plain = all(body.is_stored(v) for v in values) and body.merged_from(shape, others) <= first
        self._lane: Expr = zero()
        self._again = False
        self._part: Expr = zero()
        self.row: Index = ()
        self.tail: Index = ()
        self.columns = ColumnTotals(body, body.sums, shape, first)
        if body.sums and self.across:
            raise NotOneKernel("sums of columns beside rows that run across them")

    def each(self, one_row: Callable[[], None]) -> None:
        """Emit `one_row` inside the loops over rows."""
        kind = parallel_if(self.body.machine, prod(self.shape))
        if not self.columns.reducers:
            with self.emit.loop(prod(self.outer), kind, "row") as o:
                self._each(o, one_row)
            return
        self.columns.allocate()
        behind = self.body.behind(self.body.sums)
        parts = self.columns.parts
        with self.body.without(behind), self.emit.loop(parts, kind if parts > 1 else SERIAL, "part") as p:
            self._part = p
            self.columns.start(p)
            with self.emit.loop(self.columns.each, SERIAL, "row") as o, self.body.point():
                self._each(p * self.columns.each + o, one_row)
        with self.body.only(behind):
            self.columns.finish(self.along)

    def _each(self, o: Expr, one_row: Callable[[], None]) -> None:
        """Emit one row, or all that lie side by side."""
        self.row = bound_index(self.emit, o, self.outer, "r")
        if not self.across:
            self.tail = tuple(zero() for _ in self.inner)
            with self.body.point():
                self._again = False
                one_row()
            return
        for i, lane in self.emit.spans(prod(self.inner), self.lanes):
            self._lane, self.tail = lane, unravel(i, self.inner)
            with self.body.point():
                one_row()

    def index(self, position: Expr) -> Index:
        """Return the index of an element of this row."""
        return (*self.row, *self.along(position), *self.tail)

    def along(self, position: Expr) -> Index:
        """Return the coordinates within the axis. Stored tensors are indexed by one running coordinate, which needs no
        division."""
        if len(self.axis) == 1 or not self._plain:
            return unravel(position, self.axis)
        return (*(zero(),) * (len(self.axis) - 1), position)

    def scratch(self, dtype: str) -> Callable[[Expr], tuple[Buffer, Expr]] | None:
        """Allocate memory for one row (of every lane), and return the buffer and place of a position. None where
        computing twice is better."""
        width = self.body.lanes if self.across else 1
        buffer = self.emit.alloc(self.length * width, dtype, "row")
        return lambda c: (buffer, c * width + self._lane if self.across else c)

    def reduce(
        self, dtype: str, steps: Sequence[tuple[float, Combine]], element: Callable[[Expr], Sequence[Expr]]
    ) -> list[Expr]:
        """Reduce in one pass: `element` gives the operands at a position; each step is (start value,
        combination)."""
        emit = self.emit
        width = 1 if self.across else self.lanes
        starts = [literal(start, dtype) for start, _ in steps]
        if self.across:
            places = [emit.alloc(self.body.lanes, dtype, "acc") for _ in steps]
            for place, start in zip(places, starts, strict=True):
                emit.store(place, start, self._lane)
            with emit.loop(self.length, name="c") as c, self.body.point():
                for place, (_, combine), x in zip(places, steps, element(c), strict=True):
                    emit.store(place, combine(tirx.BufferLoad(place, [self._lane]), x), self._lane)
            return [emit.bind(tirx.BufferLoad(place, [self._lane])) for place in places]
        whole = self.length // width
        streams = min(_STREAMS, whole)
        kept = [[emit.alloc(width, dtype, "acc") for _ in range(streams)] for _ in steps]
        for places, start in zip(kept, starts, strict=True):
            for place in places:
                with emit.loop(width, VECTOR, "l") as lane:
                    emit.store(place, start, lane)

        def take(stream: int, position: Callable[[Expr], Expr]) -> None:
            with emit.loop(width, VECTOR, "l") as lane, self.body.point():
                for places, (_, combine), x in zip(kept, steps, element(position(lane)), strict=True):
                    emit.store(places[stream], combine(tirx.BufferLoad(places[stream], [lane]), x), lane)

        with self._pass():
            turns = whole // streams if streams else 0
            if turns:
                with emit.loop(turns, name="c") as o:
                    for s in range(streams):
                        take(s, lambda lane, s=s: (o * streams + s) * width + lane)  # type: ignore[misc]
            for s in range(whole - turns * streams):
                take(s, lambda lane, s=s: lane + (turns * streams + s) * width)  # type: ignore[misc]
        totals = [
            [fold(emit, dtype, width, combine, places)] if places else []
            for places, (_, combine) in zip(kept, steps, strict=True)
        ]
        done = whole * width
        for _, size in cover(self.length - done, width):
            places = [emit.alloc(size, dtype, "rest") for _ in steps]
            with emit.loop(size, VECTOR if size > 1 else SERIAL, "l") as lane, self.body.point():
                for place, x in zip(places, element(lane + done if size > 1 else literal(done, "i32")), strict=True):
                    emit.store(place, x, lane)
            for place, total, (_, combine) in zip(places, totals, steps, strict=True):
                total.append(fold(emit, dtype, size, combine, [place]))
            done += size
        results = []
        for parts, start, (_, combine) in zip(totals, starts, steps, strict=True):
            value = start
            for part in parts:
                value = emit.bind(combine(value, part)) if value is not start else part
            results.append(value)
        return results

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """Open one pass over the row."""
        with self.body.stream(self._again):
            yield
        self._again = True

    def one(self, dtype: str, start: float, combine: Combine, element: Callable[[Expr], Expr]) -> Expr:
        return self.reduce(dtype, [(start, combine)], lambda c: [element(c)])[0]

    def top_and_total(self, dtype: str, element: Callable[[Expr], Expr]) -> tuple[Expr, Expr]:
        """Emit the largest element of a row, and the sum of e^(element - largest)."""
        functions = self.body.functions
        top = self.one(dtype, -math.inf, functions.peak, element)
        return top, self.one(dtype, 0, add, lambda c: functions.exp_down(element(c) - top))

    def store(self, element: Callable[[Expr, Index], dict[Value, Expr]]) -> None:
        """Emit the last pass, which stores results at every position of the row."""
        if self.across:
            with self.emit.loop(self.length, name="c") as c, self.body.point():
                index = self.index(c)
                self.body.finish({v: (x, index) for v, x in element(c, index).items()})
            return
        with self._pass():
            for c, _ in pieces(self.emit, self.length, self.body.lanes):
                with self.body.point():
                    index = self.index(c)
                    self.body.finish({v: (x, index) for v, x in element(c, index).items()})
                    self.columns.take(self._part, c, index)


def rows_of(body: Body, shape: tuple[int, ...], first: int, last: int, values: Sequence[Value]) -> RowLoops:
    """Return the rows of a tensor, with the loops of the kernel's device."""
    if body.loops is not None:
        return body.loops.rows(body, shape, first, last, values)
    return Rows(body, shape, first, last, values)


def emit_softmax(body: Body, op: Op) -> None:
    x, y = op.ins[0], op.outs[0]
    axis, dtype = axis_of(op, x), x.type.dtype
    rows = rows_of(body, x.type.dims, axis, axis + 1, [x])

    def one_row() -> None:
        if op.kind == "log_softmax":
            top, total = rows.top_and_total(dtype, lambda c: body.at(x, rows.index(c)))
            shift = body.emit.bind(body.functions.log(total), "s")
            rows.store(lambda c, index: {y: body.at(x, index) - top - shift})
            return
        place = rows.scratch(dtype) if not rows.across else None
        if place is None and rows.in_one_pass:
            top, total = rows.top_and_total(dtype, lambda c: body.at(x, rows.index(c)))
            share = body.emit.bind(literal(1, dtype) / total, "s")
            rows.store(lambda c, index: {y: body.functions.exp_down(body.at(x, index) - top) * share})
            return
        top = rows.one(dtype, -math.inf, body.functions.peak, lambda c: body.at(x, rows.index(c)))

        def exponent(c: Expr) -> Expr:
            e = body.emit.bind(body.functions.exp_down(body.at(x, rows.index(c)) - top))
            if place is not None:
                buffer, at = place(c)
                body.emit.store(buffer, e, at)
            return e

        total = rows.one(dtype, 0, add, exponent)
        scale = body.emit.bind(literal(1, dtype) / total, "s")

        def result(c: Expr, index: Index) -> dict[Value, Expr]:
            if place is None:
                return {y: body.functions.exp_down(body.at(x, index) - top) * scale}
            buffer, at = place(c)
            return {y: tirx.BufferLoad(buffer, [at]) * scale}

        rows.store(result)

    rows.each(one_row)


def emit_softmax_grad(body: Body, op: Op) -> None:
    y, dy = op.ins
    axis, dtype = axis_of(op, y), y.type.dtype
    rows = rows_of(body, y.type.dims, axis, axis + 1, op.ins)

    def one_row() -> None:
        if op.kind == "softmax_grad":
            dot = rows.one(dtype, 0, add, lambda c: body.at(dy, rows.index(c)) * body.at(y, rows.index(c)))
            rows.store(lambda c, index: {op.outs[0]: body.at(y, index) * (body.at(dy, index) - dot)})
        else:
            total = rows.one(dtype, 0, add, lambda c: body.at(dy, rows.index(c)))
            rows.store(
                lambda c, index: {op.outs[0]: body.at(dy, index) - body.functions.exp_down(body.at(y, index)) * total}
            )

    rows.each(one_row)


def emit_layer_norm(body: Body, op: Op) -> None:
    x, scale, bias = op.ins
    y, mean_out, rstd_out = op.outs
    axis, dtype = axis_of(op, x), x.type.dtype
    rows = rows_of(body, x.type.dims, axis, x.type.rank, [x, scale, bias])
    share = literal(1 / max(rows.length, 1), dtype)
    eps = literal(number(complete_attrs(op)["eps"]), dtype)

    def one_row() -> None:
        mean = body.emit.bind(rows.one(dtype, 0, add, lambda c: body.at(x, rows.index(c))) * share, "mean")

        def square(c: Expr) -> Expr:
            d = body.emit.bind(body.at(x, rows.index(c)) - mean)
            return d * d

        variance = rows.one(dtype, 0, add, square) * share
        rstd = body.emit.bind(literal(1, dtype) / tirx.sqrt(variance + eps), "rstd")
        body.store_apart(mean_out, mean, rows.row)
        body.store_apart(rstd_out, rstd, rows.row)

        def result(c: Expr, index: Index) -> dict[Value, Expr]:
            along = rows.along(c)
            return {y: (body.at(x, index) - mean) * rstd * body.at(scale, along) + body.at(bias, along)}

        rows.store(result)

    rows.each(one_row)


def emit_layer_norm_grad(body: Body, op: Op) -> None:
    dy, x, scale, mean, rstd = op.ins
    axis, dtype = axis_of(op, x), x.type.dtype
    rows = rows_of(body, x.type.dims, axis, x.type.rank, [dy, x, scale])
    share = literal(1 / max(rows.length, 1), dtype)

    def one_row() -> None:
        m, r = body.at(mean, rows.row), body.at(rstd, rows.row)

        def parts(c: Expr, index: Index) -> tuple[Expr, Expr]:
            g = body.emit.bind(body.at(dy, index) * body.at(scale, rows.along(c)))
            return g, body.emit.bind((body.at(x, index) - m) * r)

        def terms(c: Expr) -> list[Expr]:
            g, unit = parts(c, rows.index(c))
            return [g, g * unit]

        total, dot = rows.reduce(dtype, [(0, add), (0, add)], terms)
        a, b = body.emit.bind(total * share, "a"), body.emit.bind(dot * share, "b")

        def result(c: Expr, index: Index) -> dict[Value, Expr]:
            g, unit = parts(c, index)
            return {op.outs[0]: r * (g - a - unit * b)}

        rows.store(result)

    rows.each(one_row)


def emit_cross_entropy(body: Body, op: Op) -> None:
    logits, labels = op.ins
    loss, lse_out = op.outs
    dtype, shape = logits.type.dtype, logits.type.dims
    count = prod(shape[:-1])
    rows = rows_of(body, shape, len(shape) - 1, len(shape), [logits])
    emit = body.emit
    parts = emit.alloc(max(count, 1), dtype, "losses")

    def one_row() -> None:
        top, total = rows.top_and_total(dtype, lambda c: body.at(logits, rows.index(c)))
        lse = emit.bind(body.functions.log(total) + top, "lse")
        body.store_apart(lse_out, lse, rows.row)
        label = emit.bind(table_row(body.at(labels, rows.row), shape[-1]), "label")
        position: Expr = zero()
        for i, n in zip(rows.row, shape[:-1], strict=True):
            position = position * n + i
        emit.store(parts, lse - body.at(logits, (*rows.row, label)), position)

    rows.each(one_row)
    # A single sum over thousands of rows would round the loss by its sixth digit, and otherwise for every size of
    # microbatches.
    sums = emit.alloc(1, "f64", "sum")
    emit.store(sums, literal(0, "f64"), zero())
    with emit.loop(count) as i:
        emit.store(sums, tirx.BufferLoad(sums, [zero()]) + cast(tirx.BufferLoad(parts, [i]), "f64"), zero())
    with body.point():
        share = literal(1 / max(count, 1), "f64")
        body.finish({loss: (cast(tirx.BufferLoad(sums, [zero()]) * share, dtype), ())})


def emit_argmax(body: Body, op: Op) -> None:
    """Emit argmax by two passes: the largest, then the first position of it (or of nan)."""
    x, y = op.ins[0], op.outs[0]
    axis, dtype = axis_of(op, x), x.type.dtype
    rows = rows_of(body, x.type.dims, axis, axis + 1, [x])
    lowest = -math.inf if dtype in FLOATS else LOWEST[dtype]

    def one_row() -> None:
        top = rows.one(dtype, lowest, body.functions.larger, lambda c: body.at(x, rows.index(c)))

        def candidate(c: Expr) -> Expr:
            value = body.at(x, rows.index(c))
            hit = tirx.EQ(value, top)
            if dtype in FLOATS:
                hit = tirx.Or(hit, tirx.isnan(value))
            return tirx.Select(hit, cast(c, "i32"), literal(rows.length, "i32"))

        first = rows.one("i32", rows.length, body.functions.smaller, candidate)
        index = (*rows.row, *rows.tail)
        body.finish({y: (cast(first, "i64"), index)})

    rows.each(one_row)
