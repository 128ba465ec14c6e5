"""Correlation with the positions of a row in lanes, for few output channels (depthwise, images with three colours),
which do not fill lanes.

In: a Correlation. Out: for each image and group, strips of rows. The copy of the source keeps columns apart by their
remainder modulo the stride, so that neighbouring windows read neighbouring elements. Sums of all phases of a strip lie
interleaved, as in register_tiles.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import BorderedSource, Correlation, Phase, cover
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.transpose import pieces

_WIDEST_LINE = 8


def emit_lines(body: Body, c: Correlation, lanes: int) -> None:
    """Emit a correlation by vectors of neighbouring positions."""
    _LineCorrelation(body, c, lanes).run()


@dataclass(frozen=True)
class _LineStrip:
    """A strip of `rows` output rows of one group of an image, from row `unit` * step on. Its sums have `pitch` elements
    a row."""

    image: Expr
    group: Expr
    unit: Expr
    rows: int
    sums: Buffer
    pitch: int


@dataclass(frozen=True)
class _LineTile:
    """A register tile: `height` rows by `vectors` vectors of positions of a phase, from (h, w) on. `start` is where its
    packed weights begin."""

    phase: Phase
    start: int
    h: Expr
    w: Expr
    height: int
    vectors: int


class _LineCorrelation:
    """The emitter of a correlation with positions of a row in lanes."""

    def __init__(self, body: Body, c: Correlation, lanes: int) -> None:
        self.body, self.c, self.emit = body, c, body.emit
        widest = max(p.counts[1] for p in c.phases)
        while lanes > 4 and widest <= lanes // 2:
            lanes //= 2
        self.lanes = lanes
        budget = body.machine.rows * body.machine.vectors
        self.vectors = min(ceil_div(widest, lanes), max(budget // c.filters, 1), _WIDEST_LINE)
        # Several rows at once when a tile would leave registers unused: taps then share loads of weights.
        self.height = max(min(budget // (c.filters * self.vectors), 4), 1)
        self.width = ceil_div(widest, lanes) * lanes
        self.source = BorderedSource(body, c)
        self.source.split_columns(lanes * self.vectors)

    def _starts(self) -> list[int]:
        """Return where the packed weights of each phase begin."""
        c, starts = self.c, [0]
        for phase in c.phases:
            starts.append(starts[-1] + c.groups * c.channels * prod(phase.taps) * c.filters)
        return starts[:-1]

    def _fill(self, packed: Buffer) -> None:
        c, emit = self.c, self.emit
        for start, phase in zip(self._starts(), c.phases, strict=True):
            taps = prod(phase.taps)
            if not taps:
                continue
            with (
                emit.loop(c.groups, SERIAL, "g") as g,
                emit.loop(c.channels, SERIAL, "c") as channel,
                emit.loop(phase.taps[0], SERIAL, "r") as r,
                emit.loop(phase.taps[1], SERIAL, "s") as s,
                emit.loop(c.filters, SERIAL, "o") as o,
                self.body.point(),
            ):
                at = ((g * c.channels + channel) * taps + r * phase.taps[1] + s) * c.filters + o
                emit.store(packed, c.weight(g, o, channel, *phase.tap(r, s)), start + at)

    def run(self) -> None:
        c, emit = self.c, self.emit
        work = c.out.type.size * c.channels * sum(prod(p.taps) for p in c.phases)
        kind = parallel_if(self.body.machine, work // 8)
        size = c.groups * c.filters * c.channels * sum(prod(p.taps) for p in c.phases)
        packed = self.body.packed_ahead(c.op, size, c.dtype, self._fill)
        if packed is None:
            packed = emit.alloc(size, c.dtype, "wp")
            self._fill(packed)
        starts = self._starts()
        inner = kind if c.images == 1 else SERIAL
        with emit.loop(c.images, kind, "n") as n, self.body.point():
            self.source.alloc(False)
            self.source.copy(n, inner)
            with emit.loop(c.groups, inner, "g") as g, self.body.point():
                for unit, rows in cover(emit, c.spatial[0], c.step[0] * self.height, "h"):
                    with self.body.point():
                        top = tirx.floordiv(unit, c.step[0]) if not isinstance(unit, tirx.IntImm) else unit // c.step[0]
                        self._strip(n, g, packed, starts, top, unit, rows)

    def _strip(
        self, image: Expr, group: Expr, packed: Buffer, starts: list[int], unit: Expr, row: Expr, rows: int
    ) -> None:
        c, emit, lanes = self.c, self.emit, self.lanes
        pitch = self.width * c.step[1] + lanes * self.vectors * c.step[1]
        sums = emit.alloc(c.filters * rows * pitch, c.dtype, "sums")
        strip = _LineStrip(image, group, unit, rows, sums, pitch)
        for phase, start in zip(c.phases, starts, strict=True):
            height = max(ceil_div(rows - phase.first[0], c.step[0]), 0)
            if height == 0 or phase.counts[1] == 0:
                continue
            columns = ceil_div(phase.counts[1], lanes)
            for v, vectors in cover(emit, columns, min(self.vectors, columns), "v"):
                for h, th in cover(emit, height, self.height, "h"):
                    with self.body.point():
                        self._tile(packed, strip, _LineTile(phase, start, h, v * lanes, th, vectors))
        with emit.loop(c.filters, SERIAL, "o") as o, emit.loop(rows, SERIAL, "h") as h:
            channel = emit.bind(group * c.filters + o, "o")
            line = emit.bind((o * rows + h) * pitch, "line")
            for w, _ in pieces(emit, c.spatial[1], lanes):
                with self.body.point():
                    self.body.finish({c.out: (tirx.BufferLoad(sums, [line + w]), c.place(image, channel, row + h, w))})

    def _tile(self, packed: Buffer, strip: _LineStrip, tile: _LineTile) -> None:
        """Sum a tile in registers, and leave its sums among those of the strip."""
        c, emit, lanes, phase = self.c, self.emit, self.lanes, tile.phase
        cells = [(o, i) for o in range(c.filters) for i in range(tile.height)]
        accs = {cell: emit.alloc(tile.vectors * lanes, c.dtype, "acc") for cell in cells}
        for acc in accs.values():
            for v in range(tile.vectors):
                with emit.loop(lanes, VECTOR, "l") as lane:
                    emit.store(acc, literal(0, c.dtype), lane + v * lanes)
        if prod(phase.taps):
            with (
                emit.loop(c.channels, SERIAL, "c") as channel,
                emit.loop(phase.taps[0], SERIAL, "r") as r,
                emit.loop(phase.taps[1], SERIAL, "s") as s,
                self.body.point(),
            ):
                self._add_tap(packed, strip, tile, accs, (strip.group * c.channels + channel, r, s))
        for (o, i), acc in accs.items():
            line = (o * strip.rows + (tile.h + i) * c.step[0] + phase.first[0]) * strip.pitch
            line = line + tile.w * c.step[1] + phase.first[1]
            for v in range(tile.vectors):
                if c.step[1] == 1:
                    with emit.loop(lanes, VECTOR, "l") as lane:
                        emit.store(strip.sums, tirx.BufferLoad(acc, [lane + v * lanes]), line + (lane + v * lanes))
                else:
                    for lane in range(lanes):
                        value = tirx.BufferLoad(acc, [lane + v * lanes])
                        emit.store(strip.sums, value, line + (lane + v * lanes) * c.step[1])

    def _add_tap(
        self,
        packed: Buffer,
        strip: _LineStrip,
        tile: _LineTile,
        accs: dict[tuple[int, int], Buffer],
        tap: tuple[Expr, Expr, Expr],
    ) -> None:
        """Add one tap of one channel to the accumulators of a tile."""
        c, emit, lanes, phase = self.c, self.emit, self.lanes, tile.phase
        channel, r, s = tap
        at = tile.start + ((channel * phase.taps[0] + r) * phase.taps[1] + s) * c.filters
        column = s * c.dilations[1] + phase.shift[1]
        remainder = tirx.floormod(column, c.strides[1]) if c.strides[1] > 1 else 0
        left = tile.w + (tirx.floordiv(column, c.strides[1]) if c.strides[1] > 1 else column)
        factors = [emit.bind(tirx.BufferLoad(packed, [at + o]), "a") for o in range(c.filters)]
        for i in range(tile.height):
            top = (strip.unit + tile.h + i) * c.strides[0] + phase.shift[0] + r * c.dilations[0]
            line = emit.bind(self.source.position(strip.image, channel, top, left, remainder), "line")
            for v in range(tile.vectors):
                with emit.loop(lanes, VECTOR, "l") as lane, self.body.point():
                    x = emit.bind(self.source.load(line + (lane + v * lanes)), "x")
                    k = lane + v * lanes
                    for o in range(c.filters):
                        acc = accs[o, i]
                        emit.store(acc, tirx.BufferLoad(acc, [k]) + x * factors[o], k)
