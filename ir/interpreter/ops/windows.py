"""Sliding windows in NumPy: which part of the operand every position of a window meets, and the rules of pooling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from penstock.ir.ops import Window, window_of

from .arrays import Array, Rule, Values, divide, wide

Index = tuple[Any, ...]
_ALL = slice(None)


def positions(window: Window, out_sizes: Sequence[int]) -> Iterator[tuple[Index, Index]]:
    """Yield every kernel position as an index into a weight, with its part of the padded input: one entry per output
    position."""
    for position in product(*map(range, window.kernel)):
        parts = zip(position, window.dilations, window.strides, out_sizes, strict=True)
        yield (_ALL, _ALL, *position), (_ALL, _ALL, *(slice(k * d, k * d + s * (n - 1) + 1, s) for k, d, s, n in parts))


def with_border(x: Array, window: Window, value: Any) -> Array:
    return np.pad(x, [(0, 0), (0, 0), *zip(window.low, window.high, strict=True)], constant_values=value)


def without_border(padded: Array, window: Window, sizes: Sequence[int]) -> Array:
    return padded[(_ALL, _ALL, *(slice(p, p + n) for p, n in zip(window.low, sizes, strict=True)))]


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -np.inf if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).min


def _max_pool(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    window = window_of(a, a["window"])
    padded = with_border(x[0], window, _lowest(x[0].dtype))
    return (np.max([padded[where] for _, where in positions(window, window.out_sizes(x[0].shape[2:]))], axis=0),)


def _max_pool_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, y, dy = x
    window = window_of(a, a["window"])
    padded = with_border(data, window, _lowest(data.dtype))
    grad, free = np.zeros(padded.shape, dy.dtype), np.ones(y.shape, bool)
    for _, where in positions(window, y.shape[2:]):
        chosen = free & (padded[where] == y)
        grad[where] += np.where(chosen, dy, 0)
        free &= ~chosen
    return (without_border(grad, window, data.shape[2:]),)


def _counts(a: Values, sizes: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Count the elements that each window averages over."""
    window = window_of(a, a["window"])
    ones = with_border(np.ones((1, 1, *sizes), dtype), window, 1 if a["include_pad"] else 0)
    return np.asarray(np.sum([ones[where] for _, where in positions(window, window.out_sizes(sizes))], axis=0))


def _avg_pool(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    window, data = window_of(a, a["window"]), wide(x[0])
    padded = with_border(data, window, 0)
    total = np.sum([padded[where] for _, where in positions(window, window.out_sizes(data.shape[2:]))], axis=0)
    return (divide(total, _counts(a, data.shape[2:], data.dtype)),)


def _avg_pool_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    window, sizes = window_of(a, a["window"]), a["shape"][2:]
    share = x[0] / _counts(a, sizes, x[0].dtype)
    grad = with_border(np.zeros(a["shape"], x[0].dtype), window, 0)
    for _, where in positions(window, x[0].shape[2:]):
        grad[where] += share
    return (without_border(grad, window, sizes),)


RULES: dict[str, Rule] = {
    "max_pool": _max_pool,
    "max_pool_grad": _max_pool_grad,
    "avg_pool": _avg_pool,
    "avg_pool_grad": _avg_pool_grad,
}
