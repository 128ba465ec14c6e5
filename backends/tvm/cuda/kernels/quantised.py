"""Products by weights of 8 and 4 bits, and of bytes, on GPUs: a thread for each element of the result.

Limits: a thread finds the largest value of each group of its row again, and reads its weights alone. Vendor libraries
and blocks that share a row would be faster.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.elementwise.elementwise import emit_nest
from penstock.backends.tvm.kernels.tools.arithmetic import absolute, unfolded
from penstock.backends.tvm.kernels.tools.elements import Index, unravel, zero
from penstock.backends.tvm.kernels.tools.emit import Expr, i32, literal
from penstock.ir.graph import Op
from penstock.ir.interpreter.ops.quantised import LEAST
from penstock.ir.ops import complete_attrs, integer, window_of

from .body import DeviceBody


def emit_matmul_q(body: DeviceBody, op: Op) -> None:
    """Emit a product by a weight of 8 or 4 bits."""
    emit, attrs, x, out = body.emit, complete_attrs(op), op.ins[0], op.outs[0]
    group, rounds = integer(attrs["group"]), attrs["act"] == "i8"

    def whole(column: Expr, k: Expr, g: Expr) -> Expr:
        """Return an element of the weight less its zero."""
        if attrs["bits"] == 4:
            byte = tirx.Cast("int32", body.at(op.ins[1], (column, k // 2)))
            number = tirx.bitwise_and(byte >> (k % 2 * 4), i32(15))
        else:
            number = tirx.Cast("int32", body.at(op.ins[1], (column, k)))
        if len(op.ins) > 3:
            return number - tirx.Cast("int32", body.at(op.ins[3], (column, g)))
        return number - 8 if attrs["bits"] == 4 else number

    def of_floats(row: Index, column: Expr, g: Expr) -> Expr:
        part = emit.alloc(1, "f32", "part")
        emit.store(part, literal(0, "f32"), zero())
        with emit.loop(group, name="k") as i, body.point():
            k = g * group + i
            element = tirx.Cast("float32", whole(column, k, g))
            emit.store(part, emit.load(part, zero()) + body.at(x, (*row, k)) * element, zero())
        return emit.load(part, zero())

    def of_numbers(row: Index, column: Expr, g: Expr) -> Expr:
        top, spoilt, total = (
            emit.alloc(1, kind, name) for kind, name in (("f32", "top"), ("f32", "spoilt"), ("i32", "n"))
        )
        for buffer, nothing in ((top, literal(0, "f32")), (spoilt, literal(0, "f32")), (total, i32(0))):
            emit.store(buffer, nothing, zero())
        with emit.loop(group, name="k") as i, body.point():
            value = body.at(x, (*row, g * group + i))
            size, before = emit.bind(absolute(value)), emit.load(top, zero())
            emit.store(top, tirx.Select(size > before, size, before), zero())
            # 0 * x is nan where x is not finite.
            emit.store(spoilt, emit.load(spoilt, zero()) + value * unfolded(literal(0, "f32")), zero())
        largest = emit.bind(emit.load(top, zero()), "largest")
        counts = largest >= literal(LEAST, "f32")
        factor = emit.bind(tirx.Select(counts, literal(127, "f32") / largest, literal(0, "f32")), "factor")
        with emit.loop(group, name="k") as i, body.point():
            k = g * group + i
            number = tirx.Cast("int32", tirx.nearbyint(emit.bind(body.at(x, (*row, k)) * factor)))
            emit.store(total, emit.load(total, zero()) + number * whole(column, k, g), zero())
        step = largest / literal(127, "f32") + emit.load(spoilt, zero())
        return tirx.Cast("float32", emit.load(total, zero())) * step

    def point(index: Index) -> None:
        with body.point():
            row, column = index[:-1], index[-1]
            sums = emit.alloc(1, "f32", "sum")
            emit.store(sums, literal(0, "f32"), zero())
            with emit.loop(x.type.dims[-1] // group, name="g") as g, body.point():
                part = (of_numbers if rounds else of_floats)(row, column, g)
                scaled = emit.bind(part * body.at(op.ins[2], (column, g)))
                emit.store(sums, emit.load(sums, zero()) + scaled, zero())
            body.finish({out: (emit.bind(emit.load(sums, zero())), index)})

    emit_nest(body, out.type.dims, out.type.rank - 1, point)


def emit_matmul_bytes(body: DeviceBody, op: Op) -> None:
    """Emit exact sums of products of bytes less their zero points."""
    emit, (x, weight, x_zero, zeros), out = body.emit, op.ins, op.outs[0]

    def less(value: Expr, nothing: Expr) -> Expr:
        return tirx.Cast("int32", value) - tirx.Cast("int32", nothing)

    def point(index: Index) -> None:
        with body.point():
            row, column = index[:-1], index[-1]
            total = emit.alloc(1, "i32", "sum")
            emit.store(total, i32(0), zero())
            with emit.loop(x.type.dims[-1], name="k") as k, body.point():
                left = less(body.at(x, (*row, k)), body.at(x_zero, ()))
                right = less(body.at(weight, (k, column)), body.at(zeros, (column,)))
                emit.store(total, emit.load(total, zero()) + left * right, zero())
            body.finish({out: (emit.bind(emit.load(total, zero())), index)})

    emit_nest(body, out.type.dims, out.type.rank - 1, point)


def emit_conv_bytes(body: DeviceBody, op: Op) -> None:
    """Emit exact sums of products of a window of bytes less their zero points."""
    emit, (x, weight, x_zero, zeros), out, attrs = body.emit, op.ins, op.outs[0], complete_attrs(op)
    window, sizes = window_of(attrs, weight.type.dims[2:]), x.type.dims[2:]
    channels, filters = weight.type.dims[1], out.type.dims[1] // integer(attrs["groups"])

    def point(index: Index) -> None:
        with body.point():
            image, output, *place = index
            total = emit.alloc(1, "i32", "sum")
            emit.store(total, i32(0), zero())
            nothing = emit.bind(tirx.Cast("int32", body.at(zeros, (output,))))
            group = emit.bind(tirx.floordiv(output, filters) * channels)
            with emit.loop(prod(weight.type.dims[1:]), name="k") as k, body.point():
                channel, *tap = unravel(k, weight.type.dims[1:])
                inside, source = literal(1, "i32") > 0, []
                for o, t, s, d, low, size in zip(
                    place, tap, window.strides, window.dilations, window.low, sizes, strict=True
                ):
                    at = emit.bind(o * s + t * d - low)
                    inside = tirx.And(inside, tirx.And(at >= 0, at < size))
                    source.append(tirx.max(tirx.min(at, i32(size - 1)), i32(0)))
                number = tirx.Cast("int32", body.at(x, (image, group + channel, *source)))
                left = tirx.Select(inside, number - tirx.Cast("int32", body.at(x_zero, ())), i32(0))
                right = tirx.Cast("int32", body.at(weight, (output, channel, *tap))) - nothing
                emit.store(total, emit.load(total, zero()) + left * right, zero())
            body.finish({out: (emit.bind(emit.load(total, zero())), index)})

    emit_nest(body, out.type.dims, out.type.rank - 1, point)
