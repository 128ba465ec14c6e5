"""Caches on GPUs: rows that are stored, attention over blocks, and the choice of a word.

In: put, attend, pick. Out: launches of

    put      a thread for each element of the rows
    attend   128 threads for each row, head of the cache and part of 512 positions. A thread has one position of a
             tile: it reads its key once for all heads of the queries that look at it. Then threads share the columns of
             values. A second launch joins the parts of a row by their largest and sums
    pick     128 threads for each row of logits. A limit is found by halving the range of order keys, with the weights
             above it added up by all threads; whole numbers, so the choice is that of every other back end

Nothing is read outside of the operands: lengths and blocks are clamped. Limits: parts behind the end of a sequence are
gone through without being read, and a word is drawn by one thread that walks the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from penstock.backends.tvm.kernels.caches.attend import LOWEST, PART
from penstock.backends.tvm.kernels.caches.attended import Attended
from penstock.backends.tvm.kernels.caches.pick import share_of, weight_of, word_of
from penstock.backends.tvm.kernels.rows.select import order_key
from penstock.backends.tvm.kernels.tools.body import NotOneKernel
from penstock.backends.tvm.kernels.tools.elements import unravel, zero
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, cast, ceil_div, i32, literal
from penstock.ir.graph import Op, slot_of
from penstock.ir.ops import BLOCK

from .blocks import THREADS, bind_index
from .body import DeviceBody
from .folds import fold_threads

# Threads of a block, and positions of a tile.
_TILE = 128
Combine = Callable[[Expr, Expr], Expr]


def emit_put(body: DeviceBody, op: Op) -> None:
    """Emit the copy of rows to their places, element by element."""
    if len(body.group.ops) > 1:
        raise NotOneKernel("rows are stored where places say, nothing can follow in one launch")
    (rows, places), cache = op.ins, op.outs[0]
    slot, emit = slot_of(op), body.emit
    assert slot is not None
    target = body.slot(slot, cache)
    total, (_, heads, size) = rows.type.size, rows.type.dims
    if not total or not cache.type.size:
        return
    with emit.launch(ceil_div(total, THREADS), THREADS) as (block, thread):
        position = emit.bind(block * THREADS + thread, "i")
        with emit.when(position < total), body.point():
            t, h, d = bind_index(body, unravel(position, rows.type.dims))
            place = emit.bind(body.at(places, (t,)), "place")
            with emit.when(tirx.all(place >= 0, place < cache.type.dims[0] * BLOCK)):
                emit.store(target, body.at(rows, (t, h, d)), (place * heads + h) * size + d)


# ---------------------------------------------------------------------------------------- attention


def emit_attend(body: DeviceBody, op: Op) -> None:
    """Emit attention over caches in two launches: parts of rows, and their joints."""
    _Attend(body, op).run()


class _Attend(Attended):
    """The emitter of one attention over caches."""

    def __init__(self, body: DeviceBody, op: Op) -> None:
        super().__init__(op)
        self.body, self.emit = body, body.emit
        self.parts = max(ceil_div(self.per_sequence * BLOCK, PART), 1)
        self.columns = ceil_div(self.size, _TILE)

    def run(self) -> None:
        held = self.rows * self.query_heads * self.parts
        self.tops = self.emit.workspace(held, "f32", "tops")
        self.totals = self.emit.workspace(held, "f32", "totals")
        self.sums = self.emit.workspace(held * self.size, "f32", "sums")
        with self.emit.launch(self.rows * self.heads * self.parts, _TILE) as (block, thread):
            row, head, part = bind_index(self.body, unravel(block, (self.rows, self.heads, self.parts)))
            self._part(row, head, part, thread)
        with self.emit.launch(self.rows * self.query_heads, _TILE) as (block, thread):
            row, head = bind_index(self.body, unravel(block, (self.rows, self.query_heads)))
            self._join(row, head, thread)

    def _number(self, dtype: str, value: float) -> Buffer:
        place = self.emit.alloc(1, dtype, "n")
        self.emit.store(place, literal(value, dtype), zero())
        return place

    def _placed(self, row: Expr) -> tuple[Expr, Expr]:
        """Return the sequence of a row, and the position of the row in it, -1 for a row of padding."""
        emit, body = self.emit, self.body
        sequence, position = self._number("i32", 0), self._number("i32", -1)
        with emit.loop(self.sequences, name="s") as s, body.point():
            first, last = body.at(self.starts, (s,)), body.at(self.starts, (s + 1,))
            with emit.when(tirx.all(row >= first, row < last)), body.point():
                length = tirx.max(tirx.min(body.at(self.lengths, (s,)), self.per_sequence * BLOCK), 0)
                emit.store(sequence, s, zero())
                emit.store(position, length - (last - row), zero())
        return emit.bind(emit.load(sequence, zero()), "s"), emit.bind(emit.load(position, zero()), "here")

    def _row_of(self, sequence: Expr, position: Expr) -> tuple[Expr, Expr]:
        """Return the block of a position, and the row in the block."""
        at = tirx.max(tirx.min(tirx.floordiv(position, BLOCK), self.per_sequence - 1), 0)
        block = tirx.max(tirx.min(self.body.at(self.table, (sequence, at)), self.blocks - 1), 0)
        return self.emit.bind(block, "block"), self.emit.bind(tirx.floormod(position, BLOCK), "in")

    def _part(self, row: Expr, head: Expr, part: Expr, thread: Expr) -> None:
        emit, body, exp = self.emit, self.body, self.body.functions.exp
        sequence, here = self._placed(row)
        queries = range(self.group)
        tops = [self._number("f32", LOWEST) for _ in queries]
        totals = [self._number("f32", 0) for _ in queries]
        sums = [emit.alloc(self.columns, "f32", "sums") for _ in queries]
        for buffer in sums:
            with emit.loop(self.columns) as i:
                emit.store(buffer, literal(0, "f32"), i)
        shares = [emit.shared(_TILE, "f32", "shares") for _ in queries]
        with emit.loop(PART // _TILE, name="tile") as tile, body.point():
            first = emit.bind(part * PART + tile * _TILE, "first")
            position = emit.bind(first + thread, "position")
            scores = self._scores(row, head, sequence, position, here)
            for g in queries:
                before = emit.bind(emit.load(tops[g], zero()))
                newest = self._fold(emit.load(scores[g], zero()), thread)
                top = emit.bind(tirx.Select(newest > before, newest, before), "top")
                emit.store(shares[g], exp(emit.load(scores[g], zero()) - top), thread)
                fade = exp(before - top)
                emit.store(tops[g], top, zero())
                emit.store(totals[g], emit.load(totals[g], zero()) * fade, zero())
                with emit.loop(self.columns) as i:
                    emit.store(sums[g], emit.load(sums[g], i) * fade, i)
            emit.barrier()
            with emit.loop(_TILE, name="j") as j, body.point():
                place = emit.bind(first + j, "place")
                with emit.when(self._is_seen(place, here)), body.point():
                    self._weigh(sequence, head, place, j, thread, (shares, totals, sums))
            emit.barrier()
        for g in queries:
            to = emit.bind((row * self.query_heads + head * self.group + g) * self.parts + part, "to")
            with emit.when(thread < 1):
                emit.store(self.tops, emit.load(tops[g], zero()), to)
                emit.store(self.totals, emit.load(totals[g], zero()), to)
            with emit.loop(self.columns) as i:
                column = emit.bind(i * _TILE + thread, "column")
                with emit.when(column < self.size):
                    emit.store(self.sums, emit.load(sums[g], i), to * self.size + column)

    def _is_seen(self, position: Expr, here: Expr) -> Expr:
        seen = position <= here
        return tirx.all(seen, position > here - self.window) if self.window else seen

    def _scores(self, row: Expr, head: Expr, sequence: Expr, position: Expr, here: Expr) -> list[Buffer]:
        """Emit the scores of the thread's position for all heads of the queries that look at it."""
        emit, body = self.emit, self.body
        scores = [self._number("f32", -math.inf) for _ in range(self.group)]
        with emit.when(self._is_seen(position, here)), body.point():
            block, inside = self._row_of(sequence, position)
            dots = [self._number("f32", 0) for _ in range(self.group)]
            with emit.loop(self.size, name="d") as d, body.point():
                key = body.at(self.keys, (block, inside, head, d))
                for g, dot in enumerate(dots):
                    x = body.at(self.q, (row, head * self.group + g, d))
                    emit.store(dot, emit.load(dot, zero()) + x * key, zero())
            for score, dot in zip(scores, dots, strict=True):
                x = emit.bind(emit.load(dot, zero()) * literal(self.scale, "f32"))
                if self.cap:
                    x = body.functions.tanh(x / literal(self.cap, "f32")) * literal(self.cap, "f32")
                emit.store(score, x, zero())
        return scores

    def _weigh(
        self,
        sequence: Expr,
        head: Expr,
        place: Expr,
        j: Expr,
        thread: Expr,
        held: tuple[list[Buffer], list[Buffer], list[Buffer]],
    ) -> None:
        emit, body, (shares, totals, sums) = self.emit, self.body, held
        block, inside = self._row_of(sequence, place)
        weights = [emit.bind(emit.load(share, j)) for share in shares]
        for weight, total in zip(weights, totals, strict=True):
            emit.store(total, emit.load(total, zero()) + weight, zero())
        with emit.loop(self.columns) as i:
            column = emit.bind(i * _TILE + thread, "column")
            with emit.when(column < self.size), body.point():
                value = body.at(self.values, (block, inside, head, column))
                for weight, buffer in zip(weights, sums, strict=True):
                    emit.store(buffer, emit.load(buffer, i) + weight * value, i)

    def _fold(self, value: Expr, thread: Expr) -> Expr:
        return _folded(self.body, value, "f32", thread, lambda a, b: tirx.Select(a > b, a, b))

    def _join(self, row: Expr, head: Expr, thread: Expr) -> None:
        emit, body, exp, y = self.emit, self.body, self.body.functions.exp, self.op.outs[0]
        _, here = self._placed(row)
        top = self._number("f32", LOWEST)
        base = emit.bind((row * self.query_heads + head) * self.parts, "base")
        with emit.loop(self.parts, name="p") as p:
            newest, before = emit.bind(emit.load(self.tops, base + p)), emit.bind(emit.load(top, zero()))
            emit.store(top, tirx.Select(newest > before, newest, before), zero())
        with emit.loop(self.columns) as i:
            column = emit.bind(i * _TILE + thread, "column")
            with emit.when(column < self.size), body.point():
                total, value = self._number("f32", 0), self._number("f32", 0)
                with emit.loop(self.parts, name="p") as p, body.point():
                    share = exp(emit.load(self.tops, base + p) - emit.load(top, zero()))
                    emit.store(total, emit.load(total, zero()) + emit.load(self.totals, base + p) * share, zero())
                    part = emit.load(self.sums, (base + p) * self.size + column)
                    emit.store(value, emit.load(value, zero()) + part * share, zero())
                over = emit.bind(emit.load(value, zero()) / emit.load(total, zero()))
                # A row of padding has seen nothing.
                body.finish({y: (tirx.Select(here >= 0, over, literal(0, "f32")), (row, head, column))})


