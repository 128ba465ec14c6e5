"""Normalisation: over groups of channels, by the mean square, and over the batch."""

from __future__ import annotations

from math import prod

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .elementwise import widened
from .layout import reshape


def grouped_norm(w: Writer, x: Value, groups: int, eps: float) -> Value:
    """Compute (x - mean) / sqrt(variance + eps) over space and the channels of each group, in x's shape."""
    rows = reshape(w, x, (x.type.dims[0], groups, prod(x.type.dims[1:]) // groups))
    centred = w.emit("sub", rows, w.emit("mean", rows, axes=(2,), keep=True))
    variance = w.emit("mean", w.emit("mul", centred, centred), axes=(2,), keep=True)
    return reshape(w, w.emit("mul", centred, w.emit("rsqrt", w.emit("add", variance, eps))), x.type.dims)


def per_channel(w: Writer, x: Value, weight: Value) -> Value:
    return reshape(w, weight, (1, x.type.dims[1], *(1,) * (x.type.rank - 2)))


def scaled(w: Writer, y: Value, scale: Value | None, bias: Value | None) -> Value:
    """Compute y * scale + bias. Each has one entry per channel and is left out where it is None."""
    y = y if scale is None else w.emit("mul", y, per_channel(w, y, scale))
    return y if bias is None else w.emit("add", y, per_channel(w, y, bias))


def rms_norm(w: Writer, x: Value, axis: int, eps: float) -> Value:
    """Divide x by the root of its mean square over dimensions `axis` and after. 16-bit floats are computed in f32."""
    wide = widened(w, x)
    square = w.emit("mean", w.emit("mul", wide, wide), axes=tuple(range(axis, x.type.rank)), keep=True)
    y = w.emit("mul", wide, w.emit("rsqrt", w.emit("add", square, eps)))
    return w.cast(y, x.type.dtype)


def batch_norm(w: Writer, x: Value, eps: float) -> tuple[Value, Value, Value, Value]:
    """Normalise each channel over batch and space. Return the result, mean, variance and 1 / sqrt(variance + eps)."""
    axes = tuple(i for i in range(x.type.rank) if i != 1)
    mean = w.emit("mean", x, axes=axes)
    centred = w.emit("sub", x, per_channel(w, x, mean))
    variance = w.emit("mean", w.emit("mul", centred, centred), axes=axes)
    rstd = w.emit("rsqrt", w.emit("add", variance, eps))
    return w.emit("mul", centred, per_channel(w, x, rstd)), mean, variance, rstd


def moved(w: Writer, running: Value, new: Value, momentum: float) -> Value:
    """Return a running statistic with the share `momentum` of the newest batch, in the statistic's element type."""
    new = w.cast(new, running.type.dtype)
    return (
        new if momentum == 1.0 else w.emit("add", w.emit("mul", running, 1.0 - momentum), w.emit("mul", new, momentum))
    )
