"""QuantizeLinear of what was computed from bytes: sums of products, sums of two tensors, and the relu of either.

In: integers with scales, a known scale and a zero point. Out: bytes. Sums of products are multiplied by one factor, as
QLinearMatMul and QLinearConv of onnxruntime do, and two tensors each by a factor, as QLinearAdd does. Where the product
is known to be far below 2**31, it is rounded to an integer of 32 bits, and the zero point and the limits are those of
integers: this gives what floats give, in fewer instructions. A relu is the limit at the zero point then.
"""

from __future__ import annotations

import numpy as np

from penstock.frontends.formulas.elementwise import between, limits_of
from penstock.frontends.formulas.layout import reshape
from penstock.frontends.onnx.node import OnnxNode, Result
from penstock.frontends.onnx.rules.quantised import saturated, type_attr
from penstock.frontends.onnx.tensors import ScaledSums, ScaledTerms
from penstock.ir.graph import Value

# Floats up to here become integers of 32 bits, also with a zero point added.
_MOST = 2.0**30


def requantize(n: OnnxNode) -> Result | None:
    """Write a QuantizeLinear on the integers behind its operand; None if it has no such form."""
    scaled, scale = n.scaled(0), n.known(1)
    if scaled is None or scale is None or scale.size != 1 or scale.dtype != np.float32 or not (scale > 0).all():
        return None
    wanted = type_attr(n, "output_dtype")
    dtype = n.type(2).dtype if n.has(2) else wanted or "u8"
    if n.int_attr("block_size") or n.given("precision") or dtype not in ("i8", "u8") or wanted not in (None, dtype):
        return None
    if n.has(2) and n.type(2).size != 1:
        return None
    n.ignore("saturate", "axis")
    scale = scale.reshape(())
    y, most = _scaled_sums(n, scaled, scale) if isinstance(scaled, ScaledSums) else _scaled_terms(n, scaled, scale)
    zero = n.known(2) if n.has(2) else np.zeros((), np.int32)
    if zero is not None and most < _MOST:
        return _limited(n, y, int(zero.reshape(())), dtype, relu=scaled.relu)
    if scaled.relu:
        y = n.emit("relu", y)
    return saturated(n, y, reshape(n, n.statistic(2), ()) if n.has(2) else None, dtype)


def _scaled_sums(n: OnnxNode, scaled: ScaledSums, scale: np.ndarray) -> tuple[Value, float]:
    """Multiply sums of integers by one factor. Return the product, and a bound of its absolute value."""
    factor = np.asarray(scaled.scale / scale, np.float32)
    return n.emit("mul", n.cast(scaled.sums, "f32"), n.literal(factor, "f32")), float(factor.max()) * 2.0**31


def _scaled_terms(n: OnnxNode, scaled: ScaledTerms, scale: np.ndarray) -> tuple[Value, float]:
    """Add two tensors of bytes times their factors. Return the sum, and a bound of its absolute value."""
    factors = [np.float32(np.float32(factor) / scale) for _, _, factor in scaled.terms]
    (x, _, _), (y, _, _) = scaled.terms
    total = n.emit("add", *(n.emit("mul", n.cast(v, "f32"), float(f)) for v, f in zip((x, y), factors, strict=True)))
    less = np.float32(sum(zero * float(factor) for (_, zero, _), factor in zip(scaled.terms, factors, strict=True)))
    return (n.emit("sub", total, float(less)) if less else total), 256.0 * float(sum(map(float, factors)))


def _limited(n: OnnxNode, y: Value, zero: int, dtype: str, *, relu: bool) -> Value:
    """Round y, add the zero point and limit the result to a type, in integers of 32 bits."""
    whole = n.cast(n.emit("round", y), "i32")
    if zero:
        whole = n.emit("add", whole, zero)
    least, most = limits_of(dtype)
    return n.cast(between(n, whole, max(int(least), zero) if relu else int(least), int(most)), dtype)
