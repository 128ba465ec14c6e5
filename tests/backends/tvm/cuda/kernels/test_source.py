"""The CUDA source that nvcc compiles, run on the CPU with its blocks, threads and barriers, against the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from oracles.cuda import threads as cuda_threads
from oracles.judge import wrong_results
from samples import Sample, samples_of

from penstock.backends.tvm.cuda.kernels.generate import KINDS

from .cuda_source import SourceProgram

# One of each way to use threads: the rest takes minutes.
SOME = (
    "gelu",
    "where",
    "transpose",
    "sum",
    "softmax",
    "layer_norm",
    "matmul",
    "max_pool_grad",
    "gather_grad",
    "cross_entropy",
    "attention_grad",
)


def runnable(s: Sample) -> bool:
    """A list of values is no kernel, nor is a result without elements."""
    listed = s.kind == "const" and isinstance(s.attrs["value"], tuple)
    return any(v.type.size for v in s.op.outs) and not listed


def check(samples: Sequence[Sample], folder: Path) -> list[str]:
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(samples)]
    program = SourceProgram(graphs, folder)
    with np.errstate(all="ignore"):
        return [f"{s} {w}" for s, g in zip(samples, graphs, strict=True) for w in wrong_results(program, g, s.arrays())]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SOME else pytest.mark.slow) for kind in sorted(KINDS - {"put"})]
)
def test_the_source_of_every_row(kind: str, tmp_path: Path) -> None:
    samples = [s for s in samples_of(kind) if runnable(s)]
    assert not check(samples if kind not in SOME else samples[:8], tmp_path)


def test_control_without_barriers_results_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = "{ int mine = current; swapcontext(&at[mine], &back); }"
    assert barrier in cuda_threads.FRONT
    monkeypatch.setattr(cuda_threads, "FRONT", cuda_threads.FRONT.replace(barrier, "{}"))
    assert check([s for s in samples_of("softmax") if runnable(s)], tmp_path)


def test_control_halves_of_fewer_bits_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bits are lost whenever a number is stored."""
    halves = [s for s in samples_of("gelu") if s.dtype in ("f16", "bf16")]
    assert {s.dtype for s in halves} == {"f16", "bf16"}
    stored = "uint16_t bits;"
    assert cuda_threads.HALVES.count(stored) == 2
    shorter = "struct Short { uint16_t n; Short() = default; Short(int x) : n(x & 0xfff0) {} operator int() const { return n; } } bits;"
    monkeypatch.setattr(cuda_threads, "HALVES", cuda_threads.HALVES.replace(stored, shorter))
    wrong = check(halves, tmp_path)
    assert all(any(f"'{dtype}'" in line or f"({dtype}[" in line for line in wrong) for dtype in ("f16", "bf16")), wrong
