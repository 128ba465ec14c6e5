"""Convolutions of one tap and stride 1, and their gradients for the input: per image and group a product with
neighbouring positions in lanes.

In: weight and source of out[n, g, o, p] = sum over c of weight[g, o, c] * source[n, g, c, p]. Out: loops

    pack weights          [tile][channel][outputs]
    for image and group, part of the positions:
      pack the positions  [panel][channel][positions in lanes], read in long runs, together in cache
      for tile of outputs, panel: accumulators [outputs, lanes]; then `Body.finish` on vectors of neighbouring positions

or, where the positions are whole vectors in memory, their channels few and the output small, without packing them:

      for panel, tile of outputs: accumulators [outputs, lanes] from positions where they lie; then `Body.finish`

Weights are packed once, tile by tile, because rows a power of two apart would share few sets of the first-level cache.
Parts are as equal as whole panels allow, so that threads which take as many of them take as long. Limit: small images
leave lanes empty; register_tiles.py has positions of several rows there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import cover, most_rows
from penstock.backends.tvm.kernels.tools.elements import Index, unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, compute_dtype, literal
from penstock.backends.tvm.kernels.tools.register_tile import RegisterTile
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.graph import Op, Value
from penstock.ir.types import ITEM_BYTES

# Elements of a packed part of the positions: they stay in the second-level cache while its outputs are computed.
_PART = 98304
# Threads share so many parts or a multiple: several for each of a few threads, and where they have the same number, an
# equal one.
_TASKS = 8
# Bytes of a panel of positions that is read where it lies: three quarters of a first-level cache of 32 KiB. Such panels
# write short pieces of many planes, so the output has to fit the caches that put them together.
_NEAR, _NEAR_OUT = 24576, 4 << 20
# The epilogue of a convolution in unrolled code: one instruction for each, as many as norm, residual and relu with the
# sum saved.
_CHEAP = ("add", "sub", "mul", "relu", "relu_grad", "reshape")
_LIGHT = 7


@dataclass(frozen=True)
class PointProduct:
    """A convolution of one tap as a product per image and group."""

    out: Value
    images: int
    groups: int
    filters: int
    channels: int
    positions: int
    source: Callable[[Expr, Expr, Expr], Expr]
    weight: Callable[[Expr, Expr, Expr], Expr]
    place: Callable[[Expr, Expr, Expr], Index]
    op: Op
    # The flat buffer of the source, if it is read from memory as it is.
    plain: Buffer | None


@dataclass(frozen=True)
class _PointPanel:
    """A panel of `count` positions from `start` on. Those of a channel lie side by side in `source` from `base` on,
    channels `pitch` elements apart."""

    source: Buffer
    base: Expr
    pitch: int
    start: Expr
    count: int


def is_light(body: Body) -> bool:
    """Return whether the epilogue is short enough to be done on registers, in unrolled code."""
    ops = body.group.ops
    return len(ops) <= 2 or (len(ops) <= _LIGHT and all(op.kind in _CHEAP for op in ops[1:]))


def emit_points(body: Body, p: PointProduct) -> None:
    _Points(body, p).run()


class _Points:
    """The emitter of a convolution of one tap, as a product per image and group."""

    def __init__(self, body: Body, p: PointProduct) -> None:
        self.body, self.p, self.emit = body, p, body.emit
        self.dtype = compute_dtype(p.out.type.dtype)
        self.lanes = max(body.lanes * 4 // ITEM_BYTES[self.dtype], 1)
        self.vectors = min(body.machine.vectors, ceil_div(p.positions, self.lanes))
        self.width = self.vectors * self.lanes
        self.most = most_rows(body, self.vectors)
        self.rows = ceil_div(p.filters, ceil_div(p.filters, self.most))
        # Panels of positions, the last one maybe narrower, in equal parts.
        self.panels = ceil_div(p.positions, self.width)
        fewest, each = (
            ceil_div(self.panels, max(_PART // p.channels // self.width, 1)),
            ceil_div(_TASKS, p.images * p.groups),
        )
        self.parts = min(ceil_div(fewest, each) * each, self.panels)
        self.light = is_light(body)
        self.in_place = self._is_near()

    def _is_near(self) -> bool:
        """Return whether positions are read where they lie: in whole vectors, from memory and to memory that caches
        hold."""
        p, item = self.p, ITEM_BYTES[self.dtype]
        if p.plain is None or ITEM_BYTES[p.out.type.dtype] != item or p.positions % self.lanes:
            return False
        return p.channels * self.width * item <= _NEAR and p.out.type.nbytes <= _NEAR_OUT

    def _fill(self, packed: Buffer) -> None:
        p, emit = self.p, self.emit
        with emit.loop(p.groups, SERIAL, "g") as g:
            for o, rows in cover(emit, p.filters, self.rows, "o"):
                with emit.loop(rows, SERIAL, "r") as r, emit.loop(p.channels, SERIAL, "c") as c, self.body.point():
                    emit.store(packed, p.weight(g, o + r, c), (g * p.filters + o) * p.channels + c * rows + r)

    def run(self) -> None:
        p, emit = self.p, self.emit
        size = p.groups * p.filters * p.channels
        ready = self.body.packed_ahead(p.op, size, self.dtype, self._fill)
        self.weights = emit.alloc(size, self.dtype, "wp") if ready is None else ready
        if ready is None:
            self._fill(self.weights)
        kind = parallel_if(self.body.machine, p.out.type.size * p.channels // 8)
        counts = (p.images, p.groups, self.parts)
        with emit.loop(prod(counts), kind, "i") as i, self.body.point():
            image, group, part = (emit.bind(number, "i") for number in unravel(i, counts))
            self._part(image, group, part)

    def _part(self, image: Expr, group: Expr, part: Expr) -> None:
        """Emit all outputs at some positions: part number `part`."""
        p, emit = self.p, self.emit
        whole, tail = divmod(p.positions, self.width)
        first, last = (emit.bind(tirx.floordiv((part + i) * self.panels, self.parts), "panel") for i in (0, 1))
        if self.in_place:
            self._part_in_place(image, group, first, last)
            return
        size = p.channels * self.width
        packed = emit.alloc(ceil_div(self.panels, self.parts) * size, self.dtype, "bp")
        count = emit.bind(tirx.min(last, whole) - first, "count")
        with emit.loop(p.channels, SERIAL, "c") as c:
            with emit.loop(count, SERIAL, "pp") as q:
                for v in range(self.vectors):
                    with emit.loop(self.lanes, VECTOR, "l") as lane, self.body.point():
                        at = lane + v * self.lanes
                        value = p.source(image, group * p.channels + c, (first + q) * self.width + at)
                        emit.store(packed, value, q * size + c * self.width + at)
            if tail:
                with emit.when(last > whole):
                    at = emit.bind(count * size + c * self.width, "at")
                    for i, _ in pieces(emit, tail, self.lanes):
                        with self.body.point():
                            emit.store(
                                packed, p.source(image, group * p.channels + c, (whole * self.width) + i), at + i
                            )
                    for i in range(tail, ceil_div(tail, self.lanes) * self.lanes):
                        emit.store(packed, literal(0, self.dtype), at + i)

        for o, rows in cover(emit, p.filters, self.rows, "o"):
            with emit.loop(count, SERIAL, "pp") as q, self.body.point():
                start = (first + q) * self.width
                self._tile(image, group, o, rows, _PointPanel(packed, q * size, self.width, start, self.width))
            if tail:
                with emit.when(last > whole), self.body.point():
                    start = literal(whole * self.width, "i32")
                    self._tile(image, group, o, rows, _PointPanel(packed, count * size, self.width, start, tail))

    def _part_in_place(self, image: Expr, group: Expr, first: Expr, last: Expr) -> None:
        """Emit all outputs at the positions of the panels from `first` to below `last`, panel by panel."""
        p, emit = self.p, self.emit
        whole, tail = divmod(p.positions, self.width)
        assert p.plain is not None, "positions are read where they lie"
        base = emit.bind((image * p.groups + group) * (p.channels * p.positions), "base")

        def tiles(start: Expr, count: int) -> None:
            panel = _PointPanel(p.plain, base + start, p.positions, start, count)
            for o, rows in cover(emit, p.filters, self.rows, "o"):
                with self.body.point():
                    self._tile(image, group, o, rows, panel)

        with emit.loop(tirx.min(last, whole) - first, SERIAL, "pp") as q, self.body.point():
            tiles(emit.bind((first + q) * self.width, "start"), self.width)
        if tail:
            with emit.when(last > whole), self.body.point():
                tiles(literal(whole * self.width, "i32"), tail)

    def _tile(self, image: Expr, group: Expr, o: Expr, rows: int, panel: _PointPanel) -> None:
        p, emit, lanes = self.p, self.emit, self.lanes
        start, count = panel.start, panel.count
        spans = range(0, ceil_div(count, lanes) * lanes, lanes)
        width = len(spans) * lanes
        tile = RegisterTile(emit, self.dtype, rows, width, lanes)
        factors = emit.bind((group * p.filters + o) * p.channels, "factors")
        with emit.loop(p.channels, SERIAL, "c") as c, self.body.point():
            if self.in_place:
                # Channels lie far apart, so the processor does not see that the next panel follows.
                for v in spans:
                    later = panel.base + c * panel.pitch + (self.width + v)
                    emit.prefetch(panel.source, later, False, near=False)
            line = tile.line(panel.source, panel.base + c * panel.pitch)
            for i in range(rows):
                tile.add(i, tirx.BufferLoad(self.weights, [factors + c * rows + i]), line)
        if self.light and count % lanes == 0:
            for i, acc in enumerate(tile.accumulators):
                for v in spans:
                    with emit.loop(lanes, VECTOR, "l") as lane, self.body.point():
                        index = p.place(image, group * p.filters + o + i, start + (lane + v))
                        self.body.finish({p.out: (tirx.BufferLoad(acc, [lane + v]), index)})
            return
        copy = emit.alloc(rows * width, self.dtype, "tile")
        for i in range(rows):
            tile.store(i, copy, literal(i * width, "i32"))
        with emit.loop(rows, SERIAL, "r") as r:
            channel = emit.bind(group * p.filters + o + r, "o")
            for i, _ in pieces(emit, count, lanes):
                with self.body.point():
                    self.body.finish(
                        {p.out: (tirx.BufferLoad(copy, [r * width + i]), p.place(image, channel, start + i))}
                    )
