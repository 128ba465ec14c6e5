"""The packed order of a weight of 8 or 4 bits with its scales and zeros, in words of 32 bits: how it is filled, and how
lookups read it.

Elements are packed as bytes u = q + 128, or as the halves u of a byte. So u is never negative, and the zero of 8 bits
grows by 128. A panel has as many columns as a vector has lanes. In it stand `depth` elements of a column side by side,
those that one instruction adds up. Of a packed byte of 4 bits the low half belongs to the first `depth` elements, the
high half to the next. Behind all panels are the scales, then the zeros: a vector for each group of a panel.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, i32, load
from penstock.ir.graph import Op

WORD_BYTES = 4


@dataclass(frozen=True)
class QuantisedSizes:
    """The sizes of a product by a weight in groups, and the places of its packed form, in words of 32 bits."""

    rows: int
    n: int
    k: int
    bits: int
    group: int
    lanes: int
    depth: int
    # Bytes of a scale, and whether there are zeros.
    scale_bytes: int
    has_zeros: bool

    @property
    def groups(self) -> int:
        return self.k // self.group

    @property
    def panels(self) -> int:
        return ceil_div(self.n, self.lanes)

    @property
    def step(self) -> int:
        """Elements of a column in one vector of packed bytes."""
        return self.depth * 8 // self.bits

    @property
    def words(self) -> int:
        """Words of such a vector."""
        return self.lanes * self.depth // WORD_BYTES

    @property
    def panel_words(self) -> int:
        return self.k // self.step * self.words

    @property
    def scale_words(self) -> int:
        return self.lanes * self.scale_bytes // WORD_BYTES

    @property
    def zero_words(self) -> int:
        return self.lanes // WORD_BYTES if self.has_zeros else 0

    @property
    def scales_at(self) -> int:
        return self.panels * self.panel_words

    @property
    def zeros_at(self) -> int:
        return self.scales_at + self.panels * self.groups * self.scale_words

    @property
    def size(self) -> int:
        return self.zeros_at + self.panels * self.groups * self.zero_words

    @property
    def shift(self) -> int:
        """The number that packed elements are larger by than those of the weight."""
        return 128 if self.bits == 8 else 0

    @property
    def zero(self) -> int:
        """The zero where none is given, of packed elements."""
        return 128 if self.bits == 8 else 8


class QuantisedPacking:
    """The packing of a weight with its scales and zeros."""

    def __init__(self, body: Body, op: Op, sizes: QuantisedSizes) -> None:
        self.body, self.op, self.s, self.emit = body, op, sizes, body.emit

    def fill(self, packed: Buffer) -> None:
        s, emit = self.s, self.emit
        steps = s.k // s.step
        with emit.loop(s.panels, parallel_if(self.body.machine, s.n * s.k), "j") as j:
            with emit.loop(steps, SERIAL, "k") as k, emit.loop(s.words, SERIAL, "w") as w, self.body.point():
                emit.store(packed, self._word(j, k * s.step, w), j * s.panel_words + k * s.words + w)
            with emit.loop(s.groups, SERIAL, "g") as g:
                with emit.loop(s.scale_words, SERIAL, "w") as w, self.body.point():
                    at = s.scales_at + (j * s.groups + g) * s.scale_words + w
                    emit.store(packed, self._scale(j, g, w), at)
                if s.has_zeros:
                    with emit.loop(s.zero_words, SERIAL, "w") as w, self.body.point():
                        at = s.zeros_at + (j * s.groups + g) * s.zero_words + w
                        emit.store(packed, self._zero(j, g, w), at)

    def _column(self, j: Expr, c: Expr) -> Expr:
        """Return a column of a panel; behind the last column its number stands for it, and is never stored."""
        return tirx.min(j * self.s.lanes + c, self.s.n - 1)

    def _joined(self, parts: list[Expr]) -> Expr:
        """Join parts of a word, the lowest first."""
        bits = 32 // len(parts)
        word = parts[0]
        for number, part in enumerate(parts[1:], 1):
            word = tirx.bitwise_or(word, part << i32(number * bits))
        return self.emit.bind(word)

    def _element(self, column: Expr, k: Expr) -> Expr:
        """Return an element as it is packed."""
        if self.s.bits == 8:
            return tirx.Cast("int32", self.body.at(self.op.ins[1], (column, k))) + 128
        byte = tirx.Cast("int32", self.body.at(self.op.ins[1], (column, k // 2)))
        return tirx.bitwise_and(byte >> (k % 2 * 4), i32(15))

    def _word(self, j: Expr, k: Expr, w: Expr) -> Expr:
        s, depth = self.s, self.s.depth
        parts = []
        for b in range(WORD_BYTES):
            column, d = self._column(j, w * (WORD_BYTES // depth) + b // depth), b % depth
            low = self._element(column, k + d)
            if s.bits == 4:
                low = tirx.bitwise_or(low, self._element(column, k + (d + depth)) << i32(4))
            parts.append(low)
        return self._joined(parts)

    def _scale(self, j: Expr, g: Expr, w: Expr) -> Expr:
        count = WORD_BYTES // self.s.scale_bytes
        values = [self.body.at(self.op.ins[2], (self._column(j, w * count + c), g)) for c in range(count)]
        if count == 1:
            return tirx.reinterpret("int32", values[0])
        halves = [tirx.Cast("int32", tirx.reinterpret("uint16", tirx.Cast("float16", v))) for v in values]
        return self._joined(halves)

    def _zero(self, j: Expr, g: Expr, w: Expr) -> Expr:
        columns = [self._column(j, w * WORD_BYTES + c) for c in range(WORD_BYTES)]
        return self._joined([tirx.Cast("int32", self.body.at(self.op.ins[3], (c, g))) for c in columns])


class QuantisedPanels:
    """Packed panels that are read one by one, as elements of the weight, its scales and its zeros."""

    def __init__(self, sizes: QuantisedSizes, packed: Buffer) -> None:
        self.s, self.packed = sizes, packed

    def stored(self, column: Expr, place: Expr) -> Expr:
        """Return a stored number: an element of 8 bits, or a byte with two of 4."""
        if self.s.bits == 8:
            return tirx.Cast("int8", self._element(column, place) - 128)
        low, high = (self._element(column, place * 2 + half) for half in (0, 1))
        return tirx.Cast("uint8", tirx.bitwise_or(low, high << i32(4)))

    def scale(self, column: Expr, group: Expr) -> Expr:
        """Return a scale, in 32 bits."""
        s = self.s
        vector = s.scales_at + self._group(column, group) * s.scale_words
        bits = self._bits(vector, tirx.floormod(column, s.lanes) * s.scale_bytes)
        if s.scale_bytes == WORD_BYTES:
            return tirx.reinterpret("float32", bits)
        half = tirx.Cast("uint16", tirx.bitwise_and(bits, i32(0xFFFF)))
        return tirx.Cast("float32", tirx.reinterpret("float16", half))

    def zero(self, column: Expr, group: Expr) -> Expr:
        """Return a zero, as it is stored."""
        s = self.s
        vector = s.zeros_at + self._group(column, group) * s.zero_words
        return tirx.Cast("uint8", tirx.bitwise_and(self._bits(vector, tirx.floormod(column, s.lanes)), i32(255)))

    def _group(self, column: Expr, group: Expr) -> Expr:
        """Return the number of the vector with the scales or zeros of a group of a panel."""
        return tirx.floordiv(column, self.s.lanes) * self.s.groups + group

    def _element(self, column: Expr, k: Expr) -> Expr:
        """Return an element as it is packed."""
        s = self.s
        step, inside = tirx.floordiv(k, s.step), tirx.floormod(k, s.step)
        vector = tirx.floordiv(column, s.lanes) * s.panel_words + step * s.words
        bits = self._bits(vector, tirx.floormod(column, s.lanes) * s.depth + tirx.floormod(inside, s.depth))
        if s.bits == 8:
            return tirx.bitwise_and(bits, i32(255))
        return tirx.bitwise_and(bits >> (tirx.floordiv(inside, s.depth) * 4), i32(15))

    def _bits(self, vector: Expr, byte: Expr) -> Expr:
        """Return the word that holds a byte of a vector, with that byte lowest."""
        word = load(self.packed, vector + tirx.floordiv(byte, WORD_BYTES))
        return word >> (tirx.floormod(byte, WORD_BYTES) * 8)
