"""Gradient rules of elementwise operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs

from .emitter import Grad, GradientEmitter, Rule, scaled


def _unary(rule: Callable[[GradientEmitter, Value, Value, Value], Value]) -> Rule:
    """Make a rule from a function of (x, y, dy)."""
    return lambda b, op, dy: (lambda: rule(b, op.ins[0], op.outs[0], dy),)


def _rsqrt(b: GradientEmitter, x: Value, y: Value, dy: Value) -> Value:
    cube = b.emit("mul", b.emit("mul", y, y), y)
    return b.emit("mul", scaled(b, -0.5, dy), cube)


def _one_minus_square(b: GradientEmitter, x: Value, y: Value, dy: Value) -> Value:
    return b.emit("mul", dy, b.emit("sub", b.scalar(1.0, y), b.emit("mul", y, y)))


def _sigmoid(b: GradientEmitter, x: Value, y: Value, dy: Value) -> Value:
    return b.emit("mul", dy, b.emit("mul", y, b.emit("sub", b.scalar(1.0, y), y)))


def _erf(b: GradientEmitter, x: Value, y: Value, dy: Value) -> Value:
    bell = b.emit("exp", b.emit("neg", b.emit("mul", x, x)))
    return b.emit("mul", dy, scaled(b, 2 / math.sqrt(math.pi), bell))


def _atan(b: GradientEmitter, x: Value, y: Value, dy: Value) -> Value:
    return b.emit("div", dy, b.emit("add", b.emit("mul", x, x), b.scalar(1.0, x)))


def _rem(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, divisor = op.ins

    def of_divisor() -> Value:  # minus the whole part of the quotient
        quotient = b.emit("div", b.emit("sub", x, op.outs[0]), divisor)
        return b.emit("neg", b.emit("mul", dy, b.emit("round", quotient)))

    return lambda: dy, of_divisor


def _gelu(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("gelu_grad", op.ins[0], dy, approximate=complete_attrs(op)["approximate"]),)


def _mul(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, y = op.ins
    return lambda: b.emit("mul", dy, y), lambda: b.emit("mul", dy, x)


def _div(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    y, divisor = op.outs[0], op.ins[1]
    return lambda: b.emit("div", dy, divisor), lambda: b.emit("neg", b.emit("div", b.emit("mul", dy, y), divisor))


def _pow(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    (x, power), y = op.ins, op.outs[0]

    def of_base() -> Value:
        lower = b.emit("pow", x, b.emit("sub", power, b.scalar(1.0, power)))
        zero = b.scalar(0.0, dy)  # 0 * x^-1 is 0 also where x is 0
        return b.emit(
            "where", b.emit("equal", power, b.scalar(0.0, power)), zero, b.emit("mul", dy, b.emit("mul", power, lower))
        )

    def of_power() -> Value:
        zero = b.scalar(0.0, dy)  # the limit of x^p * log(x) at 0
        return b.emit(
            "where", b.emit("equal", x, b.scalar(0.0, x)), zero, b.emit("mul", dy, b.emit("mul", y, b.emit("log", x)))
        )

    return of_base, of_power


def _extremum(
    b: GradientEmitter, op: Op, dy: Value, loses: Callable[[Value, Value], tuple[Value, Value]]
) -> Sequence[Grad]:
    def share(mine: Value, other: Value) -> Value:
        shared = b.emit("where", b.emit("equal", mine, other), scaled(b, 0.5, dy), dy)
        return b.emit("where", b.emit("less", *loses(mine, other)), b.scalar(0.0, dy), shared)

    x, y = op.ins
    return lambda: share(x, y), lambda: share(y, x)


def _maximum(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    return _extremum(b, op, dy, lambda mine, other: (mine, other))


def _minimum(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    return _extremum(b, op, dy, lambda mine, other: (other, mine))


def _where(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    condition = op.ins[0]
    return (
        None,
        lambda: b.emit("where", condition, dy, b.scalar(0.0, dy)),
        lambda: b.emit("where", condition, b.scalar(0.0, dy), dy),
    )


RULES: dict[str, Rule] = {
    "neg": _unary(lambda b, x, y, dy: b.emit("neg", dy)),
    "abs": _unary(lambda b, x, y, dy: b.emit("mul", dy, b.emit("sign", x))),
    "exp": _unary(lambda b, x, y, dy: b.emit("mul", dy, y)),
    "log": _unary(lambda b, x, y, dy: b.emit("div", dy, x)),
    "sqrt": _unary(lambda b, x, y, dy: b.emit("div", scaled(b, 0.5, dy), y)),
    "rsqrt": _unary(_rsqrt),
    "sin": _unary(lambda b, x, y, dy: b.emit("mul", dy, b.emit("cos", x))),
    "cos": _unary(lambda b, x, y, dy: b.emit("neg", b.emit("mul", dy, b.emit("sin", x)))),
    "atan": _unary(_atan),
    "tanh": _unary(_one_minus_square),
    "sigmoid": _unary(_sigmoid),
    "erf": _unary(_erf),
    "relu": _unary(lambda b, x, y, dy: b.emit("relu_grad", y, dy)),  # y > 0 exactly where x > 0
    "gelu": _gelu,
    "cast": _unary(lambda b, x, y, dy: b.emit("cast", dy, dtype=x.type.dtype)),
    "add": lambda b, op, dy: (lambda: dy, lambda: dy),
    "sub": lambda b, op, dy: (lambda: dy, lambda: b.emit("neg", dy)),
    "mul": _mul,
    "div": _div,
    "rem": _rem,
    "pow": _pow,
    "minimum": _minimum,
    "maximum": _maximum,
    "where": _where,
}
