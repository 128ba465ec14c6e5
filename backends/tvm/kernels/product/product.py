"""Blocked matrix products, with packed panels of both operands and a register tile of accumulators.

In: accessors a(batch, i, k) and b(batch, k, j), and a function that places element (batch, i, j) in the result.
Accessors may read through any layout operation: a transposed, split or sliced operand costs nothing but the order of a
packing loop. Out: loops

    for rows block, k block:  pack A [rows/mi, k, mi]     (only when A is not read along k and several panels read it)
      for column panel:
                              pack B [k, nj]              (squares are transposed in registers where B lies along k)
        for row tile:         accumulators [mi, nj] = sum over k of A column * B row
                              `Body.finish` for each vector

Limits of the speed: a step along k needs a row of the panel, nj elements, from the second cache, and mi elements of A
from the first. These are in time for a tile of 6x4 vectors. Copying a panel takes as long as twelve rows of A keep a
tile busy. So where B lies along j, the first tile of a panel reads B itself and leaves the panel behind: it would wait
for memory either way. A packed block of A is at most 1 MiB, half of the second cache. Short sums store more than they
compute. Up to 256 steps the lines of the result are prefetched during the steps. From 512 on that costs more than it
gives, unless the result is added to a variable, which is read there (up to 1024). Products of few rows have loops of
their own, in product_few.py.

Ragged sizes: the last rows get a tile of just that many rows. A last panel of less than half a vector has loops of its
own, in product_narrow.py. Any other last panel is padded with zeros to whole vectors. Its columns are finished one by
one from a copy of the tile, because indexing accumulators by a variable would force them out of registers.

Long sums (k above 4096) are split into blocks of at most 1024, with partial sums in memory, so that blocks of both
operands stay in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tiles import product as tile_product
from penstock.backends.tvm.kernels.tools.body import BIJECTIONS, Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, bound_index, linear
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, compute_dtype, literal
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.backends.tvm.kernels.tools.transpose import transpose_block
from penstock.ir.graph import slot_of
from penstock.ir.types import ITEM_BYTES

from .few_rows import DOT_ROWS, SHORT_K, STREAM_COLUMNS, emit_dots, emit_short, emit_streams, has_few_rows
from .narrow_rest import Narrow, steps_together

_LONGEST_K = 4096
_K_BLOCK = 1024
# A packed block of A.
_A_BYTES = 1 << 20
# Tiles of A packed side by side, so that the lines they share are read once.
_PACKED_TOGETHER = 8
# Steps along k in one turn of the inner loop. Four are no faster, and take twice as long to compile.
_UNROLLED = 2
_LINE_BYTES = 64
# Parallel loops should have so many turns, and a turn this many rows at least.
_TASKS = 4
_TASK_ROWS = 128
# Up to so many steps along k, a tile asks beforehand for the lines it will be stored to, or added to.
_SHORT_K, _SHORT_K_ADDED = 256, 1024
# ... if the result is larger than this, half of the second cache.
_NEAR_BYTES = 1 << 20

# ---------------------------------------------------------------------------------------- the loops


@dataclass(frozen=True)
class _ProductBlock:
    """A block of rows, start .. start + rows, and of k, k_from .. k_from + k_size, done in one pass over the columns.

    With `first` given, sums are left in `partial`, added to those there unless `first` holds. Without it, they are
    finished."""

    lead: Index
    start: Expr
    rows: int
    k_from: Expr
    k_size: int
    partial: Buffer | None = None
    first: object = None
    packed: Buffer | None = None


@dataclass(frozen=True)
class _ProductPanel:
    """A packed panel of B [k, columns], which begins at element `at` of a buffer. With `fill`, the tile packs it while
    it reads B in place."""

    packed: Buffer
    at: Expr | int = 0
    fill: bool = False


@dataclass(frozen=True)
class _ProductTile:
    """A register tile: `height` rows from row `at` of a block on, times `columns` columns from `j` on, in vectors of
    `lanes`."""

    block: _ProductBlock
    at: Expr
    height: int
    panel: _ProductPanel | None
    j: Expr
    columns: int
    lanes: int

    @property
    def width(self) -> int:
        """Columns, rounded up to whole vectors."""
        return ceil_div(self.columns, self.lanes) * self.lanes

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The vectors of a row, (first column, size). Without a padded panel, the last columns are taken one by one."""
        if self.panel is not None:
            return [(v * self.lanes, self.lanes) for v in range(ceil_div(self.columns, self.lanes))]
        vectors = self.columns // self.lanes
        single = range(vectors * self.lanes, self.columns)
        return [*((v * self.lanes, self.lanes) for v in range(vectors)), *((c, 1) for c in single)]

    @property
    def row(self) -> Expr:
        """The first row, counted in the whole product."""
        return self.block.start + self.at


