"""Convolutions of 3x3 taps with 4/9 of the multiplications, by Winograd's minimal filtering F(2x2, 3x3). It was found
by S. Winograd in 1980, and used so by A. Lavin and S. Gray ("Fast Algorithms for Convolutional Neural Networks", 2015).

In: a Correlation of 3x3 taps side by side, stride 1, one group. A square of 2x2 outputs needs 4x4 elements of the
source. Both the square and the taps have 16 points each, sums and differences of their elements; the points of the
output are the products of these, summed over channels. Out: loops

    points of the weights        [panel][point][channel][channels out in lanes]
    for image, band of rows:
      points of the source       [point][channel][square]
      for panel, strip of the band:
        products                 [point][square][channels out in lanes], 16 products of matrices
        sums of the points       [position][channels out in lanes], then `Panels.finish`

Squares over the edge of the output are computed whole. Bands are few enough squares for their points to stay in cache;
small images are taken together in one. Threads share bands if there are many; else they share channels, then panels, of
a band.

Limits: a result is rounded relative to products of its elements with any taps, not only with those that they meet, and
infinities become nan (docs/precision.md). Points of weights take 16/9 of their memory. A band has at least one row of
squares, however long.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import Correlation, cover, most_rows
from penstock.backends.tvm.kernels.tools.emit import PARALLEL, SERIAL, VECTOR, Buffer, Emitter, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.register_tile import RegisterTile
from penstock.backends.tvm.kernels.tools.transpose import pieces, separate_pairs

from .panels import Panels

_POINTS = 16
# Squares of a band: the points of the weights are read once for each, so bands for single threads have a least number,
# too.
_BAND, _LEAST_BAND = 128, 48
# With fewer squares, reading 16 points of each weight takes longer than multiplying by nine taps.
_LEAST_SQUARES = 24
# With fewer channels, sums of points take longer than the multiplications that they save.
_LEAST_CHANNELS = 32
# The share of the squares' outputs that have to lie inside.
_LEAST_USE = 0.7
# Threads share so many parts, or more: several for each of a few threads.
_TASKS = 8


def _of_weights(emit: Emitter, g: list[Expr], dtype: str) -> list[Expr]:
    """Compute the points of three taps in a row: (1 0 0; 1/2 1/2 1/2; 1/2 -1/2 1/2; 0 0 1)."""
    half = literal(0.5, dtype)
    ends, middle = emit.bind((g[0] + g[2]) * half), emit.bind(g[1] * half)
    return [g[0], emit.bind(ends + middle), emit.bind(ends - middle), g[2]]


def _of_source(emit: Emitter, d: list[Expr]) -> list[Expr]:
    """Compute the points of four elements in a row: (1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1)."""
    return [emit.bind(x) for x in (d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3])]


def _outputs(emit: Emitter, m: list[Expr]) -> list[Expr]:
    """Compute two outputs from the products of their points: (1 1 1 0; 0 1 -1 -1)."""
    return [emit.bind(x) for x in (m[0] + m[1] + m[2], m[1] - m[2] - m[3])]


def _squares_of(c: Correlation) -> int:
    return ceil_div(c.spatial[0], 2) * ceil_div(c.spatial[1], 2)


def _together(body: Body, c: Correlation) -> int:
    """Return the number of images in a band: several where an image has few squares, the same number in each band; of
    few filters the weights are few, and threads would not find enough panels."""
    if c.filters < _TASKS * body.machine.vectors * body.lanes:
        return 1
    return max(n for n in range(1, c.images + 1) if c.images % n == 0 and (n == 1 or n * _squares_of(c) <= _BAND))


def suits(body: Body, c: Correlation) -> bool:
    """Return whether this is a convolution of 3x3 taps side by side, and large enough."""
    lanes, squares = body.lanes, _squares_of(c)
    return (
        c.groups == 1
        and c.strides == c.dilations == c.step == (1, 1)
        and [phase.taps for phase in c.phases] == [(3, 3)]
        and lanes > 4
        and c.channels >= _LEAST_CHANNELS
        and c.filters >= 2 * lanes
        and squares * _together(body, c) >= _LEAST_SQUARES
        and c.spatial[0] * c.spatial[1] >= _LEAST_USE * 4 * squares
    )


def emit_winograd(body: Body, c: Correlation, lanes: int) -> None:
    """Emit a convolution of 3x3 taps by squares of 2x2 outputs."""
    _Squares(body, c, lanes).run()


@dataclass(frozen=True)
class _SquareBand:
    """A band of the output from row `top` of an image on, with the points of its source; channels lie `apart`
    elements."""

    image: Expr
    top: Expr
    points: Buffer
    apart: int


class _Squares(Panels):
    """The emitter of a convolution by squares of 2x2 outputs."""

    def __init__(self, body: Body, c: Correlation, lanes: int) -> None:
        super().__init__(body, c, lanes)
        (self.phase,) = c.phases
        self.columns = ceil_div(c.spatial[1], 2)
        self.offset = tuple(shift - low for shift, low in zip(self.phase.shift, c.low, strict=True))
        # Vectors of a row of squares, and elements of a line of every second element of the source: one more than there
        # are squares is read.
        self.row_vectors = ceil_div(self.columns, lanes)
        self.line = (self.row_vectors + 1) * lanes
        self.panel_size = _POINTS * c.channels * self.width
        height = ceil_div(c.spatial[0], 2)
        most = max(_BAND // self.columns, 1)
        self.images = _together(body, c)
        least = height if self.images > 1 else ceil_div(_LEAST_BAND, self.columns)
        heights = [n for n in range(least, min(most, height) + 1) if self._shares_evenly(*divmod(c.spatial[0], 2 * n))]
        self.spread = bool(heights)
        # Rows of squares of a band.
        self.height = max(heights) if heights else ceil_div(height, ceil_div(height, most))

    def _shares_evenly(self, whole: int, tail: int) -> bool:
        """Return whether threads share so many whole bands of each image, and a smaller one of `tail` rows, evenly."""
        images = self.c.images // self.images
        bands = images * whole
        return images % _TASKS == 0 or (tail == 0 and bands >= _TASKS and bands % 2 == 0)

    def run(self) -> None:
        c, emit = self.c, self.emit
        kind = parallel_if(self.body.machine, c.out.type.size * c.channels)

        def fill(packed: Buffer) -> None:
            with emit.loop(self.panels, kind, "jo") as jo, self.body.point():
                self._weights(packed, jo)

        size = self.panels * self.panel_size
        packed = self.body.packed_ahead(c.op, size, c.dtype, fill)
        if packed is None:
            packed = emit.alloc(size, c.dtype, "wp")
            fill(packed)
        whole, tail = divmod(c.spatial[0], 2 * self.height)
        outer, inner = (kind, SERIAL) if self.spread else (SERIAL, kind)
        images = c.images // self.images
        if whole:
            with emit.loop(images * whole, outer, "b") as band, self.body.point():
                image, top = (
                    (tirx.floordiv(band, whole), tirx.floormod(band, whole)) if whole > 1 else (band, literal(0, "i32"))
                )
                self._band(
                    packed,
                    emit.bind(image * self.images, "n"),
                    emit.bind(top * (2 * self.height), "top"),
                    2 * self.height,
                    inner,
                )
        if tail:
            with emit.loop(images, outer, "n") as n, self.body.point():
                self._band(
                    packed, emit.bind(n * self.images, "n"), literal(whole * 2 * self.height, "i32"), tail, inner
                )

    # ------------------------------------------------------------------------------ points

    def _weights(self, packed: Buffer, panel: Expr) -> None:
        """Compute the points of the weights of a panel."""
        c, emit = self.c, self.emit
        group, first = self.split(panel)

        with emit.loop(c.channels, SERIAL, "c") as channel:
            for v in range(self.vectors):
                with emit.loop(self.lanes, VECTOR, "ji") as ji, self.body.point():
                    j = first + (ji + v * self.lanes)
                    inside = tirx.min(j, c.filters - 1) if c.filters % self.width else j
                    taps = [
                        [emit.bind(c.weight(group, inside, channel, *self.phase.tap(r, s))) for r in range(3)]
                        for s in range(3)
                    ]
                    down = [_of_weights(emit, column, c.dtype) for column in taps]
                    for i in range(4):
                        for k, value in enumerate(_of_weights(emit, [column[i] for column in down], c.dtype)):
                            if c.filters % self.width:
                                value = tirx.Select(j < c.filters, value, literal(0, c.dtype))
                            at = panel * self.panel_size + ((i * 4 + k) * c.channels + channel) * self.width
                            emit.store(packed, value, at + (ji + v * self.lanes))

    def _sources(
        self, points: Buffer, place: Expr, step: int, image: Expr, channel: Expr, top: Expr, rows: int
    ) -> None:
        """Compute the points of the squares of a band, of one channel of an image: the first ones at `place`, the next
        a step behind each."""
        emit, lanes = self.emit, self.lanes
        dtype, line = self.c.dtype, self.line
        squares = ceil_div(rows, 2)
        lines = emit.alloc((2 * squares + 2) * 2 * line, dtype, "lines")
        self._lines(lines, image, channel, top, 2 * squares + 2)

        with emit.loop(squares, SERIAL, "r") as r, emit.loop(self.row_vectors, SERIAL, "v") as v:
            # Elements behind the last square of a row are overwritten by the next row, or stand between channels.
            at = emit.bind(place + r * self.columns + v * lanes, "at")
            with emit.loop(lanes, VECTOR, "l") as lane, self.body.point():

                def element(i: int, k: int) -> Expr:
                    return emit.bind(
                        tirx.BufferLoad(lines, [(r * 4 + (i * 2 + k % 2)) * line + v * lanes + (lane + k // 2)])
                    )

                down = [_of_source(emit, [element(i, k) for i in range(4)]) for k in range(4)]
                for i in range(4):
                    for k, value in enumerate(_of_source(emit, [column[i] for column in down])):
                        emit.store(points, value, at + lane + (i * 4 + k) * step)

    def _lines(self, lines: Buffer, image: Expr, channel: Expr, top: Expr, count: int) -> None:
        """Copy rows of the source with its border, elements at even places before those at odd ones."""
        c, emit, lanes, line = self.c, self.emit, self.lanes, self.line
        row = emit.alloc(2 * line, c.dtype, "row")
        with emit.loop(2 * line // lanes, SERIAL, "v") as v, emit.loop(lanes, VECTOR, "l") as lane:
            emit.store(row, literal(0, c.dtype), v * lanes + lane)
        start = max(self.offset[1], 0)
        begin = start - self.offset[1]
        columns = min(c.sizes[1] - start, 2 * self.columns + 2 - begin)
        with emit.loop(count, SERIAL, "h") as h:
            place = emit.bind(top + h + self.offset[0], "row")
            inside = tirx.all(place >= 0, place < c.sizes[0])
            with emit.when(inside):
                for w, _ in pieces(emit, columns, lanes):
                    with self.body.point():
                        emit.store(row, c.source(image, channel, place, w + start), w + begin)
                with emit.loop(self.row_vectors + 1, SERIAL, "v") as v:
                    places = [(h * 2 + odd) * line + v * lanes for odd in (0, 1)]
                    separate_pairs(emit, lanes, (row, v * (2 * lanes)), [(lines, at) for at in places])
            with (
                emit.when(tirx.Not(inside)),
                emit.loop(2 * line // lanes, SERIAL, "v") as v,
                emit.loop(lanes, VECTOR, "l") as lane,
            ):
                emit.store(lines, literal(0, c.dtype), h * (2 * line) + v * lanes + lane)

    # ------------------------------------------------------------------------------ products

    def _band(self, packed: Buffer, image: Expr, top: Expr, rows: int, kind: Any) -> None:
        c, emit = self.c, self.emit
        height = ceil_div(rows, 2)
        # Room for the last vector of a row of squares; channels do not lie a power of two apart.
        apart = ceil_div(self.images * height * self.columns + self.lanes, self.lanes) * self.lanes
        apart += self.lanes if apart // self.lanes % 2 == 0 else 0
        band = _SquareBand(image, top, emit.alloc(_POINTS * c.channels * apart, c.dtype, "points"), apart)
        with emit.loop(c.channels, kind, "c") as channel, emit.loop(self.images, SERIAL, "n") as n, self.body.point():
            place = emit.bind(channel * apart + n * (height * self.columns), "place")
            self._sources(band.points, place, c.channels * apart, image + n, channel, top, rows)
        # A strip reads all weights of a panel again, so there are as few as threads need.
        split = kind == PARALLEL and rows % 2 == 0 and self.images == 1
        strips = min(ceil_div(_TASKS, self.panels), height) if split else 1
        low, taller = divmod(height, strips)
        with emit.loop(self.panels * strips, kind, "jo") as task, self.body.point():
            panel = emit.bind(tirx.floordiv(task, strips) if strips > 1 else task, "panel")
            number = tirx.floormod(task, strips) if strips > 1 else literal(0, "i32")
            first = emit.bind(number * low + tirx.min(number, taller), "first")
            for tall, met in ((low + 1, number < taller), (low, number >= taller)):
                with emit.when(met) if taller else nullcontext(), self.body.point():
                    if taller or tall == low:
                        self._strip(packed, panel, band, first, tall, min(rows, 2 * tall))

    def _strip(self, packed: Buffer, panel: Expr, band: _SquareBand, first: Expr, height: int, rows: int) -> None:
        """Emit the outputs of a panel for `height` rows of squares of a band, from row `first` on."""
        c, emit = self.c, self.emit
        squares = self.images * height * self.columns
        products = emit.alloc(_POINTS * squares * self.width, c.dtype, "products")
        most = most_rows(self.body, self.vectors)
        with emit.loop(_POINTS, SERIAL, "point") as point:
            weights = emit.bind(panel * self.panel_size + point * (c.channels * self.width), "weights")
            source = emit.bind(point * (c.channels * band.apart) + first * self.columns, "source")
            for t, count in cover(emit, squares, ceil_div(squares, ceil_div(squares, most)), "t"):
                with self.body.point():
                    tile = self._tile(packed, weights, band, source + t, count)
                    for i in range(count):
                        tile.store(i, products, (point * squares + t + i) * self.width)
        with emit.loop(self.images, SERIAL, "n") as n, self.body.point():
            sums = emit.alloc(rows * c.spatial[1] * self.width, c.dtype, "sums")
            for first_row, tall, count in ((0, 2, rows // 2), (rows // 2, 1, rows % 2)):
                for first_column, wide, length in ((0, 2, c.spatial[1] // 2), (c.spatial[1] // 2, 1, c.spatial[1] % 2)):
                    if count and length:
                        with emit.loop(count, SERIAL, "r") as r, emit.loop(length, SERIAL, "s") as s:
                            square = emit.bind(
                                (n * height + r + first_row) * self.columns + (s + first_column), "square"
                            )
                            corner = emit.bind((r + first_row) * 2 * c.spatial[1] + (s + first_column) * 2, "corner")
                            self._square(products, squares, square, sums, corner, tall, wide)
            self.finish(band.image + n, panel, sums, band.top + first * 2, rows)

    def _tile(self, packed: Buffer, weights: Expr, band: _SquareBand, source: Expr, count: int) -> RegisterTile:
        """Multiply `count` squares by a panel of weights, at one point; a row of the tile is a square."""
        c, emit = self.c, self.emit
        tile = RegisterTile(emit, c.dtype, count, self.width, self.lanes)
        source = emit.bind(source, "source")
        with emit.loop(c.channels, SERIAL, "c") as channel, self.body.point():
            line = tile.line(packed, weights + channel * self.width)
            at = emit.bind(source + channel * band.apart, "at")
            for i in range(count):
                tile.add(i, tirx.BufferLoad(band.points, [at + i]), line)
        return tile

    def _square(
        self, products: Buffer, squares: int, square: Expr, sums: Buffer, corner: Expr, tall: int, wide: int
    ) -> None:
        """Compute a square of outputs, or the part of it inside; its first output is at `corner`."""
        emit = self.emit
        for v in range(0, self.width, self.lanes):
            with emit.loop(self.lanes, VECTOR, "l") as lane, self.body.point():
                points = [
                    emit.bind(tirx.BufferLoad(products, [(point * squares + square) * self.width + (lane + v)]))
                    for point in range(_POINTS)
                ]
                down = [_outputs(emit, points[k::4])[:tall] for k in range(4)]
                for i in range(tall):
                    for k, value in enumerate(_outputs(emit, [column[i] for column in down])[:wide]):
                        emit.store(sums, value, (corner + (i * self.c.spatial[1] + k)) * self.width + (lane + v))
