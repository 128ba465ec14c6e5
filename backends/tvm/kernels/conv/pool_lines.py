"""The largest element of each window, by lines: along all dimensions but the last first, then along the last.

In: a `max_pool` whose windows lie close together. Out: loops

    for image, channel, row of results:
        line[column] = largest of the window's rows at that column          neighbours in lanes; a border of lowest
        with stride 2:  the line divides into its even and its odd columns
        result[column] = largest of the taps of the line                    neighbours in lanes

A row outside of the image is replaced by the nearest one, which lies in the same window. So each window has to reach
the image, and its taps have to be neighbours.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.rows.sums import LOWEST
from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, i32, literal
from penstock.backends.tvm.kernels.tools.transpose import pieces, separate_pairs
from penstock.ir.graph import Op
from penstock.ir.ops import Window, complete_attrs, ints, window_of
from penstock.ir.types import ITEM_BYTES


def pools_by_lines(op: Op) -> bool:
    """Return whether the kernel has a form for this operation."""
    if op.kind != "max_pool":
        return False
    window = window_of(complete_attrs(op), ints(op.attrs["window"]))
    if window.strides[-1] not in (1, 2) or any(d != 1 for d in window.dilations):
        return False
    return all(
        low < k and (out - 1) * s - low < size
        for k, s, low, out, size in zip(
            window.kernel, window.strides, window.low, op.outs[0].type.dims[2:], op.ins[0].type.dims[2:], strict=True
        )
    )


def emit_max_pool(body: Body, op: Op) -> None:
    """Emit a pool that `pools_by_lines`."""
    _LinePool(body, op).run()


class _LinePool:
    """The emitter of one pool."""

    def __init__(self, body: Body, op: Op) -> None:
        self.body, self.op, self.emit, self.x = body, op, body.emit, op.ins[0]
        self.dtype = self.x.type.dtype
        self.window: Window = window_of(complete_attrs(op), ints(op.attrs["window"]))
        self.sizes, self.outs = self.x.type.dims[2:], op.outs[0].type.dims[2:]
        self.stride, self.taps = self.window.strides[-1], self.window.kernel[-1]
        alone = len(body.group.ops) == 1 and body.is_stored(self.x)
        self.lanes = body.lanes * (max(4 // ITEM_BYTES[self.dtype], 1) if alone else 1)
        self.lowest = literal(LOWEST.get(self.dtype, -math.inf), self.dtype)

    def run(self) -> None:
        emit, (images, channels) = self.emit, self.x.type.dims[:2]
        rows = self.outs[:-1]
        kind = parallel_if(self.body.machine, self.op.outs[0].type.size * prod(self.window.kernel))
        with emit.loop(images * channels * prod(rows), kind, "r") as number, self.body.point():
            parts = unravel(number, (images, channels, *rows))
            image, channel, *row = (emit.bind(part, "i") for part in parts)
            line = self._line((image, channel), tuple(row))
            for column, _ in pieces(emit, self.outs[-1], self.lanes):
                with self.body.point():
                    value = tirx.BufferLoad(*self._tap(line, 0, column))
                    for tap in range(1, self.taps):
                        value = self.body.functions.larger(value, tirx.BufferLoad(*self._tap(line, tap, column)))
                    self.body.finish({self.op.outs[0]: (value, (image, channel, *row, column))})

    def _tap(self, line: tuple[Buffer, ...], tap: int, column: Expr) -> tuple[Buffer, list[Expr]]:
        return line[tap % self.stride], [column + tap // self.stride]

    def _line(self, plane: Index, row: Index) -> tuple[Buffer, ...]:
        """Emit the largest of each column of a window's rows; return the lines of its phases."""
        emit, low, size, lanes = self.emit, self.window.low[-1], self.sizes[-1], self.lanes
        needed = (self.outs[-1] - 1) * self.stride + self.taps
        length = ceil_div(needed, 2 * lanes) * 2 * lanes
        end = min(size, length - low)
        line = emit.alloc(length, self.dtype, "line")
        self._fill(line, 0, low)
        self._fill(line, low + end, length)
        for column, _ in pieces(emit, end, lanes):
            with self.body.point():
                emit.store(line, self._largest(plane, row, column), column + low)
        if self.stride == 1:
            return (line,)
        phases = tuple(emit.alloc(length // 2, self.dtype, "phase") for _ in range(2))
        with emit.loop(length // (2 * lanes), SERIAL, "p") as p:
            targets = [(phase, p * lanes) for phase in phases]
            separate_pairs(emit, lanes, (line, p * (2 * lanes)), targets)
        return phases

    def _fill(self, line: Buffer, start: int, stop: int) -> None:
        for column, _ in pieces(self.emit, stop - start, self.lanes):
            self.emit.store(line, self.lowest, column + start)

    def _largest(self, plane: Index, row: Index, column: Expr) -> Expr:
        """Return the largest element of the rows of a window, at a column of the image."""
        emit, window = self.emit, self.window
        if not row:
            return self.body.at(self.x, (*plane, column))
        total = emit.alloc(emit.width(), self.dtype, "total")
        emit.store(total, self.lowest, emit.lane())
        with ExitStack() as stack:
            tap = [stack.enter_context(emit.loop(k, SERIAL, "t")) for k in window.kernel[:-1]]
            stack.enter_context(self.body.point())
            place = []
            for r, t, s, low, size in zip(row, tap, window.strides, window.low, self.sizes, strict=False):
                place.append(tirx.max(tirx.min(r * s + t - low, i32(size - 1)), i32(0)))
            before = tirx.BufferLoad(total, [emit.lane()])
            value = self.body.at(self.x, (*plane, *place, column))
            emit.store(total, self.body.functions.larger(before, value), emit.lane())
        return tirx.BufferLoad(total, [emit.lane()])
