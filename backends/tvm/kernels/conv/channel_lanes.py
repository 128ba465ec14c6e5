"""Correlation of small images with channels in lanes, for groups of one channel (depthwise), with weights packed ahead.

In: a Correlation of one phase whose groups have one channel and one filter. Out: loops

    for image, block of as many channels as there are lanes:
      turn the planes of the source      [position][channel]
      for output row, tile of columns:   accumulators [column][channel] = sum over the taps that meet the source
      turn the sums, and `Body.finish` on vectors of neighbouring positions

Rows of small images leave lanes empty where positions are in lanes, and each has a border to be copied. Here a tap
outside of the source is left out. It would be a product with zero, which shows where the weight is infinite: the sums
of these products lie packed behind the weights, one for each set of absent taps, and accumulators begin with them.

The last block of channels, and of positions, ends where they do, and goes over some of them twice. A few positions
behind the last whole vector are read and stored one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from tvm import tirx

from penstock.backends.tvm.group import PACKED
from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import Correlation, Pair, ask_for_results, lanes_of
from penstock.backends.tvm.kernels.tools.elements import unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, literal, load
from penstock.backends.tvm.kernels.tools.transpose import transpose_block

from .points import is_light

# Positions of the source, and of the output: both stay in the first cache, with channels in lanes.
_MOST_POSITIONS = 256
# Positions behind the last whole vector that are taken one by one.
_MOST_SINGLE = 4
# Statements of unrolled taps and columns.
_MOST_STATEMENTS = 600
# Steps of turning a vector of positions and reading or storing it, and of a row of a plane, besides its taps.
_TURNING, _ROW = 6, 5


@dataclass(frozen=True)
class _Rows:
    """Output rows from `first` on, which the same rows of taps meet: those from `low` to below `high`."""

    first: int
    count: int
    low: int
    high: int


def suits(body: Body, c: Correlation) -> bool:
    """Return whether channels in lanes take fewer steps than rows in lanes."""
    lanes = lanes_of(body, c)
    if len(c.phases) > 1 or c.step != (1, 1) or c.channels > 1 or c.filters > 1 or not c.op.attrs.get(PACKED):
        return False
    places = prod(c.sizes), prod(c.spatial)
    if lanes < 8 or c.groups < lanes or min(places) < lanes or max(places) > _MOST_POSITIONS:
        return False
    columns, rows = _meetings(c, 1), _meetings(c, 0)
    met = [sum(high - low for low, high in line) for line in (rows, columns)]
    sections = len(list(groupby(rows)))
    if not all(met) or sections * met[1] > _MOST_STATEMENTS:
        return False
    taps = c.phases[0].taps
    here = met[0] * met[1] / lanes + sum(ceil_div(n, lanes) for n in places) * _TURNING
    planes = c.spatial[0] * ceil_div(c.spatial[1], lanes) * prod(taps) + _ROW * (c.spatial[0] + c.sizes[0])
    return here < planes


def _meetings(c: Correlation, axis: int) -> list[Pair]:
    """Return for each output row or column the range of its taps that meet the source."""
    (phase,) = c.phases
    size, taps, apart = c.sizes[axis], phase.taps[axis], c.dilations[axis]
    ranges = []
    for place in range(c.spatial[axis]):
        start = place * c.strides[axis] + phase.shift[axis] - c.low[axis]
        meeting = [r for r in range(taps) if 0 <= start + r * apart < size]
        ranges.append((meeting[0], meeting[-1] + 1) if meeting else (0, 0))
    return ranges


def emit_channel_lanes(body: Body, c: Correlation) -> None:
    """Emit a correlation of groups of one channel, with channels in lanes."""
    _ChannelLanes(body, c).run()


class _ChannelLanes:
    """The emitter of a depthwise correlation with channels in lanes."""

    def __init__(self, body: Body, c: Correlation) -> None:
        self.body, self.c, self.emit, self.lanes = body, c, body.emit, lanes_of(body, c)
        (self.phase,) = c.phases
        self.taps = prod(self.phase.taps)
        self.start = tuple(shift - low for shift, low in zip(self.phase.shift, c.low, strict=True))
        self.rows, self.columns = _meetings(c, 0), _meetings(c, 1)
        # Sets of absent taps, as the ranges of those that are there.
        self.absent = [(row, column) for row in dict.fromkeys(self.rows) for column in dict.fromkeys(self.columns)]
        self.blocks = ceil_div(c.groups, self.lanes)
        self.size = (self.taps + len(self.absent)) * self.lanes
        registers = 32 if body.machine.rows >= 12 else 16
        most = max(registers - 2 - self.phase.taps[1], 2)
        self.width = ceil_div(c.spatial[1], ceil_div(c.spatial[1], most))
        self.light = is_light(body)

    def run(self) -> None:
        c, emit = self.c, self.emit
        packed = self.body.packed_ahead(c.op, self.blocks * self.size, c.dtype, self._fill)
        assert packed is not None, "the weights are packed ahead"
        kind = parallel_if(self.body.machine, c.out.type.size * self.taps // 8)
        with emit.loop(c.images * self.blocks, kind, "block") as number, self.body.point():
            image, block = (emit.bind(x, "i") for x in unravel(number, (c.images, self.blocks)))
            channel = emit.bind(self._first(block), "channel")
            weights = emit.bind(block * self.size, "weights")
            source = emit.alloc(prod(c.sizes) * self.lanes, c.dtype, "source")
            sums = emit.alloc(prod(c.spatial) * self.lanes, c.dtype, "sums")
            self._read(image, channel, source)
            row = 0
            for (low, high), alike in groupby(self.rows):
                count = len(list(alike))
                self._sum(packed, weights, source, sums, _Rows(row, count, low, high))
                row += count
            self._store(image, channel, sums)

    def _first(self, block: Expr) -> Expr:
        """Return the first channel of a block."""
        last = self.c.groups - self.lanes
        return tirx.min(block * self.lanes, last) if self.c.groups % self.lanes else block * self.lanes

    def _fill(self, packed: Buffer) -> None:
        """Pack the weights of each block: taps, then the sums of absent products with zero."""
        c, emit, lanes = self.c, self.emit, self.lanes
        rows, columns = self.phase.taps
        # In memory, because TVM takes a product with a constant zero for zero.
        zeros = emit.alloc(lanes, c.dtype, "zeros")
        with emit.loop(lanes, VECTOR, "l") as lane:
            emit.store(zeros, literal(0, c.dtype), lane)

        def weight(channel: Expr, r: Expr, s: Expr) -> Expr:
            return c.weight(channel, literal(0, "i32"), literal(0, "i32"), *self.phase.tap(r, s))

        with emit.loop(self.blocks, SERIAL, "block") as block, self.body.point():
            first = emit.bind(self._first(block), "channel")
            at = emit.bind(block * self.size, "at")
            with (
                emit.loop(rows, SERIAL, "r") as r,
                emit.loop(columns, SERIAL, "s") as s,
                emit.loop(lanes, VECTOR, "l") as lane,
                self.body.point(),
            ):
                emit.store(packed, weight(first + lane, r, s), at + (r * columns + s) * lanes + lane)
            for number, ((low, high), (left, right)) in enumerate(self.absent):
                place = at + (self.taps + number) * lanes
                with emit.loop(lanes, VECTOR, "l") as lane:
                    emit.store(packed, literal(0, c.dtype), place + lane)
                if not c.counts_border or (low, high, left, right) == (0, rows, 0, columns):
                    continue
                with emit.loop(rows, SERIAL, "r") as r, emit.loop(columns, SERIAL, "s") as s:
                    met = tirx.all(r >= low, r < high, s >= left, s < right)
                    with emit.when(tirx.Not(met)), emit.loop(lanes, VECTOR, "l") as lane, self.body.point():
                        absent = emit.bind(weight(first + lane, r, s) * tirx.BufferLoad(zeros, [lane]))
                        emit.store(packed, tirx.BufferLoad(packed, [place + lane]) + absent, place + lane)

    # ------------------------------------------------------------------------------ the source, turned

    def _read(self, image: Expr, channel: Expr, source: Buffer) -> None:
        """Turn the planes of a block of channels: positions outside, channels in lanes."""
        c, emit, lanes = self.c, self.emit, self.lanes
        places = prod(c.sizes)
        planes, base = c.plain, emit.bind((image * c.groups + channel) * places, "base")
        if planes is None:
            planes, base = emit.alloc(places * lanes, c.dtype, "planes"), literal(0, "i32")
            with emit.loop(lanes, SERIAL, "c") as number:
                for p, _ in emit.spans(places, lanes):
                    with self.body.point():
                        h, w = tirx.floordiv(p, c.sizes[1]), tirx.floormod(p, c.sizes[1])
                        emit.store(planes, c.source(image, channel + number, h, w), number * places + p)
        blocks, single = self._cut(places)

        def turn(first: Expr) -> None:
            starts = [base + i * places + first for i in range(lanes)]
            for i, vector in enumerate(transpose_block(emit, c.dtype, lanes, lanes, planes, starts)):
                emit.add(tirx.BufferStore(source, vector, [tirx.Ramp((first + i) * lanes, 1, lanes)]))

        each = ceil_div(prod(c.spatial) * lanes, max(blocks, 1))
        with emit.loop(blocks, SERIAL, "p") as p, self.body.point():
            turn(emit.bind(self._place(p, places, single), "p"))
            start = (image * c.groups + channel) * prod(c.spatial) + p * each
            ask_for_results(self.body, c.out, start, each)
        for p in range(places - single, places):
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(source, load(planes, base + lane * places + p), lane + p * lanes)

    def _cut(self, places: int) -> Pair:
        """Return the number of blocks of positions, and of single positions behind them."""
        single = places % self.lanes
        return (places // self.lanes, single) if single <= _MOST_SINGLE else (ceil_div(places, self.lanes), 0)

    def _place(self, block: Expr, places: int, single: int) -> Expr:
        """Return the first position of a block; the last one ends where the positions do."""
        if (places - single) % self.lanes == 0:
            return block * self.lanes
        return tirx.min(block * self.lanes, places - self.lanes)

    # ------------------------------------------------------------------------------ sums

    def _sum(self, packed: Buffer, weights: Expr, source: Buffer, sums: Buffer, rows: _Rows) -> None:
        """Sum all tiles of output rows that the same rows of taps meet."""
        c, emit = self.c, self.emit
        for first in range(0, c.spatial[1], self.width):
            columns = range(first, min(first + self.width, c.spatial[1]))
            with emit.loop(rows.count, SERIAL, "h") as h, self.body.point():
                h = h + rows.first if rows.count > 1 else literal(rows.first, "i32")
                self._tile(packed, weights, source, sums, rows, emit.bind(h, "h"), columns)

    def _tile(
        self,
        packed: Buffer,
        weights: Expr,
        source: Buffer,
        sums: Buffer,
        rows: _Rows,
        h: Expr,
        columns: Sequence[int],
    ) -> None:
        c, emit, lanes = self.c, self.emit, self.lanes
        accs = {w: emit.alloc(lanes, c.dtype, "acc") for w in columns}
        for w, acc in accs.items():
            met = (rows.low, rows.high), self.columns[w]
            whole = met == ((0, self.phase.taps[0]), (0, self.phase.taps[1]))
            place = weights + (self.taps + self.absent.index(met)) * lanes
            with emit.loop(lanes, VECTOR, "l") as lane:
                begin = literal(0, c.dtype) if whole or not c.counts_border else tirx.BufferLoad(packed, [place + lane])
                emit.store(acc, begin, lane)
        # The columns of the source, each with the taps and columns of the output that it is a product of.
        readers: dict[int, list[Pair]] = {}
        for w in columns:
            for s in range(*self.columns[w]):
                column = w * c.strides[1] + self.start[1] + s * c.dilations[1]
                readers.setdefault(column, []).append((s, w))
        used = sorted({s for pairs in readers.values() for s, _ in pairs})
        with emit.loop(rows.high - rows.low, SERIAL, "r") as r, self.body.point():
            r = r + rows.low
            line = emit.bind((h * c.strides[0] + r * c.dilations[0] + self.start[0]) * (c.sizes[1] * lanes), "line")
            at = emit.bind(weights + r * (self.phase.taps[1] * lanes), "at")
            factors = {s: emit.alloc(lanes, c.dtype, "a") for s in used}
            for s, factor in factors.items():
                with emit.loop(lanes, VECTOR, "l") as lane:
                    emit.store(factor, tirx.BufferLoad(packed, [at + (lane + s * lanes)]), lane)
            for column in sorted(readers):
                with emit.loop(lanes, VECTOR, "l") as lane, self.body.point():
                    x = emit.bind(tirx.BufferLoad(source, [line + (lane + column * lanes)]), "x")
                    for s, w in readers[column]:
                        product = x * tirx.BufferLoad(factors[s], [lane])
                        emit.store(accs[w], tirx.BufferLoad(accs[w], [lane]) + product, lane)
        for w, acc in accs.items():
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(sums, tirx.BufferLoad(acc, [lane]), (h * c.spatial[1] + w) * lanes + lane)

    # ------------------------------------------------------------------------------ the output

    def _store(self, image: Expr, channel: Expr, sums: Buffer) -> None:
        """Turn the sums of a block of channels, and finish them."""
        c, emit, lanes = self.c, self.emit, self.lanes
        places = prod(c.spatial)
        blocks, single = self._cut(places)
        with emit.loop(blocks, SERIAL, "p") as p, self.body.point():
            first = emit.bind(self._place(p, places, single), "p")
            starts = [(first + i) * lanes for i in range(lanes)]
            vectors = transpose_block(emit, c.dtype, lanes, lanes, sums, starts)
            if self.light:
                for i, vector in enumerate(vectors):
                    (place,) = vector.indices
                    self._finish_vector(image, channel + i, first, vector.source, place.base)
            else:
                turned = emit.alloc(lanes * lanes, c.dtype, "turned")
                for i, vector in enumerate(vectors):
                    emit.add(tirx.BufferStore(turned, vector, [tirx.Ramp(i * lanes, 1, lanes)]))
                with emit.loop(lanes, SERIAL, "j") as j, self.body.point():
                    self._finish_vector(image, channel + j, first, turned, j * lanes)
        for p in range(places - single, places):
            with emit.loop(lanes, VECTOR, "l") as lane, self.body.point():
                value = tirx.BufferLoad(sums, [lane + p * lanes])
                h, w = (literal(x, "i32") for x in divmod(p, c.spatial[1]))
                self.body.finish({c.out: (value, c.place(image, channel + lane, h, w))})

    def _finish_vector(self, image: Expr, channel: Expr, first: Expr, sums: Buffer, base: Expr) -> None:
        """Finish neighbouring positions of a channel."""
        c, emit = self.c, self.emit
        channel = emit.bind(channel, "o")
        with emit.loop(self.lanes, VECTOR, "l") as lane, self.body.point():
            p = first + lane
            h, w = tirx.floordiv(p, c.spatial[1]), tirx.floormod(p, c.spatial[1])
            self.body.finish({c.out: (tirx.BufferLoad(sums, [base + lane]), c.place(image, channel, h, w))})
