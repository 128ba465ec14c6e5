"""Matrix products of a few rows, or of short sums, whose speed is that of memory.

In: a Product of at most 16 rows, or of sums of at most four numbers. Out: loops of one of three kinds.

Short sums, B contiguous along j:           for columns block: all of B in registers; for each row the sums,
                                                then `Body.finish`
B contiguous along k, up to four rows:      for some columns at once, vectors run along k and are folded at the end.
B contiguous along j, up to sixteen rows:   for columns block:
                                                sums [m, columns] = 0, in the first cache or near it
                                                for some rows of B at once, for vector of columns:
                                                    sums += A * these rows
                                                then `Body.finish` for each vector

With few rows, B streams from memory once, in the order in which it lies there. Panels of B as wide as a tile would be
read in pieces of 256 bytes from another page each: 20 GB/s where whole rows give 29. A group of rows of B is held in
registers, so that sums are loaded and stored once for all of them: twelve rows of two vectors for 16 rows of A. Limits:
the last columns, fewer than a vector, take shorter and shorter vectors. Two threads share a B that has no more columns
than the cache has room for sums.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, compute_dtype, literal
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.types import ITEM_BYTES

DOT_ROWS = 4
# Columns at once, twice as many for one row: each is a stream of its own (one row, 1000 columns of 1280 that lie in no
# cache: 279 us by four, 229 by eight, 185 by eight that are asked for beforehand).
_DOT_COLUMNS = 4
# Elements of a B that does not stay in the second cache.
_FAR = 65536


def emit_dots(body: Body, p: Product) -> None:
    """Emit a product of few rows with both operands contiguous along k, by vectors along k that are folded at the end.
    Packing would cost more than the product."""
    emit, dtype = body.emit, compute_dtype(p.out.type.dtype)
    lanes = max(body.lanes * 4 // ITEM_BYTES[dtype], 1)
    width = _DOT_COLUMNS * (2 if p.m == 1 else 1)

    def block(lead: Index, j: Expr, columns: int) -> None:
        sums = emit.alloc(p.m * columns, dtype, "sums")
        accs = {(i, c): emit.alloc(lanes, dtype, "acc") for i in range(p.m) for c in range(columns)}
        for acc in accs.values():
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(acc, literal(0, dtype), lane)
        for k, lane in emit.spans(p.k, lanes, name="k"):
            with body.point():
                row = [p.a(lead, literal(i, "i32"), k) for i in range(p.m)]
                for c in range(columns):
                    _ask_ahead(body, p, lead, k, j + (c + columns))
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
            emit.store(sums, tirx.BufferLoad(acc, [literal(0, "i32")]), literal(i * columns + c, "i32"))
        for i in range(p.m):
            for c, _ in pieces(emit, columns, columns):
                with body.point():
                    value = tirx.BufferLoad(sums, [c + i * columns])
                    body.finish({p.out: (value, p.place(lead, literal(i, "i32"), j + c))})

    assert p.k
    blocks, odd = divmod(p.n, width)
    kind = parallel_if(body.machine, prod(p.batch) * p.m * p.n * p.k // 8)
    with emit.loop(prod(p.batch), kind if prod(p.batch) > 1 else SERIAL, "b") as b:
        lead = unravel(b, p.batch)
        if blocks:
            with emit.loop(blocks, kind if prod(p.batch) == 1 else SERIAL, "jo") as jo, body.point():
                block(lead, jo * width, width)
        if odd:
            with body.point():
                block(lead, literal(blocks * width, "i32"), odd)


def _ask_ahead(body: Body, p: Product, lead: Index, k: Expr, j: Expr) -> None:
    """Ask for a vector of column j of a B that does not stay in the second cache. The processor's own prediction ends
    with a page, which is about as long as a column."""
    address = p.b_address(lead, k, j) if p.b_address is not None and p.n * p.k >= _FAR else None
    if address is not None:
        buffer, position = body.memory(address)
        body.emit.prefetch_ahead(buffer, position, 0, False, near=False)


SHORT_K = 4


def emit_short(body: Body, p: Product) -> None:
    """Emit a product of short sums: a block of B stays in registers while all rows of A pass by."""
    emit, dtype = body.emit, compute_dtype(p.out.type.dtype)
    lanes = max(body.lanes * 4 // ITEM_BYTES[dtype], 1)
    width = min(body.machine.product_vectors, p.n // lanes) * lanes

    def block(lead: Index, j: Expr, columns: int, size: int) -> None:
        """Emit `columns` columns, in vectors of `size`."""
        parts = range(0, columns, size)
        held = [[emit.alloc(size, dtype, "b") for _ in parts] for _ in range(p.k)]
        for k, row in enumerate(held):
            for offset, line in zip(parts, row, strict=True):
                with emit.loop(size, VECTOR if size > 1 else SERIAL, "l") as lane, body.point():
                    emit.store(line, p.b(lead, literal(k, "i32"), j + (lane + offset)), lane)
        with body.stream(), emit.loop(p.m, SERIAL, "i") as i, body.point():
            factors = [p.a(lead, i, literal(k, "i32")) for k in range(p.k)]
            for number, offset in enumerate(parts):
                with emit.loop(size, VECTOR if size > 1 else SERIAL, "l") as lane, body.point():
                    total = factors[0] * tirx.BufferLoad(held[0][number], [lane])
                    for k in range(1, p.k):
                        total = total + factors[k] * tirx.BufferLoad(held[k][number], [lane])
                    body.finish({p.out: (total, p.place(lead, i, j + (lane + offset)))})

    kind = parallel_if(body.machine, prod(p.batch) * p.m * p.n)
    alone = prod(p.batch) == 1
    blocks, left = divmod(p.n, width)
    with emit.loop(prod(p.batch), SERIAL if alone else kind, "b") as b:
        lead = unravel(b, p.batch)
        with emit.loop(blocks, kind if alone else SERIAL, "jo") as jo, body.point():
            block(lead, jo * width, width, lanes)
        done, size = p.n - left, lanes
        while left:
            count = left // size * size
            if count:
                with body.point():
                    block(lead, literal(done, "i32"), count, size)
            done, left, size = done + count, left - count, size // 2


STREAM_ROWS = 16
# Narrower results are left to tiles.
STREAM_COLUMNS = 128
# The most operations of a kernel that is emitted once for each of many vectors.
_SHORT = 4
# Up to so many rows of A, most loads are of rows of B. One vector of each at a time is then enough.
_THIN = 4
_TOGETHER_THIN = 8
# Sums of a block of columns: a part of the second cache, so that long runs of B are read. A block is never all columns
# of a B that leaves that cache, so that threads can share them.
_SUM_BYTES = 256 << 10
_LARGE_B = 1 << 20


def has_few_rows(body: Body, p: Product) -> bool:
    """Return whether the product has few rows and a short epilogue, as these loops need."""
    return p.m <= STREAM_ROWS and p.k > 0 and len(body.group.ops) <= _SHORT


def is_dots(p: Product) -> bool:
    """Return whether the product has few rows, and both operands are contiguous along k."""
    return 0 < p.m <= DOT_ROWS and p.k > 0 and p.a_along_k and p.b_along_k


def emit_streams(body: Body, p: Product) -> None:
    """Emit a product of few rows with B contiguous along j, which is read once, row by row."""
    _StreamedProduct(body, p).run()


class _StreamedProduct:
    """The emitter of the loops of a product that streams B from memory."""

    def __init__(self, body: Body, p: Product) -> None:
        self.body, self.p, self.emit = body, p, body.emit
        self.dtype = compute_dtype(p.out.type.dtype)
        self.lanes = max(body.lanes * 4 // ITEM_BYTES[self.dtype], 1)
        sums = body.machine.product_rows * body.machine.product_vectors
        vectors = 1 if p.m <= _THIN else 2
        # Rows of B in registers at once.
        self.together = min(_TOGETHER_THIN if p.m <= _THIN else sums // vectors, sums, p.k)
        self.width = vectors * self.lanes
        most = max(_SUM_BYTES // (ITEM_BYTES[self.dtype] * p.m) // self.width * self.width, self.width)
        self.whole_columns = p.n // self.width * self.width
        shared = max(self.whole_columns // self.width // 2, 1) * self.width
        # Columns of a block.
        self.columns = min(most, self.whole_columns if p.n * p.k < _LARGE_B else shared)

    def run(self) -> None:
        p, emit = self.p, self.emit
        kind = parallel_if(self.body.machine, prod(p.batch) * p.m * p.n * p.k // 8)
        alone = prod(p.batch) == 1
        with emit.loop(prod(p.batch), SERIAL if alone else kind, "b") as b:
            lead = unravel(b, p.batch)
            blocks, tail = divmod(self.whole_columns, self.columns)
            with emit.loop(blocks, kind if alone else SERIAL, "jo") as jo, self.body.point():
                self._block(lead, jo * self.columns, self.columns)
            if tail:
                with emit.loop(1), self.body.point():
                    self._block(lead, literal(blocks * self.columns, "i32"), tail)
            done, size = self.whole_columns, self.lanes
            while done < p.n:
                # The columns left over take shorter and shorter vectors, down to a single column.
                count = (p.n - done) // size * size
                if count:
                    with self.body.point():
                        self._block(lead, literal(done, "i32"), count)
                done, size = done + count, size // 2

    def _block(self, lead: Index, start: Expr, count: int) -> None:
        """Emit all sums of `count` columns, which are whole vectors or a smaller power of two."""
        emit, body, p = self.emit, self.body, self.p
        sums = emit.alloc(p.m * self.columns, self.dtype, "sums")
        size = min(self.width, count)
        zero = literal(0, self.dtype)
        with emit.loop(p.m, SERIAL, "i") as i:
            for c, _ in emit.spans(count, self.lanes):
                emit.store(sums, zero, i * self.columns + c)
        turns, left = divmod(p.k, self.together)
        with emit.loop(turns, SERIAL, "k") as k, emit.loop(count // size, SERIAL, "j") as j, body.point():
            held = self._rows_of_b(lead, start, j * size, k * self.together, self.together, size)
            self._add(lead, sums, j * size, k * self.together, held, size)
        if left:
            with emit.loop(count // size, SERIAL, "j") as j, body.point():
                first = literal(turns * self.together, "i32")
                held = self._rows_of_b(lead, start, j * size, first, left, size)
                self._add(lead, sums, j * size, first, held, size)
        with emit.loop(p.m, SERIAL, "i") as i:
            for c, _ in emit.spans(count, self.lanes):
                with body.point():
                    value = tirx.BufferLoad(sums, [i * self.columns + c])
                    body.finish({p.out: (value, p.place(lead, i, start + c))})

    def _rows_of_b(self, lead: Index, start: Expr, j: Expr, k: Expr, count: int, size: int) -> list[Buffer]:
        """Load `count` rows of B from `k` on, `size` columns from `start` + `j` on."""
        emit, step = self.emit, min(self.lanes, size)
        held = []
        for r in range(count):
            row = emit.alloc(size, self.dtype, "b")
            for v in range(0, size, step):
                if size == 1:
                    with self.body.point():
                        emit.store(row, self.p.b(lead, k + r, start + j), literal(0, "i32"))
                else:
                    with emit.loop(step, VECTOR, "l") as lane, self.body.point():
                        column = start + (j + (lane + v if v else lane))
                        emit.store(row, self.p.b(lead, k + r, column), lane + v)
            held.append(row)
        return held

    def _add(self, lead: Index, sums: Buffer, j: Expr, k: Expr, held: list[Buffer], size: int) -> None:
        """Add to the sums of `size` columns from `j` on the products of A and the rows of B from `k` on."""
        emit, step = self.emit, min(self.lanes, size)

        def at(offset: Expr) -> Expr:
            return tirx.Ramp(offset, 1, step) if step > 1 else offset

        with emit.loop(self.p.m, SERIAL, "i") as i, self.body.point():
            acc = emit.alloc(size, self.dtype, "acc")
            for v in range(0, size, step):
                emit.store(acc, tirx.BufferLoad(sums, [at(i * self.columns + j + v)]), at(literal(v, "i32")))
            for r, row in enumerate(held):
                x = self.p.a(lead, i, k + r)
                for v in range(0, size, step):
                    place = at(literal(v, "i32"))
                    factor = tirx.Broadcast(x, step) if step > 1 else x
                    emit.store(acc, tirx.BufferLoad(acc, [place]) + factor * tirx.BufferLoad(row, [place]), place)
            for v in range(0, size, step):
                emit.store(sums, tirx.BufferLoad(acc, [at(literal(v, "i32"))]), at(i * self.columns + j + v))
