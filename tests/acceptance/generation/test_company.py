"""The bits of a row of a whole model do not depend on its company: how many rows are computed at once, whose they are,
in which order, and in which blocks of the caches they lie.

A sequence is computed alone and row by row; that is compared with every other way, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from samples.decoders.grouped import WORDS, DecoderForm, write_decoder

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.ops.caches import BLOCK
from penstock.runtime.generation.turn import LOGITS, TOKENS, Draw, Share, TokenTurn

pytestmark = pytest.mark.slow

CONTEXT, SEQUENCES, LENGTH = 96, 3, 70
RUNGS = (1, 4, 16, 64, 96)
EACH = CONTEXT // BLOCK


@pytest.fixture(scope="module", params=[0, 4], ids=["f32", "4 bits"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("company")
    file = write_decoder(folder / "model.onnx", DecoderForm(bits=request.param))
    words = ["--generate", "--context", str(CONTEXT), "--sequences", str(SEQUENCES), "--logits"]
    assert main(["compile", str(file), "-o", str(folder / "b"), *words]) == 0
    loaded = ps.load(folder / "b")
    assert loaded.generator.facts.rungs == RUNGS
    return loaded


class Texts:
    """Sequences of random tokens, each in its own blocks, which turns go on with."""

    def __init__(self, model: Any, blocks: Sequence[int] = range(SEQUENCES * EACH), seed: int = 0) -> None:
        drawn = (
            np.random.default_rng(5).integers(0, WORDS, (1, LENGTH)),
            np.random.default_rng(seed + 6).integers(0, WORDS, (SEQUENCES - 1, CONTEXT)),
        )
        self._tokens = [array.tolist() for rows in drawn for array in rows]
        self._model, self._blocks, self.done = model, list(blocks), [0] * SEQUENCES

    def turn(self, rung: int, rows: Sequence[tuple[int, int]]) -> dict[int, np.ndarray]:
        """Compute so many rows of some sequences. Return the logits of the last row of each."""
        shares = []
        for sequence, count in rows:
            first = self.done[sequence]
            tokens = tuple(self._tokens[sequence][first : first + count])
            blocks = tuple(self._blocks[sequence * EACH : (sequence + 1) * EACH])
            shares.append(Share(sequence, tokens, first, blocks, Draw(), True))
            self.done[sequence] += count
        arrays = TokenTurn(rung, tuple(shares)).arrays(min(rung, SEQUENCES), EACH)
        logits = np.asarray(self._model.at({TOKENS: rung}).compute(arrays)[LOGITS])
        return {sequence: logits[i].copy() for i, (sequence, _) in enumerate(rows)}


def alone(model: Any) -> list[np.ndarray]:
    """The logits of all rows of the first sequence, one by one."""
    texts = Texts(model)
    return [texts.turn(1, [(0, 1)])[0] for _ in range(LENGTH)]


def in_company(model: Any, rung: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """The first sequence in pieces of any size beside pieces of others, in any order; its rows with their logits."""
    chance = np.random.default_rng(seed)
    texts = Texts(model, chance.permutation(SEQUENCES * EACH).tolist(), seed)
    while texts.done[0] < LENGTH:
        left, rows = rung, []
        for sequence in chance.permutation(SEQUENCES)[: min(rung, SEQUENCES)].tolist():
            most = min(left, (LENGTH if sequence == 0 else CONTEXT) - texts.done[sequence])
            count = int(chance.integers(0, most + 1)) if most else 0
            if count:
                rows.append((sequence, count))
                left -= count
        if rows and 0 in (logits := texts.turn(rung, rows)):
            yield texts.done[0] - 1, logits[0]


def test_a_row_has_the_same_bits_at_every_rung_and_in_any_company(model: Any) -> None:
    """The control is a sequence whose first token is another one: every row has other bits."""
    rows = alone(model)
    for rung in RUNGS:
        whole = Texts(model).turn(rung, [(0, min(rung, LENGTH))])[0]
        assert whole.tobytes() == rows[min(rung, LENGTH) - 1].tobytes(), rung
        compared = 0
        for seed in range(6 if rung > 1 else 1):
            for row, logits in in_company(model, rung, seed):
                assert logits.tobytes() == rows[row].tobytes(), (rung, seed, row)
                compared += 1
        assert compared > 10
    other = Texts(model)
    other._tokens[0][0] = (other._tokens[0][0] + 1) % WORDS
    assert all(other.turn(1, [(0, 1)])[0].tobytes() != row.tobytes() for row in rows)
