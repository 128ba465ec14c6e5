"""Operands that belong together: what a gradient gets is the result, or the statistics, of its other operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from penstock.ir.attrs import Attr

from .data import Array


def _to_torch(array: Array) -> torch.Tensor:
    return torch.tensor(array.astype(np.float64))


def _replaced(arrays: list[Array], **changed: torch.Tensor) -> list[Array]:
    """Operands by position (`x1`), rounded to the element type they had."""
    found = list(arrays)
    for name, value in changed.items():
        i = int(name[1:])
        found[i] = np.asarray(value.numpy()).astype(arrays[i].dtype).reshape(arrays[i].shape)
    return found


def _max_pool_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    from penstock.ir.interpreter.ops import NUMPY

    (largest,) = NUMPY["max_pool"]([arrays[0].astype(np.float64)], a)
    return [arrays[0], largest.astype(arrays[1].dtype), arrays[2]]


def _softmax_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    return _replaced(arrays, x0=torch.softmax(_to_torch(arrays[0]), a["axis"]))


def _log_softmax_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    return _replaced(arrays, x0=torch.log_softmax(_to_torch(arrays[0]), a["axis"]))


def _statistics(x: Array, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    dims = tuple(range(axis % x.ndim, x.ndim))
    data = _to_torch(x)
    mean = data.mean(dims)
    return mean, (((data - mean.reshape(*mean.shape, *(1,) * len(dims))) ** 2).mean(dims) + 1e-5).rsqrt()


def _layer_norm_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    mean, rstd = _statistics(arrays[1], a["axis"])
    return _replaced(arrays, x3=mean, x4=rstd)


def _layer_norm_grad_weight(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    mean, rstd = _statistics(arrays[1], a["axis"])
    return _replaced(arrays, x2=mean, x3=rstd)


def _cross_entropy_grad(arrays: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    return _replaced(arrays, x2=torch.logsumexp(_to_torch(arrays[0]), -1))


def _attention_grad(x: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    """Result and statistics that belong to the operands;"""
    from oracles.torch_meaning import MEANING

    operands = [torch.tensor(t if t.dtype == bool else t.astype(np.float64)) for t in (*x[1:4], *x[7:])]
    results = MEANING["attention"](*operands, **a)
    return [*x[:4], *(np.asarray(r.numpy()).astype(old.dtype) for r, old in zip(results, x[4:7], strict=True)), *x[7:]]


def _attend(x: list[Array], a: Mapping[str, Attr]) -> list[Array]:
    """Sequences of different lengths with new rows, blocks in no order that no two share, and some rows of padding."""
    q, keys, values, starts, lengths, table = x
    rng = np.random.default_rng(len(q))
    count, rows = len(lengths), max(len(q) - 1, 0)
    ends = np.sort(rng.integers(0, rows + 1, count))
    starts = np.concatenate([[0], ends]).astype(np.int32)
    per = min(len(keys) // count, table.shape[1]) if count else 0
    new = np.diff(starts)
    lengths = np.minimum(new + rng.integers(0, 16 * per, count), 16 * per).astype(np.int32) if count else lengths
    assert (new <= lengths).all(), "the cache is too small for the rows"
    blocks = rng.permutation(len(keys))[: count * per].reshape(count, per)
    # What lies behind the last block of a sequence is nobody's.
    table = np.full(table.shape, -5, np.int32)
    table[:, :per] = blocks
    return [q, keys, values, starts, lengths, table]


# kind -> operands and complete attributes -> operands as a gradient gets them
RELATED: dict[str, Callable[[list[Array], Mapping[str, Attr]], list[Array]]] = {
    "attention_grad": _attention_grad,
    "attend": _attend,
    "max_pool_grad": _max_pool_grad,
    "softmax_grad": _softmax_grad,
    "log_softmax_grad": _log_softmax_grad,
    "layer_norm_grad": _layer_norm_grad,
    "layer_norm_grad_weight": _layer_norm_grad_weight,
    "cross_entropy_grad": _cross_entropy_grad,
}
