"""The packed forms of weights and images for convolutions of bytes, in words of 32 bits.

In: a `conv_bytes`. Out: words of `depth` channels side by side: of images as planes without sign, with a border of zero
points   [image][group][phase][word][position]; of weights with sign, tile by tile   [group][tile][step][output], and
behind them the sum of each output's weights. Words are four bytes for AVX-512 VNNI, else two numbers of 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, i32
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.graph import Op, Value
from penstock.ir.ops import VIEWS, complete_attrs, integer, window_of

from .geometry import BytePlanes, planes_of


def is_symmetric(body: Body, op: Op) -> bool:
    """Return whether the zero points of the weight are known to be none, as a number with sign."""
    return _known(body, op.ins[3]) == (128 if op.ins[1].type.dtype == "u8" else 0)


def _known(body: Body, value: Value) -> int | None:
    """Return the number that all elements of a value are, if it is known."""
    op = body.group.inline.get(value)
    while op is not None and op.kind in (*VIEWS, "broadcast"):
        op = body.group.inline.get(op.ins[0])
    number = op.attrs["value"] if op is not None and op.kind == "const" else None
    return number if isinstance(number, int) else None


class BytePacking:
    """The emitter of the packed forms of one convolution."""

    # Outputs of a tile: who multiplies sets it.
    height: int
    # The packed weights and images, and where taps read.
    weights: Buffer
    words: Buffer
    offsets: Buffer

    def __init__(self, body: Body, op: Op) -> None:
        self.body, self.op, self.emit, self.lanes = body, op, body.emit, body.lanes
        self.depth = 4 if body.machine.has_byte_products else 2
        self.bits = 32 // self.depth
        attrs, (self.x, self.weight, self.x_zero, self.zeros), out = complete_attrs(op), op.ins, op.outs[0]
        self.groups, self.window = integer(attrs["groups"]), window_of(attrs, self.weight.type.dims[2:])
        self.images, self.outs = out.type.dims[0], out.type.dims[2:]
        self.channels, self.filters = self.weight.type.dims[1], out.type.dims[1] // self.groups
        self.planes = self._planes()
        self.image_words = prod(map(len, self.planes.phases)) * self.planes.words * self.planes.size
        # What is added to x so that it has no sign, and taken from the weight so that it has one.
        self.x_moved, self.moved = (
            (128 if self.x.type.dtype == "i8" else 0),
            (128 if self.weight.type.dtype == "u8" else 0),
        )
        # One row of all positions, if there is nothing between rows.
        self.dense = self.planes.extents == self.outs
        self.symmetric = is_symmetric(body, op)

    def _planes(self) -> BytePlanes:
        return planes_of(self.window, self.outs, self.channels, self.depth)

    def prepare(self, slack: int = 0, weights_slack: int = 0) -> None:
        """Emit the packed weights, the words of images and the offsets of taps, with room for so many words more."""
        emit, planes, body = self.emit, self.planes, self.body
        size = self.groups * self.filters * (planes.steps + 1) + weights_slack
        ready = body.packed_ahead(self.op, size, "i32", self._fill)
        self.weights = emit.alloc(size, "i32", "wp") if ready is None else ready
        if ready is None:
            self._fill(self.weights)
        count = self.images * self.groups * self.image_words
        self.words = emit.alloc(count + slack, "i32", "words")
        self._pack()
        with emit.loop(slack, SERIAL, "l") as lane:
            emit.store(self.words, i32(0), lane + count)
        self.offsets = emit.alloc(len(planes.offsets), "i32", "offsets")
        for number, offset in enumerate(planes.offsets):
            emit.store(self.offsets, i32(offset), i32(number))

    # ------------------------------------------------------------------------------ weights

    def _term(self, k: Expr, d: int) -> tuple[Expr, Index, Expr]:
        """Return the channel and the tap of element `d` of step `k`, and the condition that there is one."""
        planes, kernel = self.planes, self.window.kernel
        if planes.gathers:
            at = k * self.depth + d
            channel, *tap = unravel(tirx.min(at, i32(planes.channels - 1)), (self.channels, *kernel))
            return channel, tuple(tap), at < planes.channels
        taps = len(planes.offsets)
        channel = tirx.floordiv(k, taps) * self.depth + d
        return (
            tirx.min(channel, i32(self.channels - 1)),
            unravel(tirx.floormod(k, taps), kernel),
            channel < self.channels,
        )

    @property
    def sums_at(self) -> int:
        """The place of the sums of weights, behind the weights."""
        return self.groups * self.filters * self.planes.steps

    def _fill(self, packed: Buffer) -> None:
        """Pack the weight, tile by tile of outputs, and add up the weights of each output."""
        emit, steps, body = self.emit, self.planes.steps, self.body
        mask = i32((1 << self.bits) - 1)
        with emit.loop(self.groups * self.filters, parallel_if(body.machine, self.weight.type.size), "o") as o:
            group, inside = tirx.floordiv(o, self.filters), tirx.floormod(o, self.filters)
            tile = emit.bind(tirx.floordiv(inside, self.height) * self.height, "tile")
            wide = emit.bind(tirx.min(i32(self.height), self.filters - tile), "wide")
            first = emit.bind((group * self.filters + tile) * steps + inside - tile, "first")
            total = emit.alloc(1, "i32", "sum")
            emit.store(total, i32(0), i32(0))
            with emit.loop(steps, SERIAL, "k") as k, body.point():
                parts = []
                for d in range(self.depth):
                    channel, tap, there = self._term(k, d)
                    number = tirx.Cast("int32", body.at(self.weight, (o, channel, *tap))) - self.moved
                    parts.append(emit.bind(tirx.Select(there, number, i32(0))))
                for part in parts:
                    emit.store(total, tirx.BufferLoad(total, [i32(0)]) + part, i32(0))
                emit.store(packed, self._joined([tirx.bitwise_and(part, mask) for part in parts]), first + k * wide)
            emit.store(packed, tirx.BufferLoad(total, [i32(0)]), o + self.sums_at)

    def _joined(self, parts: Sequence[Expr]) -> Expr:
        word = parts[0]
        for number, part in enumerate(parts[1:], 1):
            word = tirx.bitwise_or(word, part << i32(number * self.bits))
        return word

    # ------------------------------------------------------------------------------ planes

    def _pack(self) -> None:
        """Store the words of all images."""
        emit, planes = self.emit, self.planes
        kind = parallel_if(self.body.machine, self.images * self.groups * self.image_words)
        self.zero = emit.bind(tirx.Cast("int32", self.body.at(self.x_zero, ())) + self.x_moved, "zero")
        counts = (self.images, self.groups, planes.words)
        with emit.loop(prod(counts), kind, "w") as number, self.body.point():
            image, group, word = (emit.bind(part, "i") for part in unravel(number, counts))
            base = emit.bind((image * self.groups + group) * self.image_words + word * planes.size, "base")
            if planes.gathers:
                self._gather(image, group, word, base)
                return
            whole, odd = divmod(planes.channels, self.depth)
            for channels, last in ((self.depth, False), (odd, True)):
                if not channels or (not last and not whole):
                    continue
                if whole and odd:
                    with emit.when(tirx.EQ(word, whole) if last else word < whole), self.body.point():
                        self._phases(image, group, word, base, channels)
                else:
                    self._phases(image, group, word, base, channels)

    def _phases(self, image: Expr, group: Expr, word: Expr, base: Expr, channels: int) -> None:
        """Store the planes of some channels, a phase at a time."""
        first = self.emit.bind(group * self.channels + word * self.depth, "c")
        around = self.emit.bind(self._joined([self.zero] * channels), "around")
        for number, phase in enumerate(product(*self.planes.phases)):
            at = base + number * self.planes.words * self.planes.size
            self._plane(image, first, channels, phase, at, around)

    def _plane(self, image: Expr, first: Expr, channels: int, phase: tuple[int, ...], at: Expr, around: Expr) -> None:
        emit, window, planes = self.emit, self.window, self.planes
        sizes, extents = self.x.type.dims[2:], planes.extents
        if self.dense and sizes == extents and not any(window.low) and set(planes.strides) == {1}:
            self._run(image, first, channels, None, (0, 1, prod(sizes)), at)
            return
        with emit.loop(prod(extents[:-1]), SERIAL, "r") as row, self.body.point():
            place, inside = [], []
            for e, s, p, low, size, extent in zip(
                unravel(row, extents[:-1]), planes.strides, phase, window.low, sizes, extents, strict=False
            ):
                y = emit.bind(e * s + (p - low), "y")
                place.append(y)
                if p < low:
                    inside.append(y >= 0)
                if (extent - 1) * s + p - low >= size:
                    inside.append(y < size)
            stride, low, size, extent = planes.strides[-1], window.low[-1] - phase[-1], sizes[-1], extents[-1]
            begin = min(max(ceil_div(low, stride), 0), extent)
            end = max(min((size - 1 + low) // stride + 1, extent), begin)
            line = emit.bind(at + row * extent, "line")

            def fill(start: int, stop: int) -> None:
                for c, _ in pieces(emit, stop - start, self.lanes):
                    emit.store(self.words, around, line + (c + start))

            def copy() -> None:
                fill(0, begin)
                self._run(image, first, channels, place, (begin * stride - low, stride, end - begin), line + begin)
                fill(end, extent)

            if not inside:
                copy()
                return
            condition = inside[0]
            for part in inside[1:]:
                condition = tirx.And(condition, part)
            with emit.when(condition), self.body.point():
                copy()
            with emit.when(tirx.Not(condition)):
                fill(0, extent)

    def _run(
        self, image: Expr, first: Expr, channels: int, place: list[Expr] | None, along: tuple[int, int, int], at: Expr
    ) -> None:
        """Store words of positions of a row, or, without `place`, of the whole image. `along` is where they begin, how
        far apart and how many they are."""
        start, stride, count = along
        sizes = self.x.type.dims[2:]
        for c, _ in pieces(self.emit, count, self.lanes):
            with self.body.point():
                column = c * stride + start if start or stride > 1 else c
                if place is not None:
                    index: Index = (*place, column)
                elif self.body.is_stored(self.x):
                    index = running(sizes, column)
                else:
                    index = unravel(column, sizes)
                parts = [self._number((image, first + d, *index)) for d in range(channels)]
                self.emit.store(self.words, self._joined(parts), at + c)

    def _number(self, index: Index) -> Expr:
        return tirx.Cast("int32", self.body.at(self.x, index)) + self.x_moved

    def _gather(self, image: Expr, group: Expr, word: Expr, base: Expr) -> None:
        """Store a word of every window."""
        emit, window, sizes = self.emit, self.window, self.x.type.dims[2:]
        terms = [self._term(word, d) for d in range(self.depth)]
        with emit.loop(prod(self.outs), SERIAL, "p") as p, self.body.point():
            parts = []
            for channel, tap, there in terms:
                place = []
                for o, k, s, d, low, size in zip(
                    unravel(p, self.outs), tap, window.strides, window.dilations, window.low, sizes, strict=True
                ):
                    y = emit.bind(o * s + k * d - low, "y")
                    there = tirx.And(there, tirx.And(y >= 0, y < size))
                    place.append(tirx.max(tirx.min(y, i32(size - 1)), i32(0)))
                number = self._number((image, group * self.channels + channel, *place))
                parts.append(emit.bind(tirx.Select(there, number, self.zero)))
            if self.planes.channels % self.depth:
                parts = [
                    tirx.Select(word * self.depth + d < self.planes.channels, part, i32(0))
                    for d, part in enumerate(parts)
                ]
            emit.store(self.words, self._joined(parts), base + p)


def running(sizes: Sequence[int], number: Expr) -> Index:
    """Return the place of a position by its number alone, along the last dimension that has more than one: an index of
    the others is known to be 0."""
    last = max((i for i, size in enumerate(sizes) if size > 1), default=len(sizes) - 1)
    return tuple(number if i == last else i32(0) for i in range(len(sizes)))
