"""NumPy rules for reductions; long sums are taken in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.ops import reduced_axes
from penstock.ir.types import TensorType

from .arrays import Array, Rule, Values, divide, mean, wide


def _reduce(function: Callable[..., Any]) -> Rule:
    def rule(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
        axes = reduced_axes(TensorType("f32", x[0].shape), a["axes"])
        return (np.asarray(function(wide(x[0]), axis=axes, keepdims=a["keep"])),)

    return rule


def _mean(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    if np.issubdtype(x.dtype, np.integer):
        count = np.array(math.prod(x.shape[i] for i in axis), x.dtype)
        return divide(np.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype), count)
    return mean(x, axis, keepdims)


def _sum(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    return np.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype)


RULES: dict[str, Rule] = {
    "sum": _reduce(_sum),
    "mean": _reduce(_mean),
    "max": _reduce(np.max),
    "argmax": lambda x, a: (np.asarray(np.argmax(x[0], axis=a["axis"])),),
}
