"""The last columns of a matrix product, fewer than half a vector: several steps along k share a vector.

In: a Product whose left operand lies along k, and the columns. Out:

    pack B [k / t, columns, t]      t steps of a column side by side; columns padded with zeros to a power of two
    for row tile:   sums [rows, columns, t] += t neighbours of a row of A, over and over, * a vector of B
                    fold the t sums of each column;  the steps left over, one by one;  `Body.finish` for each element

Limits of the speed: a vector of A costs one load, whatever t is. So three columns take a quarter of the multiply-adds
that a padded vector of columns takes. A row is not read past its end. The last steps read single elements, and only
after folding. Padding them would multiply 0 by an element that may be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import SERIAL, TVM_DTYPES, Buffer, Expr, ceil_div, literal, load
from penstock.backends.tvm.kernels.tools.product_terms import Product


def steps_together(p: Product, columns: int, dtype: str, lanes: int) -> int:
    """Return how many steps along k share a vector; 1 where these loops do not fit."""
    if not 0 < columns <= lanes // 2 or not p.a_along_k or p.a_address is None:
        return 1
    zero = literal(0, "i32")
    address = p.a_address(tuple(zero for _ in p.batch), zero, zero)
    if address is None or TVM_DTYPES[address[0].type.dtype] != TVM_DTYPES[dtype]:
        return 1
    steps = lanes >> (columns - 1).bit_length()
    return steps if p.k >= steps else 1


@dataclass(frozen=True)
class Narrow:
    """The last `columns` columns of a product, from `j` on. Their packed panel starts at `at`."""

    body: Body
    p: Product
    lead: Index
    j: Expr
    columns: int
    dtype: str
    lanes: int
    steps: int
    packed: Buffer
    at: Expr | int = 0

    def pack(self) -> None:
        emit, p, lanes, steps = self.body.emit, self.p, self.lanes, self.steps
        groups, tail = divmod(p.k, steps)
        with emit.loop(groups, SERIAL, "k") as group:
            for lane in range(lanes):
                c, s = divmod(lane, steps)
                with self.body.point():
                    self._keep(group * steps + s, c, self.at + group * lanes + lane)
        with emit.loop(tail, SERIAL, "k") as left:
            for lane in range(lanes):
                with self.body.point():
                    self._keep(left + groups * steps, lane // steps, self.at + (left + groups) * lanes + lane)

    def _keep(self, k: Expr, c: int, place: Expr) -> None:
        value = self.p.b(self.lead, k, self.j + c) if c < self.columns else literal(0, self.dtype)
        self.body.emit.store(self.packed, value, place)

    def rows(self, start: Expr, rows: int, most: int) -> None:
        """Emit all rows from `start` on, in tiles of at most `most`, as equal as possible."""
        height = ceil_div(rows, ceil_div(rows, most))
        count, odd = divmod(rows, height)
        with self.body.emit.loop(count, SERIAL, "io") as io, self.body.point():
            self._tile(start + io * height, height)
        if odd:
            with self.body.point():
                self._tile(start + count * height, odd)

    def _tile(self, start: Expr, height: int) -> None:
        body, emit, p, lanes, steps = self.body, self.body.emit, self.p, self.lanes, self.steps
        groups, tail = divmod(p.k, steps)
        everywhere = tirx.Ramp(literal(0, "i32"), 1, lanes)
        sums = [emit.alloc(lanes, self.dtype, "acc") for _ in range(height)]
        for total in sums:
            emit.store(total, tirx.Broadcast(literal(0, self.dtype), lanes), everywhere)

        def add(total: Buffer, value: Expr) -> None:
            emit.store(total, tirx.BufferLoad(total, [everywhere]) + value, everywhere)

        def line_of(number: Expr) -> Expr:
            line = emit.alloc(lanes, self.dtype, "b")
            emit.store(line, load(self.packed, tirx.Ramp(self.at + number * lanes, 1, lanes)), everywhere)
            return tirx.BufferLoad(line, [everywhere])

        order = [literal(lane, "i32") for lane in range(lanes)]
        with emit.loop(groups, SERIAL, "k") as group:
            line = line_of(group)
            for r, total in enumerate(sums):
                with body.point():
                    assert p.a_address is not None
                    address = p.a_address(self.lead, start + r, group * steps)
                    assert address is not None
                    source, place = body.memory(address)
                    few = tirx.BufferLoad(source, [tirx.Ramp(place, 1, steps)])
                    add(total, tirx.Shuffle([few] * (lanes // steps), order) * line)
        half = steps
        while half > 1:
            half //= 2
            other = [literal(lane ^ half, "i32") for lane in range(lanes)]
            for total in sums:
                add(total, tirx.Shuffle([tirx.BufferLoad(total, [everywhere])], other))
        for left in range(tail):
            line = line_of(literal(groups + left, "i32"))
            for r, total in enumerate(sums):
                with body.point():
                    x = p.a(self.lead, start + r, literal(groups * steps + left, "i32"))
                    add(total, tirx.Broadcast(x, lanes) * line)
        tile = emit.alloc(height * lanes, self.dtype, "tile")
        for r, total in enumerate(sums):
            emit.store(tile, tirx.BufferLoad(total, [everywhere]), tirx.Ramp(literal(r * lanes, "i32"), 1, lanes))
        with emit.loop(height, SERIAL, "r") as row:
            for c in range(self.columns):
                with body.point():
                    value = tirx.BufferLoad(tile, [row * lanes + c * steps])
                    body.finish({p.out: (value, p.place(self.lead, start + row, self.j + c))})
