"""Functions of one element, written with the operations of the IR so that nothing overflows on the way."""

from __future__ import annotations

from penstock.ir.graph import Value
from penstock.ir.types import FLOATS

from ..writer import Refused, Writer


def power(w: Writer, x: Value, exponent: float) -> Value:
    """x to a constant power; the powers that models use become products and roots, which have cheap gradients."""
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
    raise Refused(f"integers to the power {exponent:g} are not supported, only 1, 2 and 3")


def positive(w: Writer, x: Value) -> Value:
    return w.emit("maximum", x, 0.0)


def negative(w: Writer, x: Value) -> Value:
    return w.emit("minimum", x, 0.0)


def softplus(w: Writer, x: Value) -> Value:
    # max(x, 0) + log(1 + e^-|x|): never overflows.
    return w.emit("add", positive(w, x), w.emit("log", w.emit("add", w.emit("exp", w.emit("neg", w.emit("abs", x))), 1.0)))


def hard_sigmoid(w: Writer, x: Value, alpha: float, beta: float) -> Value:
    return w.emit("minimum", w.emit("maximum", w.emit("add", w.emit("mul", x, alpha), beta), 0.0), 1.0)


def elu(w: Writer, x: Value, alpha: float) -> Value:
    return w.emit("add", positive(w, x), w.emit("mul", w.emit("sub", w.emit("exp", negative(w, x)), 1.0), alpha))


def leaky(w: Writer, x: Value, slope: Value | float) -> Value:
    return w.emit("where", w.emit("less", x, 0.0), w.emit("mul", x, slope), x)
