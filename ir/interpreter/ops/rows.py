"""NumPy rules for row operations; sums over a row are taken in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arrays import Array, Rule, Values, wide


def log_sum(x: Array, axis: int) -> Array:
    """log(sum(e^x)) with the axis kept, in float64."""
    top = np.max(x, axis=axis, keepdims=True, initial=-np.inf)
    return np.asarray(np.log(np.sum(np.exp(wide(x - top)), axis=axis, keepdims=True)) + top)


def softmax(x: Array, axis: int) -> Array:
    grown = np.exp(x - np.max(x, axis=axis, keepdims=True, initial=-np.inf))
    return np.asarray(grown / np.sum(wide(grown), axis=axis, keepdims=True).astype(x.dtype))


def _softmax_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    y, dy = x
    return (y * (dy - np.sum(wide(dy * y), axis=a["axis"], keepdims=True)),)


def _log_softmax_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    y, dy = x
    return (dy - np.exp(y) * np.sum(wide(dy), axis=a["axis"], keepdims=True),)


def _cumsum(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data = np.moveaxis(wide(x[0]), a["axis"], -1)
    data = data[..., ::-1] if a["reverse"] else data
    total = np.cumsum(data, axis=-1, dtype=data.dtype)
    if a["exclusive"]:
        total = np.concatenate([np.zeros_like(total[..., :1]), total[..., :-1]], -1)
    return (np.moveaxis(total[..., ::-1] if a["reverse"] else total, -1, a["axis"]),)


def _topk(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, axis = x[0], a["axis"]
    if a["largest"]:  # a stable sort of the reversed row, read backwards, keeps equal elements in order
        order = data.shape[axis] - 1 - np.flip(np.argsort(np.flip(data, axis), axis=axis, kind="stable"), axis)
    else:
        order = np.argsort(data, axis=axis, kind="stable")
    first = np.take(order, np.arange(a["k"]), axis=axis)
    return np.take_along_axis(data, first, axis), first


def _norm_axes(x: Array, a: Values) -> tuple[int, ...]:
    return tuple(range(a["axis"] % x.ndim, x.ndim))


def _layer_norm(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, scale, bias = wide(x[0]), x[1], x[2]
    axes = _norm_axes(data, a)
    mean = np.mean(data, axis=axes, keepdims=True)
    rstd = 1 / np.sqrt(np.mean((data - mean) ** 2, axis=axes, keepdims=True) + a["eps"])
    return (data - mean) * rstd * scale + bias, mean.reshape(data.shape[: axes[0]]), rstd.reshape(data.shape[: axes[0]])


def _normalized(data: Array, mean: Array, rstd: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the normalised operand and its rstd, broadcastable to it."""
    shape = mean.shape + (1,) * len(axes)
    return (wide(data) - mean.reshape(shape)) * rstd.reshape(shape), rstd.reshape(shape)


def _layer_norm_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dy, data, scale, mean, rstd = x
    axes = _norm_axes(data, a)
    normal, factor = _normalized(data, mean, rstd, axes)
    g = wide(dy) * scale
    along = np.mean(g * normal, axis=axes, keepdims=True)
    return (factor * (g - np.mean(g, axis=axes, keepdims=True) - normal * along),)


def _layer_norm_grad_weight(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dy, data, mean, rstd = x
    axes = _norm_axes(data, a)
    normal, _ = _normalized(data, mean, rstd, axes)
    rows = tuple(range(axes[0]))
    return np.asarray(np.sum(wide(dy) * normal, axis=rows)), np.asarray(np.sum(wide(dy), axis=rows))


def _batch_norm(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data = x[0]
    scale, bias, mean, variance = (v.reshape(-1, *(1,) * (data.ndim - 2)) for v in x[1:])
    return ((data - mean) / np.sqrt(variance + data.dtype.type(a["eps"])) * scale + bias,)


RULES: dict[str, Rule] = {
    "softmax": lambda x, a: (softmax(x[0], a["axis"]),),
    "softmax_grad": _softmax_grad,
    "log_softmax": lambda x, a: (x[0] - log_sum(x[0], a["axis"]),),
    "log_softmax_grad": _log_softmax_grad,
    "cumsum": _cumsum,
    "topk": _topk,
    "layer_norm": _layer_norm,
    "layer_norm_grad": _layer_norm_grad,
    "layer_norm_grad_weight": _layer_norm_grad_weight,
    "batch_norm": _batch_norm,
}
