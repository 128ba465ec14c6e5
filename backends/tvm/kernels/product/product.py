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
for memory either way. While the tiles of a panel compute, they ask for the lines of the next panel, a few each, which
then waits in the second cache. A packed block of A is at most 1 MiB, half of the second cache. Short sums store more
than they compute. Up to 256 steps the lines of the result are prefetched during the steps. From 512 on that costs more
than it gives, unless the result is added to a variable, which is read there (up to 1024). Products of few rows have
loops of their own, in few_rows.py.

Ragged sizes: the last rows get a tile of just that many rows. A last panel of less than half a vector has loops of its
own, in narrow_rest.py. Any other last panel is padded with zeros to whole vectors. Its columns are finished one by
one from a copy of the tile, because indexing accumulators by a variable would force them out of registers.

Long sums (k above 4096) are split into blocks of at most 1024, with partial sums in memory. So blocks of both operands
stay in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import BIJECTIONS, Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, bound_index, linear
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
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.ir.graph import slot_of
from penstock.ir.types import ITEM_BYTES

from .few_rows import STREAM_ROWS
from .narrow_rest import Narrow, steps_together
from .packing import ProductBlock, ProductPacking, ProductPanel, stored_dtype

_LONGEST_K = 4096
_K_BLOCK = 1024
# A packed block of A.
_A_BYTES = 1 << 20
# Steps along k in one turn of the inner loop. Four are no faster, and take twice as long to compile.
_UNROLLED = 2
# From so many tiles on, a panel that was packed in 16 bits is widened by the first of them.
_WIDENED = 4
_LINE_BYTES = 64
# Parallel loops should have so many turns, and a turn this many rows at least.
_TASKS = 4
_TASK_ROWS = 128
# A panel of B of so many tiles asks for the next one meanwhile, if both and a block of A fit into the second cache.
_TILES_AHEAD, _PANEL_BYTES = 8, 256 << 10
# Up to so many steps along k, a tile asks beforehand for the lines it will be stored to, or added to.
_SHORT_K, _SHORT_K_ADDED = 256, 1024
# ... if the result is larger than this, half of the second cache.
_NEAR_BYTES = 1 << 20

# ---------------------------------------------------------------------------------------- the loops


@dataclass(frozen=True)
class _ProductTile:
    """A register tile: `height` rows from row `at` of a block on, times `columns` columns from `j` on, in vectors of
    `lanes`."""

    block: ProductBlock
    at: Expr
    height: int
    panel: ProductPanel | None
    j: Expr
    columns: int
    lanes: int
    # The number of the tile in its panel, if it asks for lines of the next panel of B.
    turn: Expr | None = None

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


