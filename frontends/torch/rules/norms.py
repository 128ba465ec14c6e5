"""ATen operations on whole rows and channels: softmax and normalisation.

Batch norm in training uses the statistics of the batch. The new running statistics, which only inference reads, are
results of it.
"""

from __future__ import annotations

import torch

from penstock.frontends.formulas.layout import axis_of, reshape
from penstock.frontends.formulas.norms import batch_norm, grouped_norm, moved, rms_norm, scaled
from penstock.frontends.torch.node import Absent, Result, Rule, TorchNode
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS


def row(kind: str) -> Rule:
    def rule(n: TorchNode) -> Result:
        n.ignore("dtype", "half_to_float")
        x = n.value("self", n.dtype)
        if x.type.rank == 0:
            return n.emit("const", value=1.0 if kind == "softmax" else 0.0, dtype=x.type.dtype)
        return n.emit(kind, x, axis=axis_of(n, n.arg("dim"), x.type.rank))

    return rule


def _layer_norm(n: TorchNode) -> tuple[Value, Value, Value]:
    n.ignore("cudnn_enable")
    x, dims = n.value("input"), n.ints("normalized_shape")
    dtype = x.type.dtype
    scale = n.value("weight", dtype) if n.has("weight") else n.emit("const", value=1.0, dtype=dtype, shape=dims)
    bias = n.value("bias", dtype) if n.has("bias") else n.emit("const", value=0.0, dtype=dtype, shape=dims)
    results = n.emit_all("layer_norm", 3, x, scale, bias, axis=-len(dims), eps=float(n.arg("eps")))
    shape = (*x.type.dims[: x.type.rank - len(dims)], *(1,) * len(dims))
    return results[0], reshape(n, results[1], shape), reshape(n, results[2], shape)


def _rms_norm(n: TorchNode) -> Result:
    x, dims = n.value("input"), n.ints("normalized_shape")
    eps = n.arg("eps", torch.finfo(n.call.meta["val"].dtype).eps)
    y = rms_norm(n, x, x.type.rank - len(dims), float(eps))
    return n.emit("mul", y, n.value("weight")) if n.has("weight") else y


def _group_norm(n: TorchNode, groups: str) -> Value:
    """Write a group norm. `groups` is the name of the argument with their number."""
    n.ignore("cudnn_enabled", "N", "C", "HxW")
    return _weighted(n, grouped_norm(n, n.value("input"), int(n.arg(groups)), float(n.arg("eps"))))


def _weighted(n: TorchNode, y: Value) -> Value:
    """Multiply by the weight and add the bias of each channel, where present."""
    weight, bias = (n.value(name, y.type.dtype) if n.has(name) else None for name in ("weight", "bias"))
    return scaled(n, y, weight, bias)


def _channels(n: TorchNode, x: Value, name: str, value: float) -> Value:
    channels = (x.type.dims[1],)
    return (
        n.value(name, x.type.dtype) if n.has(name) else n.emit("const", value=value, dtype=x.type.dtype, shape=channels)
    )


def _batch_norm_inference(n: TorchNode) -> tuple[Value | Absent, ...]:
    n.ignore("momentum")  # for the running statistics, which do not change here
    x = n.value("input")
    statistics = (n.value(name, x.type.dtype) for name in ("running_mean", "running_var"))
    y = n.emit(
        "batch_norm",
        x,
        _channels(n, x, "weight", 1.0),
        _channels(n, x, "bias", 0.0),
        *statistics,
        eps=float(n.arg("eps")),
    )
    return y, *(Absent("inference saves no statistics"),) * 2


def _batch_norm_training(n: TorchNode) -> tuple[Value, Value, Value]:
    """Normalise with the statistics of the batch. Return the result, their mean, and one over their deviation."""
    return _with_statistics(n)[:3]


def _with_statistics(n: TorchNode) -> tuple[Value, Value, Value, Value]:
    """Normalise with the statistics of the batch.

    Return the result, the mean, one over the deviation, and the variance.
    """
    n.ignore("training", "momentum")
    x, eps = n.value("input"), float(n.arg("eps"))
    n.require(x.type.dtype in FLOATS, f"needs a floating-point operand, got {x.type}")
    y, mean, variance, rstd = batch_norm(n, x, eps)
    return _weighted(n, y), mean, rstd, variance


def _batch_norm(n: TorchNode) -> Result:
    """Write a batch norm whose last results are the new running statistics."""
    if not n.arg("training"):
        return *_batch_norm_inference(n), n.arg("running_mean"), n.arg("running_var")
    y, mean, rstd, variance = _with_statistics(n)
    x, momentum = n.value("input"), float(n.arg("momentum"))
    count = x.type.size // x.type.dims[1]
    unbiased = n.emit("mul", variance, count / max(1, count - 1))
    statistics = (("running_mean", mean), ("running_var", unbiased))
    return y, mean, rstd, *(moved(n, n.value(name), new, momentum) for name, new in statistics)


RULES: dict[str, Rule] = {
    "softmax.int": row("softmax"),
    "_softmax": row("softmax"),
    "log_softmax.int": row("log_softmax"),
    "_log_softmax": row("log_softmax"),
    "layer_norm": lambda n: _layer_norm(n)[0],
    "native_layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": lambda n: _group_norm(n, "num_groups"),
    "native_group_norm": lambda n: (
        _group_norm(n, "group"),
        *(Absent("statistics of a group norm are not supported"),) * 2,
    ),
    "_native_batch_norm_legit_no_training": _batch_norm_inference,
    "_native_batch_norm_legit.no_stats": _batch_norm_training,
    "_native_batch_norm_legit_functional": _batch_norm,
}
