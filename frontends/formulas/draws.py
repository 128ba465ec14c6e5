"""Random numbers and what is made of them."""

from __future__ import annotations

from math import prod

from penstock.ir.graph import Value

from ..writer import Writer
from .layout import reshape


def uniform(w: Writer, dims: tuple[int, ...]) -> Value:
    """Numbers in [0, 1) in f32, other ones for each element, each microbatch and each call of this."""
    place = reshape(w, w.emit("iota", dtype="u32", shape=(prod(dims),), axis=0), dims)
    return w.emit("random", place, w.random_key())


def dropout(w: Writer, x: Value, p: float) -> tuple[Value, Value]:
    """Zeros with probability `p`, else x / (1 - p); and which elements are kept."""
    w.require(0.0 <= p <= 1.0, f"the probability of dropout must be 0 to 1, got {p:g}")
    hidden = w.emit("less", uniform(w, x.type.dims), p)
    scaled = w.emit("mul", x, 1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return w.emit("where", hidden, 0.0, scaled), w.emit("not", hidden)