class TiledProduct:
    """The emitter of the loops of one product."""

    def __init__(self, body: Body, p: Product) -> None:
        self.body, self.p, self.emit = body, p, body.emit
        self.dtype = compute_dtype(p.out.type.dtype)
        self.lanes = max(body.lanes * 4 // ITEM_BYTES[self.dtype], 1)
        machine = body.machine
        sums = machine.product_rows * machine.product_vectors
        self.ahead = p.op is not None and prod(p.batch) == 1 and body.takes_packed(p.op)
        # A few rows all go into one tile, so that B is read once and need not be packed. Where it is packed ahead, one
        # order serves any number of rows, and so does one order of sums.
        single = p.m <= sums // 2 and not self.ahead
        self.rows = p.m if single else machine.product_rows
        if self.ahead and p.m <= STREAM_ROWS:
            # Tiles as equal as possible.
            self.rows = ceil_div(p.m, ceil_div(p.m, self.rows))
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
        reach = 1 << (self.rows - 1).bit_length() if p.a_along_i and self.rows > 1 else self.rows
        self.packing = ProductPacking(body, p, self.dtype, self.lanes, self.rows, reach)
        self.zero = literal(0, self.dtype)
        # The element type of panels that are packed ahead: that of the variable, where it is shorter.
        self.stored = stored_dtype(body, p.op, self.dtype) if self.ahead and p.op is not None else self.dtype
        # Steps along k that the last columns take at once (narrow_rest.py).
        self.steps = 1
        if self.k_blocks == 1 and self.pack_b and not single:
            self.steps = steps_together(p, p.n % self.width, self.dtype, self.lanes)
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
        if self.ahead and p.op is not None:
            self.ready = self.body.packed_ahead(p.op, p.k * self.packing.padded(p.n), self.stored, self._fill)
        whole, tail = divmod(p.m, self.row_block)
        if batches > 1:
            with emit.loop(batches, parallel_if(self.body.machine, work // 8), "b") as b:
                self._row_blocks(bound_index(emit, b, p.batch, "b"), whole, tail, SERIAL)
        else:
            kind = parallel_if(self.body.machine, work // 8)
            self._row_blocks((literal(0, "i32"),) * len(p.batch), whole, tail, kind)

    def _fill(self, packed: Buffer) -> None:
        """Pack all of B: for each block of k the panels, where `_panel` reads them."""
        p, emit, width = self.p, self.emit, self.width
        panels, tail = divmod(p.n, width)
        for q in range(self.k_blocks):
            k_from = q * self.k_size
            block = ProductBlock(
                (literal(0, "i32"),) * len(p.batch), literal(0, "i32"), p.m, k_from, min(self.k_size, p.k - k_from)
            )
            with emit.loop(panels, parallel_if(self.body.machine, p.n * p.k), "jo") as jo, self.body.point():
                self.packing.pack_b(block, jo * width, width, ProductPanel(packed, self._place(block, jo * width)))
            if tail:
                with self.body.point():
                    j = literal(panels * width, "i32")
                    if self.steps > 1:
                        self._narrow(block, j, tail, packed, self._place(block, j)).pack()
                        continue
                    self.packing.pack_b(block, j, tail, ProductPanel(packed, self._place(block, j)))

    def _place(self, block: ProductBlock, j: Expr) -> Expr:
        """Return the position of the panel at column j among the panels of all of B."""
        return block.k_from * self.packing.padded(self.p.n) + j * block.k_size

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
            self._panels(ProductBlock(lead, start, rows, 0, self.k_size), kind)
            return
        partial = emit.alloc(rows * self.p.n, self.dtype, "partial")
        last = self.p.k - (self.k_blocks - 1) * self.k_size
        with emit.loop(self.k_blocks - 1, SERIAL, "q") as q, self.body.point():
            first = tirx.EQ(q, 0) if self.k_blocks > 2 else True
            self._panels(ProductBlock(lead, start, rows, q * self.k_size, self.k_size, partial, first), kind)
        with self.body.point():
            self._panels(ProductBlock(lead, start, rows, (self.k_blocks - 1) * self.k_size, last, partial), kind)

    def _panels(self, block: ProductBlock, kind: object) -> None:
        """Emit all columns of a block."""
        emit = self.emit
        if self.pack_a:
            block = replace(block, packed=self.packing.pack_a(block))
        panels, tail = divmod(self.p.n, self.width)
        if panels:
            with emit.loop(panels, kind, "jo") as jo, self.body.point():
                self._panel(block, jo * self.width, self.width)
        if tail:
            with emit.loop(1), self.body.point():
                self._panel(block, literal(panels * self.width, "i32"), tail)

    def _panel(self, block: ProductBlock, j: Expr, columns: int) -> None:
        """Emit some columns of all rows of a block. A whole panel of B that lies along j is packed by the first
        tile."""
        if columns < self.width and self.steps > 1:
            self._narrow_panel(block, j, columns)
            return
        emit, height = self.emit, self._height(block, columns)
        count, odd = divmod(block.rows, height)
        first = 0
        panel: ProductPanel | None = None
        ready = None
        if self.ready is not None:
            panel = ready = ProductPanel(self.ready, emit.bind(self._place(block, j), "at"))
        widened = ready is not None and self.stored != self.dtype and count + (odd > 0) >= _WIDENED
        if widened or (ready is None and self.pack_first and columns == self.width):
            # The first tile leaves the panel behind for the others.
            size = block.k_size * self.packing.padded(columns)
            panel = ProductPanel(emit.alloc(size, self.dtype, "bp"), source=ready)
            with self.body.point():
                # The lower tile at the end, if there is one: that saves code.
                at = literal(count * height if odd else 0, "i32")
                self._tile(_ProductTile(block, at, odd or height, replace(panel, fill=True), j, columns, self.lanes))
            first, odd = (0 if odd else 1), 0
        elif ready is not None:
            pass
        elif self.pack_b:
            panel = ProductPanel(emit.alloc(block.k_size * self.packing.padded(columns), self.dtype, "bp"))
            self.packing.pack_b(block, j, columns, panel)
        turn = columns == self.width and self._asks_ahead(count - first)
        with emit.loop(count - first, SERIAL, "io") as io, self.body.point():
            at = (io + first if first else io) * height
            self._tile(_ProductTile(block, at, height, panel, j, columns, self.lanes, io if turn else None))
        if odd:
            with self.body.point():
                self._tile(_ProductTile(block, literal(count * height, "i32"), odd, panel, j, columns, self.lanes))

    def _narrow(self, block: ProductBlock, j: Expr, columns: int, packed: Buffer, at: Expr | int = 0) -> Narrow:
        return Narrow(self.body, self.p, block.lead, j, columns, self.dtype, self.lanes, self.steps, packed, at)

    def _narrow_panel(self, block: ProductBlock, j: Expr, columns: int) -> None:
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

    def _height(self, block: ProductBlock, columns: int) -> int:
        """Choose the rows of a tile: more for few columns, so that as many sums are in flight. Packed tiles of A fix
        them."""
        vectors = ceil_div(columns, self.lanes)
        if block.packed is not None or vectors >= self.vectors or not self.pack_b:
            return self.rows
        return max(min(self.rows * self.vectors // vectors, block.rows), 1)

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
        ahead = self._lines_ahead(tile) if tile.turn is not None else 0
        # The number of equal parts of the turns, with some hints before each. All hints at once would fill the buffers
        # that the loop itself loads through.
        parts = max((d for d in range(1, max(hints, ahead, 1) + 1) if turns % d == 0), default=1)
        each = ceil_div(hints, parts) if parts > 1 else 0
        each_ahead = ceil_div(ahead, parts) if parts > 1 else 0
        with emit.loop(parts, SERIAL, "k") as part:
            for h in range(each):
                self._hint(targets, (tile.block.lead, tile.row, tile.j), tirx.min(part * each + h, hints - 1), lines)
            for h in range(each_ahead):
                assert tile.turn is not None
                self._hint_ahead(tile, (tile.turn * parts + part) * each_ahead + h)
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
                value = load(panel.packed, self._at(panel.at + k * tile.width + span[0], span[1]))
                emit.store(line, value, self._at(*span))
                continue
            if panel is not None and panel.source is not None:
                value = load(panel.source.packed, self._at(panel.source.at + k * tile.width + span[0], span[1]))
                emit.store(line, value, self._at(*span))
            else:
                with self._over(span) as c, self.body.point():
                    emit.store(line, p.b(block.lead, block.k_from + k, tile.j + c), c)
            if panel is not None:
                emit.store(panel.packed, self._vector(line, *span), self._at(k * tile.width + span[0], span[1]))
        for r, acc in enumerate(accs):
            if block.packed is not None:
                place = tirx.floordiv(tile.at, self.rows) * self.packing.tile_size(block.k_size) + k * self.rows + r
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

    def _hinted(self, block: ProductBlock) -> list[Buffer]:
        """Return the buffers that a tile is stored to, where their lines need a prefetch. That is so if the inner loop
        is too short to have them in cache in time."""
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

    def _asks_ahead(self, tiles: int) -> bool:
        """Return whether tiles ask for the next panel of B while they compute: else its first tile waits for memory."""
        p = self.p
        fits = self.k_size * self.width * ITEM_BYTES[self.dtype] <= _PANEL_BYTES
        if not self.pack_b or self.ready is not None or p.b_address is None or tiles < _TILES_AHEAD or not fits:
            return False
        zero = literal(0, "i32")
        address = p.b_address((zero,) * len(p.batch), zero, zero)
        return address is not None and p.k * p.n * ITEM_BYTES[address[0].type.dtype] > _NEAR_BYTES

    def _lines_ahead(self, tile: _ProductTile) -> int:
        """Return the lines of the next panel that each tile of a panel asks for."""
        tiles = max(tile.block.rows // tile.height - 1, 1)
        return ceil_div(self._panel_lines(tile.block), tiles)

    def _panel_lines(self, block: ProductBlock) -> int:
        """Return the lines of a panel of B."""
        along, across = (block.k_size, self.width) if self.p.b_along_k else (self.width, block.k_size)
        return ceil_div(along, self.line) * across

    def _hint_ahead(self, tile: _ProductTile, number: Expr) -> None:
        """Ask for one line of the next panel of B; numbers past its last line mean that one."""
        p, block = self.p, tile.block
        j, number = tile.j + self.width, tirx.min(number, self._panel_lines(block) - 1)
        per_row = ceil_div(block.k_size if p.b_along_k else self.width, self.line)
        if p.b_along_k:
            k, j = tirx.floormod(number, per_row) * self.line, j + tirx.floordiv(number, per_row)
        else:
            k, j = tirx.floordiv(number, per_row), j + tirx.floormod(number, per_row) * self.line
        assert p.b_address is not None
        address = p.b_address(block.lead, block.k_from + k, j)
        if address is not None:
            self.emit.prefetch(self.body.operand(address[0]), address[1], written=False, near=False)

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
