"""Matrix products of a few rows, or of short sums: what counts is memory.

In: a Product of at most 16 rows, or of sums of at most four numbers. Out: loops of one of three kinds.

Short sums, B contiguous along j:           for columns block: all of B in registers; for each row the sums, then `Body.finish`
B contiguous along k, up to four rows:      for four columns at once, vectors run along k and are folded at the end.
B contiguous along j, up to sixteen rows:   for columns block:
                                                sums [m, columns] = 0, in the first cache or near it
                                                for some rows of B at once, for vector of columns:   sums += A * these rows
                                                then `Body.finish` for each vector
With few rows B streams from memory once, in the order in which it lies there. A panel of B as wide as a tile would be read in
pieces of 256 bytes from another page each: 20 GB/s where whole rows give 29. The rows of B that are taken together are held in
registers, so that sums are loaded and stored once for all of them: twelve rows of two vectors for 16 rows of A. Limits: the
last columns, fewer than a vector, take shorter and shorter vectors; a B of no more columns than sums fit the cache is shared by two threads.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, compute_dtype, literal
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.ir.types import ITEM_BYTES

DOT_ROWS = 4
_DOT_COLUMNS = 4


def emit_dots(body: Body, p: Product) -> None:
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
                body.finish(
                    {p.out: (tirx.BufferLoad(acc, [literal(0, "i32")]), p.place(lead, literal(i, "i32"), j + c))}
                )

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


SHORT_K = 4


def emit_short(body: Body, p: Product) -> None:
    """Sums of a few numbers: a block of B stays in registers while all rows of A pass by."""
    emit, dtype = body.emit, compute_dtype(p.out.type.dtype)
    lanes = max(body.lanes * 4 // ITEM_BYTES[dtype], 1)
    width = min(body.machine.product_vectors, p.n // lanes) * lanes

    def block(lead: Index, j: Expr, columns: int, size: int) -> None:
        """`columns` columns, in vectors of `size`."""
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
    blocks, rest = divmod(p.n, width)
    with emit.loop(prod(p.batch), SERIAL if alone else kind, "b") as b:
        lead = unravel(b, p.batch)
        with emit.loop(blocks, kind if alone else SERIAL, "jo") as jo, body.point():
            block(lead, jo * width, width, lanes)
        done, size = p.n - rest, lanes
        while rest:
            count = rest // size * size
            if count:
                with body.point():
                    block(lead, literal(done, "i32"), count, size)
            done, rest, size = done + count, rest - count, size // 2


STREAM_ROWS = 16
# Narrower results are left to tiles.
STREAM_COLUMNS = 128
# Up to so many rows of A, the rows of B are what is loaded most, and one vector of each at a time is enough.
_THIN = 4
_TOGETHER_THIN = 8
# Sums of a block of columns: a part of the second cache, so that long runs of B are read. A block is never all columns of a B that
# leaves that cache, so that threads can share them.
_SUM_BYTES = 256 << 10
_LARGE_B = 1 << 20


def has_few_rows(body: Body, p: Product) -> bool:
    """Whether the product is for these loops: few rows, and little to do behind it."""
    return p.m <= STREAM_ROWS and p.k > 0 and len(body.group.ops) <= _DOT_COLUMNS


def emit_streams(body: Body, p: Product) -> None:
    emit, dtype = body.emit, compute_dtype(p.out.type.dtype)
    lanes = max(body.lanes * 4 // ITEM_BYTES[dtype], 1)
    sums = body.machine.product_rows * body.machine.product_vectors
    vectors = 1 if p.m <= _THIN else 2
    together = min(_TOGETHER_THIN if p.m <= _THIN else sums // vectors, sums, p.k)
    width = vectors * lanes
    zero = literal(0, dtype)
    most = max(_SUM_BYTES // (ITEM_BYTES[dtype] * p.m) // width * width, width)
    whole_columns = p.n // width * width
    columns = min(most, whole_columns if p.n * p.k < _LARGE_B else max(whole_columns // width // 2, 1) * width)

    def rows_of_b(lead: Index, start: Expr, block: Buffer, j: Expr, k: Expr, count: int, size: int) -> None:
        """Adds to sums what `count` rows of B give, for `size` columns from `start` + `j` on."""
        held, step = [], min(lanes, size)
        for r in range(count):
            row = emit.alloc(size, dtype, "b")
            for v in range(0, size, step):
                if size == 1:
                    with body.point():
                        emit.store(row, p.b(lead, k + r, start + j), literal(0, "i32"))
                else:
                    with emit.loop(step, VECTOR, "l") as lane, body.point():
                        emit.store(row, p.b(lead, k + r, start + (j + (lane + v if v else lane))), lane + v)
            held.append(row)
        with emit.loop(p.m, SERIAL, "i") as i, body.point():
            pieces = [(v, step) for v in range(0, size, step)]

            def at(offset: Expr, n: int) -> Expr:
                return tirx.Ramp(offset, 1, n) if n > 1 else offset

            acc = emit.alloc(size, dtype, "acc")
            for v, n in pieces:
                emit.store(acc, tirx.BufferLoad(block, [at(i * columns + j + v, n)]), at(literal(v, "i32"), n))
            for r in range(count):
                x = p.a(lead, i, k + r)
                for v, n in pieces:
                    place = at(literal(v, "i32"), n)
                    factor = tirx.Broadcast(x, n) if n > 1 else x
                    emit.store(acc, tirx.BufferLoad(acc, [place]) + factor * tirx.BufferLoad(held[r], [place]), place)
            for v, n in pieces:
                emit.store(block, tirx.BufferLoad(acc, [at(literal(v, "i32"), n)]), at(i * columns + j + v, n))

    def block_of(lead: Index, start: Expr, count: int) -> None:
        """All sums of `count` columns, which are whole vectors, or a smaller power of two."""
        block = emit.alloc(p.m * columns, dtype, "sums")
        size = min(width, count)
        with emit.loop(p.m, SERIAL, "i") as i:
            for c, _ in emit.spans(count, lanes):
                emit.store(block, zero, i * columns + c)
        turns, rest = divmod(p.k, together)
        with emit.loop(turns, SERIAL, "k") as k, emit.loop(count // size, SERIAL, "j") as j, body.point():
            rows_of_b(lead, start, block, j * size, k * together, together, size)
        if rest:
            with emit.loop(count // size, SERIAL, "j") as j, body.point():
                rows_of_b(lead, start, block, j * size, literal(turns * together, "i32"), rest, size)
        with emit.loop(p.m, SERIAL, "i") as i:
            for c, _ in emit.spans(count, lanes):
                with body.point():
                    body.finish({p.out: (tirx.BufferLoad(block, [i * columns + c]), p.place(lead, i, start + c))})

    kind = parallel_if(body.machine, prod(p.batch) * p.m * p.n * p.k // 8)
    alone = prod(p.batch) == 1
    with emit.loop(prod(p.batch), SERIAL if alone else kind, "b") as b:
        lead = unravel(b, p.batch)
        blocks, tail = divmod(whole_columns, columns)
        with emit.loop(blocks, kind if alone else SERIAL, "jo") as jo, body.point():
            block_of(lead, jo * columns, columns)
        if tail:
            with emit.loop(1), body.point():
                block_of(lead, literal(blocks * columns, "i32"), tail)
        done, size = whole_columns, lanes
        while done < p.n:
            # What is left: shorter and shorter vectors, down to a single column.
            count = (p.n - done) // size * size
            if count:
                with body.point():
                    block_of(lead, literal(done, "i32"), count)
            done, size = done + count, size // 2
