"""Elementwise ONNX operators: one row each. Operands broadcast as in NumPy on both sides, so most rows are a name."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan

from penstock.frontends.formulas.elementwise import (
    SELU_ALPHA,
    SELU_GAMMA,
    ceil,
    clamp,
    cosh,
    elu,
    hard_sigmoid,
    hard_swish,
    inverse_cosh,
    inverse_cosine,
    inverse_sine,
    inverse_sinh,
    inverse_tanh,
    inverted,
    leaky,
    negative,
    positive,
    power,
    power_of,
    remainder,
    selu,
    sinh,
    softplus,
    tan,
)
from penstock.frontends.formulas.layout import reshape
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.frontends.onnx.source import our_dtype
from penstock.frontends.writer import Refused
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS


def same(kind: str) -> Rule:
    """Make a rule for an operator that is one operation of the IR on all its operands."""
    return lambda n: n.emit(kind, *n.values())


def swapped(kind: str) -> Rule:
    return lambda n: n.emit(kind, n.value(1), n.value(0))


def unary(write: Callable[[OnnxNode, Value], Value]) -> Rule:
    """Make a rule for an operator of one floating-point operand that is written as a formula."""

    def rule(n: OnnxNode) -> Value:
        n.require(n.type().dtype in FLOATS, f"needs a floating-point operand, got {n.type()}")
        return write(n, n.value())

    return rule


def fold_left(kind: str) -> Callable[[OnnxNode], Value]:
    """Make a rule for a variadic operator, as a chain of binary operations."""

    def rule(n: OnnxNode) -> Value:
        total = n.value(0)
        for i in range(1, n.count):
            total = n.emit(kind, total, n.value(i))
        return total

    return rule


_sum = fold_left("add")


def _mean(n: OnnxNode) -> Result:
    total = _sum(n)
    return n.emit("mul", total, 1.0 / n.count) if n.count > 1 else total


def _pow(n: OnnxNode) -> Result:
    exponent = n.known(1)
    if exponent is not None and exponent.size == 1 and exponent.ndim <= n.type(0).rank:
        return power(n, n.value(0), float(exponent.reshape(-1)[0]))
    return power_of(n, n.value(0), n.value(1))


def _cast_to(n: OnnxNode, dtype: str) -> Result:
    return n.tensor(0) if n.type().dtype == dtype else n.emit("cast", n.value(), dtype=dtype)


def _cast(n: OnnxNode) -> Result:
    n.ignore("saturate", "round_mode")  # they concern 8-bit floats only, which are refused
    try:
        return _cast_to(n, our_dtype(n.int_attr("to")))
    except ValueError as error:
        raise Refused(str(error)) from error


def _cast_like(n: OnnxNode) -> Result:
    n.ignore("saturate", "round_mode")
    return _cast_to(n, n.type(1).dtype)


def _clip(n: OnnxNode) -> Result:
    """Write Clip. A nan bound counts as none, as in onnxruntime."""
    x = n.value()
    for i, kind in ((1, "maximum"), (2, "minimum")):
        if not n.has(i):
            continue
        n.require(n.type(i).size == 1, f"the bound must be one number, got shape {list(n.type(i).dims)}")
        if isinstance(n.tensor(i), Value):
            bound = reshape(n, n.value(i), ())
            x = clamp(n, x, *((bound, None) if i == 1 else (None, bound)))
        elif not isnan(number := n.constant(i, "the bound").item()):
            x = n.emit(kind, x, number)
    return x if x != n.value() else n.tensor(0)


def _gelu(n: OnnxNode) -> Result:
    approximate = n.text_attr("approximate", "none")
    n.require(approximate in ("none", "tanh"), f"approximate={approximate} is not known, only none and tanh")
    return n.emit("gelu", n.value(), approximate=approximate)


def _celu(n: OnnxNode, x: Value) -> Value:
    alpha = n.float_attr("alpha", 1.0)
    return n.emit(
        "add",
        positive(n, x),
        n.emit("mul", n.emit("sub", n.emit("exp", n.emit("div", negative(n, x), alpha)), 1.0), alpha),
    )


def _not_a_number(n: OnnxNode) -> Result:
    return n.emit("not", n.emit("equal", n.value(), n.value()))


def _mod(n: OnnxNode) -> Result:
    """Write Mod: with the sign of the divisor or, with fmod, of the dividend."""
    x, y = n.value(0), n.value(1)
    if not n.int_attr("fmod"):
        return remainder(n, x, y)
    return n.emit("rem", x, y)


def _bit_shift(n: OnnxNode) -> Result:
    direction = n.text_attr("direction")
    n.require(direction in ("LEFT", "RIGHT"), f"direction={direction} is not known")
    return n.emit("shift_left" if direction == "LEFT" else "shift_right", n.value(0), n.value(1))


def _bit_cast(n: OnnxNode) -> Result:
    x = n.value()
    x = n.emit("cast", x, dtype="u8") if x.type.dtype == "bool" else x
    try:
        dtype = our_dtype(n.int_attr("to"))
        if dtype == "bool":
            return n.emit("cast", x, dtype="bool")
        return x if dtype == x.type.dtype else n.emit("bitcast", x, dtype=dtype)
    except ValueError as error:
        raise Refused(str(error)) from error


def _shrink(n: OnnxNode, x: Value) -> Value:
    bias, limit = n.float_attr("bias"), n.float_attr("lambd", 0.5)
    above = n.emit(
        "where", n.emit("less", n.literal(limit, x.type.dtype), x), n.emit("sub", x, bias) if bias else x, 0.0
    )
    return n.emit("where", n.emit("less", x, -limit), n.emit("add", x, bias) if bias else x, above)


def _infinite(n: OnnxNode) -> Result:
    x = n.value()
    n.require(x.type.dtype in FLOATS, f"needs a floating-point operand, got {x.type}")
    below, above = n.int_attr("detect_negative", 1), n.int_attr("detect_positive", 1)
    if below and above:
        return n.emit("equal", n.emit("abs", x), inf)
    if not below and not above:
        return n.emit("const", value=False, dtype="bool", shape=x.type.dims)
    return n.emit("equal", x, inf if above else -inf)


RULES: dict[str, Rule] = {
    # one operation each
    "Add": same("add"),
    "Sub": same("sub"),
    "Mul": same("mul"),
    "Div": same("div"),
    "Neg": same("neg"),
    "Abs": same("abs"),
    "Sign": same("sign"),
    "Floor": same("floor"),
    "Round": same("round"),
    "Sqrt": same("sqrt"),
    "Exp": same("exp"),
    "Log": same("log"),
    "Erf": same("erf"),
    "Sin": same("sin"),
    "Cos": same("cos"),
    "Tanh": same("tanh"),
    "Sigmoid": same("sigmoid"),
    "Relu": same("relu"),
    "Equal": same("equal"),
    "Less": same("less"),
    "LessOrEqual": same("less_equal"),
    "Greater": swapped("less"),
    "GreaterOrEqual": swapped("less_equal"),
    "And": same("and"),
    "Or": same("or"),
    "Not": same("not"),
    "Where": same("where"),
    # variadic
    "Min": fold_left("minimum"),
    "Max": fold_left("maximum"),
    "Sum": _sum,
    "Mean": _mean,
    # formulas
    "Xor": lambda n: n.emit("not", n.emit("equal", n.value(0), n.value(1))),
    "IsNaN": _not_a_number,
    "IsInf": _infinite,
    "Ceil": unary(ceil),
    "Asin": unary(inverse_sine),
    "Acos": unary(inverse_cosine),
    "Atan": same("atan"),
    "BitwiseAnd": same("bit_and"),
    "BitwiseOr": same("bit_or"),
    "BitwiseXor": same("bit_xor"),
    "BitwiseNot": lambda n: inverted(n, n.value()),
    "BitShift": _bit_shift,
    "BitCast": _bit_cast,
    "Mod": _mod,
    "Tan": unary(tan),
    "Sinh": unary(sinh),
    "Cosh": unary(cosh),
    "Asinh": unary(inverse_sinh),
    "Acosh": unary(inverse_cosh),
    "Atanh": unary(inverse_tanh),
    "Shrink": unary(_shrink),
    "Reciprocal": unary(lambda n, x: n.emit("div", 1.0, x)),
    "Pow": _pow,
    "Clip": _clip,
    "Gelu": _gelu,
    "LeakyRelu": unary(lambda n, x: leaky(n, x, n.float_attr("alpha", 0.01))),
    "PRelu": lambda n: leaky(n, n.value(0), n.value(1)),
    "ThresholdedRelu": unary(
        lambda n, x: n.emit("where", n.emit("less", n.literal(n.float_attr("alpha", 1.0), x.type.dtype), x), x, 0.0)
    ),
    "Elu": unary(lambda n, x: elu(n, x, n.float_attr("alpha", 1.0))),
    "Celu": unary(_celu),
    "Selu": unary(lambda n, x: selu(n, x, n.float_attr("alpha", SELU_ALPHA), n.float_attr("gamma", SELU_GAMMA))),
    "Softplus": unary(softplus),
    "Softsign": unary(lambda n, x: n.emit("div", x, n.emit("add", n.emit("abs", x), 1.0))),
    "Mish": unary(lambda n, x: n.emit("mul", x, n.emit("tanh", softplus(n, x)))),
    "Swish": unary(lambda n, x: n.emit("mul", x, n.emit("sigmoid", n.emit("mul", x, n.float_attr("alpha", 1.0))))),
    "HardSigmoid": unary(lambda n, x: hard_sigmoid(n, x, n.float_attr("alpha", 0.2), n.float_attr("beta", 0.5))),
    "HardSwish": unary(hard_swish),
    # element types, and what does nothing at inference
    "Cast": _cast,
    "CastLike": _cast_like,
    "Identity": lambda n: n.operand(0),
}
