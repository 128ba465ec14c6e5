"""Convolutions and gradients for their inputs on tile registers (Intel AMX): of bf16, and of f32 as sums of products of
their parts.

In: a Correlation of bf16 or f32. Out: loops

    pack the weights                              (tile_filters.py; ahead of the kernel where they do not change)
    for some images, or some rows of one:         a band, which stays in the second cache
      pack them                                   (tile_bands.py)
      for 32 filters, some rows, 32 positions:    (or 16 filters and 64 positions, if there are no more)
        4 tiles of sums += for each step of 32 channels, for each tap, for each pair of parts:
                           2 tiles of weights times 2 of the source
        store the sums; with the last positions, close the gaps between rows, and `Body.finish`
        for each vector of neighbouring positions

Positions of the result are the columns of tiles, so results come out in the order of memory. All phases of some rows
leave their sums side by side, and are interleaved where the gaps are closed.

A block of f32 weights, or a band, may have a number that is too large for parts, such as an infinity or a nan. Its sums
are then computed one by one, slowly, in f32.

Limits: those of tiles/registers.py for denormals.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.group import PACKED
from penstock.backends.tvm.kernels.tiles.packing import can_pack
from penstock.backends.tvm.kernels.tiles.product import same_places
from penstock.backends.tvm.kernels.tiles.registers import LEFT_PLACES, LINE, ORDER, SIDE, STEP, WORDS, Registers
from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import Correlation, Phase, cover
from penstock.backends.tvm.kernels.tools.elements import linear
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, i32, literal
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.types import ITEM_BYTES

from .tile_bands import Area, Bands, SourcePacking
from .tile_filters import FilterPacking, Filters

_A_TILES, _B_TILES = 4, 6
# In f32: multiply-adds per cycle of tiles and of vectors, and cycles to pack a number of the source, and one of
# weights. The last depends on whether filters come first in them.
_TILES_RATE, _VECTORS_RATE, _PACKING = 45.0, 22.0, 0.6
_PACKING_WEIGHTS = {True: 4.0, False: 14.0}


def suits(body: Body, c: Correlation) -> bool:
    """Return whether the machine has tiles, and they are faster for this correlation."""
    if not can_pack(body, c.out) or body.loops is not None or c.filters < SIDE or not prod(c.phases[0].taps):
        return False
    bands = Bands(c)
    images = c.images * c.groups
    steps_taps = bands.steps * sum(len(taps) for taps in bands.taps)
    tiles = (
        ceil_div(c.filters, SIDE)
        * ceil_div(bands.positions(1, bands.counts[0]), SIDE)
        * WORDS
        * steps_taps
        * STEP
        * images
    )
    true = c.filters * sum(prod(p.counts) * prod(p.taps) for p in c.phases) * c.channels * images
    source = len(bands.pieces) * bands.image_rows * bands.pitch * bands.steps * STEP * images
    weights = (
        0 if c.op.attrs.get(PACKED) else c.groups * c.filters * steps_taps * STEP * _PACKING_WEIGHTS[c.filters_first]
    )
    share = 1 if bands.parts > 1 else 1 / 4
    return tiles * share / _TILES_RATE + _PACKING * source + weights < true / _VECTORS_RATE


def emit_tile_conv(body: Body, c: Correlation) -> None:
    _TileConv(body, c).run()


@dataclass(frozen=True)
class _PackedBand:
    """A band of the source, packed for one group."""

    words: Buffer
    area: Area
    group: Expr
    # The number of its steps that are too large for tiles; None where that cannot be.
    too_large: Expr | None


@dataclass(frozen=True)
class _RowStrip:
    """Output rows row .. row + rows of some images, summed at once: rows `unit` .. of each phase."""

    image: Expr
    images: int
    row: Expr
    rows: int
    unit: Expr
    units: int
    # Positions, counted through; and where the first one is in a plane of the band.
    positions: int
    at: Expr


class _TileConv:
    """The emitter of a correlation on tile registers."""

    def __init__(self, body: Body, c: Correlation) -> None:
        self.body, self.c, self.emit = body, c, body.emit
        self.bands = Bands(c)
        self.source = SourcePacking(body, self.bands)
        # Where a band has no more than four tiles of positions, all are summed at once. So weights are read once, as
        # fast as memory allows.
        alone = self.bands.images == 1 and self.bands.rows == self.bands.counts[0] == self.bands.strip
        tiles = ceil_div(self.bands.positions(1, self.bands.strip), SIDE)
        self.across = 4 if alone and 2 < tiles <= 4 else 2
        self.filters = FilterPacking(body, self.bands, 4 // self.across)
        self.registers = Registers(body.emit)
        self.order = ORDER[self.bands.parts]
        self.columns = c.spatial[1]
        most = (
            ceil_div(self.bands.positions(self.bands.strip_images, self.bands.strip), self.across * SIDE)
            * self.across
            * SIDE
        )
        # An odd number of cache lines from row to row.
        self.line = most + SIDE
        self.offsets: list[Buffer | None] = []
        self.near = same_places(body, c.out)

    def run(self) -> None:
        c, emit, bands = self.c, self.emit, self.bands
        kind = parallel_if(self.body.machine, c.out.type.size * c.channels * sum(prod(p.taps) for p in c.phases) // 64)
        packed = self.body.packed_ahead(c.op, self.filters.size, "i32", lambda target: self.filters.fill(target, kind))
        if packed is None:
            packed = emit.alloc(self.filters.size, "i32", "ap")
            self.filters.fill(packed, kind)
        self._fill_offsets()
        # Threads share the outermost loop that has enough turns.
        images = ceil_div(c.images, bands.images)
        step_rows = bands.rows * c.step[0]
        lead, rows, blocks = SERIAL, SERIAL, kind
        if images * c.groups > 1:
            lead, rows, blocks = kind, SERIAL, SERIAL
        elif ceil_div(c.spatial[0], step_rows) > 2:
            lead, rows, blocks = SERIAL, kind, SERIAL
        whole, tail = divmod(c.images, bands.images)
        for first, count, size in ((0, whole, bands.images), (whole * bands.images, min(tail, 1), tail)):
            if not count:
                continue
            with emit.loop(count * c.groups, lead, "n") as n, self.body.point():
                image = emit.bind(tirx.floordiv(n, c.groups) * size + first, "n") if c.groups > 1 else n * size + first
                group = emit.bind(tirx.floormod(n, c.groups), "g") if c.groups > 1 else i32(0)
                self._rows(packed, image, size, group, step_rows, rows, blocks)

    def _rows(
        self, packed: Buffer, image: Expr, images: int, group: Expr, step_rows: int, kind: object, blocks: object
    ) -> None:
        """Emit all bands of some images."""
        c, emit = self.c, self.emit
        whole, tail = divmod(c.spatial[0], step_rows)
        if whole:
            with emit.loop(whole, kind, "bd") as b, self.body.point():
                self._band(
                    packed, image, images, group, b * self.bands.rows if whole > 1 else i32(0), step_rows, blocks
                )
        if tail:
            with emit.loop(1), self.body.point():
                self._band(packed, image, images, group, i32(whole * self.bands.rows), tail, blocks)

    def _fill_offsets(self) -> None:
        """Fill a table for each phase of where each tap begins in the packed band."""
        emit, bands = self.emit, self.bands
        for taps in bands.taps:
            table = None
            if len(taps) > 1:
                table = emit.alloc(len(taps), "i32", "offsets")
                for t, (piece, away) in enumerate(taps):
                    emit.store(table, i32(piece * bands.steps * bands.step_words + away), i32(t))
            self.offsets.append(table)

    # ------------------------------------------------------------------------------ bands, blocks, strips

    def _band(self, packed: Buffer, image: Expr, images: int, group: Expr, unit: Expr, rows: int, kind: object) -> None:
        """Emit a band: output rows from row unit * step on."""
        c, emit, bands, filters = self.c, self.emit, self.bands, self.filters
        words = emit.alloc(bands.size, "i32", "bp")
        area = Area(image, images, unit, ceil_div(rows, c.step[0]))
        band = _PackedBand(words, area, group, self.source.pack(words, area, group, kind))
        for first, count, size in (
            (0, filters.blocks, filters.height),
            (filters.blocks, min(filters.last_block, 1), filters.last_block),
        ):
            if not count:
                continue
            with emit.loop(count, kind, "jo") as jo, self.body.point():
                block = filters.block(group, jo + first, size)
                large = None
                if band.too_large is not None:
                    large = emit.bind(band.too_large + tirx.BufferLoad(packed, [block.flag]), "large")
                sums = emit.alloc(len(c.phases) * self.filters.height * self.line + SIDE, "f32", "sums")
                with self.registers.configured():
                    self._strips(packed, band, block, large, sums, rows)

    def _strips(
        self, packed: Buffer, band: _PackedBand, block: Filters, large: Expr | None, sums: Buffer, rows: int
    ) -> None:
        c, emit, bands = self.c, self.emit, self.bands
        for image, images in cover(emit, band.area.images, bands.strip_images, "i"):
            for row, count in cover(emit, rows, bands.strip * c.step[0], "st"):
                with self.body.point():
                    down = tirx.floordiv(row, c.step[0])
                    units = ceil_div(count, c.step[0])
                    strip = _RowStrip(
                        image=band.area.image + image,
                        images=images,
                        row=band.area.row * c.step[0] + row,
                        rows=count,
                        unit=band.area.row + down,
                        units=units,
                        positions=bands.positions(images, units),
                        at=emit.bind(bands.strip_at(image, down), "at"),
                    )
                    for number, phase in enumerate(c.phases):
                        if large is None:
                            self._tiles(packed, band, block, number, strip, sums)
                            continue
                        with emit.when(tirx.EQ(large, 0)):
                            self._tiles(packed, band, block, number, strip, sums)
                        with emit.when(tirx.NE(large, 0)), self.body.point():
                            self._one_by_one(band, block, number, phase, strip, sums)
                    self._finish(band, block, strip, sums)

    # ------------------------------------------------------------------------------ sums

    def _sums_at(self, phase: int) -> int:
        return phase * self.filters.height * self.line

    def _tiles(
        self, packed: Buffer, band: _PackedBand, block: Filters, phase: int, strip: _RowStrip, sums: Buffer
    ) -> None:
        whole, tail = divmod(ceil_div(strip.positions, SIDE), self.across)
        with self.emit.loop(whole, SERIAL, "p") as p, self.body.point():
            if whole:
                self._tile(packed, band, block, phase, strip, sums, p, self.across)
        if tail:
            with self.body.point():
                self._tile(packed, band, block, phase, strip, sums, i32(whole), tail)

    def _tile(
        self,
        packed: Buffer,
        band: _PackedBand,
        block: Filters,
        phase: int,
        strip: _RowStrip,
        sums: Buffer,
        p: Expr,
        across: int,
    ) -> None:
        emit, bands, registers, words = self.emit, self.bands, self.registers, self.filters.words
        down, parts = block.tiles, bands.parts
        cells = [(r, c) for r in range(down) for c in range(across)]
        for r, c in cells:
            registers.zero(r * self.across + c)
        count = len(bands.taps[phase])
        table = self.offsets[phase]
        first_a = emit.bind(self.filters.phase_at(block, phase), "a")
        first_b = emit.bind(strip.at + p * (self.across // 2 * bands.stride), "b")
        with (
            emit.loop(bands.steps if count else 0, SERIAL, "s") as s,
            emit.loop(count, SERIAL, "t") as t,
            self.body.point(),
        ):
            if count:
                piece, away = bands.taps[phase][0]
                offset = (
                    tirx.BufferLoad(table, [t])
                    if table is not None
                    else i32(piece * bands.steps * bands.step_words + away)
                )
                at_a = emit.bind(first_a + (s * count + t) * (down * words), "a")
                at_b = emit.bind(first_b + s * bands.step_words + offset, "b")
                self._prefetch(band, block, strip, p, across, s * count + t, bands.steps * count)
                held: dict[int, tuple[int, int]] = {}
                for r, c, pa, pb in self._turns(down, across):
                    # One tile of filters has two registers, two have one each.
                    a, b = _A_TILES + (r if self.across == 2 else pa % 2), _B_TILES + c % 2
                    if held.get(b) != (c, pb):
                        place = pb * SIDE * bands.plane + c // 2 * bands.stride + c % 2 * SIDE
                        registers.load(b, band.words, at_b + place, 4 * bands.plane)
                    if held.get(a) != (r, pa):
                        registers.load(a, packed, at_a + (LEFT_PLACES[parts][pa] * down + r) * WORDS)
                    held |= {a: (r, pa), b: (c, pb)}
                    registers.multiply(r * self.across + c, a, b)
        for r, c in cells:
            registers.store(
                r * self.across + c,
                sums,
                p * (self.across * SIDE) + (self._sums_at(phase) + r * SIDE * self.line + c * SIDE),
                4 * self.line,
            )

    def _turns(self, down: int, across: int) -> list[tuple[int, int, int, int]]:
        """List row and column of sums, and the parts that are multiplied, in an order in which neighbours share
        tiles."""
        turns = []
        for left in range(0, across, 2):
            for pa, pb in self.order if left == 0 else reversed(self.order):
                turns += [(r, c, pa, pb) for r in range(down) for c in range(left, min(left + 2, across))]
        return turns

    def _prefetch(
        self, band: _PackedBand, block: Filters, strip: _RowStrip, p: Expr, across: int, turn: Expr, turns: int
    ) -> None:
        """Prefetch, during the sums, the memory that their epilogue reads and writes."""
        c, emit, bands = self.c, self.emit, self.bands
        if bands.pitch != self.columns or c.step != (1, 1):
            return
        each = ceil_div(block.count, turns)
        channel = band.group * c.filters + block.first
        for u in range(each):
            row = tirx.min(turn * each + u, block.count - 1)
            place = linear(c.place(strip.image, channel + row, strip.row, literal(0, "i32")), c.out.type.dims) + p * (
                self.across * SIDE
            )
            for buffer, dtype in self.near:
                for column in range(0, across * SIDE * ITEM_BYTES[dtype], LINE):
                    emit.prefetch(buffer, place + column // ITEM_BYTES[dtype])

    def _one_by_one(
        self, band: _PackedBand, block: Filters, number: int, phase: Phase, strip: _RowStrip, sums: Buffer
    ) -> None:
        """Compute the sums without tiles, one multiply-add after the other."""
        emit, c, bands = self.emit, self.c, self.bands
        with (
            emit.loop(block.count, SERIAL, "r") as r,
            emit.loop(strip.images, SERIAL, "i") as i,
            emit.loop(strip.units, SERIAL, "h") as h,
            emit.loop(phase.counts[1], SERIAL, "w") as w,
            self.body.point(),
        ):
            at = emit.bind((i * bands.image_rows + h) * bands.pitch + w + (self._sums_at(number) + r * self.line), "at")
            emit.store(sums, literal(0, "f32"), at)
            if not prod(phase.taps):
                return
            with (
                emit.loop(c.channels, SERIAL, "c") as channel,
                emit.loop(phase.taps[0], SERIAL, "y") as y,
                emit.loop(phase.taps[1], SERIAL, "x") as x,
                self.body.point(),
            ):
                row = emit.bind((strip.unit + h) * c.strides[0] + y * c.dilations[0] + (phase.shift[0] - c.low[0]), "h")
                column = emit.bind(w * c.strides[1] + x * c.dilations[1] + (phase.shift[1] - c.low[1]), "w")
                weight = c.weight(band.group, block.first + r, channel, *phase.tap(y, x))
                inside = tirx.all(row >= 0, row < c.sizes[0], column >= 0, column < c.sizes[1])
                with emit.when(inside), self.body.point():
                    value = c.source(strip.image + i, band.group * c.channels + channel, row, column)
                    emit.store(sums, tirx.BufferLoad(sums, [at]) + value * weight, at)
                if c.counts_border:
                    with emit.when(tirx.Not(inside)):
                        emit.store(sums, tirx.BufferLoad(sums, [at]) + weight * literal(0, "f32"), at)

    # ------------------------------------------------------------------------------ results

    def _finish(self, band: _PackedBand, block: Filters, strip: _RowStrip, sums: Buffer) -> None:
        c, emit, bands = self.c, self.emit, self.bands
        positions = strip.rows * self.columns
        dense = None
        if bands.pitch != self.columns or c.step != (1, 1):
            dense = emit.alloc(positions + 2 * SIDE * c.step[1], "f32", "dense")
        with emit.loop(block.count, SERIAL, "r") as r, emit.loop(strip.images, SERIAL, "i") as i, self.body.point():
            channel = emit.bind(band.group * c.filters + block.first + r, "o")
            line = emit.bind(r * self.line + i * (bands.image_rows * bands.pitch), "line")
            if dense is not None:
                self._close_gaps(strip, sums, line, dense)
            for p, _ in pieces(emit, positions, SIDE):
                with self.body.point():
                    index = c.place(
                        strip.image + i,
                        channel,
                        strip.row + tirx.floordiv(p, self.columns),
                        tirx.floormod(p, self.columns),
                    )
                    value = tirx.BufferLoad(sums, [line + p]) if dense is None else tirx.BufferLoad(dense, [p])
                    self.body.finish({c.out: (value, index)})

    def _close_gaps(self, strip: _RowStrip, sums: Buffer, line: Expr, dense: Buffer) -> None:
        """Store rows of the result without gaps. The next row overwrites the excess of a row's last vector."""
        c, emit = self.c, self.emit
        whole, tail = divmod(strip.rows, c.step[0])
        if whole:
            with emit.loop(whole, SERIAL, "h") as h, self.body.point():
                for a in range(c.step[0]):
                    self._row(sums, line, dense, h, a)
        for a in range(tail):
            self._row(sums, line, dense, i32(whole), a)

    def _row(self, sums: Buffer, line: Expr, dense: Buffer, h: Expr, a: int) -> None:
        c, emit, bands = self.c, self.emit, self.bands
        starts = [
            emit.bind(line + h * bands.pitch + self._sums_at(number), "from")
            for number, p in enumerate(c.phases)
            if p.first[0] == a
        ]
        target = emit.bind((h * c.step[0] + a) * self.columns, "to")
        lanes = SIDE
        while lanes > 4 and lanes // 2 * c.step[1] >= self.columns:
            lanes //= 2
        with emit.loop(ceil_div(ceil_div(self.columns, c.step[1]), lanes), SERIAL, "v") as v:
            if len(starts) == 1:
                with emit.loop(lanes, VECTOR, "l") as lane:
                    emit.store(dense, tirx.BufferLoad(sums, [starts[0] + v * lanes + lane]), target + v * lanes + lane)
            elif len(starts) == 2:
                vectors = [tirx.BufferLoad(sums, [tirx.Ramp(start + v * lanes, 1, lanes)]) for start in starts]
                for half in range(2):
                    order = [tirx.IntImm("int32", (half * lanes + k) // 2 + lanes * (k % 2)) for k in range(lanes)]
                    place = tirx.Ramp(target + (v * (2 * lanes) + half * lanes), 1, lanes)
                    emit.add(tirx.BufferStore(dense, tirx.Shuffle(vectors, order), [place]))
            else:
                for k in range(lanes):
                    for b, start in enumerate(starts):
                        place = target + (v * lanes + k) * c.step[1] + b
                        emit.store(dense, tirx.BufferLoad(sums, [start + v * lanes + k]), place)
