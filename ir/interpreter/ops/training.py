"""NumPy rules for losses and optimisers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir.training.rates import curve_at

from .arrays import Array, Rule, Values, check_indices, mean, wide
from .rows import log_sum


def _cross_entropy(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    logits, labels = x
    check_indices("label", labels, 0, logits.shape[-1])
    lse = log_sum(logits, -1)[..., 0]
    chosen = np.take_along_axis(logits, labels[..., None].astype(np.int64), -1)[..., 0]
    return mean(lse - chosen), lse


def _cross_entropy_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    logits, labels, lse, dloss = x
    grad = np.exp(logits - lse[..., None])
    hit = np.arange(logits.shape[-1]) == labels[..., None]
    return ((grad - hit) * (dloss / max(labels.size, 1)),)


def _mse(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (mean(wide(x[0] - x[1]) ** 2),)


def _sgd(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    w, g, lr = x
    return (w - lr * (g + a["weight_decay"] * w),)


def _momentum(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    w, g, m, lr = x
    decayed = g + a["weight_decay"] * w
    m = a["beta"] * m + decayed
    return w - lr * (decayed + a["beta"] * m if a["nesterov"] else m), m


def _adamw(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    w, g, m, v, c1, c2, lr = x
    m = a["beta1"] * m + (1 - a["beta1"]) * g
    v = a["beta2"] * v + (1 - a["beta2"]) * (g * g)
    return w - lr * (a["weight_decay"] * w) - lr * ((m / c1) / (np.sqrt(v / c2) + a["eps"])), m, v


def _ramp(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    table, step = x
    return (np.array(curve_at(table.ravel().tolist(), float(step))),)


RULES: dict[str, Rule] = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_grad": _cross_entropy_grad,
    "mse": _mse,
    "sgd": _sgd,
    "momentum": _momentum,
    "adamw": _adamw,
    "ramp": _ramp,
}
