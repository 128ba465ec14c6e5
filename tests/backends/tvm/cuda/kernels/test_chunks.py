"""Chunks of neighbours that a thread moves as one: samples of rows whose extents allow it, on the CPU, in both orders of threads; and the source that
nvcc gets, which moves a vector from its boundary or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracles.judge import wrong_results
from samples import samples_of

from penstock.backends.tvm.cuda.kernels import chunks
from penstock.backends.tvm.cuda.kernels.generate import KINDS
from penstock.ir.graph import Graph, Value
from penstock.ir.ops import make
from penstock.ir.types import TensorType

from ...cases import make_args
from .cuda_source import SourceProgram
from .test_generate import build_serial, lower_for_device
from .test_source import runnable

# One of each way to read and write.
SOME = ("add", "cast", "where", "concat", "pad", "max_pool_grad")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small results have chunks, too."""
    monkeypatch.setattr(chunks, "_THREADS", 1)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SOME else pytest.mark.slow) for k in sorted(KINDS)])
def test_samples_in_chunks(kind: str, tmp_path: Path) -> None:
    samples = [s for s in samples_of(kind) if runnable(s)]
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(samples)]
    for forwards in (True, False):
        program = build_serial(graphs, tmp_path, forwards=forwards)
        with np.errstate(all="ignore"):
            pairs = zip(samples, graphs, strict=True)
            assert not [f"{s} {wrong}" for s, g in pairs for wrong in wrong_results(program, g, s.arrays())]


def group(dtype: str, rows: int = 6, columns: int = 40) -> Graph:
    """A matrix, a line for all rows, a column, a part of a larger matrix: added, multiplied, rounded. Numbers are small: the interpreter rounds every
    sum to 16 bits, a kernel the last alone."""
    sizes = {"x": (rows, columns), "line": (columns,), "column": (rows, 1), "large": (rows + 1, columns)}
    x, line, column, large = (Value(name, TensorType(dtype, dims)) for name, dims in sizes.items())
    part = make("slice", [large], ["p"], "", start=(1, 0), stop=(rows + 1, columns), step=(1, 1), kernel="k0")
    first = make("add", [x, line], ["s"], "", kernel="k0")
    second = make("add", [first.outs[0], part.outs[0]], ["q"], "", kernel="k0")
    total = make("mul", [second.outs[0], column], ["t"], "", kernel="k0")
    rounded = make("cast", total.outs, ["r"], "", dtype="f16" if dtype == "bf16" else "bf16", kernel="k0")
    ops = (part, first, second, total, rounded)
    return Graph("s0.g0", (x, line, column, large), (total.outs[0], rounded.outs[0]), ops)


def vectors(graph: Graph) -> int:
    """The number of moves of vectors in the kernels of a graph."""
    return str(lower_for_device([graph]).script()).count("T.Ramp(")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_groups_in_chunks(dtype: str, tmp_path: Path) -> None:
    graph = group(dtype)
    assert vectors(graph) > 0
    arrays = [(array / 4).astype(array.dtype) for array in make_args(graph, np.random.default_rng(3))]
    programs = [build_serial([graph], tmp_path, forwards=forwards) for forwards in (True, False)]
    for program in (*programs, SourceProgram([graph], tmp_path)):
        assert not wrong_results(program, graph, arrays)


def test_runs_that_chunks_do_not_fit_have_none(tmp_path: Path) -> None:
    graph = group("f32", columns=39)
    assert vectors(graph) == 0
    assert not wrong_results(build_serial([graph], tmp_path), graph, make_args(graph, np.random.default_rng(3)))


def test_control_a_chunk_from_another_place_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads begin a chunk too early, but for the first."""
    first = chunks.Chunk._first

    def early(self: chunks.Chunk, value: Value, index: object) -> object:
        place = first(self, value, index)  # type: ignore[arg-type]
        return place if place is None or value.name != "x" else chunks.tirx.max(place - self.size, 0)

    monkeypatch.setattr(chunks.Chunk, "_first", early)
    graph = group("f32")
    assert wrong_results(build_serial([graph], tmp_path), graph, make_args(graph, np.random.default_rng(3)))
