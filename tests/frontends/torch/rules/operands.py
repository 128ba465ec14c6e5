"""Operands for the tables of operations of ATen: drawn once, from one seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

A = torch.ops.aten
_RANDOM = torch.Generator().manual_seed(5)

Case = tuple[str, Callable[..., Any], tuple[Tensor, ...]]


def f(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_RANDOM)


def p(*shape: int) -> Tensor:
    """Above zero."""
    return torch.rand(shape, generator=_RANDOM) + 0.2


def u(*shape: int) -> Tensor:
    """Between -1 and 1, and not near either."""
    return 1.8 * torch.rand(shape, generator=_RANDOM) - 0.9


def i(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=_RANDOM)


def b(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_RANDOM) < 0.5


def distinct(*shape: int) -> Tensor:
    """All elements different, so that a largest one has no equal."""
    return torch.randperm(math.prod(shape), generator=_RANDOM).reshape(shape) / 7.0 - 1.0
