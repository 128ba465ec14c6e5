"""Correlation with output channels in lanes: tiles of positions by channels stay in registers while all taps of all
channels are added.

In: a Correlation. Out: loops

    pack weights  [panel][phase, channel, tap][channels out in lanes]
    for image:    copy it with a border of zeros (when windows reach over the edge, and copying is soon made up for)
      for panel, strip of output rows, phase, tile:
        accumulators [positions, lanes] = sum over (channel, tap) of one source element * one row of packed weights
      transpose the strip, and `Body.finish` on vectors of neighbouring positions

Where there are few products of each element, as with strides, the source is read where it lies: tiles whose taps may be
outside of it ask for each if it is inside.

All phases of a strip leave their sums in the same buffer, interleaved, so no pass is needed to merge them.
Order: parts of an image outside where the weights are few: what is copied of the source stays in the cache, and threads
share parts, however few panels there are. Else images outside when all weights are smaller than what the panels would
read of the images, else panels outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
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
from penstock.backends.tvm.kernels.tools.elements import unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, TVM_DTYPES, VECTOR, Buffer, Expr, ceil_div, literal, load
from penstock.backends.tvm.kernels.tools.register_tile import RegisterTile
from penstock.backends.tvm.kernels.tools.transpose import transpose_block

from .panels import Panels


def emit_tiles(body: Body, c: Correlation, lanes: int) -> None:
    """Emit a correlation by register tiles of positions by channels."""
    _TiledCorrelation(body, c, lanes).run()


# Elements of all weights that are read for each part of an image, and of the source that a part reads.
_FEW_WEIGHTS, _PART = 1 << 17, 1 << 15
# Threads share so many parts, or more.
_TASKS = 8
# Products of an element of the source, up to which a copy of it is a notable part of the time. It is then read where it
# lies if at most so many columns read outside of it, and one of so many rows, which are slower.
_COPIED, _MOST_OUTSIDE, _ROWS = 288, 2, 16


def _vectors_of(body: Body, c: Correlation, lanes: int) -> int:
    """Return the vectors of a panel: three where that leaves fewer lanes of the last panel empty."""

    def covered(vectors: int) -> int:
        return ceil_div(c.filters, vectors * lanes) * vectors

    usual = min(body.machine.vectors, ceil_div(c.filters, lanes))
    return 3 if covered(3) < covered(usual) and most_rows(body, 3) > 1 else usual


def _tile_of(counts: Pair, most: int) -> Pair:
    """Choose the rows and columns of a tile of output positions: whole rows if several fit, else equal parts of one."""
    rows, columns = counts
    if columns > most:
        return 1, ceil_div(columns, ceil_div(columns, most))
    return max(min(most // max(columns, 1), rows), 1), columns


@dataclass(frozen=True)
class _PanelWeights:
    """The packed weights of a panel of output channels, which begin at `base`."""

    panel: Expr
    packed: Buffer
    base: Expr


@dataclass(frozen=True)
class _PositionStrip:
    """A strip of output rows of an image, from row `unit` * step on, with scratch memory for its sums. The source is
    read from its row `below` on."""

    image: Expr
    unit: Expr
    sums: Buffer
    below: Expr


@dataclass(frozen=True)
class _PositionTile:
    """A register tile: `height` by `width` positions of a phase, from (h, w) on. `start` is the phase's first row in
    the packed weights."""

    phase: Phase
    start: int
    h: Expr
    w: Expr
    height: int
    width: int
    # Columns of the tile of which some tap may be outside of a source that is read where it lies.
    outside: frozenset[int] = frozenset()

    @property
    def cells(self) -> list[Pair]:
        return [(i, j) for i in range(self.height) for j in range(self.width)]


class _TiledCorrelation(Panels):
    """The emitter of a correlation whose sums stay in registers over all taps."""

    def __init__(self, body: Body, c: Correlation, lanes: int) -> None:
        super().__init__(body, c, lanes, _vectors_of(body, c, lanes))
        self.most = most_rows(body, self.vectors)
        self.tap_count = sum(prod(p.taps) for p in c.phases)
        self.panel_size = c.channels * self.tap_count * self.width
        self.source = BorderedSource(body, c)
        self.strip = strip_rows(c.spatial, c.step[0], lanes)
        self.in_place = False

    def run(self) -> None:
        c, emit = self.c, self.emit
        kind = parallel_if(self.body.machine, c.out.type.size * c.channels * self.tap_count // 8)
        weights = c.groups * self.panels * self.panel_size
        images = c.images * c.groups * c.channels * self.source.plane
        panels = c.groups * self.panels

        def fill(packed: Buffer) -> None:
            with emit.loop(panels, kind, "jo") as jo, self.body.point():
                self._pack(_PanelWeights(jo, packed, jo * self.panel_size))

        ready = self.body.packed_ahead(c.op, weights, c.dtype, fill)
        cut = self._is_cut(weights)
        self.in_place = cut and self._is_read_in_place()
        if self.in_place:
            self.source = BorderedSource(self.body, c, in_place=True)
        parts = self._parts() if cut else 0
        if parts:
            packed = ready
            if packed is None:
                packed = emit.alloc(weights, c.dtype, "wp")
                fill(packed)
            self._run_parts(packed, parts, kind)
            return
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
                    self._strips(n, _PanelWeights(jo, packed, jo * self.panel_size))
        else:
            if c.needs_border:
                self.source.alloc(True)
                with emit.loop(c.images, kind, "n") as n, self.body.point():
                    self.source.copy(n, kind if c.images == 1 else SERIAL)
            with emit.loop(panels, kind, "jo") as jo, self.body.point():
                packed, base = ready, jo * self.panel_size
                if packed is None:
                    packed, base = emit.alloc(self.panel_size, c.dtype, "wp"), literal(0, "i32")
                    self._pack(_PanelWeights(jo, packed, base))
                with emit.loop(c.images, SERIAL, "n") as n, self.body.point():
                    self._strips(n, _PanelWeights(jo, packed, base))

    def _is_cut(self, weights: int) -> bool:
        """Return whether images are cut into parts: their weights are few enough to be read for each."""
        c = self.c
        return len(c.phases) == 1 and c.step == (1, 1) and weights <= _FEW_WEIGHTS and prod(c.phases[0].taps) > 0

    def _is_read_in_place(self) -> bool:
        """Return whether tiles read a source with a border where it lies: copying it takes a notable part of the time,
        and few rows and columns meet the border."""
        c, taps = self.c, prod(self.c.phases[0].taps)
        if c.plain is None or not c.needs_border or str(c.plain.dtype) != TVM_DTYPES[c.dtype]:
            return False
        if c.strides[1] == 1 or self.most // c.spatial[1] > 1 or taps * c.filters > _COPIED * prod(c.strides):
            return False
        rows = sum(self._is_outside(row, 0) for row in range(c.spatial[0]))
        return rows * _ROWS <= c.spatial[0] and sum(map(len, self._columns_outside())) <= _MOST_OUTSIDE

    def _column_tiles(self) -> list[Pair]:
        """Return the first column and the width of each tile of a row."""
        columns = self.c.phases[0].counts[1]
        _, wide = _tile_of((1, columns), self.most)
        return [(w, min(wide, columns - w)) for w in range(0, columns, wide)]

    def _columns_outside(self) -> list[frozenset[int]]:
        """Return for each tile of a row its columns of which some tap is outside of the source."""
        return [frozenset(j for j in range(width) if self._is_outside(w + j, 1)) for w, width in self._column_tiles()]

    def _is_outside(self, place: int, axis: int) -> bool:
        """Return whether some tap of an output row, or column, is outside of the source."""
        c, (phase,) = self.c, self.c.phases
        first = place * c.strides[axis] + phase.shift[axis] - c.low[axis]
        return first < 0 or first + (phase.taps[axis] - 1) * c.dilations[axis] >= c.sizes[axis]

    def _parts(self) -> int:
        """Return how many parts an image is cut into for threads and caches, so that few rows of the source are copied
        for two parts. Strips become shorter where there would be less than a strip for each part."""
        c = self.c
        row = c.groups * c.channels * self.source.width * c.strides[0]
        wanted = max(ceil_div(c.spatial[0] * row, _PART), ceil_div(_TASKS, c.images))
        again = max((c.phases[0].taps[0] - 1) * c.dilations[0] + 1 - c.strides[0], 0)
        if c.needs_border and again and not self.in_place:
            wanted = min(wanted, max(c.spatial[0] * c.strides[0] // (4 * again), 1))
        while self.strip % 2 == 0 and c.spatial[0] < wanted * self.strip:
            self.strip //= 2
        return min(wanted, ceil_div(c.spatial[0], self.strip))

    def _run_parts(self, packed: Buffer, parts: int, kind: object) -> None:
        """Emit parts of images one by one, each with all panels."""
        c, emit = self.c, self.emit
        strips, left = divmod(c.spatial[0], self.strip)
        counts = [(i + 1) * strips // parts - i * strips // parts for i in range(parts)]
        rows = max(max(counts) * self.strip, counts[-1] * self.strip + left)
        if c.needs_border and not self.in_place:
            self.source.hold_rows((rows - 1) * c.strides[0] + (c.phases[0].taps[0] - 1) * c.dilations[0] + 1)
        self._fill_offsets()
        if self.in_place:
            self._fill_places()
        with emit.loop(c.images * parts, kind, "part") as number, self.body.point():
            image, part = (emit.bind(x, "i") for x in unravel(number, (c.images, parts)))
            first, last = (emit.bind(tirx.floordiv((part + i) * strips, parts), "strip") for i in (0, 1))
            top = literal(0, "i32")
            if c.needs_border and not self.in_place:
                top = emit.bind(first * (self.strip * c.strides[0]) + c.phases[0].shift[0], "top")
                self.source.alloc(False)
                self.source.copy_rows(image, top)
            with emit.loop(c.groups * self.panels, SERIAL, "jo") as jo, self.body.point():
                weights = _PanelWeights(jo, packed, jo * self.panel_size)
                with emit.loop(last - first, SERIAL, "st") as strip, self.body.point():
                    self._strip(image, weights, (first + strip) * self.strip, self.strip, top)
                if left:
                    with emit.when(part == parts - 1), self.body.point():
                        self._strip(image, weights, literal(strips * self.strip, "i32"), left, top)

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

    def _fill_places(self) -> None:
        """Note for each term its row and column in a window, and a line that the window below reads."""
        c, emit, (rows, columns) = self.c, self.emit, self.c.phases[0].taps
        self.taps_at = [emit.alloc(c.channels * self.tap_count, "i32", "tap") for _ in range(2)]
        self.below = emit.alloc(c.channels * self.tap_count, "i32", "below")
        with (
            emit.loop(c.channels, SERIAL, "c") as k,
            emit.loop(rows, SERIAL, "r") as r,
            emit.loop(columns, SERIAL, "s") as s,
        ):
            term = (k * rows + r) * columns + s
            line = (r * c.dilations[0] + c.strides[0]) * self.source.width + s * self.lanes
            for table, value in (
                (self.taps_at[0], r * c.dilations[0]),
                (self.taps_at[1], s * c.dilations[1]),
                (self.below, k * self.source.plane + line),
            ):
                emit.store(table, value, term)

    # ------------------------------------------------------------------------------ weights

    def _targets(self) -> dict[int, tuple[int, int, int]]:
        """Map every tap of the kernel to its place in the packed weights: the first row of its phase, the rows of a
        channel there, and its row among them."""
        targets: dict[int, tuple[int, int, int]] = {}
        start = 0
        for phase in self.c.phases:
            for r in range(phase.taps[0]):
                for s in range(phase.taps[1]):
                    a, b = phase.tap(r, s)
                    targets[int(a) * self.c.kernel[1] + int(b)] = (start, prod(phase.taps), r * phase.taps[1] + s)
            start += self.c.channels * prod(phase.taps)
        return targets

    def _pack(self, weights: _PanelWeights) -> None:
        """Pack the weights of a panel, from vectors of the stored weight where its order allows that."""
        c, taps = self.c, prod(self.c.kernel)
        group, first = self.split(weights.panel)
        whole = c.filters % self.width == 0 and c.stored is not None and self.lanes > 1
        if whole and c.filters_first:
            self._pack_rows(weights, (group * c.filters + first) * (c.channels * taps))
            return
        done = 0
        if whole and taps <= self.lanes and c.channels > 1:
            done = c.channels - 1
            self._pack_channels(weights, group, first)
        self._pack_elements(weights, group, first, done)

    def _pack_rows(self, weights: _PanelWeights, first_row: Expr) -> None:
        """Turn rows of the weight, as long as the sum, into columns."""
        c, emit, lanes = self.c, self.emit, self.lanes
        length = c.channels * prod(c.kernel)
        row = emit.bind(first_row, "row")
        for v in range(self.vectors):
            with emit.loop(length // lanes, SERIAL, "k") as k:
                starts = [row + (v * lanes + i) * length + k * lanes for i in range(lanes)]
                block = transpose_block(emit, c.dtype, lanes, lanes, c.stored, starts)
                for i, vector in enumerate(block):
                    place = tirx.Ramp(weights.base + (k * lanes + i) * self.width + v * lanes, 1, lanes)
                    emit.add(tirx.BufferStore(weights.packed, vector, [place]))
        done = length // lanes * lanes
        with emit.loop(length - done, SERIAL, "k") as k:
            for v in range(self.vectors):
                with emit.loop(lanes, VECTOR, "ji") as ji:
                    j = ji + v * lanes
                    value = load(c.stored, row + j * length + (k + done))
                    emit.store(weights.packed, value, weights.base + (k + done) * self.width + j)

    def _pack_channels(self, weights: _PanelWeights, group: Expr, first: Expr) -> None:
        """Turn [channels out, taps] into [taps, channels out], for each channel of the source but the last.

        The elements read behind the taps of a channel are the next channel's, so the last channel is left to
        `_pack_elements`."""
        c, emit, lanes, taps = self.c, self.emit, self.lanes, prod(self.c.kernel)
        targets = self._targets()
        with emit.loop(c.channels - 1, SERIAL, "c") as channel:
            row = emit.bind(((group * c.channels + channel) * c.filters + first) * taps, "row")
            for v in range(self.vectors):
                starts = [row + (v * lanes + i) * taps for i in range(lanes)]
                block = transpose_block(emit, c.dtype, lanes, taps, c.stored, starts)
                for t, (start, count, place) in targets.items():
                    at = weights.base + (start + channel * count + place) * self.width + v * lanes
                    emit.add(tirx.BufferStore(weights.packed, block[t], [tirx.Ramp(at, 1, lanes)]))

    def _pack_elements(self, weights: _PanelWeights, group: Expr, first: Expr, channels_done: int) -> None:
        """Pack the channels behind the first `channels_done` element by element, in any order of the weight."""
        c, emit, lanes = self.c, self.emit, self.lanes
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
                at = emit.bind(weights.base + (start + channel * count + r * phase.taps[1] + s) * self.width, "at")
                for v in range(self.vectors):
                    with emit.loop(lanes, VECTOR, "ji") as ji, self.body.point():
                        j = first + (ji + v * lanes)
                        if c.filters % self.width:
                            inside = j < c.filters
                            value = c.weight(group, tirx.min(j, c.filters - 1), channel, *phase.tap(r, s))
                            value = tirx.Select(inside, value, literal(0, c.dtype))
                        else:
                            value = c.weight(group, j, channel, *phase.tap(r, s))
                        emit.store(weights.packed, value, at + (ji + v * lanes))
            start += c.channels * count

    # ------------------------------------------------------------------------------ sums

    def _strips(self, image: Expr, weights: _PanelWeights) -> None:
        whole, tail = divmod(self.c.spatial[0], self.strip)
        with self.emit.loop(whole, SERIAL, "st") as strip, self.body.point():
            self._strip(image, weights, strip * (self.strip // self.c.step[0]), self.strip)
        if tail:
            with self.body.point():
                self._strip(image, weights, literal(whole * (self.strip // self.c.step[0]), "i32"), tail)

    def _strip(self, image: Expr, weights: _PanelWeights, unit: Expr, rows: int, below: Expr | None = None) -> None:
        """Emit a strip. `unit` counts steps: the strip begins with output row unit * step."""
        c, emit = self.c, self.emit
        sums = emit.alloc(rows * c.spatial[1] * self.width, c.dtype, "sums")
        strip = _PositionStrip(image, unit, sums, literal(0, "i32") if below is None else below)
        start = 0
        for phase in c.phases:
            height = max(ceil_div(rows - phase.first[0], c.step[0]), 0)
            if height == 0 or phase.counts[1] == 0:
                start += c.channels * prod(phase.taps)
                continue
            if self.in_place:
                self._row_tiles(weights, strip, height)
                continue
            tall, wide = _tile_of((height, phase.counts[1]), self.most)
            for h, th in cover(emit, height, tall, "h"):
                for w, tw in cover(emit, phase.counts[1], wide, "w"):
                    with self.body.point():
                        self._tile(weights, strip, _PositionTile(phase, start, h, w, th, tw))
            start += c.channels * prod(phase.taps)
        self.finish(image, weights.panel, strip.sums, unit * c.step[0], rows)

    def _row_tiles(self, weights: _PanelWeights, strip: _PositionStrip, height: int) -> None:
        """Emit the tiles of a strip, one row high, which read the source where it lies."""
        c, emit, (phase,) = self.c, self.emit, self.c.phases
        reach = (phase.taps[0] - 1) * c.dilations[0]
        with emit.loop(height, SERIAL, "h") as h, self.body.point():
            top = emit.bind((strip.unit + h) * c.strides[0] + (phase.shift[0] - c.low[0]), "top")
            inside = tirx.all(top >= 0, top + reach < c.sizes[0])
            for outside, width, first, count in self._alike():
                with emit.loop(count, SERIAL, "w") as w, self.body.point():
                    column = w * width + first if count > 1 else literal(first, "i32")
                    for met, columns in ((inside, outside), (tirx.Not(inside), frozenset(range(width)))):
                        with emit.when(met), self.body.point():
                            self._tile(weights, strip, _PositionTile(phase, 0, h, column, 1, width, columns))

    def _alike(self) -> list[tuple[frozenset[int], int, int, int]]:
        """Return runs of tiles of a row that are alike: their columns outside, their width, the first column, and how
        many they are."""
        tiles = zip(self._columns_outside(), self._column_tiles(), strict=True)
        runs = []
        for (outside, width), run in groupby(tiles, lambda one: (one[0], one[1][1])):
            places = [w for _, (w, _) in run]
            runs.append((outside, width, places[0], len(places)))
        return runs

    def _tile(self, weights: _PanelWeights, strip: _PositionStrip, tile: _PositionTile) -> None:
        """Sum a tile in registers, and leave its sums among those of the strip."""
        c, emit, lanes, phase = self.c, self.emit, self.lanes, tile.phase
        sums = RegisterTile(emit, c.dtype, len(tile.cells), self.width, lanes, lane="ji")
        if prod(phase.taps):
            self._add_taps(weights, strip, tile, sums)
        for number, (i, j) in enumerate(tile.cells):
            row = (tile.h + i) * c.step[0] + phase.first[0]
            position = row * c.spatial[1] + (tile.w + j) * c.step[1] + phase.first[1]
            sums.store(number, strip.sums, position * self.width)

    def _add_taps(self, weights: _PanelWeights, strip: _PositionStrip, tile: _PositionTile, sums: RegisterTile) -> None:
        """Add all taps of all channels to the accumulators of a tile."""
        c, emit, phase = self.c, self.emit, tile.phase
        first = weights.base + tile.start * self.width
        group, _ = self.split(weights.panel)
        low = c.low if self.in_place else (0, 0)
        top = (strip.unit + tile.h) * c.strides[0] + (phase.shift[0] - low[0]) - strip.below
        left = tile.w * c.strides[1] + (phase.shift[1] - low[1])
        if tile.outside:
            top, left = emit.bind(top, "top"), emit.bind(left, "left")
        corner = emit.bind(self.source.position(strip.image, group * c.channels, top, left), "corner")
        # One loop over channels and taps, with a table of the places that each reads. The compiler would unroll nested
        # short loops and keep reads of neighbouring windows, which overruns registers.
        with emit.loop(c.channels * prod(phase.taps), SERIAL, "k") as k, self.body.point():
            line = sums.line(weights.packed, first + k * self.width)
            at = emit.bind(corner + tirx.BufferLoad(self.offsets, [k + tile.start]), "at")
            if self.in_place:
                # The processor's own prediction does not go on from one short run to the next.
                emit.prefetch(c.plain, corner + tirx.BufferLoad(self.below, [k]), False, near=False)
            for number, (i, j) in enumerate(tile.cells):
                offset = i * c.strides[0] * self.source.width + j * c.strides[1]
                value = self._guarded(at + offset, top, left + j * c.strides[1], k) if j in tile.outside else None
                sums.add(number, self.source.load(at + offset) if value is None else value, line)

    def _guarded(self, at: Expr, top: Expr, left: Expr, k: Expr) -> Expr:
        """Load an element that term k reads of the window at (top, left); outside of the source it is zero."""
        c = self.c
        row, column = (x + tirx.BufferLoad(t, [k]) for x, t in zip((top, left), self.taps_at, strict=True))
        inside = tirx.all(row >= 0, row < c.sizes[0], column >= 0, column < c.sizes[1])
        there = self.source.load(tirx.Select(inside, at, literal(0, "i32")))
        return tirx.Select(inside, there, literal(0, c.dtype))
