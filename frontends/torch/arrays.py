"""Conversion of torch tensors to NumPy arrays, and of torch's element types to our names."""

from __future__ import annotations

import numpy as np
import torch

from penstock.ir.types import LONG_NAMES, numpy_dtype

_THEIRS: dict[str, torch.dtype] = {ours: getattr(torch, name) for ours, name in LONG_NAMES.items()}
_OURS = {theirs: ours for ours, theirs in _THEIRS.items()}


def our_dtype(dtype: torch.dtype) -> str:
    """Return our name of an element type. Raise ValueError if there is none."""
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
    """Copy the elements, so that later changes of the tensor do not change them."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().copy().view(numpy_dtype("bf16"))
    return plain.numpy().copy()
