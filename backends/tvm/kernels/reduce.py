"""Reductions: sum, mean, max, mean squared difference, and the weight gradients of a layer norm.

In: any set of axes. Out: if the last dimension is kept, columns: up to eight vectors of accumulators in registers while the loops run over the
reduced dimensions (bias and scale gradients); if it is reduced, rows: one vector of partial results, folded at the end.
`Body.finish` runs on the finished elements, so a gradient is added straight to its variable.

Sums are taken in 16 or more interleaved parts, which also keeps rounding errors small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod

from tvm import tirx

from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs, reduced_axes
from penstock.ir.types import FLOATS

from .body import Body, parallel_if
from .elements import Index, axis_of, unravel, zero
from .emit import SERIAL, VECTOR, Expr, literal
from .rows import Combine, add

_COLUMN_VECTORS = 8

LOWEST = {"i64": -(2**63), "i32": -(2**31), "i8": -128, "u8": 0}


def reduce_over(
    body: Body,
    shape: tuple[int, ...],
    axes: Sequence[int],
    dtype: str,
    steps: Sequence[tuple[float, Combine]],
    element: Callable[[Index], Sequence[Expr]],
    result: Callable[[Index, Sequence[Expr]], None],
) -> None:
    """Reduce `element(index)` over `axes` of `shape`; `result` gets the index over the kept dimensions and the totals."""
    if body.loops is not None:
        body.loops.reduce(body, shape, axes, dtype, steps, element, result)
        return
    kept = [d for d in range(len(shape)) if d not in axes]
    wide = [d for d in range(len(shape)) if shape[d] > 1]
    if kept and wide and wide[-1] in kept:
        _columns(body, shape, kept, list(axes), dtype, steps, element, result)
    else:
        _rows(body, shape, kept, list(axes), dtype, steps, element, result)


def index_over(shape: tuple[int, ...], groups: Sequence[tuple[Sequence[int], Index]]) -> Index:
    index: list[Expr] = [zero()] * len(shape)
    for dims, part in groups:
        for d, i in zip(dims, part, strict=True):
            index[d] = i
    return tuple(index)


def _columns(
    body: Body,
    shape: tuple[int, ...],
    kept: list[int],
    axes: list[int],
    dtype: str,
    steps: Sequence[tuple[float, Combine]],
    element: Callable[[Index], Sequence[Expr]],
    result: Callable[[Index, Sequence[Expr]], None],
) -> None:
    emit, lanes = body.emit, body.lanes
    run = [d for d in kept if d > max((a for a in axes if shape[a] > 1), default=-1)]
    lead = [d for d in kept if d not in run]
    lead_shape, run_shape = [shape[d] for d in lead], [shape[d] for d in run]
    length = prod(run_shape)
    work = prod(shape)
    vectors = max(min(_COLUMN_VECTORS // len(steps), length // lanes), 1)
    chunk = vectors * lanes
    chunks, rest = divmod(length, chunk)

    def block(o: Index, base: Expr, pieces: list[tuple[int, int]]) -> None:
        width = pieces[-1][0] + pieces[-1][1]
        accs = [emit.alloc(width, dtype, "acc") for _ in steps]

        def every(action: Callable[[Expr], None]) -> None:
            for offset, size in pieces:
                with emit.loop(size, VECTOR if size > 1 else SERIAL, "l") as lane, body.point():
                    action(lane + offset)

        def clear(c: Expr) -> None:
            for acc, (start, _) in zip(accs, steps, strict=True):
                emit.store(acc, literal(start, dtype), c)

        every(clear)
        with ExitStack() as stack:
            inner = tuple(stack.enter_context(emit.loop(shape[a], SERIAL, "r")) for a in axes)
            stack.enter_context(body.point())

            def step(c: Expr) -> None:
                index = index_over(shape, [(lead, o), (axes, inner), (run, unravel(base + c, run_shape))])
                for acc, (_, combine), x in zip(accs, steps, element(index), strict=True):
                    emit.store(acc, combine(tirx.BufferLoad(acc, [c]), x), c)

            every(step)
        every(lambda c: result((*o, *unravel(base + c, run_shape)), [tirx.BufferLoad(acc, [c]) for acc in accs]))

    outer = prod(lead_shape)
    kind = parallel_if(body.machine, work)
    with emit.loop(outer, kind if outer > 1 else SERIAL, "o") as o:
        index = unravel(o, lead_shape)
        with body.point():
            if chunks:
                with emit.loop(chunks, kind if outer == 1 else SERIAL, "c") as c, body.point():
                    block(index, c * chunk, [(v * lanes, lanes) for v in range(vectors)])
            base = chunks * chunk
            whole, odd = divmod(rest, lanes)
            if whole:
                with body.point():
                    block(index, literal(base, "i32"), [(v * lanes, lanes) for v in range(whole)])
            if odd:
                with emit.loop(odd, SERIAL, "c") as c, body.point():
                    block(index, c + (base + whole * lanes), [(0, 1)])


def _rows(
    body: Body,
    shape: tuple[int, ...],
    kept: list[int],
    axes: list[int],
    dtype: str,
    steps: Sequence[tuple[float, Combine]],
    element: Callable[[Index], Sequence[Expr]],
    result: Callable[[Index, Sequence[Expr]], None],
) -> None:
    emit, lanes = body.emit, body.lanes
    run = [d for d in axes if d > max((k for k in kept if shape[k] > 1), default=-1)]
    outer_axes = [d for d in axes if d not in run]
    run_shape = [shape[d] for d in run]
    length, kept_shape = prod(run_shape), [shape[d] for d in kept]
    whole, rest = divmod(length, lanes)
    with emit.loop(prod(kept_shape), parallel_if(body.machine, prod(shape)), "o") as o, body.point():
        row = unravel(o, kept_shape)
        totals = [emit.alloc(1, dtype, "total") for _ in steps]
        accs = [emit.alloc(lanes, dtype, "acc") for _ in steps] if whole else []
        for total, (start, _) in zip(totals, steps, strict=True):
            emit.store(total, literal(start, dtype), zero())
        for acc, (start, _) in zip(accs, steps, strict=False):
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(acc, literal(start, dtype), lane)
        with ExitStack() as stack:
            outer = tuple(stack.enter_context(emit.loop(shape[a], SERIAL, "r")) for a in outer_axes)
            stack.enter_context(body.point())

            def take(c: Expr, places: Sequence[object], at: Expr) -> None:
                index = index_over(shape, [(kept, row), (outer_axes, outer), (run, unravel(c, run_shape))])
                for place, (_, combine), x in zip(places, steps, element(index), strict=True):
                    emit.store(place, combine(tirx.BufferLoad(place, [at]), x), at)

            if whole:
                with emit.loop(whole, SERIAL, "c") as c, emit.loop(lanes, VECTOR, "l") as lane, body.point():
                    take(c * lanes + lane, accs, lane)
            if rest:
                with emit.loop(rest, SERIAL, "c") as c, body.point():
                    take(c + whole * lanes, totals, zero())
        for total, acc, (_, combine) in zip(totals, accs, steps, strict=False):
            half = lanes
            while half > 1:
                half //= 2
                with emit.loop(half, VECTOR, "l") as lane:
                    emit.store(acc, combine(tirx.BufferLoad(acc, [lane]), tirx.BufferLoad(acc, [lane + half])), lane)
            emit.store(total, combine(tirx.BufferLoad(total, [zero()]), tirx.BufferLoad(acc, [zero()])), zero())
        with body.point():
            result(row, [tirx.BufferLoad(total, [zero()]) for total in totals])


def emit_reduction(body: Body, op: Op) -> None:
    """sum, mean and max."""
    x, y = op.ins[0], op.outs[0]
    axes, dtype, shape = reduced_axes(x.type, op.attrs["axes"]), x.type.dtype, x.type.dims
    count = prod(shape[a] for a in axes)
    keep = bool(complete_attrs(op)["keep"])
    if op.kind == "max":
        step: tuple[float, Combine] = (LOWEST.get(dtype, -math.inf), body.functions.larger)
    else:
        step = (0, add)

    def result(index: Index, totals: Sequence[Expr]) -> None:
        value = totals[0]
        if op.kind == "mean":
            value = value * literal(1 / max(count, 1), dtype) if dtype in FLOATS else tirx.truncdiv(value, literal(count, dtype))
        if keep:
            rest = iter(index)
            index = tuple(zero() if d in axes else next(rest) for d in range(len(shape)))
        body.finish({y: (value, index)})

    reduce_over(body, shape, axes, dtype, [step], lambda i: [body.at(x, i)], result)


def emit_mse(body: Body, op: Op) -> None:
    x, t = op.ins
    dtype, shape = x.type.dtype, x.type.dims

    def element(i: Index) -> list[Expr]:
        d = body.emit.bind(body.at(x, i) - body.at(t, i))
        return [d * d]

    def result(_: Index, totals: Sequence[Expr]) -> None:
        body.finish({op.outs[0]: (totals[0] * literal(1 / max(prod(shape), 1), dtype), ())})

    reduce_over(body, shape, range(len(shape)), dtype, [(0, add)], element, result)


def emit_layer_norm_grad_weight(body: Body, op: Op) -> None:
    dy, x, mean, rstd = op.ins
    axis, shape, dtype = axis_of(op, x), x.type.dims, x.type.dtype

    def element(i: Index) -> list[Expr]:
        g = body.at(dy, i)
        return [g * ((body.at(x, i) - body.at(mean, i[:axis])) * body.at(rstd, i[:axis])), g]

    def result(index: Index, totals: Sequence[Expr]) -> None:
        values: list[Value] = list(op.outs)
        body.finish({v: (t, index) for v, t in zip(values, totals, strict=True)})

    reduce_over(body, shape, range(axis), dtype, [(0, add), (0, add)], element, result)
