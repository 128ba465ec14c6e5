"""Convolutions of one tap and stride 1 on small images, with weights packed ahead: positions in lanes, read where they
lie.

In: a Correlation of one tap that reads every position once. Out: loops

    for image, group, panel of positions, tile of outputs:
      accumulators [outputs, vectors of positions] = sum over channels of one weight * neighbouring positions
      `Body.finish` on vectors of neighbouring positions

Nothing is copied or turned: a channel of a small image is a few vectors of memory. Positions behind the last whole
vector have outputs in lanes: the weights of a tile lie side by side, so that one more vector holds the sums of a
position for all outputs of the tile. A 7x7 image is three vectors and one such position, 25 multiply-adds for 8
outputs.

Threads share the tiles, each the same of all panels, and meet once for an image. Each reads all channels, of which
others have computed some: a panel is taken from their caches once, while the sums of the panel before are computed.
Limit: up to four single positions a panel.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.group import PACKED
from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import Correlation, ask_for_results, cover, lanes_of
from penstock.backends.tvm.kernels.tools.elements import unravel, zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.register_tile import RegisterTile
from penstock.backends.tvm.kernels.tools.transpose import pieces

from .points import is_light

# Threads share so many parts of the filters, or a smaller power of two where there are fewer tiles. More threads than
# that find no work; single ones lose nothing by it.
_TASKS = 32
# Positions of larger images are packed in long runs.
_MOST_POSITIONS = 256
# Positions of a panel with outputs in lanes.
_MOST_LEFT = 4
# Rows of a tile: more make the loop long and save nothing.
_MOST_ROWS = 14


@dataclass(frozen=True)
class _Panel:
    """Positions from `start` on: whole vectors, then `left` single ones. The last panel has no other behind it."""

    start: int
    vectors: int
    left: int
    is_last: bool


def suits(body: Body, c: Correlation) -> bool:
    """Return whether a correlation of one tap, every position once, has a small image that fills vectors."""
    positions, lanes = prod(c.spatial), lanes_of(body, c)
    if not c.op.attrs.get(PACKED) or c.plain is None or str(c.plain.dtype) != _name(c) or lanes < 8:
        return False
    return lanes <= positions < _MOST_POSITIONS and max(p.left for p in _panels(positions, lanes)) <= _MOST_LEFT


def _name(c: Correlation) -> str:
    return {"f32": "float32", "f64": "float64"}.get(c.dtype, "")


def _panels(positions: int, lanes: int) -> list[_Panel]:
    """Cut positions into panels of up to three vectors. What is left behind whole vectors is shared among them."""
    whole, left = divmod(positions, lanes)
    count = ceil_div(whole, 3)
    panels, start = [], 0
    for i in range(count):
        vectors, over = ((i + 1) * n // count - i * n // count for n in (whole, left))
        panels.append(_Panel(start, vectors, over, i + 1 == count))
        start += vectors * lanes + over
    return panels


def emit_small_images(body: Body, c: Correlation) -> None:
    """Emit a correlation of one tap on a small image."""
    _SmallImages(body, c).run()


class _SmallImages:
    """The emitter of a convolution of one tap on small images."""

    def __init__(self, body: Body, c: Correlation) -> None:
        self.body, self.c, self.emit, self.lanes = body, c, body.emit, lanes_of(body, c)
        self.positions = prod(c.spatial)
        self.panels = _panels(self.positions, self.lanes)
        registers = 32 if body.machine.rows >= 12 else 16
        # Beside the sums stand the vectors of a channel, and one factor.
        most = min((registers - 2 - p.vectors - p.left) // p.vectors for p in self.panels)
        most = max(min(most, _MOST_ROWS, self.lanes if max(p.left for p in self.panels) else _MOST_ROWS), 1)
        self.rows = ceil_div(c.filters, ceil_div(c.filters, most))
        self.light = is_light(body)
        epilogue = [op for op in body.group.ops if op is not c.op]
        self.joint = c.spatial[0] == 1 or body.merged_from(c.out.type.dims, epilogue) <= 2

    def run(self) -> None:
        c, emit = self.c, self.emit
        size = c.groups * c.filters * c.channels
        weights = self.body.packed_ahead(c.op, size + self.lanes, c.dtype, self._fill)
        assert weights is not None, "the weights are packed ahead"
        kind = parallel_if(self.body.machine, c.out.type.size * c.channels // 8)
        images = c.images * c.groups
        with emit.loop(images, kind if images > 1 else SERIAL, "i") as i, self.body.point():
            image, group = (emit.bind(x, "i") for x in unravel(i, (c.images, c.groups)))
            inner = kind if images == 1 else SERIAL
            self._tiles(weights, image, group, inner)

    def _tiles(self, weights: Buffer, image: Expr, group: Expr, kind: object) -> None:
        """Emit all outputs of an image, panel after panel. Threads share parts of the filters, the same for each panel,
        and meet once."""
        emit = self.emit
        whole, tail = divmod(self.c.filters, self.rows)
        parts = 1 << (max(min(whole, _TASKS), 1).bit_length() - 1)
        with emit.together() if parts > 1 and kind != SERIAL else nullcontext():
            for panel in self.panels:
                with emit.loop(parts, kind, "part") as part, self.body.point():
                    begin, end = (emit.bind(tirx.floordiv((part + i) * whole, parts), "tile") for i in (0, 1))
                    with emit.loop(end - begin, SERIAL, "o") as tile, self.body.point():
                        first = (begin + tile) * self.rows if whole > 1 else literal(0, "i32")
                        self._sums(weights, image, group, first, self.rows, panel)
                    if tail:
                        with emit.when(part == parts - 1), self.body.point():
                            self._sums(weights, image, group, literal(whole * self.rows, "i32"), tail, panel)

    def _fill(self, packed: Buffer) -> None:
        """Pack the weights: tile by tile, the outputs of a channel side by side."""
        c, emit = self.c, self.emit
        for lane in range(self.lanes):
            emit.store(packed, literal(0, c.dtype), literal(c.groups * c.filters * c.channels + lane, "i32"))
        with emit.loop(c.groups, SERIAL, "g") as g:
            for o, rows in cover(emit, c.filters, self.rows, "o"):
                with emit.loop(rows, SERIAL, "r") as r, emit.loop(c.channels, SERIAL, "c") as k, self.body.point():
                    value = c.weight(g, o + r, k, zero(), zero())
                    emit.store(packed, value, (g * c.filters + o) * c.channels + k * rows + r)

    def _sums(self, weights: Buffer, image: Expr, group: Expr, o: Expr, rows: int, panel: _Panel) -> None:
        """Sum the outputs of a tile at the positions of a panel, and finish them."""
        c, emit, lanes = self.c, self.emit, self.lanes
        tile = RegisterTile(emit, c.dtype, rows, panel.vectors * lanes, lanes)
        size = 1 << (rows - 1).bit_length()
        singles = [emit.alloc(size, c.dtype, "left") for _ in range(panel.left)]
        for single in singles:
            with emit.loop(size, VECTOR, "l") as lane:
                emit.store(single, literal(0, c.dtype), lane)
        first = emit.bind(group * c.filters + o, "first")
        factors = emit.bind(first * c.channels, "factors")
        base = emit.bind((image * c.groups + group) * (c.channels * self.positions) + panel.start, "base")
        count = panel.vectors * lanes + panel.left
        # Each tile asks for another vector of the next panel.
        ahead = count + tirx.floormod(tirx.floordiv(o, self.rows), ceil_div(count, lanes)) * lanes
        ahead = emit.bind(base + ahead, "ahead")
        results = image * (c.groups * c.filters) + first
        for i in range(rows):
            start = (results + i) * self.positions + panel.start
            ask_for_results(self.body, c.out, start, count)
        with emit.loop(c.channels, SERIAL, "c") as channel, self.body.point():
            at = emit.bind(factors + channel * rows, "at")
            if not panel.is_last:
                # Channels lie far apart, so the processor does not see that the next panel follows.
                emit.prefetch(c.plain, ahead + channel * self.positions, False, near=False)
            line = tile.line(c.plain, base + channel * self.positions)
            for i in range(rows):
                tile.add(i, tirx.BufferLoad(weights, [at + i]), line)
            for number, single in enumerate(singles):
                place = base + channel * self.positions + (panel.vectors * lanes + number)
                x = emit.bind(tirx.BufferLoad(c.plain, [place]), "x")
                with emit.loop(size, VECTOR, "l") as lane:
                    value = tirx.BufferLoad(single, [lane]) + x * tirx.BufferLoad(weights, [at + lane])
                    emit.store(single, value, lane)
        self._finish_vectors(tile, image, first, rows, panel)
        for number, single in enumerate(singles):
            position = literal(panel.start + panel.vectors * lanes + number, "i32")
            for i, _ in pieces(emit, rows, lanes):
                with self.body.point():
                    self._finish(tirx.BufferLoad(single, [i]), image, first + i, position)

    def _finish_vectors(self, tile: RegisterTile, image: Expr, first: Expr, rows: int, panel: _Panel) -> None:
        emit, lanes = self.emit, self.lanes
        if self.light:
            for i, acc in enumerate(tile.accumulators):
                channel = emit.bind(first + i, "o")
                for v in range(panel.vectors):
                    with emit.loop(lanes, VECTOR, "l") as lane, self.body.point():
                        position = lane + (panel.start + v * lanes)
                        self._finish(tirx.BufferLoad(acc, [lane + v * lanes]), image, channel, position)
            return
        copy = emit.alloc(rows * tile.width, self.c.dtype, "tile")
        for i in range(rows):
            tile.store(i, copy, literal(i * tile.width, "i32"))
        with emit.loop(rows, SERIAL, "r") as r:
            channel = emit.bind(first + r, "o")
            for i, _ in pieces(emit, tile.width, lanes):
                with self.body.point():
                    self._finish(tirx.BufferLoad(copy, [r * tile.width + i]), image, channel, i + panel.start)

    def _finish(self, value: Expr, image: Expr, channel: Expr, position: Expr) -> None:
        c = self.c
        # Positions in one number keep neighbours neighbours for the simplifier of indices.
        place = (zero(), position) if self.joint else unravel(position, c.spatial)
        self.body.finish({c.out: (value, c.place(image, channel, *place))})
