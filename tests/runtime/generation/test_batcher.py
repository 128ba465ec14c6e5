"""A checker of the batcher: random arrivals, ends and cancels, and what must hold after every step.

A block has one owner, none is lost, what a sequence computed lies in its own blocks at the right places, and every
sequence ends. The controls are batchers that do one thing wrong; the checker must notice each of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from penstock.ir.ops.caches import BLOCK
from penstock.runtime.generation.batcher import CANCELLED, LENGTH, STOP, Batcher, Limits
from penstock.runtime.generation.blocks import CacheBlocks, blocks_for
from penstock.runtime.generation.turn import Draw, TokenTurn

END = 7


class Checker:
    """A batcher beside a model of the caches: for each place the sequence, position and token that lie there."""

    def __init__(self, batcher: Batcher, seed: int) -> None:
        self.batcher, self.random = batcher, random.Random(seed)
        self.cache: dict[int, tuple[int, int, int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.ended: dict[int, str] = {}
        self.waited: dict[int, int] = {}
        # The sequences whose tokens all lie in the caches, but for the last one.
        self.decoding: set[int] = set()

    def arrive(self) -> None:
        limits, draw = self.batcher.limits, self.random
        size = draw.choice([1, 2, 3, BLOCK, BLOCK + 1, draw.randint(1, limits.context)])
        prompt = [draw.randint(0, 99) for _ in range(min(size, limits.context))]
        most = draw.randint(1, limits.context - len(prompt) + 1)
        number = self.batcher.add(prompt, most, Draw(seed=draw.randint(0, 9)), (END,))
        self.tokens[number], self.prompts[number], self.most[number] = list(prompt), len(prompt), most

    def cancel(self) -> None:
        open_ = [number for number in self.tokens if number not in self.ended]
        if open_:
            number = self.random.choice(open_)
            assert self.batcher.cancel(number)
            self.ended[number] = CANCELLED
            assert not self.batcher.cancel(number)

    def rewind(self) -> None:
        self.batcher.rewind()
        self.cache.clear()
        self.decoding.clear()

    def turn(self) -> bool:
        turn = self.batcher.plan()
        if turn is None:
            assert self.batcher.idle, "sequences wait, and none is computed"
            return False
        self.check_turn(turn)
        picked = [self.random.choice([END, *range(20, 60)]) for _ in turn.shares]
        chosen = {entry.sequence: entry for entry in self.batcher.take(turn, picked)}
        assert set(chosen) == {share.sequence for share in turn.shares if share.chooses}
        for share, token in zip(turn.shares, picked, strict=True):
            if not share.chooses:
                continue
            number = share.sequence
            self.tokens[number].append(token)
            self.decoding.add(number)
            count = len(self.tokens[number]) - self.prompts[number]
            ended = STOP if token == END else LENGTH if count == self.most[number] else ""
            assert (chosen[number].token, chosen[number].ended) == (token, ended)
            if ended:
                self.ended[number] = ended
        self.check_blocks()
        return True

    def check_turn(self, turn: TokenTurn) -> None:
        limits = self.batcher.limits
        assert turn.rung in limits.rungs
        assert 0 < turn.rows <= turn.rung
        count = min(turn.rung, limits.sequences)
        assert 0 < len(turn.shares) <= count
        arrays = {name.removeprefix("turn."): array for name, array in turn.arrays(count, limits.blocks_each).items()}
        kept = arrays["places"][arrays["places"] >= 0]
        assert len(kept) == turn.rows == len(set(kept.tolist()))
        assert (arrays["places"][turn.rows :] == -1).all()
        row = 0
        for s, share in enumerate(turn.shares):
            number, tokens = share.sequence, self.tokens[share.sequence]
            assert number not in self.ended
            for token in share.tokens:
                position = int(arrays["positions"][row])
                assert tokens[position] == token == arrays["tokens"][row]
                self.cache[int(arrays["places"][row])] = (number, position, token)
                row += 1
            length = int(arrays["lengths"][s])
            assert (arrays["starts"][s], arrays["starts"][s + 1]) == (row - len(share.tokens), row)
            # All positions of the sequence are where its line of the table says.
            line = arrays["table"][s]
            for position in range(length):
                place = int(line[position // BLOCK]) * BLOCK + position % BLOCK
                assert self.cache[place] == (number, position, tokens[position]), "a position was lost"
            assert share.chooses == (length == len(tokens))
            assert arrays["chosen"][s] == row - 1
            if share.chooses:
                assert arrays["draws"][s].tolist() == [share.draw.seed, len(tokens)]
        assert (arrays["lengths"][len(turn.shares) :] == 0).all()
        served = {share.sequence for share in turn.shares}
        assert self.decoding & set(self.batcher.owners()) <= served, "a sequence that decodes was left out"

    def check_blocks(self) -> None:
        pool, owners = self.batcher.pool, self.batcher.owners()
        taken = [block for blocks in owners.values() for block in blocks]
        assert len(taken) == len(set(taken)), "a block has two owners"
        assert len(taken) + pool.free == pool.count, "a block was lost"
        assert set(owners).isdisjoint(self.ended), "a sequence that ended has blocks"
        for number, blocks in owners.items():
            assert len(blocks) <= blocks_for(len(self.tokens[number])), "blocks are wasted"

    def run(self, steps: int) -> None:
        for _ in range(steps):
            kind = self.random.random()
            if kind < 0.15:
                self.arrive()
            elif kind < 0.17:
                self.cancel()
            elif kind < 0.18:
                self.rewind()
            else:
                self.turn()
        left = sum(self.most[n] + self.prompts[n] for n in self.tokens if n not in self.ended)
        for _ in range(left + 1):
            if not self.turn():
                break
        assert set(self.ended) == set(self.tokens), "a sequence was starved"
        assert self.batcher.pool.free == self.batcher.pool.count
        assert self.batcher.pool.promised == 0


LIMITS = (
    Limits((1, 4, 16, 64), 4, 24, 6),
    Limits((8,), 3, 6, 6),
    Limits((1, 2, 4), 4, 9, 3),
    Limits((32,), 16, 20, 4),
)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_and_everybody_ends(limits: Limits, seed: int):
    Checker(Batcher(limits), seed).run(1500)


def _two_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    take = CacheBlocks.take
    monkeypatch.setattr(CacheBlocks, "take", lambda pool: (take(pool), 0)[1] if pool.free < pool.count else take(pool))


def _leak(monkeypatch: pytest.MonkeyPatch) -> None:
    give = CacheBlocks.give_back
    monkeypatch.setattr(CacheBlocks, "give_back", lambda pool, blocks, promised: give(pool, list(blocks)[1:], promised))


def _off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = TokenTurn.arrays

    def shifted(turn: TokenTurn, sequences: int, each: int) -> dict[str, np.ndarray]:
        result = arrays(turn, sequences, each)
        places = result["turn.places"]
        result["turn.places"] = np.where(places >= 0, places ^ 1, places)
        return result

    monkeypatch.setattr(TokenTurn, "arrays", shifted)


def _starving(monkeypatch: pytest.MonkeyPatch) -> None:
    promise = CacheBlocks.promise
    monkeypatch.setattr(CacheBlocks, "promise", lambda pool, blocks: blocks < 3 and promise(pool, blocks))


@pytest.mark.parametrize("fault", [_two_owners, _leak, _off_by_one, _starving])
def test_the_checker_notices(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        Checker(Batcher(LIMITS[0]), 0).run(3000)


def test_a_long_prompt_leaves_rows_to_others():
    batcher = Batcher(Limits((1, 16), 4, 64, 16))
    long, short, also = (batcher.add([1] * size, 2, Draw()) for size in (200, 40, 40))
    turn = batcher.plan()
    assert turn is not None
    assert [(share.sequence, len(share.tokens)) for share in turn.shares] == [(long, 8), (short, 4), (also, 4)]


def test_a_rung_is_filled_rather_than_left_empty():
    batcher = Batcher(Limits((1, 64, 256), 4, 64, 64))
    batcher.add([1] * 300, 1, Draw())
    sizes = []
    while (turn := batcher.plan()) is not None:
        sizes.append((turn.rung, turn.rows))
        batcher.take(turn, [0] * len(turn.shares))
    assert sizes == [(256, 256), (64, 44)]
