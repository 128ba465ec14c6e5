"""The batcher: which tokens of which sequences are computed in the next turn.

In: prompts, and the tokens that were chosen in a turn. Out: turns. It has no threads and no clock, and depends on
nothing but what it is told, so that it can be checked alone (tests/runtime/generation/test_batcher.py).

A turn has as many rows as one of the rungs that code was compiled for. Sequences that are decoding come first, with one
row each. What is left goes to prompts, the oldest first. Of several prompts that wait, one gets at most half of what is
left, so that a long one does not hold up the others. Rows behind the last one are padding: their place is -1.

Sequences begin in the order of their prompts, when there are blocks for their whole length. None overtakes another
one, so that each of them begins.

Limits: one group of sequences is under way, and no sequence is set back for another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from penstock.ir.ops.caches import BLOCK

from .blocks import CacheBlocks, blocks_for
from .turn import Draw, Share, TokenTurn

# Rungs of so few rows take about as long as one row, because the weights are read in any case.
_NARROW = 16

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


@dataclass(frozen=True)
class Limits:
    """The sizes that code was compiled for: rows of a turn (rising), sequences at once, blocks, and blocks of one."""

    rungs: tuple[int, ...]
    sequences: int
    blocks: int
    blocks_each: int

    @property
    def context(self) -> int:
        return self.blocks_each * BLOCK


@dataclass(frozen=True)
class ChosenToken:
    """A token that was chosen for a sequence. `ended` says why it was the last one, if it was: stop or length."""

    sequence: int
    token: int
    ended: str = ""


@dataclass(eq=False)
class _Sequence:
    """A prompt with what was generated. `done` positions are in the caches."""

    number: int
    tokens: list[int]
    prompt: int
    most: int
    ends: Collection[int]
    draw: Draw
    done: int = 0
    promised: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """The tokens that were not computed yet."""
        return len(self.tokens) - self.done

    @property
    def positions(self) -> int:
        """The positions that it takes in the caches at most: that of the last token is not computed."""
        return max(self.prompt + self.most - 1, 1)


class Batcher:
    """The sequences under way and those that wait."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = CacheBlocks(limits.blocks)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._planned: TokenTurn | None = None
        self._numbers = 0

    def add(self, prompt: Sequence[int], tokens: int, draw: Draw, ends: Collection[int] = ()) -> int:
        """Add a prompt, for which up to so many tokens are generated. Return the number of its sequence.

        The caller has checked that it fits: at least one token, and no more positions than the context.
        """
        sequence = _Sequence(self._numbers, list(prompt), len(prompt), tokens, ends, draw)
        assert min(len(prompt), tokens) > 0, "a sequence has a prompt, and generates"
        assert sequence.positions <= self.limits.context, "a sequence fits the context"
        assert blocks_for(sequence.positions) <= self.limits.blocks, "a sequence fits the caches"
        self._numbers += 1
        self._waiting.append(sequence)
        return sequence.number

    @property
    def idle(self) -> bool:
        """True where there is nothing to do."""
        return not self._waiting and not self._running

    def owners(self) -> dict[int, list[int]]:
        """Return the blocks of each sequence that is under way."""
        return {sequence.number: list(sequence.blocks) for sequence in self._running}

    def cancel(self, number: int) -> bool:
        """End a sequence between turns. Return whether it was there."""
        assert self._planned is None, "a turn is under way"
        for queue in (self._waiting, self._running):
            for sequence in queue:
                if sequence.number == number:
                    queue.remove(sequence)
                    self._free(sequence)
                    return True
        return False

    def rewind(self) -> None:
        """Take the caches for lost: what is under way is computed again, with the tokens that were chosen."""
        assert self._planned is None, "a turn is under way"
        for sequence in self._running:
            sequence.done = 0

    def plan(self) -> TokenTurn | None:
        """Return the next turn, None where there is nothing to do. It is answered by `take`."""
        assert self._planned is None, "a turn is under way"
        self._admit()
        if not self._running:
            return None
        shares, rung = self._divide()
        self._planned = TokenTurn(rung, tuple(self._share(sequence, rows) for sequence, rows in shares))
        return self._planned

    def take(self, turn: TokenTurn, picked: Sequence[int]) -> list[ChosenToken]:
        """Take the tokens that were chosen in a turn, one for each of its shares. Return those that count."""
        assert turn is self._planned, "turns are answered in order"
        self._planned = None
        known = {sequence.number: sequence for sequence in self._running}
        chosen = []
        for share, token in zip(turn.shares, picked, strict=False):
            sequence = known[share.sequence]
            sequence.done += len(share.tokens)
            if sequence.left == 0:
                chosen.append(self._grow(sequence, int(token)))
        return chosen

    # ------------------------------------------------------------------------------------ planning

    def _admit(self) -> None:
        """Let sequences begin, in order, as long as there is room for them."""
        while self._waiting and len(self._running) < self.limits.sequences:
            need = blocks_for(self._waiting[0].positions)
            if not self.pool.promise(need):
                return
            sequence = self._waiting.popleft()
            sequence.promised = need
            self._running.append(sequence)

    def _divide(self) -> tuple[list[tuple[_Sequence, int]], int]:
        """Return the rows of each sequence in the next turn, and the rung."""
        decoding = [sequence for sequence in self._running if sequence.left == 1]
        prompts = [sequence for sequence in self._running if sequence.left > 1]
        most = self.limits.rungs[-1]
        shares = [(sequence, 1) for sequence in decoding[:most]]
        rung = self._rung(len(shares) + sum(sequence.left for sequence in prompts))
        left = rung - len(shares)
        for place, sequence in enumerate(prompts):
            if left <= 0:
                break
            others = sum(other.left for other in prompts[place + 1 :])
            rows = min(sequence.left, max(left - others, -(-left // 2)))
            shares.append((sequence, rows))
            left -= rows
        return shares, self._holding(rung - left)

    def _rung(self, rows: int) -> int:
        """Return the rung for so many rows: one with room for all, or a smaller one, again and again, if that is less
        work. The work of a rung is that of its rows, but at least that of the narrow ones."""
        holding = self._holding(rows)
        smaller = max((rung for rung in self.limits.rungs if rung < min(rows, holding)), default=0)
        if not smaller or holding < rows:
            return holding
        last = self._holding(rows % smaller) if rows % smaller else 0
        apart = rows // smaller * max(smaller, _NARROW) + (max(last, _NARROW) if last else 0)
        return smaller if apart < max(holding, _NARROW) else holding

    def _holding(self, rows: int) -> int:
        """Return the smallest rung that holds so many rows, or the largest one."""
        return next((rung for rung in self.limits.rungs if rung >= rows), self.limits.rungs[-1])

    def _share(self, sequence: _Sequence, rows: int) -> Share:
        """Return the part of a turn for a sequence. It takes blocks as it grows."""
        end = sequence.done + rows
        while len(sequence.blocks) < blocks_for(end):
            sequence.blocks.append(self.pool.take())
        return Share(
            sequence.number,
            tuple(sequence.tokens[sequence.done : end]),
            sequence.done,
            tuple(sequence.blocks),
            sequence.draw,
            chooses=end == len(sequence.tokens),
        )

    # ------------------------------------------------------------------------------------ results

    def _grow(self, sequence: _Sequence, token: int) -> ChosenToken:
        sequence.tokens.append(token)
        ended = ""
        if token in sequence.ends:
            ended = STOP
        elif len(sequence.tokens) - sequence.prompt >= sequence.most:
            ended = LENGTH
        if ended:
            self._running.remove(sequence)
            self._free(sequence)
        return ChosenToken(sequence.number, token, ended)

    def _free(self, sequence: _Sequence) -> None:
        self.pool.give_back(sequence.blocks, sequence.promised)
        sequence.blocks, sequence.promised = [], 0
