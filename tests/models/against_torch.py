"""What tests of whole models need to be held against torch: an ONNX file of a module, and one number for a difference."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def error(found: np.ndarray, expected: np.ndarray, floor: float = 0.0) -> float:
    """Largest difference over largest magnitude."""
    assert found.shape == expected.shape
    return float(np.abs(found.astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), floor, 1e-30))


def export_onnx(module: nn.Module, args: tuple[Tensor, ...], folder: Path, **options: Any) -> Path:
    """The plain form of attention, because torch 2.13 cannot decompose the fused one where it changes strides; not optimised, because only then
    weights keep their names."""
    path = folder / "model.onnx"
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        torch.onnx.export(module, args, str(path), dynamo=True, verbose=False, optimize=False, **options)
    return path
