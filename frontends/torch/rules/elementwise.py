"""Elementwise ATen operations: one row each. Operands broadcast as in NumPy on both sides; only type promotion differs.

torch computes in the type that both operands promote to, and the graph gives the type of the result. Arithmetic casts
its operands to that type, comparisons to the common type of their operands.
"""

from __future__ import annotations

from collections.abc import Callable
from math import copysign, isfinite, log

import torch

from penstock.frontends.formulas.elementwise import (
    angle,
    below_zero,
    ceil,
    clamp,
    cosh,
    elu,
    expm1,
    floor_divide,
    hard_sigmoid,
    hard_swish,
    inverse_cosh,
    inverse_cosine,
    inverse_sine,
    inverse_sinh,
    inverse_tanh,
    leaky,
    log1p,
    power,
    power_of,
    remainder,
    saturate,
    scaled_softplus,
    selu,
    sinh,
    tan,
    truncate,
    with_sign,
)
from penstock.frontends.torch.node import KnownElements, Result, Rule, TorchNode
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS

# ---------------------------------------------------------------------------------------- one operand


def unary(write: str | Callable[[TorchNode, Value], Value]) -> Rule:
    """Make a rule of one operand in the result's element type. `write` is a formula, or an operation of the IR."""

    def rule(n: TorchNode) -> Result:
        x = n.value("self", n.dtype)
        return n.emit(write, x) if isinstance(write, str) else write(n, x)

    return rule


def rounded(write: str | Callable[[TorchNode, Value], Value]) -> Rule:
    """Make a rule for rounding, which leaves integers as they are."""
    inner = unary(write)
    return lambda n: n.arg("self") if n.dtype not in FLOATS else inner(n)


def truth(n: TorchNode, name: str) -> Value:
    """Convert an argument to a bool that says whether it differs from 0."""
    x = n.value(name)
    return x if x.type.dtype == "bool" else n.emit("not", n.emit("equal", x, 0))


def _neither(n: TorchNode, kind: str) -> Result:
    x = n.value()
    if x.type.dtype not in FLOATS:
        return torch.zeros(x.type.dims, dtype=torch.bool)
    return n.emit("not", n.emit("equal", x, x)) if kind == "nan" else n.emit("equal", n.emit("abs", x), float("inf"))


def _round(n: TorchNode) -> Result:
    scale = 10.0 ** n.arg("decimals", 0)
    if n.dtype not in FLOATS:
        return n.arg("self")
    return (
        n.emit("round", n.value())
        if scale == 1.0
        else n.emit("div", n.emit("round", n.emit("mul", n.value(), scale)), scale)
    )


def _abs(n: TorchNode) -> Result:
    return n.arg("self") if n.dtype in ("u8", "bool") else n.emit("abs", n.value())


def _elu(n: TorchNode) -> Result:
    alpha, scale, inner = n.arg("alpha"), n.arg("scale"), n.arg("input_scale")
    y = elu(n, n.value("self", n.dtype), float(alpha), float(inner))
    return y if scale == 1 else n.emit("mul", y, float(scale))


def _gelu(n: TorchNode) -> Result:
    return n.emit("gelu", n.value(), approximate=n.arg("approximate"))


def _silu(n: TorchNode, x: Value) -> Value:
    return n.emit("mul", x, n.emit("sigmoid", x))


def _mish(n: TorchNode, x: Value) -> Value:
    return n.emit("mul", x, n.emit("tanh", scaled_softplus(n, x, 1.0, 20.0)))


# ---------------------------------------------------------------------------------------- two operands


def arithmetic(kind: str, on_bool: str = "") -> Rule:
    """Make a rule of two operands in the result's element type. `on_bool` names the operation for bools."""

    def rule(n: TorchNode) -> Result:
        dtype = n.dtype
        n.require(dtype != "bool" or bool(on_bool), "is not supported on bools")
        x, y = n.operand("self", dtype), n.operand("other", dtype)
        alpha = n.arg("alpha", 1)
        if alpha != 1:
            y = y * alpha if isinstance(y, bool | int | float) else n.emit("mul", y, alpha)
        return n.emit(on_bool if dtype == "bool" else kind, x, y)

    return rule


