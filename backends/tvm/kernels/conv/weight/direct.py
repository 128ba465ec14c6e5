"""The gradient of a convolution for its weight: sums over all positions of all images, with the sums in registers.

In: x and the gradient dy of the output. Out:

    dw[o, c, r, s] = sum over n, p of  dy[n, o, p] * x[n, c, p * stride - low + (r, s) * dilation]

One side stands in lanes: its channels are packed [position, channel], transposed in registers. The other side is read
one element at a time:

    channels of x in lanes:   a tile is [outputs, lanes] for one tap after the other;
                              the packed x has its border, and taps move in it
    channels of dy in lanes:  a tile is [channels of x, taps of one kernel row; lanes];
                              x is copied with a border if it needs one

The form chosen is the cheaper one by multiply-adds, lanes that stay empty included, and by elements to transpose.

Order: a panel of lanes after the other. When the packed panel is small for all images, a tile stays in registers over
all of them; else images are outside, tiles are added up in memory, and the result is finished after the last image.

Limits: as for tools/correlation.py; both sides in memory; not both sides with few channels (depthwise.py), no
kernel with more columns than a tile has rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import Pair, cover, most_rows
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import (
    SERIAL,
    VECTOR,
    Buffer,
    Expr,
    ceil_div,
    compute_dtype,
    literal,
    load,
)
from penstock.backends.tvm.kernels.tools.register_tile import RegisterTile
from penstock.backends.tvm.kernels.tools.transpose import pieces, transpose_block
from penstock.ir.graph import Value
from penstock.ir.types import ITEM_BYTES

# Elements of a packed panel that may wait in the second-level cache for all images.
_PANEL = 131072
# The cost of transposing one element, in multiply-adds of whole vectors.
_TURN = 1.0


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of a convolution for its weight. `x` and `dy` are flat buffers; `padded` is the reach of windows,
    the border counted."""

    out: Value
    images: int
    groups: int
    filters: int
    channels: int
    sizes: Pair
    spatial: Pair
    kernel: Pair
    strides: Pair
    dilations: Pair
    low: Pair
    padded: Pair
    x: Buffer
    dy: Buffer
    place: Callable[[Expr, Expr, Expr, Expr], Index]


