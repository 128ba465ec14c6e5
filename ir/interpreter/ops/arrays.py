"""Helpers that the NumPy rules of several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.support.errors import VerifyError

Array = np.ndarray[Any, Any]
Values = Mapping[str, Any]
Rule = Callable[[Sequence[Array], Values], tuple[Array, ...]]


def wide(x: Array) -> Array:
    """Convert floats to float64, so that long sums keep their digits whatever the order."""
    return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x


def mean(x: Array, axis: tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """Return the mean in float64; the mean of no elements is nan."""
    total = np.asarray(np.sum(x, axis=axis, keepdims=keepdims, dtype=np.float64))
    return np.asarray(total / (x.size // max(total.size, 1) if x.size else 0))


def divide(a: Array, b: Array) -> Array:
    """Divide; integers truncate toward zero."""
    if np.issubdtype(a.dtype, np.integer):
        return (a - np.fmod(a, b)) // b
    return a / b


def check_indices(what: str, indices: Array, low: int, size: int) -> None:
    """Raise VerifyError for the first index outside low .. size - 1."""
    bad = indices[(indices < low) | (indices >= size)]
    if bad.size:
        raise VerifyError(
            f"{what} {int(bad.flat[0])} is outside {low}..{size - 1}", hint="look at the data that was fed"
        )
