"""Functions of one element, written with the operations of the IR so that no intermediate result overflows."""

from __future__ import annotations

from math import inf, pi

import numpy as np

from penstock.frontends.writer import Operand, Writer
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS, numpy_dtype

SELU_ALPHA, SELU_GAMMA = 1.6732632423543772, 1.0507009873554805


def limits_of(dtype: str) -> tuple[float | int, float | int]:
    """Return the bounds of the elements of a type."""
    if dtype in FLOATS:
        return -inf, inf
    if dtype == "bool":
        return False, True
    limits = np.iinfo(numpy_dtype(dtype))
    return int(limits.min), int(limits.max)


def widened(w: Writer, x: Value) -> Value:
    """Convert 16-bit floats to f32, in which they are computed. Return other types as they are."""
    return w.cast(x, "f32") if x.type.dtype in ("f16", "bf16") else x


def between(w: Writer, x: Value, low: float, high: float) -> Value:
    return w.emit("minimum", w.emit("maximum", x, low), high)


def power(w: Writer, x: Value, exponent: float) -> Value:
    """Raise x to a constant power. The powers that models use become products and roots, which have cheap gradients."""
    match exponent:
        case 1.0:
            return x
        case 2.0:
            return w.emit("mul", x, x)
        case 3.0:
            return w.emit("mul", w.emit("mul", x, x), x)
    if x.type.dtype in FLOATS:
        match exponent:
            case 0.5:
                return w.emit("sqrt", x)
            case -0.5:
                return w.emit("rsqrt", x)
            case -1.0:
                return w.emit("div", 1.0, x)
        return w.emit("pow", x, exponent)
    return _integer_power(w, x, int(exponent)) if exponent.is_integer() else power_of(w, x, w.literal(exponent, "f64"))


def _integer_power(w: Writer, x: Value, exponent: int) -> Value:
    """Raise by repeated squaring, with wrap-around as in products.

    Negative powers of numbers other than 1 and -1 are 0.
    """
    if exponent < 0:
        size = x if x.type.dtype[0] == "u" else w.emit("abs", x)
        unit = w.emit("cast", w.emit("equal", size, 1), dtype=x.type.dtype)
        return w.emit("mul", x, unit) if exponent % 2 else unit
    total: Value | None = None
    while exponent:
        if exponent % 2:
            total = x if total is None else w.emit("mul", total, x)
        exponent //= 2
        x = w.emit("mul", x, x) if exponent else x
    return w.emit("const", value=1, dtype=x.type.dtype, shape=x.type.dims) if total is None else total


def power_of(w: Writer, x: Value, y: Value) -> Value:
    """Raise x to a power that is computed, in the element type of x. For integers it is exact up to 2^53."""
    dtype = x.type.dtype
    if dtype in FLOATS:
        return w.emit("pow", x, w.cast(y, dtype))
    wide = w.emit("pow", *(w.cast(v, "f64") for v in (x, y)))
    if y.type.dtype in FLOATS:
        return w.emit("cast", wide, dtype=dtype)
    lost = w.emit("and", w.emit("equal", x, 0), w.emit("less", y, 0))  # 0 has no inverse
    return w.emit("cast", w.emit("where", lost, 0.0, w.emit("round", wide)), dtype=dtype)


def root(w: Writer, x: Value, order: float = 2.0) -> Value:
    """Return the root of a sum that is not negative, such as the length of a vector.

    Its gradient at 0 is 0, where that of the root alone is infinite.
    """
    if order == 1.0:
        return x
    nothing = w.emit("equal", x, 0.0)
    return w.emit("where", nothing, 0.0, power(w, w.emit("where", nothing, 1.0, x), 1.0 / order))


def positive(w: Writer, x: Value) -> Value:
    return w.emit("maximum", x, 0.0)


def negative(w: Writer, x: Value) -> Value:
    return w.emit("minimum", x, 0.0)


def softplus(w: Writer, x: Value) -> Value:
    # max(x, 0) + log(1 + e^-|x|): never overflows.
    return w.emit(
        "add", positive(w, x), w.emit("log", w.emit("add", w.emit("exp", w.emit("neg", w.emit("abs", x))), 1.0))
    )


def hard_sigmoid(w: Writer, x: Value, alpha: float, beta: float) -> Value:
    return between(w, w.emit("add", w.emit("mul", x, alpha), beta), 0.0, 1.0)


def hard_swish(w: Writer, x: Value) -> Value:
    return w.emit("mul", x, hard_sigmoid(w, x, 1 / 6, 0.5))


