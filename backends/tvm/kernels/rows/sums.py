"""Common parts of all reductions: folding vectors, cutting long sums into parts, and the terms of each operation.

In: reduction operations of a group. Out: for each its start values and combinations, its operands at an index of the
reduced tensor, and what its results are, given the totals. `ColumnTotals` keeps totals of columns while rows pass by:
it lets column sums ride along with a kernel that works row by row.

Parts: a sum that is long enough for several threads is cut into as many equal parts as sizes allow, whatever the number
of threads. So neither the order of additions nor the result depends on that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel
from penstock.backends.tvm.kernels.tools.elements import Index, axis_of, zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Emitter, Expr, dtype_name, literal
from penstock.backends.tvm.kernels.tools.sweep import Combine as Combine
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs, reduced_axes
from penstock.ir.types import FLOATS, INTS, UNSIGNED

LOWEST = {dtype: 0 if dtype in UNSIGNED else -(2 ** (int(dtype[1:]) - 1)) for dtype in INTS}
# Reductions that can share a sweep.
SUMS = ("sum", "mean", "max", "layer_norm_grad_weight")
# The most parts of one reduction, the fewest rows and the least work of one part.
_PARTS, _LEAST_ROWS, _LEAST_WORK = 8, 16, 1 << 18


def add(a: Expr, b: Expr) -> Expr:
    return a + b


def parts_of(rows: int, work: int) -> int:
    """Return the number of equal parts that `rows` are cut into."""
    most = min(_PARTS, work // _LEAST_WORK, rows // _LEAST_ROWS)
    return next((p for p in range(most, 1, -1) if rows % p == 0), 1)


def cover(extent: int, lanes: int) -> list[tuple[int, int]]:
    """Cover an extent by vectors, then shorter ones, as (start, size). Sizes are powers of two."""
    parts, start, size = [], 0, lanes
    while start < extent:
        while size > extent - start:
            size //= 2
        parts.append((start, size))
        start += size
    return parts


def fold(emit: Emitter, dtype: str, width: int, combine: Combine, places: Sequence[Buffer]) -> Expr:
    """Combine all elements of some vectors. Each half has memory of its own: LLVM takes apart the loops in
    front otherwise."""
    current = list(places)
    while len(current) > 1:
        pairs = []
        for a, b in zip(current[::2], current[1::2], strict=False):
            pair = emit.alloc(width, dtype, "pair")
            with emit.loop(width, VECTOR if width > 1 else SERIAL, "l") as lane:
                emit.store(pair, combine(tirx.BufferLoad(a, [lane]), tirx.BufferLoad(b, [lane])), lane)
            pairs.append(pair)
        current = pairs + current[len(current) // 2 * 2 :]
    place = current[0]
    while width > 1:
        width //= 2
        half = emit.alloc(width, dtype, "half")
        with emit.loop(width, VECTOR if width > 1 else SERIAL, "l") as lane:
            emit.store(half, combine(tirx.BufferLoad(place, [lane]), tirx.BufferLoad(place, [lane + width])), lane)
        place = half
    return emit.bind(tirx.BufferLoad(place, [zero()]))


def combined(body: Body, combine: Combine, values: Sequence[Expr]) -> Expr:
    """Combine all values, in pairs."""
    current = list(values)
    while len(current) > 1:
        pairs = [body.emit.bind(combine(a, b)) for a, b in zip(current[::2], current[1::2], strict=False)]
        current = pairs + current[len(current) // 2 * 2 :]
    return current[0]


# ---------------------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Reducer:
    """One reduction of a shape over axes: (start value, combination) of each total, the operands at an index, and the
    results, given an index over the kept dimensions and the totals."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str
    steps: tuple[tuple[float, Combine], ...]
    operands: Callable[[Index], list[Expr]]
    results: Callable[[Index, Sequence[Expr]], dict[Value, tuple[Expr, Index]]]


def reducer_of(body: Body, op: Op) -> Reducer:
    return {"mse": _mse, "layer_norm_grad_weight": _norm_weights}.get(op.kind, _plain)(body, op)


def _plain(body: Body, op: Op) -> Reducer:
    x, y = op.ins[0], op.outs[0]
    axes, dtype, shape = reduced_axes(x.type, op.attrs["axes"]), x.type.dtype, x.type.dims
    count = prod(shape[a] for a in axes)
    if op.kind == "max" and dtype in FLOATS:
        return _float_max(body, op)
    step: tuple[float, Combine] = (LOWEST[dtype], body.functions.larger) if op.kind == "max" else (0, add)

    def results(index: Index, totals: Sequence[Expr]) -> dict[Value, tuple[Expr, Index]]:
        value = totals[0]
        if op.kind == "mean":
            value = (
                value * literal(1 / max(count, 1), dtype)
                if dtype in FLOATS
                else tirx.truncdiv(value, literal(count, dtype))
            )
        return {y: (value, _kept_index(op, index, axes, len(shape)))}

    return Reducer(shape, tuple(axes), dtype, (step,), lambda i: [body.at(x, i)], results)


