"""NumPy rules for contractions; a convolution is one product per position of its window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ops import window_of
from .arrays import Array, Rule, Values
from .rows import softmax
from .windows import positions, with_border, without_border


def _turned(x: Array, transposed: bool) -> Array:
    return np.swapaxes(x, -1, -2) if transposed else x


def _matmul(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    return (np.matmul(_turned(x[0], a["ta"]), _turned(x[1], a["tb"])),)


def _groups(x: Array, axis: int, groups: int) -> list[Array]:
    return np.split(x, groups, axis)


def _conv(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
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
    for block, grad in zip(_groups(with_border(data, window, 0), 1, a["groups"]), _groups(dy, 1, a["groups"]), strict=True):
        part = np.zeros((grad.shape[1], *a["shape"][1:]), data.dtype)
        for position, where in positions(window, dy.shape[2:]):
            part[position] = np.einsum(f"nc{spatial},no{spatial}->oc", block[where], grad, optimize=True)
        parts.append(part)
    return (np.concatenate(parts, 0),)


def _attention(x: Sequence[Array], a: Values) -> tuple[Array, ...]:
    q, k, v = x
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(a["scale"])
    if a["causal"]:
        rows, columns = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :]
        scores = np.where(columns > rows, -np.inf, scores).astype(q.dtype)
    return (np.matmul(softmax(scores, -1), v),)


RULES: dict[str, Rule] = {
    "matmul": _matmul,
    "conv": _conv,
    "conv_grad_input": _conv_grad_input,
    "conv_grad_weight": _conv_grad_weight,
    "attention": _attention,
}
