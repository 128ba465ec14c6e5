"""Compiled turns over caches: whole sequences, the bits of a row in any company, other instruction sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles.caches.turns import FAULTS, Array, Sequences, Shape, turn_graph
from samples import samples_of

from penstock.backends.tvm.kernels.caches import attend
from penstock.backends.tvm.run.load import TvmProgram
from penstock.ir.graph import signature, slot_types
from penstock.ir.types import numpy_dtype

from ...cases import build, compare, to_torch

LENGTHS = [70, 33, 16, 1, 48]
SHAPES = {
    "decoding": Shape(rows=4, sequences=4, blocks=24),
    "chunks": Shape(rows=37, sequences=3, blocks=24),
    "ragged": Shape(rows=9, sequences=4, blocks=24, heads=6, cache_heads=2, size=21, window=11, cap=0.7),
    "long": Shape(rows=20, sequences=2, blocks=90, per_sequence=42, heads=2, cache_heads=1, size=16),
    "bf16": Shape(rows=9, sequences=4, blocks=24, size=32, dtype="bf16"),
}


def runner(program: TvmProgram, name: str, shape: Shape) -> Callable[[dict[str, Array]], list[Array]]:
    """A graph of a program as a function of a turn, with caches that stay."""
    graph = turn_graph(shape, name)
    called, types = signature(graph), slot_types(graph)
    slots = [to_torch(np.zeros(types[slot].dims, numpy_dtype(types[slot].dtype))) for slot in called.slots]
    return lambda feed: [x.numpy() for x in program.call(name, [*(to_torch(feed[v.name]) for v in called.ins), *slots])]


def compiled(
    shapes: Sequence[Shape], folder: Path, target: str = "host"
) -> list[Callable[[dict[str, Array]], list[Array]]]:
    names = [f"s{i}.F" for i in range(len(shapes))]
    program = build([turn_graph(s, n) for s, n in zip(shapes, names, strict=True)], folder, target)
    return [runner(program, n, s) for s, n in zip(shapes, names, strict=True)]


def lengths_of(name: str) -> list[int]:
    return [660, 515, 30] if name == "long" else LENGTHS


def test_turns_are_the_whole_sequences(tmp_path: Path) -> None:
    for (name, shape), run in zip(SHAPES.items(), compiled(list(SHAPES.values()), tmp_path), strict=True):
        sequences = Sequences(shape, lengths_of(name))
        sequences.play(run)
        assert sequences.worst() < (2e-2 if shape.dtype == "bf16" else 5e-6), name


def test_control_mistakes_of_a_batcher_are_noticed(tmp_path: Path) -> None:
    run = compiled([SHAPES["decoding"]], tmp_path)[0]
    for fault in FAULTS:
        sequences = Sequences(SHAPES["decoding"], LENGTHS, fault=fault)
        sequences.play(run)
        assert sequences.worst() > 1e-2, fault


@pytest.mark.parametrize("target", ["portable", "x86-64"])
def test_other_instruction_sets(target: str, tmp_path: Path) -> None:
    chosen = ["decoding", "ragged", "bf16"]
    for name, run in zip(chosen, compiled([SHAPES[n] for n in chosen], tmp_path, target), strict=True):
        sequences = Sequences(SHAPES[name], LENGTHS)
        sequences.play(run)
        assert sequences.worst() < (2e-2 if SHAPES[name].dtype == "bf16" else 5e-6), name


@pytest.mark.parametrize("target", ["portable", "x86-64"])
def test_words_are_the_same_everywhere(target: str, tmp_path: Path) -> None:
    samples = samples_of("pick")
    graphs = [s.graph(f"s0.c{i}") for i, s in enumerate(samples)]
    program = build(graphs, tmp_path, target)
    assert not [w for s, g in zip(samples, graphs, strict=True) for w in compare(program, g, s.arrays())]


# ---------------------------------------------------------------------------------------- the bits of a row

ALONE = Shape(rows=1, sequences=1, blocks=90, per_sequence=42, heads=4, cache_heads=2, size=16)
COMPANY = replace(ALONE, rows=24, sequences=6)
CHUNKS = replace(ALONE, rows=200, sequences=2)


def first_rows(shape: Shape, run: Callable[[dict[str, Array]], list[Array]], lengths: list[int]) -> Array:
    sequences = Sequences(shape, lengths, seed=5)
    sequences.play(run)
    return np.concatenate(sequences.found[0])


def test_the_bits_of_a_row_do_not_depend_on_its_company(tmp_path: Path) -> None:
    """Row by row alone, beside five others, and in chunks: the first sequence has the same numbers. Its length has two parts."""
    alone, company, chunks = compiled([ALONE, COMPANY, CHUNKS], tmp_path)
    expected = first_rows(ALONE, alone, [560])
    assert expected.tobytes() == first_rows(COMPANY, company, [560, 33, 100, 5, 64, 17]).tobytes()
    assert expected.tobytes() == first_rows(CHUNKS, chunks, [560, 300]).tobytes()


def test_control_sums_in_another_order_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    expected = first_rows(ALONE, compiled([ALONE], tmp_path / "a")[0], [560])
    monkeypatch.setattr(attend, "PART", 256)
    found = first_rows(ALONE, compiled([ALONE], tmp_path / "b")[0], [560])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.tobytes() != expected.tobytes()


def test_padding_of_nan_changes_no_bit(tmp_path: Path) -> None:
    shape = SHAPES["chunks"]
    run = compiled([shape], tmp_path)[0]
    feed = Sequences(shape, [20]).feed([(0, 20)])
    with_nan = run(feed)[0]
    clean = {name: np.nan_to_num(x) if x.dtype == np.float32 else x for name, x in feed.items()}
    assert with_nan.tobytes() == run(clean)[0].tobytes()
    assert not with_nan[20:].any()


def test_operands_that_cannot_be_read_nothing_outside(tmp_path: Path) -> None:
    """Blocks, lengths and starts of any numbers: the kernel ends, and what it gives is anything."""
    shape = SHAPES["decoding"]
    run = compiled([shape], tmp_path)[0]
    feed = Sequences(shape, LENGTHS).feed([(0, 2), (1, 2)])
    rng = np.random.default_rng(1)
    for _ in range(20):
        for name in ("turn.places", "turn.starts", "turn.lengths", "turn.table"):
            drawn = rng.choice(np.array([-(2**31), -7, 0, 3, 1000, 2**31 - 1]), feed[name].shape)
            feed[name] = drawn.astype(np.int32)
        assert run(feed)[0].shape == (shape.rows, shape.heads, shape.size)
