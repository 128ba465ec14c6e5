"""The comparison of a compiled graph with the interpreter: every result, in its element type."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.backends.interface import StageProgram
from penstock.ir.graph import Graph
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.ir.types import dtype_of
from penstock.runtime.state.tensors import TORCH_DTYPES, as_array, fill

# Largest error allowed, relative to the largest value of the result. The compiled graph rounds half precision once, the
# interpreter at every step.
TOLERANCE = {"f32": 2e-5, "f64": 1e-12, "f16": 4e-3, "bf16": 3e-2}


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device."""
    return fill(torch.empty(array.shape, dtype=TORCH_DTYPES[dtype_of(array.dtype)], device=device), array)


def wrong_results(program: StageProgram, graph: Graph, arrays: Sequence[np.ndarray]) -> list[str]:
    """Return everything that differs from the interpreter."""
    computed = program.call(graph.name, [to_tensor(a, program.device) for a in arrays])
    expected = [np.asarray(y) for y in run_graph(graph, list(arrays), DictStore({}))]
    problems = []
    for v, x, y in zip(graph.results, computed, expected, strict=True):
        assert (x.dtype, tuple(x.shape)) == (TORCH_DTYPES[v.type.dtype], y.shape)
        a, b = as_array(x).astype(np.float64), y.astype(np.float64)
        if v.type.dtype not in TOLERANCE:
            count = int((as_array(x) != y).sum())
            problems += [f"%{v.name}: {count} elements differ"] if count else []
            continue
        if not np.array_equal(np.isnan(a), np.isnan(b)) or not np.array_equal(_ends(a), _ends(b)):
            problems.append(f"%{v.name}: nan or inf in other places")
            continue
        finite = np.isfinite(b)
        scale, error = np.abs(b[finite]).max(initial=0.0), np.abs(a[finite] - b[finite]).max(initial=0.0)
        if error > TOLERANCE[v.type.dtype] * max(scale, 1.0):
            problems.append(f"%{v.name}: error {error:.2e} at scale {scale:.2e}")
    return problems


def _ends(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), np.sign(x), 0)