def is_suited(body: Body, w: WeightGradient) -> bool:
    lanes = max(body.lanes * 4 // ITEM_BYTES[compute_dtype(w.out.type.dtype)], 1)
    return max(w.filters, w.channels) * 2 > lanes and w.kernel[1] <= most_rows(body, body.machine.vectors)


def emit_weight_gradient(body: Body, w: WeightGradient) -> None:
    lanes = max(body.lanes * 4 // ITEM_BYTES[compute_dtype(w.out.type.dtype)], 1)
    positions, taps = prod(w.spatial), prod(w.kernel)

    def cost(wide: int, other: int, turned: int) -> float:
        return positions * taps * other * ceil_div(wide, lanes) + _TURN * wide * turned

    if cost(w.channels, w.filters, prod(w.sizes)) <= cost(w.filters, w.channels, positions):
        _ChannelsInLanes(body, w, lanes).run()
    else:
        _FiltersInLanes(body, w, lanes).run()


class _WeightSums:
    """The loops that both forms share. Sums are [channel of the other side, tap, lanes]; a unit is a range of those
    channels that is finished together."""

    unit: int
    other: int
    packed_rows: int

    def __init__(self, body: Body, w: WeightGradient, lanes: int, wide: int) -> None:
        self.body, self.w, self.emit, self.lanes, self.wide = body, w, body.emit, lanes, wide
        self.dtype = compute_dtype(w.out.type.dtype)
        self.vectors = min(body.machine.vectors, ceil_div(wide, lanes))
        self.width = self.vectors * lanes
        self.most = most_rows(body, self.vectors)
        self.panels = ceil_div(wide, self.width)
        self.positions, self.taps = prod(w.spatial), prod(w.kernel)
        # Sizes of x with its border, rows and columns that no window reads included.
        self.rows = max(w.padded[0], w.sizes[0] + w.low[0])
        self.columns = max(w.padded[1], w.sizes[1] + w.low[1])
        self.plane = self.rows * self.columns
        self.bordered = (self.rows, self.columns) != w.sizes
        self.places: Buffer | None = None

    def prepare(self, kind: object) -> None:
        """Prepare operands once, before all panels."""

    def pack(self, packed: Buffer, start: Expr, image: Expr, group: Expr, first: Expr) -> None:
        """Pack the channels of an image, from `first` on, in lanes."""
        raise NotImplementedError

    def add(
        self, at: Expr, count: int, group: Expr, packed: Buffer, sums: Buffer, start: Expr, image: Expr | None
    ) -> None:
        """Add an image, or all, to a unit's sums."""
        raise NotImplementedError

    def finish(self, sums: Buffer, start: Expr, at: Expr, count: int, group: Expr, first: Expr) -> None:
        raise NotImplementedError

    def run(self) -> None:
        w, emit = self.w, self.emit
        kind = parallel_if(self.body.machine, w.out.type.size * w.images * self.positions // 8)
        if (self.rows, self.columns) != w.spatial:
            self.places = emit.alloc(self.positions, "i32", "places")
            with emit.loop(w.spatial[0], SERIAL, "h") as h, emit.loop(w.spatial[1], SERIAL, "v") as v:
                emit.store(self.places, h * (w.strides[0] * self.columns) + v * w.strides[1], h * w.spatial[1] + v)
        self.prepare(kind)
        size, length = self.packed_rows * self.width, self.taps * self.width
        together = w.images * size <= _PANEL
        with emit.loop(w.groups * self.panels, kind, "jo") as jo, self.body.point():
            group, first = jo, literal(0, "i32")
            if self.panels > 1:
                group, first = tirx.floordiv(jo, self.panels), tirx.floormod(jo, self.panels) * self.width
            packed = emit.alloc((w.images if together else 1) * size, self.dtype, "packed")
            sums = emit.alloc((self.unit if together else self.other) * length, self.dtype, "sums")
            if together:
                with emit.loop(w.images, SERIAL, "n") as n, self.body.point():
                    self.pack(packed, n * size, n, group, first)
                for at, count in cover(emit, self.other, self.unit, "u"):
                    with self.body.point():
                        self.add(at, count, group, packed, sums, literal(0, "i32"), None)
                        self.finish(sums, literal(0, "i32"), at, count, group, first)
                return
            for i, _ in emit.spans(self.other * length, self.lanes):
                emit.store(sums, literal(0, self.dtype), i)
            with emit.loop(w.images, SERIAL, "n") as n, self.body.point():
                self.pack(packed, literal(0, "i32"), n, group, first)
                for at, count in cover(emit, self.other, self.unit, "u"):
                    with self.body.point():
                        self.add(at, count, group, packed, sums, at * length, n)
            for at, count in cover(emit, self.other, self.unit, "u"):
                with self.body.point():
                    self.finish(sums, at * length, at, count, group, first)

    def place_of(self, k: Expr) -> Expr:
        """Return the place in x with its border of the first tap of the window at position k."""
        return k if self.places is None else tirx.BufferLoad(self.places, [k])

    def turn(
        self, packed: Buffer, source: Buffer, base: Expr, valid: Expr, count: int, row: Callable[[Expr], Expr]
    ) -> None:
        """Turn planes of `count` positions from `base` on into rows of `packed`, position i into row number `row(i)`.
        Channels from `valid` on do not exist; the last one stands in for them."""
        emit, lanes = self.emit, self.lanes

        def plane(v: int, i: Expr) -> Expr:
            channel = i + v * lanes
            return base + (channel if self.wide % self.width == 0 else tirx.min(channel, valid - 1)) * count

        whole, tail = divmod(count, lanes)
        with emit.loop(whole, SERIAL, "p") as p:
            for v in range(self.vectors):
                starts = [plane(v, literal(i, "i32")) + p * lanes for i in range(lanes)]
                for i, vector in enumerate(
                    transpose_block(emit, self.dtype, lanes, lanes, source, starts) if whole else []
                ):
                    at = row(p * lanes + i) * self.width + v * lanes
                    emit.add(tirx.BufferStore(packed, vector, [tirx.Ramp(at, 1, lanes)]))
        with emit.loop(tail, SERIAL, "p") as p:
            if tail:
                at = emit.bind(row(p + whole * lanes) * self.width, "at")
                for v in range(self.vectors):
                    with emit.loop(lanes, VECTOR, "l") as lane:
                        emit.store(packed, load(source, plane(v, lane) + (p + whole * lanes)), at + (lane + v * lanes))

    def tile(
        self,
        sums: Buffer,
        slots: list[Expr],
        image: Expr | None,
        step: Callable[[Expr, Expr], tuple[Expr, list[Expr]]],
        operands: tuple[Buffer, Buffer],
    ) -> None:
        """Set the rows of `sums` that start at `slots`, or add one image to them. For an image and a position, `step`
        returns the row of the packed side and the elements of the other side to multiply. Images are counted from 0 if
        all are added."""
        emit, lanes = self.emit, self.lanes
        packed, source = operands
        tile = RegisterTile(emit, self.dtype, len(slots), self.width, lanes)
        with (
            emit.loop(self.w.images if image is None else 1, SERIAL, "n") as n,
            emit.loop(self.positions, SERIAL, "k") as k,
        ):
            row, elements = step(n if image is None else image, k)
            line = tile.line(packed, row)
            for i, element in enumerate(elements):
                tile.add(i, load(source, element), line)
        for i, (acc, slot) in enumerate(zip(tile.accumulators, slots, strict=True)):
            if image is None:
                tile.store(i, sums, slot)
                continue
            for v in range(0, self.width, lanes):
                with emit.loop(lanes, VECTOR, "l") as lane:
                    total = tirx.BufferLoad(acc, [lane + v])
                    # Added up image by image, not in one long chain: fewer roundings of large sums.
                    emit.store(sums, tirx.BufferLoad(sums, [slot + (lane + v)]) + total, slot + (lane + v))

    def turn_back(
        self, sums: Buffer, start: Expr, count: int, valid: Expr, store: Callable[[Expr, Expr, Expr], None]
    ) -> None:
        """Turn rows of lanes, from `start` on, into runs of `count` elements for each lane: store(lane, position in the
        run, value)."""
        emit, lanes = self.emit, self.lanes

        def block(done: Expr, height: int) -> None:
            for v in range(self.vectors):
                turned = emit.alloc(lanes * lanes, self.dtype, "turned")
                starts = [start + (done + min(i, height - 1)) * self.width + v * lanes for i in range(lanes)]
                for i, vector in enumerate(transpose_block(emit, self.dtype, lanes, lanes, sums, starts)):
                    emit.add(tirx.BufferStore(turned, vector, [tirx.Ramp(i * lanes, 1, lanes)]))
                with emit.loop(lanes, SERIAL, "j") as j:
                    if self.wide % self.width:
                        with emit.when(j + v * lanes < valid):
                            run(done, height, turned, j, v)
                    else:
                        run(done, height, turned, j, v)

        def run(done: Expr, height: int, turned: Buffer, j: Expr, v: int) -> None:
            for i, _ in pieces(emit, height, lanes):
                with self.body.point():
                    store(j + v * lanes, done + i, tirx.BufferLoad(turned, [j * lanes + i]))

        for done, height in cover(emit, count // lanes * lanes, lanes, "m"):
            with self.body.point():
                block(done, height)
        if count % lanes:
            with self.body.point():
                block(literal(count // lanes * lanes, "i32"), count % lanes)


class _ChannelsInLanes(_WeightSums):
    """The form with channels of x in lanes: units are outputs, and taps move in the packed image."""

    def __init__(self, body: Body, w: WeightGradient, lanes: int) -> None:
        super().__init__(body, w, lanes, w.channels)
        self.other, self.packed_rows = w.filters, self.plane
        self.unit = ceil_div(self.other, ceil_div(self.other, self.most))

    def pack(self, packed: Buffer, start: Expr, image: Expr, group: Expr, first: Expr) -> None:
        w, emit = self.w, self.emit
        if self.bordered:
            for i, _ in emit.spans(self.plane * self.width, self.lanes):
                emit.store(packed, literal(0, self.dtype), start + i)
        count = prod(w.sizes)
        base = emit.bind(((image * w.groups + group) * w.channels + first) * count, "base")
        corner = emit.bind(tirx.floordiv(start, self.width), "corner")

        def row(p: Expr) -> Expr:
            if not self.bordered:
                return corner + p
            return (
                corner
                + (tirx.floordiv(p, w.sizes[1]) + w.low[0]) * self.columns
                + tirx.floormod(p, w.sizes[1])
                + w.low[1]
            )

        self.turn(packed, w.x, base, w.channels - first, count, row)

    def add(
        self, at: Expr, count: int, group: Expr, packed: Buffer, sums: Buffer, start: Expr, image: Expr | None
    ) -> None:
        w, emit = self.w, self.emit
        with emit.loop(w.kernel[0], SERIAL, "r") as r, emit.loop(w.kernel[1], SERIAL, "s") as s, self.body.point():
            tap = emit.bind(r * w.kernel[1] + s, "tap")
            shift = emit.bind(r * (w.dilations[0] * self.columns) + s * w.dilations[1], "shift")
            slots = [start + (i * self.taps + tap) * self.width for i in range(count)]

            def step(n: Expr, k: Expr) -> tuple[Expr, list[Expr]]:
                row = self.place_of(k) + shift + (n * self.plane if image is None else 0)
                plane = ((n * w.groups + group) * w.filters + at) * self.positions + k
                return emit.bind(row * self.width, "row"), [plane + i * self.positions for i in range(count)]

            self.tile(sums, slots, image, step, (packed, w.dy))

    def finish(self, sums: Buffer, start: Expr, at: Expr, count: int, group: Expr, first: Expr) -> None:
        w, emit = self.w, self.emit

        def store(o: Expr, channel: Expr, tap: Expr, value: Expr) -> None:
            index = w.place(
                group * w.filters + o, channel, tirx.floordiv(tap, w.kernel[1]), tirx.floormod(tap, w.kernel[1])
            )
            self.body.finish({w.out: (value, index)})

        with emit.loop(count, SERIAL, "o") as i, self.body.point():
            line = emit.bind(start + i * (self.taps * self.width), "line")
            o = emit.bind(at + i, "o")
            if self.taps > 1:
                self.turn_back(
                    sums,
                    line,
                    self.taps,
                    w.channels - first,
                    lambda lane, tap, value: store(o, first + lane, tap, value),
                )
                return
            tail = w.channels % self.width

            def straight(columns: int) -> None:
                for v, _ in pieces(emit, columns, self.lanes):
                    with self.body.point():
                        store(o, first + v, literal(0, "i32"), tirx.BufferLoad(sums, [line + v]))

            if not tail or self.panels == 1:
                straight(tail or self.width)
                return
            with emit.when(first + self.width <= w.channels):
                straight(self.width)
            with emit.when(first + self.width > w.channels):
                straight(tail)


class _FiltersInLanes(_WeightSums):
    """The form with channels of dy in lanes: units are some channels of x with all their taps."""

    def __init__(self, body: Body, w: WeightGradient, lanes: int) -> None:
        super().__init__(body, w, lanes, w.filters)
        self.other, self.packed_rows = w.channels, self.positions
        fit = max(self.most // w.kernel[1], 1)
        self.unit = ceil_div(self.other, ceil_div(self.other, fit))
        self.copy: Buffer = w.x

    def prepare(self, kind: object) -> None:
        w, emit = self.w, self.emit
        if not self.bordered:
            return
        planes = w.images * w.groups * w.channels
        self.copy = emit.alloc(planes * self.plane, self.dtype, "xp")
        with emit.loop(planes, kind, "c") as c:
            for i, _ in emit.spans(self.plane, self.lanes):
                emit.store(self.copy, literal(0, self.dtype), c * self.plane + i)
            with emit.loop(w.sizes[0], SERIAL, "h") as h:
                line = emit.bind(c * self.plane + (h + w.low[0]) * self.columns + w.low[1], "line")
                source = emit.bind((c * w.sizes[0] + h) * w.sizes[1], "source")
                for i, _ in pieces(emit, w.sizes[1], self.lanes):
                    emit.store(self.copy, load(w.x, source + i), line + i)

    def pack(self, packed: Buffer, start: Expr, image: Expr, group: Expr, first: Expr) -> None:
        w, emit = self.w, self.emit
        base = emit.bind(((image * w.groups + group) * w.filters + first) * self.positions, "base")
        corner = emit.bind(tirx.floordiv(start, self.width), "corner")
        self.turn(packed, w.dy, base, w.filters - first, self.positions, lambda p: corner + p)

    def add(
        self, at: Expr, count: int, group: Expr, packed: Buffer, sums: Buffer, start: Expr, image: Expr | None
    ) -> None:
        w, emit = self.w, self.emit
        cells = [(i, s) for i in range(count) for s in range(w.kernel[1])]
        with emit.loop(w.kernel[0], SERIAL, "r") as r, self.body.point():
            slots = [start + ((i * w.kernel[0] + r) * w.kernel[1] + s) * self.width for i, s in cells]

            def step(n: Expr, k: Expr) -> tuple[Expr, list[Expr]]:
                row = (k + n * self.positions if image is None else k) * self.width
                plane = ((n * w.groups + group) * w.channels + at) * self.plane + r * (w.dilations[0] * self.columns)
                corner = emit.bind(plane + self.place_of(k), "corner")
                return row, [corner + (i * self.plane + s * w.dilations[1]) for i, s in cells]

            self.tile(sums, slots, image, step, (packed, self.copy))

    def finish(self, sums: Buffer, start: Expr, at: Expr, count: int, group: Expr, first: Expr) -> None:
        w = self.w

        def store(lane: Expr, position: Expr, value: Expr) -> None:
            channel, r, s = (
                tirx.floordiv(position, self.taps),
                tirx.floordiv(tirx.floormod(position, self.taps), w.kernel[1]),
                tirx.floormod(position, w.kernel[1]),
            )
            self.body.finish({w.out: (value, w.place(group * w.filters + first + lane, at + channel, r, s))})

        self.turn_back(sums, start, count * self.taps, w.filters - first, store)
