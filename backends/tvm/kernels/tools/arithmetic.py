"""Arithmetic on single numbers, with the meaning that the IR gives it and TVM or the processor does not.

In: expressions of one type. Out: an expression. Integers are divided and shifted so that no operands stop the
processor. Floats are written so that TVM folds nothing that nan, infinities and -0 would show.

Limit: 16-bit floats are f32 here (emit.py).
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from penstock.ir.types import ITEM_BYTES

from .emit import HALVES, TVM_DTYPES, Expr, cast, dtype_name, literal
from .functions import Functions


def number_like(x: Expr, value: float) -> Expr:
    """Return a constant of the type of `x`."""
    return (
        tirx.FloatImm(dtype_name(x), float(value))
        if dtype_name(x).startswith("float")
        else tirx.IntImm(dtype_name(x), int(value))
    )


def _same_float(x: Expr, y: Expr) -> bool:
    """Return whether TVM would fold an operation on a float and itself, although the float may be nan or infinite."""
    return dtype_name(x).startswith("float") and bool(tvm_ffi.structural_equal(x, y))


def subtract(x: Expr, y: Expr) -> Expr:
    return x + y * unfolded(number_like(x, -1)) if _same_float(x, y) else x - y


def equal(x: Expr, y: Expr) -> Expr:
    if dtype_name(x).startswith("bool"):
        return tirx.Not(_differ(x, y))
    return x <= y if _same_float(x, y) else tirx.EQ(x, y)


def sign(x: Expr) -> Expr:
    one, none = number_like(x, 1), number_like(x, 0)
    if dtype_name(x).startswith("uint"):
        return tirx.Select(x > none, one, none)
    signed = tirx.Select(x > none, one, tirx.Select(x < none, none - one, none))
    return tirx.Select(tirx.isnan(x), x, signed) if dtype_name(x).startswith("float") else signed


def absolute(x: Expr) -> Expr:
    return (
        tirx.Select(x < number_like(x, 0), number_like(x, 0) - x, x)
        if not dtype_name(x).startswith("float")
        else tirx.abs(x)
    )


def negate(x: Expr) -> Expr:
    if dtype_name(x).startswith("uint"):  # TVM takes 0 - x of these for a number that cannot be
        return tirx.bitwise_not(x) + number_like(x, 1)
    # -1 * x and not 0 - x: the negative of 0 is -0.
    return x * number_like(x, -1) if dtype_name(x).startswith("float") else number_like(x, 0) - x


def convert(f: Functions, x: Expr, dtype: str) -> Expr:
    if dtype in HALVES:
        return f.rounded(convert(f, x, "f32"), dtype)
    if dtype == "bool":
        return x if dtype_name(x).startswith("bool") else tirx.NE(x, number_like(x, 0))
    if dtype_name(x).startswith("bool"):
        return tirx.Select(x, literal(1, dtype), literal(0, dtype))
    return cast(x, dtype)


def divide(f: Functions, a: Expr, b: Expr) -> Expr:
    if dtype_name(a).startswith("float"):
        return a / b
    if isinstance(b, tirx.IntImm) and int(b.value) > 0:
        return tirx.truncdiv(a, b)
    # The processor stops at a division by zero, and of the smallest integer by -1: these are 0, and the smallest
    # integer again.
    a, b = f.bind(a), f.bind(b)
    none = tirx.EQ(b, number_like(b, 0))
    if dtype_name(a).startswith("uint"):
        return tirx.Select(none, number_like(a, 0), tirx.truncdiv(a, tirx.Select(none, number_like(b, 1), b)))
    turned = tirx.EQ(b, number_like(b, -1))
    quotient = tirx.truncdiv(a, f.bind(tirx.Select(tirx.Or(none, turned), number_like(b, 1), b)))
    return tirx.Select(none, number_like(a, 0), tirx.Select(turned, number_like(a, 0) - a, quotient))


def remainder_of(f: Functions, a: Expr, b: Expr) -> Expr:
    a, b = f.bind(a), f.bind(b)
    name = dtype_name(a)
    if not name.startswith("float"):
        # Without signs, because the processor stops at the smallest integer over -1, as it does at a division by zero.
        unsigned = f"uint{name.lstrip('uint')}"

        def size(x: Expr) -> Expr:
            return (
                x
                if name == unsigned
                else f.bind(tirx.Cast(unsigned, tirx.Select(x < number_like(x, 0), number_like(x, 0) - x, x)))
            )

        none = tirx.EQ(b, number_like(b, 0))
        remainder = tirx.truncmod(size(a), f.bind(tirx.Select(none, tirx.IntImm(unsigned, 1), size(b))))
        if name != unsigned:
            remainder = f.bind(tirx.Cast(name, remainder))
            remainder = tirx.Select(a < number_like(a, 0), number_like(a, 0) - remainder, remainder)
        return tirx.Select(none, a, remainder)
    return f.bind(tirx.call_pure_extern(name, "fmodf" if name == "float32" else "fmod", a, b))


def guarded_shift(x: Expr, by: Expr, shifted: Expr, beyond: Expr) -> Expr:
    """Guard a shift, which the processor takes modulo the width; a negative shift counts as one beyond the width."""
    inside = by < number_like(by, int(dtype_name(x).lstrip("uint")))
    if not dtype_name(x).startswith("uint"):
        inside = tirx.And(inside, by >= number_like(by, 0))
    return tirx.Select(inside, shifted, beyond)


def _bits(x: Expr, dtype: str) -> Expr:
    """Return the bits of a number of that type as an unsigned integer; 16-bit floats are f32 here."""
    if dtype == "f16":
        return tirx.reinterpret("uint16", tirx.Cast("float16", x))
    if dtype == "bf16":
        return tirx.Cast("uint16", tirx.reinterpret("uint32", x) >> tirx.IntImm("uint32", 16))
    return tirx.reinterpret(f"uint{8 * ITEM_BYTES[dtype]}", x)


def bitcast(f: Functions, x: Expr, source: str, target: str) -> Expr:
    bits = f.bind(_bits(f.rounded(x, source) if source == "bf16" else x, source))
    if target == "f16":
        return tirx.Cast("float32", tirx.reinterpret("float16", bits))
    if target == "bf16":
        return tirx.reinterpret("float32", tirx.Cast("uint32", bits) << tirx.IntImm("uint32", 16))
    return tirx.reinterpret(TVM_DTYPES[target], bits)


def relu(x: Expr) -> Expr:
    return tirx.Select(x < number_like(x, 0), number_like(x, 0), x)


def _differ(x: Expr, y: Expr) -> Expr:
    return tirx.Or(tirx.And(x, tirx.Not(y)), tirx.And(y, tirx.Not(x)))


def unfolded(x: tirx.FloatImm) -> Expr:
    """Return 0, 1 or infinity of either sign, or nan, as an expression that TVM cannot fold: it takes 0 * x and 0 / x
    for 0, whatever x is, and cannot compile x / 0. The root of each of them is itself, which LLVM knows."""
    negative = x.value < 0
    root = tirx.sqrt(number_like(x, -x.value if negative else x.value))
    return root * number_like(x, -1) if negative else root
