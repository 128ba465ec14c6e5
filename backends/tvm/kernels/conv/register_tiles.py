"""Correlation with output channels in lanes: tiles of positions by channels stay in registers while all taps of all channels are added.

In: a Correlation. Out: loops

    pack weights  [panel][phase, channel, tap][channels out in lanes]
    for image:    copy it with a border of zeros (when windows reach over the edge)
      for panel, strip of output rows, phase, tile:
        accumulators [positions, lanes] = sum over (channel, tap) of one source element * one row of packed weights
      transpose the strip, and `Body.finish` on vectors of neighbouring positions

All phases of a strip leave their sums in the same buffer, interleaved, so no pass is needed to merge them.
Order: images outside when all weights are smaller than what the panels would read of the images, else panels outside.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import (
    BorderedSource,
    Correlation,
    Pair,
    Phase,
    cover,
    most_rows,
    strip_rows,
)
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, literal, load
from penstock.backends.tvm.kernels.tools.transpose import transpose_block

from .panels import Panels


def emit_tiles(body: Body, c: Correlation, lanes: int) -> None:
    _Tiles(body, c, lanes).run()


def _tile_of(counts: Pair, most: int) -> Pair:
    """Rows and columns of a tile of output positions: whole rows if several fit, else equal parts of one."""
    rows, columns = counts
    if columns > most:
        return 1, ceil_div(columns, ceil_div(columns, most))
    return max(min(most // max(columns, 1), rows), 1), columns


class _Tiles(Panels):
    """Sums in registers over all taps."""

    def __init__(self, body: Body, c: Correlation, lanes: int) -> None:
        super().__init__(body, c, lanes)
        self.most = most_rows(body, self.vectors)
        self.tap_count = sum(prod(p.taps) for p in c.phases)
        self.panel_size = c.channels * self.tap_count * self.width
        self.source = BorderedSource(body, c)
        self.strip = strip_rows(c.spatial, c.step[0], lanes)

    def run(self) -> None:
        c, emit = self.c, self.emit
        kind = parallel_if(self.body.machine, c.out.type.size * c.channels * self.tap_count // 8)
        weights = c.groups * self.panels * self.panel_size
        images = c.images * c.groups * c.channels * self.source.plane
        panels = c.groups * self.panels

        def fill(packed: Buffer) -> None:
            with emit.loop(panels, kind, "jo") as jo, self.body.point():
                self._pack(packed, jo * self.panel_size, jo)

        ready = self.body.packed_ahead(c.op, weights, c.dtype, fill)
        self._fill_offsets()
        if c.images * weights <= panels * images:
            packed = ready
            if packed is None:
                packed = emit.alloc(weights, c.dtype, "wp")
                fill(packed)
            inner = kind if c.images == 1 else SERIAL
            with emit.loop(c.images, kind, "n") as n, self.body.point():
                if c.needs_border:
                    self.source.alloc(False)
                    self.source.copy(n, inner)
                with emit.loop(panels, inner, "jo") as jo, self.body.point():
                    self._strips(n, jo, packed, jo * self.panel_size)
        else:
            if c.needs_border:
                self.source.alloc(True)
                with emit.loop(c.images, kind, "n") as n, self.body.point():
                    self.source.copy(n, kind if c.images == 1 else SERIAL)
            with emit.loop(panels, kind, "jo") as jo, self.body.point():
                packed, base = ready, jo * self.panel_size
                if packed is None:
                    packed, base = emit.alloc(self.panel_size, c.dtype, "wp"), literal(0, "i32")
                    self._pack(packed, base, jo)
                with emit.loop(c.images, SERIAL, "n") as n, self.body.point():
                    self._strips(n, jo, packed, base)

    def _fill_offsets(self) -> None:
        c, emit = self.c, self.emit
        self.offsets = emit.alloc(c.channels * self.tap_count, "i32", "offsets")
        start = 0
        for phase in c.phases:
            rows, columns = phase.taps
            with (
                emit.loop(c.channels, SERIAL, "c") as k,
                emit.loop(rows, SERIAL, "r") as r,
                emit.loop(columns, SERIAL, "s") as s,
            ):
                away = k * self.source.plane + r * (c.dilations[0] * self.source.width) + s * c.dilations[1]
                if rows * columns:
                    emit.store(self.offsets, away, (k * rows + r) * columns + s + start)
            start += c.channels * rows * columns

    # ------------------------------------------------------------------------------ weights

    def _targets(self) -> dict[int, tuple[int, int, int]]:
        """For every tap of the kernel: the first row of its phase in the packed weights, the rows of a channel there, and its row among them."""
        found: dict[int, tuple[int, int, int]] = {}
        start = 0
        for phase in self.c.phases:
            for r in range(phase.taps[0]):
                for s in range(phase.taps[1]):
                    a, b = phase.tap(r, s)
                    found[int(a) * self.c.kernel[1] + int(b)] = (start, prod(phase.taps), r * phase.taps[1] + s)
            start += self.c.channels * prod(phase.taps)
        return found

    def _pack(self, packed: Buffer, base: Expr, panel: Expr) -> None:
        c, emit, lanes = self.c, self.emit, self.lanes
        group, first = self.split(panel)
        taps = prod(c.kernel)
        whole = c.filters % self.width == 0 and c.stored is not None and lanes > 1
        if whole and c.filters_first:
            # Rows of the weight, as long as the sum, become columns.
            length = c.channels * taps
            row = emit.bind((group * c.filters + first) * length, "row")
            for v in range(self.vectors):
                with emit.loop(length // lanes, SERIAL, "k") as k:
                    starts = [row + (v * lanes + i) * length + k * lanes for i in range(lanes)]
                    block = transpose_block(emit, c.dtype, lanes, lanes, c.stored, starts)
                    for i, vector in enumerate(block):
                        emit.add(
                            tirx.BufferStore(
                                packed, vector, [tirx.Ramp(base + (k * lanes + i) * self.width + v * lanes, 1, lanes)]
                            )
                        )
            done = length // lanes * lanes
            with emit.loop(length - done, SERIAL, "k") as k:
                for v in range(self.vectors):
                    with emit.loop(lanes, VECTOR, "ji") as ji:
                        j = ji + v * lanes
                        value = load(c.stored, row + j * length + (k + done))
                        emit.store(packed, value, base + (k + done) * self.width + j)
            return
        channels_done = 0
        if whole and taps <= lanes and c.channels > 1:
            # Per channel of the source, [channels out, taps] becomes [taps, channels out]. What is read behind the taps is the next
            # channel's, so the last one is left to the loop below.
            targets = self._targets()
            channels_done = c.channels - 1
            with emit.loop(channels_done, SERIAL, "c") as channel:
                row = emit.bind(((group * c.channels + channel) * c.filters + first) * taps, "row")
                for v in range(self.vectors):
                    starts = [row + (v * lanes + i) * taps for i in range(lanes)]
                    block = transpose_block(emit, c.dtype, lanes, taps, c.stored, starts)
                    for t, (start, count, place) in targets.items():
                        at = base + (start + channel * count + place) * self.width + v * lanes
                        emit.add(tirx.BufferStore(packed, block[t], [tirx.Ramp(at, 1, lanes)]))
        start = 0
        for phase in c.phases:
            count = prod(phase.taps)
            if not count:
                continue
            with (
                emit.loop(c.channels - channels_done, SERIAL, "c") as channel,
                emit.loop(phase.taps[0], SERIAL, "r") as r,
                emit.loop(phase.taps[1], SERIAL, "s") as s,
            ):
                channel = channel + channels_done if channels_done else channel
                at = emit.bind(base + (start + channel * count + r * phase.taps[1] + s) * self.width, "at")
                for v in range(self.vectors):
                    with emit.loop(lanes, VECTOR, "ji") as ji, self.body.point():
                        j = first + (ji + v * lanes)
                        if c.filters % self.width:
                            inside = j < c.filters
                            value = c.weight(group, tirx.min(j, c.filters - 1), channel, *phase.tap(r, s))
                            value = tirx.Select(inside, value, literal(0, c.dtype))
                        else:
                            value = c.weight(group, j, channel, *phase.tap(r, s))
                        emit.store(packed, value, at + (ji + v * lanes))
            start += c.channels * count

    # ------------------------------------------------------------------------------ sums

    def _strips(self, image: Expr, panel: Expr, packed: Buffer, base: Expr) -> None:
        whole, rest = divmod(self.c.spatial[0], self.strip)
        with self.emit.loop(whole, SERIAL, "st") as strip, self.body.point():
            self._strip(image, panel, packed, base, strip * (self.strip // self.c.step[0]), self.strip)
        if rest:
            with self.body.point():
                self._strip(image, panel, packed, base, literal(whole * (self.strip // self.c.step[0]), "i32"), rest)

    def _strip(self, image: Expr, panel: Expr, packed: Buffer, base: Expr, unit: Expr, rows: int) -> None:
        """`unit` counts steps: the strip begins with output row unit * step."""
        c, emit = self.c, self.emit
        sums = emit.alloc(rows * c.spatial[1] * self.width, c.dtype, "sums")
        start = 0
        for phase in c.phases:
            height = max(ceil_div(rows - phase.first[0], c.step[0]), 0)
            weights = base + start * self.width
            if height == 0 or phase.counts[1] == 0:
                start += c.channels * prod(phase.taps)
                continue
            for h, th in cover(emit, height, _tile_of((height, phase.counts[1]), self.most)[0], "h"):
                for w, tw in cover(emit, phase.counts[1], _tile_of((height, phase.counts[1]), self.most)[1], "w"):
                    with self.body.point():
                        self._tile(image, panel, packed, weights, phase, start, unit, h, w, th, tw, sums)
            start += c.channels * prod(phase.taps)
        self.finish(image, panel, sums, unit * c.step[0], rows)

    def _tile(
        self,
        image: Expr,
        panel: Expr,
        packed: Buffer,
        weights: Expr,
        phase: Phase,
        start: int,
        unit: Expr,
        h: Expr,
        w: Expr,
        th: int,
        tw: int,
        sums: Buffer,
    ) -> None:
        c, emit, lanes = self.c, self.emit, self.lanes
        cells = [(i, j) for i in range(th) for j in range(tw)]
        accs = [emit.alloc(self.width, c.dtype, "acc") for _ in cells]
        for acc in accs:
            for v in range(self.vectors):
                with emit.loop(lanes, VECTOR, "ji") as ji:
                    emit.store(acc, literal(0, c.dtype), ji + v * lanes)
        if prod(phase.taps):
            group, _ = self.split(panel)
            top = (unit + h) * c.strides[0] + phase.shift[0]
            left = w * c.strides[1] + phase.shift[1]
            corner = emit.bind(self.source.position(image, group * c.channels, top, left), "corner")
            # One loop over channels and taps, with a table of where each reads: nested short loops would be unrolled, reads of neighbouring
            # windows recognised as the same, kept, and registers overrun.
            with emit.loop(c.channels * prod(phase.taps), SERIAL, "k") as k, self.body.point():
                line = emit.alloc(self.width, c.dtype, "b")
                for v in range(self.vectors):
                    with emit.loop(lanes, VECTOR, "ji") as ji:
                        emit.store(
                            line, tirx.BufferLoad(packed, [weights + k * self.width + (ji + v * lanes)]), ji + v * lanes
                        )
                at = emit.bind(corner + tirx.BufferLoad(self.offsets, [k + start]), "at")
                for (i, j), acc in zip(cells, accs, strict=True):
                    x = emit.bind(self.source.load(at + (i * c.strides[0] * self.source.width + j * c.strides[1])), "a")
                    for v in range(self.vectors):
                        with emit.loop(lanes, VECTOR, "ji") as ji:
                            column = ji + v * lanes
                            emit.store(
                                acc, tirx.BufferLoad(acc, [column]) + x * tirx.BufferLoad(line, [column]), column
                            )
        for (i, j), acc in zip(cells, accs, strict=True):
            position = ((h + i) * c.step[0] + phase.first[0]) * c.spatial[1] + (w + j) * c.step[1] + phase.first[1]
            for v in range(self.vectors):
                with emit.loop(lanes, VECTOR, "ji") as ji:
                    emit.store(sums, tirx.BufferLoad(acc, [ji + v * lanes]), position * self.width + (ji + v * lanes))
