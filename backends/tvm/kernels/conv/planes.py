"""Correlation plane by plane, with the positions of a row in lanes, for groups of one channel (depthwise).

In: a Correlation of one phase. Out: loops

    for image and group, strip of output rows:
      copy the strip of the plane, with its border of zeros, into the first-level cache
      for tile of rows by vectors: accumulators [rows, vectors] = sum over taps
      `Body.finish` on vectors of neighbouring positions

A vector of the source is loaded once for all rows of a tile that it is a tap of: a tile of 7 rows loads 9 vectors for a
column of 3 taps, in place of 21. The taps of a column stay in registers. With strides, columns lie apart by their
remainder, so that neighbouring windows read neighbouring elements.

What is copied of a row begins at a multiple of a vector: stores over two lines were half of the time of strided rows.

Rows that fill neither whole vectors nor these and a half run over their end. Their sums go row by row into a list
without gaps, in which the next row overwrites what was too much. The epilogue goes over that list, in whole vectors,
whatever the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import (
    Correlation,
    aligned_parts,
    ask_for_results,
    copy_line,
    cover,
)
from penstock.backends.tvm.kernels.tools.elements import unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.transpose import pieces

# Taps are unrolled.
_MOST_TAPS = 128
# Elements of a copied strip: three quarters of a first-level cache of 32 KiB.
_STRIP = 6144
# Threads share so many parts of the planes.
_TASKS = 8
# Longer epilogues are emitted once, not for each row of a tile.
_LIGHT = 8


def suits(c: Correlation) -> bool:
    """Return whether planes can be summed on their own, at all positions alike."""
    return len(c.phases) == 1 and c.step == (1, 1) and c.channels == 1 and 0 < prod(c.phases[0].taps) <= _MOST_TAPS


def emit_planes(body: Body, c: Correlation, lanes: int) -> None:
    """Emit a correlation of groups of one channel."""
    _Planes(body, c, lanes).run()


@dataclass(frozen=True)
class _PlaneStrip:
    """A strip of `rows` output rows of a plane, from row `top` on."""

    image: Expr
    group: Expr
    top: Expr
    rows: int


@dataclass(frozen=True)
class _PlaneTile:
    """A register tile of a strip: `height` rows from `h` on, and vectors of these sizes from column `w` on."""

    h: Expr
    w: Expr
    height: int
    sizes: tuple[int, ...]

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        """Return the row, the first column and the size of every accumulator."""
        return [(i, sum(self.sizes[:j]), size) for i in range(self.height) for j, size in enumerate(self.sizes)]


class _Planes:
    """The emitter of a correlation of groups of one channel."""

    def __init__(self, body: Body, c: Correlation, lanes: int) -> None:
        self.body, self.c, self.emit, self.lanes = body, c, body.emit, lanes
        (self.phase,) = c.phases
        most = 8 if body.machine.rows >= 12 else 4
        self.height = ceil_div(c.spatial[0], ceil_div(c.spatial[0], most))
        # Several vectors of a row where there are few rows.
        self.vectors = max(most // self.height, 1)
        whole, left = divmod(c.spatial[1], lanes)
        self.loops, over = divmod(whole, self.vectors)
        self.last = (lanes,) * over + ((_size_of(left, lanes),) if left else ())
        self.split = c.strides[1]
        covered = whole * lanes + (self.last[-1] if left else 0)
        # Rows end where their last vector does.
        self.whole = not left or self.last[-1] == left
        reach = (self.phase.shift[1] + (self.phase.taps[1] - 1) * c.dilations[1]) // self.split
        width = max(reach + covered, ceil_div(c.padded[1], self.split))
        self.parts, self.pitch = aligned_parts(c, self.split, width, lanes)
        self.rows = self._strip_rows()

    def _source_rows(self, rows: int) -> int:
        """Count the rows of the source that so many output rows read, from the first to the last."""
        return (rows - 1) * self.c.strides[0] + (self.phase.taps[0] - 1) * self.c.dilations[0] + 1

    def _strip_rows(self) -> int:
        total, budget = self.c.spatial[0], _STRIP // self.pitch
        if self._source_rows(total) <= budget:
            return total
        fit = (budget - self._source_rows(1)) // self.c.strides[0] + 1
        tiles = ceil_div(total, self.height)
        strips = ceil_div(tiles, max(fit // self.height, 1))
        return ceil_div(tiles, strips) * self.height

    def run(self) -> None:
        c, emit = self.c, self.emit
        planes, taps = c.images * c.groups, prod(self.phase.taps)
        kind = parallel_if(self.body.machine, c.out.type.size * taps // 8)
        parts = min(planes, _TASKS)
        with emit.loop(parts, kind, "part") as part, self.body.point():
            first, last = (emit.bind(tirx.floordiv((part + i) * planes, parts), "plane") for i in (0, 1))
            size = self._source_rows(self.rows) * self.pitch
            copy = emit.alloc(size, c.dtype, "xp")
            # The border stays zero while planes come and go.
            for i, _ in emit.spans(size, self.lanes):
                emit.store(copy, literal(0, c.dtype), i)
            with emit.loop(last - first, SERIAL, "p") as p, self.body.point():
                image, group = (emit.bind(x, "i") for x in unravel(first + p, (c.images, c.groups)))
                for top, rows in cover(emit, c.spatial[0], self.rows, "top"):
                    with self.body.point():
                        strip = _PlaneStrip(image, group, emit.bind(top, "top"), rows)
                        self._copy(copy, strip)
                        with emit.loop(c.filters, SERIAL, "o") as o, self.body.point():
                            self._strip(copy, strip, o)

    def _copy(self, copy: Buffer, strip: _PlaneStrip) -> None:
        """Copy the rows of the source that a strip reads. Rows outside of it are zero."""
        c, emit, base = self.c, self.emit, self.phase.shift[0] - self.c.low[0]
        count = self._source_rows(strip.rows)
        stored = strip.rows * c.spatial[1] if c.filters == 1 else 0
        results = (strip.image * c.groups + strip.group) * prod(c.spatial) + strip.top * c.spatial[1]
        if self.rows == c.spatial[0]:
            first, last = max(-base, 0), min(count, c.sizes[0] - base)
            each = ceil_div(stored, max(last - first, 1))
            with emit.loop(max(last - first, 0), SERIAL, "q") as q, self.body.point():
                place = (strip.image, strip.group, emit.bind(q + (first + base), "h"))
                copy_line(self.body, c, place, copy, emit.bind((q + first) * self.pitch, "line"), self.parts)
                ask_for_results(self.body, c.out, results + q * each, each)
            return
        each = ceil_div(stored, count)
        with emit.loop(count, SERIAL, "q") as q, self.body.point():
            h = emit.bind(strip.top * c.strides[0] + q + base, "h")
            line = emit.bind(q * self.pitch, "line")
            ask_for_results(self.body, c.out, results + q * each, each)
            inside = tirx.all(h >= 0, h < c.sizes[0])
            with emit.when(inside), self.body.point():
                copy_line(self.body, c, (strip.image, strip.group, h), copy, line, self.parts)
            with emit.when(tirx.Not(inside)):
                for i, _ in emit.spans(self.pitch, self.lanes):
                    emit.store(copy, literal(0, c.dtype), line + i)

    def _strip(self, copy: Buffer, strip: _PlaneStrip, o: Expr) -> None:
        c, emit = self.c, self.emit
        rows, columns = self.phase.taps
        taps = emit.alloc(rows * columns, c.dtype, "taps")
        for r in range(rows):
            for s in range(columns):
                with self.body.point():
                    tap = (literal(x, "i32") for x in (r, s))
                    value = c.weight(strip.group, o, literal(0, "i32"), *self.phase.tap(*tap))
                    emit.store(taps, value, literal(r * columns + s, "i32"))
        channel = emit.bind(strip.group * c.filters + o, "o")
        direct = self.whole and len(self.body.group.ops) <= _LIGHT
        sums = None if direct else emit.alloc(strip.rows * c.spatial[1] + self.lanes, c.dtype, "sums")
        for h, height in cover(emit, strip.rows, self.height, "h"):
            # The end of the rows first: what runs over it is overwritten then.
            if self.last:
                w = literal(self.loops * self.vectors * self.lanes, "i32")
                self._tile(copy, taps, sums, strip, channel, _PlaneTile(h, w, height, self.last))
            with emit.loop(self.loops, SERIAL, "w") as v, self.body.point():
                sizes = (self.lanes,) * self.vectors
                self._tile(copy, taps, sums, strip, channel, _PlaneTile(h, v * sum(sizes), height, sizes))
        if sums is None:
            return
        for i, _ in pieces(emit, strip.rows * c.spatial[1], self.lanes):
            with self.body.point():
                row, column = tirx.floordiv(i, c.spatial[1]), tirx.floormod(i, c.spatial[1])
                place = c.place(strip.image, channel, strip.top + row, column)
                self.body.finish({c.out: (tirx.BufferLoad(sums, [i]), place)})

    def _tile(
        self, copy: Buffer, taps: Buffer, sums: Buffer | None, strip: _PlaneStrip, channel: Expr, tile: _PlaneTile
    ) -> None:
        """Sum a tile in registers; finish it, or leave its sums in the list of the strip."""
        c, emit = self.c, self.emit
        accs = {cell: emit.alloc(cell[2], c.dtype, "acc") for cell in tile.cells}
        for (_, _, size), acc in accs.items():
            with emit.loop(size, VECTOR, "l") as lane:
                emit.store(acc, literal(0, c.dtype), lane)
        corner = emit.bind(tile.h * (c.strides[0] * self.pitch) + tile.w, "corner")
        for s in range(self.phase.taps[1]):
            self._add_column(copy, taps, tile, accs, corner, s)
        for (i, w, size), acc in accs.items():
            row = emit.bind(tile.h + i, "row")
            with emit.loop(size, VECTOR, "l") as lane, self.body.point():
                value = tirx.BufferLoad(acc, [lane])
                if sums is None:
                    place = c.place(strip.image, channel, strip.top + row, tile.w + (lane + w))
                    self.body.finish({c.out: (value, place)})
                else:
                    emit.store(sums, value, row * c.spatial[1] + tile.w + (lane + w))

    def _add_column(
        self,
        copy: Buffer,
        taps: Buffer,
        tile: _PlaneTile,
        accs: dict[tuple[int, int, int], Buffer],
        corner: Expr,
        s: int,
    ) -> None:
        """Add a column of taps to the accumulators: each row of the source to all rows that it is a tap of."""
        c, emit = self.c, self.emit
        rows, columns = self.phase.taps
        column = s * c.dilations[1] + self.phase.shift[1]
        start = self.parts[column % self.split] + column // self.split
        factors = [emit.bind(tirx.BufferLoad(taps, [r * columns + s]), "a") for r in range(rows)]
        for q in range(self._source_rows(tile.height)):
            readers = {
                i: r for i in range(tile.height) for r in range(rows) if i * c.strides[0] + r * c.dilations[0] == q
            }
            for w, size in dict.fromkeys((w, size) for i, w, size in accs if i in readers):
                with emit.loop(size, VECTOR, "l") as lane, self.body.point():
                    x = emit.bind(tirx.BufferLoad(copy, [corner + (lane + (q * self.pitch + start + w))]), "x")
                    for i, r in readers.items():
                        acc = accs[i, w, size]
                        emit.store(acc, tirx.BufferLoad(acc, [lane]) + x * factors[r], lane)


def _size_of(left: int, lanes: int) -> int:
    """Return the size of the vector for what is left of a row."""
    size = lanes
    while size >= 8 and size // 2 >= left:
        size //= 2
    return size
