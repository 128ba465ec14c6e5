"""Direct correlation: tiles of output positions by output channels stay in registers while all taps of all channels are added.

In: a Correlation, which is a convolution or the gradient of one for its input (correlate.py makes them). Out: loops

    pack weights  [panel][phase, channel, tap][channels out in lanes]
    for image:    copy it with a border of zeros (when windows reach over the edge)
      for panel, strip of output rows, phase, tile:
        accumulators [positions, lanes] = sum over (channel, tap) of one source element * one row of packed weights
      transpose the strip, and `Body.finish` on vectors of neighbouring positions

A phase is a regular subset of output positions that use the same taps: the gradient for the input of a convolution with stride s has s of them
per dimension, a convolution one. All phases of a strip leave their sums in the same buffer, interleaved, so no pass is needed to merge them.
Few output channels (depthwise, images with three colours) do not fill lanes. Then positions of a row are in lanes, and the source copy keeps
columns apart by their remainder modulo the stride, so that neighbouring windows read neighbouring elements.

Order: images outside when all weights are smaller than what the panels would read of the images, else panels outside.
Limits: two spatial dimensions (one is two of which the first has size 1), floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.ir.graph import Op, Value
from penstock.ir.types import ITEM_BYTES

from .body import Body, parallel_if
from .elements import Index
from .emit import SERIAL, VECTOR, Buffer, Emitter, Expr, compute_dtype, literal, load
from .gemm import ceil_div
from .transpose import pieces, transpose_block

Pair = tuple[int, int]
# Positions of a strip: with two vectors of channels its sums take a third of a first-level cache.
_STRIP = 128
_WIDEST_LINE = 8


@dataclass(frozen=True)
class Phase:
    """Output positions first, first + step, ... (counts of them); `shift` is where the first window starts in the source with its border.
    `tap(r, s)` is the index of the weight's element."""

    first: Pair
    counts: Pair
    shift: Pair
    taps: Pair
    tap: Callable[[Expr, Expr], tuple[Expr, Expr]]


@dataclass(frozen=True)
class Correlation:
    """out[n, g, o, first + step * p] = sum over c, r, s of source[n, g, c, p * stride + (r, s) * dilation + shift - low] * weight[g, o, c, tap]."""

    out: Value
    images: int
    groups: int
    filters: int
    channels: int
    sizes: Pair
    low: Pair
    padded: Pair
    strides: Pair
    dilations: Pair
    step: Pair
    spatial: Pair
    phases: tuple[Phase, ...]
    source: Callable[[Expr, Expr, Expr, Expr], Expr]
    weight: Callable[[Expr, Expr, Expr, Expr, Expr], Expr]
    place: Callable[[Expr, Expr, Expr, Expr], Index]
    # The source in memory, if it is there as it is: its flat buffer.
    plain: Buffer | None
    # The weight in memory, if it is there as it is: its flat buffer, and whether output channels come first in it, then taps last in any case.
    stored: Buffer | None
    filters_first: bool
    kernel: Pair
    op: Op

    @property
    def dtype(self) -> str:
        return compute_dtype(self.out.type.dtype)

    @property
    def needs_border(self) -> bool:
        return self.plain is None or self.low != (0, 0) or self.padded != self.sizes