class _TiledProduct:
    """Emits the loops of one product."""

    def __init__(self, body: Body, p: Product) -> None:
        self.body, self.p, self.emit = body, p, body.emit
        self.dtype = compute_dtype(p.out.type.dtype)
        self.lanes = max(body.lanes * 4 // ITEM_BYTES[self.dtype], 1)
        machine = body.machine
        sums = machine.product_rows * machine.product_vectors
        single = p.m <= sums // 2
        # A few rows all go into one tile, so that B is read once and need not be packed.
        self.rows = p.m if single else machine.product_rows
        self.vectors = min(sums // max(p.m, 1), 8) if single else machine.product_vectors
        self.vectors = min(self.vectors, ceil_div(p.n, self.lanes))
        self.width = self.vectors * self.lanes
        self.k_blocks = ceil_div(p.k, _K_BLOCK) if p.k > _LONGEST_K else 1
        self.k_size = ceil_div(p.k, self.k_blocks)
        # Packing A pays when several panels read it. One or two panels read its rows in place, if the rows of a tile
        # are neighbours.
        self.pack_a = not p.a_along_k and not (p.a_along_i and p.n <= 2 * self.width)
        self.pack_b = not single or not p.b_along_j
        # B is packed by the first row tile of each panel, which waits for B anyway.
        self.pack_first = self.pack_b and p.b_along_j
        most = max(_A_BYTES // (ITEM_BYTES[self.dtype] * max(self.k_size, 1)) // self.rows * self.rows, self.rows)
        blocks = ceil_div(p.m, most) if self.pack_a else 1
        if prod(p.batch) == 1 and ceil_div(p.n, self.width) < _TASKS and p.m >= _TASKS * _TASK_ROWS:
            # Too few panels for threads to share.
            blocks = max(blocks, _TASKS)
        self.row_block = self._row_share(blocks) if blocks > 1 else p.m
        # The packed tiles of A are copied in vectors that reach past a row of the tile into the next, which is written
        # later.
        self.reach = 1 << (self.rows - 1).bit_length() if p.a_along_i and self.rows > 1 else self.rows
        self.zero = literal(0, self.dtype)
        # Steps along k that the last columns take at once (product_narrow.py).
        self.steps = 1
        if self.k_blocks == 1 and self.pack_b and not single:
            self.steps = steps_together(body, p, p.n % self.width, self.dtype, self.lanes)
        # All panels of B, if they were packed before the kernel runs.
        self.ready: Buffer | None = None
        self.line = max(_LINE_BYTES // ITEM_BYTES[p.out.type.dtype], 1)
        # A short epilogue is done on the registers, in unrolled code. Else loops go through a copy of the tile.
        self.light = len(body.group.ops) <= 2

    def _row_share(self, blocks: int) -> int:
        """Choose the rows of a block so that there are at least so many blocks, and no rows left over if possible."""
        most = max(self.p.m // blocks // self.rows * self.rows, self.rows)
        return next((rows for rows in range(most, most // 2, -self.rows) if self.p.m % rows == 0), most)

    def run(self) -> None:
        p, emit = self.p, self.emit
        batches = prod(p.batch)
        work = batches * p.m * p.n * max(p.k, 1)
        if self.pack_b and batches == 1 and p.op is not None:
            self.ready = self.body.packed_ahead(p.op, p.k * self._padded(p.n), self.dtype, self._fill)
        whole, tail = divmod(p.m, self.row_block)
        if batches > 1:
            with emit.loop(batches, parallel_if(self.body.machine, work // 8), "b") as b:
                self._row_blocks(bound_index(emit, b, p.batch, "b"), whole, tail, SERIAL)
        else:
            kind = parallel_if(self.body.machine, work // 8)
            self._row_blocks((literal(0, "i32"),) * len(p.batch), whole, tail, kind)

    def _padded(self, columns: int) -> int:
        return ceil_div(columns, self.lanes) * self.lanes

    def _fill(self, packed: Buffer) -> None:
        """Pack all of B: for each block of k the panels, where `_panel` reads them."""
        p, emit, width = self.p, self.emit, self.width
        panels, tail = divmod(p.n, width)
        for q in range(self.k_blocks):
            k_from = q * self.k_size
            block = _ProductBlock(
                (literal(0, "i32"),) * len(p.batch), literal(0, "i32"), p.m, k_from, min(self.k_size, p.k - k_from)
            )
            with emit.loop(panels, parallel_if(self.body.machine, p.n * p.k), "jo") as jo, self.body.point():
                self._pack_b(block, jo * width, width, _ProductPanel(packed, self._place(block, jo * width)))
            if tail:
                with self.body.point():
                    j = literal(panels * width, "i32")
                    if self.steps > 1:
                        self._narrow(block, j, tail, packed, self._place(block, j)).pack()
                        continue
                    self._pack_b(block, j, tail, _ProductPanel(packed, self._place(block, j)))

    def _place(self, block: _ProductBlock, j: Expr) -> Expr:
        """Return the position of the panel at column j among the panels of all of B."""
        return block.k_from * self._padded(self.p.n) + j * block.k_size

    def _row_blocks(self, lead: Index, whole: int, tail: int, kind: object) -> None:
        # Threads share the blocks of rows, with all that is packed for them, if there are enough. Else they share the
        # panels of each.
        shared = whole >= _TASKS
        with self.emit.loop(whole, kind if shared else SERIAL, "im") as im, self.body.point():
            start = im * self.row_block if whole > 1 else literal(0, "i32")
            self._row_block(lead, start, self.row_block, SERIAL if shared else kind)
        if tail:
            with self.body.point():
                self._row_block(lead, literal(whole * self.row_block, "i32"), tail, kind)

    def _row_block(self, lead: Index, start: Expr, rows: int, kind: object) -> None:
        emit = self.emit
        if self.k_blocks == 1:
            self._panels(_ProductBlock(lead, start, rows, 0, self.k_size), kind)
            return
        partial = emit.alloc(rows * self.p.n, self.dtype, "partial")
        last = self.p.k - (self.k_blocks - 1) * self.k_size
        with emit.loop(self.k_blocks - 1, SERIAL, "q") as q, self.body.point():
            first = tirx.EQ(q, 0) if self.k_blocks > 2 else True
            self._panels(_ProductBlock(lead, start, rows, q * self.k_size, self.k_size, partial, first), kind)
        with self.body.point():
            self._panels(_ProductBlock(lead, start, rows, (self.k_blocks - 1) * self.k_size, last, partial), kind)

    def _panels(self, block: _ProductBlock, kind: object) -> None:
        """Emit all columns of a block."""
        emit = self.emit
        if self.pack_a:
            block = replace(block, packed=self._pack_a(block))
        panels, tail = divmod(self.p.n, self.width)
        if panels:
            with emit.loop(panels, kind, "jo") as jo, self.body.point():
                self._panel(block, jo * self.width, self.width)
        if tail:
            with emit.loop(1), self.body.point():
                self._panel(block, literal(panels * self.width, "i32"), tail)

    def _panel(self, block: _ProductBlock, j: Expr, columns: int) -> None:
        """Emit some columns of all rows of a block. A whole panel of B that lies along j is packed by the first
        tile."""
        if columns < self.width and self.steps > 1:
            self._narrow_panel(block, j, columns)
            return
        emit, height = self.emit, self._height(block, columns)
        count, odd = divmod(block.rows, height)
        first = 0
        panel: _ProductPanel | None = None
        if self.ready is not None:
            panel = _ProductPanel(self.ready, emit.bind(self._place(block, j), "at"))
        elif self.pack_first and columns == self.width:
            panel = _ProductPanel(emit.alloc(block.k_size * columns, self.dtype, "bp"))
            with self.body.point():
                # The lower tile at the end, if there is one: that saves code.
                at = literal(count * height if odd else 0, "i32")
                self._tile(_ProductTile(block, at, odd or height, replace(panel, fill=True), j, columns, self.lanes))
            first, odd = (0 if odd else 1), 0
        elif self.pack_b:
            panel = _ProductPanel(emit.alloc(block.k_size * self._padded(columns), self.dtype, "bp"))
            self._pack_b(block, j, columns, panel)
        with emit.loop(count - first, SERIAL, "io") as io, self.body.point():
            self._tile(
                _ProductTile(block, (io + first if first else io) * height, height, panel, j, columns, self.lanes)
            )
        if odd:
            with self.body.point():
                self._tile(_ProductTile(block, literal(count * height, "i32"), odd, panel, j, columns, self.lanes))

    def _narrow(self, block: _ProductBlock, j: Expr, columns: int, packed: Buffer, at: Expr | int = 0) -> Narrow:
        return Narrow(self.body, self.p, block.lead, j, columns, self.dtype, self.lanes, self.steps, packed, at)

    def _narrow_panel(self, block: _ProductBlock, j: Expr, columns: int) -> None:
        """Emit the last columns, where they are few."""
        if self.ready is not None:
            panel = self._narrow(block, j, columns, self.ready, self.emit.bind(self._place(block, j), "at"))
        else:
            size = (self.p.k // self.steps + self.p.k % self.steps) * self.lanes
            panel = self._narrow(block, j, columns, self.emit.alloc(size, self.dtype, "bp"))
            panel.pack()
        panel.rows(
            block.start, block.rows, max(self.body.machine.product_rows * self.body.machine.product_vectors // 2, 1)
        )

    def _height(self, block: _ProductBlock, columns: int) -> int:
        """Choose the rows of a tile: more for few columns, so that as many sums are in flight. Packed tiles of A fix
        them."""
        vectors = ceil_div(columns, self.lanes)
        if block.packed is not None or vectors >= self.vectors or not self.pack_b:
            return self.rows
        return max(min(self.rows * self.vectors // vectors, block.rows), 1)

    # ------------------------------------------------------------------------------ packing

    def _tile_size(self, k_size: int) -> int:
        """Return the elements from one packed tile of A to the next, with room for vectors that reach past the last
        row."""
        return k_size * self.rows + self.reach - self.rows

    def _pack_a(self, block: _ProductBlock) -> Buffer:
        """Pack a block of A, [tiles, k, mi]: all full row tiles, then the rows left over, in the same layout."""
        emit, mi, a = self.emit, self.rows, self.p.a
        size = self._tile_size(block.k_size)
        packed = emit.alloc(ceil_div(block.rows, mi) * size, self.dtype, "ap")
        count, odd = divmod(block.rows, mi)
        # A vector may read past the last row of its tile, not past the last row of A.
        safe = max((block.rows - self.reach) // mi + 1, 0) if self.reach > mi else count

        def copy(io: Expr, k: Expr, height: int, *, whole: bool) -> None:
            if whole:
                with emit.loop(self.reach, VECTOR, "ii") as ii, self.body.point():
                    emit.store(
                        packed, a(block.lead, block.start + io * mi + ii, block.k_from + k), io * size + k * mi + ii
                    )
                return
            for r in range(height):
                with self.body.point():
                    emit.store(
                        packed, a(block.lead, block.start + io * mi + r, block.k_from + k), io * size + k * mi + r
                    )

        vectors = self.p.a_along_i and mi > 1
        together = _PACKED_TOGETHER if vectors else 1
        groups, left = divmod(safe if vectors else count, together)
        with emit.loop(groups, SERIAL, "ig") as ig, emit.loop(block.k_size, SERIAL, "k") as k:
            for t in range(together):
                copy(ig * together + t, k, mi, whole=vectors)
        with emit.loop(left, SERIAL, "io") as io, emit.loop(block.k_size, SERIAL, "k") as k:
            copy(io + groups * together, k, mi, whole=vectors)
        for io in range(groups * together + left, count):
            with emit.loop(block.k_size, SERIAL, "k") as k:
                copy(literal(io, "i32"), k, mi, whole=False)
        if odd:
            with emit.loop(block.k_size, SERIAL, "k") as k:
                copy(literal(count, "i32"), k, odd, whole=False)
        return packed

    def _pack_b(self, block: _ProductBlock, j: Expr, columns: int, panel: _ProductPanel) -> None:
        """Pack a panel of B, [k, columns], with columns rounded up to whole vectors and padded with zeros."""
        emit, p, lanes, k_size = self.emit, self.p, self.lanes, block.k_size
        whole, tail = divmod(columns, lanes)
        width = ceil_div(columns, lanes) * lanes
        packed, at = panel.packed, panel.at
        locate = p.b_address if p.b_along_k else None
        turned = k_size // lanes * lanes if locate is not None else 0
        if locate is not None:
            with (
                emit.loop(whole if turned else 0, SERIAL, "v") as v,
                emit.loop(turned // lanes, SERIAL, "k") as k,
                self.body.point(),
            ):
                addresses = [locate(block.lead, block.k_from + k * lanes, j + (v * lanes + r)) for r in range(lanes)]
                places = [self.body.memory(address) for address in addresses if address is not None]
                turned_rows = transpose_block(emit, self.dtype, lanes, lanes, places[0][0], [at for _, at in places])
                for r, row in enumerate(turned_rows):
                    emit.store(packed, row, tirx.Ramp(at + (k * lanes + r) * width + v * lanes, 1, lanes))
        with emit.loop(k_size - turned if whole else 0, SERIAL, "k") as k:
            for v in range(whole):
                with emit.loop(lanes, VECTOR, "ji") as ji, self.body.point():
                    emit.store(
                        packed,
                        p.b(block.lead, block.k_from + k + turned, j + (v * lanes + ji)),
                        at + (k + turned) * width + (v * lanes + ji),
                    )
        if tail:
            with emit.loop(k_size, SERIAL, "k") as k:
                with emit.loop(tail, SERIAL, "ji") as ji, self.body.point():
                    emit.store(
                        packed,
                        p.b(block.lead, block.k_from + k, j + (whole * lanes + ji)),
                        at + k * width + (whole * lanes + ji),
                    )
                with emit.loop(lanes - tail, SERIAL, "ji") as ji:
                    emit.store(packed, self.zero, at + k * width + (whole * lanes + tail + ji))

    # ------------------------------------------------------------------------------ tiles

    def _tile(self, tile: _ProductTile) -> None:
        """Emit the sums of a tile, and store or finish them."""
        emit = self.emit
        # One array per row: TVM keeps arrays below 1024 bytes on the stack, and only those become registers.
        accs = [emit.alloc(tile.width, self.dtype, "acc") for _ in range(tile.height)]
        for acc in accs:
            for offset, size in tile.spans:
                emit.store(acc, tirx.Broadcast(self.zero, size) if size > 1 else self.zero, self._at(offset, size))
        self._steps(tile, accs)
        self._finish_tile(tile, accs)

    def _steps(self, tile: _ProductTile, accs: list[Buffer]) -> None:
        """Emit the loop along k, with prefetches of the lines of the result."""
        emit, unrolled = self.emit, _UNROLLED
        turns, tail = divmod(tile.block.k_size, unrolled)
        targets = self._hinted(tile.block)
        lines = ceil_div(tile.columns, self.line)
        hints = tile.height * lines if targets else 0
        # The turns in so many equal parts, with some hints before each: all at once would fill the buffers that the
        # loop itself loads through.
        parts = max((d for d in range(1, max(hints, 1) + 1) if turns % d == 0), default=1)
        each = ceil_div(hints, parts) if parts > 1 else 0
        with emit.loop(parts, SERIAL, "k") as part:
            for h in range(each):
                self._hint(targets, (tile.block.lead, tile.row, tile.j), tirx.min(part * each + h, hints - 1), lines)
            with emit.loop(turns // parts, SERIAL, "k") as k:
                turn = part * (turns // parts) + k
                for u in range(unrolled):
                    with self.body.point():
                        self._step(tile, accs, turn * unrolled + u)
        for u in range(tail):
            with self.body.point():
                self._step(tile, accs, literal(turns * unrolled + u, "i32"))

    def _step(self, tile: _ProductTile, accs: list[Buffer], k: Expr) -> None:
        """Add the products of one column of A and one row of B."""
        emit, p, block, panel = self.emit, self.p, tile.block, tile.panel
        # The order matters: a row of B in registers, then row by row one value of A, so that few registers are live
        # besides the sums.
        line = emit.alloc(tile.width, self.dtype, "b")
        for span in tile.spans:
            if panel is not None and not panel.fill:
                value = self._vector(panel.packed, panel.at + k * tile.width + span[0], span[1])
                emit.store(line, value, self._at(*span))
                continue
            with self._over(span) as c, self.body.point():
                emit.store(line, p.b(block.lead, block.k_from + k, tile.j + c), c)
            if panel is not None:
                emit.store(panel.packed, self._vector(line, *span), self._at(k * tile.width + span[0], span[1]))
        for r, acc in enumerate(accs):
            if block.packed is not None:
                place = tirx.floordiv(tile.at, self.rows) * self._tile_size(block.k_size) + k * self.rows + r
                x = emit.bind(tirx.BufferLoad(block.packed, [place]), "a")
            else:
                x = p.a(block.lead, tile.row + r, block.k_from + k)
            for offset, size in tile.spans:
                factor = tirx.Broadcast(x, size) if size > 1 else x
                total = self._vector(acc, offset, size) + factor * self._vector(line, offset, size)
                emit.store(acc, total, self._at(offset, size))

    def _finish_tile(self, tile: _ProductTile, accs: list[Buffer]) -> None:
        """Finish the sums of a tile on the registers, or from a copy, or leave them among the partial sums."""
        emit, p, block, j, width = self.emit, self.p, tile.block, tile.j, tile.width
        partial, spans = block.partial, tile.spans
        direct = [s for s in spans if s[0] + s[1] <= tile.columns] if self.light and partial is None else []
        for r, acc in enumerate(accs):
            for span in direct:
                with self._over(span) as c, self.body.point():
                    self.body.finish({p.out: (tirx.BufferLoad(acc, [c]), p.place(block.lead, tile.row + r, j + c))})
        if len(direct) == len(spans):
            return
        copy = emit.alloc(tile.height * width, self.dtype, "tile")
        for r, acc in enumerate(accs):
            for offset, size in spans:
                emit.store(copy, self._vector(acc, offset, size), self._at(offset + r * width, size))
        if partial is not None:

            def exchange(row: Expr, c: Expr) -> None:
                self._exchange(copy, partial, (tile.at + row) * p.n + j + c, row * width + c, block.first)

            self._over_tile(tile, 0, exchange)
            if block.first is not None:
                return

        def finish(row: Expr, c: Expr) -> None:
            place = p.place(block.lead, tile.row + row, j + c)
            self.body.finish({p.out: (tirx.BufferLoad(copy, [row * width + c]), place)})

        self._over_tile(tile, len(direct) * self.lanes, finish)

    def _hinted(self, block: _ProductBlock) -> list[Buffer]:
        """Return the buffers a tile is stored to, if the inner loop is too short for their lines to be in cache in time
        without hints."""
        p, body = self.p, self.body
        near = p.out.type.size * ITEM_BYTES[p.out.type.dtype] <= _NEAR_BYTES
        slots = [slot_of(op) for op in body.group.ops if op.kind == "accum" and op.ins[0] == p.out]
        short = self.k_size <= (_SHORT_K_ADDED if slots else _SHORT_K)
        if near or not short or block.first is not None or any(op.kind in BIJECTIONS for op in body.group.ops):
            return []
        return [
            *(body.slot(slot, p.out) for slot in slots if slot is not None),
            *(body.result(v) for v in body.group.outs if v.type == p.out.type),
        ]

    def _hint(self, targets: list[Buffer], corner: tuple[Index, Expr, Expr], number: Expr, per_row: int) -> None:
        """Prefetch one line of a tile, counted along its rows."""
        lead, i, j = corner
        place = self.p.place(lead, i + tirx.floordiv(number, per_row), j + tirx.floormod(number, per_row) * self.line)
        for buffer in targets:
            self.emit.prefetch(buffer, linear(place, self.p.out.type.dims))

    def _at(self, offset: Expr, size: int) -> Expr:
        """Return the index of `size` neighbouring elements."""
        return (
            tirx.Ramp(offset if not isinstance(offset, int) else literal(offset, "i32"), 1, size)
            if size > 1
            else offset
        )

    def _vector(self, buffer: Buffer, offset: Expr, size: int) -> Expr:
        return tirx.BufferLoad(buffer, [self._at(offset, size)])

    @contextmanager
    def _over(self, span: tuple[int, int]) -> Iterator[Expr]:
        """Open a loop over the columns of a span: a vector, or one column."""
        offset, size = span
        if size == 1:
            yield literal(offset, "i32")
            return
        with self.emit.loop(size, VECTOR, "ji") as ji:
            yield ji + offset if offset else ji

    def _over_tile(self, tile: _ProductTile, done: int, action: Callable[[Expr, Expr], None]) -> None:
        """Loop over the elements of a tile in memory, from column `done` on."""
        emit, lanes = self.emit, self.lanes
        with emit.loop(tile.height, SERIAL, "r") as row:
            for c, _ in emit.spans(tile.columns - done, lanes):
                with self.body.point():
                    action(row, c + done if done else c)

    def _exchange(self, tile: Buffer, partial: Buffer, position: Expr, local: Expr, first: object) -> None:
        """Add the sums of earlier k blocks to the tile's. With `first` given, leave the total in `partial` instead."""
        value = tirx.BufferLoad(tile, [local])
        if first is True:
            self.emit.store(partial, value, position)
        elif first is None:
            self.emit.store(tile, value + tirx.BufferLoad(partial, [position]), local)
        else:
            # The first block has no sum to add to: memory that was never written must not be used, not even times 0.
            self.emit.store(partial, tirx.Select(first, value, value + tirx.BufferLoad(partial, [position])), position)


def emit_product(body: Body, product: Product) -> None:
    """Emit a product with the loops that suit its sizes."""
    p = product
    if body.loops is not None:
        body.loops.product(body, p)
        return
    if tile_product.suits(body, p):
        tile_product.emit_tile_product(body, p)
    elif 0 < p.k <= SHORT_K and p.b_along_j and p.n >= body.lanes and len(body.group.ops) <= SHORT_K:
        emit_short(body, p)
    elif has_few_rows(body, p) and p.a_along_k and p.b_along_k and p.m <= DOT_ROWS:
        emit_dots(body, p)
    elif has_few_rows(body, p) and p.b_along_j and p.n >= STREAM_COLUMNS:
        emit_streams(body, p)
    else:
        _TiledProduct(body, p).run()