def _kept_index(op: Op, index: Index, axes: Sequence[int], rank: int) -> Index:
    if not complete_attrs(op)["keep"]:
        return index
    kept = iter(index)
    return tuple(zero() if d in axes else next(kept) for d in range(rank))


def _float_max(body: Body, op: Op) -> Reducer:
    """Return a reducer for the maximum without nan, with a sum that is nan if an element is.

    Each is one instruction; together they cost less than a maximum that looks for nan at every step."""
    x = op.ins[0]
    axes, shape = tuple(reduced_axes(x.type, op.attrs["axes"])), x.type.dims

    def operands(index: Index) -> list[Expr]:
        value = body.at(x, index)
        return [value, nan_or_zero(value)]

    def results(index: Index, totals: Sequence[Expr]) -> dict[Value, tuple[Expr, Index]]:
        top = tirx.Select(tirx.isnan(totals[1]), totals[1], totals[0])
        return {op.outs[0]: (top, _kept_index(op, index, axes, len(shape)))}

    return Reducer(shape, axes, x.type.dtype, ((-math.inf, body.functions.peak), (0, add)), operands, results)


def nan_or_zero(value: Expr) -> Expr:
    return tirx.Select(tirx.isnan(value), value, tirx.FloatImm(dtype_name(value), 0.0))


def _mse(body: Body, op: Op) -> Reducer:
    x, t = op.ins
    dtype, shape = x.type.dtype, x.type.dims

    def operands(i: Index) -> list[Expr]:
        d = body.emit.bind(body.at(x, i) - body.at(t, i))
        return [d * d]

    def results(_: Index, totals: Sequence[Expr]) -> dict[Value, tuple[Expr, Index]]:
        return {op.outs[0]: (totals[0] * literal(1 / max(prod(shape), 1), dtype), ())}

    return Reducer(shape, tuple(range(len(shape))), dtype, ((0, add),), operands, results)


def _norm_weights(body: Body, op: Op) -> Reducer:
    dy, x, mean, rstd = op.ins
    axis, shape = axis_of(op, x), x.type.dims

    def operands(i: Index) -> list[Expr]:
        g = body.at(dy, i)
        return [g * ((body.at(x, i) - body.at(mean, i[:axis])) * body.at(rstd, i[:axis])), g]

    def results(index: Index, totals: Sequence[Expr]) -> dict[Value, tuple[Expr, Index]]:
        return {v: (t, index) for v, t in zip(op.outs, totals, strict=True)}

    return Reducer(shape, tuple(range(axis)), x.type.dtype, ((0, add), (0, add)), operands, results)


# ---------------------------------------------------------------------------------------- column sums beside rows


class ColumnTotals:
    """Totals of columns over all rows of a kernel that works row by row, in parts of rows."""

    def __init__(self, body: Body, ops: Iterable[Op], shape: tuple[int, ...], first: int) -> None:
        self.body = body
        self.reducers = [reducer_of(body, op) for op in ops]
        if any(r.shape != shape or r.axes != tuple(range(first)) for r in self.reducers):
            raise NotOneKernel("sums over other columns")
        self.rows, self.width = prod(shape[:first]), prod(shape[first:])
        self.parts = parts_of(self.rows, prod(shape)) if self.reducers else 1
        self.places: list[list[Buffer]] = []

    @property
    def each(self) -> int:
        return self.rows // self.parts

    def _every(self, action: Callable[[Expr], None]) -> None:
        for c, _ in pieces(self.body.emit, self.width, self.body.lanes):
            with self.body.point():
                action(c)

    def allocate(self) -> None:
        emit = self.body.emit
        self.places = [
            [emit.alloc(self.parts * self.width, r.dtype, "columns") for _ in r.steps] for r in self.reducers
        ]

    def start(self, part: Expr) -> None:
        def clear(c: Expr) -> None:
            for reducer, places in zip(self.reducers, self.places, strict=True):
                for (begin, _), place in zip(reducer.steps, places, strict=True):
                    self.body.emit.store(place, literal(begin, reducer.dtype), part * self.width + c)

        if self.reducers:
            self._every(clear)

    def take(self, part: Expr, column: Expr, index: Index) -> None:
        """Add the operands at an index, which is in this column."""
        for reducer, places in zip(self.reducers, self.places, strict=True):
            for (_, combine), place, x in zip(reducer.steps, places, reducer.operands(index), strict=True):
                at = part * self.width + column
                self.body.emit.store(place, combine(tirx.BufferLoad(place, [at]), x), at)

    def finish(self, along: Callable[[Expr], Index]) -> None:
        def total(c: Expr) -> None:
            results: dict[Value, tuple[Expr, Index]] = {}
            index = along(c)
            for reducer, places in zip(self.reducers, self.places, strict=True):
                totals = []
                for (_, combine), place in zip(reducer.steps, places, strict=True):
                    totals.append(
                        combined(
                            self.body,
                            combine,
                            [tirx.BufferLoad(place, [c + q * self.width]) for q in range(self.parts)],
                        )
                    )
                results |= reducer.results(index, totals)
            self.body.finish(results)

        if self.reducers:
            self._every(total)
