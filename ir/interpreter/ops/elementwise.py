"""NumPy rules for sources and elementwise operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.types import numpy_dtype
from penstock.support.errors import VerifyError

from .arrays import Array, Rule, Values, divide
from .error_function import erf


def _const(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dtype, shape = numpy_dtype(a["dtype"]), a["shape"]
    if isinstance(a["value"], tuple):
        return (np.array(a["value"], dtype).reshape(shape),)
    return (np.full(shape, a["value"], dtype),)


def _iota(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    shape = a["shape"]
    axis = a["axis"] % len(shape)
    line = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return (np.broadcast_to(line, shape).astype(numpy_dtype(a["dtype"])),)


def _map(function: Callable[..., Any]) -> Rule:
    """Return an elementwise rule; operands broadcast."""
    return lambda x, a: (np.asarray(function(*x)),)


def _sigmoid(x: Array) -> Array:
    decay = np.exp(-np.abs(x))  # never overflows
    return np.asarray(np.where(x >= 0, 1, decay) / (1 + decay))


def _cast(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (x[0].astype(numpy_dtype(a["dtype"])),)


def _bitcast(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (np.ascontiguousarray(x[0]).view(numpy_dtype(a["dtype"])).reshape(x[0].shape),)


def _remainder(x: Array, y: Array) -> Array:
    if np.issubdtype(x.dtype, np.integer):
        return np.asarray(np.where(y == 0, x, np.fmod(x, np.where(y == 0, y.dtype.type(1), y))))
    return np.asarray(np.fmod(x, y))


_TANH_SLOPE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu_form(a: Values) -> str:
    form = str(a["approximate"])
    if form not in ("none", "tanh"):
        raise VerifyError(f"gelu has no approximation {form!r}, expected none or tanh")
    return form


def _gelu(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    v = x[0].astype(np.float64)
    if _gelu_form(a) == "tanh":
        return (0.5 * v * (1 + np.tanh(_TANH_SLOPE * (v + _TANH_CUBIC * v**3))),)
    return (0.5 * v * (1 + erf(v / math.sqrt(2))),)


def _gelu_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    v, dy = x[0].astype(np.float64), x[1]
    if _gelu_form(a) == "tanh":
        t = np.tanh(_TANH_SLOPE * (v + _TANH_CUBIC * v**3))
        slope = 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * _TANH_SLOPE * (1 + 3 * _TANH_CUBIC * v * v)
    else:
        slope = 0.5 * (1 + erf(v / math.sqrt(2))) + v * np.exp(-0.5 * v * v) / math.sqrt(2 * math.pi)
    return (dy * slope,)


RULES: dict[str, Rule] = {
    "const": _const,
    "iota": _iota,
    "neg": _map(np.negative),
    "abs": _map(np.abs),
    "sign": _map(np.sign),
    "floor": _map(np.floor),
    "round": _map(np.rint),
    "exp": _map(np.exp),
    "log": _map(np.log),
    "sqrt": _map(np.sqrt),
    "rsqrt": _map(lambda x: 1 / np.sqrt(x)),
    "sin": _map(np.sin),
    "cos": _map(np.cos),
    "atan": _map(np.arctan),
    "tanh": _map(np.tanh),
    "sigmoid": _map(_sigmoid),
    "erf": _map(erf),
    "relu": _map(lambda x: np.maximum(x, 0)),
    "gelu": _gelu,
    "detach": _map(np.positive),
    "not": _map(np.logical_not),
    "cast": _cast,
    "bitcast": _bitcast,
    "add": _map(np.add),
    "sub": _map(np.subtract),
    "mul": _map(np.multiply),
    "div": _map(divide),
    "rem": _map(_remainder),
    "pow": _map(np.power),
    "minimum": _map(np.minimum),
    "maximum": _map(np.maximum),
    "equal": _map(np.equal),
    "less": _map(np.less),
    "less_equal": _map(np.less_equal),
    "and": _map(np.logical_and),
    "or": _map(np.logical_or),
    "bit_and": _map(np.bitwise_and),
    "bit_or": _map(np.bitwise_or),
    "bit_xor": _map(np.bitwise_xor),
    "shift_left": _map(np.left_shift),
    "shift_right": _map(np.right_shift),
    "where": _map(np.where),
    "relu_grad": _map(lambda x, dy: np.where(x > 0, dy, 0)),
    "gelu_grad": _gelu_grad,
}