def emit_correlation(body: Body, c: Correlation) -> None:
    lanes = max(body.lanes * 4 // ITEM_BYTES[c.dtype], 1)
    if c.filters * 2 <= lanes:
        _Lines(body, c, lanes).run()
    else:
        _Panels(body, c, lanes).run()


def most_rows(body: Body, vectors: int) -> int:
    """Rows of a tile so that its sums, a row of vectors and one factor fit the registers."""
    registers = 32 if body.machine.rows >= 12 else 16
    return min((registers - 1 - vectors) // vectors, 14)


def _tile_of(counts: Pair, most: int) -> Pair:
    """Rows and columns of a tile of output positions: whole rows if several fit, else equal parts of one."""
    rows, columns = counts
    if columns > most:
        return 1, ceil_div(columns, ceil_div(columns, most))
    return max(min(most // max(columns, 1), rows), 1), columns


def strip_rows(spatial: Pair, step: int, lanes: int) -> int:
    """Rows of a strip: a whole number of steps, with as few positions as possible behind the last whole vector."""
    rows, columns = spatial
    best, best_score = step, (2.0, 0)
    for count in range(step, max(rows, step) + step, step):
        positions = min(count, rows) * columns
        if count > step and positions > 2 * _STRIP:
            break
        whole, rest = divmod(rows, count)
        cost = (whole * ceil_div(count * columns, lanes) + ceil_div(rest * columns, lanes)) * lanes / (rows * columns)
        score = (round(cost, 2), -count)
        if score < best_score:
            best, best_score = count, score
    return min(best, rows)


class _Source:
    """Reads of the source with its border: from a copy, or from where it is."""

    def __init__(self, body: Body, c: Correlation) -> None:
        self.body, self.c, self.emit = body, c, body.emit
        self.buffer: Buffer | None = None
        self.whole_batch = False
        self.split = 1
        self.width = c.padded[1]

    def split_columns(self, extra: int) -> None:
        """Keep columns apart by their remainder modulo the stride, with some more behind the end for whole vectors."""
        self.split = self.c.strides[1]
        self.width = ceil_div(self.c.padded[1], self.split) + extra

    @property
    def plane(self) -> int:
        return self.c.padded[0] * self.width * self.split

    def alloc(self, whole_batch: bool) -> None:
        self.whole_batch = whole_batch
        c = self.c
        self.buffer = self.emit.alloc((c.images if whole_batch else 1) * c.groups * c.channels * self.plane, c.dtype, "xp")

    def copy(self, image: Expr) -> None:
        emit, c, body = self.emit, self.c, self.body
        lanes = max(body.lanes * 4 // ITEM_BYTES[c.dtype], 1)
        rows = min(c.sizes[0], c.padded[0] - c.low[0])
        # With a negative border the source starts later.
        first = max(-c.low[0], 0), max(-c.low[1], 0)
        columns = min(c.sizes[1], c.padded[1] - c.low[1])
        with emit.loop(c.groups * c.channels, SERIAL, "c") as channel:
            start = emit.bind(((image * (c.groups * c.channels) if self.whole_batch else 0) + channel) * self.plane, "at")
            for i, _ in emit.spans(self.plane, lanes):
                emit.store(self.buffer, literal(0, c.dtype), start + i)
            if rows <= first[0] or columns <= first[1]:
                return
            with emit.loop(rows - first[0], SERIAL, "h") as h:
                h = h + first[0] if first[0] else h
                line = emit.bind(start + (h + c.low[0]) * (self.width * self.split), "line")
                for remainder in range(self.split):
                    # Columns w with (w + low) % split == remainder.
                    begin = first[1] + (remainder - first[1] - c.low[1]) % self.split
                    count = ceil_div(columns - begin, self.split)
                    if count <= 0:
                        continue
                    at = line + (remainder * self.width + (begin + c.low[1]) // self.split)
                    for w, _ in pieces(emit, count, lanes):
                        with body.point():
                            emit.store(self.buffer, c.source(image, channel, h, w * self.split + begin), at + w)

    def position(self, image: Expr, channel: Expr, h: Expr, w: Expr, remainder: Expr = 0) -> Expr:
        """Where an element is that stands at (h, w), the border counted; `w` counts columns with that remainder."""
        if self.whole_batch or self.buffer is None:
            channel = image * (self.c.groups * self.c.channels) + channel
        return channel * self.plane + h * (self.width * self.split) + remainder * self.width + w

    def load(self, position: Expr) -> Expr:
        return load(self.c.plain if self.buffer is None else self.buffer, position)


class _Panels:
    """Output channels in lanes."""

    def __init__(self, body: Body, c: Correlation, lanes: int) -> None:
        self.body, self.c, self.emit, self.lanes = body, c, body.emit, lanes
        self.vectors = min(body.machine.vectors, ceil_div(c.filters, lanes))
        self.width = self.vectors * lanes
        self.most = most_rows(body, self.vectors)
        self.panels = ceil_div(c.filters, self.width)
        self.tap_count = sum(prod(p.taps) for p in c.phases)
        self.panel_size = c.channels * self.tap_count * self.width
        self.source = _Source(body, c)
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
            with emit.loop(c.images, kind, "n") as n, self.body.point():
                if c.needs_border:
                    self.source.alloc(False)
                    self.source.copy(n)
                with emit.loop(panels, kind if c.images == 1 else SERIAL, "jo") as jo, self.body.point():
                    self._strips(n, jo, packed, jo * self.panel_size)
        else:
            if c.needs_border:
                self.source.alloc(True)
                with emit.loop(c.images, kind, "n") as n, self.body.point():
                    self.source.copy(n)
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
            with emit.loop(c.channels, SERIAL, "c") as k, emit.loop(rows, SERIAL, "r") as r, emit.loop(columns, SERIAL, "s") as s:
                away = k * self.source.plane + r * (c.dilations[0] * self.source.width) + s * c.dilations[1]
                if rows * columns:
                    emit.store(self.offsets, away, (k * rows + r) * columns + s + start)
            start += c.channels * rows * columns

    def _split(self, panel: Expr) -> tuple[Expr, Expr]:
        """Group, and first output channel in it."""
        if self.panels == 1:
            return panel, literal(0, "i32")
        if self.c.groups == 1:
            return literal(0, "i32"), panel * self.width
        return tirx.floordiv(panel, self.panels), tirx.floormod(panel, self.panels) * self.width

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
        group, first = self._split(panel)
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
                        emit.add(tirx.BufferStore(packed, vector, [tirx.Ramp(base + (k * lanes + i) * self.width + v * lanes, 1, lanes)]))
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
        self._finish(image, panel, sums, unit * c.step[0], rows)

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
            group, _ = self._split(panel)
            top = (unit + h) * c.strides[0] + phase.shift[0]
            left = w * c.strides[1] + phase.shift[1]
            corner = emit.bind(self.source.position(image, group * c.channels, top, left), "corner")
            # One loop over channels and taps, with a table of where each reads: nested short loops would be unrolled, reads of neighbouring
            # windows recognised as the same, kept, and registers overrun.
            with emit.loop(c.channels * prod(phase.taps), SERIAL, "k") as k, self.body.point():
                line = emit.alloc(self.width, c.dtype, "b")
                for v in range(self.vectors):
                    with emit.loop(lanes, VECTOR, "ji") as ji:
                        emit.store(line, tirx.BufferLoad(packed, [weights + k * self.width + (ji + v * lanes)]), ji + v * lanes)
                at = emit.bind(corner + tirx.BufferLoad(self.offsets, [k + start]), "at")
                for (i, j), acc in zip(cells, accs, strict=True):
                    x = emit.bind(self.source.load(at + (i * c.strides[0] * self.source.width + j * c.strides[1])), "a")
                    for v in range(self.vectors):
                        with emit.loop(lanes, VECTOR, "ji") as ji:
                            column = ji + v * lanes
                            emit.store(acc, tirx.BufferLoad(acc, [column]) + x * tirx.BufferLoad(line, [column]), column)
        for (i, j), acc in zip(cells, accs, strict=True):
            position = ((h + i) * c.step[0] + phase.first[0]) * c.spatial[1] + (w + j) * c.step[1] + phase.first[1]
            for v in range(self.vectors):
                with emit.loop(lanes, VECTOR, "ji") as ji:
                    emit.store(sums, tirx.BufferLoad(acc, [ji + v * lanes]), position * self.width + (ji + v * lanes))

    # ------------------------------------------------------------------------------ results

    def _finish(self, image: Expr, panel: Expr, sums: Buffer, row: Expr, rows: int) -> None:
        c, emit, lanes = self.c, self.emit, self.lanes
        group, first = self._split(panel)
        positions = rows * c.spatial[1]

        def block(p: Expr, height: int) -> None:
            for v in range(self.vectors):
                turned = emit.alloc(lanes * lanes, c.dtype, "turned")
                starts = [(p + min(i, height - 1)) * self.width + v * lanes for i in range(lanes)]
                vectors = transpose_block(emit, c.dtype, lanes, lanes, sums, starts)
                for i, vector in enumerate(vectors):
                    emit.add(tirx.BufferStore(turned, vector, [tirx.Ramp(i * lanes, 1, lanes)]))
                valid = min(lanes, c.filters - v * lanes) if self.panels == 1 else lanes
                with emit.loop(valid, SERIAL, "j") as j:
                    channel = emit.bind(first + (j + v * lanes), "o")
                    if self.panels > 1 and c.filters % self.width:
                        with emit.when(channel < c.filters):
                            finish(p, height, group * c.filters + channel, turned, j)
                    else:
                        finish(p, height, group * c.filters + channel, turned, j)

        def finish(p: Expr, height: int, channel: Expr, turned: Buffer, j: Expr) -> None:
            channel = emit.bind(channel, "o")
            for i, _ in pieces(emit, height, lanes):
                with self.body.point():
                    q = p + i
                    index = c.place(image, channel, row + tirx.floordiv(q, c.spatial[1]), tirx.floormod(q, c.spatial[1]))
                    self.body.finish({c.out: (tirx.BufferLoad(turned, [j * lanes + i]), index)})

        whole, rest = divmod(positions, lanes)
        if whole:
            with emit.loop(whole, SERIAL, "p") as p, self.body.point():
                block(p * lanes if whole > 1 else literal(0, "i32"), lanes)
        if rest:
            with self.body.point():
                block(literal(whole * lanes, "i32"), rest)


def cover(emit: Emitter, extent: int, size: int, name: str) -> Iterator[tuple[Expr, int]]:
    """Cover an extent in parts of one size and a smaller last one: yields the first element and the size."""
    whole, rest = divmod(extent, size)
    if whole:
        with emit.loop(whole, SERIAL, name) as i:
            yield (i * size if whole > 1 else literal(0, "i32")), size
    if rest:
        yield literal(whole * size, "i32"), rest


class _Lines:
    """Few output channels: positions of a row in lanes."""

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
        self.source = _Source(body, c)
        self.source.split_columns(lanes * self.vectors)

    def _starts(self) -> list[int]:
        """Where the weights of each phase begin."""
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
        with emit.loop(c.images, kind, "n") as n, self.body.point():
            self.source.alloc(False)
            self.source.copy(n)
            with emit.loop(c.groups, SERIAL, "g") as g, self.body.point():
                for unit, rows in cover(emit, c.spatial[0], c.step[0] * self.height, "h"):
                    with self.body.point():
                        top = tirx.floordiv(unit, c.step[0]) if not isinstance(unit, tirx.IntImm) else unit // c.step[0]
                        self._strip(n, g, packed, starts, top, unit, rows)

    def _strip(self, image: Expr, group: Expr, packed: Buffer, starts: list[int], unit: Expr, row: Expr, rows: int) -> None:
        c, emit, lanes = self.c, self.emit, self.lanes
        wide = self.width * c.step[1] + lanes * self.vectors * c.step[1]
        sums = emit.alloc(c.filters * rows * wide, c.dtype, "sums")
        for phase, start in zip(c.phases, starts, strict=True):
            height = max(ceil_div(rows - phase.first[0], c.step[0]), 0)
            if height == 0 or phase.counts[1] == 0:
                continue
            columns = ceil_div(phase.counts[1], lanes)
            for v, vectors in cover(emit, columns, min(self.vectors, columns), "v"):
                for h, th in cover(emit, height, self.height, "h"):
                    with self.body.point():
                        self._tile(image, group, packed, start, phase, unit, h, v * lanes, th, vectors, sums, rows, wide)
        with emit.loop(c.filters, SERIAL, "o") as o, emit.loop(rows, SERIAL, "h") as h:
            channel = emit.bind(group * c.filters + o, "o")
            line = emit.bind((o * rows + h) * wide, "line")
            for w, _ in pieces(emit, c.spatial[1], lanes):
                with self.body.point():
                    self.body.finish({c.out: (tirx.BufferLoad(sums, [line + w]), c.place(image, channel, row + h, w))})

    def _tile(
        self,
        image: Expr,
        group: Expr,
        packed: Buffer,
        start: int,
        phase: Phase,
        unit: Expr,
        h: Expr,
        w: Expr,
        th: int,
        vectors: int,
        sums: Buffer,
        rows: int,
        wide: int,
    ) -> None:
        c, emit, lanes = self.c, self.emit, self.lanes
        cells = [(o, i) for o in range(c.filters) for i in range(th)]
        accs = {cell: emit.alloc(vectors * lanes, c.dtype, "acc") for cell in cells}
        for acc in accs.values():
            for v in range(vectors):
                with emit.loop(lanes, VECTOR, "l") as lane:
                    emit.store(acc, literal(0, c.dtype), lane + v * lanes)
        if prod(phase.taps):
            with (
                emit.loop(c.channels, SERIAL, "c") as channel,
                emit.loop(phase.taps[0], SERIAL, "r") as r,
                emit.loop(phase.taps[1], SERIAL, "s") as s,
                self.body.point(),
            ):
                whole = group * c.channels + channel
                at = start + ((whole * phase.taps[0] + r) * phase.taps[1] + s) * c.filters
                column = s * c.dilations[1] + phase.shift[1]
                remainder = tirx.floormod(column, c.strides[1]) if c.strides[1] > 1 else 0
                left = w + (tirx.floordiv(column, c.strides[1]) if c.strides[1] > 1 else column)
                factors = [emit.bind(tirx.BufferLoad(packed, [at + o]), "a") for o in range(c.filters)]
                for i in range(th):
                    top = (unit + h + i) * c.strides[0] + phase.shift[0] + r * c.dilations[0]
                    line = emit.bind(self.source.position(image, whole, top, left, remainder), "line")
                    for v in range(vectors):
                        with emit.loop(lanes, VECTOR, "l") as lane, self.body.point():
                            x = emit.bind(self.source.load(line + (lane + v * lanes)), "x")
                            k = lane + v * lanes
                            for o in range(c.filters):
                                acc = accs[o, i]
                                emit.store(acc, tirx.BufferLoad(acc, [k]) + x * factors[o], k)
        for (o, i), acc in accs.items():
            line = (o * rows + (h + i) * c.step[0] + phase.first[0]) * wide + w * c.step[1] + phase.first[1]
            for v in range(vectors):
                if c.step[1] == 1:
                    with emit.loop(lanes, VECTOR, "l") as lane:
                        emit.store(sums, tirx.BufferLoad(acc, [lane + v * lanes]), line + (lane + v * lanes))
                else:
                    for lane in range(lanes):
                        emit.store(sums, tirx.BufferLoad(acc, [lane + v * lanes]), line + (lane + v * lanes) * c.step[1])
