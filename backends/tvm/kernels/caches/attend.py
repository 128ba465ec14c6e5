"""Attention over caches, of any number of sequences of any lengths.

In: queries, caches, and where the rows and the blocks of each sequence are. Out: loops

    for sequence: tiles of its rows                       a list, as lengths are data
    for tile, some heads of the cache, part of 512 positions:         shared by threads
      for chunk of 128 positions:
        for block, head, query:                           scores of its 16 positions, folded to vectors
        for query:                                        e^(score - largest), and their sum
        for block, head, query:                           sums of shares times values
    for tile, head: the parts joined by their largest and sums; `Body.finish`

A tile has rows of one sequence. A block is read from memory once: while it is in the first cache, all rows of the tile
are done, and all heads of the queries that look at it. Loops end at the live lengths.

Chunks and parts begin at fixed positions, parts are joined in order, and what a row does not see adds zeros. So the
bits of a row depend on its own sequence alone, not on the turn that it is in. With few rows the parts of a sequence are
shared by threads, with many one thread does them in order.

Nothing is read outside of the operands, whatever they say: lengths and blocks are clamped.

Limit: a cache in bf16 is widened anew for each query, which takes longer than reading it where queries share a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel
from penstock.backends.tvm.kernels.tools.elements import zero
from penstock.backends.tvm.kernels.tools.emit import PARALLEL, SERIAL, VECTOR, Buffer, Expr, ceil_div, literal, load
from penstock.ir.graph import Op, Value
from penstock.ir.ops import BLOCK
from penstock.ir.types import ITEM_BYTES

from .attended import Attended

LOG2E = math.log2(math.e)
# Positions of a part, and of a chunk.
PART, CHUNK = 512, 128
# Queries of a head of the cache that are done together, and bytes of a position that are read in one piece.
_TOGETHER, _PIECE = 16, 3072
# Up to so many rows, the parts of a sequence are shared by threads: all of them need memory for their sums.
FEW_ROWS = 32
# Below every score.
LOWEST = -3e38
# Blocks that are asked for before they are read.
_AHEAD = 2
# Vectors of sums of values that are held in registers.
_COLUMNS = 8


def emit_attend(body: Body, op: Op) -> None:
    """Emit attention over caches."""
    if body.loops is not None:
        raise NotOneKernel(f"{op.kind} has loops for CPUs only")
    _Attend(body, op).run()


@dataclass(frozen=True)
class _Tile:
    """Rows of one sequence: the first row and how many there are, the position of the first, and the heads of the
    cache."""

    sequence: Expr
    row: Expr
    count: Expr
    position: Expr
    heads: Expr


@dataclass(frozen=True)
class _Sums:
    """Memory of the largest score, the sum and the sums of values of queries."""

    top: Buffer
    total: Buffer
    values: Buffer
    first: Expr


class _Attend(Attended):
    """The emitter of one kernel."""

    def __init__(self, body: Body, op: Op) -> None:
        super().__init__(op)
        self.body, self.emit = body, body.emit
        self.lanes = min(body.lanes, BLOCK)
        self.vectors, self.tail = divmod(self.size, self.lanes)
        self.tile_rows = min(max(_TOGETHER // self.group, 1), max(self.rows, 1))
        self.head_count = self._heads_together()
        self.queries = self.head_count * self.tile_rows * self.group
        self.tiles = min(self.rows, self.rows // self.tile_rows + self.sequences)
        self.parts = max(ceil_div(self.per_sequence * BLOCK, PART), 1)
        self.shares_parts = self.rows <= FEW_ROWS and self.parts > 1

    def _heads_together(self) -> int:
        """Return how many heads of the cache one thread does: enough to read memory in long pieces."""
        needed = self.size * ITEM_BYTES[self.keys.type.dtype]
        fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0 and n * needed >= _PIECE]
        return fits[0] if fits else self.heads

    # ------------------------------------------------------------------------------ tiles of rows

    def run(self) -> None:
        emit = self.emit
        self.tile_sequence = emit.alloc(self.tiles, "i32", "sequence")
        self.tile_row = emit.alloc(self.tiles, "i32", "row")
        self.counter = emit.alloc(1, "i32", "count")
        self._list_tiles()
        live = emit.bind(tirx.BufferLoad(self.counter, [zero()]), "live")
        groups = self.heads // self.head_count
        if self.shares_parts:
            held = self.rows * self.query_heads * self.parts
            shared = [emit.alloc(n, "f32", name) for n, name in ((held, "tops"), (held, "totals"))]
            sums = emit.alloc(held * self.size, "f32", "sums")
            per_tile = groups * self.parts
            with emit.loop(live * per_tile, PARALLEL, "i") as i, self.body.point():
                self._split_part(i, per_tile, _Sums(shared[0], shared[1], sums, zero()))
            with emit.loop(live, SERIAL, "t") as t, self.body.point():
                self._join(t, _Sums(shared[0], shared[1], sums, zero()))
        else:
            with emit.loop(live * groups, PARALLEL, "i") as i, self.body.point():
                self._whole(self._tile(tirx.floordiv(i, groups), tirx.floormod(i, groups)))
        self._padding()

    def _start(self, s: Expr) -> Expr:
        return self.emit.bind(tirx.max(tirx.min(self.body.at(self.starts, (s,)), self.rows), 0), "start")

    def _list_tiles(self) -> None:
        """Write the list of tiles: lengths are data."""
        emit = self.emit
        emit.store(self.counter, literal(0, "i32"), zero())
        with emit.loop(self.sequences, SERIAL, "s") as s, self.body.point():
            first, last = self._start(s), self._start(s + 1)
            turns = tirx.floordiv(tirx.max(last - first, 0) + (self.tile_rows - 1), self.tile_rows)
            with emit.loop(emit.bind(turns, "turns"), SERIAL, "t") as t, self.body.point():
                count = emit.bind(tirx.BufferLoad(self.counter, [zero()]), "count")
                with emit.when(count < self.tiles):
                    emit.store(self.tile_sequence, s, count)
                    emit.store(self.tile_row, first + t * self.tile_rows, count)
                    emit.store(self.counter, count + 1, zero())

    def _tile(self, number: Expr, heads: Expr) -> _Tile:
        emit = self.emit
        sequence = emit.bind(tirx.BufferLoad(self.tile_sequence, [number]), "s")
        row = emit.bind(tirx.BufferLoad(self.tile_row, [number]), "row")
        last = self._start(sequence + 1)
        length = tirx.max(tirx.min(self.body.at(self.lengths, (sequence,)), self.per_sequence * BLOCK), 0)
        position = emit.bind(length - (last - row), "position")
        count = emit.bind(tirx.min(last - row, self.tile_rows), "n")
        return _Tile(sequence, row, count, position, heads)

    def _padding(self) -> None:
        """Give rows behind the last sequence zeros."""
        emit, y = self.emit, self.op.outs[0]
        first = self._start(literal(self.sequences, "i32"))
        count = tirx.IntImm("int32", self.rows) - first
        with emit.loop(count, SERIAL, "r") as r, emit.loop(self.query_heads, SERIAL, "h") as h:
            for d, _ in emit.spans(self.size, self.body.lanes):
                with self.body.point():
                    self.body.finish({y: (literal(0, "f32"), (first + r, h, d))})

    # ------------------------------------------------------------------------------ parts

    def _split_part(self, i: Expr, per_tile: int, shared: _Sums) -> None:
        """Emit one part of a tile, with sums in memory that all threads share."""
        emit = self.emit
        inner = emit.bind(tirx.floormod(i, per_tile), "inner")
        tile = self._tile(tirx.floordiv(i, per_tile), emit.bind(tirx.floordiv(inner, self.parts), "heads"))
        part = emit.bind(tirx.floormod(inner, self.parts), "part")
        with emit.when(self._is_seen(tile, part)), self.body.point():
            queries = self._queries(tile)
            mine = self._part_sums()
            self._part(tile, part, queries, mine)
            for j, row, head in self._each_query(tile):
                to = emit.bind(((tile.row + row) * self.query_heads + head) * self.parts + part, "to")
                emit.store(shared.top, tirx.BufferLoad(mine.top, [j]), to)
                emit.store(shared.total, tirx.BufferLoad(mine.total, [j]), to)
                for d, _ in emit.spans(self.size, self.lanes):
                    emit.store(shared.values, tirx.BufferLoad(mine.values, [j * self.size + d]), to * self.size + d)

    def _is_seen(self, tile: _Tile, part: Expr) -> Expr:
        """Return whether any row of a tile looks at positions of a part."""
        last = tile.position + tile.count
        seen = part * PART < last
        if self.window:
            seen = tirx.And(seen, (part + 1) * PART > tile.position - (self.window - 1))
        return seen

    def _join(self, t: Expr, shared: _Sums) -> None:
        """Join the parts of the rows of a tile, and store the results."""
        emit = self.emit
        tile = self._tile(t, zero())
        with emit.loop(tile.count, SERIAL, "r") as r, emit.loop(self.query_heads, SERIAL, "h") as h, self.body.point():
            here = emit.bind(tile.position + r, "here")
            first = self._first_part(here)
            last = emit.bind(tirx.floordiv(here, PART), "last")
            joined = self._empty_sums(1)
            with emit.loop(tirx.max(last - first + 1, 0), SERIAL, "p") as p, self.body.point():
                at = emit.bind(((tile.row + r) * self.query_heads + h) * self.parts + first + p, "at")
                self._add(joined, zero(), shared, at)
            self._finish(joined, zero(), tile.row + r, h)

    def _first_part(self, position: Expr) -> Expr:
        if not self.window:
            return zero()
        return self.emit.bind(tirx.floordiv(tirx.max(position - (self.window - 1), 0), PART), "first")

    def _whole(self, tile: _Tile) -> None:
        """Emit all parts of a tile in order, each joined to those before."""
        emit = self.emit
        queries = self._queries(tile)
        joined = self._empty_sums(self.queries)
        first = self._first_part(tile.position)
        last = tirx.floordiv(tile.position + tile.count + (PART - 1), PART)
        with emit.loop(emit.bind(tirx.max(last - first, 0), "parts"), SERIAL, "p") as p, self.body.point():
            mine = self._part_sums()
            part = emit.bind(first + p, "part")
            self._part(tile, part, queries, mine)
            for j, row, _ in self._each_query(tile):
                here = emit.bind(tile.position + row, "here")
                seen = part * PART <= here
                if self.window:
                    seen = tirx.And(seen, part >= self._first_part(here))
                with emit.when(seen), self.body.point():
                    self._add(joined, j, mine, j)
        for j, row, head in self._each_query(tile):
            self._finish(joined, j, tile.row + row, head)

    def _part_sums(self) -> _Sums:
        """Return memory of a thread for the sums of a part."""
        emit = self.emit
        return _Sums(
            emit.alloc(self.queries, "f32", "top"),
            emit.alloc(self.queries, "f32", "total"),
            emit.alloc(self.queries * self.size, "f32", "acc"),
            zero(),
        )

    def _empty_sums(self, count: int) -> _Sums:
        sums = _Sums(
            self.emit.alloc(count, "f32", "top"),
            self.emit.alloc(count, "f32", "total"),
            self.emit.alloc(count * self.size, "f32", "acc"),
            zero(),
        )
        self._clear(sums, count)
        return sums

    def _clear(self, sums: _Sums, count: int) -> None:
        emit = self.emit
        for i, _ in emit.spans(count, self.lanes):
            emit.store(sums.top, literal(LOWEST, "f32"), i)
            emit.store(sums.total, literal(0, "f32"), i)
        for i, _ in emit.spans(count * self.size, self.lanes):
            emit.store(sums.values, literal(0, "f32"), i)

    def _add(self, joined: _Sums, j: Expr, part: _Sums, at: Expr) -> None:
        """Add the sums of a part to those before it."""
        emit, exp2 = self.emit, self.body.functions.exp2
        old, new = (emit.bind(tirx.BufferLoad(sums.top, [i])) for sums, i in ((joined, j), (part, at)))
        top = emit.bind(tirx.Select(new > old, new, old), "top")
        fade, share = exp2(old - top), exp2(new - top)
        total = tirx.BufferLoad(joined.total, [j]) * fade + tirx.BufferLoad(part.total, [at]) * share
        emit.store(joined.top, top, j)
        emit.store(joined.total, total, j)
        for d, _ in emit.spans(self.size, self.lanes):
            before = tirx.BufferLoad(joined.values, [j * self.size + d]) * fade
            emit.store(joined.values, before + load(part.values, at * self.size + d) * share, j * self.size + d)

    def _finish(self, joined: _Sums, j: Expr, row: Expr, head: Expr) -> None:
        emit, y = self.emit, self.op.outs[0]
        inverse = emit.bind(literal(1, "f32") / tirx.BufferLoad(joined.total, [j]), "inverse")
        for d, _ in emit.spans(self.size, self.body.lanes):
            with self.body.point():
                value = tirx.BufferLoad(joined.values, [j * self.size + d]) * inverse
                self.body.finish({y: (value, (row, head, d))})

    # ------------------------------------------------------------------------------ one part

    def _each_query(self, tile: _Tile) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Open loops over the queries of a tile: yield the number of each, its row in the tile and its head."""
        emit = self.emit
        with (
            emit.loop(self.head_count, SERIAL, "h") as h,
            emit.loop(tile.count, SERIAL, "r") as r,
            emit.loop(self.group, SERIAL, "g") as g,
            self.body.point(),
        ):
            j = emit.bind((h * self.tile_rows + r) * self.group + g, "j")
            yield j, r, emit.bind((tile.heads * self.head_count + h) * self.group + g, "head")

    def _queries(self, tile: _Tile) -> Buffer:
        """Copy the queries of a tile, times the scale."""
        emit = self.emit
        factor = literal(self.scale / self.cap if self.cap else self.scale * LOG2E, "f32")
        queries = emit.alloc(self.queries * self.size, "f32", "queries")
        for j, row, head in self._each_query(tile):
            for d, _ in emit.spans(self.size, self.lanes):
                with self.body.point():
                    x = self.body.at(self.q, (tile.row + row, head, d))
                    emit.store(queries, x * factor, j * self.size + d)
        return queries

    def _part(self, tile: _Tile, part: Expr, queries: Buffer, sums: _Sums) -> None:
        """Emit the chunks of a part that the rows of a tile look at."""
        emit = self.emit
        self._clear(sums, self.queries)
        scores = emit.alloc(self.queries * CHUNK, "f32", "scores")
        begin = emit.bind(part * PART, "begin")
        end = emit.bind(tirx.min(tile.position + tile.count, begin + PART), "end")
        if self.window:
            seen = tirx.floordiv(tirx.max(tile.position - (self.window - 1), 0), CHUNK) * CHUNK
            begin = emit.bind(tirx.max(begin, seen), "begin")
        chunks = emit.bind(tirx.max(tirx.floordiv(end - begin + (CHUNK - 1), CHUNK), 0), "chunks")
        with emit.loop(chunks, SERIAL, "c") as c, self.body.point():
            first = emit.bind(begin + c * CHUNK, "first")
            here = emit.bind(tirx.min(end - first, CHUNK), "here")
            blocks = emit.bind(tirx.floordiv(here + (BLOCK - 1), BLOCK), "blocks")
            with emit.loop(blocks, SERIAL, "b") as b, self.body.point():
                base, ahead = self._block(tile, first, b), self._block(tile, first, b + _AHEAD)
                for j, row, h in self._each_query(tile):
                    self._ask_for(self.keys, tile, ahead, row, h)
                    self._scores(queries, j, scores, j * CHUNK + b * BLOCK, self._head_of(base, h))
            for j, row, _ in self._each_query(tile):
                self._shares(scores, j, blocks, first, tile.position + row, sums)
            with emit.loop(blocks, SERIAL, "b") as b, self.body.point():
                base, ahead = self._block(tile, first, b), self._block(tile, first, b + _AHEAD)
                count = emit.bind(tirx.min(here - b * BLOCK, BLOCK), "count")
                for j, row, h in self._each_query(tile):
                    self._ask_for(self.values, tile, ahead, row, h)
                    self._weigh(scores, j * CHUNK + b * BLOCK, count, sums, j, self._head_of(base, h))

    def _head_of(self, base: Expr, query_head: Expr) -> Expr:
        return self.emit.bind(base + tirx.floordiv(query_head, self.group) * self.size, "base")

    def _block(self, tile: _Tile, first: Expr, b: Expr) -> Expr:
        """Return where a block begins in a cache."""
        place = tirx.min(tirx.floordiv(first, BLOCK) + b, self.per_sequence - 1)
        block = tirx.max(tirx.min(self.body.at(self.table, (tile.sequence, place)), self.blocks - 1), 0)
        return self.emit.bind(block * (BLOCK * self.heads * self.size), "block")

    def _ask_for(self, cache: Value, tile: _Tile, ahead: Expr, row: Expr, query_head: Expr) -> None:
        """Ask for a part of a later block, while the first row of a tile is computed: its queries share the block, in
        the order in which it lies in memory. Only the second cache has room for as many requests as memory takes at
        once: 14 GB/s of 20, and 8 by requests of the first (16 sequences of 2048 positions, one thread)."""
        emit, buffer, steps = self.emit, self.body.operand(cache), self.head_count * self.group
        line = 64 // ITEM_BYTES[cache.type.dtype]
        lines = ceil_div(self.head_count * self.size, line)
        each = ceil_div(BLOCK * lines, steps)
        with emit.when(tirx.EQ(row, 0)), self.body.point():
            base = emit.bind(ahead + tile.heads * (self.head_count * self.size), "base")
            first = emit.bind(tirx.floormod(query_head, steps) * each, "first")
            with emit.loop(each, SERIAL, "d") as d:
                place = (
                    tirx.floordiv(first + d, lines) * (self.heads * self.size) + tirx.floormod(first + d, lines) * line
                )
                emit.prefetch(buffer, base + place, written=False, near=False)

    @contextmanager
    def _vector(self) -> Iterator[Expr]:
        with self.emit.loop(self.lanes, VECTOR, "l") as lane, self.body.point():
            yield lane

    def _scores(self, queries: Buffer, j: Expr, scores: Buffer, at: Expr, base: Expr) -> None:
        """Emit the products of a query with the 16 keys of a block, without the scale of a cap."""
        emit, lanes, stride = self.emit, self.lanes, self.heads * self.size
        keys = self.body.operand(self.keys)
        for start in range(0, BLOCK, lanes):
            accs = [emit.alloc(lanes, "f32", "dot") for _ in range(lanes)]
            for acc in accs:
                with self._vector() as lane:
                    emit.store(acc, literal(0, "f32"), lane)
            with emit.loop(self.vectors, SERIAL, "v") as v:
                for p, acc in enumerate(accs):
                    with self._vector() as lane:
                        key = load(keys, base + (start + p) * stride + v * lanes + lane)
                        x = tirx.BufferLoad(queries, [j * self.size + v * lanes + lane])
                        emit.store(acc, tirx.BufferLoad(acc, [lane]) + x * key, lane)
            folded = self._folded(accs)
            emit.add(tirx.BufferStore(scores, folded, [tirx.Ramp(at + start, 1, lanes)]))
        with emit.loop(BLOCK if self.tail else 0, SERIAL, "p") as p, emit.loop(self.tail, SERIAL, "d") as d:
            x = tirx.BufferLoad(queries, [j * self.size + (self.vectors * lanes + d)])
            key = load(keys, base + p * stride + (self.vectors * lanes + d))
            emit.store(scores, tirx.BufferLoad(scores, [at + p]) + x * key, at + p)

    def _folded(self, rows: list[Buffer]) -> Expr:
        """Return the sums of as many vectors as one has lanes, each in the lane of its number."""
        emit, lanes = self.emit, self.lanes
        every = tirx.Ramp(0, 1, lanes)
        current = [tirx.BufferLoad(row, [every]) for row in rows]
        step = lanes // 2
        while step:
            pairs = []
            for a, b in zip(current[:step], current[step:], strict=True):
                low = [j if not j & step else lanes + (j ^ step) for j in range(lanes)]
                high = [j | step if not j & step else lanes + j for j in range(lanes)]
                both = [tirx.Shuffle([a, b], [tirx.IntImm("int32", k) for k in lanes_of]) for lanes_of in (low, high)]
                pair = emit.alloc(lanes, "f32", "pair")
                emit.add(tirx.BufferStore(pair, both[0] + both[1], [every]))
                pairs.append(tirx.BufferLoad(pair, [every]))
            current = pairs
            step //= 2
        return current[0]

    def _shares(self, scores: Buffer, j: Expr, blocks: Expr, first: Expr, position: Expr, sums: _Sums) -> None:
        """Turn the scores of a query into e^(score - largest), and fade the sums of earlier chunks."""
        emit, lanes, functions = self.emit, self.lanes, self.body.functions
        vectors = emit.bind(blocks * (BLOCK // lanes), "vectors")
        tops, totals = emit.alloc(lanes, "f32", "tops"), emit.alloc(lanes, "f32", "totals")
        limit = emit.bind(position - first, "limit")
        with self._vector() as lane:
            emit.store(tops, literal(LOWEST, "f32"), lane)
            emit.store(totals, literal(0, "f32"), lane)
        with emit.loop(vectors, SERIAL, "c") as c, self._vector() as lane:
            place = c * lanes + lane
            x = emit.bind(tirx.BufferLoad(scores, [j * CHUNK + place]))
            if self.cap:
                x = functions.tanh(x) * literal(self.cap * LOG2E, "f32")
            seen = place <= limit
            if self.window:
                seen = tirx.And(seen, place > limit - self.window)
            x = emit.bind(tirx.Select(seen, x, literal(-math.inf, "f32")))
            emit.store(scores, x, j * CHUNK + place)
            emit.store(tops, tirx.Select(x > tirx.BufferLoad(tops, [lane]), x, tirx.BufferLoad(tops, [lane])), lane)
        top = self._fold(tops, lambda a, b: tirx.Select(a > b, a, b))
        old = emit.bind(tirx.BufferLoad(sums.top, [j]), "old")
        top = emit.bind(tirx.Select(old > top, old, top), "top")
        fade = functions.exp2(old - top)
        with emit.loop(vectors, SERIAL, "c") as c, self._vector() as lane:
            place = j * CHUNK + c * lanes + lane
            grown = functions.exp2(tirx.BufferLoad(scores, [place]) - top)
            emit.store(scores, grown, place)
            emit.store(totals, tirx.BufferLoad(totals, [lane]) + grown, lane)
        total = self._fold(totals, lambda a, b: a + b)
        emit.store(sums.top, top, j)
        emit.store(sums.total, tirx.BufferLoad(sums.total, [j]) * fade + total, j)
        for d, _ in emit.spans(self.size, lanes):
            at = j * self.size + d
            emit.store(sums.values, tirx.BufferLoad(sums.values, [at]) * fade, at)

    def _fold(self, vector: Buffer, combine: Callable[[Expr, Expr], Expr]) -> Expr:
        """Fold a vector to one number."""
        emit, half = self.emit, self.lanes
        while half > 1:
            half //= 2
            with emit.loop(half, VECTOR if half > 1 else SERIAL, "l") as lane:
                folded = combine(tirx.BufferLoad(vector, [lane]), tirx.BufferLoad(vector, [lane + half]))
                emit.store(vector, folded, lane)
        return emit.bind(tirx.BufferLoad(vector, [zero()]))

    def _weigh(self, scores: Buffer, at: Expr, count: Expr, sums: _Sums, j: Expr, base: Expr) -> None:
        """Add shares times values of a block. Behind the end of a sequence lies anything, which is not read."""
        emit = self.emit
        whole = tirx.EQ(count, BLOCK)
        for start in range(0, self.vectors, _COLUMNS):
            columns = range(start, min(start + _COLUMNS, self.vectors))
            with emit.when(whole):
                self._weigh_columns(scores, at, literal(BLOCK // 4, "i32"), 4, sums, j, base, columns)
            with emit.when(tirx.Not(whole)):
                self._weigh_columns(scores, at, count, 1, sums, j, base, columns)
        values, stride = self.body.operand(self.values), self.heads * self.size
        with emit.loop(self.tail, SERIAL, "d") as d, emit.loop(count if self.tail else 0, SERIAL, "p") as p:
            column = d + self.vectors * self.lanes
            share = tirx.BufferLoad(scores, [at + p])
            place = j * self.size + column
            value = load(values, base + p * stride + column)
            emit.store(sums.values, tirx.BufferLoad(sums.values, [place]) + share * value, place)

    def _weigh_columns(
        self, scores: Buffer, at: Expr, turns: Expr, unrolled: int, sums: _Sums, j: Expr, base: Expr, columns: range
    ) -> None:
        emit, lanes, stride = self.emit, self.lanes, self.heads * self.size
        values = self.body.operand(self.values)
        accs = [emit.alloc(lanes, "f32", "acc") for _ in columns]
        for acc, v in zip(accs, columns, strict=True):
            with self._vector() as lane:
                emit.store(acc, tirx.BufferLoad(sums.values, [j * self.size + v * lanes + lane]), lane)
        with emit.loop(turns, SERIAL, "p") as turn:
            for u in range(unrolled):
                p = turn * unrolled + u
                share = emit.bind(tirx.BufferLoad(scores, [at + p]), "share")
                for acc, v in zip(accs, columns, strict=True):
                    with self._vector() as lane:
                        value = load(values, base + p * stride + v * lanes + lane)
                        emit.store(acc, tirx.BufferLoad(acc, [lane]) + share * value, lane)
        for acc, v in zip(accs, columns, strict=True):
            with self._vector() as lane:
                emit.store(sums.values, tirx.BufferLoad(acc, [lane]), j * self.size + v * lanes + lane)
