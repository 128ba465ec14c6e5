"""Matrix products: panels of both operands are packed, a tile of accumulators stays in registers, the fused rest runs on the tile.

In: accessors a(batch, i, k) and b(batch, k, j), which may read through any layout operation (so transposed, split or sliced operands cost
nothing but the order of a packing loop), and a function that places element (batch, i, j) in the result. Out: loops

    for rows block, k block:  pack A [rows/mi, k, mi]     (only when A is not read along k and several panels read it)
      for strip of panels:    pack B [panels, k, nj]      (squares are transposed in registers where B lies along k)
        for column panel, row tile:
                              accumulators [mi, nj] = sum over k of A column * B row;  then `Body.finish` for each vector

What limits: per step along k a tile needs a row of the panel, nj elements, from the second cache, and mi elements of A from the first, which
are in time for a tile of 6x4 vectors. Packing B costs as much as reading it from memory: m rows share it, so 256 rows spend a tenth of their
time there if B's rows are far apart, hence strips. A packed block of A is at most 4 MiB and is streamed once per panel.
With up to four rows and both operands contiguous along k there are no tiles: vectors run along k and are folded.
Ragged sizes: the last rows get a tile of just that many rows; the last panel is padded with zeros to whole vectors, and its columns are
finished one by one from a copy of the tile, because indexing accumulators by a variable would force them out of registers.
Long sums (k above 4096) are split into blocks of at most 2048, with partial sums in memory, so that a panel stays in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

from tvm import tirx

from penstock.ir.graph import Value, slot_of
from penstock.ir.types import ITEM_BYTES

from . import tile_product
from .body import Body, parallel_if
from .elements import Index, linear, unravel
from .emit import SERIAL, VECTOR, Buffer, Expr, compute_dtype, literal
from .transpose import transpose_block

_LONGEST_K = 4096
_K_BLOCK = 2048
# A packed block of A.
_A_BYTES = 4 << 20
# Tiles of A packed side by side, so that the lines they share are read once.
_PACKED_TOGETHER = 8
# Steps along k in one turn of the inner loop.
_UNROLLED = 4
# Panels of B are packed together, so that a row of B is read as a stream of this many bytes instead of lines far apart ...
_STREAM_BYTES = 1024
# ... as long as they take no more than half of a second cache of 2 MiB.
_B_BYTES = 1 << 20
_LINE_BYTES = 64

Access = Callable[[Index, Expr, Expr], Expr]
Address = Callable[[Index, Expr, Expr], tuple[Value, Expr] | None]


@dataclass(frozen=True)
class Product:
    """One batched product: sizes, accessors, and where results go. `a_along_k`: A is contiguous along k; `b_along_j`: B along j."""

    out: Value
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: Access
    b: Access
    place: Callable[[Index, Expr, Expr], Index]
    a_along_k: bool
    b_along_j: bool
    b_along_k: bool = False
    # Rows of A at the same k are neighbours in memory.
    a_along_i: bool = False
    # Where an element of B lies in memory; when it is contiguous along k, squares of it are transposed in registers.
    b_address: Address | None = None


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---------------------------------------------------------------------------------------- the loops


@dataclass(frozen=True)
class _Block:
    """What one pass over the columns computes: rows start .. start+rows, sums over k_from .. k_from+k_size. With `first` given, sums are left
    in `partial`, on top of what is there unless `first` holds; without, they are finished."""

    lead: Index
    start: Expr
    rows: int
    k_from: Expr
    k_size: int
    partial: Buffer | None = None
    first: object = None
    packed: Buffer | None = None


class _Tiles:
    """Emits one product."""

    def __init__(self, body: Body, p: Product) -> None:
        self.body, self.p, self.emit = body, p, body.emit
        self.dtype = compute_dtype(p.out.type.dtype)
        self.lanes = max(body.lanes * 4 // ITEM_BYTES[self.dtype], 1)
        machine = body.machine
        sums = machine.product_rows * machine.product_vectors
        single = p.m <= sums // 2
        # Few rows: all of them in one tile, so that B is read once and need not be packed.
        self.rows = p.m if single else machine.product_rows
        self.vectors = min(sums // max(p.m, 1), 8) if single else machine.product_vectors
        self.vectors = min(self.vectors, ceil_div(p.n, self.lanes))
        self.width = self.vectors * self.lanes
        self.k_blocks = ceil_div(p.k, _K_BLOCK) if p.k > _LONGEST_K else 1
        self.k_size = ceil_div(p.k, self.k_blocks)
        # Packing A pays when several panels read it; one or two read its rows where they are, if the rows of a tile are neighbours.
        self.pack_a = not p.a_along_k and not (p.a_along_i and p.n <= 2 * self.width)
        self.pack_b = not single or not p.b_along_j
        self.group = self._panels_together() if self.pack_b else 1
        self.row_block = p.m
        most = max(_A_BYTES // (ITEM_BYTES[self.dtype] * max(self.k_size, 1)), self.rows)
        if self.pack_a and p.m > most:
            self.row_block = most // self.rows * self.rows
        # The packed tiles of A are copied in vectors that reach past a row of the tile into the next, which is written later.
        self.reach = 1 << (self.rows - 1).bit_length() if p.a_along_i and self.rows > 1 else self.rows
        self.zero = literal(0, self.dtype)
        # Little to do behind the product: do it on the registers, in unrolled code. Else a copy of the tile is gone through in loops.
        self.light = len(body.group.ops) <= 2

    def _panels_together(self) -> int:
        """Panels of B in a strip that is packed at once; best a divisor of their number, so that there is no shorter strip to make code for."""
        if not self.p.b_along_j:
            # Where B is read along k, a panel is a few long streams already.
            return 1
        row = self.width * ITEM_BYTES[self.dtype]
        most = max(_B_BYTES // max(self.k_size * row, 1), 1)
        best = min(max(_STREAM_BYTES // row, 1), most)
        panels = max(self.p.n // self.width, 1)
        near = [g for g in (best, best + 1, *range(best - 1, best // 2, -1)) if g <= most]
        return next((g for g in near if panels % g == 0), min(best, panels))

    def run(self) -> None:
        p, emit = self.p, self.emit
        batches = prod(p.batch)
        work = batches * p.m * p.n * max(p.k, 1)
        whole, rest = divmod(p.m, self.row_block)
        if batches > 1:
            with emit.loop(batches, parallel_if(self.body.machine, work // 8), "b") as b:
                lead = tuple(emit.bind(x, "b") if not isinstance(x, tirx.IntImm) else x for x in unravel(b, p.batch))
                self._row_blocks(lead, whole, rest, SERIAL)
        else:
            kind = parallel_if(self.body.machine, work // 8)
            self._row_blocks((literal(0, "i32"),) * len(p.batch), whole, rest, kind)

    def _row_blocks(self, lead: Index, whole: int, rest: int, kind: object) -> None:
        with self.emit.loop(whole, SERIAL, "im") as im, self.body.point():
            self._row_block(lead, im * self.row_block if whole > 1 else literal(0, "i32"), self.row_block, kind)
        if rest:
            with self.body.point():
                self._row_block(lead, literal(whole * self.row_block, "i32"), rest, kind)

    def _row_block(self, lead: Index, start: Expr, rows: int, kind: object) -> None:
        emit = self.emit
        if self.k_blocks == 1:
            self._panels(_Block(lead, start, rows, 0, self.k_size), kind)
            return
        partial = emit.alloc(rows * self.p.n, self.dtype, "partial")
        last = self.p.k - (self.k_blocks - 1) * self.k_size
        with emit.loop(self.k_blocks - 1, SERIAL, "q") as q, self.body.point():
            first = tirx.EQ(q, 0) if self.k_blocks > 2 else True
            self._panels(_Block(lead, start, rows, q * self.k_size, self.k_size, partial, first), kind)
        with self.body.point():
            self._panels(_Block(lead, start, rows, (self.k_blocks - 1) * self.k_size, last, partial), kind)

    def _panels(self, block: _Block, kind: object) -> None:
        """All columns of a block."""
        emit = self.emit
        if self.pack_a:
            block = replace(block, packed=self._pack_a(block))
        strip = self.width * self.group
        strips, tail = divmod(self.p.n, strip)
        if strips:
            with emit.loop(strips, kind, "js") as js, self.body.point():
                self._strip(block, js * strip, strip)
        if tail:
            with emit.loop(1), self.body.point():
                self._strip(block, literal(strips * strip, "i32"), tail)

    def _strip(self, block: _Block, j: Expr, columns: int) -> None:
        """Some panels next to each other."""
        emit, width = self.emit, self.width
        packed = self._pack_b(block, j, columns) if self.pack_b else None
        panels, tail = divmod(columns, width)
        with emit.loop(panels, SERIAL, "jo") as jo, self.body.point():
            self._panel(block, packed, jo * (block.k_size * width), j + jo * width, width)
        if tail:
            with self.body.point():
                self._panel(block, packed, literal(panels * block.k_size * width, "i32"), j + panels * width, tail)

    def _panel(self, block: _Block, packed: Buffer | None, offset: Expr, j: Expr, columns: int) -> None:
        emit = self.emit
        panel = None if packed is None else (packed, offset)
        count, odd = divmod(block.rows, self.rows)
        with emit.loop(count, SERIAL, "io") as io, self.body.point():
            self._tile(block, io, self.rows, panel, j, columns)
        if odd:
            with self.body.point():
                self._tile(block, literal(count, "i32"), odd, panel, j, columns)

    # ------------------------------------------------------------------------------ packing

    def _tile_size(self, k_size: int) -> int:
        """Elements from one packed tile of A to the next: room for vectors that reach past the last row."""
        return k_size * self.rows + self.reach - self.rows

    def _pack_a(self, block: _Block) -> Buffer:
        """[tiles, k, mi], the tiles of all full row tiles, then the rows that are left, in the same layout."""
        emit, mi, a = self.emit, self.rows, self.p.a
        size = self._tile_size(block.k_size)
        packed = emit.alloc(ceil_div(block.rows, mi) * size, self.dtype, "ap")
        count, odd = divmod(block.rows, mi)
        # A vector may read past the last row of its tile, not past the last row of A.
        safe = max((block.rows - self.reach) // mi + 1, 0) if self.reach > mi else count

        def copy(io: Expr, k: Expr, height: int, *, whole: bool) -> None:
            if whole:
                with emit.loop(self.reach, VECTOR, "ii") as ii, self.body.point():
                    emit.store(packed, a(block.lead, block.start + io * mi + ii, block.k_from + k), io * size + k * mi + ii)
                return
            for r in range(height):
                with self.body.point():
                    emit.store(packed, a(block.lead, block.start + io * mi + r, block.k_from + k), io * size + k * mi + r)

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

    def _pack_b(self, block: _Block, j: Expr, columns: int) -> Buffer:
        """[panels, k, width], the last panel as narrow as its whole vectors, padded with zeros."""
        emit, p, lanes, k_size = self.emit, self.p, self.lanes, block.k_size
        per_panel = self.width // lanes
        whole, rest = divmod(columns, lanes)
        full, loose = divmod(whole, per_panel)
        # The width of the panel behind the full ones.
        narrow = (loose + (rest > 0)) * lanes
        packed = emit.alloc(k_size * ceil_div(columns, lanes) * lanes, self.dtype, "bp")
        locate = p.b_address if p.b_along_k else None
        turned = k_size // lanes * lanes if locate is not None and whole else 0

        def vectors(panel: Expr, width: int, count: int) -> None:
            """Some whole vectors of a panel."""
            base = panel * (k_size * self.width)
            from_j = j + panel * self.width
            if locate is not None:
                with emit.loop(count, SERIAL, "v") as v, emit.loop(turned // lanes, SERIAL, "k") as k, self.body.point():
                    found = [locate(block.lead, block.k_from + k * lanes, from_j + (v * lanes + r)) for r in range(lanes)]
                    places = [self.body.memory(f) for f in found if f is not None]
                    turned_rows = transpose_block(emit, self.dtype, lanes, lanes, places[0][0], [at for _, at in places])
                    for r, row in enumerate(turned_rows):
                        emit.store(packed, row, tirx.Ramp(base + (k * lanes + r) * width + v * lanes, 1, lanes))

        def lines(k: Expr, panel: Expr, width: int, count: int) -> None:
            base = panel * (k_size * self.width)
            from_j = j + panel * self.width
            for v in range(count):
                with emit.loop(lanes, VECTOR, "ji") as ji, self.body.point():
                    emit.store(packed, p.b(block.lead, block.k_from + k, from_j + (v * lanes + ji)), base + k * width + (v * lanes + ji))

        if turned:
            with emit.loop(full, SERIAL, "p") as panel:
                vectors(panel, self.width, per_panel)
            if loose:
                vectors(literal(full, "i32"), narrow, loose)
        if turned < k_size:
            with emit.loop(k_size - turned, SERIAL, "k") as k:
                for panel in range(full):
                    lines(k + turned, literal(panel, "i32"), self.width, per_panel)
                if loose:
                    lines(k + turned, literal(full, "i32"), narrow, loose)
        if rest:
            width, base = narrow, full * k_size * self.width + loose * lanes
            with emit.loop(k_size, SERIAL, "k") as k:
                with emit.loop(rest, SERIAL, "ji") as ji, self.body.point():
                    emit.store(packed, p.b(block.lead, block.k_from + k, j + (whole * lanes + ji)), base + k * width + ji)
                with emit.loop(lanes - rest, SERIAL, "ji") as ji:
                    emit.store(packed, self.zero, base + k * width + (rest + ji))
        return packed

    # ------------------------------------------------------------------------------ tiles

    def _tile(self, block: _Block, io: Expr, height: int, panel: tuple[Buffer, Expr] | None, j: Expr, columns: int) -> None:
        emit, p, lanes = self.emit, self.p, self.lanes
        lead, start, partial = block.lead, block.start, block.partial
        at = io * self.rows
        padded = panel is not None
        if padded:
            spans = [(v * lanes, lanes) for v in range(ceil_div(columns, lanes))]
        else:
            spans = [(v * lanes, lanes) for v in range(columns // lanes)]
            spans += [(c, 1) for c in range(columns // lanes * lanes, columns)]
        width = ceil_div(columns, lanes) * lanes
        # One array per row: TVM keeps arrays below 1024 bytes on the stack, and only those become registers.
        accs = [emit.alloc(width, self.dtype, "acc") for _ in range(height)]
        for acc in accs:
            for span in spans:
                with self._over(span) as c:
                    emit.store(acc, self.zero, c)

        def step(k: Expr) -> None:
            # The order matters: a row of B in registers, then row by row one value of A, so that few registers are live besides the sums.
            line = emit.alloc(width, self.dtype, "b")
            for span in spans:
                with self._over(span) as c, self.body.point():
                    other = (
                        tirx.BufferLoad(panel[0], [panel[1] + k * width + c]) if panel is not None else p.b(lead, block.k_from + k, j + c)
                    )
                    emit.store(line, other, c)
            for r, acc in enumerate(accs):
                if block.packed is not None:
                    place = io * self._tile_size(block.k_size) + k * self.rows + r
                    x = emit.bind(tirx.BufferLoad(block.packed, [place]), "a")
                else:
                    x = p.a(lead, start + at + r, block.k_from + k)
                for span in spans:
                    with self._over(span) as c:
                        emit.store(acc, tirx.BufferLoad(acc, [c]) + x * tirx.BufferLoad(line, [c]), c)

        # Rows of B that are read where they lie are far apart: more of them in a turn are no gain.
        unrolled = _UNROLLED if panel is not None else 1
        turns, rest = divmod(block.k_size, unrolled)
        with emit.loop(turns, SERIAL, "k") as k:
            self._ask_for_sums(block, at, height, j, columns, k)
            for u in range(unrolled):
                with self.body.point():
                    step(k * unrolled + u)
        for u in range(rest):
            with self.body.point():
                step(literal(turns * unrolled + u, "i32"))
        direct = [s for s in spans if s[0] + s[1] <= columns] if self.light and partial is None else []
        for r, acc in enumerate(accs):
            for span in direct:
                with self._over(span) as c, self.body.point():
                    self.body.finish({p.out: (tirx.BufferLoad(acc, [c]), p.place(lead, start + at + r, j + c))})
        if len(direct) == len(spans):
            return
        tile = emit.alloc(height * width, self.dtype, "tile")
        for r, acc in enumerate(accs):
            for span in spans:
                with self._over(span) as c:
                    emit.store(tile, tirx.BufferLoad(acc, [c]), c + r * width)
        if partial is not None:
            self._over_tile(
                height, columns, 0, lambda row, c: self._exchange(tile, partial, (at + row) * p.n + j + c, row * width + c, block.first)
            )
            if block.first is not None:
                return

        def finish(row: Expr, c: Expr) -> None:
            self.body.finish({p.out: (tirx.BufferLoad(tile, [row * width + c]), p.place(lead, start + at + row, j + c))})

        self._over_tile(height, columns, len(direct) * lanes, finish)

    def _ask_for_sums(self, block: _Block, at: Expr, height: int, j: Expr, columns: int, turn: Expr) -> None:
        """Where the result is added to a variable: in each turn of the inner loop, a hint for one line of what the tile will be added to. All
        at once would fill the buffers that the loop itself loads through."""
        p = self.p
        slots = [slot_of(op) for op in self.body.group.ops if op.kind == "accum" and op.ins[0] == p.out]
        if not slots or (block.partial is not None and block.first is not None):
            return
        line = max(_LINE_BYTES // ITEM_BYTES[self.dtype], 1)
        lines = ceil_div(columns, line)
        number = tirx.min(turn, height * lines - 1)
        place = p.place(block.lead, block.start + at + tirx.floordiv(number, lines), j + tirx.floormod(number, lines) * line)
        for slot in slots:
            assert slot is not None
            self.emit.prefetch(self.body.slot(slot, p.out), linear(place, p.out.type.dims))

    @contextmanager
    def _over(self, span: tuple[int, int]) -> Iterator[Expr]:
        """The columns of a span: a vector, or one."""
        offset, size = span
        if size == 1:
            yield literal(offset, "i32")
            return
        with self.emit.loop(size, VECTOR, "ji") as ji:
            yield ji + offset if offset else ji

    def _over_tile(self, height: int, columns: int, done: int, action: Callable[[Expr, Expr], None]) -> None:
        """Loops over the elements of a tile in memory, from column `done` on."""
        emit, lanes = self.emit, self.lanes
        with emit.loop(height, SERIAL, "r") as row:
            for c, _ in emit.spans(columns - done, lanes):
                with self.body.point():
                    action(row, c + done if done else c)

    def _exchange(self, tile: Buffer, partial: Buffer, position: Expr, local: Expr, first: object) -> None:
        """Sums of earlier k blocks are added to the tile's, or, with `first` given, the total is left in `partial`."""
        value = tirx.BufferLoad(tile, [local])
        if first is True:
            self.emit.store(partial, value, position)
        elif first is None:
            self.emit.store(tile, value + tirx.BufferLoad(partial, [position]), local)
        else:
            # The first block finds no sum yet: what lies in memory there is not a number to be used, not even times 0.
            self.emit.store(partial, tirx.Select(first, value, value + tirx.BufferLoad(partial, [position])), position)


