"""Tile registers (Intel AMX), and f32 numbers split into parts that these multiply.

A tile has 16 rows of 16 words; a word is a pair of bf16 or an f32. One instruction adds to a tile of sums (f32) the
product of 16 rows of 32 bf16 and 32 rows of 16. The second operand has the form of 16 rows of pairs. The instruction
does 16 times as many multiply-adds in a cycle as the vector units do in f32.

An f32 has 24 bits, a bf16 has 8, so an f32 is the sum of three bf16: the nearest one, the one nearest to the remainder,
and the last remainder, which fits. Products of two bf16 are exact in f32. Of the nine products of parts the six largest
are added up; the three that are left out are below 2**-24 of the whole, which is how f32 rounds anyway. So a product of
f32 takes six instructions, at a third of the time of the vector units, and is as exact. The number of parts of an
element type is PARTS.

Limits: infinities and nans have no parts, and numbers within 2**-9 of the largest f32 round up to infinity: packing
keeps the largest magnitude it met (`Magnitudes`), and kernels compute without tiles where that is `TOO_LARGE`. Results
within 2**-7 of the largest f32 may be infinite: the product of the first parts may be larger than the whole. The
instruction takes denormals as zero, and so what parts of numbers below 2**-102 have behind their point; a product of
parts below 2**-126 is zero.

Tile registers have a configuration per thread, which other libraries use too: `configured` puts it back. Processes have
to ask the system for tile registers once (run/load.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx

from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Emitter, Expr, i32

SIDE = 16
WORDS = SIDE * SIDE
# Numbers along the sum that one instruction takes.
STEP = 2 * SIDE
LINE = 4 * SIDE
PARTS = {"bf16": 1, "f32": 3}
# Pairs of parts, of the left and the right operand, in an order in which neighbours share one: each change loads one
# part of one operand.
ORDER = {1: ((0, 0),), 3: ((1, 1), (0, 1), (0, 2), (0, 0), (1, 0), (2, 0))}
# Parts of the left operand, and of the right one, as they lie in memory: in the order in which they are wanted first.
LEFT_PLACES, RIGHT_PLACES = {1: (0,), 3: (1, 0, 2)}, {1: (0,), 3: (2, 0, 1)}
# The bits of the least magnitude that does not round to a finite bf16.
TOO_LARGE = 0x7F7F8000


def _u32(value: int) -> Expr:
    return tirx.IntImm("uint32", value)


def bits(value: Expr) -> Expr:
    return tirx.reinterpret("uint32", value)


class Registers:
    """The emitter of instructions of tile registers."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit

    def _do(self, name: str, *arguments: Any) -> None:
        self.emit.add(tirx.Evaluate(tirx.call_llvm_intrin("int32", f"llvm.x86.{name}", *arguments)))

    @staticmethod
    def _tile(number: int) -> Expr:
        return tirx.IntImm("int8", number)

    @staticmethod
    def _address(buffer: Buffer, at: Expr) -> Expr:
        return tirx.address_of(tirx.BufferLoad(buffer, [at]))

    def zero(self, tile: int) -> None:
        self._do("tilezero", self._tile(tile))

    def load(self, tile: int, buffer: Buffer, at: Expr, line: Expr | int = LINE) -> None:
        """Load sixteen rows of 64 bytes, `line` bytes from one to the next."""
        self._do("tileloadd64", self._tile(tile), self._address(buffer, at), tirx.Cast("int64", line))

    def store(self, tile: int, buffer: Buffer, at: Expr, line: int = LINE) -> None:
        self._do("tilestored64", self._tile(tile), self._address(buffer, at), tirx.IntImm("int64", line))

    def multiply(self, sums: int, left: int, right: int) -> None:
        self._do("tdpbf16ps", self._tile(sums), self._tile(left), self._tile(right))

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Configure all eight tiles as 16 rows of 64 bytes inside this block."""
        before, config = self.emit.alloc(SIDE, "i32", "before"), self.emit.alloc(SIDE, "i32", "config")
        # Palette, bytes per row of each tile in 16 bits, rows of each tile in 8.
        words = [1, 0, 0, 0, *[LINE << 16 | LINE] * 4, 0, 0, 0, 0, *[SIDE * 0x01010101] * 2, 0, 0]
        for i, word in enumerate(words):
            self.emit.store(config, i32(word), i32(i))
        self._do("sttilecfg", self._address(before, i32(0)))
        self._do("ldtilecfg", self._address(config, i32(0)))
        yield
        self._do("ldtilecfg", self._address(before, i32(0)))


class Magnitudes:
    """The largest magnitude among the numbers packed so far, as bits, lane by lane."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self._largest = emit.alloc(SIDE, "i32", "largest")
        emit.add(tirx.BufferStore(self._largest, tirx.Broadcast(i32(0), SIDE), [tirx.Ramp(0, 1, SIDE)]))

    def note(self, value: Expr) -> None:
        """Record a value's magnitude, in a vector loop or for one number."""
        at = self.emit.lane()
        magnitude = tirx.reinterpret("int32", bits(value) & _u32(0x7FFFFFFF))
        self.emit.store(self._largest, tirx.max(tirx.BufferLoad(self._largest, [at]), magnitude), at)

    def too_large(self) -> Expr:
        """Return 1 if any number has no parts, else 0."""
        half = SIDE
        while half > 1:
            half //= 2
            with self.emit.loop(half, VECTOR if half > 1 else SERIAL, "l") as lane:
                other = tirx.BufferLoad(self._largest, [lane + half])
                self.emit.store(self._largest, tirx.max(tirx.BufferLoad(self._largest, [lane]), other), lane)
        return tirx.Select(tirx.BufferLoad(self._largest, [i32(0)]) >= TOO_LARGE, i32(1), i32(0))


def noted(value: Expr, large: Magnitudes | None) -> Expr:
    """Return a value after taking note of its magnitude, where numbers have parts."""
    if large is not None:
        large.note(value)
    return value


def pair_ranges(count: int) -> tuple[tuple[int, int, int], ...]:
    """Split the pairs of a step, numbers q and q + 16 of `count`, by how many of their two numbers exist: (first, end,
    how many)."""
    both, one = max(count - SIDE, 0), min(count, SIDE)
    return (0, both, 2), (both, one, 1), (one, SIDE, 0)


def pair_words(emit: Emitter, pair: Sequence[Expr], parts: int) -> list[Expr]:
    """Return the words of a pair of numbers, the first in the lower half, one for each part. A pair may lack its second
    number, or both. Numbers of one part are bf16 already, so that the upper half of the f32 is all of it."""
    if not pair:
        return [i32(0)] * parts
    words = []
    left = list(pair)
    for part in range(parts):
        last = part == parts - 1
        upper = [_u32(0)] * len(left)
        for i, value in enumerate(left):
            # To the nearest, halves up. The last part is exact.
            upper[i] = bits(value) if last else emit.bind((bits(value) + _u32(0x8000)) & _u32(0xFFFF0000))
        word = upper[0] >> _u32(16)
        if len(left) > 1:
            word = word | (upper[1] & _u32(0xFFFF0000) if last else upper[1])
        words.append(tirx.reinterpret("int32", word))
        if not last:
            left = [emit.bind(value - tirx.reinterpret("float32", u)) for value, u in zip(left, upper, strict=True)]
    return words
