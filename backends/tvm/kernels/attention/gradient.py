"""Gradients of attention in one kernel, which computes the shares again, block by block, from the largest score and the
sum of every row.

In: an attention_grad operation (dy, q, k, v, y, largest, sum). Out: with share = e^(score - largest) / sum
and slope = share * (dy v^T - sum(dy * y)),

    for each head:
      pack q and dy, k twice (turned and not) and v turned
      for a block of keys:                          dk and dv start at zero
        for a block of queries that sees some:
          for panel of keys, tile of queries:       shares and slopes into scratch
          for tile of keys:                         dv += share^T dy,  dk += slope^T q
          for tile of queries:                      dq += slope k
        store dk and dv
      store dq

Each gradient is stored in its final place: through reshapes and transpositions, and into its part of a concatenation
(`Body.finish_part`). Five products take the time. A block is small enough for its shares, slopes and operands to stay
in a second cache; sums that do not fit into registers go to memory once per block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index, zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, compute_dtype, literal
from penstock.ir.graph import Op, Value
from penstock.ir.types import ITEM_BYTES

from .tiles import LOG2E, AttentionSizes, Tiles, lowest, over_heads, scale_of, smaller

# Queries and keys of a block; both are rounded to whole tiles of rows, keys to whole panels as well.
_QUERIES = 96
_KEYS = 192
_LINE_BYTES = 64


def emit_attention_grad(body: Body, op: Op) -> None:
    over_heads(body, op, op.ins[1:4], 4, lambda sizes, lead: _GradientHead(body, op, sizes, lead).run())


class _GradientHead:
    """The emitter of one head of one batch entry."""

    def __init__(self, body: Body, op: Op, sizes: AttentionSizes, lead: Index) -> None:
        self.body, self.op, self.s, self.lead, self.emit = body, op, sizes, lead, body.emit
        self.dtype = compute_dtype(op.ins[0].type.dtype)
        self.tiles = Tiles(body, sizes, self.dtype)
        s = sizes
        whole = math.lcm(s.rows, s.width)
        self.block_keys = ceil_div(min(_KEYS, s.keys), whole) * whole
        self.block_tiles = min(max(_QUERIES // s.rows, 1), s.tiles)
        self.block_rows = self.block_tiles * s.rows
        self.key_blocks = ceil_div(s.keys, self.block_keys)
        self.all_rows = s.tiles * s.rows
        self.stride = self.block_keys + s.lanes
        self.depth, self.value_depth = s.padded(s.depth), s.padded(s.value_depth)
        self.mask = op.ins[7] if len(op.ins) > 7 else None
        self.hides = self.mask is not None and self.mask.type.dtype == "bool"

    def run(self) -> None:
        s, emit, tiles, lead = self.s, self.emit, self.tiles, self.lead
        dy, q, k, v = self.op.ins[:4]
        all_keys = self.key_blocks * self.block_keys
        self.q = tiles.rows_of(q, lead, s.queries, self.all_rows, s.depth)
        self.dy = tiles.rows_of(dy, lead, s.queries, self.all_rows, s.value_depth)
        self.k = tiles.rows_of(k, lead, s.keys, all_keys, s.depth)
        self.turned_k = tiles.turned(k, lead, s.depth)
        self.turned_v = tiles.turned(v, lead, s.value_depth)
        self._statistics()
        self.dq = emit.alloc(self.all_rows * self.depth, self.dtype, "dq")
        tiles.fill(self.dq, literal(0, "i32"), self.all_rows * self.depth, 0)
        self.dk = emit.alloc(self.block_keys * self.depth, self.dtype, "dk")
        self.dv = emit.alloc(self.block_keys * self.value_depth, self.dtype, "dv")
        self.shares = emit.alloc(self.block_rows * self.stride, self.dtype, "shares")
        self.slopes = emit.alloc(self.block_rows * self.stride, self.dtype, "slopes")
        blocks = ceil_div(s.tiles, self.block_tiles)
        with emit.loop(self.key_blocks, SERIAL, "j") as j, self.body.point():
            first_key = j * self.block_keys if self.key_blocks > 1 else literal(0, "i32")
            tiles.fill(self.dk, literal(0, "i32"), self.block_keys * self.depth, 0)
            tiles.fill(self.dv, literal(0, "i32"), self.block_keys * self.value_depth, 0)
            begin = (
                emit.bind(tirx.floordiv(first_key, self.block_rows), "begin") if s.causal and self.key_blocks > 1 else 0
            )
            with emit.loop(blocks - begin, SERIAL, "i") as step, self.body.point():
                block = step + begin
                first = emit.bind(block * self.block_rows, "first")
                count = self.block_tiles
                tiles_here = count if s.tiles % count == 0 else smaller(s.tiles - block * count, count)
                self._block(first, tiles_here, first_key, tirx.EQ(block, blocks - 1))
            keys = self.block_keys if s.keys % self.block_keys == 0 else smaller(s.keys - first_key, self.block_keys)
            self._finish(1, self.dk, self.depth, s.depth, first_key, keys, scale_of(self.op))
            self._finish(2, self.dv, self.value_depth, s.value_depth, first_key, keys, 1.0)
        self._finish(0, self.dq, self.depth, s.depth, literal(0, "i32"), s.queries, scale_of(self.op))
        behind = self.op.ins[2].type.dims[2] - s.keys
        if behind:
            # Keys that a causal attention never looks at.
            with emit.loop(behind, SERIAL, "t") as t:
                for which, depth in ((1, s.depth), (2, s.value_depth)):
                    with emit.loop(depth, SERIAL, "d") as d, self.body.point():
                        self.body.finish_part(self.op.outs[which], literal(0, self.dtype), (*lead, t + s.keys, d))

    def _statistics(self) -> None:
        """Compute, per row, the largest score in units of log 2, 1 / sum, and sum(dy * y). Rows that do not exist get
        no share."""
        s, emit, tiles, body = self.s, self.emit, self.tiles, self.body
        y, top_in, total_in = self.op.ins[4:7]
        self.top = emit.alloc(self.all_rows, self.dtype, "top")
        self.inverse = emit.alloc(self.all_rows, self.dtype, "inverse")
        self.dots = emit.alloc(self.all_rows, self.dtype, "dots")
        # With a mask that hides: 0 for rows that see nothing, whose scores are no function of q and k.
        self.live = emit.alloc(self.all_rows, self.dtype, "live") if self.hides else None
        bottom = lowest(self.dtype)
        with emit.loop(s.queries, SERIAL, "r") as r, body.point():
            top = emit.bind(body.at(top_in, (*self.lead, r)), "top")
            hidden = top < tiles.constant(bottom / 2)
            emit.store(self.top, tirx.Select(hidden, tiles.constant(bottom), top * tiles.constant(LOG2E)), r)
            emit.store(self.inverse, tiles.constant(1) / body.at(total_in, (*self.lead, r)), r)
            if self.live is not None:
                emit.store(self.live, tirx.Select(hidden, tiles.constant(0), tiles.constant(1)), r)
            accumulator = emit.alloc(s.lanes, self.dtype, "fold")
            tiles.store(accumulator, zero(), tiles.spread(tiles.constant(0)))
            dy_at = r * self.value_depth
            for c, lane in emit.spans(s.value_depth, s.lanes):
                with body.point():
                    x = body.at(y, (*self.lead, r, c)) * tirx.BufferLoad(self.dy, [dy_at + c])
                    emit.store(accumulator, tirx.BufferLoad(accumulator, [lane]) + x, lane)
            emit.store(self.dots, tiles.total(accumulator, lambda a, b: a + b), r)
        for buffer in (self.top, self.inverse, self.dots, self.live):
            if buffer is not None:
                for row in range(s.queries, self.all_rows):
                    emit.store(buffer, tiles.constant(0), literal(row, "i32"))

    # ------------------------------------------------------------------------------ one block

    def _block(self, first: Expr, count: int | Expr, first_key: Expr, last: Expr) -> None:
        """Emit some tiles of queries and a block of keys; `last` holds if no other queries look at these keys."""
        s, emit, tiles = self.s, self.emit, self.tiles
        rows = s.rows
        seen = tiles.visible(first + (count - 1) * rows)
        here = emit.bind(smaller(seen - first_key, self.block_keys), "n")
        if self.mask is not None:
            tiles.mask(self.mask, self.lead, self.shares, self.stride, first, first_key, count * rows, here)
        panels = tirx.floordiv(here + (s.width - 1), s.width)
        with emit.loop(panels, SERIAL, "p") as p, emit.loop(count, SERIAL, "t") as t, self.body.point():
            row = first + t * rows
            key = first_key + p * s.width
            tiles.panel(row, key, _GradientTile(self, t * (rows * self.stride) + p * s.width, row, key))
        with emit.loop(tirx.floordiv(here + (rows - 1), rows), SERIAL, "t") as t, self.body.point():
            # Rows before the tile's first key do not see it.
            skipped = emit.bind(tirx.max(first_key + t * rows - first, 0), "skip") if s.causal else 0
            length = count * rows - skipped
            with emit.when(last), self.body.point():
                self._prefetch(1, first_key + t * rows, s.depth)
                self._prefetch(2, first_key + t * rows, s.value_depth)
            self._keys_part(self.dv, self.value_depth, self.shares, self.dy, t, first, skipped, length)
            self._keys_part(self.dk, self.depth, self.slopes, self.q, t, first, skipped, length)
        with emit.loop(count, SERIAL, "t") as t, self.body.point():
            row = first + t * rows
            with emit.when(seen <= first_key + self.block_keys), self.body.point():
                self._prefetch(0, row, s.depth)
            looked = smaller(tiles.visible(row) - first_key, self.block_keys)
            if s.causal:
                looked = tirx.max(looked, 0)
            length = emit.bind(tirx.floordiv(looked + (s.lanes - 1), s.lanes) * s.lanes, "n")
            for start in range(0, self.depth, s.width):
                with self.body.point():
                    self._queries_part(t, row, first_key, start, length)

    def _queries_part(self, t: Expr, row: Expr, first_key: Expr, start: int, length: Expr) -> None:
        """Add dq[query] += sum over keys of slope[query, key] * k[key], for a tile of queries and some columns."""
        s, tiles = self.s, self.tiles
        self._add(
            self.dq,
            row,
            self.depth,
            start,
            length,
            lambda r, k: tirx.BufferLoad(self.slopes, [(t * s.rows + r) * self.stride + k]),
            lambda v, k: tiles.load(self.k, (first_key + k) * self.depth + start + v * s.lanes),
            min(4, s.lanes),
        )

    def _keys_part(
        self,
        target: Buffer,
        depth: int,
        left: Buffer,
        right: Buffer,
        t: Expr,
        first: Expr,
        skipped: int | Expr,
        length: int | Expr,
    ) -> None:
        """Add target[key] += sum over rows of left[row, key] * right[row], for a tile of keys."""
        s, tiles = self.s, self.tiles

        def columns(start: int) -> None:
            self._add(
                target,
                t * s.rows,
                depth,
                start,
                length,
                lambda r, k: tirx.BufferLoad(left, [(skipped + k) * self.stride + t * s.rows + r]),
                lambda v, k: tiles.load(right, (first + skipped + k) * depth + start + v * s.lanes),
                max(s.rows // 2, 1),
            )

        for start in range(0, depth, s.width):
            with self.body.point():
                columns(start)

    def _add(
        self,
        target: Buffer,
        row: Expr,
        depth: int,
        start: int,
        length: int | Expr,
        a: Callable[[int, Expr], Expr],
        line: Callable[[int, Expr], Expr],
        unrolled: int,
    ) -> None:
        """Add sums of a * line to a tile of `target` from a row and column on."""
        s, tiles = self.s, self.tiles
        vectors = min(depth - start, s.width) // s.lanes

        def place(r: int, v: int) -> Expr:
            return (row + r) * depth + start + v * s.lanes

        accumulators = tiles.sums(
            vectors, length, a, line, start=lambda r, v: tiles.load(target, place(r, v)), unrolled=unrolled
        )
        for r, acc in enumerate(accumulators):
            for v in range(vectors):
                tiles.store(target, place(r, v), tiles.load(acc, literal(v * s.lanes, "i32")))

    def _prefetch(self, which: int, row: Expr, columns: int) -> None:
        """Prefetch the memory of a tile of results. Rows of a head are short and far apart, so the processor does not
        predict them."""
        line = _LINE_BYTES // ITEM_BYTES[self.dtype]
        for r in range(self.s.rows):
            for c in range(0, columns, line):
                place = self.body.part_place(self.op.outs[which], (*self.lead, row + r, literal(c, "i32")))
                if place is not None:
                    self.emit.prefetch(*place)

    def _finish(
        self, which: int, source: Buffer, depth: int, columns: int, first: Expr, rows: int | Expr, factor: float
    ) -> None:
        """Store one gradient."""
        s, emit = self.s, self.emit
        value: Value = self.op.outs[which]
        with emit.loop(rows, SERIAL, "r") as r:
            for c, _ in emit.spans(columns, s.lanes):
                with self.body.point():
                    x = tirx.BufferLoad(source, [r * depth + c])
                    x = x * literal(factor, self.dtype) if factor != 1 else x
                    self.body.finish_part(value, x, (*self.lead, first + r, c))


@dataclass(frozen=True)
class _GradientTile:
    """A tile of queries times a panel of keys: the place of its shares and slopes in scratch, its first row and key."""

    head: _GradientHead
    at: Expr
    row: Expr
    key: Expr

    def _products(self, vectors: int, *, slopes: bool) -> list[Buffer]:
        """Compute a tile of q k^T, or of dy v^T for slopes."""
        head, row, key = self.head, self.row, self.key
        s, tiles = head.s, head.tiles
        operand, stride, turned, depth = (
            (head.dy, head.value_depth, head.turned_v, s.value_depth)
            if slopes
            else (head.q, head.depth, head.turned_k, s.depth)
        )
        panel = tirx.floordiv(key, s.width) * (depth * s.width)
        return tiles.sums(
            vectors,
            depth,
            lambda r, k: tirx.BufferLoad(operand, [(row + r) * stride + k]),
            lambda v, k: tiles.load(turned, panel + k * s.width + v * s.lanes),
        )

    def _score(self, x: Expr, place: Expr) -> Expr:
        """Return q k as a score in units of log 2; the scratch holds the mask's part."""
        x = x * literal(scale_of(self.head.op) * LOG2E, self.head.dtype)
        return x + tirx.BufferLoad(self.head.shares, [place]) if self.head.mask is not None else x

    def _share(self, row: Expr, score: Expr) -> Expr:
        return self.head.body.functions.exp2(score - tirx.BufferLoad(self.head.top, [row])) * tirx.BufferLoad(
            self.head.inverse, [row]
        )

    def _slope(self, row: Expr, share: Expr, product: Expr) -> Expr:
        slope = share * (product - tirx.BufferLoad(self.head.dots, [row]))
        return slope * tirx.BufferLoad(self.head.live, [row]) if self.head.live is not None else slope

    def whole(self) -> None:
        """Compute a tile of shares and slopes that every row sees, while the products stand in registers."""
        head, at, row = self.head, self.at, self.row
        s, tiles = head.s, head.tiles
        for slopes in (False, True):
            for r, acc in enumerate(self._products(s.vectors, slopes=slopes)):
                for v in range(s.vectors):
                    with tiles.vector() as lane:
                        place = at + (r * head.stride + v * s.lanes) + lane
                        x = tirx.BufferLoad(acc, [lane + v * s.lanes])
                        if slopes:
                            head.emit.store(
                                head.slopes, self._slope(row + r, tirx.BufferLoad(head.shares, [place]), x), place
                            )
                        else:
                            head.emit.store(head.shares, self._share(row + r, self._score(x, place)), place)

    def part(self, vectors: int) -> None:
        """Store a tile of scores and of products dy v^T."""
        head, at = self.head, self.at
        s, tiles = head.s, head.tiles
        for slopes in (False, True):
            for r, acc in enumerate(self._products(vectors, slopes=slopes)):
                for v in range(vectors):
                    with tiles.vector() as lane:
                        place = at + (r * head.stride + v * s.lanes) + lane
                        x = tirx.BufferLoad(acc, [lane + v * s.lanes])
                        head.emit.store(
                            head.slopes if slopes else head.shares, x if slopes else self._score(x, place), place
                        )

    def after(self, vectors: int | Expr) -> None:
        """Turn the stored scores and products of a tile into shares and slopes."""
        head, at, row, key = self.head, self.at, self.row, self.key
        s, emit, tiles = head.s, head.emit, head.tiles
        with emit.loop(s.rows, SERIAL, "r") as r, head.body.point():
            limit = tiles.seen_by(row + r)
            limit = emit.bind(limit, "limit") if not isinstance(limit, int) else limit
            with emit.loop(vectors, SERIAL, "v") as v, tiles.vector() as lane:
                place = at + r * head.stride + v * s.lanes + lane
                share = self._share(row + r, tirx.BufferLoad(head.shares, [place]))
                share = emit.bind(tiles.only_visible(share, key + v * s.lanes + lane, limit, 0))
                emit.store(head.shares, share, place)
                emit.store(head.slopes, self._slope(row + r, share, tirx.BufferLoad(head.slopes, [place])), place)