def _folded(body: DeviceBody, value: Expr, dtype: str, thread: Expr, combine: Combine) -> Expr:
    """Fold the values of all threads of a block into one number."""
    part = body.emit.alloc(1, dtype, "part")
    body.emit.store(part, value, zero())
    (shared,) = fold_threads(body, [part], dtype, [(0, combine)], thread, 1, _TILE)
    folded = body.emit.bind(body.emit.load(shared, zero()))
    body.emit.barrier()
    return folded


# ---------------------------------------------------------------------------------------- words


def emit_pick(body: DeviceBody, op: Op) -> None:
    """Emit the choice of words, a block per row."""
    with body.emit.launch(op.ins[0].type.dims[0], _TILE) as (row, thread):
        _Choice(body, op, row, thread).run()


class _Choice:
    """The emitter of the choice from one row."""

    def __init__(self, body: DeviceBody, op: Op, row: Expr, thread: Expr) -> None:
        self.body, self.op, self.emit, self.row, self.thread = body, op, body.emit, row, thread
        self.size = op.ins[0].type.dims[1]

    def _number(self, dtype: str, value: Expr) -> Buffer:
        place = self.emit.alloc(1, dtype, "n")
        self.emit.store(place, value, zero())
        return place

    def _of(self, place: Buffer) -> Expr:
        return self.emit.load(place, zero())

    def _value(self, c: Expr) -> Expr:
        lowest = literal(-math.inf, "f32")
        x = self.emit.bind(self.body.at(self.op.ins[0], (self.row, c)))
        return self.emit.bind(tirx.Select(x >= lowest, x, lowest))

    def _over(self, dtype: str, start: float, combine: Combine, element: Callable[[Expr], Expr]) -> Expr:
        """Combine what an element of the row gives over all of it; all threads get the result."""
        emit = self.emit
        held = self._number(dtype, literal(start, dtype))
        with emit.loop(ceil_div(self.size, _TILE), name="turn") as turn:
            c = emit.bind(turn * _TILE + self.thread, "c")
            with emit.when(c < self.size), self.body.point():
                emit.store(held, combine(self._of(held), element(c)), zero())
        return _folded(self.body, self._of(held), dtype, self.thread, combine)

    def run(self) -> None:
        emit, body, (_, draws, heat, top_k, top_p) = self.emit, self.body, self.op.ins
        largest = self._over("f32", -math.inf, lambda a, b: tirx.Select(a > b, a, b), self._value)
        first = self._over(
            "i32",
            self.size,
            tirx.min,
            lambda c: tirx.Select(tirx.EQ(self._value(c), largest), c, i32(self.size)),
        )
        temperature = emit.bind(body.at(heat, (self.row,)), "heat")
        draws_any = emit.bind(temperature > literal(0, "f32"))
        safe = tirx.Select(draws_any, temperature, literal(1, "f32"))
        self.largest, self.rate = largest, emit.bind(literal(math.log2(math.e), "f32") / safe, "rate")
        self.limit = self._number("i32", literal(-(2**31), "i32"))
        count = emit.bind(body.at(top_k, (self.row,)), "k")
        chosen = tirx.all(count > 0, count < self.size)
        self._raise_limit(cast(tirx.Select(chosen, count, i32(0)), "i64"), lambda c: literal(1, "i64"))
        share = emit.bind(body.at(top_p, (self.row,)), "p")
        kept = tirx.Select(share > literal(0, "f32"), share, literal(0, "f32"))
        part = emit.bind(cast(tirx.min(kept, literal(1, "f32")) * literal(1 << 24, "f32"), "i64"), "part")
        wanted = emit.bind(tirx.max(share_of(body, self._total(), part, 24), literal(1, "i64")), "wanted")
        below = share < literal(1, "f32")
        self._raise_limit(tirx.Select(below, wanted, literal(0, "i64")), self._kept)
        seed, position = (emit.bind(body.at(draws, (self.row, i32(i))), "draw") for i in (0, 1))
        drawn = emit.bind(share_of(body, self._total(), word_of(body, seed, position), 32), "drawn")
        with emit.when(self.thread < 1), body.point():
            picked = self._number("i32", first)
            with emit.when(draws_any), body.point():
                self._walk(picked, drawn)
            body.finish({self.op.outs[0]: (cast(self._of(picked), "i64"), (self.row,))})

    def _key(self, c: Expr) -> Expr:
        return self.emit.bind(order_key(self.body, self._value(c), True), "key")

    def _kept(self, c: Expr) -> Expr:
        """Return the weight of a place, 0 below the limit."""
        above = self._key(c) >= self._of(self.limit)
        weight = weight_of(self.body, self._value(c), self.largest, self.rate)
        return self.emit.bind(tirx.Select(above, weight, literal(0, "i64")), "kept")

    def _total(self) -> Expr:
        return self._over("i64", 0, lambda a, b: a + b, self._kept)

    def _raise_limit(self, wanted: Expr, weight: Callable[[Expr], Expr]) -> None:
        """Raise the limit to the largest key that, with all above it, reaches a sum; a sum of 0 leaves it alone."""
        emit = self.emit
        wanted = emit.bind(wanted, "wanted")
        low = self._number("i64", cast(self._of(self.limit), "i64"))
        high = self._number("i64", literal(2**31, "i64"))
        with emit.loop(32, name="bit"), self.body.point():
            middle = emit.bind((self._of(low) + self._of(high)) >> literal(1, "i64"), "middle")

            def above(c: Expr, middle: Expr = middle) -> Expr:
                inside = cast(self._key(c), "i64") >= middle
                return tirx.Select(inside, weight(c), literal(0, "i64"))

            newest = self._over("i64", 0, lambda a, b: a + b, above)
            reached = emit.bind(newest >= wanted)
            # Of a range of one key its lower end is the answer.
            emit.store(low, tirx.Select(reached, middle, self._of(low)), zero())
            emit.store(high, tirx.Select(reached, self._of(high), middle), zero())
        old = self._of(self.limit)
        emit.store(self.limit, tirx.Select(wanted > literal(0, "i64"), cast(self._of(low), "i32"), old), zero())

    def _walk(self, picked: Buffer, drawn: Expr) -> None:
        emit = self.emit
        total, place = self._number("i64", literal(0, "i64")), self._number("i32", i32(0))
        with emit.repeat(self._of(place) < self.size), self.body.point():
            c = emit.bind(self._of(place), "c")
            after = emit.bind(self._of(total) + self._kept(c), "after")
            emit.store(total, after, zero())
            passed = emit.bind(after > drawn)
            emit.store(picked, tirx.Select(passed, c, self._of(picked)), zero())
            emit.store(place, tirx.Select(passed, i32(self.size), c + 1), zero())
