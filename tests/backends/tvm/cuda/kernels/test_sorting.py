"""Rows added to a table in the order of a sort: every sample of lookups, and indices that repeat within, across and over many chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracles.judge import to_tensor, wrong_results
from samples import samples_of

from penstock.backends.tvm.cuda.kernels import sorting
from penstock.ir.graph import Graph, Value
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.runtime.state.tensors import as_array

from .cuda_source import SourceProgram
from .test_generate import build_serial
from .test_source import runnable

VOCAB, WIDTH = 300, 3


def lookup(count: int) -> Graph:
    dy, indices = Value("dy", TensorType("f32", (count, WIDTH))), Value("i", TensorType("i64", (count,)))
    op = make("gather_grad", [dy, indices], ["table"], "", shape=(VOCAB, WIDTH), axis=0)
    return Graph("s0.g0", (dy, indices), op.outs, (op,))


def drawn(count: int, kind: str) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    indices = {
        "even": rng.integers(0, VOCAB, count),
        "one": np.full(count, VOCAB - 1),
        # A padding token in most places, as at the ends of sequences.
        "padded": np.where(rng.random(count) < 0.8, 0, rng.integers(0, VOCAB, count)),
        "falling": np.arange(count)[::-1] % VOCAB,
    }[kind]
    return [rng.standard_normal((count, WIDTH)).astype(np.float32), indices.astype(np.int64)]


@pytest.mark.parametrize("kind", ["even", "one", "padded", "falling"])
def test_repeated_indices(kind: str, tmp_path: Path) -> None:
    graph, arrays = lookup(1500), drawn(1500, kind)
    programs = [build_serial([graph], tmp_path, forwards=forwards) for forwards in (True, False)]
    for program in (*programs, SourceProgram([graph], tmp_path)):
        assert not wrong_results(program, graph, arrays)
    runs = [p.call("s0.g0", [to_tensor(a, p.device) for a in arrays]) for p in programs]
    # The order of threads changes no bit.
    assert as_array(runs[0][0]).tobytes() == as_array(runs[1][0]).tobytes()


@pytest.mark.parametrize("kind", ["gather_grad", "scatter"])
def test_samples_when_everything_is_sorted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "SORTED_FROM", 1)
    monkeypatch.setattr(sorting, "CHUNK", 3)
    samples = [s for s in samples_of(kind) if runnable(s)]
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(samples)]
    program = build_serial(graphs, tmp_path)
    assert not [f"{s} {w}" for s, g in zip(samples, graphs, strict=True) for w in wrong_results(program, g, s.arrays())]


def test_control_the_order_of_the_sort_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sorted entries in place of the positions they came from, other rows are added."""
    sort = sorting.emit_sorted
    monkeypatch.setattr(sorting, "emit_sorted", lambda *arguments: (sort(*arguments)[0],) * 2)
    graph, arrays = lookup(1500), drawn(1500, "even")
    assert wrong_results(build_serial([graph], tmp_path), graph, arrays)
