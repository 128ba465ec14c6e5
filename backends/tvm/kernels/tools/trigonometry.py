"""Sine and cosine of f32 as vector expressions, for processors with fused multiply-adds.

x = n pi + r, with n whole for the sine and a whole number and a half for the cosine; then both are r + r^3 P(r^2) up to
the sign, which is that of an even or odd n. pi is taken in three parts of 24 bits: the first difference is exact,
because the product is not rounded, so r keeps its relative precision next to the zeros.

Limit: |x| <= 2^17, where r is not yet further from 0 than the polynomial allows; larger operands go to the C library,
one by one. A vector without any costs one comparison. Error, measured in the tests: 2 ulp, also at the floats nearest
to multiples of pi / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx

from .emit import Emitter, Expr, literal
from .lanes import mend

_LARGEST = 131072.0
# pi as a sum of three f32: each is the nearest to pi minus those before it.
_PI = (3.1415927410125732, -8.742277657347586e-08, -3.4302490200117637e-15)
# sin(r) = r + r^3 * (these, of r^2) for |r| <= pi / 2 + 0.04: relative error 3.2e-11 before rounding, a fit by
# weighted least squares, weights made even.
_SIN = (-2.3829083e-08, 2.7521980e-06, -1.98408018e-04, 8.3333306e-03, -1.6666667e-01)
# Added to a float of moderate size, it leaves the nearest whole number in the last bits.
_ROUND = 12582912.0


def sine(emit: Emitter, x: Expr) -> Expr:
    """Return sin(x)."""
    x = emit.bind(x)
    t = emit.bind(x * _f32(1 / math.pi) + _f32(_ROUND))
    y = _sine_from(emit, x, emit.bind(t - _f32(_ROUND)))
    y = emit.bind(_turned(y, tirx.reinterpret("int32", t) << 31))
    # The sum of a zero and its cube would lose the sign.
    return _mended(emit, emit.bind(tirx.Select(tirx.EQ(x, _f32(0)), x, y)), x, tirx.sin)


def cosine(emit: Emitter, x: Expr) -> Expr:
    """Return cos(x)."""
    x = emit.bind(x)
    t = emit.bind(x * _f32(1 / math.pi) - _f32(0.5) + _f32(_ROUND))
    y = _sine_from(emit, x, emit.bind(t - _f32(_ROUND) + _f32(0.5)))
    # cos((k + 1/2) pi + r) = -(-1)^k sin(r)
    y = emit.bind(_turned(y, (tirx.reinterpret("int32", t) + 1) << 31))
    return _mended(emit, y, x, tirx.cos)


def _f32(value: float) -> Expr:
    return literal(value, "f32")


def _sine_from(emit: Emitter, x: Expr, n: Expr) -> Expr:
    """Return sin(x - n pi)."""
    r = x
    for part in _PI:
        r = emit.bind(r - n * _f32(part))
    z = emit.bind(r * r)
    p = _f32(_SIN[0])
    for c in _SIN[1:]:
        p = p * z + _f32(c)
    return emit.bind(r + emit.bind(r * z) * emit.bind(p))


def _turned(y: Expr, sign: Expr) -> Expr:
    return tirx.reinterpret("float32", tirx.bitwise_xor(tirx.reinterpret("int32", y), sign))


def _mended(emit: Emitter, y: Expr, x: Expr, exact: Callable[[Any], Any]) -> Expr:
    return mend(emit, y, tirx.abs(x) > _f32(_LARGEST), exact, x)