def elu(w: Writer, x: Value, alpha: float, inner: float = 1.0) -> Value:
    """Compute x above zero and alpha * (e^(inner * x) - 1) elsewhere.

    The gradient at zero is that of the latter, as in torch.
    """
    above = w.emit("less", 0.0, x)
    low = w.emit(
        "where", above, 0.0, x
    )  # not a minimum, which would give both its operands half of the gradient at zero
    low = low if inner == 1.0 else w.emit("mul", low, inner)
    return w.emit("where", above, x, w.emit("mul", w.emit("sub", w.emit("exp", low), 1.0), alpha))


def selu(w: Writer, x: Value, alpha: float = SELU_ALPHA, gamma: float = SELU_GAMMA) -> Value:
    return w.emit("mul", elu(w, x, alpha), gamma)


def leaky(w: Writer, x: Value, slope: Value | float) -> Value:
    return w.emit("where", w.emit("less", 0.0, x), x, w.emit("mul", x, slope))


def clamp(w: Writer, x: Value, low: Operand | None, high: Operand | None) -> Value:
    """Limit x to the bounds, each of which may be missing.

    The gradient is that of x from bound to bound, both included.
    """
    if high is not None:
        x = w.emit("where", w.emit("less", high, x), high, x)
    return x if low is None else w.emit("where", w.emit("less", x, low), low, x)


def saturate(w: Writer, x: Value, low: float, high: float) -> Value:
    """Limit x to the bounds. The gradient at the bounds themselves is 0, as in torch's relu6."""
    return w.emit("where", w.emit("less_equal", x, low), low, w.emit("where", w.emit("less_equal", high, x), high, x))


# -------------------------------------------------------------------------------------- exact near zero, finite far out


def expm1(w: Writer, x: Value) -> Value:
    """Compute e^x - 1 = tanh(x / 2) * (e^x + 1), where nothing cancels.

    From 1 on it is the difference, because the product would overflow sooner.
    """
    small = w.emit("minimum", x, 1.0)
    near = w.emit("mul", w.emit("tanh", w.emit("mul", small, 0.5)), w.emit("add", w.emit("exp", small), 1.0))
    return w.emit("where", w.emit("less", x, 1.0), near, w.emit("sub", w.emit("exp", x), 1.0))


def log1p(w: Writer, x: Value) -> Value:
    """Compute log(1 + x), corrected by the rounding error of the sum 1 + x over the sum.

    The correction is computed for x between -1/2 and 1, outside of which it changes nothing.
    """
    near = w.emit("maximum", w.emit("minimum", x, 1.0), -0.5)
    total = w.emit("add", near, 1.0)
    correction = w.emit("div", w.emit("sub", w.emit("sub", total, 1.0), near), total)
    return w.emit("sub", w.emit("log", w.emit("add", x, 1.0)), correction)


def tan(w: Writer, x: Value) -> Value:
    return w.emit("div", w.emit("sin", x), w.emit("cos", x))


def sinh(w: Writer, x: Value) -> Value:
    return w.emit("mul", w.emit("sub", expm1(w, x), expm1(w, w.emit("neg", x))), 0.5)


def cosh(w: Writer, x: Value) -> Value:
    return w.emit("mul", w.emit("add", w.emit("exp", x), w.emit("exp", w.emit("neg", x))), 0.5)


def inverse_sinh(w: Writer, x: Value) -> Value:
    """Compute sign(x) * log(1 + |x| + x^2 / (1 + sqrt(1 + x^2)))."""
    below = w.emit("less", x, 0.0)
    size = w.emit("where", below, w.emit("neg", x), x)  # not abs: its gradient at zero is zero
    square = w.emit("mul", x, x)
    root = w.emit("add", w.emit("sqrt", w.emit("add", square, 1.0)), 1.0)
    positive = log1p(w, w.emit("add", size, w.emit("div", square, root)))
    return w.emit("where", below, w.emit("neg", positive), positive)


def inverse_cosh(w: Writer, x: Value) -> Value:
    """Compute log(1 + t + sqrt(t * (t + 2))) with t = x - 1."""
    t = w.emit("sub", x, 1.0)
    return log1p(w, w.emit("add", t, w.emit("sqrt", w.emit("mul", t, w.emit("add", t, 2.0)))))


def inverse_tanh(w: Writer, x: Value) -> Value:
    return w.emit("mul", w.emit("sub", log1p(w, x), log1p(w, w.emit("neg", x))), 0.5)


def inverse_sine(w: Writer, x: Value) -> Value:
    return w.emit(
        "atan",
        w.emit(
            "div",
            x,
            w.emit("sqrt", w.emit("mul", w.emit("sub", w.literal(1.0, x.type.dtype), x), w.emit("add", x, 1.0))),
        ),
    )


