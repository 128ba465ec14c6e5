"""Correlation with the positions of a row in lanes, for sums of few terms: images with three colours, many filters.

In: a Correlation of one phase and one group whose output rows are whole vectors. Out: loops

    for image, part of the output rows:
      copy the rows of the source that the part reads, with a border of zeros
      for tile of filters, output row, panel of vectors of the row:
        accumulators [filters, vectors] = sum over (channel, tap) of one weight * neighbouring positions
        `Body.finish` on vectors of neighbouring positions

With output channels in lanes (register_tiles.py) sums have to be turned before they are stored. That takes as long as
many terms do, and here there are few. The copy keeps columns apart by their remainder modulo the stride, so that
neighbouring windows read neighbouring elements. Limit: rows that are no whole vectors are left to register_tiles.py.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import BorderedSource, Correlation, cover, lanes_of, most_rows
from penstock.backends.tvm.kernels.tools.elements import unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.register_tile import RegisterTile

from .points import is_light

# Terms of a sum up to which turning it is worth avoiding.
_MOST_TERMS = 64
# Vectors of a panel; tiles of fewer filters than this load more vectors than they use.
_VECTORS, _LEAST_FILTERS = 3, 8
# Elements of the source that a part copies: half a first-level cache of 32 KiB. Threads share so many parts, or more.
_PART, _TASKS = 4096, 8


def suits(body: Body, c: Correlation) -> bool:
    """Return whether sums have few terms, and rows are whole vectors."""
    lanes = lanes_of(body, c)
    return (
        lanes >= 8
        and c.groups == 1
        and len(c.phases) == 1
        and c.step == (1, 1)
        and 0 < c.channels * prod(c.phases[0].taps) <= _MOST_TERMS
        and c.filters >= _LEAST_FILTERS
        and c.spatial[1] % lanes == 0
        and is_light(body)
    )


def emit_row_vectors(body: Body, c: Correlation) -> None:
    """Emit a correlation of few terms, with positions of a row in lanes."""
    _RowVectors(body, c).run()


class _RowVectors:
    """The emitter of a correlation of few terms."""

    def __init__(self, body: Body, c: Correlation) -> None:
        self.body, self.c, self.emit, self.lanes = body, c, body.emit, lanes_of(body, c)
        (self.phase,) = c.phases
        self.terms = c.channels * prod(self.phase.taps)
        vectors = c.spatial[1] // self.lanes
        panels = ceil_div(vectors, _VECTORS if body.machine.rows >= 12 else 2)
        cuts = [i * vectors // panels for i in range(panels + 1)]
        self.panels = [(first, last - first) for first, last in pairwise(cuts)]
        most = most_rows(body, max(count for _, count in self.panels))
        self.rows = ceil_div(c.filters, ceil_div(c.filters, most))
        self.source = BorderedSource(body, c)
        self.source.split_columns(0)

    def run(self) -> None:
        c, emit = self.c, self.emit
        size = c.filters * self.terms
        weights = self.body.packed_ahead(c.op, size, c.dtype, self._fill)
        if weights is None:
            weights = emit.alloc(size, c.dtype, "wp")
            self._fill(weights)
        parts = self._parts()
        count = ceil_div(c.spatial[0], parts)
        self.source.hold_rows((count - 1) * c.strides[0] + (self.phase.taps[0] - 1) * c.dilations[0] + 1)
        self._fill_offsets()
        kind = parallel_if(self.body.machine, c.out.type.size * self.terms // 8)
        with emit.loop(c.images * parts, kind, "part") as number, self.body.point():
            image, part = (emit.bind(x, "i") for x in unravel(number, (c.images, parts)))
            first, last = (emit.bind(tirx.floordiv((part + i) * c.spatial[0], parts), "row") for i in (0, 1))
            self.source.alloc(False)
            self.source.copy_rows(image, emit.bind(first * c.strides[0] + self.phase.shift[0], "top"))
            for o, rows in cover(emit, c.filters, self.rows, "o"):
                with emit.loop(last - first, SERIAL, "h") as h, self.body.point():
                    for panel in self.panels:
                        self._tile(weights, image, o, rows, (first, h), panel)

    def _parts(self) -> int:
        """Return how many parts the rows of an image are cut into, so that few are copied for two of them."""
        c = self.c
        row = c.channels * self.source.width * self.source.split * c.strides[0]
        wanted = max(ceil_div(c.spatial[0] * row, _PART), ceil_div(_TASKS, c.images))
        again = max((self.phase.taps[0] - 1) * c.dilations[0] + 1 - c.strides[0], 0)
        most = c.spatial[0] * c.strides[0] // (4 * again) if again else c.spatial[0]
        return max(min(wanted, most, c.spatial[0]), 1)

    def _fill(self, packed: Buffer) -> None:
        """Pack the weights of each tile of filters: the filters of a term lie side by side."""
        c, emit = self.c, self.emit
        rows_of, columns_of = self.phase.taps
        for o, rows in cover(emit, c.filters, self.rows, "o"):
            with (
                emit.loop(rows, SERIAL, "i") as i,
                emit.loop(c.channels, SERIAL, "c") as channel,
                emit.loop(rows_of, SERIAL, "r") as r,
                emit.loop(columns_of, SERIAL, "s") as s,
                self.body.point(),
            ):
                term = (channel * rows_of + r) * columns_of + s
                value = c.weight(literal(0, "i32"), o + i, channel, *self.phase.tap(r, s))
                emit.store(packed, value, o * self.terms + term * rows + i)

    def _fill_offsets(self) -> None:
        """Note where each term reads, from the first term's place on."""
        c, emit = self.c, self.emit
        rows_of, columns_of = self.phase.taps
        self.offsets = emit.alloc(self.terms, "i32", "offsets")
        for channel in range(c.channels):
            for r in range(rows_of):
                for s in range(columns_of):
                    column = s * c.dilations[1] + self.phase.shift[1]
                    left, remainder = divmod(column, c.strides[1])
                    place = (channel, r * c.dilations[0], left, remainder)
                    at = self.source.position(literal(0, "i32"), *(literal(x, "i32") for x in place))
                    emit.store(self.offsets, at, literal((channel * rows_of + r) * columns_of + s, "i32"))

    def _tile(
        self, weights: Buffer, image: Expr, o: Expr, rows: int, place: tuple[Expr, Expr], panel: tuple[int, int]
    ) -> None:
        """Sum a panel of a row for a tile of filters, and finish it. `place` is the part's first row, and which row of
        the part it is."""
        c, emit, lanes = self.c, self.emit, self.lanes
        begin, vectors = panel
        tile = RegisterTile(emit, c.dtype, rows, vectors * lanes, lanes)
        factors = emit.bind(o * self.terms, "factors")
        pitch = self.source.width * self.source.split
        corner = emit.bind(place[1] * (c.strides[0] * pitch) + begin * lanes, "corner")
        assert self.source.buffer is not None, "the rows are copied"
        with emit.loop(self.terms, SERIAL, "k") as k, self.body.point():
            at = emit.bind(corner + tirx.BufferLoad(self.offsets, [k]), "at")
            line = tile.line(self.source.buffer, at)
            for i in range(rows):
                tile.add(i, tirx.BufferLoad(weights, [factors + k * rows + i]), line)
        for i, acc in enumerate(tile.accumulators):
            for v in range(0, vectors * lanes, lanes):
                with emit.loop(lanes, VECTOR, "l") as lane, self.body.point():
                    index = c.place(image, o + i, place[0] + place[1], begin * lanes + v + lane)
                    self.body.finish({c.out: (tirx.BufferLoad(acc, [lane + v]), index)})
