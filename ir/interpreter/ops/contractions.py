"""NumPy rules for contractions; a convolution is one product per position of its window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir.ops import window_of

from .arrays import Array, Rule, Values, wide
from .windows import positions, with_border, without_border


def _turned(x: Array, transposed: bool) -> Array:
    return np.swapaxes(x, -1, -2) if transposed else x


def _matmul(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (np.matmul(_turned(x[0], a["ta"]), _turned(x[1], a["tb"])),)


def _groups(x: Array, axis: int, groups: int) -> list[Array]:
    return np.split(x, groups, axis)


def convolve(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    """Compute a convolution as one product per position of its window."""
    window = window_of(a, x[1].shape[2:])
    padded, outs = with_border(x[0], window, 0), window.out_sizes(x[0].shape[2:])
    parts = []
    for data, weight in zip(_groups(padded, 1, a["groups"]), _groups(x[1], 0, a["groups"]), strict=True):
        part = np.zeros((x[0].shape[0], weight.shape[0], *outs), x[0].dtype)
        for position, where in positions(window, outs):
            part += np.einsum("nc...,oc->no...", data[where], weight[position], optimize=True)
        parts.append(part)
    return (np.concatenate(parts, 1),)


def _conv_grad_input(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dy, weights = x
    window, sizes = window_of(a, weights.shape[2:]), a["shape"][2:]
    parts = []
    for grad, weight in zip(_groups(dy, 1, a["groups"]), _groups(weights, 0, a["groups"]), strict=True):
        part = with_border(np.zeros((dy.shape[0], weight.shape[1], *sizes), dy.dtype), window, 0)
        for position, where in positions(window, dy.shape[2:]):
            part[where] += np.einsum("no...,oc->nc...", grad, weight[position], optimize=True)
        parts.append(without_border(part, window, sizes))
    return (np.concatenate(parts, 1),)


def _conv_grad_weight(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    data, dy = x
    window = window_of(a, a["shape"][2:])
    spatial = "xyzuvw"[: len(window.kernel)]
    parts = []
    for block, grad in zip(
        _groups(with_border(data, window, 0), 1, a["groups"]), _groups(dy, 1, a["groups"]), strict=True
    ):
        part = np.zeros((grad.shape[1], *a["shape"][1:]), data.dtype)
        for position, where in positions(window, dy.shape[2:]):
            part[position] = np.einsum(f"nc{spatial},no{spatial}->oc", block[where], grad, optimize=True)
        parts.append(part)
    return (np.concatenate(parts, 0),)


def _scores(q: Array, k: Array, mask: Sequence[Array], a: Values) -> Array:
    """Return the scores of attention. Positions that the mask hides have the lowest finite score, and later positions
    of a causal attention have -inf."""
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(a["scale"])
    lowest = np.finfo(scores.dtype).min
    for m in mask:
        scores = np.where(m, scores, lowest) if m.dtype == np.bool_ else np.maximum(scores + m, lowest)
    if a["causal"]:
        rows, columns = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :]
        scores = np.where(columns > rows, -np.inf, scores)
    return np.asarray(scores, q.dtype)


def _attention(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    q, k, v, *mask = x
    scores = _scores(q, k, mask, a)
    top = np.max(scores, axis=-1, keepdims=True)
    grown = np.exp(scores - top)
    total = np.sum(wide(grown), axis=-1, keepdims=True).astype(q.dtype)
    return np.matmul(grown / total, v), top[..., 0], total[..., 0]


def _attention_grad(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    dy, q, k, v, y, top, total, *mask = x
    share = np.exp(_scores(q, k, mask, a) - top[..., None]) / total[..., None]
    slope = share * (
        np.matmul(dy, np.swapaxes(v, -1, -2)) - np.sum(wide(dy * y), axis=-1, keepdims=True).astype(q.dtype)
    )
    for m in mask:
        if m.dtype == np.bool_:
            slope = np.where(m, slope, 0)  # in a row that sees no key, hidden keys have a share
    slope = (slope * q.dtype.type(a["scale"])).astype(q.dtype)
    return np.matmul(slope, k), np.matmul(np.swapaxes(slope, -1, -2), q), np.matmul(np.swapaxes(share, -1, -2), dy)


RULES: dict[str, Rule] = {
    "matmul": _matmul,
    "conv": convolve,
    "conv_grad_input": _conv_grad_input,
    "conv_grad_weight": _conv_grad_weight,
    "attention": _attention,
    "attention_grad": _attention_grad,
}
