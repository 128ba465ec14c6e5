"""Attention and its gradients on GPUs: a block per query (or per key), which goes over the keys (the queries) in tiles.

In: attention, attention_grad. Out, for each query row with scores s over the keys of a tile, one key per thread:

    largest' = max(largest, max s)    p = e^(s - largest')    sum' = sum e^(largest - largest') + sum of p
    and the same for y, whose columns threads share

so scores are never in memory. The gradients compute p again from the statistics: with d = dy . y per row,

    ds = p (dy . v - d) scale     dq = sum over keys of ds k,   dk = sum over queries of ds q
    dv = sum over queries of p dy

in two launches, by query and by key. Limits: neither tensor cores nor reuse of keys between queries; hidden scores are
computed all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import NotOneKernel
from penstock.backends.tvm.kernels.tools.elements import Index, broadcast_index, linear, unravel, zero
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, ceil_div, literal
from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs
from penstock.ir.types import numpy_dtype

from .blocks import bind_index
from .body import DeviceBody
from .folds import fold_threads

# Threads of a block, and keys (or queries) of a tile.
_TILE = 128


class _AttentionScores:
    """The scores of one attention, for both directions."""

    def __init__(self, body: DeviceBody, op: Op, q: Value, k: Value, mask: Sequence[Value]) -> None:
        self.body, self.emit, self.op = body, body.emit, op
        self.q, self.k, self.mask = q, k, mask[0] if mask else None
        a = complete_attrs(op)
        assert isinstance(a["scale"], float)
        self.dtype, self.scale, self.causal = q.type.dtype, literal(a["scale"], q.type.dtype), bool(a["causal"])
        # The lowest number of the element type in the graph, not of the one it is computed in.
        self.lowest = literal(
            float(ml_dtypes.finfo(numpy_dtype(body.own(q).type.dtype)).min),  # type: ignore[no-untyped-call]
            self.dtype,
        )

    def dot(self, a: Callable[[Expr], Expr], b: Callable[[Expr], Expr], size: int) -> Expr:
        """Emit a sum of products, by one thread."""
        total = self.emit.alloc(1, self.dtype, "dot")
        self.emit.store(total, literal(0, self.dtype), zero())
        with self.emit.loop(size, name="d") as d, self.body.point():
            self.emit.store(total, self.emit.load(total, zero()) + a(d) * b(d), zero())
        return self.emit.bind(self.emit.load(total, zero()))

    def score(self, lead: Index, row: Expr, key: Expr) -> Expr:
        """Emit the score of a query and a key that it may look at."""
        body = self.body
        size = self.q.type.dims[3]
        s = (
            self.dot(lambda d: body.at(self.q, (*lead, row, d)), lambda d: body.at(self.k, (*lead, key, d)), size)
            * self.scale
        )
        if self.mask is None:
            return self.emit.bind(s)
        m = self._mask(lead, row, key)
        return self.emit.bind(
            tirx.Select(m, s, self.lowest) if self._hides() else body.functions.larger(s + m, self.lowest)
        )

    def _hides(self) -> bool:
        return self.mask is not None and self.mask.type.dtype == "bool"

    def _mask(self, lead: Index, row: Expr, key: Expr) -> Expr:
        assert self.mask is not None
        return self.body.at(self.mask, broadcast_index((*lead, row, key), self.mask.type.dims))

    def shown(self, lead: Index, row: Expr, key: Expr, slope: Expr) -> Expr:
        """Return a slope, zero where the mask hides."""
        return tirx.Select(self._mask(lead, row, key), slope, literal(0, self.dtype)) if self._hides() else slope

    def visible(self, row: Expr, key: Expr, inside: Expr) -> Expr:
        return self.emit.bind(tirx.all(inside, key <= row) if self.causal else inside)

    def sums(self, columns: int, thread: Expr) -> _Columns:
        return _Columns(self, columns, thread)


class _Columns:
    """Sums over columns, of which each thread has every 128th."""

    def __init__(self, scores: _AttentionScores, columns: int, thread: Expr) -> None:
        self.emit, self.columns, self.thread = scores.emit, columns, thread
        self.count = ceil_div(columns, _TILE)
        self.body = scores.body
        self.buffer = self.emit.alloc(self.count, scores.dtype, "sums")
        self.each(lambda i, c: self.emit.store(self.buffer, literal(0, scores.dtype), i))

    def each(self, action: Callable[[Expr, Expr], None]) -> None:
        """Emit an action for each column of this thread: its place in the buffer, its number."""
        with self.emit.loop(self.count) as i:
            column = self.emit.bind(i * _TILE + self.thread, "column")
            with self.emit.when(column < self.columns), self.body.point():
                action(i, column)

    def add(self, factor: Expr, value: Callable[[Expr], Expr]) -> None:
        self.each(lambda i, c: self.emit.store(self.buffer, self.emit.load(self.buffer, i) + factor * value(c), i))

    def scale(self, factor: Expr) -> None:
        self.each(lambda i, c: self.emit.store(self.buffer, self.emit.load(self.buffer, i) * factor, i))


def _fold(body: DeviceBody, value: Expr, dtype: str, start: float, combine: Any, thread: Expr) -> Expr:
    """Fold the values of all threads of a block into one number."""
    total = body.emit.alloc(1, dtype, "part")
    body.emit.store(total, value, zero())
    (shared,) = fold_threads(body, [total], dtype, [(start, combine)], thread, 1, _TILE)
    folded = body.emit.bind(body.emit.load(shared, zero()))
    body.emit.barrier()
    return folded


def emit_attention(body: DeviceBody, op: Op) -> None:
    """Emit attention in one launch, a block per query."""
    q, k, v, *mask = op.ins
    y, largest_out, sum_out = op.outs
    emit, keys, dtype = body.emit, k.type.dims[2], q.type.dtype
    rows = q.type.dims[:3]
    with emit.launch(math.prod(rows), _TILE) as (block, thread):
        *lead, row = bind_index(body, unravel(block, rows))
        scores = _AttentionScores(body, op, q, k, mask)
        largest, total = emit.alloc(1, dtype, "largest"), emit.alloc(1, dtype, "total")
        emit.store(largest, literal(-math.inf, dtype), zero())
        emit.store(total, literal(0, dtype), zero())
        sums = scores.sums(v.type.dims[3], thread)
        shares = emit.shared(_TILE, dtype, "p")
        with emit.loop(ceil_div(keys, _TILE)) as tile, body.point():
            key = emit.bind(tile * _TILE + thread, "key")
            mine = emit.alloc(1, dtype, "mine")
            emit.store(mine, literal(-math.inf, dtype), zero())
            visible = scores.visible(row, key, key < keys)
            with emit.when(visible), body.point():
                emit.store(mine, scores.score(tuple(lead), row, key), zero())
            before = emit.bind(emit.load(largest, zero()))
            top = emit.bind(
                body.functions.larger(
                    before, _fold(body, emit.load(mine, zero()), dtype, -math.inf, body.functions.larger, thread)
                )
            )
            emit.store(
                shares,
                tirx.Select(visible, body.functions.exp(emit.load(mine, zero()) - top), literal(0, dtype)),
                thread,
            )
            fade = body.functions.exp(before - top)
            emit.store(largest, top, zero())
            emit.store(total, emit.load(total, zero()) * fade, zero())
            sums.scale(fade)
            emit.barrier()
            with emit.loop(_TILE) as j, body.point():
                at = emit.bind(tirx.min(tile * _TILE + j, keys - 1), "at")
                share = emit.bind(emit.load(shares, j))
                emit.store(total, emit.load(total, zero()) + share, zero())
                sums.add(share, lambda c: body.at(v, (*lead, at, c)))
            emit.barrier()
        with emit.when(thread < 1), body.point():
            body.store_apart(largest_out, emit.load(largest, zero()), (*lead, row))
            body.store_apart(sum_out, emit.load(total, zero()), (*lead, row))
        over = emit.bind(emit.load(total, zero()))
        sums.each(lambda i, c: body.finish({y: (emit.bind(emit.load(sums.buffer, i) / over), (*lead, row, c))}))


def emit_attention_grad(body: DeviceBody, op: Op) -> None:
    """Emit the gradients of attention in two launches, by query and by key."""
    if len(body.group.ops) > 1:
        raise NotOneKernel("nothing can follow gradients of attention in these launches")
    dy, q, k, v, y, _, _, *mask = op.ins
    dq, dk, dv = op.outs
    emit, dtype = body.emit, q.type.dtype
    queries, keys, size, width = q.type.dims[2], k.type.dims[2], q.type.dims[3], v.type.dims[3]
    rows, columns = q.type.dims[:3], k.type.dims[:3]
    dots = emit.workspace(math.prod(rows), dtype, "dots")
    with emit.launch(math.prod(rows), _TILE) as (block, thread):
        *lead, row = bind_index(body, unravel(block, rows))
        scores = _AttentionScores(body, op, q, k, mask)
        product = emit.alloc(1, dtype, "product")
        emit.store(product, literal(0, dtype), zero())
        with emit.loop(ceil_div(width, _TILE)) as turn:
            c = emit.bind(turn * _TILE + thread, "c")
            with emit.when(c < width), body.point():
                place = (*lead, row, c)
                emit.store(product, emit.load(product, zero()) + body.at(dy, place) * body.at(y, place), zero())
        dot = _fold(body, emit.load(product, zero()), dtype, 0, lambda a, b: a + b, thread)
        with emit.when(thread < 1):
            emit.store(dots, dot, block)
        sums, slopes = scores.sums(size, thread), emit.shared(_TILE, dtype, "ds")
        with emit.loop(ceil_div(keys, _TILE)) as tile, body.point():
            key = emit.bind(tile * _TILE + thread, "key")
            _share(scores, tuple(lead), row, key, key < keys, dot, (slopes, None), thread)
            emit.barrier()
            with emit.loop(_TILE) as j, body.point():
                at = emit.bind(tirx.min(tile * _TILE + j, keys - 1), "at")
                sums.add(emit.bind(emit.load(slopes, j)), lambda c: body.at(k, (*lead, at, c)))
            emit.barrier()
        sums.each(lambda i, c: body.store_apart(dq, emit.load(sums.buffer, i), (*lead, row, c)))
    with emit.launch(math.prod(columns), _TILE) as (block, thread):
        *lead, key = bind_index(body, unravel(block, columns))
        scores = _AttentionScores(body, op, q, k, mask)
        by_key, by_value = scores.sums(size, thread), scores.sums(width, thread)
        slopes, shares = emit.shared(_TILE, dtype, "ds"), emit.shared(_TILE, dtype, "p")
        with emit.loop(ceil_div(queries, _TILE)) as tile, body.point():
            row = emit.bind(tile * _TILE + thread, "row")
            clamped = emit.bind(tirx.min(row, queries - 1), "held")
            dot = emit.bind(emit.load(dots, linear((*lead, clamped), rows)))
            _share(scores, tuple(lead), clamped, key, row < queries, dot, (slopes, shares), thread)
            emit.barrier()
            with emit.loop(_TILE) as j, body.point():
                at = emit.bind(tirx.min(tile * _TILE + j, queries - 1), "at")
                by_key.add(emit.bind(emit.load(slopes, j)), lambda c: body.at(q, (*lead, at, c)))
                by_value.add(emit.bind(emit.load(shares, j)), lambda c: body.at(dy, (*lead, at, c)))
            emit.barrier()
        by_key.each(lambda i, c: body.store_apart(dk, emit.load(by_key.buffer, i), (*lead, key, c)))
        by_value.each(lambda i, c: body.store_apart(dv, emit.load(by_value.buffer, i), (*lead, key, c)))


def _share(
    scores: _AttentionScores,
    lead: Index,
    row: Expr,
    key: Expr,
    inside: Expr,
    dot: Expr,
    into: tuple[Buffer, Buffer | None],
    thread: Expr,
) -> None:
    """Emit the thread's share p and its slope ds into shared memory; zeros where the query may not look at the key."""
    body, emit = scores.body, scores.emit
    dy, _, _, v, _, largest, total, *_ = scores.op.ins
    slopes, shares = into
    emit.store(slopes, literal(0, scores.dtype), thread)
    if shares is not None:
        emit.store(shares, literal(0, scores.dtype), thread)
    with emit.when(scores.visible(row, key, inside)), body.point():
        s = scores.score(lead, row, key)
        p = emit.bind(body.functions.exp(s - body.at(largest, (*lead, row))) / body.at(total, (*lead, row)))
        if shares is not None:
            emit.store(shares, p, thread)
        product = scores.dot(
            lambda c: body.at(dy, (*lead, row, c)), lambda c: body.at(v, (*lead, key, c)), v.type.dims[3]
        )
        slope = emit.bind(p * (product - dot))
        emit.store(slopes, scores.shown(lead, row, key, slope) * scores.scale, thread)
