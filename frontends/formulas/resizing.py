"""Resizing of one dimension: every entry of the result is a weighted sum of a few neighbouring entries.

In: places and weights as arrays, computed at import. Out: copies and slices where every weight is one. Otherwise a
product with a small matrix or, along long dimensions, one lookup per neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS

from .elementwise import widened
from .layout import expand, reshape

# Along longer dimensions a product with a matrix costs more than a few lookups.
LONGEST_MATRIX = 128


@dataclass(frozen=True)
class Taps:
    """The weights of a resizing: entry i is the sum over j of weights[i, j] * x[places[i, j]] + added[i]."""

    places: np.ndarray
    weights: np.ndarray
    added: np.ndarray


def linear_weights(ratio: np.ndarray) -> np.ndarray:
    """Return the weights of the entries below and above a place at `ratio` (0 .. 1) of the way between them."""
    return np.stack([1 - ratio, ratio], axis=-1)


def cubic_weights(ratio: np.ndarray, a: float) -> np.ndarray:
    """Return the weights of two entries below and two above by Keys' convolution."""
    return _cubic(ratio[:, None] + np.array([1, 0, -1, -2]), a)


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(distance)
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, inner, np.where(x < 2, outer, 0.0))


def smoothing_weights(
    ratio: np.ndarray, scale: float, reach: int, shape: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return weights that also smooth when the result is smaller.

    They follow `shape`, which is 0 beyond `reach`, widened by 1 / scale.
    """
    scale = min(scale, 1.0)
    start = math.floor(-reach / scale) + 1
    count = 2 - 2 * start
    weights = shape(np.abs((np.arange(start, start + count) - ratio[:, None]) * scale))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def tent(distance: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(1 - distance, 0.0))


def cubic_shape(a: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda distance: _cubic(distance, a)


def taps_around(at: np.ndarray, weights: np.ndarray, size: int, exclude_outside: bool) -> Taps:
    """Place the weights of each row on the neighbours of the place `at`, half of them on either side.

    An entry at the place itself counts as the first one above it. Outside the dimension the entry at its end is read,
    or none with `exclude_outside`.
    """
    count = weights.shape[1]
    first = np.ceil(at).astype(np.int64) - count // 2
    places = first[:, None] + np.arange(count)
    if exclude_outside:
        weights = np.where((places < 0) | (places >= size), 0.0, weights)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return Taps(np.clip(places, 0, size - 1), weights, np.zeros(len(at)))


def taps_of(matrix: np.ndarray) -> Taps:
    """Collect the non-zero entries of each row of weights [new size, old size]."""
    count = max(1, int((matrix != 0).sum(axis=1).max(initial=0)))
    places = np.argsort(matrix == 0, axis=1, kind="stable")[:, :count]
    return Taps(places, np.take_along_axis(matrix, places, axis=1), np.zeros(len(matrix)))


def resample(w: Writer, x: Value, axis: int, taps: Taps) -> Value:
    """Replace the entries of x along `axis` by weighted sums of them."""
    dims = x.type.dims
    count = len(taps.places)
    if (
        not taps.added.any()
        and np.array_equal(taps.weights.max(axis=1), np.ones(count))
        and np.array_equal(taps.weights.sum(1), np.ones(count))
    ):
        return pick(w, x, axis, taps.places[np.arange(count), taps.weights.argmax(axis=1)])
    w.require(x.type.dtype in FLOATS, f"interpolates floating-point operands only, got {x.type}")
    wide = widened(w, x)
    dtype = np.float64 if wide.type.dtype == "f64" else np.float32
    shape = tuple(count if i == axis else 1 for i in range(len(dims)))
    if dims[axis] <= LONGEST_MATRIX:
        matrix = np.zeros((count, dims[axis]))
        np.add.at(matrix, (np.arange(count)[:, None], taps.places), taps.weights)
        if axis == len(dims) - 1 and axis > 0:
            y = w.emit("matmul", wide, matrix.astype(dtype), tb=True)
        else:
            columns = math.prod(dims[axis + 1 :])
            rows = reshape(w, wide, (math.prod(dims[:axis]), dims[axis], columns))
            y = reshape(w, w.emit("matmul", matrix.astype(dtype), rows), (*dims[:axis], count, *dims[axis + 1 :]))
    else:
        parts = [
            w.emit(
                "mul",
                pick(w, wide, axis, taps.places[:, j]),
                np.ascontiguousarray(taps.weights[:, j].astype(dtype).reshape(shape)),
            )
            for j in range(taps.places.shape[1])
            if taps.weights[:, j].any()
        ]
        y = parts[0]
        for part in parts[1:]:
            y = w.emit("add", y, part)
    if taps.added.any():
        y = w.emit("add", y, taps.added.astype(dtype).reshape(shape))
    return w.cast(y, x.type.dtype)


def pick(w: Writer, x: Value, axis: int, places: np.ndarray) -> Value:
    """Return the entries at known places: as copies of each, a slice, or a lookup."""
    dims, count = x.type.dims, len(places)
    size = dims[axis]
    if np.array_equal(places, np.arange(size)):
        return x
    if size and count % size == 0 and np.array_equal(places, np.repeat(np.arange(size), count // size)):
        spread = reshape(w, x, (*dims[: axis + 1], 1, *dims[axis + 1 :]))
        spread = expand(w, spread, (*dims[: axis + 1], count // size, *dims[axis + 1 :]))
        return reshape(w, spread, (*dims[:axis], count, *dims[axis + 1 :]))
    step = int(places[1] - places[0]) if count > 1 else 1
    if count and step > 0 and np.array_equal(places, places[0] + step * np.arange(count)):
        start = tuple(int(places[0]) if i == axis else 0 for i in range(len(dims)))
        stop = tuple(int(places[-1]) + 1 if i == axis else n for i, n in enumerate(dims))
        return w.emit(
            "slice", x, start=start, stop=stop, step=tuple(step if i == axis else 1 for i in range(len(dims)))
        )
    return w.emit("gather", x, places.astype(np.int64), axis=axis)
