"""The gradient of a convolution for its weight where groups are small, above all depthwise: positions of a row stay in
lanes.

In: as for conv_weight. Out: loops

    for group:
      for image: copy x with a border of zeros, columns apart by their remainder modulo the stride
                 copy dy with rows filled up to whole vectors
        for pair of channels, some taps: accumulators [taps, lanes] += over all positions x * dy
                                         added to sums in memory
      fold the lanes, and `Body.finish` element by element

Limit: taps of one kernel row at a time where all of them do not fit the registers.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.emit import (
    SERIAL,
    VECTOR,
    Buffer,
    Expr,
    ceil_div,
    compute_dtype,
    literal,
    load,
)
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.types import ITEM_BYTES

from .direct import WeightGradient


def emit_depthwise_gradient(body: Body, w: WeightGradient) -> None:
    _Depthwise(body, w).run()


class _Depthwise:
    """The emitter of the weight gradient of a depthwise convolution, by pairs of channels."""

    def __init__(self, body: Body, w: WeightGradient) -> None:
        self.body, self.w, self.emit = body, w, body.emit
        self.dtype = compute_dtype(w.out.type.dtype)
        lanes = max(body.lanes * 4 // ITEM_BYTES[self.dtype], 1)
        while lanes > 4 and w.spatial[1] <= lanes // 2:
            lanes //= 2
        self.lanes = lanes
        self.taps = prod(w.kernel)
        self.most = body.machine.rows * body.machine.vectors
        # The sizes of dy, and of x with its border.
        self.dy_width = ceil_div(w.spatial[1], lanes) * lanes
        self.rows = max(w.padded[0], w.sizes[0] + w.low[0])
        reach = (self.dy_width - 1) * w.strides[1] + (w.kernel[1] - 1) * w.dilations[1] + 1
        self.split = w.strides[1]
        self.width = ceil_div(max(reach, w.sizes[1] + w.low[1]), self.split) + 1

    def run(self) -> None:
        w, emit = self.w, self.emit
        kind = parallel_if(self.body.machine, w.out.type.size * w.images * prod(w.spatial) // 8)
        with emit.loop(w.groups, kind, "g") as g, self.body.point():
            length = w.filters * w.channels * self.taps
            sums = emit.alloc(length * self.lanes, self.dtype, "sums")
            for i, _ in emit.spans(length * self.lanes, self.lanes):
                emit.store(sums, literal(0, self.dtype), i)
            x = emit.alloc(w.channels * self.rows * self.split * self.width, self.dtype, "xp")
            dy = emit.alloc(w.filters * w.spatial[0] * self.dy_width, self.dtype, "yp")
            with emit.loop(w.images, SERIAL, "n") as n, self.body.point():
                self._copy_x(x, n * w.groups + g)
                self._copy_dy(dy, n * w.groups + g)
                with emit.loop(w.filters, SERIAL, "o") as o, emit.loop(w.channels, SERIAL, "c") as c, self.body.point():
                    pair = emit.bind((o * w.channels + c) * self.taps, "pair")
                    if self.taps <= self.most:
                        self._add(
                            sums,
                            pair,
                            x,
                            c,
                            dy,
                            o,
                            literal(0, "i32"),
                            [divmod(t, w.kernel[1]) for t in range(self.taps)],
                        )
                    else:
                        with emit.loop(w.kernel[0], SERIAL, "r") as r:
                            for first in range(0, w.kernel[1], self.most):
                                chosen = [(0, s) for s in range(first, min(first + self.most, w.kernel[1]))]
                                self._add(sums, pair, x, c, dy, o, r, chosen)
            with (
                emit.loop(w.filters, SERIAL, "o") as o,
                emit.loop(w.channels, SERIAL, "c") as c,
                emit.loop(w.kernel[0], SERIAL, "r") as r,
                emit.loop(w.kernel[1], SERIAL, "s") as s,
                self.body.point(),
            ):
                line = emit.bind((((o * w.channels + c) * w.kernel[0] + r) * w.kernel[1] + s) * self.lanes, "line")
                half = self.lanes
                while half > 1:
                    half //= 2
                    with emit.loop(half, VECTOR, "l") as lane:
                        emit.store(
                            sums,
                            tirx.BufferLoad(sums, [line + lane]) + tirx.BufferLoad(sums, [line + (lane + half)]),
                            line + lane,
                        )
                self.body.finish({w.out: (tirx.BufferLoad(sums, [line]), w.place(g * w.filters + o, c, r, s))})

    def _copy_x(self, target: Buffer, group: Expr) -> None:
        w, emit = self.w, self.emit
        plane = self.rows * self.split * self.width
        for i, _ in emit.spans(w.channels * plane, self.lanes):
            emit.store(target, literal(0, self.dtype), i)
        with emit.loop(w.channels, SERIAL, "c") as c, emit.loop(w.sizes[0], SERIAL, "h") as h:
            source = emit.bind(((group * w.channels + c) * w.sizes[0] + h) * w.sizes[1], "source")
            line = emit.bind(c * plane + (h + w.low[0]) * (self.split * self.width), "line")
            for remainder in range(self.split):
                begin = (remainder - w.low[1]) % self.split
                count = ceil_div(w.sizes[1] - begin, self.split)
                at = remainder * self.width + (begin + w.low[1]) // self.split
                for v, _ in pieces(emit, max(count, 0), self.lanes):
                    emit.store(target, load(w.x, source + v * self.split + begin), line + at + v)

    def _copy_dy(self, target: Buffer, group: Expr) -> None:
        w, emit = self.w, self.emit
        with emit.loop(w.filters * w.spatial[0], SERIAL, "h") as h:
            source = emit.bind((group * (w.filters * w.spatial[0]) + h) * w.spatial[1], "source")
            for v, _ in pieces(emit, w.spatial[1], self.lanes):
                emit.store(target, load(w.dy, source + v), h * self.dy_width + v)
            for v in range(w.spatial[1], self.dy_width):
                emit.store(target, literal(0, self.dtype), h * self.dy_width + v)

    def _add(
        self, sums: Buffer, pair: Expr, x: Buffer, c: Expr, dy: Buffer, o: Expr, row: Expr, taps: list[tuple[int, int]]
    ) -> None:
        """Add an image to the sums of some taps, counted from kernel row `row`."""
        w, emit, lanes = self.w, self.emit, self.lanes
        accs = [emit.alloc(lanes, self.dtype, "acc") for _ in taps]
        for acc in accs:
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(acc, literal(0, self.dtype), lane)
        with emit.loop(w.spatial[0], SERIAL, "h") as h, emit.loop(self.dy_width // lanes, SERIAL, "v") as v:
            line = emit.alloc(lanes, self.dtype, "y")
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(line, tirx.BufferLoad(dy, [(o * w.spatial[0] + h) * self.dy_width + v * lanes + lane]), lane)
            top = emit.bind(
                (c * self.rows + h * w.strides[0] + row * w.dilations[0]) * (self.split * self.width) + v * lanes, "top"
            )
            for (r, s), acc in zip(taps, accs, strict=True):
                column = s * w.dilations[1]
                at = (
                    r * w.dilations[0] * self.split * self.width
                    + column % self.split * self.width
                    + column // self.split
                )
                with emit.loop(lanes, VECTOR, "l") as lane:
                    product = tirx.BufferLoad(x, [top + at + lane]) * tirx.BufferLoad(line, [lane])
                    emit.store(acc, tirx.BufferLoad(acc, [lane]) + product, lane)
        for (r, s), acc in zip(taps, accs, strict=True):
            slot = (pair + (row + r) * w.kernel[1] + s) * lanes
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(sums, tirx.BufferLoad(sums, [slot + lane]) + tirx.BufferLoad(acc, [lane]), slot + lane)
