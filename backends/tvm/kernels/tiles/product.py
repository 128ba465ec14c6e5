"""Products on tile registers (Intel AMX): of bf16, and of f32 as sums of products of their parts (registers.py).

In: a Product of bf16 or f32, as for product.py, which serves all other machines and sizes. Out: loops

    for block along k:
      for block of rows:          pack A
        for some strips of B:     pack them; they stay in the second cache, and A passes by
          for 32 rows, strip:     4 tiles of sums += for each step, for each pair of parts: 2 tiles of A times 2 of B
                                  store the sums, and `Body.finish` for each vector of them

A B that fits that cache as a whole is packed before, and then A goes by in blocks that fit beside it.

The order of packed operands is defined in packing.py. A block of f32 operands may have a number that is too large for
parts, such as an infinity or a nan. Its sums are then computed one by one, slowly, in f32.

Limits: few rows are left to product.py, for packing B costs as much as 20 rows save; those of registers.py for
denormals.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from tvm import tirx

from penstock.backends.tvm.group import PACKED
from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import bound_index, linear
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, i32, literal
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.graph import Value, slot_of
from penstock.ir.types import ITEM_BYTES

from .packing import STRIP, PackedA, PackedB, Strips, SumSpan, TilePacking, can_pack
from .registers import LEFT_PLACES, LINE, ORDER, PARTS, RIGHT_PLACES, SIDE, STEP, WORDS, Registers

if TYPE_CHECKING:
    from penstock.backends.tvm.kernels.tools.elements import Index
    from penstock.backends.tvm.kernels.tools.product_terms import Product

# Longer sums are computed in blocks of so many numbers, with sums in memory in between. Key: parts.
_LONGEST_K = {1: 4096, 3: 1024}
_K_BLOCK = {1: 2048, 3: 512}
# In a second cache of 2 MiB: strips of B that are packed together, so that rows of B are read as streams of up to a
# kilobyte; all of B, beside a block of A.
_STRIPS_BYTES, _STREAM_STRIPS = 5 << 17, 16
_B_BYTES, _NEAR_A_BYTES = 3 << 18, 1 << 19
# Otherwise a block of A is in the third cache.
_A_BYTES = 1 << 24
_A_TILES, _B_TILES = 4, 6
# In f32: multiply-adds per cycle of tiles and of vectors, and cycles to pack a number, or to read it packed.
_TILES_RATE, _VECTORS_RATE, _PACKING = 68.0, 24.0, 1.5


def suits(body: Body, p: Product) -> bool:
    """Return whether the machine has tiles, and they are faster for this product."""
    if not can_pack(body, p.out) or min(p.m, p.n, p.k) < SIDE:
        return False
    if PARTS[p.out.type.dtype] == 1:
        return True
    whole = ceil_div(p.m, SIDE) * SIDE * ceil_div(p.n, SIDE) * SIDE * ceil_div(p.k, STEP) * STEP
    return whole / _TILES_RATE + _PACKING * p.k * (p.m + p.n) < p.m * p.n * p.k / _VECTORS_RATE


def same_places(body: Body, out: Value) -> list[tuple[Buffer, str]]:
    """Return the buffers that are read or written at the places of a result, with their element types: short rows far
    apart."""
    places: dict[Buffer, str] = {}
    for op in body.group.ops:
        slot = slot_of(op) if op.kind == "accum" else None
        for v in op.ins:
            if v.type.shape != out.type.shape:
                continue
            if slot is not None:
                places[body.slot(slot, v)] = v.type.dtype
            elif body.is_stored(v):
                places[body.operand(v)] = v.type.dtype
    places |= {body.result(v): v.type.dtype for v in body.group.outs if v.type.shape == out.type.shape}
    return list(places.items())


def emit_tile_product(body: Body, p: Product) -> None:
    _TileProduct(body, p).run()


@dataclass(frozen=True)
class _SplitPart(SumSpan):
    """The sums over a span. With `add`, they go on top of `partial`; without `last`, they are left there."""

    partial: Buffer | None
    add: bool
    last: bool
    # All of B for this span, if it is packed before.
    b: PackedB | None = None


class _TileProduct:
    """The emitter of a product on tile registers."""

    def __init__(self, body: Body, p: Product) -> None:
        self.body, self.p, self.emit = body, p, body.emit
        self.packing = TilePacking(body, p)
        self.registers = Registers(body.emit)
        parts = self.packing.parts
        self.order = ORDER[parts]
        self.k_blocks = ceil_div(p.k, _K_BLOCK[parts]) if p.k > _LONGEST_K[parts] else 1
        self.k_size = ceil_div(ceil_div(p.k, self.k_blocks), STEP) * STEP if self.k_blocks > 1 else p.k
        self.k_blocks = ceil_div(p.k, self.k_size)
        self.column_tiles = ceil_div(p.n, SIDE)
        self.strips = ceil_div(p.n, STRIP)
        row_bytes = 2 * parts * ceil_div(self.k_size, STEP) * STEP
        # All of B is packed at once, if it stays near.
        self.b_near = self.strips * STRIP * row_bytes <= _B_BYTES
        most = (_NEAR_A_BYTES if self.b_near else _A_BYTES) // row_bytes // STRIP * STRIP
        self.row_block = p.m if p.m <= most else max(most, STRIP)
        self.near = same_places(body, p.out)

    def run(self) -> None:
        p, emit = self.p, self.emit
        batches = prod(p.batch)
        kind = parallel_if(self.body.machine, batches * p.m * p.n * p.k // 64)
        if batches == 1:
            ready: Buffer | None = None
            if p.op is not None and p.op.attrs.get(PACKED):
                size = sum(self.packing.b_words(span, self.strips) for span in self._spans())
                ready = self.body.packed_ahead(p.op, size, "i32", self._fill)
            self._matrix(self._lead(), kind, ready)
            return
        with emit.loop(batches, kind, "b") as b:
            lead = bound_index(emit, b, p.batch, "b")
            with self.registers.configured():
                self._matrix(lead, SERIAL, None)

    # ------------------------------------------------------------------------------ blocks

    def _lead(self) -> Index:
        return (i32(0),) * len(self.p.batch)

    def _spans(self) -> list[SumSpan]:
        starts = range(0, self.p.k, self.k_size)
        return [SumSpan(self._lead(), i32(k), min(self.k_size, self.p.k - k)) for k in starts]

    def _fill(self, packed: Buffer) -> None:
        """Pack all of B, span after span."""
        at = 0
        kind = parallel_if(self.body.machine, self.p.n * self.p.k)
        for span in self._spans():
            b = PackedB(packed, i32(at), i32(0), self.strips)
            with self.body.point():
                self._each_group(span, kind, lambda g, span=span, b=b: self.packing.b(span, b, g))  # type: ignore[misc]
            at += self.packing.b_words(span, self.strips)

    def _matrix(self, lead: Index, kind: object, ready: Buffer | None) -> None:
        p, emit = self.p, self.emit
        whole = SumSpan(lead, i32(0), self.k_size)
        block = self.packing.b_words(whole, self.strips)

        def packed(q: Expr) -> PackedB | None:
            return PackedB(ready, emit.bind(q * block, "at"), i32(0), self.strips) if ready is not None else None

        if self.k_blocks == 1:
            self._part(_SplitPart(lead, i32(0), p.k, None, add=False, last=True, b=packed(i32(0))), kind)
            return
        partial = emit.alloc(ceil_div(p.m, SIDE) * self.column_tiles * WORDS, "f32", "partial")
        self._part(_SplitPart(lead, i32(0), self.k_size, partial, add=False, last=False, b=packed(i32(0))), kind)
        if self.k_blocks > 2:
            with emit.loop(self.k_blocks - 2, SERIAL, "q") as q, self.body.point():
                self._part(
                    _SplitPart(
                        lead, (q + 1) * self.k_size, self.k_size, partial, add=True, last=False, b=packed(q + 1)
                    ),
                    kind,
                )
        done = (self.k_blocks - 1) * self.k_size
        with self.body.point():
            self._part(
                _SplitPart(lead, i32(done), p.k - done, partial, add=True, last=True, b=packed(i32(self.k_blocks - 1))),
                kind,
            )

    def _part(self, part: _SplitPart, kind: object) -> None:
        p, emit = self.p, self.emit
        whole, tail = divmod(p.m, self.row_block)
        everything = part.b
        if everything is None and self.b_near:
            everything = PackedB(
                emit.alloc(self.packing.b_words(part, self.strips), "i32", "bp"), i32(0), i32(0), self.strips
            )
            self._each_group(part, kind, lambda g: self.packing.b(part, everything, g))
        with emit.loop(whole, SERIAL, "im") as im, self.body.point():
            self._rows(part, im * self.row_block if whole > 1 else i32(0), self.row_block, everything, kind)
        if tail:
            with self.body.point():
                self._rows(part, i32(whole * self.row_block), tail, everything, kind)

    def _each_group(self, span: SumSpan, kind: object, action: Callable[[Strips], None]) -> None:
        """Call `action` for all columns, some strips of 32 at a time."""
        whole, tail = divmod(self.p.n, STRIP)
        bytes_each = 4 * self.packing.strip_words(span)
        together = max(min(_STREAM_STRIPS, _STRIPS_BYTES // bytes_each, whole), 1)
        groups, left = divmod(whole, together)
        if groups:
            with self.emit.loop(groups, kind, "js") as js, self.body.point():
                action(Strips(js * (together * STRIP), js * together, together, STRIP))
        if left:
            with self.emit.loop(1), self.body.point():
                action(Strips(i32(groups * together * STRIP), i32(groups * together), left, STRIP))
        if tail:
            with self.emit.loop(1), self.body.point():
                action(Strips(i32(whole * STRIP), i32(whole), 1, tail))

    def _rows(self, part: _SplitPart, start: Expr, rows: int, everything: PackedB | None, kind: object) -> None:
        emit = self.emit
        a = self.packing.a(part, start, rows)
        whole, tail = divmod(rows, STRIP)

        def group(g: Strips) -> None:
            b = everything
            if b is None:
                b = PackedB(emit.alloc(self.packing.b_words(part, g.count), "i32", "bp"), i32(0), g.number, g.count)
                self.packing.b(part, b, g)
            tile = emit.alloc(STRIP * STRIP, "f32", "tile")
            with ExitStack() as stack:
                if prod(self.p.batch) == 1:
                    stack.enter_context(self.registers.configured())
                with emit.loop(whole, SERIAL, "io") as io, self.body.point():
                    strips(g, b, tile, io * STRIP, STRIP)
                if tail:
                    with self.body.point():
                        strips(g, b, tile, i32(whole * STRIP), tail)

        def strips(g: Strips, b: PackedB, tile: Buffer, row: Expr, height: int) -> None:
            with emit.loop(g.count, SERIAL, "n") as n, self.body.point():
                number = g.number + n
                strip = _ColumnStrip(
                    b, number, g.first + n * STRIP, g.columns, self.packing.too_large(part, a, b, number), tile
                )
                self._block(part, a, row, start, height, strip)

        self._each_group(part, kind, group)

    def _block(self, part: _SplitPart, a: PackedA, row: Expr, start: Expr, rows: int, strip: _ColumnStrip) -> None:
        """Multiply rows row .. row + rows of the packed block of A, which begins at row `start`, by a strip of B."""
        emit, p = self.emit, self.p
        if strip.too_large is None:
            self._sums(part, a, row, start, rows, strip)
        else:
            with emit.when(tirx.EQ(strip.too_large, 0)):
                self._sums(part, a, row, start, rows, strip)
            with emit.when(tirx.NE(strip.too_large, 0)), self.body.point():
                self._plain_sums(part, start + row, rows, strip)
        if not part.last:
            return
        with emit.loop(rows, SERIAL, "r") as r:
            for c, _ in pieces(emit, strip.columns, SIDE):
                with self.body.point():
                    value = tirx.BufferLoad(strip.tile, [r * STRIP + c])
                    self.body.finish({p.out: (value, p.place(part.lead, start + row + r, strip.j + c))})

    def _kept(self, i: Expr, j: Expr) -> Expr:
        """Return the place of the tile of row i and column j among the sums kept between spans."""
        return (tirx.floordiv(i, SIDE) * self.column_tiles + tirx.floordiv(j, SIDE)) * WORDS

    def _sums(self, part: _SplitPart, a: PackedA, row: Expr, start: Expr, rows: int, strip: _ColumnStrip) -> None:
        emit, p, registers, words = self.emit, self.p, self.registers, self.packing.words
        down, across = ceil_div(rows, SIDE), ceil_div(strip.columns, SIDE)
        sums = [(r, c) for r in range(down) for c in range(across)]
        parts = self.packing.parts
        first_a = emit.bind(self.packing.rows_at(part, row), "a")
        first_b = emit.bind(self.packing.strip_at(part, strip.b, strip.number), "b")

        def kept(r: int, c: int) -> Expr:
            return self._kept(start + row + r * SIDE, strip.j + c * SIDE)

        for r, c in sums:
            if part.add:
                registers.load(2 * r + c, part.partial, kept(r, c))
            else:
                registers.zero(2 * r + c)
        with emit.loop(part.steps, SERIAL, "s") as s:
            if part.last:
                each = ceil_div(rows, part.steps)
                for u in range(each):
                    self._prefetch(
                        p.place(part.lead, start + row + tirx.min(s * each + u, rows - 1), strip.j), strip.columns
                    )
            before: tuple[int, int] | tuple[()] = ()
            for pa, pb in self.order:
                if not before or pb != before[1]:
                    for c in range(across):
                        registers.load(
                            _B_TILES + c,
                            strip.b.words,
                            first_b + (s * across + c) * words + RIGHT_PLACES[parts][pb] * WORDS,
                        )
                for r in range(down):
                    if not before or pa != before[0]:
                        registers.load(
                            _A_TILES + r, a.words, first_a + (s * down + r) * words + LEFT_PLACES[parts][pa] * WORDS
                        )
                    for c in range(across):
                        registers.multiply(2 * r + c, _A_TILES + r, _B_TILES + c)
                before = pa, pb
        for r, c in sums:
            if part.last:
                registers.store(2 * r + c, strip.tile, i32((r * STRIP + c) * SIDE), 4 * STRIP)
            else:
                registers.store(2 * r + c, part.partial, kept(r, c))

    def _plain_sums(self, part: _SplitPart, i: Expr, rows: int, strip: _ColumnStrip) -> None:
        """Compute the sums without tiles, one multiply-add after the other."""
        emit, p = self.emit, self.p
        with emit.loop(rows, SERIAL, "r") as r:
            for c, _ in pieces(emit, strip.columns, SIDE):
                kept = (
                    None
                    if part.partial is None
                    else self._kept(i + r, strip.j + c) + tirx.floormod(i + r, SIDE) * SIDE + tirx.floormod(c, SIDE)
                )
                target, at = (strip.tile, r * STRIP + c) if part.last else (part.partial, kept)
                emit.store(target, tirx.BufferLoad(part.partial, [kept]) if part.add else literal(0, "f32"), at)
            with emit.loop(part.k_size, SERIAL, "k") as k:
                for c, _ in pieces(emit, strip.columns, SIDE):
                    with self.body.point():
                        index = r * STRIP + c
                        if not part.last:
                            index = (
                                self._kept(i + r, strip.j + c)
                                + tirx.floormod(i + r, SIDE) * SIDE
                                + tirx.floormod(c, SIDE)
                            )
                        target = strip.tile if part.last else part.partial
                        product = p.a(part.lead, i + r, part.k_from + k) * p.b(part.lead, part.k_from + k, strip.j + c)
                        emit.store(target, tirx.BufferLoad(target, [index]) + product, index)

    # ------------------------------------------------------------------------------ hints

    def _prefetch(self, place: Index, columns: int) -> None:
        """Prefetch, during the sums, one row of the memory that their epilogue reads and writes."""
        for buffer, dtype in self.near:
            for c in range(0, columns * ITEM_BYTES[dtype], LINE):
                self.emit.prefetch(buffer, linear(place, self.p.out.type.dims) + c // ITEM_BYTES[dtype])


@dataclass(frozen=True)
class _ColumnStrip:
    """A strip of packed B from column j on, the place for its sums, and a flag that tiles cannot compute it (None: they
    can)."""

    b: PackedB
    number: Expr
    j: Expr
    columns: int
    too_large: Expr | None
    tile: Buffer
