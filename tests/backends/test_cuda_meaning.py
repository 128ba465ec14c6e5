"""What GPU kernels compute, judged without a GPU: the TIR of every row's samples, with loops in place of blocks and threads, against the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import Sample, samples_of
from serial_threads import serial_module

from penstock.backends.tvm.build import _compile, _link
from penstock.backends.tvm.cuda.target import device_machine
from penstock.backends.tvm.load import TvmProgram
from penstock.backends.tvm.lower import lower_graphs
from penstock.backends.tvm.target import machine_of
from penstock.ir.graph import Graph
from penstock.ir.interp import DictStore, run_graph
from penstock.ir.ops import OPS
from penstock.ir.types import dtype_of
from penstock.runtime.store import TORCH_DTYPES, as_array, fill

# Lowered by `decompose` before it comes here.
COMPOSITE = {"attention"}
KINDS = [name for name, row in OPS.items() if row.family != "state" and name not in COMPOSITE]
# Largest error allowed, as a part of the largest value of the result. Half precision is rounded once here, by every step in the interpreter.
TOLERANCE = {"f32": 2e-5, "f64": 1e-12, "f16": 4e-3, "bf16": 3e-2}


def build_serial(graphs: Sequence[Graph], folder: Path, *, forwards: bool = True, drop_barriers: bool = False) -> TvmProgram:
    """GPU kernels of graphs as a program for this machine."""
    module, _ = lower_graphs(graphs, device_machine("sm_90"))
    library = folder / f"serial{forwards}{drop_barriers}.so"
    _link(_compile(serial_module(module, forwards, drop_barriers), machine_of("host"), "serial"), library, "serial")
    return TvmProgram(library, graphs)


def to_tensor(array: np.ndarray) -> torch.Tensor:
    return fill(torch.empty(array.shape, dtype=TORCH_DTYPES[dtype_of(array.dtype)]), array)


def wrong_results(program: TvmProgram, graph: Graph, arrays: Sequence[np.ndarray]) -> list[str]:
    """Everything that differs from the interpreter."""
    found = program.call(graph.name, [to_tensor(a) for a in arrays])
    expected = [np.asarray(y) for y in run_graph(graph, list(arrays), DictStore({}))]
    problems = []
    for v, x, y in zip(graph.results, found, expected, strict=True):
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
        if error > TOLERANCE[v.type.dtype] * max(scale, 1e-30):
            problems.append(f"%{v.name}: error {error:.2e} at scale {scale:.2e}")
    return problems


def _ends(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), np.sign(x), 0)


def check(samples: Sequence[Sample], folder: Path) -> list[str]:
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(samples)]
    program = build_serial(graphs, folder)
    with np.errstate(all="ignore"):
        return [f"{s} {w}" for s, g in zip(samples, graphs, strict=True) for w in wrong_results(program, g, s.arrays())]


def some_of(kind: str) -> list[Sample]:
    """One sample of each element type, and the first three in f32."""
    chosen: dict[str, Sample] = {}
    for s in samples_of(kind):
        chosen.setdefault(s.dtype, s)
    return list(dict.fromkeys([*chosen.values(), *[s for s in samples_of(kind) if s.dtype == "f32"][:3]]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_of_a_row(kind: str, tmp_path: Path) -> None:
    assert not check(samples_of(kind), tmp_path)
