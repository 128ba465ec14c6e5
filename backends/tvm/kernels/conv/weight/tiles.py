"""The gradient of a convolution for its weight on tile registers (Intel AMX), in bf16 and, as parts of it, in f32
(tiles/registers.py).

In: as for direct.py, which serves all other machines and sizes. Out: loops

    for block of pairs of units:      (a sum over positions and images, cut so that packed operands stay
                                       in the second cache)
      for some strips of 32 channels: pack x
        for 32 filters:               pack dy, before all strips if x takes several rounds
          for strip, tap:             4 tiles of sums += 2 tiles of dy times 2 of x, for each step and pair of parts
          after the last block        turn sums of all taps into runs of the weight, and `Body.finish`

Each block has sums of its own, added in memory to those before. Lines, units and blocks, and their sizes, are defined
in lines.py.

A block of 32 filters or channels may have a number that is too large for parts, such as an infinity or a nan. Its sums
are then computed one by one, slowly, in f32.

Limits: direct.py handles few channels or filters (up to 64 with one tap, for which packing costs too much), and images
of fewer than 16 positions. A single image of one row leaves half of each word empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tiles.packing import STRIP, can_pack
from penstock.backends.tvm.kernels.tiles.registers import (
    LEFT_PLACES,
    ORDER,
    PARTS,
    RIGHT_PLACES,
    SIDE,
    WORDS,
    Registers,
)
from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, i32, literal, load
from penstock.backends.tvm.kernels.tools.transpose import pieces, transpose_block

from .direct import WeightGradient
from .lines import Axis, PackingPlan, find_plan, vector_cycles
from .packing import WeightPacking

_A_TILES, _B_TILES = 4, 6


def plan_tiles(body: Body, w: WeightGradient) -> PackingPlan | None:
    """Plan a gradient on tiles; None if the machine has none, or vectors are faster."""
    if not can_pack(body, w.out):
        return None
    axes = [
        Axis(size, out, kernel, stride, dilation, low)
        for size, out, kernel, stride, dilation, low in zip(
            w.sizes, w.spatial, w.kernel, w.strides, w.dilations, w.low, strict=True
        )
    ]
    plan = find_plan(axes[0], axes[1], w.images, w.filters, w.channels, PARTS[w.out.type.dtype])
    vectors = vector_cycles((w.filters, w.channels), w.spatial, w.images, prod(w.kernel))
    return plan if plan is not None and plan.cycles < vectors else None


def emit_weight_tiles(body: Body, w: WeightGradient, plan: PackingPlan) -> None:
    _WeightTiles(body, w, plan).run()


@dataclass(frozen=True)
class _PackedOperands:
    """Packed dy of 32 filters and x of 32 channels: words, and the positions in them; `filters` and `channels` are the
    first ones. `large` is a flag that tiles cannot compute them."""

    dy: Buffer
    dy_at: Expr
    x: Buffer
    x_at: Expr
    group: Expr
    filters: Expr
    channels: Expr
    rows: int
    columns: int
    block: Expr
    large: Expr | None
    sums: Buffer
    line: Buffer


class _WeightTiles:
    """The emitter of the gradient on tile registers."""

    def __init__(self, body: Body, w: WeightGradient, plan: PackingPlan) -> None:
        self.body, self.w, self.emit, self.layout, self.strips = body, w, body.emit, plan.layout, plan.strips
        self.packing = WeightPacking(body, w, plan.layout)
        self.registers = Registers(body.emit)
        self.parts = self.packing.parts
        self.taps = prod(w.kernel)
        self.row_strips, self.column_strips = ceil_div(w.filters, STRIP), ceil_div(w.channels, STRIP)
        self.rounds = ceil_div(self.column_strips, self.strips)
        self.last = plan.layout.blocks - 1
        self.partial: Buffer | None = None

    def run(self) -> None:
        emit, w, packing, layout = self.emit, self.w, self.packing, self.layout
        self.kind = parallel_if(self.body.machine, w.out.type.size * w.images * prod(w.spatial) // 8)
        packing.prepare()
        x = emit.alloc(2 * self.strips * packing.x_words, "i32", "xp")
        for i, _ in emit.spans(2 * self.strips * packing.x_words, SIDE):
            emit.store(x, i32(0), i)
        if self.last:
            self.partial = emit.alloc(
                self.row_strips * self.column_strips * self.taps * STRIP * STRIP, "f32", "partial"
            )
        with emit.loop(w.groups, SERIAL, "g") as g, self.body.point():
            flags = (emit.alloc(n, "i32", "large") for n in (self.row_strips, 2 * self.column_strips))
            self.large_dy, self.large_x = flags
            for flag, count in ((self.large_dy, self.row_strips), (self.large_x, 2 * self.column_strips)):
                with emit.loop(count, SERIAL, "f") as f:
                    emit.store(flag, i32(0), f)
            with emit.loop(layout.blocks, SERIAL, "q") as q, self.body.point():
                self._block(g, q, x)

    def _block(self, group: Expr, q: Expr, x: Buffer) -> None:
        emit, packing, w = self.emit, self.packing, self.w
        dy: Buffer | None = None
        if self.rounds > 1:
            dy = emit.alloc(self.row_strips * packing.dy_words, "i32", "dyp")
            self._each_row_strip(
                lambda number, height: self._pack_dy(dy, number * packing.dy_words, group, number, height, q)
            )
        tiles = ceil_div(w.channels, SIDE)
        with emit.loop(self.rounds, SERIAL, "c") as c, self.body.point():
            first = c * (2 * self.strips)
            count = tirx.min(tiles - first, 2 * self.strips) if self.rounds > 1 else tiles
            with emit.loop(count, self.kind, "t") as t, self.body.point():
                self._note(self.large_x, first + t, packing.x(x, t * packing.x_words, group, first + t, q))

            def rows(number: Expr, height: int) -> None:
                words, at = dy, number * packing.dy_words
                if words is None:
                    words, at = emit.alloc(packing.dy_words, "i32", "dyp"), i32(0)
                    self._pack_dy(words, at, group, number, height, q)
                sums = emit.alloc(self.taps * STRIP * STRIP, "f32", "sums")
                line = emit.alloc(STRIP * self.taps + SIDE, "f32", "run")

                def strip(s: Expr, width: int) -> None:
                    place = c * self.strips + s
                    large = None
                    if self.parts > 1:
                        flags = [tirx.BufferLoad(self.large_dy, [number])]
                        flags += [tirx.BufferLoad(self.large_x, [place * 2 + i]) for i in range(2)]
                        large = emit.bind(flags[0] + flags[1] + flags[2], "large")
                    at_x = emit.bind(s * (2 * packing.x_words), "x")
                    operands = _PackedOperands(
                        dy=words,
                        dy_at=emit.bind(at, "a"),
                        x=x,
                        x_at=at_x,
                        group=group,
                        filters=emit.bind(number * STRIP, "o"),
                        channels=emit.bind(place * STRIP, "c"),
                        rows=height,
                        columns=width,
                        block=q,
                        large=large,
                        sums=sums,
                        line=line,
                    )
                    self._strip(operands)

                with self.registers.configured():
                    whole, tail = divmod(w.channels, STRIP)
                    if whole:
                        here = tirx.min(whole - c * self.strips, self.strips) if self.rounds > 1 else whole
                        with emit.loop(here, SERIAL, "s") as s, self.body.point():
                            strip(s, STRIP)
                    if tail:
                        with self._when(c, self.rounds - 1), self.body.point():
                            strip(whole - c * self.strips, tail)

            self._each_row_strip(rows)

    @contextmanager
    def _when(self, value: Expr, last: int) -> Iterator[None]:
        """Open a block for the last turn of a loop, or for the only one."""
        if last == 0:
            yield
            return
        with self.emit.when(tirx.EQ(value, last)):
            yield

    def _each_row_strip(self, action: Callable[[Expr, int], None]) -> None:
        """Call action(number of the strip, filters in it) for every strip."""
        whole, tail = divmod(self.w.filters, STRIP)
        with self.emit.loop(whole, self.kind, "f") as number, self.body.point():
            if whole:
                action(number, STRIP)
        if tail:
            with self.emit.loop(1), self.body.point():
                action(i32(whole), tail)

    def _note(self, flags: Buffer, number: Expr, large: Expr | None) -> None:
        if large is not None:
            self.emit.store(flags, tirx.BufferLoad(flags, [number]) | large, number)

    def _pack_dy(self, words: Buffer, at: Expr, group: Expr, number: Expr, height: int, block: Expr) -> None:
        self._note(self.large_dy, number, self.packing.dy(words, at, group, number * STRIP, height, block))

    # ------------------------------------------------------------------------------ sums

    def _strip(self, o: _PackedOperands) -> None:
        """Sum and finish all taps of 32 filters and 32 channels."""
        emit = self.emit
        with emit.loop(self.taps, SERIAL, "t") as tap, self.body.point():
            self._tap(o, tap)
        self._add_up(o)
        with self._when(o.block, self.last):
            if o.large is not None:
                with emit.when(tirx.NE(o.large, 0)), self.body.point():
                    self._plain_sums(o)
            with emit.loop(o.rows, SERIAL, "r") as r, self.body.point():
                self._finish(o, r)

    def _tap(self, o: _PackedOperands, tap: Expr) -> None:
        emit, registers, layout, packing, parts = self.emit, self.registers, self.layout, self.packing, self.parts
        down, across = ceil_div(o.rows, SIDE), ceil_div(o.columns, SIDE)
        sums = [(r, c) for r in range(down) for c in range(across)]
        for r, c in sums:
            registers.zero(2 * r + c)
        first = emit.bind(o.x_at + tirx.BufferLoad(packing.taps, [tap]) * SIDE, "x")
        with emit.loop(layout.segments, SERIAL, "j") as j, emit.loop(layout.steps, SERIAL, "s") as s:
            dy = emit.bind(o.dy_at + (j * layout.steps + s) * (2 * parts * WORDS), "dy")
            x = emit.bind(first + (j * layout.x_pitch + s * SIDE) * SIDE, "x")
            before: tuple[int, int] | tuple[()] = ()
            for left, right in ORDER[parts]:
                if not before or right != before[1]:
                    for c in range(across):
                        registers.load(
                            _B_TILES + c, o.x, x + (c * packing.x_words + RIGHT_PLACES[parts][right] * packing.x_part)
                        )
                for r in range(down):
                    if not before or left != before[0]:
                        registers.load(_A_TILES + r, o.dy, dy + (r * parts + LEFT_PLACES[parts][left]) * WORDS)
                    for c in range(across):
                        registers.multiply(2 * r + c, _A_TILES + r, _B_TILES + c)
                before = left, right
        for r, c in sums:
            registers.store(2 * r + c, o.sums, tap * (STRIP * STRIP) + (r * STRIP + c) * SIDE, 4 * STRIP)

    def _add_up(self, o: _PackedOperands) -> None:
        """Add the sums of this block to those of blocks before. Each block has its own sums, so that long ones are not
        rounded at every step."""
        emit, size = self.emit, self.taps * STRIP * STRIP
        if self.partial is None:
            return
        strip = tirx.floordiv(o.filters, STRIP) * self.column_strips + tirx.floordiv(o.channels, STRIP)
        kept = emit.bind(strip * size, "kept")

        def add(target: Buffer, start: Expr, with_kept: bool) -> None:
            for i, _ in emit.spans(size, SIDE):
                total = tirx.BufferLoad(o.sums, [i])
                emit.store(target, total + tirx.BufferLoad(self.partial, [kept + i]) if with_kept else total, start + i)

        with emit.when(tirx.EQ(o.block, 0)):
            add(self.partial, kept, with_kept=False)
        with emit.when(tirx.all(o.block > 0, o.block < self.last)):
            add(self.partial, kept, with_kept=True)
        with emit.when(tirx.EQ(o.block, self.last)):
            add(o.sums, i32(0), with_kept=True)

    def _plain_sums(self, o: _PackedOperands) -> None:
        """Compute the sums without tiles, over all positions of all images, one multiply-add after the other."""
        emit, w = self.emit, self.w
        (height, width), (rows, columns) = w.spatial, w.sizes
        with (
            emit.loop(w.kernel[0], SERIAL, "r") as r,
            emit.loop(w.kernel[1], SERIAL, "s") as s,
            emit.loop(o.rows, SERIAL, "i") as i,
            emit.loop(o.columns, SERIAL, "c") as c,
            self.body.point(),
        ):
            total = emit.alloc(1, "f32", "total")
            emit.store(total, literal(0, "f32"), i32(0))
            with (
                emit.loop(w.images, SERIAL, "n") as n,
                emit.loop(height, SERIAL, "y") as y,
                emit.loop(width, SERIAL, "v") as v,
            ):
                dy = (((n * w.groups + o.group) * w.filters + o.filters + i) * height + y) * width + v
                row = emit.bind(y * w.strides[0] + r * w.dilations[0] - w.low[0], "row")
                column = emit.bind(v * w.strides[1] + s * w.dilations[1] - w.low[1], "column")
                inside = tirx.all(row >= 0, row < rows, column >= 0, column < columns)
                near = tirx.max(tirx.min(row, rows - 1), 0) * columns + tirx.max(tirx.min(column, columns - 1), 0)
                x = ((n * w.groups + o.group) * w.channels + o.channels + c) * (rows * columns) + near
                product = load(w.dy, dy) * tirx.Select(inside, load(w.x, x), literal(0, "f32"))
                emit.store(total, tirx.BufferLoad(total, [i32(0)]) + product, i32(0))
            place = ((r * w.kernel[1] + s) * STRIP + i) * STRIP + c
            emit.store(o.sums, tirx.BufferLoad(total, [i32(0)]), place)

    # ------------------------------------------------------------------------------ results

    def _finish(self, o: _PackedOperands, r: Expr) -> None:
        """Finish one filter, whose channels with their taps are neighbours in the weight."""
        w, taps, width = self.w, self.taps, self.w.kernel[1]
        source, start = o.sums, r * STRIP
        if taps > 1:
            self._turn(o, r)
            source, start = o.line, i32(0)
        for i, _ in pieces(self.emit, o.columns * taps, SIDE):
            with self.body.point():
                value = tirx.BufferLoad(source, [start + i])
                channel, tap = tirx.floordiv(i, taps), tirx.floormod(i, taps)
                index = w.place(
                    o.group * w.filters + o.filters + r,
                    o.channels + channel,
                    tirx.floordiv(tap, width),
                    tirx.floormod(tap, width),
                )
                self.body.finish({w.out: (value, index)})

    def _turn(self, o: _PackedOperands, r: Expr) -> None:
        """Transpose the sums of one filter, [taps, channels], into a line [channels, taps]."""
        emit, taps = self.emit, self.taps
        tail = taps % SIDE
        # A vector with fewer taps than lanes reaches over what comes behind: it is written first.
        begins = ([taps - tail] if tail else []) + list(range(0, taps - tail, SIDE))
        with emit.loop(ceil_div(o.columns, SIDE), SERIAL, "h") as h, self.body.point():
            for begin in begins:
                starts = [(min(begin + t, taps - 1) * STRIP + r) * STRIP + h * SIDE for t in range(SIDE)]
                for c, vector in enumerate(transpose_block(emit, "f32", SIDE, SIDE, o.sums, starts)):
                    emit.add(tirx.BufferStore(o.line, vector, [tirx.Ramp((h * SIDE + c) * taps + begin, 1, SIDE)]))
