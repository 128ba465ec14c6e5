"""ONNX operators on quantised tensors: integers q that stand for (q - zero point) * scale.

Quantising rounds half to even, adds the zero point and saturates. Products are exact: those of matrices in i32,
convolutions in the float type that holds every integer that can occur. Scales and zero points are never trained. They
may be one number, one for each entry along an axis, or (QuantizeLinear, DequantizeLinear) one for each block of entries
along an axis. The gradient of rounding is zero.

Integers of 4 and 2 bits and floats of 8 have no counterpart here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from penstock.frontends.formulas.elementwise import between, limits_of, widened
from penstock.frontends.formulas.layout import axis_of, cut, expand, reshape, transpose
from penstock.frontends.formulas.products import product
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.frontends.onnx.source import our_dtype
from penstock.frontends.writer import Refused
from penstock.ir.graph import Value
from penstock.ir.ops.quantised import MOST_TERMS
from penstock.ir.types import FLOATS, INTS

from .neural import kernel_of, window_of

# Integers up to here are exact in f32.
_EXACT = 1 << 24
# Convolutions in groups stay in floats below so many terms of a sum.
_FEW_TERMS = 32


def type_attr(n: OnnxNode, name: str) -> str | None:
    """Read an element type stored as a number. 0 or a missing attribute means the default, None."""
    number = n.int_attr(name)
    try:
        return our_dtype(number) if number else None
    except ValueError as error:
        raise Refused(str(error)) from error


def _along(n: OnnxNode, i: int, x: Value, axis: int, block: int = 0) -> Value:
    """Reshape a scale or zero point so that it broadcasts to x."""
    s = n.statistic(i)
    dims = x.type.dims
    if s.type.size == 1 and s.type.rank <= 1:
        return reshape(n, s, ())
    axis = axis_of(n, axis, x.type.rank)
    if not block:
        n.require(s.type.dims == (dims[axis],), f"scale or zero point {s.type} does not fit axis {axis} of {x.type}")
        return reshape(n, s, (*(1,) * axis, dims[axis], *(1,) * (x.type.rank - axis - 1)))
    blocks = -(-dims[axis] // block)
    n.require(
        s.type.dims == (*dims[:axis], blocks, *dims[axis + 1 :]),
        f"{s.type} does not give one number per block of {block} of {x.type}",
    )
    wide = (*dims[:axis], blocks, block, *dims[axis + 1 :])
    spread = expand(n, reshape(n, s, (*dims[:axis], blocks, 1, *dims[axis + 1 :])), wide)
    return cut(n, reshape(n, spread, (*dims[:axis], blocks * block, *dims[axis + 1 :])), axis, 0, dims[axis])


def saturated(n: OnnxNode, x: Value, zero: Value | None, dtype: str) -> Value:
    """Compute round(x) + zero point, limited to the range of an integer type, in floats that hold it."""
    n.require(dtype in ("i8", "u8", "i16", "u16"), f"element type {dtype} is not one to quantise to")
    y = widened(n, n.emit("round", x))
    if zero is not None:
        y = n.emit("add", y, n.cast(zero, y.type.dtype))
    return n.cast(between(n, y, *map(float, limits_of(dtype))), dtype)


def _quantize(n: OnnxNode) -> Result:
    x, axis, block = n.value(), n.int_attr("axis", 1), n.int_attr("block_size")
    n.ignore("saturate")  # concerns 8-bit floats only
    wanted = type_attr(n, "output_dtype")
    dtype = n.type(2).dtype if n.has(2) else wanted or "u8"
    n.require(wanted in (None, dtype), f"output_dtype is {wanted}, but the zero point {dtype}")
    scale = _along(n, 1, x, axis, block)
    # As in onnxruntime: 16-bit floats are divided in f32, unless the model asks for less.
    precision = type_attr(n, "precision") or ("f64" if scale.type.dtype == "f64" else "f32")
    n.require(precision in FLOATS, f"precision {precision} is no floating-point type")
    zero = _along(n, 2, x, axis, block) if n.has(2) else None
    return saturated(n, n.emit("div", n.cast(x, precision), n.cast(scale, precision)), zero, dtype)


def less_zero(n: OnnxNode, x: Value, zero: Value | None, dtype: str) -> Value:
    wide = n.cast(x, dtype)
    return wide if zero is None else n.emit("sub", wide, n.cast(zero, dtype))


def _dequantize(n: OnnxNode) -> Result:
    x, axis, block = n.value(), n.int_attr("axis", 1), n.int_attr("block_size")
    n.require(x.type.dtype in INTS, f"needs integers, got {x.type}")
    scale = _along(n, 1, x, axis, block)
    dtype = type_attr(n, "output_dtype") or scale.type.dtype
    zero = _along(n, 2, x, axis, block) if n.has(2) else None
    y = n.cast(less_zero(n, x, zero, "i32"), "f32")
    return n.cast(n.emit("mul", y, n.cast(scale, "f32")), dtype)


# ---------------------------------------------------------------------------------------- products


def _per_row(n: OnnxNode, i: int, x: Value, axis: int) -> Value:
    """Return a scale or zero point of a matrix.

    It is one number, one per row (axis -2) or column (-1), or a tensor that broadcasts.
    """
    s = n.statistic(i)
    if s.type.size == 1 and s.type.rank <= 1:
        return reshape(n, s, ())
    if s.type.rank > 1:
        return s
    n.require(s.type.dims == (x.type.dims[axis],), f"{s.type} does not fit dimension {axis} of {x.type}")
    return reshape(n, s, (s.type.size, 1)) if axis == -2 else s


def product_of_bytes(n: OnnxNode, x: Value, y: Value, zero: Value | None, zeros: Value | None) -> Value | None:
    """Write a product of bytes less their zero points.

    Return None where `matmul_bytes` has no form for it: a batch of right operands, a zero point for each row, or more
    terms than 32 bits hold.
    """
    if not {x.type.dtype, y.type.dtype} <= {"i8", "u8"} or y.type.rank != 2 or y.type.dims[0] > MOST_TERMS:
        return None
    columns = y.type.dims[1]
    if (zero is not None and zero.type.size != 1) or (zeros is not None and zeros.type.size not in (1, columns)):
        return None
    one = n.literal(0, x.type.dtype) if zero is None else reshape(n, zero, ())
    every = n.literal(0, y.type.dtype) if zeros is None else zeros
    every = reshape(n, every, (every.type.size,) if every.type.size == columns else ())
    return n.emit("matmul_bytes", x, y, one, expand(n, every, (columns,)))


def _product(n: OnnxNode, a: int, a_zero: int, b: int, b_zero: int) -> Value:
    x, y = n.value(a), n.value(b)
    n.require(x.type.rank > 0 and y.type.rank > 0, f"needs at least one dimension, got {x.type} and {y.type}")
    x_zero = _per_row(n, a_zero, x, -2 if x.type.rank > 1 else -1) if n.has(a_zero) else None
    y_zero = _per_row(n, b_zero, y, -1) if n.has(b_zero) else None
    of_bytes = product_of_bytes(n, x, y, x_zero, y_zero)
    if of_bytes is not None:
        return of_bytes
    if {x.type.dtype, y.type.dtype} <= {"i8", "u8"} and 255 * 255 * x.type.dims[-1] < _EXACT:
        sums = product(n, less_zero(n, x, x_zero, "f32"), less_zero(n, y, y_zero, "f32"))
        return n.cast(sums, "i32")
    return product(n, less_zero(n, x, x_zero, "i32"), less_zero(n, y, y_zero, "i32"))


def _qlinear_matmul(n: OnnxNode) -> Result:
    x, y = n.value(0), n.value(3)
    total = _product(n, 0, 2, 3, 5)
    known = _known_scale(n, (1, 4), 6)
    # One for each row of the left operand has a dimension of its own in the result.
    by_rows = known is not None and n.type(1).size > 1
    if known is not None and not by_rows and max(known.ndim, y.type.rank) <= 2:
        scale = n.literal(known, "f32")
    else:
        scale = n.emit("mul", _per_row(n, 1, x, -2), _per_row(n, 4, y, -1))
        out = n.statistic(6)
        scale = n.emit("div", scale, reshape(n, out, ()) if out.type.size == 1 else out)
    product = n.emit("mul", n.cast(total, scale.type.dtype), scale)
    zero = n.statistic(7)
    return saturated(n, product, reshape(n, zero, ()) if zero.type.size == 1 else zero, n.type(7).dtype)


def _known_scale(n: OnnxNode, factors: Sequence[int], divisor: int) -> np.ndarray | None:
    """Return the product of scales over another one, of which all but one are single numbers; None if unknown."""
    arrays = [n.known(i) for i in (*factors, divisor)]
    known = [array for array in arrays if array is not None and array.dtype == np.float32]
    if len(known) < len(arrays) or sum(array.size > 1 for array in known) > 1 or known[-1].size > 1:
        return None
    scale = known[-1].reshape(())
    wide = [array.reshape(()) if array.size == 1 else array for array in known[:-1]]
    return np.asarray(np.prod(np.stack(np.broadcast_arrays(*wide)), axis=0, dtype=np.float32) / scale, np.float32)


def windows_of_bytes(n: OnnxNode, x: Value, w: Value, zero: Value | None, zeros: Value | None) -> Value | None:
    """Write the sums of a convolution of bytes less their zero points.

    Return None where `conv_bytes` has no form for it, or few channels would leave most of its kernel's words empty.
    """
    groups, filters = n.int_attr("group", 1), w.type.dims[0]
    terms = prod(w.type.dims[1:])
    if not {x.type.dtype, w.type.dtype} <= {"i8", "u8"} or terms > MOST_TERMS or (groups > 1 and terms < _FEW_TERMS):
        return None
    if (zero is not None and zero.type.size != 1) or (zeros is not None and zeros.type.size not in (1, filters)):
        return None
    one = n.literal(0, x.type.dtype) if zero is None else reshape(n, zero, ())
    every = n.literal(0, w.type.dtype) if zeros is None else zeros
    every = reshape(n, every, (filters,) if every.type.size == filters else ())
    window = window_of(n, kernel_of(n, w)).attrs
    return n.emit("conv_bytes", x, w, one, expand(n, every, (filters,)), groups=groups, **window)


def _convolution(n: OnnxNode, w_at: int, x_zero: int, w_zero: int) -> Value:
    """Compute the sums of a convolution: in integers, or as floats that hold them exactly."""
    x, w = n.value(0), n.value(w_at)
    kernel = kernel_of(n, w)
    n.require(
        x.type.dtype in ("i8", "u8") and w.type.dtype in ("i8", "u8"),
        f"needs integers of 8 bits, got {x.type} and {w.type}",
    )
    groups = n.int_attr("group", 1)
    n.require(groups > 0, f"{groups} groups")
    zero, zeros = (n.statistic(i) if n.has(i) else None for i in (x_zero, w_zero))
    if (of_bytes := windows_of_bytes(n, x, w, zero, zeros)) is not None:
        return of_bytes
    dtype = "f32" if 255 * 255 * prod(w.type.dims[1:]) < _EXACT else "f64"
    data = less_zero(n, x, _along(n, x_zero, x, 1) if n.has(x_zero) else None, dtype)
    weight = less_zero(n, w, _along(n, w_zero, w, 0) if n.has(w_zero) else None, dtype)
    return n.emit("conv", data, weight, groups=groups, **window_of(n, kernel).attrs)


def per_channel(array: np.ndarray, rank: int) -> np.ndarray:
    """Shape numbers so that they broadcast to the channels of a tensor."""
    return array.reshape(()) if array.size == 1 else array.reshape(1, array.size, *(1,) * (rank - 2))


def _qlinear_conv(n: OnnxNode) -> Result:
    total, w = _convolution(n, 3, 2, 5), n.value(3)
    if n.has(8):
        total = n.emit(
            "add",
            total,
            n.cast(reshape(n, n.value(8), (1, w.type.dims[0], *(1,) * (w.type.rank - 2))), total.type.dtype),
        )
    known = _known_scale(n, (1, 4), 6)
    if known is not None:
        scale = n.literal(per_channel(known, w.type.rank), "f32")
    else:
        x_scale, w_scale, y_scale = (n.statistic(i) for i in (1, 4, 6))
        scale = n.emit("div", n.emit("mul", reshape(n, x_scale, ()), w_scale), reshape(n, y_scale, ()))
        scale = reshape(n, scale, () if scale.type.size == 1 else (1, scale.type.size, *(1,) * (w.type.rank - 2)))
    product = n.emit("mul", n.cast(total, "f32"), scale)
    return saturated(n, product, reshape(n, n.statistic(7), ()), n.type(7).dtype)


RULES: dict[str, Rule] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "MatMulInteger": lambda n: _product(n, 0, 2, 1, 3),
    "QLinearMatMul": _qlinear_matmul,
    "ConvInteger": lambda n: n.cast(_convolution(n, 1, 2, 3), "i32"),
    "QLinearConv": _qlinear_conv,
}


# ---------------------------------------------------------------------------------------- com.microsoft


def _real(n: OnnxNode, i: int) -> Value:
    """Dequantise operand i, which its scale and zero point follow."""
    x = n.value(i)
    zero = reshape(n, n.statistic(i + 2), ()) if n.has(i + 2) else None
    return n.emit("mul", n.cast(less_zero(n, x, zero, "i32"), "f32"), reshape(n, n.statistic(i + 1), ()))


def _requantized(n: OnnxNode, y: Value, at: int, like: int) -> Value:
    """Quantise y with the scale and zero point in the operands from `at` on.

    Without a zero point the result has the type of operand `like`.
    """
    zero = reshape(n, n.statistic(at + 1), ()) if n.has(at + 1) else None
    dtype = n.type(at + 1).dtype if n.has(at + 1) else n.type(like).dtype
    return saturated(n, n.emit("div", y, reshape(n, n.statistic(at), ())), zero, dtype)


def _binary(kind: str) -> Rule:
    return lambda n: _requantized(n, n.emit(kind, _real(n, 0), _real(n, 3)), 6, 0)


def _unary(kind: str) -> Rule:
    return lambda n: _requantized(n, n.emit(kind, _real(n, 0)), 3, 0)


def _leaky(n: OnnxNode) -> Result:
    x = _real(n, 0)
    return _requantized(
        n, n.emit("where", n.emit("less", x, 0.0), n.emit("mul", x, n.float_attr("alpha", 0.01)), x), 3, 0
    )


def _average(n: OnnxNode) -> Result:
    n.require(not n.int_attr("channels_last"), "channels_last is not supported")
    x = _real(n, 0)
    return _requantized(n, n.emit("mean", x, axes=tuple(range(2, x.type.rank)), keep=True), 3, 0)


def _matmul_to_float(n: OnnxNode) -> Result:
    total = _product(n, 0, 4, 1, 5)
    x, y = n.value(0), n.value(1)
    scaled = n.emit("mul", n.cast(total, "f32"), n.emit("mul", _per_row(n, 2, x, -2), _per_row(n, 3, y, -1)))
    return n.emit("add", scaled, n.value(6)) if n.has(6) else scaled


def _column(n: OnnxNode, i: int, count: int) -> Value:
    """Return a scale or zero point of a matrix as one number, or as one per column of the product."""
    s = n.statistic(i)
    if s.type.size == 1 and s.type.rank <= 1:
        return reshape(n, s, ())
    n.require(s.type.dims == (count,), f"{s.type} does not give one number per column of {count}")
    return s


def _gemm(n: OnnxNode) -> Result:
    """Write QGemm: alpha * scales * (A B + C), divided by the scale of the result. C is in integers of the product.

    With a zero point the result is quantised.
    """
    x, y, ta, tb = n.value(0), n.value(3), bool(n.int_attr("transA")), bool(n.int_attr("transB"))
    n.require(x.type.rank == y.type.rank == 2, f"needs two matrices, got {x.type} and {y.type}")
    columns = y.type.dims[0 if tb else 1]
    y_zero = _column(n, 5, columns) if n.has(5) else None
    x_zero = reshape(n, n.statistic(2), ()) if n.has(2) else None
    right = transpose(n, y, (1, 0)) if tb else y
    total = None if ta else product_of_bytes(n, x, right, x_zero, y_zero)
    if total is None:
        lhs = less_zero(n, x, x_zero, "i32")
        total = n.emit("matmul", lhs, less_zero(n, right, y_zero, "i32"), ta=ta)
    total = n.emit("add", total, n.value(6)) if n.has(6) else total
    scale = n.emit("mul", reshape(n, n.statistic(1), ()), n.float_attr("alpha", 1.0))
    scale = n.emit("mul", scale, _column(n, 4, columns))
    if n.has(7):
        scale = n.emit("div", scale, reshape(n, n.statistic(7), ()))
    result = n.emit("mul", n.cast(total, "f32"), scale)
    return saturated(n, result, reshape(n, n.statistic(8), ()), n.type(8).dtype) if n.has(8) else result


MICROSOFT: dict[str, Rule] = {
    "QGemm": _gemm,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "QLinearAdd": _binary("add"),
    "QLinearMul": _binary("mul"),
    "QLinearSigmoid": _unary("sigmoid"),
    "QLinearLeakyRelu": _leaky,
    "QLinearGlobalAveragePool": _average,
    "MatMulIntegerToFloat": _matmul_to_float,
}
