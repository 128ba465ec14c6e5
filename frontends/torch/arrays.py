"""Tensors of torch as arrays of NumPy, and their element types by our names."""

from __future__ import annotations

import numpy as np
import torch

from penstock.ir.types import LONG_NAMES, numpy_dtype

_THEIRS: dict[str, torch.dtype] = {ours: getattr(torch, name) for ours, name in LONG_NAMES.items()}
_OURS = {theirs: ours for ours, theirs in _THEIRS.items()}


def our_dtype(dtype: torch.dtype) -> str:
    """Our name of an element type; ValueError when there is none."""
    if dtype not in _OURS:
        raise ValueError(
            f"element type {str(dtype).removeprefix('torch.')} is not supported, only {', '.join(_THEIRS)}"
        )
    return _OURS[dtype]


def has_dtype(dtype: torch.dtype) -> bool:
    return dtype in _OURS


def their_dtype(dtype: str) -> torch.dtype:
    return _THEIRS[dtype]


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the elements: what is done to the tensor later does not change it."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().copy().view(numpy_dtype("bf16"))
    return plain.numpy().copy()