_DOT_ROWS = 4
_DOT_COLUMNS = 4


def _emit_dots(body: Body, p: Product) -> None:
    """Few rows and both operands contiguous along k: packing would cost more than the product, so vectors run along k and are folded."""
    emit, dtype = body.emit, compute_dtype(p.out.type.dtype)
    lanes = max(body.lanes * 4 // ITEM_BYTES[dtype], 1)
    whole, rest = divmod(p.k, lanes)

    def block(lead: Index, j: Expr, columns: int) -> None:
        cells = [(i, c) for i in range(p.m) for c in range(columns)]
        accs = {cell: emit.alloc(lanes, dtype, "acc") for cell in cells}
        for acc in accs.values():
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(acc, literal(0, dtype), lane)
        for k, lane in emit.spans(p.k, lanes, name="k"):
            with body.point():
                row = [p.a(lead, literal(i, "i32"), k) for i in range(p.m)]
                for c in range(columns):
                    other = p.b(lead, k, j + c)
                    for i in range(p.m):
                        acc = accs[i, c]
                        emit.store(acc, tirx.BufferLoad(acc, [lane]) + row[i] * other, lane)
        for (i, c), acc in accs.items():
            half = lanes
            while half > 1:
                half //= 2
                with emit.loop(half, VECTOR, "l") as lane:
                    emit.store(acc, tirx.BufferLoad(acc, [lane]) + tirx.BufferLoad(acc, [lane + half]), lane)
            with body.point():
                body.finish({p.out: (tirx.BufferLoad(acc, [literal(0, "i32")]), p.place(lead, literal(i, "i32"), j + c))})

    assert whole or rest
    blocks, odd = divmod(p.n, _DOT_COLUMNS)
    kind = parallel_if(body.machine, prod(p.batch) * p.m * p.n * p.k // 8)
    with emit.loop(prod(p.batch), kind if prod(p.batch) > 1 else SERIAL, "b") as b:
        lead = unravel(b, p.batch)
        if blocks:
            with emit.loop(blocks, kind if prod(p.batch) == 1 else SERIAL, "jo") as jo, body.point():
                block(lead, jo * _DOT_COLUMNS, _DOT_COLUMNS)
        if odd:
            with body.point():
                block(lead, literal(blocks * _DOT_COLUMNS, "i32"), odd)


def emit_product(body: Body, product: Product) -> None:
    p = product
    if body.loops is not None:
        body.loops.product(body, p)
        return
    if tile_product.suits(body, p):
        tile_product.emit_tile_product(body, p)
    elif p.m <= _DOT_ROWS and p.a_along_k and p.b_along_k and len(body.group.ops) <= _DOT_COLUMNS and p.k > 0:
        _emit_dots(body, p)
    else:
        _Tiles(body, p).run()
