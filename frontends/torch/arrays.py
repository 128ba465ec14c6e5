"""Tensors of torch as arrays of NumPy, and their element types by our names."""

from __future__ import annotations

import numpy as np
import torch

from penstock.ir.types import numpy_dtype

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint64: "u64",
    torch.uint32: "u32",
    torch.uint16: "u16",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_THEIRS = {ours: theirs for theirs, ours in _DTYPES.items()}


def our_dtype(dtype: torch.dtype) -> str:
    """Our name of an element type; ValueError when there is none."""
    if dtype not in _DTYPES:
        raise ValueError(f"element type {str(dtype).removeprefix('torch.')} is not supported, only {', '.join(_THEIRS)}")
    return _DTYPES[dtype]


def has_dtype(dtype: torch.dtype) -> bool:
    return dtype in _DTYPES


def their_dtype(dtype: str) -> torch.dtype:
    return _THEIRS[dtype]


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the elements: what is done to the tensor later does not change it."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().copy().view(numpy_dtype("bf16"))
    return plain.numpy().copy()
