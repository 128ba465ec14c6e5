"""x to the power y in f32 as a vector expression: 2^(y log2|x|), with the logarithm and its product in f64, so that
nothing is lost before the result is rounded.

|x| = 2^e (1 + r) with 1 + r within sqrt(1/2) .. sqrt(2), log2|x| = e + r Q(r), the product is a whole number and a
fraction, and 2^fraction is an f32 polynomial. Special operands are those of IEEE 754: x^0 and 1^y are 1, also for nan;
a negative x has results for whole y, and the sign of x for odd ones. Error, measured in the tests: 1.3 ulp over all
results, denormals included.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from .emit import Expr, literal

# log2(1 + r) / r within the limits above: relative error 1.6e-11, a fit by weighted least squares, weights made even.
_LOG2 = (
    0.07737052259446534,
    -0.14283942968654403,
    0.1447484227345999,
    -0.14315643140553083,
    0.15876980116935338,
    -0.1803006042799557,
    0.20617535973052573,
    -0.2404531654624034,
    0.2885372934573752,
    -0.3606736748302541,
    0.4808983613956842,
    -0.7213475208687441,
    1.4426950408687036,
)
# The bits of sqrt(1/2), and those of the exponent.
_LEAST, _EXPONENT = 0x3F3504F3, -0x800000
# Added to an f64 of moderate size, it leaves the nearest whole number.
_ROUND = 1.5 * 2**52
# Results are 0 or inf beyond these powers of two; no finite power of a number but 1 is as large as the last.
_LOW, _HIGH, _HUGE = -151.0, 129.0, 1e300


def _f32(value: float) -> Expr:
    return literal(value, "f32")


def _f64(value: float) -> Expr:
    return literal(value, "f64")


def _int32(value: int) -> Expr:
    return tirx.IntImm("int32", value)


def power(bind: Callable[[Expr], Expr], powers_of_two: Callable[[Expr], Expr], x: Expr, y: Expr) -> Expr:
    """Return x^y; `powers_of_two` is 2^z for |z| <= 1/2."""
    x, y = bind(x), bind(y)
    size = bind(tirx.abs(x))
    # A product with an infinite y would be nan where the logarithm is 0.
    exponent = bind(tirx.Cast("float64", _clamped(bind, y, _f32(-1e30), _f32(1e30))))
    product = _clamped(bind, bind(_log2(bind, size) * exponent), _f64(_LOW), _f64(_HIGH))
    shifted = bind(product + _f64(_ROUND))
    whole = bind(shifted - _f64(_ROUND))
    fraction = powers_of_two(bind(tirx.Cast("float32", product - whole)))
    # In two steps, so that results below 2^-126 are denormals and those past the largest float are inf.
    # From its bits: the conversion of nan to a whole number is undefined.
    n = bind(tirx.Cast("int32", tirx.reinterpret("int64", shifted)))
    half = bind(n >> _int32(1))
    result = bind(fraction * _power_of_two(half) * _power_of_two(n - half))
    even, whole_y = bind(y * _f32(0.5)), tirx.EQ(tirx.floor(y), y)
    odd = tirx.And(whole_y, tirx.NE(tirx.floor(even), even))
    sign = bind(tirx.reinterpret("int32", x) & _int32(-0x80000000))
    sign = bind(tirx.Select(odd, sign, _int32(0)))
    result = bind(tirx.reinterpret("float32", tirx.bitwise_xor(tirx.reinterpret("int32", result), sign)))
    rootless = tirx.And(x < _f32(0), tirx.And(x > _f32(-math.inf), tirx.Not(whole_y)))
    result = bind(tirx.Select(rootless, _f32(math.nan), result))
    # Comparisons with nan are false: its logarithm was taken from its bits. A nan in y has come through the product.
    result = bind(tirx.Select(size >= _f32(0), result, x))
    return bind(tirx.Select(tirx.Or(tirx.EQ(y, _f32(0)), tirx.EQ(x, _f32(1))), _f32(1), result))


def _clamped(bind: Callable[[Expr], Expr], x: Expr, low: Expr, high: Expr) -> Expr:
    x = bind(tirx.Select(x > high, high, x))
    return bind(tirx.Select(x < low, low, x))


def _power_of_two(n: Expr) -> Expr:
    return tirx.reinterpret("float32", (n + _int32(127)) << _int32(23))


def _log2(bind: Callable[[Expr], Expr], size: Expr) -> Expr:
    """Return log2 of a number not below 0 in f64, huge instead of infinite."""
    tiny = size < _f32(1.1754944e-38)
    bits = bind(tirx.reinterpret("int32", bind(tirx.Select(tiny, size * _f32(8388608.0), size))))
    above = bind(bits - _int32(_LEAST))
    m = tirx.reinterpret("float32", bits - tirx.bitwise_and(above, _int32(_EXPONENT)))
    e = tirx.Cast("float32", above >> _int32(23)) - tirx.Select(tiny, _f32(23), _f32(0))
    r = bind(tirx.Cast("float64", bind(m - _f32(1))))
    p = _f64(_LOG2[0])
    for c in _LOG2[1:]:
        p = p * r + _f64(c)
    y = bind(bind(p) * r + tirx.Cast("float64", bind(e)))
    y = bind(tirx.Select(tirx.EQ(size, _f32(0)), _f64(-_HUGE), y))
    return bind(tirx.Select(tirx.EQ(size, _f32(math.inf)), _f64(_HUGE), y))
