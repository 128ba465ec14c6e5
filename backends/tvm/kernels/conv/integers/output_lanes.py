"""Exact convolutions of bytes less their zero points, with neighbouring outputs in lanes.

In: a `conv_bytes` whose weight has zero points that are known to be none. Out: loops

    pack weights             [group][panel of outputs][step][outputs], and the sum of each output's weights
    for plane of channels:   words of `depth` channels, with a border of zero points         [word][position]
    for chunk of positions, panel of outputs:
        for tile of positions:
            sums [positions, outputs] = 0
            for step (word of channels, tap):  += each position's word, moved by the tap, times words of the weight
            turned, so that positions are neighbours                                         [output][position]
        `Body.finish` on vectors of neighbouring positions

A position reads its word from any place, so none is computed in vain: neither borders, nor what fills up a vector, as
in convolution.py. Strides are steps from word to word. The price is that sums are turned.

Limits: a weight with zero points of its own, or gathered windows, are left to convolution.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, i32
from penstock.backends.tvm.kernels.tools.transpose import pieces, turn_rows
from penstock.ir.graph import Op

from .arithmetic import TASKS, byte_dot, kept
from .geometry import BytePlanes, chunks_of, whole_planes_of
from .packing import BytePacking, running


@dataclass(frozen=True)
class _Chunk:
    """Positions whose sums are kept together: the first row and column, and how many there are of each."""

    row: Expr
    column: Expr
    rows: int
    columns: int


class OutputLanes(BytePacking):
    """The emitter of the loops of one convolution."""

    def __init__(self, body: Body, op: Op) -> None:
        super().__init__(body, op)
        flat = (1, prod(self.outs)) if self.dense else ((1, *self.outs)[-2], self.outs[-1])
        self.chunks = chunks_of(*flat, self.lanes)
        self.vectors = min(2, ceil_div(self.filters, self.lanes))
        self.height = self.vectors * self.lanes
        self.outer = () if self.dense else self.outs[:-2]
        # Words from a position to the next one along the last two dimensions.
        walks = (1, *self.planes.walks)
        self.walk = (walks[-2] * self.planes.extents[-1], walks[-1])
        others = [other for other in body.group.ops if other is not op]
        self.merged = body.merged_from(op.outs[0].type.dims, others) <= 2

    def _planes(self) -> BytePlanes:
        return whole_planes_of(self.window, self.outs, self.channels, self.depth)

    def run(self) -> None:
        # A panel that is not full is read as if it were.
        self.prepare(weights_slack=self.height)
        emit, chunks = self.emit, self.chunks
        blocks = ceil_div(self.filters, self.height)
        counts = (self.images, self.groups, *self.outer, chunks.count)
        parts = min(blocks, ceil_div(TASKS, prod(counts)))
        work = self.op.outs[0].type.size * self.planes.steps // 4
        with emit.loop(prod(counts) * parts, parallel_if(self.body.machine, work), "t") as task, self.body.point():
            image, group, *outer, number, part = (emit.bind(i, "i") for i in unravel(task, (*counts, parts)))
            span = tuple(emit.bind(tirx.floordiv((part + i) * blocks, parts), "block") for i in (0, 1))
            place = (image, group, tuple(outer))
            row = number * chunks.shape[0] if chunks.by_rows else i32(0)
            column = i32(0) if chunks.by_rows else number * chunks.shape[1]
            kinds = [(shape, test) for shape, test, there in self._kinds(number) if there]
            for shape, condition in kinds:
                with ExitStack() as stack:
                    if len(kinds) > 1:
                        stack.enter_context(emit.when(condition))
                    stack.enter_context(self.body.point())
                    self._chunk(place, _Chunk(row, column, *shape), span)

    def _kinds(self, number: Expr) -> list[tuple[tuple[int, int], Expr, int]]:
        """Return the shapes of chunks, the condition that a chunk has one, and how many there are."""
        chunks = self.chunks
        return [
            (chunks.shape, number < chunks.whole, chunks.whole),
            (chunks.last, tirx.EQ(number, chunks.whole), chunks.rest),
        ]

    def _chunk(self, place: tuple[Expr, Expr, tuple[Expr, ...]], chunk: _Chunk, span: tuple[Expr, ...]) -> None:
        """Emit the panels of outputs from `span[0]` to `span[1]` at some positions."""
        emit, planes, (image, group, outer) = self.emit, self.planes, place
        plane = i32(0)
        for i, walk, extent in zip(outer, planes.walks, planes.extents, strict=False):
            plane = plane * extent + i * walk
        if len(planes.extents) > 1:
            plane = plane * planes.extents[-2]
        base = (image * self.groups + group) * self.image_words + plane * planes.extents[-1]
        start = emit.bind(base + chunk.row * self.walk[0] + chunk.column * self.walk[1], "start")
        pitch = ceil_div(chunk.rows * chunk.columns, self.lanes) * self.lanes + self.lanes
        done = emit.alloc(self.height * pitch, "i32", "done")
        with emit.loop(span[1] - span[0], SERIAL, "b") as block, self.body.point():
            first = emit.bind((span[0] + block) * self.height, "first")
            wide = emit.bind(tirx.min(i32(self.height), self.filters - first), "wide")
            panel = emit.bind((group * self.filters + first) * planes.steps, "panel")
            self._tiles(chunk, start, (panel, wide), done, pitch)
            with emit.loop(wide, SERIAL, "r") as r, self.body.point():
                self._finish(place, chunk, emit.bind(group * self.filters + first + r, "o"), done, r * pitch)

    def _tiles(self, chunk: _Chunk, start: Expr, panel: tuple[Expr, Expr], done: Buffer, pitch: int) -> None:
        """Emit the tiles of a chunk, in the order of their positions."""
        emit, (high, wide) = self.emit, self.chunks.tile
        for count, rows, begin in _parts(chunk.rows, high):
            with emit.loop(count, SERIAL, "y") as y, self.body.point():
                row = y * rows + begin
                for number, columns, first in _parts(chunk.columns, wide):
                    with emit.loop(number, SERIAL, "x") as x, self.body.point():
                        column = x * columns + first
                        at = emit.bind(start + row * self.walk[0] + column * self.walk[1], "at")
                        totals = self._add_up(at, (rows, columns), panel)
                        self._turn(totals, done, emit.bind(row * chunk.columns + column, "to"), pitch)

    def _add_up(self, start: Expr, shape: tuple[int, int], panel: tuple[Expr, Expr]) -> list[list[Buffer]]:
        """Emit the sums of a tile of positions: a buffer for each position and vector of outputs."""
        emit, lanes, taps, planes = self.emit, self.lanes, len(self.planes.offsets), self.planes
        every = tirx.Ramp(i32(0), 1, lanes)
        places = [y * self.walk[0] + x * self.walk[1] for y in range(shape[0]) for x in range(shape[1])]
        totals = [[emit.alloc(lanes, "i32", "acc") for _ in range(self.vectors)] for _ in places]
        for row in totals:
            for acc in row:
                emit.add(tirx.BufferStore(acc, tirx.Broadcast(i32(0), lanes), [every]))
        with emit.loop(planes.words, SERIAL, "w") as word, emit.loop(taps, SERIAL, "tap") as tap, self.body.point():
            at = start + word * planes.size
            if taps > 1:
                at = at + tirx.BufferLoad(self.offsets, [tap])
            at = emit.bind(at, "at")
            step = emit.bind(panel[0] + (word * taps + tap) * panel[1], "step")
            factors = [
                kept(emit, lanes, tirx.BufferLoad(self.weights, [tirx.Ramp(step + v * lanes, 1, lanes)]), "f")
                for v in range(self.vectors)
            ]
            for place, row in zip(places, totals, strict=True):
                data = kept(emit, lanes, tirx.Broadcast(tirx.BufferLoad(self.words, [at + place]), lanes), "x")
                for acc, factor in zip(row, factors, strict=True):
                    total = byte_dot(lanes, self.depth, tirx.BufferLoad(acc, [every]), data, factor)
                    emit.add(tirx.BufferStore(acc, total, [every]))
        return totals

    def _turn(self, totals: list[list[Buffer]], done: Buffer, to: Expr, pitch: int) -> None:
        """Store sums with positions as neighbours. What a vector holds beyond the tile is overwritten by later tiles,
        or lies behind all positions."""
        emit, lanes = self.emit, self.lanes
        every, none = tirx.Ramp(i32(0), 1, lanes), tirx.Broadcast(i32(0), lanes)
        for begin in range(0, len(totals), lanes):
            block = totals[begin : begin + lanes]
            for v in range(self.vectors):
                rows = [tirx.BufferLoad(row[v], [every]) for row in block] + [none] * (lanes - len(block))
                for j, column in enumerate(turn_rows(emit, "int32", lanes, lanes, rows)):
                    place = to + ((v * lanes + j) * pitch + begin)
                    emit.add(tirx.BufferStore(done, column, [tirx.Ramp(place, 1, lanes)]))

    def _finish(
        self, place: tuple[Expr, Expr, tuple[Expr, ...]], chunk: _Chunk, output: Expr, done: Buffer, at: Expr
    ) -> None:
        """Finish the sums of one output at the positions of a chunk."""
        emit, (image, _, outer) = self.emit, place
        less = emit.bind(self.zero * tirx.BufferLoad(self.weights, [output + self.sums_at]), "less")

        def finish(number: Expr, index: Index) -> None:
            value = tirx.BufferLoad(done, [at + number]) - less
            self.body.finish({self.op.outs[0]: (value, (image, output, *index))})

        if self.merged or self.dense:
            line = i32(0)
            for i, extent in zip(outer, self.outs, strict=False):
                line = line * extent + i
            height = 1 if self.dense or len(self.outs) == 1 else self.outs[-2]
            first = emit.bind((line * height + chunk.row) * self.outs[-1] + chunk.column, "first")
            for c, _ in pieces(emit, chunk.rows * chunk.columns, self.lanes):
                with self.body.point():
                    index = running(self.outs, first + c) if self.merged else unravel(first + c, self.outs)
                    finish(c, index)
            return
        with emit.loop(chunk.rows, SERIAL, "y") as y, self.body.point():
            for c, _ in pieces(emit, chunk.columns, self.lanes):
                with self.body.point():
                    rows = (chunk.row + y,) if len(self.outs) > 1 else ()
                    finish(y * chunk.columns + c, (*outer, *rows, chunk.column + c))


def _parts(total: int, size: int) -> list[tuple[int, int, int]]:
    """Cut a length into equal pieces and a smaller one: how many, how long, and where the first begins."""
    whole, odd = divmod(total, size)
    return [part for part in ((whole, size, 0), (1, odd, whole * size)) if part[0] and part[1]]
