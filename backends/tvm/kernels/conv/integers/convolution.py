"""Exact convolutions of bytes less their zero points, with neighbouring positions in lanes.

In: a `conv_bytes`. Out: loops

    pack weights             [group][tile of outputs][step][outputs], and the sum of each output's weights
    for plane of channels:   words of `depth` channels, with a border of zero points   [phase][word][position]
    for tile of positions, tile of outputs:
        sums [outputs, positions] = 0
        for step (word of channels, tap):  += words of the plane, moved by the tap, times words of the weight
        `Body.finish` on vectors of neighbouring positions

With u = x as a number without sign, s = the weight as one with, and their zero points moved alike,

    sum (x - zero)(weight - zeros)  =  sum u s  -  zeros * sum u  -  zero * (sum s - terms * zeros)

No step saturates: one instruction adds up four products of bytes in 32 bits (AVX-512 VNNI), or two of 16-bit numbers.
A tap reads its plane from another place on, so a tile may have positions of several rows, and of the border between
them, which are left out. Strides divide a plane into phases, so that neighbours stay neighbours. Many phases, or one or
two channels, gather the words of every window instead; there is one tap then. output_lanes.py is the other way.

Limits: all planes are stored once before they are read; positions of a border between rows are computed in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, i32
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.graph import Op

from .arithmetic import TASKS, byte_dot, kept
from .geometry import tiles_of
from .packing import BytePacking, running

# Vector registers by lanes, and the most outputs of a tile.
_REGISTERS = {16: 31, 8: 15, 4: 15}
_MOST_ROWS = 12


@dataclass(frozen=True)
class _Tile:
    """A tile of positions: its first word, its first row and column, rows and columns, and vectors."""

    start: Expr
    row: Expr
    column: Expr
    shape: tuple[int, int]
    vectors: int


class PositionLanes(BytePacking):
    """The emitter of the loops of one convolution of bytes."""

    def __init__(self, body: Body, op: Op) -> None:
        super().__init__(body, op)
        out = op.outs[0]
        width, height = (prod(self.outs), 1) if self.dense else (self.outs[-1], prod(self.outs[-2:-1]))
        self.tiles = tiles_of(height, width, self.planes.extents[-1], self.lanes)
        self.outer = () if self.dense else self.outs[: -2 if self.tiles.by_rows else -1]
        free = _REGISTERS[self.lanes] - self.tiles.vectors - (1 if self.depth == 4 else 2)
        most = max(min(free // self.tiles.vectors, _MOST_ROWS), 1)
        self.height = ceil_div(self.filters, ceil_div(self.filters, most))
        others = [other for other in body.group.ops if other is not op]
        self.merged = self.dense and body.merged_from(out.type.dims, others) <= 2

    def run(self) -> None:
        # A tile reads whole vectors, also behind the last position.
        self.prepare(slack=self.tiles.vectors * self.lanes)
        self._products()

    # ------------------------------------------------------------------------------ products

    def _products(self) -> None:
        """Emit the sums of all tiles, shared by threads: by positions, and by outputs where these are few."""
        emit, tiles = self.emit, self.tiles
        blocks = ceil_div(self.filters, self.height)
        parts = tiles.whole + (1 if tiles.rest else 0)
        counts = (self.images, self.groups, *self.outer, parts)
        chunks = min(blocks, ceil_div(TASKS, prod(counts)))
        work = self.op.outs[0].type.size * self.planes.steps // 4
        with emit.loop(prod(counts) * chunks, parallel_if(self.body.machine, work), "t") as task, self.body.point():
            image, group, *outer, part, chunk = (emit.bind(i, "i") for i in unravel(task, (*counts, chunks)))
            span = tuple(emit.bind(tirx.floordiv((chunk + i) * blocks, chunks), "block") for i in (0, 1))
            base = (image * self.groups + group) * self.image_words
            line = i32(0)
            for i, extent in zip(outer, self.planes.extents, strict=False):
                line = line * extent + i
            if self.tiles.by_rows:
                line = line * self.planes.extents[-2]
            place = (image, group, tuple(outer), part)
            last_columns = tiles.columns if tiles.by_rows else tiles.rest
            last = (tiles.rest if tiles.by_rows else 1, last_columns)
            if not tiles.rest:
                self._tile(place, base, line, (tiles.rows, tiles.columns), span)
                return
            if tiles.whole:
                with emit.when(part < tiles.whole), self.body.point():
                    self._tile(place, base, line, (tiles.rows, tiles.columns), span)
                with emit.when(tirx.EQ(part, tiles.whole)), self.body.point():
                    self._tile(place, base, line, last, span)
                return
            self._tile(place, base, line, last, span)

    def _tile(
        self,
        place: tuple[Expr, Expr, tuple[Expr, ...], Expr],
        base: Expr,
        line: Expr,
        shape: tuple[int, int],
        span: tuple[Expr, ...],
    ) -> None:
        """Emit some outputs at a tile of positions: blocks of outputs from `span[0]` to `span[1]`."""
        emit, tiles, pitch = self.emit, self.tiles, self.planes.extents[-1]
        part = place[-1]
        row = part * tiles.rows if tiles.by_rows else i32(0)
        column = i32(0) if tiles.by_rows else part * tiles.columns
        start = emit.bind(base + (line + row) * pitch + column, "start") if not self.dense else emit.bind(base + column)
        vectors = ceil_div((shape[0] - 1) * pitch + shape[1], self.lanes)
        of_tile = _Tile(start, row, column, shape, vectors)
        sums = None
        if not self.symmetric:
            sums = emit.alloc(vectors * self.lanes, "i32", "sums")
            ones = i32(sum(1 << (self.bits * d) for d in range(self.depth)))
            totals = self._add_up(of_tile, 1, lambda k, r: ones)
            self._spill(totals, sums)
        whole, odd = divmod(self.filters, self.height)
        until = emit.bind(tirx.min(span[1], i32(whole)) - span[0], "until")
        with emit.loop(until, SERIAL, "b") as block, self.body.point():
            self._block(place, of_tile, (span[0] + block) * self.height, self.height, sums)
        if odd:
            with emit.when(span[1] > whole), self.body.point():
                self._block(place, of_tile, i32(whole * self.height), odd, sums)

    def _add_up(self, tile: _Tile, height: int, factor: Callable[[Expr, int], Expr]) -> list[list[Buffer]]:
        """Emit the sums of products of a tile with `height` weights of each step."""
        emit, lanes, taps, planes = self.emit, self.lanes, len(self.planes.offsets), self.planes
        totals = [[emit.alloc(lanes, "i32", "acc") for _ in range(tile.vectors)] for _ in range(height)]
        every = tirx.Ramp(i32(0), 1, lanes)
        for row in totals:
            for acc in row:
                emit.add(tirx.BufferStore(acc, tirx.Broadcast(i32(0), lanes), [every]))
        with emit.loop(planes.words, SERIAL, "w") as word, emit.loop(taps, SERIAL, "tap") as tap, self.body.point():
            at = tile.start + word * planes.size
            if taps > 1:
                at = at + tirx.BufferLoad(self.offsets, [tap])
            at = emit.bind(at, "at")
            step = emit.bind(word * taps + tap, "step")
            data = [
                kept(emit, lanes, tirx.BufferLoad(self.words, [tirx.Ramp(at + v * lanes, 1, lanes)]), "x")
                for v in range(tile.vectors)
            ]
            for r, row in enumerate(totals):
                weight = kept(emit, lanes, tirx.Broadcast(factor(step, r), lanes), "f")
                for acc, x in zip(row, data, strict=True):
                    emit.add(
                        tirx.BufferStore(
                            acc, byte_dot(lanes, self.depth, tirx.BufferLoad(acc, [every]), x, weight), [every]
                        )
                    )
        return totals

    def _spill(self, totals: list[list[Buffer]], buffer: Buffer) -> None:
        every, at = tirx.Ramp(i32(0), 1, self.lanes), 0
        for row in totals:
            for acc in row:
                place = tirx.Ramp(i32(at), 1, self.lanes)
                self.emit.add(tirx.BufferStore(buffer, tirx.BufferLoad(acc, [every]), [place]))
                at += self.lanes

    def _block(
        self,
        place: tuple[Expr, Expr, tuple[Expr, ...], Expr],
        tile: _Tile,
        first: Expr,
        height: int,
        sums: Buffer | None,
    ) -> None:
        """Emit a tile of outputs from `first` on, and finish them."""
        emit, lanes, pitch = self.emit, self.lanes, self.planes.extents[-1]
        image, group, outer, _ = place
        factors = emit.bind((group * self.filters + first) * self.planes.steps, "factors")
        totals = self._add_up(tile, height, lambda k, r: tirx.BufferLoad(self.weights, [factors + k * height + r]))
        width = tile.vectors * lanes
        done = emit.alloc(height * width, "i32", "tile")
        self._spill(totals, done)
        terms = self.channels * prod(self.window.kernel)
        with emit.loop(height, SERIAL, "r") as r, self.body.point():
            output = emit.bind(group * self.filters + first + r, "o")
            less = tirx.BufferLoad(self.weights, [output + self.sums_at])
            right = i32(0)
            if sums is not None:
                right = emit.bind(tirx.Cast("int32", self.body.at(self.zeros, (output,))) - self.moved, "right")
                less = less - right * terms
            less = emit.bind(self.zero * less, "less")
            with emit.loop(tile.shape[0], SERIAL, "y") as y, self.body.point():
                for c, _ in pieces(emit, tile.shape[1], lanes):
                    with self.body.point():
                        at = y * pitch + c
                        value = tirx.BufferLoad(done, [r * width + at]) - less
                        if sums is not None:
                            value = value - right * tirx.BufferLoad(sums, [at])
                        index = (image, output, *self._spatial(outer, tile.row + y, tile.column + c))
                        self.body.finish({self.op.outs[0]: (value, index)})

    def _spatial(self, outer: tuple[Expr, ...], row: Expr, column: Expr) -> Index:
        """Return the place of an output in its image."""
        if self.merged:
            return running(self.outs, column)
        if self.dense:
            return unravel(column, self.outs)
        return (*outer, row, column) if self.tiles.by_rows else (*outer, column)
