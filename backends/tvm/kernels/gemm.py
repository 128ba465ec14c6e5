"""Matrix products: panels of both operands are packed, a tile of accumulators stays in registers, the fused rest runs on the tile.

In: accessors a(batch, i, k) and b(batch, k, j), which may read through any layout operation (so transposed, split or sliced operands cost
nothing but the order of a packing loop), and a function that places element (batch, i, j) in the result. Out: loops

    for rows block, k block:  pack A [rows/mi, k, mi]     (only when A is not read along k, or k is blocked)
      for column panel:       pack B [k, nj]
        for row tile:         accumulators [mi, nj] = sum over k of A column * B row;  then `Body.finish` for each vector

With up to four rows and both operands contiguous along k there are no tiles: vectors run along k and are folded.
Ragged sizes: the last rows get a tile of just that many rows; the last panel is padded with zeros to whole vectors, and its columns are
finished one by one from a copy of the tile, because indexing accumulators by a variable would force them out of registers.
Long sums (k above 4096) are split into blocks of at most 2048, with partial sums in memory, so that the packed A stays in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import tvm
from tvm import tirx
from tvm.sym.analyzer import Analyzer

from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs
from penstock.ir.types import ITEM_BYTES

from .body import Body, parallel_if
from .elements import Index, broadcast_index, unravel
from .emit import SERIAL, VECTOR, Buffer, Expr, literal

_LONGEST_K = 4096
_K_BLOCK = 2048
_ROW_BLOCK = 512

Access = Callable[[Index, Expr, Expr], Expr]


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


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tile_rows(m: int, rows: int) -> int:
    """Rows of the tile: a divisor of m near the best size if there is one."""
    if m <= rows + 1:
        return m
    for d in (rows, rows - 1, rows - 2, rows + 1, rows - 3, rows - 4):
        if d >= 4 and m % d == 0:
            return d
    return rows


def _contiguous(body: Body, value: Value, index: Callable[[Expr], Index], extent: int) -> bool:
    """Whether consecutive values of the coordinate read consecutive memory."""
    v = tirx.Var("v", "int32")
    here, there = body.address(value, index(v)), body.address(value, index(v + 1))
    if here is None or there is None:
        return False
    analyzer = Analyzer()
    analyzer.bind(v, tvm.ir.Range(0, max(extent - 1, 1)))
    step = analyzer.simplify(there[1] - here[1])
    return isinstance(step, tirx.IntImm) and int(step.value) == 1


def emit_matmul(body: Body, op: Op) -> None:
    attrs = complete_attrs(op)
    lhs, rhs, out = op.ins[0], op.ins[1], op.outs[0]
    *batch, m, n = out.type.dims
    k = lhs.type.dims[-2 if attrs["ta"] else -1]
    lhs_batch, rhs_batch = lhs.type.dims[:-2], rhs.type.dims[:-2]

    def a_index(lead: Index, i: Expr, k: Expr) -> Index:
        return (*broadcast_index(lead, lhs_batch), *((k, i) if attrs["ta"] else (i, k)))

    def b_index(lead: Index, k: Expr, j: Expr) -> Index:
        return (*broadcast_index(lead, rhs_batch), *((j, k) if attrs["tb"] else (k, j)))

    lead = tuple(tirx.Var(f"l{i}", "int32") for i in range(len(batch)))
    fixed = tirx.Var("f", "int32")
    # A common left operand of one row block per batch is one tall product when the right operand is the same for the whole batch.
    product = Product(
        out,
        tuple(batch),
        m,
        n,
        k,
        lambda b, i, k: body.at(lhs, a_index(b, i, k)),
        lambda b, k, j: body.at(rhs, b_index(b, k, j)),
        lambda b, i, j: (*b, i, j),
        _contiguous(body, lhs, lambda v: a_index(lead, fixed, v), k),
        _contiguous(body, rhs, lambda v: b_index(lead, fixed, v), n),
        k > 1 and _contiguous(body, rhs, lambda v: b_index(lead, v, fixed), k),
    )
    if batch and prod(rhs_batch) == 1 and not attrs["ta"]:
        product = _tall(body, op, product, lhs, rhs, a_index, b_index)
    emit_product(body, product)


def _tall(
    body: Body,
    op: Op,
    p: Product,
    lhs: Value,
    rhs: Value,
    a_index: Callable[[Index, Expr, Expr], Index],
    b_index: Callable[[Index, Expr, Expr], Index],
) -> Product:
    """Batch and rows taken as one row dimension: the right operand is the same for all of the batch."""
    shape = (*p.batch, p.m)

    def split(i: Expr) -> tuple[Index, Expr]:
        index = unravel(i, shape)
        return index[:-1], index[-1]

    def a(_: Index, i: Expr, k: Expr) -> Expr:
        lead, row = split(i)
        return body.at(lhs, a_index(lead, row, k))

    def b(_: Index, k: Expr, j: Expr) -> Expr:
        return body.at(rhs, b_index((literal(0, "i32"),) * len(p.batch), k, j))

    def place(_: Index, i: Expr, j: Expr) -> Index:
        lead, row = split(i)
        return (*lead, row, j)

    return Product(p.out, (), prod(shape), p.n, p.k, a, b, place, p.a_along_k, p.b_along_j, p.b_along_k)


# ---------------------------------------------------------------------------------------- the loops


class _Tiles:
    """Emits one product."""

    def __init__(self, body: Body, p: Product) -> None:
        self.body, self.p, self.emit = body, p, body.emit
        self.dtype = p.out.type.dtype
        self.lanes = max(body.lanes * 4 // ITEM_BYTES[self.dtype], 1)
        machine = body.machine
        self.rows = tile_rows(p.m, machine.rows)
        budget = machine.rows * machine.vectors
        self.vectors = min(max(budget // self.rows, 1), 8) if self.rows < machine.rows else machine.vectors
        if self.rows >= machine.rows and p.n == 2 * machine.vectors * self.lanes:
            # As wide as the result: no second pass over A.
            self.rows, self.vectors = tile_rows(p.m, machine.rows // 2), 2 * machine.vectors
        self.vectors = min(self.vectors, ceil_div(p.n, self.lanes))
        self.width = self.vectors * self.lanes
        self.k_blocks = ceil_div(p.k, _K_BLOCK) if p.k > _LONGEST_K else 1
        self.k_size = ceil_div(p.k, self.k_blocks)
        self.pack_a = not p.a_along_k or self.k_blocks > 1
        self.pack_b = p.m > 2 * machine.rows or not p.b_along_j
        self.row_block = p.m
        if self.pack_a and p.m > 2 * _ROW_BLOCK:
            self.row_block = _ROW_BLOCK // self.rows * self.rows
        self.zero = literal(0, self.dtype)
        # Little to do behind the product: do it on the registers, in unrolled code. Else a copy of the tile is gone through in loops.
        self.light = len(body.group.ops) <= 2

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
        partial = emit.alloc(rows * self.p.n, self.dtype, "partial") if self.k_blocks > 1 else None
        if self.k_blocks == 1:
            self._panels(lead, start, rows, 0, self.k_size, None, None, kind)
            return
        last = self.p.k - (self.k_blocks - 1) * self.k_size
        with emit.loop(self.k_blocks - 1, SERIAL, "q") as q, self.body.point():
            first = tirx.EQ(q, 0) if self.k_blocks > 2 else True
            self._panels(lead, start, rows, q * self.k_size, self.k_size, partial, first, kind)
        with self.body.point():
            self._panels(lead, start, rows, (self.k_blocks - 1) * self.k_size, last, partial, None, kind)

    def _panels(
        self, lead: Index, start: Expr, rows: int, k_from: Expr, k_size: int, partial: Buffer | None, first: object, kind: object
    ) -> None:
        """All columns of a row block for one k block. With `first` given, sums are left in `partial`; without, they are finished."""
        emit, p = self.emit, self.p
        packed = self._pack_a(lead, start, rows, k_from, k_size) if self.pack_a else None
        panels, tail = divmod(p.n, self.width)
        if panels:
            with emit.loop(panels, kind, "jo") as jo, self.body.point():
                self._panel(
                    lead,
                    start,
                    rows,
                    k_from,
                    k_size,
                    partial,
                    first,
                    packed,
                    jo * self.width if panels > 1 else literal(0, "i32"),
                    self.width,
                )
        if tail:
            with emit.loop(1), self.body.point():
                self._panel(lead, start, rows, k_from, k_size, partial, first, packed, literal(panels * self.width, "i32"), tail)

    def _panel(
        self,
        lead: Index,
        start: Expr,
        rows: int,
        k_from: Expr,
        k_size: int,
        partial: Buffer | None,
        first: object,
        packed: Buffer | None,
        j: Expr,
        columns: int,
    ) -> None:
        emit = self.emit
        panel = self._pack_b(lead, k_from, k_size, j, columns) if self.pack_b else None
        count, odd = divmod(rows, self.rows)
        with emit.loop(count, SERIAL, "io") as io, self.body.point():
            at = io * self.rows if count > 1 else literal(0, "i32")
            self._tile(lead, start, at, self.rows, k_from, k_size, partial, first, packed, io, panel, j, columns)
        if odd:
            with self.body.point():
                at = literal(count * self.rows, "i32")
                self._tile(lead, start, at, odd, k_from, k_size, partial, first, packed, literal(count, "i32"), panel, j, columns)

    def _pack_a(self, lead: Index, start: Expr, rows: int, k_from: Expr, k_size: int) -> Buffer:
        """[tiles, k, mi], the tiles of all full row tiles, then the rows that are left, in the same layout."""
        emit, mi = self.emit, self.rows
        tiles = ceil_div(rows, mi)
        packed = emit.alloc(tiles * k_size * mi, self.dtype, "ap")
        count, odd = divmod(rows, mi)

        def copy(io: Expr, height: int) -> None:
            with emit.loop(k_size, SERIAL, "k") as k:
                if height in (4, 8, 16):
                    with emit.loop(height, VECTOR, "ii") as ii, self.body.point():
                        value = self.p.a(lead, start + io * mi + ii, k_from + k)
                        emit.store(packed, value, (io * k_size + k) * mi + ii)
                else:
                    for r in range(height):
                        with self.body.point():
                            value = self.p.a(lead, start + io * mi + r, k_from + k)
                            emit.store(packed, value, (io * k_size + k) * mi + r)

        if count:
            with emit.loop(count, SERIAL, "io") as io:
                copy(io, mi)
        if odd:
            copy(literal(count, "i32"), odd)
        return packed

    def _pack_b(self, lead: Index, k_from: Expr, k_size: int, j: Expr, columns: int) -> Buffer:
        emit = self.emit
        width = ceil_div(columns, self.lanes) * self.lanes
        panel = emit.alloc(k_size * width, self.dtype, "bp")
        with emit.loop(k_size, SERIAL, "k") as k:
            for v in range(columns // self.lanes):
                with emit.loop(self.lanes, VECTOR, "ji") as ji, self.body.point():
                    emit.store(panel, self.p.b(lead, k_from + k, j + (v * self.lanes + ji)), k * width + (v * self.lanes + ji))
            rest = columns % self.lanes
            if rest:
                base = columns - rest
                with emit.loop(rest, SERIAL, "ji") as ji, self.body.point():
                    emit.store(panel, self.p.b(lead, k_from + k, j + (base + ji)), k * width + (base + ji))
                with emit.loop(self.lanes - rest, SERIAL, "ji") as ji:
                    emit.store(panel, self.zero, k * width + (columns + ji))
        return panel

    def _tile(
        self,
        lead: Index,
        start: Expr,
        at: Expr,
        height: int,
        k_from: Expr,
        k_size: int,
        partial: Buffer | None,
        first: object,
        packed: Buffer | None,
        io: Expr,
        panel: Buffer | None,
        j: Expr,
        columns: int,
    ) -> None:
        emit, p, lanes = self.emit, self.p, self.lanes
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
        with emit.loop(k_size, SERIAL, "k") as k, self.body.point():
            # The order matters: a row of B in registers, then row by row one value of A, so that few registers are live besides the sums.
            line = emit.alloc(width, self.dtype, "b")
            for span in spans:
                with self._over(span) as c, self.body.point():
                    other = tirx.BufferLoad(panel, [k * width + c]) if padded else p.b(lead, k_from + k, j + c)
                    emit.store(line, other, c)
            for r, acc in enumerate(accs):
                if packed is not None:
                    x = emit.bind(tirx.BufferLoad(packed, [(io * k_size + k) * self.rows + r]), "a")
                else:
                    x = p.a(lead, start + at + r, k_from + k)
                for span in spans:
                    with self._over(span) as c:
                        emit.store(acc, tirx.BufferLoad(acc, [c]) + x * tirx.BufferLoad(line, [c]), c)
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
        done = len(direct) * lanes
        if partial is not None:
            self._over_tile(
                height, columns, 0, lambda row, c: self._exchange(tile, partial, (at + row) * p.n + j + c, row * width + c, first)
            )
            if first is not None:
                return

        def finish(row: Expr, c: Expr) -> None:
            self.body.finish({p.out: (tirx.BufferLoad(tile, [row * width + c]), p.place(lead, start + at + row, j + c))})

        self._over_tile(height, columns, done, finish)

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
    emit, dtype = body.emit, p.out.type.dtype
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
    if p.m <= _DOT_ROWS and p.a_along_k and p.b_along_k and len(body.group.ops) <= _DOT_COLUMNS and p.k > 0:
        _emit_dots(body, p)
    else:
        _Tiles(body, p).run()