def _divide(n: TorchNode) -> Result:
    dtype, mode = n.dtype, n.arg("rounding_mode")
    if (
        mode is None
        and isinstance(by := n.arg("other"), int | float)
        and by not in (0, 1)
        and isfinite(by)
        and dtype in FLOATS
    ):
        return n.emit("div", n.value("self", dtype), float(by))
    x, y = n.operand("self", dtype), n.operand("other", dtype)
    if mode == "floor":
        return floor_divide(n, x, y)
    quotient = n.emit("div", x, y)
    return truncate(n, quotient) if mode == "trunc" and dtype in FLOATS else quotient


def _remainder(n: TorchNode) -> Result:
    dtype = n.dtype
    return remainder(n, n.operand("self", dtype), n.operand("other", dtype))


def _fmod(n: TorchNode) -> Result:
    dtype = n.dtype
    x, y = n.operand("self", dtype), n.operand("other", dtype)
    quotient = n.emit("div", x, y)
    rounded = truncate(n, quotient) if dtype in FLOATS else quotient
    return n.emit("sub", x, n.emit("mul", rounded, y))


def _power(n: TorchNode) -> Result:
    exponent, dtype = n.arg("exponent"), n.dtype
    if isinstance(exponent, KnownElements) and exponent.tensor.numel() == 1 and exponent.tensor.ndim == 0:
        exponent = exponent.tensor.item()
    if isinstance(exponent, int | float):
        return power(n, n.value("self", dtype), float(exponent))
    base = n.operand("self", dtype)
    return power_of(n, base if isinstance(base, Value) else n.literal(base, dtype), n.value("exponent", dtype))


def compare(kind: str, *, swap: bool = False, invert: bool = False) -> Rule:
    def rule(n: TorchNode) -> Result:
        dtype = n.common("self", "other")
        if dtype == "bool" and kind != "equal":
            dtype = "i32"
        x, y = n.operand("self", dtype), n.operand("other", dtype)
        holds = n.emit(kind, *((y, x) if swap else (x, y)))
        return n.emit("not", holds) if invert else holds

    return rule


def logical(kind: str) -> Rule:
    return lambda n: n.emit(kind, truth(n, "self"), truth(n, "other"))


def _differ(n: TorchNode) -> Result:
    return n.emit("not", n.emit("equal", truth(n, "self"), truth(n, "other")))


def _copysign(n: TorchNode) -> Result:
    x, other = n.value("self", n.dtype), n.arg("other")
    if isinstance(other, bool | int | float):
        return with_sign(n, x, n.literal(copysign(1.0, other) < 0, "bool"))
    return with_sign(n, x, below_zero(n, n.value("other", n.dtype)))


# ---------------------------------------------------------------------------------------- several operands


def _clamp(n: TorchNode) -> Result:
    """Write clamp. Where the upper bound is below the lower one, it wins, as in torch."""
    dtype = n.dtype
    low, high = (n.operand(name, dtype) if n.has(name) else None for name in ("min", "max"))
    return clamp(n, clamp(n, n.value("self", dtype), low, None), None, high)


def _hardtanh(n: TorchNode) -> Result:
    return saturate(n, n.value(), float(n.arg("min_val")), float(n.arg("max_val")))


def _where(n: TorchNode) -> Result:
    dtype = n.dtype
    x, y = n.operand("self", dtype), n.operand("other", dtype)
    return n.emit("where", truth(n, "condition"), x, y)


def _softplus(n: TorchNode) -> Result:
    return scaled_softplus(n, n.value(), float(n.arg("beta")), float(n.arg("threshold")))


def _addc(kind: str) -> Rule:
    """Make the rule of self + value * tensor1 * tensor2, or of the quotient with `kind` div."""

    def rule(n: TorchNode) -> Result:
        dtype, scale = n.dtype, n.arg("value", 1)
        part = n.emit(kind, n.value("tensor1", dtype), n.value("tensor2", dtype))
        return n.emit("add", n.value("self", dtype), part if scale == 1 else n.emit("mul", part, scale))

    return rule


