"""Random numbers and their distributions. The numbers of each call of `uniform` are independent of other calls."""

from __future__ import annotations

import math
from math import prod

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS

from .layout import reshape


def uniform(w: Writer, dims: tuple[int, ...], low: float = 0.0, high: float = 1.0, dtype: str = "f32") -> Value:
    """Draw from 2^24 numbers in [low, high), anew for each element and each microbatch."""
    place = reshape(w, w.emit("iota", dtype="u32", shape=(prod(dims),), axis=0), dims)
    x = w.emit("random", place, w.random_key())
    x = x if high - low == 1.0 else w.emit("mul", x, high - low)
    return _as(w, x if low == 0.0 else w.emit("add", x, low), dtype)


def normal(w: Writer, dims: tuple[int, ...], mean: float = 0.0, scale: float = 1.0, dtype: str = "f32") -> Value:
    """Draw normal numbers by the Box-Muller transform. None is further than 5.8 deviations from the mean."""
    length = w.emit("sqrt", w.emit("mul", _negative_log(w, dims), 2.0))
    x = w.emit("mul", length, w.emit("cos", uniform(w, dims, high=2 * math.pi)))
    x = x if scale == 1.0 else w.emit("mul", x, scale)
    return _as(w, x if mean == 0.0 else w.emit("add", x, mean), dtype)


def exponential(w: Writer, dims: tuple[int, ...], rate: float = 1.0, dtype: str = "f32") -> Value:
    """Draw exponential numbers of mean 1 / rate, none above 16.7 times that."""
    return _as(w, w.emit("div", _negative_log(w, dims), rate), dtype)


def bernoulli(w: Writer, dims: tuple[int, ...], p: float) -> Value:
    """Draw bools that are true with probability `p`."""
    w.require(0.0 <= p <= 1.0, f"a probability must be 0 to 1, got {p:g}")
    return w.emit("less", uniform(w, dims), p)


def dropout(w: Writer, x: Value, p: float) -> tuple[Value, Value]:
    """Replace elements by zero with probability `p`, and x by x / (1 - p) elsewhere.

    Return it and the mask of kept elements.
    """
    hidden = bernoulli(w, x.type.dims, p)
    scaled = w.emit("mul", x, 1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return w.emit("where", hidden, 0.0, scaled), w.emit("not", hidden)


def _negative_log(w: Writer, dims: tuple[int, ...]) -> Value:
    """Compute -log u, for u drawn from (0, 1]."""
    return w.emit("neg", w.emit("log", w.emit("sub", 1.0, uniform(w, dims))))


def _as(w: Writer, x: Value, dtype: str) -> Value:
    w.require(dtype in FLOATS, f"random numbers are of floating point, not {dtype}")
    return w.cast(x, dtype)
