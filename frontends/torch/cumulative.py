"""Batch norms with plain averages as running statistics (momentum=None), in a form that torch.export accepts.

torch reads the number of batches as a Python number, which no exported program can contain. While a module is exported,
such layers compute the same from tensors. A batch norm of momentum 1 leaves the statistics of the batch in two tensors.
The newest batch has the share 1 / number of batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def cumulative_averages(module: torch.nn.Module) -> Iterator[None]:
    """Replace forward of the layers with plain averages in training mode, so that the block can export the module."""
    layers = [
        candidate for candidate in module.modules() if isinstance(candidate, _BatchNorm) and _is_cumulative(candidate)
    ]
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_cumulative(layer: _BatchNorm) -> bool:
    unchanged = type(layer).forward is _BatchNorm.forward and "forward" not in vars(layer)
    return unchanged and layer.training and layer.momentum is None and layer.num_batches_tracked is not None


def _forward(layer: _BatchNorm, x: Tensor) -> Tensor:
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    mean, variance, number = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None, "a layer that counts batches has statistics"
    assert variance is not None
    assert number is not None
    number.add_(1)
    newest = mean.detach().clone(), variance.detach().clone()
    y = F.batch_norm(x, *newest, layer.weight, layer.bias, True, 1.0, layer.eps)
    share = 1.0 / number.to(mean.dtype)
    for running, new in zip((mean, variance), newest, strict=True):
        running.copy_(running * (1.0 - share) + new * share)
    return y