RULES: dict[str, Rule] = {
    # one operand
    "abs": _abs,
    "neg": unary("neg"),
    "sign": unary("sign"),
    "exp": unary("exp"),
    "log": unary("log"),
    "sqrt": unary("sqrt"),
    "rsqrt": unary("rsqrt"),
    "sin": unary("sin"),
    "cos": unary("cos"),
    "tanh": unary("tanh"),
    "sigmoid": unary("sigmoid"),
    "erf": unary("erf"),
    "relu": unary("relu"),
    "floor": rounded("floor"),
    "ceil": rounded(ceil),
    "trunc": rounded(truncate),
    "round": _round,
    "round.decimals": _round,
    "exp2": unary(lambda n, x: n.emit("exp", n.emit("mul", x, log(2)))),
    "expm1": unary(expm1),
    "log1p": unary(log1p),
    "log2": unary(lambda n, x: n.emit("mul", n.emit("log", x), 1 / log(2))),
    "log10": unary(lambda n, x: n.emit("mul", n.emit("log", x), 1 / log(10))),
    "tan": unary(tan),
    "sinh": unary(sinh),
    "cosh": unary(cosh),
    "asin": unary(inverse_sine),
    "acos": unary(inverse_cosine),
    "atan": unary("atan"),
    "asinh": unary(inverse_sinh),
    "acosh": unary(inverse_cosh),
    "atanh": unary(inverse_tanh),
    "erfc": unary(lambda n, x: n.emit("sub", 1.0, n.emit("erf", x))),
    "reciprocal": unary(lambda n, x: n.emit("div", 1.0, x)),
    "isnan": lambda n: _neither(n, "nan"),
    "isinf": lambda n: _neither(n, "inf"),
    "logical_not": lambda n: n.emit("not", truth(n, "self")),
    # activations
    "gelu": _gelu,
    "silu": unary(_silu),
    "mish": unary(_mish),
    "selu": unary(selu),
    "elu": _elu,
    "leaky_relu": lambda n: leaky(n, n.value(), float(n.arg("negative_slope"))),
    "hardtanh": _hardtanh,
    "relu6": unary(lambda n, x: saturate(n, x, 0.0, 6.0)),
    "hardsigmoid": unary(lambda n, x: hard_sigmoid(n, x, 1 / 6, 0.5)),
    "hardswish": unary(hard_swish),
    "softplus": _softplus,
    # two operands
    "add.Tensor": arithmetic("add", "or"),
    "add.Scalar": arithmetic("add", "or"),
    "sub.Tensor": arithmetic("sub"),
    "sub.Scalar": arithmetic("sub"),
    "mul.Tensor": arithmetic("mul", "and"),
    "mul.Scalar": arithmetic("mul", "and"),
    "div.Tensor": _divide,
    "div.Scalar": _divide,
    "div.Tensor_mode": _divide,
    "div.Scalar_mode": _divide,
    "remainder.Tensor": _remainder,
    "remainder.Scalar": _remainder,
    "remainder.Scalar_Tensor": _remainder,
    "fmod.Tensor": _fmod,
    "fmod.Scalar": _fmod,
    "pow.Tensor_Scalar": _power,
    "pow.Tensor_Tensor": _power,
    "pow.Scalar": _power,
    "maximum": arithmetic("maximum", "or"),
    "minimum": arithmetic("minimum", "and"),
    "eq.Tensor": compare("equal"),
    "eq.Scalar": compare("equal"),
    "ne.Tensor": compare("equal", invert=True),
    "ne.Scalar": compare("equal", invert=True),
    "lt.Tensor": compare("less"),
    "lt.Scalar": compare("less"),
    "le.Tensor": compare("less_equal"),
    "le.Scalar": compare("less_equal"),
    "gt.Tensor": compare("less", swap=True),
    "gt.Scalar": compare("less", swap=True),
    "ge.Tensor": compare("less_equal", swap=True),
    "ge.Scalar": compare("less_equal", swap=True),
    "logical_and": logical("and"),
    "logical_or": logical("or"),
    "logical_xor": _differ,
    "atan2": lambda n: angle(n, n.value("self", n.dtype), n.value("other", n.dtype)),
    "copysign.Tensor": _copysign,
    "copysign.Scalar": _copysign,
    # several operands
    "clamp": _clamp,
    "clamp.Tensor": _clamp,
    "where.self": _where,
    "addcmul": _addc("mul"),
    "addcdiv": _addc("div"),
}
