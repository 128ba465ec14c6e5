"""Sums up to each element along an axis.

In: cumsum along any axis, with or without the element itself, from either end. Where dimensions follow the axis, a strip of them is gone
through step by step along the axis, with its sums in the nearest cache; along the last dimension a vector is summed up in registers:

    after steps s = 1, 2, 4, ..:  x[i] += x[i - s]        then the total of all vectors before is added to all lanes

so what one vector waits for the one before is a single addition. Integers, whose additions take a single cycle, go one by one.
`Body.finish` runs on the sums. Threads share rows and strips.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, axis_of, unravel, zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Expr, literal
from penstock.ir.graph import Op
from penstock.ir.ops import complete_attrs
from penstock.ir.types import INTS

from .sums import cover

# Elements of a strip: their sums stay in the first cache.
_STRIP = 1024


def emit_cumsum(body: Body, op: Op) -> None:
    x, y = op.ins[0], op.outs[0]
    a, axis, dtype = complete_attrs(op), axis_of(op, x), x.type.dtype
    exclusive, backward = bool(a["exclusive"]), bool(a["reverse"])
    dims = x.type.dims
    outer, inner, size = dims[:axis], dims[axis + 1 :], dims[axis]
    emit, threads = body.emit, parallel_if(body.machine, x.type.size)

    def across() -> None:
        """Strips of the dimensions behind the axis."""
        width = min(prod(inner), _STRIP)
        whole, rest = divmod(prod(inner), width)
        with emit.loop(prod(outer) * whole, threads, "strip") as o:
            strip(
                emit.bind(o // whole, "row") if whole > 1 else o,
                emit.bind(o % whole * width, "begin") if whole > 1 else zero(),
                width,
            )
        if rest:
            with emit.loop(prod(outer), threads, "row") as o:
                strip(o, literal(whole * width, "i32"), rest)

    def strip(row: Expr, begin: Expr, width: int) -> None:
        lead = unravel(row, outer)
        total = emit.alloc(width, dtype, "total")
        for i, _ in emit.spans(width, body.lanes):
            emit.store(total, literal(0, dtype), i)
        with emit.loop(size, name="c") as c:
            for i, _ in emit.spans(width, body.lanes):
                with body.point():
                    index = (*lead, size - 1 - c if backward else c, *unravel(begin + i, inner))
                    before = emit.bind(tirx.BufferLoad(total, [i]))
                    after = emit.bind(before + body.at(x, index))
                    emit.store(total, after, i)
                    body.finish({y: (before if exclusive else after, index)})

    def along(row: Expr) -> None:
        lead = unravel(row, outer)
        carry = emit.alloc(1, dtype, "carry")
        emit.store(carry, literal(0, dtype), zero())
        done, lanes = 0, 1 if dtype in INTS else body.lanes // 2 if dtype == "f64" else body.lanes
        for width in (lanes, *(short for _, short in cover(size % lanes, lanes))):
            count = size // lanes if width == lanes else 1
            if count:
                with emit.loop(count, name="c") as c:
                    begin = c * width + done
                    chunk(lead, carry, size - width - begin if backward else begin, width)
            done += count * width

    def chunk(lead: Index, carry: object, begin: Expr, width: int) -> None:
        sums, kind = emit.alloc(width, dtype, "sums"), VECTOR if width > 1 else SERIAL
        with emit.loop(width, kind, "l") as lane, body.point():
            emit.store(sums, body.at(x, (*lead, begin + lane, *(zero(),) * len(inner))), lane)
        step = 1
        while step < width:
            sums = shifted(sums, width, step, summed=True)
            step *= 2
        last = tirx.BufferLoad(sums, [tirx.IntImm("int32", 0 if backward else width - 1)])
        lower = shifted(sums, width, 1, summed=False) if exclusive else sums
        with emit.loop(width, kind, "l") as lane, body.point():
            index = (*lead, begin + lane, *(zero(),) * len(inner))
            body.finish({y: (tirx.BufferLoad(lower, [lane]) + tirx.BufferLoad(carry, [zero()]), index)})
        emit.store(carry, tirx.BufferLoad(carry, [zero()]) + last, zero())

    def shifted(source: object, width: int, step: int, summed: bool) -> object:
        """Lanes moved on by `step`, zeros behind them; added to the lanes as they were, or alone."""
        found = emit.alloc(width, dtype, "shifted")
        if width == 1:
            emit.store(found, literal(0, dtype), zero())
            return found
        all_lanes = tirx.Ramp(zero(), 1, width)
        here = tirx.BufferLoad(source, [all_lanes])
        nothing = tirx.Broadcast(literal(0, dtype), width)
        places = [i + step if backward else i - step for i in range(width)]
        moved = tirx.Shuffle([here, nothing], [tirx.IntImm("int32", p if 0 <= p < width else width) for p in places])
        emit.add(tirx.BufferStore(found, here + moved if summed else moved, [all_lanes]))
        return found

    if prod(inner) > 1:
        across()
        return
    with emit.loop(prod(outer), threads, "row") as o, body.point():
        along(o)
