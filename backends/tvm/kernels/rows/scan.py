"""Cumulative sums along an axis.

In: cumsum along any axis, with or without the element itself, from either end. Where dimensions follow the axis, a
strip of them is summed step by step along the axis, with its sums in the nearest cache. Along the last dimension, a
vector is summed in registers:

    after steps s = 1, 2, 4, ..:  x[i] += x[i - s]        then the total of all vectors before is added to all lanes

So one vector waits for a single addition of the vector before it. Integers, whose additions take a single cycle, go one
by one. `Body.finish` runs on the sums. Threads share rows and strips.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, axis_of, unravel, zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, literal
from penstock.ir.graph import Op
from penstock.ir.ops import complete_attrs
from penstock.ir.types import INTS

from .sums import cover

# Elements of a strip: their sums stay in the first cache.
_STRIP = 1024


def emit_cumsum(body: Body, op: Op) -> None:
    """Emit the sums up to each element along an axis."""
    scan = _CumulativeSum(body, op)
    if prod(scan.inner) > 1:
        scan.across()
    else:
        scan.along()


class _CumulativeSum:
    """The emitter of the loops of one cumulative sum."""

    def __init__(self, body: Body, op: Op) -> None:
        self.body, self.emit, self.x, self.y = body, body.emit, op.ins[0], op.outs[0]
        attrs, axis, dims = complete_attrs(op), axis_of(op, self.x), self.x.type.dims
        self.dtype = self.x.type.dtype
        self.exclusive, self.backward = bool(attrs["exclusive"]), bool(attrs["reverse"])
        self.outer, self.inner, self.size = dims[:axis], dims[axis + 1 :], dims[axis]
        self.threads = parallel_if(body.machine, self.x.type.size)

    def across(self) -> None:
        """Sum strips of the dimensions behind the axis, step by step along the axis."""
        emit = self.emit
        width = min(prod(self.inner), _STRIP)
        whole, tail = divmod(prod(self.inner), width)
        with emit.loop(prod(self.outer) * whole, self.threads, "strip") as o:
            row = emit.bind(o // whole, "row") if whole > 1 else o
            self._strip(row, emit.bind(o % whole * width, "begin") if whole > 1 else zero(), width)
        if tail:
            with emit.loop(prod(self.outer), self.threads, "row") as o:
                self._strip(o, literal(whole * width, "i32"), tail)

    def _strip(self, row: Expr, begin: Expr, width: int) -> None:
        emit, body = self.emit, self.body
        lead = unravel(row, self.outer)
        total = emit.alloc(width, self.dtype, "total")
        for i, _ in emit.spans(width, body.lanes):
            emit.store(total, literal(0, self.dtype), i)
        with emit.loop(self.size, name="c") as c:
            for i, _ in emit.spans(width, body.lanes):
                with body.point():
                    position = self.size - 1 - c if self.backward else c
                    index = (*lead, position, *unravel(begin + i, self.inner))
                    before = emit.bind(tirx.BufferLoad(total, [i]))
                    after = emit.bind(before + body.at(self.x, index))
                    emit.store(total, after, i)
                    body.finish({self.y: (before if self.exclusive else after, index)})

    def along(self) -> None:
        """Sum along the last dimension, vector by vector."""
        emit = self.emit
        with emit.loop(prod(self.outer), self.threads, "row") as row, self.body.point():
            lead = unravel(row, self.outer)
            carry = emit.alloc(1, self.dtype, "carry")
            emit.store(carry, literal(0, self.dtype), zero())
            full = self.body.lanes // 2 if self.dtype == "f64" else self.body.lanes
            done, lanes = 0, 1 if self.dtype in INTS else full
            for width in (lanes, *(short for _, short in cover(self.size % lanes, lanes))):
                count = self.size // lanes if width == lanes else 1
                if count:
                    with emit.loop(count, name="c") as c:
                        begin = c * width + done
                        self._chunk(lead, carry, self.size - width - begin if self.backward else begin, width)
                done += count * width

    def _chunk(self, lead: Index, carry: Buffer, begin: Expr, width: int) -> None:
        """Sum `width` elements from `begin` on, on top of the total `carry`."""
        emit, body, behind = self.emit, self.body, (zero(),) * len(self.inner)
        sums, kind = emit.alloc(width, self.dtype, "sums"), VECTOR if width > 1 else SERIAL
        with emit.loop(width, kind, "l") as lane, body.point():
            emit.store(sums, body.at(self.x, (*lead, begin + lane, *behind)), lane)
        step = 1
        while step < width:
            sums = self._shifted(sums, width, step, summed=True)
            step *= 2
        last = tirx.BufferLoad(sums, [tirx.IntImm("int32", 0 if self.backward else width - 1)])
        lower = self._shifted(sums, width, 1, summed=False) if self.exclusive else sums
        with emit.loop(width, kind, "l") as lane, body.point():
            index = (*lead, begin + lane, *behind)
            body.finish({self.y: (tirx.BufferLoad(lower, [lane]) + tirx.BufferLoad(carry, [zero()]), index)})
        emit.store(carry, tirx.BufferLoad(carry, [zero()]) + last, zero())

    def _shifted(self, source: Buffer, width: int, step: int, *, summed: bool) -> Buffer:
        """Move lanes on by `step`, with zeros behind them; with `summed`, add them to the lanes as they were."""
        emit = self.emit
        shifted = emit.alloc(width, self.dtype, "shifted")
        if width == 1:
            emit.store(shifted, literal(0, self.dtype), zero())
            return shifted
        all_lanes = tirx.Ramp(zero(), 1, width)
        here = tirx.BufferLoad(source, [all_lanes])
        nothing = tirx.Broadcast(literal(0, self.dtype), width)
        places = [i + step if self.backward else i - step for i in range(width)]
        moved = tirx.Shuffle([here, nothing], [tirx.IntImm("int32", p if 0 <= p < width else width) for p in places])
        emit.add(tirx.BufferStore(shifted, here + moved if summed else moved, [all_lanes]))
        return shifted
