"""Caches in the interpreter: sequences that grow by turns are what the whole sequences are, and mistakes are noticed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from oracles.caches.turns import FAULTS, Array, Sequences, Shape, turn_graph, turn_module

from penstock.backends.numpy_backend import NumpyProgram, array_of, tensor_of
from penstock.ir.graph import Graph, Value, signature
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import NUMPY, apply_op
from penstock.ir.interpreter.store import DictStore, VersionStore, initial_arrays
from penstock.ir.ops import make
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import parse_type
from penstock.ir.verify.verifier import verify
from penstock.support.errors import VerifyError

SHAPES = {
    "decoding": Shape(rows=4, sequences=4, blocks=24),
    "chunks": Shape(rows=23, sequences=3, blocks=24),
    "window": Shape(rows=9, sequences=4, blocks=24, window=11),
    "cap": Shape(rows=9, sequences=4, blocks=24, cap=0.7),
    "alike": Shape(rows=9, sequences=4, blocks=24, cache_heads=4),
}


def interpreted(shape: Shape):
    """The interpreter as a function of a turn, with caches that stay."""
    module = turn_module(shape)
    store = DictStore(initial_arrays(module, {}, list(module.vars), "typed"))
    return lambda feed: run_graph(module.graphs["main"], feed, store)


@pytest.mark.parametrize("name", SHAPES)
def test_turns_are_the_whole_sequence(name: str) -> None:
    sequences = Sequences(SHAPES[name], [70, 33, 16, 1, 48])
    sequences.play(interpreted(SHAPES[name]))
    assert sequences.worst() < 2e-6


@pytest.mark.parametrize("fault", FAULTS)
def test_control_mistakes_of_a_batcher_are_noticed(fault: str) -> None:
    sequences = Sequences(SHAPES["decoding"], [70, 33, 16, 1, 48], fault=fault)
    sequences.play(interpreted(SHAPES["decoding"]))
    assert sequences.worst() > 1e-2


def test_the_reference_back_end_keeps_caches() -> None:
    shape = SHAPES["chunks"]
    graph = turn_graph(shape, "s0.F")
    program = NumpyProgram([graph])
    called = signature(graph)
    assert [slot.slot for slot in called.slots] == ["latest", "latest"]
    slots = [tensor_of(np.zeros(turn_module(shape).vars[slot.var].type.dims, np.float32)) for slot in called.slots]

    def run(feed: Mapping[str, Array]) -> list[Array]:
        return [array_of(x) for x in program.call("s0.F", [*(tensor_of(feed[v.name]) for v in graph.ins), *slots])]

    sequences = Sequences(shape, [70, 33, 16, 1, 48])
    sequences.play(run)
    assert sequences.worst() < 2e-6


def test_versions_of_parameters_do_not_touch_caches() -> None:
    module = turn_module(SHAPES["chunks"])
    store = VersionStore(module.vars, set(), initial_arrays(module, {}, list(module.vars), "typed"))
    sequences = Sequences(SHAPES["chunks"], [20, 33])
    sequences.play(lambda feed: run_graph(module.graphs["main"], feed, store.at(3, 4, 5)))
    assert sequences.worst() < 2e-6


@pytest.mark.parametrize("places", [[0, 5, 0, -1], [0, 5, 32, -1], [0, 5, -2, -1]])
def test_places_that_are_not_distinct_or_not_inside_are_refused(places: list[int]) -> None:
    shape = Shape(rows=4, sequences=1, blocks=2)
    feed = Sequences(shape, [4]).feed([(0, 4)])
    feed["turn.places"] = np.array(places, np.int32)
    with pytest.raises(VerifyError, match="places must"):
        interpreted(shape)(feed)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("turn.lengths", 3, "must hold the new rows"),
        ("turn.lengths", 200, "fit 6 blocks"),
        ("turn.table", 77, "blocks of a sequence must lie in"),
        ("turn.starts", 9, "starts must rise"),
    ],
)
def test_sequences_that_cannot_be_are_refused(name: str, change: int, message: str) -> None:
    shape = Shape(rows=4, sequences=1, blocks=2)
    feed = Sequences(shape, [4]).feed([(0, 4)])
    feed[name].reshape(-1)[-1 if name == "turn.starts" else 0] = change
    with pytest.raises(VerifyError, match=message):
        interpreted(shape)(feed)


def test_a_cache_reads_back_as_text() -> None:
    module = turn_module(SHAPES["cap"])
    text = print_module(module)
    assert "var @l0.k : f32[24,16,2,8] cache init zeros" in text
    assert parse_module(text) == module
    verify(module)


# ---------------------------------------------------------------------------------------- words


def pick(logits: Array, draws: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Array:
    n = len(logits)
    arrays = [
        logits.astype(np.float32),
        draws.astype(np.uint64),
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int32),
        np.full(n, top_p, np.float32),
    ]
    kinds = (f"f32[{n},{logits.shape[1]}]", f"u64[{n},2]", f"f32[{n}]", f"i32[{n}]", f"f32[{n}]")
    op = make("pick", [Value(f"x{i}", parse_type(t)) for i, t in enumerate(kinds)], ["t"])
    return apply_op(op, arrays)[0]


def chi_square(words: Array, shares: Array) -> float:
    counts = np.bincount(words, minlength=len(shares))
    expected = shares * len(words)
    return float(((counts - expected) ** 2 / expected).sum())


LOGITS = np.array([0.3, -1.2, 2.0, 0.0, 1.1, -0.4])
# The value that a sum of five squares exceeds once in ten thousand times.
LARGE = 25.7


def shares_of(logits: Array, temperature: float = 1.0) -> Array:
    grown = np.exp(logits / temperature)
    return grown / grown.sum()


def positions(n: int, seed: int = 11) -> Array:
    return np.stack([np.full(n, seed), np.arange(n)], 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_words_have_the_shares_of_a_softmax(temperature: float) -> None:
    words = pick(np.tile(LOGITS, (20000, 1)), positions(20000), temperature)
    assert chi_square(words, shares_of(LOGITS, temperature)) < LARGE


def test_control_a_draw_that_ignores_the_position_is_noticed() -> None:
    words = pick(np.tile(LOGITS, (20000, 1)), positions(20000) * [1, 0])
    assert chi_square(words, shares_of(LOGITS)) > LARGE


def test_control_a_biased_draw_is_noticed() -> None:
    words = pick(np.tile(LOGITS, (20000, 1)), positions(20000), 1.1)
    assert chi_square(words, shares_of(LOGITS)) > LARGE


def test_only_the_largest_are_drawn() -> None:
    logits = np.tile(LOGITS, (2000, 1))
    assert set(pick(logits, positions(2000), top_k=2).tolist()) == {2, 4}
    assert set(pick(logits, positions(2000), top_k=1).tolist()) == {2}
    # The largest has a share of 0.49, the two largest of 0.69.
    assert set(pick(logits, positions(2000), top_p=0.4).tolist()) == {2}
    assert set(pick(logits, positions(2000), top_p=0.6).tolist()) == {2, 4}
    words = pick(np.tile(LOGITS, (20000, 1)), positions(20000), top_p=0.6)
    kept = shares_of(LOGITS[[2, 4]])
    assert chi_square((words == 4).astype(int), kept) < LARGE
    assert set(pick(np.zeros((3000, 5)), positions(3000), top_k=2).tolist()) == set(range(5)), "equal ones stay"


def test_a_word_depends_on_its_own_seed_and_position_alone() -> None:
    logits = np.random.default_rng(3).standard_normal((40, 100))
    draws = np.random.default_rng(4).integers(0, 2**63, (40, 2))
    together = pick(logits, draws)
    assert together.tolist() == [int(pick(logits[i : i + 1], draws[i : i + 1])[0]) for i in range(40)]
    assert pick(logits, draws + np.array([1, 0])).tolist() != together.tolist()
    assert pick(logits, draws, 0.0).tolist() == logits.argmax(-1).tolist()


def test_the_interpreter_is_asked() -> None:
    """The rules are those that the tables have: without them nothing above would have run."""
    assert {"attend", "pick"} <= NUMPY.keys()
    graph = Graph("main", (), (), ())
    assert run_graph(graph, []) == []
