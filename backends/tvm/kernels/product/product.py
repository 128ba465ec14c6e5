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

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, bound_index
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
from penstock.ir.types import ITEM_BYTES

from .few_rows import STREAM_ROWS
from .narrow_rest import Narrow, steps_together
from .packing import ProductBlock, ProductPacking, ProductPanel, stored_dtype
from .panels_ahead import (
    LINE_BYTES,
    LinesAhead,
    ask_for_result,
    asks_for_plain,
    lines_of_packed,
    lines_of_plain,
    lines_of_result,
    pieces_of,
)

_LONGEST_K = 4096
_K_BLOCK = 1024
# A packed block of A.
_A_BYTES = 1 << 20
# Steps along k in one turn of the inner loop. Four are no faster, and take twice as long to compile.
_UNROLLED = 2
# From so many tiles on, a panel that was packed in 16 bits is widened by the first of them.
_WIDENED = 4
# Parallel loops should have so many turns, and a turn this many rows at least.
_TASKS = 4
_TASK_ROWS = 128

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
    # What the tile asks for while it computes.
    ahead: LinesAhead | None = None

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
        self.line = max(LINE_BYTES // ITEM_BYTES[p.out.type.dtype], 1)
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
            self.ready = self.body.packed_ahead(p.op, self.packing.panels_size, self.stored, self._fill)
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
            self._ready_panel(block, ready, j, columns, height)
            return
        elif self.pack_b:
            panel = ProductPanel(emit.alloc(block.k_size * self.packing.padded(columns), self.dtype, "bp"))
            self.packing.pack_b(block, j, columns, panel)
        panel_bytes = block.k_size * self.width * ITEM_BYTES[self.dtype]
        asks = columns == self.width < self.p.n and self.pack_b and ready is None
        asks = asks and asks_for_plain(self.p, count - first, panel_bytes)
        lines = lines_of_plain(self.body, self.p, block, j, self.width, count - first) if asks else None
        with emit.loop(count - first, SERIAL, "io") as io, self.body.point():
            at = (io + first if first else io) * height
            ahead = lines(io) if lines is not None else None
            self._tile(_ProductTile(block, at, height, panel, j, columns, self.lanes, ahead))
        if odd:
            with self.body.point():
                self._tile(_ProductTile(block, literal(count * height, "i32"), odd, panel, j, columns, self.lanes))

    def _ready_panel(self, block: ProductBlock, panel: ProductPanel, j: Expr, columns: int, height: int) -> None:
        """Emit a panel that was packed ahead: all tiles, piece by piece along k. Sums go on from piece to piece."""
        emit, tiles = self.emit, ceil_div(block.rows, height)
        width = self.packing.padded(columns)
        panel_bytes = block.k_size * width * ITEM_BYTES[self.stored]
        # Tiles of A that were packed are those of the whole block, not of a piece.
        pieces = pieces_of(tiles, block.k_size, panel_bytes) if block.packed is None else 1
        size = block.k_size // pieces
        whole = _ProductTile(block, literal(0, "i32"), height, panel, j, columns, self.lanes)
        if pieces == 1:
            lines = lines_of_packed(self.body, panel.packed, panel.at, size * width, self.stored, tiles)
            for tile in self._each_tile(whole, lines):
                self._tile(tile)
            return
        sums = emit.alloc(block.rows * width, self.dtype, "sums")
        for v, _ in emit.spans(block.rows * width, self.lanes):
            emit.store(sums, self.zero, v)
        with emit.loop(pieces, SERIAL, "q") as q, self.body.point():
            at = emit.bind(panel.at + q * (size * width), "at")
            piece = replace(
                whole, block=replace(block, k_from=block.k_from + q * size, k_size=size), panel=replace(panel, at=at)
            )
            lines = lines_of_packed(self.body, panel.packed, at, size * width, self.stored, tiles)
            for tile in self._each_tile(piece, lines):
                accs = self._sums_of(tile, sums)
                self._steps(tile, accs)
                for r, acc in enumerate(accs):
                    for span in tile.spans:
                        place = (tile.at + r) * width + span[0]
                        emit.store(sums, self._vector(acc, *span), self._at(place, span[1]))
        for tile in self._each_tile(whole, None):
            self._finish_tile(tile, self._sums_of(tile, sums))

    def _each_tile(self, first: _ProductTile, lines: Callable[[Expr], LinesAhead] | None) -> Iterator[_ProductTile]:
        """Yield the tiles of all rows of a panel, inside of their loop: once for whole tiles, once for rows left."""
        count, odd = divmod(first.block.rows, first.height)
        with self.emit.loop(count, SERIAL, "io") as io, self.body.point():
            yield replace(first, at=io * first.height, ahead=lines and lines(io))
        if odd:
            last, at = literal(count, "i32"), literal(count * first.height, "i32")
            with self.body.point():
                yield replace(first, at=at, height=odd, ahead=lines and lines(last))

    def _sums_of(self, tile: _ProductTile, sums: Buffer) -> list[Buffer]:
        """Return the accumulators of a tile, with sums that were left in memory."""
        accs = [self.emit.alloc(tile.width, self.dtype, "acc") for _ in range(tile.height)]
        for r, acc in enumerate(accs):
            for offset, size in tile.spans:
                value = self._vector(sums, (tile.at + r) * tile.width + offset, size)
                self.emit.store(acc, value, self._at(offset, size))
        return accs

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
        """Choose the rows of a tile: more for few columns, for as many sums in flight. Packed tiles of A fix them."""
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
        targets = lines_of_result(self.body, self.p, tile.block.first, self.k_size)
        lines = ceil_div(tile.columns, self.line)
        hints = tile.height * lines if targets else 0
        corner = (tile.block.lead, tile.row, tile.j)
        ahead = tile.ahead.count if tile.ahead is not None else 0
        fits = tile.ahead.fits if tile.ahead is not None else bool
        parts = max((d for d in range(1, max(hints, ahead, 1) + 1) if turns % d == 0 and fits(d)), default=1)
        each = ceil_div(hints, parts) if parts > 1 else 0
        each_ahead = ceil_div(ahead, parts) if parts > 1 else 0
        with emit.loop(parts, SERIAL, "k") as part:
            for h in range(each):
                ask_for_result(self.body, self.p, targets, corner, tirx.min(part * each + h, hints - 1), lines)
            for h in range(each_ahead):
                assert tile.ahead is not None
                tile.ahead.hint(parts * each_ahead, part * each_ahead + h)
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
