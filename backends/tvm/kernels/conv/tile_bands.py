"""Sources of correlations in the order of tile registers: how an image is cut into bands, and how a band is packed.

In: a Correlation. Out: words of pairs, for some output rows of one image, or for several whole images,

    [piece][step of 32 channels][part][16 pairs of channels][rows of the band, `pitch` words each]

So one load gives the right tile of a tap, 16 pairs times 16 neighbouring positions, wherever it begins: rows of a tile
are the words of a plane apart. Positions are numbered row after row and image after image: a tile reaches over the ends
of rows, and its sums between rows are dropped. Borders are zeros in memory, and neighbours share them: the zeros behind
a row are those in front of the next one.

With one tap nothing is read twice, and words that are read together lie together. A band then consists of its strips,
the positions summed at once, each

    [32 positions][step of 32 channels][part][16 pairs of channels][32 positions]

A piece holds the rows and columns that have the same remainder modulo the strides, so that neighbouring windows read
neighbouring words. Number q of a step is paired with number q + 16.

Limits: few channels leave most of a step empty; those of tiles/registers.py for f32 in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tiles.registers import PARTS, SIDE, STEP, Magnitudes, noted, pair_ranges, pair_words
from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.correlation import Correlation, Pair, cover
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, i32, literal
from penstock.backends.tvm.kernels.tools.transpose import pieces, separate_pairs
from penstock.ir.types import ITEM_BYTES

# Packed source that stays in a second cache of 2 MiB, beside the weights of 32 filters and the sums.
_BAND_BYTES = 1 << 20
# Positions whose sums are computed before any is finished.
_STRIP = 512


@dataclass(frozen=True)
class BandPiece:
    """Rows and columns of the source with its border that have these remainders; the columns first ..
    first + count of it are in the source."""

    remainder: Pair
    first: int
    count: int


@dataclass(frozen=True)
class Area:
    """The part of the output that is computed at once: rows row .. row + rows of images image .. image + images. Of
    several images, all rows."""

    image: Expr
    images: int
    row: Expr
    rows: int


class Bands:
    """The layout of a correlation's packed words."""

    def __init__(self, c: Correlation) -> None:
        self.c = c
        self.parts = PARTS[c.out.type.dtype]
        self.steps = ceil_div(c.channels, STEP)
        self.counts = max(p.counts[0] for p in c.phases), max(p.counts[1] for p in c.phases)
        # For every phase, for every tap: remainders, and rows and columns further on in the piece.
        taps = [[self._read(p.shift, r, s) for r in range(p.taps[0]) for s in range(p.taps[1])] for p in c.phases]
        remainders = sorted({remainder for phase in taps for remainder, _ in phase}) or [(0, 0)]
        self.pieces = [self._piece(remainder) for remainder in remainders]
        away = [shift for phase in taps for _, shift in phase] or [(0, 0)]
        self.reach = max(h for h, _ in away), max(w for _, w in away)
        self.before = min(p.first for p in self.pieces)
        end = max(p.first + p.count for p in self.pieces)
        self.pitch = max(self.counts[1] + self.reach[1] - self.before, end, self.counts[1])
        rows = [self._rows(remainder[0]) for remainder in remainders]
        above = min(first for first, _ in rows)
        self.image_rows = max(self.counts[0] + self.reach[0] - above, max(last for _, last in rows), self.counts[0])
        # Every position is read once, and none is in the border.
        self.gathered = (
            max(map(len, taps)) <= 1 and self.before == 0 and end == self.counts[1] and rows == [(0, self.counts[0])]
        )
        self.taps = [
            [(remainders.index(remainder), h * self.pitch + w) for remainder, (h, w) in phase] for phase in taps
        ]
        self._cut()
        tall = (self.images - 1) * self.image_rows + self.rows + self.reach[0]
        lines = ceil_div(tall * self.pitch + self.before, SIDE)
        # An odd number of cache lines: sixteen rows of a tile are in sixteen sets.
        self.plane = 2 * SIDE if self.gathered else (lines | 1) * SIDE

    @property
    def flat(self) -> bool:
        """Return whether packed rows follow each other as those of the source do."""
        c = self.c
        return (
            self.reach == (0, 0)
            and c.strides == (1, 1)
            and self.pitch == self.counts[1] == c.sizes[1]
            and not any(c.low)
        )

    @property
    def step_words(self) -> int:
        return self.parts * SIDE * self.plane

    @property
    def stride(self) -> int:
        """Words from 32 positions to the next 32."""
        return self.steps * self.step_words if self.gathered else 2 * SIDE

    @property
    def _strip_words(self) -> int:
        return ceil_div(self.positions(1, self.strip), 2 * SIDE) * self.stride

    def strip_at(self, image: Expr, row: Expr) -> Expr:
        """Return the first position of a strip, given its image and row in the band."""
        if not self.gathered:
            return (image * self.image_rows + row) * self.pitch
        return (image * (self.rows // self.strip) + tirx.floordiv(row, self.strip)) * self._strip_words

    @property
    def size(self) -> int:
        if self.gathered:
            return self.images * (self.rows // self.strip) * self._strip_words
        # Tiles behind the last position read further than what is packed.
        return len(self.pieces) * self.steps * self.step_words + self.plane + 2 * SIDE

    def positions(self, images: int, rows: int) -> int:
        """Count the positions of an area from the first to the last, those between rows and images included."""
        return ((images - 1) * self.image_rows + rows - 1) * self.pitch + self.counts[1]

    def _read(self, shift: Pair, r: int, s: int) -> tuple[Pair, Pair]:
        c = self.c
        h, w = shift[0] + r * c.dilations[0], shift[1] + s * c.dilations[1]
        return (h % c.strides[0], w % c.strides[1]), (h // c.strides[0], w // c.strides[1])

    def _piece(self, remainder: Pair) -> BandPiece:
        c = self.c
        first = max(ceil_div(c.low[1] - remainder[1], c.strides[1]), 0)
        widest = max(
            (
                p.counts[1] + (p.shift[1] + (p.taps[1] - 1) * c.dilations[1]) // c.strides[1]
                for p in c.phases
                if prod(p.taps)
            ),
            default=0,
        )
        last = min((c.sizes[1] - 1 + c.low[1] - remainder[1]) // c.strides[1], widest - 1)
        return BandPiece(remainder, first, max(last + 1 - first, 0))

    def _rows(self, remainder: int) -> Pair:
        """Return the first row of a piece that holds any of the source, and the row after the last."""
        c = self.c
        first = max(ceil_div(c.low[0] - remainder, c.strides[0]), 0)
        last = min((c.sizes[0] - 1 + c.low[0] - remainder) // c.strides[0], self.counts[0] + self.reach[0] - 1)
        return first, max(last + 1, 0)

    def _cut(self) -> None:
        """Choose the rows and images of a strip, whose sums are computed at once, and of a band, which is packed at
        once. Rows are those of a phase."""
        c = self.c
        most = max(_STRIP // len(c.phases), 2 * SIDE)
        row_bytes = 4 * self.pitch * len(self.pieces) * self.steps * self.parts * SIDE
        best = (2.0, 0)
        self.strip = 1
        for rows in range(1, self.counts[0] + 1):
            positions = self.positions(1, rows)
            if rows > 1 and positions > most:
                break
            whole, tail = divmod(self.counts[0], rows)
            tiles = whole * ceil_div(positions, SIDE) + (ceil_div(self.positions(1, tail), SIDE) if tail else 0)
            score = (round(tiles * SIDE / prod(self.counts), 2), -rows)
            if score < best:
                best, self.strip = score, rows
        self.strip_images = self.images = 1
        if self.strip == self.counts[0]:
            image_bytes = self.image_rows * row_bytes
            most_images = max(min(_BAND_BYTES // image_bytes, c.images), 1)
            self.images = ceil_div(c.images, ceil_div(c.images, most_images))
            fitting = [
                n for n in range(1, self.images + 1) if self.images % n == 0 and self.positions(n, self.strip) <= most
            ]
            if fitting and not self.gathered:
                self.strip_images = min(
                    fitting, key=lambda n: (round(ceil_div(self.positions(n, self.strip), SIDE) / n, 1), -n)
                )
            self.rows = self.strip
            return
        most_strips = max((_BAND_BYTES // row_bytes - self.reach[0]) // self.strip, 1)
        strips = ceil_div(self.counts[0], self.strip)
        self.rows = ceil_div(strips, ceil_div(strips, most_strips)) * self.strip


@dataclass(frozen=True)
class _ChannelPair:
    """A pair of channels of a group while it is packed: of a step's last ones, one or both may be missing."""

    target: Buffer
    piece: BandPiece
    group: Expr
    channels: list[Expr]
    large: Magnitudes | None

    def channel(self, c: Correlation, k: Expr) -> Expr:
        return self.group * c.channels + k

    def noted(self, value: Expr) -> Expr:
        """Return a value of the pair after taking note of its magnitude."""
        return noted(value, self.large)


class SourcePacking:
    """The emitter of the packing of bands."""

    def __init__(self, body: Body, bands: Bands) -> None:
        self.body, self.emit, self.bands, self.c = body, body.emit, bands, bands.c

    def pack(self, target: Buffer, area: Area, group: Expr, kind: object) -> Expr | None:
        """Pack a band. Return how many steps have a number that is too large for tiles; None where that cannot be."""
        emit, bands = self.emit, self.bands
        flags = emit.alloc(bands.steps, "i32", "flags") if bands.parts > 1 else None
        whole, tail = divmod(bands.c.channels, STEP)
        with emit.loop(whole, kind, "s") as s, self.body.point():
            if whole:
                self._step(target, flags, area, group, s, STEP)
        if tail:
            with self.body.point():
                self._step(target, flags, area, group, i32(whole), tail)
        if flags is None:
            return None
        total = emit.alloc(1, "i32", "large")
        emit.store(total, i32(0), i32(0))
        with emit.loop(bands.steps, SERIAL, "s") as s:
            emit.store(total, tirx.BufferLoad(total, [i32(0)]) + tirx.BufferLoad(flags, [s]), i32(0))
        return emit.bind(tirx.BufferLoad(total, [i32(0)]), "large")

    def _step(self, target: Buffer, flags: Buffer | None, area: Area, group: Expr, s: Expr, count: int) -> None:
        emit, bands = self.emit, self.bands
        large = Magnitudes(emit) if flags is not None else None
        for number, piece in enumerate(bands.pieces):
            base = emit.bind((number * bands.steps + s) * bands.step_words, "at")
            for first, last, exist in pair_ranges(count):
                if last <= first:
                    continue
                with emit.loop(last - first, SERIAL, "q") as q, self.body.point():
                    place = q + first
                    channels = [s * STEP + place + SIDE * other for other in range(exist)]
                    pair = _ChannelPair(target, piece, group, channels, large)
                    if bands.gathered:
                        self._gather(pair, area, emit.bind(s * bands.step_words + place * bands.plane, "at"))
                    else:
                        self._plane(pair, area, emit.bind(base + place * bands.plane, "at"))
        if flags is not None and large is not None:
            emit.store(flags, large.too_large(), s)

    # ------------------------------------------------------------------------------ one tap

    def _gather(self, pair: _ChannelPair, area: Area, at: Expr) -> None:
        """Pack the words of one pair of channels, strip by strip."""
        emit, bands = self.emit, self.bands
        with emit.loop(area.images, SERIAL, "n") as n:
            for row, rows in cover(emit, area.rows, bands.strip, "st"):
                with self.body.point():
                    start = emit.bind(at + bands.strip_at(n, row), "at")
                    self._gather_strip(pair, start, area.image + n, area.row + row, rows)

    def _gather_strip(self, pair: _ChannelPair, start: Expr, image: Expr, row: Expr, rows: int) -> None:
        emit, bands, c, piece = self.emit, self.bands, self.c, pair.piece
        width = bands.counts[1]
        scratch, size = None, rows * width + 2 * SIDE
        if pair.channels and not bands.flat:
            scratch = emit.alloc(2 * size, "f32", "rows")
            for other, k in enumerate(pair.channels):
                with emit.loop(rows, SERIAL, "h") as h, self.body.point():
                    above = emit.bind((row + h) * c.strides[0] + (piece.remainder[0] - c.low[0]), "h")
                    self._spread(scratch, h * width + other * size, piece, image, pair.channel(c, k), above)

        def words(i: Expr, place: Expr) -> None:
            with self.body.point():
                values = []
                for other, k in enumerate(pair.channels):
                    if scratch is None:
                        h, w = row + tirx.floordiv(i, width), tirx.floormod(i, width)
                        values.append(pair.noted(c.source(image, pair.channel(c, k), h, w)))
                    else:
                        values.append(pair.noted(tirx.BufferLoad(scratch, [i + other * size])))
                self._store(pair.target, start + place, values)

        whole, tail = divmod(rows * width, 2 * SIDE)
        with emit.loop(whole, SERIAL, "u") as u:
            for half in (0, SIDE) if whole else ():
                with emit.loop(SIDE, VECTOR, "l") as lane:
                    words(u * (2 * SIDE) + half + lane, u * bands.stride + half + lane)
        for i, _ in pieces(emit, tail, SIDE):
            words(i + whole * 2 * SIDE, i + whole * bands.stride)

    # ------------------------------------------------------------------------------ planes

    def _plane(self, pair: _ChannelPair, area: Area, at: Expr) -> None:
        """Pack the words of one pair of channels, in which one or both channels may be missing."""
        emit, bands = self.emit, self.bands
        tall = (area.images - 1) * bands.image_rows + area.rows + bands.reach[0]
        if not pair.channels:
            for part in range(bands.parts):
                self._zeros(pair.target, at + part * SIDE * bands.plane, tall * bands.pitch + bands.before)
            return
        shared = area.rows + bands.reach[0] if area.images == 1 else bands.image_rows
        with emit.loop(area.images, SERIAL, "n") as n, emit.loop(shared, SERIAL, "h") as h, self.body.point():
            line = emit.bind(at + (n * bands.image_rows + h) * bands.pitch, "line")
            self._row(pair, line, area.image + n, area.row + h)
        behind = (tall - (area.images - 1) * bands.image_rows - shared) * bands.pitch + bands.before
        first = tall * bands.pitch + bands.before - behind
        for part in range(bands.parts):
            self._zeros(pair.target, at + (first + part * SIDE * bands.plane), behind)

    def _zeros(self, target: Buffer, at: Expr, count: int) -> None:
        for i, _ in pieces(self.emit, count, SIDE):
            self.emit.store(target, i32(0), at + i)

    def _store(self, target: Buffer, at: Expr, pair: list[Expr]) -> None:
        for part, word in enumerate(pair_words(self.emit, pair, self.bands.parts)):
            self.emit.store(target, word, at + part * SIDE * self.bands.plane if part else at)

    def _row(self, pair: _ChannelPair, line: Expr, image: Expr, row: Expr) -> None:
        """Pack one row of a piece, with its border."""
        emit, bands, c, piece = self.emit, self.bands, self.c, pair.piece
        h = emit.bind(row * c.strides[0] + (piece.remainder[0] - c.low[0]), "h")
        if piece.count and c.strides[1] == 1:
            offset = piece.remainder[1] - c.low[1]
            with emit.when(self._inside(h)):
                self._values(pair, line, lambda k, i: c.source(image, pair.channel(c, k), h, i + offset))
            with emit.when(tirx.Not(self._inside(h))):
                for part in range(bands.parts):
                    self._zeros(pair.target, line + (part * SIDE * bands.plane + piece.first), piece.count)
        elif piece.count:
            padded = self._padded(piece)
            scratch = emit.alloc(2 * padded, "f32", "row")
            for other, k in enumerate(pair.channels):
                with emit.when(self._inside(h)):
                    self._spread(scratch, other * padded, piece, image, pair.channel(c, k), h)
                with emit.when(tirx.Not(self._inside(h))):
                    for i, _ in pieces(emit, padded, SIDE):
                        emit.store(scratch, literal(0, "f32"), i + other * padded)
            with self.body.point():
                starts = {id(k): other * padded for other, k in enumerate(pair.channels)}
                self._values(pair, line, lambda k, i: tirx.BufferLoad(scratch, [i - piece.first + starts[id(k)]]))
        for first, last in ((0, piece.first), (piece.first + piece.count, bands.pitch)):
            for part in range(bands.parts):
                self._zeros(pair.target, line + (part * SIDE * bands.plane + first), last - first)

    def _inside(self, h: Expr) -> Expr:
        return tirx.all(h >= 0, h < self.c.sizes[0])

    @staticmethod
    def _padded(piece: BandPiece) -> int:
        return ceil_div(piece.count, SIDE) * SIDE

    def _values(self, pair: _ChannelPair, line: Expr, value: Callable[[Expr, Expr], Expr]) -> None:
        for i, _ in pieces(self.emit, pair.piece.count, SIDE):
            with self.body.point():
                column = i + pair.piece.first if pair.piece.first else i
                self._store(pair.target, line + column, [pair.noted(value(k, column)) for k in pair.channels])

    def _spread(self, scratch: Buffer, at: Expr | int, piece: BandPiece, image: Expr, channel: Expr, h: Expr) -> None:
        """Copy the columns of a piece, which lie apart in the source, next to each other."""
        emit, c = self.emit, self.c
        begin, apart = piece.first * c.strides[1] + piece.remainder[1] - c.low[1], c.strides[1]
        done = 0
        if apart == 2 and c.plain is not None and ITEM_BYTES[c.out.type.dtype] == 4:
            # The last vector of a pair would read behind the end of the row.
            done = min(piece.count, (c.sizes[1] - begin) // 2) // SIDE * SIDE
            line = emit.bind(
                ((image * (c.groups * c.channels) + channel) * c.sizes[0] + h) * c.sizes[1] + begin, "line"
            )
            unused = emit.alloc(SIDE, "f32", "rest")
            with emit.loop(done // SIDE, SERIAL, "v") as v:
                if done:
                    separate_pairs(emit, SIDE, (c.plain, line + v * STEP), [(scratch, v * SIDE + at), (unused, i32(0))])
        for i, _ in pieces(emit, piece.count - done, SIDE):
            with self.body.point():
                emit.store(scratch, c.source(image, channel, h, (i + done) * apart + begin), i + (done + at))
