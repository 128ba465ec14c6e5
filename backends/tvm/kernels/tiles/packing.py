"""Operands of products in the order of tile registers.

In: accessors of a Product, and which part of it to pack. Out: words of pairs,

    A   for 32 rows [steps, row tiles, parts, 16 rows, 16 pairs]
    B   strips of 32 columns, each [steps, column tiles, parts, 16 pairs, 16 columns];
        behind all of them a flag for each strip: a number of it is too large

A step is 32 numbers along k. Which of them make a pair is free, if both operands have it so: neighbours for bf16, which
has those in one word of memory where it is contiguous along k; for f32 number q and q + 16, so that the same
instructions make pairs of two vectors in either direction. A wants rows, B wants pairs outside, and one that comes the
other way is transposed in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, i32
from penstock.backends.tvm.kernels.tools.transpose import pieces, transpose_block
from penstock.ir.graph import Value
from penstock.ir.ops import OPS

from .registers import (
    LEFT_PLACES,
    PARTS,
    RIGHT_PLACES,
    SIDE,
    STEP,
    WORDS,
    Magnitudes,
    bits,
    noted,
    pair_ranges,
    pair_words,
)

if TYPE_CHECKING:
    from penstock.backends.tvm.kernels.tools.product_terms import Product

# Columns of a strip.
STRIP = 2 * SIDE


def can_pack(body: Body, out: Value) -> bool:
    """Return whether the machine has tiles for the operation whose result is `out`, and can pack its operands."""
    if not body.machine.has_tiles or out.type.dtype not in PARTS:
        return False
    return PARTS[out.type.dtype] > 1 or all(
        _is_rounded(body, v) for op in body.group.ops if out in op.outs for v in op.ins
    )


def _is_rounded(body: Body, value: Value) -> bool:
    """Return whether reads of a bf16 value give bf16. Values that the kernel computes are not rounded, and packing
    would cut them."""
    if body.is_stored(value):
        return True
    op = next((o for o in (*body.group.ops, *body.group.inline.values()) if value in o.outs), None)
    return op is not None and (
        op.kind == "cast" or (OPS[op.kind].family in ("layout", "source") and all(_is_rounded(body, v) for v in op.ins))
    )


@dataclass(frozen=True)
class SumSpan:
    """The numbers k_from .. k_from + k_size of all sums of one matrix of the batch."""

    lead: Index
    k_from: Expr
    k_size: int

    @property
    def steps(self) -> int:
        return ceil_div(self.k_size, STEP)


@dataclass(frozen=True)
class Strips:
    """A run of `count` neighbouring strips of `columns` columns, from column `first` and strip `number` on."""

    first: Expr
    number: Expr
    count: int
    columns: int


@dataclass(frozen=True)
class PackedA:
    """A packed block of rows of A."""

    words: Buffer
    # 1 if a number is too large for tiles, else 0; None where that cannot be.
    too_large: Expr | None


@dataclass(frozen=True)
class PackedB:
    """Room for strips first .. first + count, from word `at` on."""

    words: Buffer
    at: Expr
    first: Expr
    count: int


class TilePacking:
    """The emitter of the packing for one product."""

    def __init__(self, body: Body, p: Product) -> None:
        self.body, self.p, self.emit = body, p, body.emit
        self.parts = PARTS[p.out.type.dtype]
        # Words of a tile with all its parts.
        self.words = self.parts * WORDS
        self._places: tuple[int, ...] = ()
        # Otherwise B is contiguous along k.
        self.b_by_pairs = p.b_along_j or not p.b_along_k

    # ------------------------------------------------------------------------------ where things are

    def strip_words(self, span: SumSpan) -> int:
        return 2 * span.steps * self.words

    def b_words(self, span: SumSpan, strips: int) -> int:
        return strips * self.strip_words(span) + (ceil_div(strips, SIDE) * SIDE if self.parts > 1 else 0)

    def rows_at(self, span: SumSpan, row: Expr) -> Expr:
        """Return where the packed rows from a multiple of 32 on begin."""
        return tirx.floordiv(row, SIDE) * (span.steps * self.words)

    def strip_at(self, span: SumSpan, b: PackedB, number: Expr) -> Expr:
        return b.at + (number - b.first) * self.strip_words(span)

    def _flag_at(self, span: SumSpan, b: PackedB, number: Expr) -> Expr:
        return b.at + b.count * self.strip_words(span) + (number - b.first)

    def too_large(self, span: SumSpan, a: PackedA, b: PackedB, number: Expr) -> Expr | None:
        """Return a flag that tiles cannot compute these rows times this strip; None where they always can."""
        if a.too_large is None:
            return None
        return self.emit.bind(a.too_large + tirx.BufferLoad(b.words, [self._flag_at(span, b, number)]), "large")

    # ------------------------------------------------------------------------------ pairs

    def _ks(self, pair: Expr, other: int) -> Expr:
        """Return the place along a step of a number of a pair."""
        return pair + SIDE * other if self.parts > 1 else pair * 2 + other

    def _pairs(self, count: int, line: Callable[[Expr, int], None]) -> None:
        """Call for all pairs of a step of `count` numbers: line(number of the pair, how many of its two exist)."""
        both = max(count - SIDE, 0) if self.parts > 1 else count // 2
        with self.emit.loop(both, SERIAL, "q") as q, self.body.point():
            if both:
                line(q, 2)
        one = min(count, SIDE) if self.parts > 1 else ceil_div(count, 2)
        for first, last, exist in ((both, one, 1), (one, SIDE, 0)):
            with self.emit.loop(last - first, SERIAL, "q") as q, self.body.point():
                if last > first:
                    line(q + first, exist)

    def _store_words(self, target: Buffer, at: Expr, words: list[Expr]) -> None:
        for place, word in zip(self._places, words, strict=True):
            self.emit.store(target, word, at + place * WORDS if place else at)

    def _line(
        self,
        target: Buffer,
        at: Expr,
        lanes: int,
        exist: int,
        value: Callable[[int, Expr], Expr],
        large: Magnitudes | None,
    ) -> None:
        """Pack one line of words for `lanes` rows or columns: the pair value(0, lane), value(1, lane), of which `exist`
        are there."""
        for lane, _ in pieces(self.emit, lanes, SIDE):
            with self.body.point():
                pair = [noted(value(other, lane), large) for other in range(exist)]
                self._store_words(target, at + lane, pair_words(self.emit, pair, self.parts))

    def _row(
        self, target: Buffer, at: Expr, count: int, value: Callable[[Expr], Expr], large: Magnitudes | None
    ) -> None:
        """Pack 16 words of one row or column that is contiguous along k: the pairs of `count` values."""
        emit = self.emit
        if self.parts == 1:
            self._row_of_neighbours(target, at, count, value)
            return
        for first, last, exist in pair_ranges(count):
            for q, _ in pieces(emit, last - first, SIDE):
                with self.body.point():
                    place = q + first if first else q
                    pair = [noted(value(self._ks(place, other)), large) for other in range(exist)]
                    self._store_words(target, at + place, pair_words(emit, pair, self.parts))

    def _row_of_neighbours(self, target: Buffer, at: Expr, count: int, value: Callable[[Expr], Expr]) -> None:
        emit = self.emit
        line = tirx.decl_buffer((STEP,), "uint16", name=emit.fresh("line"))
        emit.add(tirx.AllocBuffer(line))
        everywhere = tirx.Ramp(0, 1, STEP)
        if count < STEP:
            emit.add(tirx.BufferStore(line, tirx.Broadcast(tirx.IntImm("uint16", 0), STEP), [everywhere]))
        for k, _ in pieces(emit, count, STEP):
            with self.body.point():
                upper = tirx.Cast("uint16", bits(value(k)) >> tirx.IntImm("uint32", 16))
                emit.add(tirx.BufferStore(line, upper, [k]))
        words = tirx.reinterpret(f"int32x{SIDE}", tirx.BufferLoad(line, [everywhere]))
        emit.add(tirx.BufferStore(target, words, [tirx.Ramp(at, 1, SIDE)]))

    def _store_turned(self, target: Buffer, at: Expr, scratch: Buffer) -> None:
        """Transpose the tiles in `scratch`, one for each part."""
        for part in range(self.parts):
            lines = transpose_block(
                self.emit, "i32", SIDE, SIDE, scratch, [i32(part * WORDS + q * SIDE) for q in range(SIDE)]
            )
            for r, words in enumerate(lines):
                self.emit.add(tirx.BufferStore(target, words, [tirx.Ramp(at + (part * WORDS + r * SIDE), 1, SIDE)]))

    # ------------------------------------------------------------------------------ operands

    def _each_step(self, span: SumSpan, action: Callable[[Expr, int], None]) -> None:
        """Call action(number of the step, numbers along k in it) for every step."""
        whole, tail = divmod(span.k_size, STEP)
        with self.emit.loop(whole, SERIAL, "s") as s, self.body.point():
            if whole:
                action(s, STEP)
        if tail:
            with self.body.point():
                action(i32(whole), tail)

    def a(self, span: SumSpan, start: Expr, rows: int) -> PackedA:
        """Pack rows start .. start + rows of A."""
        emit, p = self.emit, self.p
        packed = emit.alloc(ceil_div(rows, SIDE) * span.steps * self.words, "i32", "ap")
        turned = p.a_along_i and not p.a_along_k
        scratch = emit.alloc(self.words, "i32", "turned") if turned else None
        large = Magnitudes(emit) if self.parts > 1 else None

        self._places = LEFT_PLACES[self.parts]

        def tile(first: Expr, number: Expr, tiles: int, height: int) -> None:
            """Pack one of `tiles` tiles beside each other, which begin with row `first`."""
            row = emit.bind(start + first + number * SIDE, "i")

            def at(s: Expr) -> Expr:
                return emit.bind(self.rows_at(span, first) + (s * tiles + number) * self.words, "at")

            def by_rows(s: Expr, count: int) -> None:
                place = at(s)
                with emit.loop(height, SERIAL, "r") as r, self.body.point():
                    self._row(
                        packed,
                        place + r * SIDE,
                        count,
                        lambda k: p.a(span.lead, row + r, span.k_from + s * STEP + k),
                        large,
                    )

            def by_pairs(s: Expr, count: int) -> None:
                def line(q: Expr, exist: int) -> None:
                    def value(other: int, i: Expr) -> Expr:
                        return p.a(span.lead, row + i, span.k_from + s * STEP + self._ks(q, other))

                    self._line(scratch, q * SIDE, height, exist, value, large)

                self._pairs(count, line)
                self._store_turned(packed, at(s), scratch)

            self._each_step(span, by_pairs if turned else by_rows)

        whole, tail = divmod(rows, STRIP)
        with emit.loop(whole, SERIAL, "t") as t, emit.loop(2, SERIAL, "h") as h, self.body.point():
            if whole:
                tile(t * STRIP, h, 2, SIDE)
        for h in range(ceil_div(tail, SIDE)):
            with self.body.point():
                tile(i32(whole * STRIP), i32(h), ceil_div(tail, SIDE), min(tail - h * SIDE, SIDE))
        return PackedA(packed, emit.bind(large.too_large(), "large") if large is not None else None)

    def b(self, span: SumSpan, b: PackedB, strips: Strips) -> None:
        """Pack strips of B."""
        emit, p = self.emit, self.p
        self._places = RIGHT_PLACES[self.parts]
        across = ceil_div(strips.columns, SIDE)
        widths = [min(strips.columns - c * SIDE, SIDE) for c in range(across)]
        large = Magnitudes(emit) if self.parts > 1 else None

        def by_pairs(s: Expr, count: int) -> None:
            def line(q: Expr, exist: int) -> None:
                with emit.loop(strips.count, SERIAL, "n") as n, self.body.point():
                    for c, width in enumerate(widths):
                        from_j = strips.first + n * STRIP + c * SIDE
                        place = emit.bind(
                            self.strip_at(span, b, strips.number + n) + (s * across + c) * self.words + q * SIDE, "at"
                        )

                        def value(other: int, lane: Expr, from_j: Expr = from_j) -> Expr:
                            return p.b(span.lead, span.k_from + s * STEP + self._ks(q, other), from_j + lane)

                        self._line(b.words, place, width, exist, value, large)

            self._pairs(count, line)

        def by_columns(n: Expr, s: Expr, count: int) -> None:
            for c, width in enumerate(widths):
                with emit.loop(width, SERIAL, "r") as r, self.body.point():
                    column = strips.first + n * STRIP + c * SIDE + r

                    def element(k: Expr, column: Expr = column) -> Expr:
                        return p.b(span.lead, span.k_from + s * STEP + k, column)

                    self._row(scratch, r * SIDE, count, element, large)
                self._store_turned(
                    b.words, self.strip_at(span, b, strips.number + n) + (s * across + c) * self.words, scratch
                )

        if self.b_by_pairs:
            self._each_step(span, by_pairs)
        else:
            scratch = emit.alloc(self.words, "i32", "turned")
            with emit.loop(strips.count, SERIAL, "n") as n, self.body.point():
                self._each_step(span, lambda s, count: by_columns(n, s, count))
        if large is not None:
            flag = emit.bind(large.too_large(), "large")
            with emit.loop(strips.count, SERIAL, "n") as n:
                emit.store(b.words, flag, self._flag_at(span, b, strips.number + n))