def inverse_cosine(w: Writer, x: Value) -> Value:
    """Compute 2 * atan(sqrt((1 - x) / (1 + x)))."""
    ratio = w.emit("div", w.emit("sub", w.literal(1.0, x.type.dtype), x), w.emit("add", x, 1.0))
    return w.emit("mul", w.emit("atan", w.emit("sqrt", ratio)), 2.0)


def below_zero(w: Writer, x: Value) -> Value:
    """Return whether the sign of x is a minus, as that of -0.0 is."""
    return w.emit("or", w.emit("less", x, 0.0), w.emit("less", w.emit("div", 1.0, x), 0.0))


def with_sign(w: Writer, x: Value, minus: Value) -> Value:
    """Return |x|, with a minus where `minus` holds. The gradient at zero is zero, as in torch."""
    size = w.emit("abs", x)
    return w.emit("where", minus, w.emit("neg", size), size)


def angle(w: Writer, y: Value, x: Value) -> Value:
    """Compute the angle of the point (x, y) from the smaller over the larger coordinate, which cannot overflow.

    At (0, 0) it has no gradient, as in torch.
    """
    steep = w.emit("less", w.emit("abs", x), w.emit("abs", y))
    small, large = w.emit("where", steep, x, y), w.emit("where", steep, y, x)
    nowhere, endless = w.emit("equal", large, 0.0), w.emit("equal", w.emit("abs", small), inf)
    one, minus_one = (w.literal(sign, x.type.dtype) for sign in (1.0, -1.0))
    small = w.emit("where", endless, w.emit("where", w.emit("less", small, 0.0), minus_one, one), small)
    large = w.emit(
        "where",
        endless,
        w.emit("where", w.emit("less", large, 0.0), minus_one, one),
        w.emit("where", nowhere, 1.0, large),
    )
    slope = w.emit("where", nowhere, 0.0, w.emit("atan", w.emit("div", small, large)))
    minus = below_zero(w, y)
    half, quarter = (
        w.emit("where", minus, w.literal(-turn, x.type.dtype), w.literal(turn, x.type.dtype)) for turn in (pi, pi / 2)
    )
    flat = w.emit("where", below_zero(w, x), w.emit("add", slope, half), slope)
    return w.emit("where", steep, w.emit("sub", quarter, slope), flat)


def scaled_softplus(w: Writer, x: Value, beta: float, threshold: float) -> Value:
    """Compute log(1 + e^(beta * x)) / beta, and x itself where beta * x is above the threshold."""
    scaled = x if beta == 1.0 else w.emit("mul", x, beta)
    y = softplus(w, scaled)
    y = y if beta == 1.0 else w.emit("div", y, beta)
    return w.emit("where", w.emit("less", w.literal(threshold, x.type.dtype), scaled), x, y)


# ---------------------------------------------------------------------------------------- rounding and what remains


def ceil(w: Writer, x: Value) -> Value:
    return w.emit("neg", w.emit("floor", w.emit("neg", x)))


def truncate(w: Writer, x: Value) -> Value:
    """Round toward zero. Integers stay as they are."""
    if x.type.dtype not in FLOATS:
        return x
    return w.emit("where", w.emit("less", x, 0.0), ceil(w, x), w.emit("floor", x))


def inverted(w: Writer, x: Value) -> Value:
    """Invert every bit of an integer."""
    dtype = x.type.dtype
    return w.emit("bit_xor", x, 2 ** int(dtype[1:]) - 1 if dtype[0] == "u" else -1)


def floor_divide(w: Writer, x: Operand, y: Operand) -> Value:
    """Divide and round down."""
    quotient = w.emit("div", x, y)
    if quotient.type.dtype in FLOATS:
        return w.emit("floor", quotient)
    left_over = w.emit("sub", x, w.emit("mul", quotient, y))
    return w.emit("where", _against(w, left_over, y), w.emit("sub", quotient, 1), quotient)


def remainder(w: Writer, x: Operand, y: Operand) -> Value:
    """Compute the remainder of x, with the sign of y."""
    left_over = w.emit("rem", x, y)
    return w.emit("where", _against(w, left_over, y), w.emit("add", left_over, y), left_over)


def _against(w: Writer, left_over: Value, y: Operand) -> Value:
    """Return whether a remainder is not zero and has the other sign than the divisor."""
    divisor = y if isinstance(y, Value) else w.literal(y, left_over.type.dtype)
    signs_differ = w.emit("not", w.emit("equal", w.emit("less", left_over, 0), w.emit("less", divisor, 0)))
    return w.emit("and", w.emit("not", w.emit("equal", left_over, 0)), signs_differ)
