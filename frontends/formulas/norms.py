"""Normalisation by groups of channels."""

from __future__ import annotations

from math import prod

from penstock.ir.graph import Value

from ..writer import Writer
from .layout import reshape


def grouped_norm(w: Writer, x: Value, groups: int, eps: float) -> Value:
    """(x - mean) / sqrt(variance + eps) over space and the channels of each group, in x's shape."""
    rows = reshape(w, x, (x.type.dims[0], groups, prod(x.type.dims[1:]) // groups))
    centred = w.emit("sub", rows, w.emit("mean", rows, axes=(2,), keep=True))
    variance = w.emit("mean", w.emit("mul", centred, centred), axes=(2,), keep=True)
    return reshape(w, w.emit("mul", centred, w.emit("rsqrt", w.emit("add", variance, eps))), x.type.dims)


def per_channel(w: Writer, x: Value, weight: Value) -> Value:
    return reshape(w, weight, (1, x.type.dims[1], *(1,) * (x.type.rank - 2)))
