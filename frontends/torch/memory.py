"""Memory of tensors: which ones are the same elements, and which share only some of them.

Addresses are bytes of the process, independent of the storage that a tensor names. Strides are taken into account
exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

import numpy as np
import torch


def place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that are the same elements of the same memory."""
    steps = tuple(step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr() if tensor.numel() else id(tensor), tuple(tensor.shape), steps, tensor.dtype)


def sharing(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of tensors, by their numbers, that have bytes in common."""
    near: list[int] = []
    for i in sorted((i for i, t in enumerate(tensors) if t.numel()), key=lambda i: tensors[i].data_ptr()):
        near = [j for j in near if _end(tensors[j]) > tensors[i].data_ptr()]
        yield from ((min(i, j), max(i, j)) for j in near if _meet(tensors[j], tensors[i]))
        near.append(i)


def _end(tensor: torch.Tensor) -> int:
    """Return the first byte behind the last element."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the tensors share an element or a part of one. a begins first."""
    sizes = [t.element_size() for t in (a, b)]
    unit = gcd(b.data_ptr() - a.data_ptr(), *sizes)
    marks = np.zeros((max(_end(a), _end(b)) - a.data_ptr()) // unit, np.bool_)

    def bytes_of(tensor: torch.Tensor) -> np.ndarray:
        wide = tensor.element_size() // unit
        steps = [step * wide for step in tensor.stride()]
        start = (tensor.data_ptr() - a.data_ptr()) // unit
        return np.lib.stride_tricks.as_strided(marks[start:], (*tensor.shape, wide), (*steps, 1))

    bytes_of(a)[...] = True
    return bool(bytes_of(b).any())
