"""Losses over classes, for models that compute their loss themselves."""

from __future__ import annotations

from math import prod

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .layout import reshape, transpose


def negative_log_likelihood(
    w: Writer, logs: Value, target: Value, weight: Value | None, reduction: str, ignored: int | None
) -> Value:
    """Compute -logs[n, target[n, ...], ...] times the weight of the class, and 0 where the target is `ignored`.

    The reduction `mean` divides by the sum of the weights. logs is [batch, classes, ...], target the same without
    classes.
    """
    dims = logs.type.dims
    w.require(len(dims) >= 2, f"needs batch and classes, got {logs.type}")
    w.require(target.type.dims == (dims[0], *dims[2:]), f"targets {target.type} do not fit {logs.type}")
    w.require(reduction in ("none", "mean", "sum"), f"reduction={reduction} is not known")
    classes, places = dims[1], target.type.dims
    dtype = logs.type.dtype
    chosen = w.cast(target, "i64")
    counts: Value | None = None
    if ignored is not None:
        counts = w.emit("not", w.emit("equal", chosen, ignored))
        chosen = w.emit("where", counts, chosen, 0)
    w.require_inside(chosen, classes)
    rows = reshape(w, transpose(w, logs, (0, *range(2, len(dims)), 1)), (prod(places) * classes,))
    line = reshape(w, w.emit("iota", dtype="i64", shape=(prod(places),), axis=0), places)
    loss = w.emit("neg", w.emit("gather", rows, w.emit("add", w.emit("mul", line, classes), chosen), axis=0))
    weights: Value | None = None
    if weight is not None:
        w.require(weight.type.dims == (classes,), f"weights {weight.type} do not fit {classes} classes")
        weights = w.emit("gather", weight, chosen, axis=0)
        weights = weights if counts is None else w.emit("where", counts, weights, 0.0)
    elif counts is not None:
        weights = w.emit("cast", counts, dtype=dtype)
    if weights is not None:
        # A product alone would not do: ignored entries may be infinite.
        loss = w.emit("mul", loss if counts is None else w.emit("where", counts, loss, 0.0), weights)
    axes = tuple(range(len(places)))
    match reduction:
        case "none":
            return loss
        case "sum":
            return w.emit("sum", loss, axes=axes)
    if weights is None:
        return w.emit("mean", loss, axes=axes)
    return w.emit("div", w.emit("sum", loss, axes=axes), w.emit("sum", weights, axes=axes))
