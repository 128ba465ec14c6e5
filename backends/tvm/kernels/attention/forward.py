"""Attention in one kernel, softmax(scale * q k^T + mask) v, which never holds all scores.

In: an attention operation. Out: loops

    for each head:
      pack k, turned, and v
      for a block of queries:                    pack its queries, times scale
        for a block of keys:
          for panel of keys, tile of queries:    scores into scratch, the largest of every row beside them
          for row:                               e^(score - largest), and their sum
          for tile of queries:                   sums of shares times v; `Body.finish` after the last block of keys

Up to `_KEYS` keys are one block: then nothing is rescaled. Beyond, sums of earlier blocks are scaled by e^(old largest
- new largest). The two products take the time; e^x takes a tenth of it. A block of scores and a head's k and v
should fit into a second cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index, zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, compute_dtype, literal
from penstock.ir.graph import Op
from penstock.ir.types import ITEM_BYTES

from .tiles import LOG2E, AttentionSizes, Tiles, lowest, over_heads, scale_of, smaller

# Keys whose scores are held at once, and bytes of scratch for them.
_KEYS = 2048
_SCORE_BYTES = 384 << 10
_MOST_ROWS = 48


def emit_attention(body: Body, op: Op) -> None:
    over_heads(body, op, op.ins[:3], 8, lambda sizes, lead: _AttentionHead(body, op, sizes, lead).run())


class _AttentionHead:
    """The emitter of one head of one batch entry."""

    def __init__(self, body: Body, op: Op, sizes: AttentionSizes, lead: Index) -> None:
        self.body, self.op, self.s, self.lead, self.emit = body, op, sizes, lead, body.emit
        self.dtype = compute_dtype(op.ins[0].type.dtype)
        self.tiles = Tiles(body, sizes, self.dtype)
        self.key_blocks = ceil_div(sizes.keys, _KEYS)
        # Whole panels.
        self.block_keys = ceil_div(ceil_div(sizes.keys, self.key_blocks), sizes.width) * sizes.width
        self.key_blocks = ceil_div(sizes.keys, self.block_keys)
        # A line more, so that the scores of one key do not all fall on the same few lines of the cache.
        self.stride = self.block_keys + sizes.lanes
        most = max(min(_SCORE_BYTES // (self.stride * ITEM_BYTES[self.dtype]), _MOST_ROWS) // sizes.rows, 1)
        blocks = ceil_div(sizes.tiles, most)
        self.block_tiles = ceil_div(sizes.tiles, blocks)
        self.block_rows = self.block_tiles * sizes.rows
        self.mask = op.ins[3] if len(op.ins) > 3 else None

    def run(self) -> None:
        s, emit = self.s, self.emit
        k, v = self.op.ins[1:3]
        self.keys = self.tiles.turned(k, self.lead, s.depth)
        self.values = self.tiles.rows_of(v, self.lead, s.keys, s.padded(s.keys), s.value_depth)
        self.value_width = s.padded(s.value_depth)
        self.scores = emit.alloc(self.block_rows * self.stride, self.dtype, "scores")
        self.queries = emit.alloc(self.block_rows * s.depth, self.dtype, "queries")
        self.tops = emit.alloc(self.block_rows * s.lanes, self.dtype, "tops")
        self.top = emit.alloc(self.block_rows, self.dtype, "top")
        self.total = emit.alloc(self.block_rows, self.dtype, "total")
        if self.key_blocks > 1:
            self.fade = emit.alloc(self.block_rows, self.dtype, "fade")
            self.sums = emit.alloc(self.block_rows * self.value_width, self.dtype, "sums")
        blocks = ceil_div(s.tiles, self.block_tiles)
        with emit.loop(blocks, SERIAL, "i") as i, self.body.point():
            first = i * self.block_rows if blocks > 1 else literal(0, "i32")
            count = (
                self.block_tiles
                if s.tiles % self.block_tiles == 0
                else smaller(s.tiles - i * self.block_tiles, self.block_tiles)
            )
            self._block(first, count)

    def _block(self, first: Expr, count: int | Expr) -> None:
        """Emit some tiles of queries, from row `first` on."""
        s, emit = self.s, self.emit
        q = self.op.ins[0]
        factor = literal(scale_of(self.op) * LOG2E, self.dtype)
        with emit.loop(count * s.rows, SERIAL, "r") as row:
            for d, _ in emit.spans(s.depth, s.lanes):
                with self.body.point():
                    x = self.body.at(q, (*self.lead, smaller(first + row, s.queries - 1), d))
                    emit.store(self.queries, x * factor, row * s.depth + d)
        if self.key_blocks == 1:
            self._key_block(first, count, literal(0, "i32"), None)
            return
        rows = count * s.rows
        with emit.loop(rows, SERIAL, "r") as row:
            emit.store(self.top, literal(-math.inf, self.dtype), row)
            emit.store(self.total, literal(0, self.dtype), row)
        self.tiles.fill(self.sums, literal(0, "i32"), rows * self.value_width, 0)
        needed = self.key_blocks
        if s.causal:
            seen = smaller(first + rows, s.keys)
            needed = tirx.floordiv(seen + (self.block_keys - 1), self.block_keys)
        with emit.loop(needed, SERIAL, "j") as j, self.body.point():
            self._key_block(first, count, j * self.block_keys, tirx.EQ(j, needed - 1))

    def _key_block(self, first: Expr, count: int | Expr, first_key: Expr, last: Expr | None) -> None:
        s, emit, tiles = self.s, self.emit, self.tiles
        lanes, rows = s.lanes, s.rows
        tiles.fill(self.tops, literal(0, "i32"), count * rows * lanes, -math.inf)
        seen = tiles.visible(first + (count - 1) * rows)
        here = seen if last is None else emit.bind(smaller(seen - first_key, self.block_keys), "n")
        if self.mask is not None:
            tiles.mask(self.mask, self.lead, self.scores, self.stride, first, first_key, count * rows, here)
        panels = ceil_div(here, s.width) if isinstance(here, int) else tirx.floordiv(here + (s.width - 1), s.width)
        with emit.loop(panels, SERIAL, "p") as p, emit.loop(count, SERIAL, "t") as t, self.body.point():
            row = first + t * rows
            key = first_key + p * s.width
            tiles.panel(row, key, _ScoreTile(self, t, t * (rows * self.stride) + p * s.width, row, key))
        with emit.loop(count, SERIAL, "t") as t, self.body.point():
            length = self._length(first + t * rows, first_key, last)
            with emit.loop(rows, SERIAL, "r") as r, self.body.point():
                self._shares(t * rows + r, length, last)
        with emit.loop(count, SERIAL, "t") as t, self.body.point():
            length = self._length(first + t * rows, first_key, last)
            for start in range(0, self.value_width, s.width):
                with self.body.point():
                    self._result(first, t, start, length, first_key, last)

    def _length(self, row: Expr, first_key: Expr, last: Expr | None) -> int | Expr:
        """Return the keys of this block that a tile of rows looks at, in whole vectors."""
        s = self.s
        seen = self.tiles.visible(row)
        if isinstance(seen, int) and last is None:
            return s.padded(seen)
        if last is not None:
            seen = tirx.max(smaller(seen - first_key, self.block_keys), 0)
        return self.emit.bind(tirx.floordiv(seen + (s.lanes - 1), s.lanes) * s.lanes, "n")

    # ------------------------------------------------------------------------------ the three steps

    def _shares(self, row: Expr, length: int | Expr, last: Expr | None) -> None:
        """Compute e^(score - largest) of one row, and their sum."""
        s, emit, tiles = self.s, self.emit, self.tiles
        accumulator = emit.alloc(s.lanes, self.dtype, "fold")
        tiles.store(accumulator, zero(), tiles.load(self.tops, row * s.lanes))
        top = tiles.total(accumulator, lambda a, b: tirx.Select(a > b, a, b))
        old = None if last is None else emit.bind(tirx.BufferLoad(self.top, [row]), "old")
        if old is not None:
            top = emit.bind(tirx.Select(old > top, old, top), "top")
        tiles.store(accumulator, zero(), tiles.spread(tiles.constant(0)))
        vectors = length // s.lanes if isinstance(length, int) else tirx.floordiv(length, s.lanes)
        with emit.loop(vectors, SERIAL, "c") as c, tiles.vector() as lane:
            at = row * self.stride + c * s.lanes + lane
            grown = emit.bind(self.body.functions.exp2(tirx.BufferLoad(self.scores, [at]) - top))
            emit.store(self.scores, grown, at)
            emit.store(accumulator, tirx.BufferLoad(accumulator, [lane]) + grown, lane)
        total = tiles.total(accumulator, lambda a, b: a + b)
        if old is not None:
            fade = emit.bind(self.body.functions.exp2(old - top), "fade")
            emit.store(self.fade, fade, row)
            total = total + tirx.BufferLoad(self.total, [row]) * fade
        emit.store(self.top, top, row)
        emit.store(self.total, total, row)

    def _result(self, first: Expr, t: Expr, start: int, length: int | Expr, first_key: Expr, last: Expr | None) -> None:
        """Emit a tile of results: shares times values, divided by the sum of shares."""
        s, emit, tiles = self.s, self.emit, self.tiles
        width = min(self.value_width - start, s.width)
        vectors = width // s.lanes
        base = t * s.rows
        earlier = None
        if last is not None:

            def earlier(r: int, v: int) -> Expr:
                held = tiles.load(self.sums, (base + r) * self.value_width + start + v * s.lanes)
                return held * tiles.spread(tirx.BufferLoad(self.fade, [base + r]))

        accumulators = tiles.sums(
            vectors,
            length,
            lambda r, k: tirx.BufferLoad(self.scores, [(base + r) * self.stride + k]),
            lambda v, k: tiles.load(self.values, (first_key + k) * self.value_width + start + v * s.lanes),
            start=earlier,
            unrolled=min(4, s.lanes),
        )
        if last is None:
            self._finish(accumulators, first, t, start)
            return
        for r, acc in enumerate(accumulators):
            for v in range(vectors):
                at = (base + r) * self.value_width + start + v * s.lanes
                tiles.store(self.sums, at, tiles.load(acc, literal(v * s.lanes, "i32")))
        with emit.when(last), self.body.point():
            self._finish(accumulators, first, t, start)

    def _finish(self, accumulators: list[Buffer], first: Expr, t: Expr, start: int) -> None:
        s, emit, tiles = self.s, self.emit, self.tiles
        row = first + t * s.rows
        y, top_out, total_out = self.op.outs
        bottom = lowest(self.dtype)
        inverse: dict[int, Expr] = {}
        for r in range(s.rows):
            at = t * s.rows + r
            total = emit.bind(tirx.BufferLoad(self.total, [at]), "total")
            inverse[r] = emit.bind(tiles.constant(1) / total, "inverse")
            if start:
                continue
            with emit.when(row + r < s.queries), self.body.point():
                top = emit.bind(tirx.BufferLoad(self.top, [at]), "top")
                # A row that the mask hides as a whole gets exactly the lowest number.
                top = tirx.Select(
                    top < tiles.constant(bottom / 2), tiles.constant(bottom), top * tiles.constant(1 / LOG2E)
                )
                self.body.store_apart(top_out, top, (*self.lead, row + r))
                self.body.store_apart(total_out, total, (*self.lead, row + r))

        def finish(r: int, x: Expr, column: Expr) -> None:
            self.body.finish({y: (x * inverse[r], (*self.lead, row + r, start + column if start else column))})

        tiles.each_element(accumulators, row, s.queries, min(s.value_depth - start, s.width), finish)


@dataclass(frozen=True)
class _ScoreTile:
    """A tile of queries times a panel of keys: its number in the block, the place of its scores in scratch, its first
    row and key."""

    head: _AttentionHead
    t: Expr
    at: Expr
    row: Expr
    key: Expr

    def whole(self) -> None:
        self._scores(self.head.s.vectors, whole=True)

    def part(self, vectors: int) -> None:
        self._scores(vectors, whole=False)

    def _scores(self, vectors: int, *, whole: bool) -> None:
        """Store a tile of scores in scratch; if it is whole, also the largest so far of each of its rows, lane by
        lane."""
        head, t, at, key = self.head, self.t, self.at, self.key
        s, emit, tiles = head.s, head.emit, head.tiles
        panel = tirx.floordiv(key, s.width) * (s.depth * s.width)
        base = t * (s.rows * s.depth)
        accumulators = tiles.sums(
            vectors,
            s.depth,
            lambda r, k: tirx.BufferLoad(head.queries, [base + r * s.depth + k]),
            lambda v, k: tiles.load(head.keys, panel + k * s.width + v * s.lanes),
        )
        for r, acc in enumerate(accumulators):
            with tiles.vector() as lane:
                beside = (t * s.rows + r) * s.lanes + lane
                top = tirx.BufferLoad(head.tops, [beside]) if whole else None
                for v in range(vectors):
                    x = tirx.BufferLoad(acc, [lane + v * s.lanes])
                    place = at + (r * head.stride + v * s.lanes) + lane
                    if head.mask is not None:
                        x = emit.bind(x + tirx.BufferLoad(head.scores, [place]))
                    emit.store(head.scores, x, place)
                    top = emit.bind(tirx.Select(x > top, x, top)) if whole else None
                if whole:
                    emit.store(head.tops, top, beside)

    def after(self, vectors: int | Expr) -> None:
        """Mask the keys that rows of a partial tile do not see, and take the largest score so far."""
        head, t, at, key = self.head, self.t, self.at, self.key
        s, emit, tiles = head.s, head.emit, head.tiles
        with emit.loop(s.rows, SERIAL, "r") as r, head.body.point():
            limit = tiles.seen_by(self.row + r)
            limit = emit.bind(limit, "limit") if not isinstance(limit, int) else limit
            with emit.loop(vectors, SERIAL, "v") as v, tiles.vector() as lane:
                place = at + r * head.stride + v * s.lanes + lane
                beside = (t * s.rows + r) * s.lanes + lane
                x = tiles.only_visible(
                    tirx.BufferLoad(head.scores, [place]), key + v * s.lanes + lane, limit, -math.inf
                )
                x = emit.bind(x)
                emit.store(head.scores, x, place)
                top = tirx.BufferLoad(head.tops, [beside])
                emit.store(head.tops, tirx.Select(x > top, x, top), beside)
