"""Exact products of bytes less their zero points.

In: a `matmul_bytes`. Out: the loops of quantised.py with one group, the whole row. With s = x as a number with sign,
u = the weight as one without, and their zero points moved alike,

    sum (x - zero)(weight - zeros)  =  sum s u  -  zeros * sum s  -  zero * (sum u - k * zeros)

Sums of u stand behind the packed weight, sums of s are made once for each row. No step saturates: one instruction adds
up four products of bytes in 32 bits (AVX-512 VNNI), or two of 16-bit numbers. Rows are filled with zeros to whole
vectors. Limit: the bytes are copied once, also where they could be read in place.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, i32
from penstock.ir.graph import Op

from .quantised import QuantisedProduct, QuantisedTile, RoundedRows
from .quantised_packing import QuantisedPacking, QuantisedSizes


def emit_matmul_bytes(body: Body, op: Op) -> None:
    """Emit a product of bytes."""
    machine, x = body.machine, op.ins[0].type
    depth = 4 if machine.has_byte_products else 2
    if machine.lanes == 16 and depth == 2 and not machine.has_words:
        raise NotOneKernel("the processor multiplies no vectors of 16-bit numbers")
    padded = ceil_div(x.dims[-1], machine.lanes) * machine.lanes
    sizes = QuantisedSizes(
        rows=prod(x.dims[:-1]),
        n=op.ins[1].type.dims[1],
        k=padded,
        bits=8,
        group=padded,
        lanes=machine.lanes,
        depth=depth,
        scale_bytes=4,
        has_zeros=False,
    )
    _ByteProduct(body, op, sizes).run("i8")


def _moved(kind: str, *, signed: bool) -> int:
    """Return what is added to bytes of a type so that they have a sign, or have none."""
    if signed:
        return 0 if kind == "i8" else -128
    return 128 if kind == "i8" else 0


class _BytePacking(QuantisedPacking):
    """The packing of a weight [k, n] with the sums of its columns where scales would stand."""

    def _element(self, column: Expr, k: Expr) -> Expr:
        weight = self.op.ins[1]
        terms = weight.type.dims[0]
        value = tirx.Cast("int32", self.body.at(weight, (tirx.min(k, i32(terms - 1)), column)))
        return tirx.Select(k < terms, value + _moved(weight.type.dtype, signed=False), i32(0))

    def _scale(self, j: Expr, g: Expr, w: Expr) -> Expr:
        total = self.emit.alloc(1, "i32", "sum")
        self.emit.store(total, i32(0), i32(0))
        with self.emit.loop(self.op.ins[1].type.dims[0], SERIAL, "k") as k, self.body.point():
            element = self._element(self._column(j, w), k)
            self.emit.store(total, tirx.BufferLoad(total, [i32(0)]) + element, i32(0))
        return tirx.BufferLoad(total, [i32(0)])


class _ByteProduct(QuantisedProduct):
    """The emitter of the loops of one product of bytes."""

    def _packing(self) -> QuantisedPacking:
        return _BytePacking(self.body, self.op, self.s)

    def _rounded(self) -> RoundedRows:
        """Copy all rows of x as numbers with sign, and add them up."""
        s, emit = self.s, self.emit
        numbers = emit.scratch(s.rows * s.k, "int8" if s.depth == 4 else "int16", "xq")
        sums = emit.alloc(s.rows, "i32", "sums")
        with emit.loop(s.rows, parallel_if(self.body.machine, s.rows * s.k), "i") as i, self.body.point():
            total = emit.alloc(s.lanes, "i32", "total")
            with emit.loop(s.lanes, VECTOR, "l") as lane:
                emit.store(total, i32(0), lane)
            whole, odd = divmod(self.op.ins[0].type.dims[-1], s.lanes)
            with emit.loop(whole, SERIAL, "k") as k, self.body.point():
                self._copy(numbers, total, i, k * s.lanes, VECTOR)
            if odd:
                self._copy(numbers, total, i, i32(whole * s.lanes), SERIAL)
            emit.store(sums, self._folded(total), i)
        return RoundedRows(numbers, None, sums)

    def _copy(self, numbers: Buffer, total: Buffer, i: Expr, first: Expr, kind: str) -> None:
        """Copy a vector of a row; a serial loop may pass the end of the row, where zeros are."""
        s, emit, x = self.s, self.emit, self.op.ins[0]
        terms = x.type.dims[-1]
        with emit.loop(s.lanes, kind, "l") as lane, self.body.point():
            k = first + lane
            at = k if kind == VECTOR else tirx.min(k, i32(terms - 1))
            number = tirx.Cast("int32", self.body.at(x, (*self._place(i), at))) + _moved(x.type.dtype, signed=True)
            if kind != VECTOR:
                number = tirx.Select(k < terms, number, i32(0))
            number = emit.bind(number)
            emit.store(numbers, tirx.Cast(str(numbers.dtype), number), i * s.k + k)
            emit.store(total, tirx.BufferLoad(total, [lane]) + number, lane)

    def _tile(self, tile: QuantisedTile, start: Expr, height: int, last: int | None) -> None:
        emit, lanes = self.emit, self.s.lanes
        totals = [[emit.alloc(lanes, "i32", "acc") for _ in range(tile.wide)] for _ in range(height)]
        places = [tirx.Ramp(i32(v * lanes), 1, lanes) for v in range(height * tile.wide)]
        every = tirx.Ramp(i32(0), 1, lanes)
        for row in totals:
            for acc in row:
                emit.store(acc, tirx.Broadcast(i32(0), lanes), every)
        self._add_products(tile, start, i32(0), totals)
        done = emit.alloc(height * tile.wide * lanes, "i32", "tile")
        for place, acc in zip(places, (acc for row in totals for acc in row), strict=True):
            emit.store(done, tirx.BufferLoad(acc, [every]), place)
        self._finish(tile, start, height, done, last)

    def _finished(self, tile: QuantisedTile, row: Expr, column: Expr, value: Expr) -> Expr:
        x, weight, x_zero, zeros = self.op.ins
        assert tile.rows.sums is not None
        left = tirx.Cast("int32", self.body.at(x_zero, ())) + _moved(x.type.dtype, signed=True)
        right = tirx.Cast("int32", self.body.at(zeros, (column,))) + _moved(weight.type.dtype, signed=False)
        of_column = tirx.BufferLoad(tile.packed, [self.s.scales_at + column])
        less_right = value - right * tirx.BufferLoad(tile.rows.sums, [row])
        return less_right - left * (of_column - right * x.type.dims[-1])
