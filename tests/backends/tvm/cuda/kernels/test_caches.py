"""Turns over caches by GPU kernels, with loops in place of threads; and rows that the source nvcc compiles stores, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.caches.turns import FAULTS, Sequences, Shape, turn_graph
from oracles.judge import to_tensor

from penstock.ir.graph import Graph
from penstock.ir.interpreter.ops.caches import with_rows
from penstock.ir.types import numpy_dtype
from penstock.runtime.state.tensors import as_array

from ...kernels.caches.test_turns import runner
from .cuda_source import SourceProgram
from .test_generate import build_serial

LENGTHS = [40, 33, 5]
SHAPES = {
    "decoding": Shape(rows=3, sequences=3, blocks=12, heads=4, cache_heads=2, size=8),
    "ragged": Shape(rows=7, sequences=2, blocks=12, heads=3, cache_heads=1, size=9, window=11, cap=0.7),
    "bf16": Shape(rows=7, sequences=2, blocks=12, heads=2, cache_heads=2, size=8, dtype="bf16"),
    "long": Shape(rows=200, sequences=1, blocks=40, per_sequence=36, heads=1, cache_heads=1, size=8),
}


@pytest.mark.parametrize("name", SHAPES)
def test_turns_are_the_whole_sequences(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    sequences = Sequences(shape, [530] if name == "long" else LENGTHS)
    sequences.play(runner(build_serial([turn_graph(shape, "s0.F")], tmp_path), "s0.F", shape))
    assert sequences.worst() < (2e-2 if shape.dtype == "bf16" else 5e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_source_stores_rows(dtype: str, tmp_path: Path) -> None:
    turn = turn_graph(Shape(rows=7, sequences=2, blocks=3, size=9, dtype=dtype), "s0.F")
    put = turn.ops[0]
    graph = Graph("s0.F", put.ins, (), (put,))
    rng = np.random.default_rng(2)
    rows = rng.standard_normal(put.ins[0].type.dims).astype(np.float32)
    places = np.array([5, -1, 47, 0, 16, -1, 33], np.int32)
    cache = rng.standard_normal(put.outs[0].type.dims).astype(numpy_dtype(dtype))
    held = to_tensor(cache.copy(), torch.device("cpu"))
    SourceProgram([graph], tmp_path).call("s0.F", [to_tensor(x, torch.device("cpu")) for x in (rows, places)] + [held])
    assert as_array(held).tobytes() == with_rows(cache, rows, places).tobytes()


def test_control_mistakes_of_a_batcher_are_noticed(tmp_path: Path) -> None:
    run = runner(build_serial([turn_graph(SHAPES["decoding"], "s0.F")], tmp_path), "s0.F", SHAPES["decoding"])
    for fault in FAULTS:
        sequences = Sequences(SHAPES["decoding"], LENGTHS, fault=fault)
        sequences.play(run)
        assert sequences.worst() > 1e-2, fault
