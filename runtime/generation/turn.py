"""A turn: some tokens of some sequences, which are computed together, and its form as arrays.

The arrays are the inputs of a decoder by name, for a rung of T rows and S sequences:

    turn.tokens, turn.positions     i64[T]      each row's token, and its position in its sequence
    turn.places                     i32[T]      where its keys and values belong: block * 16 + row, -1 for padding
    turn.starts                     i32[S+1]    the first row of each sequence, and behind the last one
    turn.lengths                    i32[S]      positions of each sequence with these rows, 0 where there is none
    turn.table                      i32[S,N]    the blocks of each sequence
    turn.chosen                     i32[S]      the row that chooses a token
    turn.draws                      u64[S,2]    (seed, position) of the draw
    turn.temperature, turn.top_k, turn.top_p    how it draws
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.ops.caches import BLOCK

PICKED, LOGITS = "turn.picked", "turn.logits"
# The dimension of a turn's rows, in the ladder of a decoder.
TOKENS = "tokens"


@dataclass(frozen=True)
class Draw:
    """The way in which a sequence chooses tokens.

    Temperature 0 takes the likeliest one; top_k 0 and top_p 1 leave all of them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Share:
    """The rows of one sequence in a turn: tokens from position `first` on, in blocks. The last row `chooses` or not."""

    sequence: int
    tokens: tuple[int, ...]
    first: int
    blocks: tuple[int, ...]
    draw: Draw
    chooses: bool


@dataclass(frozen=True)
class TokenTurn:
    """The shares of a turn in the order of their rows, and the rung that holds them."""

    rung: int
    shares: tuple[Share, ...]

    @property
    def rows(self) -> int:
        return sum(len(share.tokens) for share in self.shares)

    def arrays(self, sequences: int, blocks_each: int) -> dict[str, np.ndarray]:
        """Return the inputs of a decoder for so many sequences, with tables of so many blocks."""
        rows, count = self.rung, sequences
        tokens, positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        places = np.full(rows, -1, np.int32)
        starts, lengths = np.full(count + 1, self.rows, np.int32), np.zeros(count, np.int32)
        table, chosen = np.zeros((count, blocks_each), np.int32), np.zeros(count, np.int32)
        draws, temperature = np.zeros((count, 2), np.uint64), np.zeros(count, np.float32)
        top_k, top_p = np.zeros(count, np.int32), np.ones(count, np.float32)
        row = 0
        for s, share in enumerate(self.shares):
            size = len(share.tokens)
            end, line = share.first + size, np.asarray(share.blocks, np.int32)
            at = np.arange(share.first, end)
            tokens[row : row + size], positions[row : row + size] = share.tokens, at
            places[row : row + size] = line[at // BLOCK] * BLOCK + at % BLOCK
            starts[s], lengths[s], table[s, : len(line)] = row, end, line
            row += size
            chosen[s] = row - 1
            draws[s] = share.draw.seed, end
            temperature[s] = share.draw.temperature if share.chooses else 0.0
            top_k[s], top_p[s] = share.draw.top_k, share.draw.top_p
        names = (
            ("tokens", tokens), ("positions", positions), ("places", places), ("starts", starts), ("lengths", lengths),
            ("table", table), ("chosen", chosen), ("draws", draws), ("temperature", temperature), ("top_k", top_k),
            ("top_p", top_p),
        )  # fmt: skip
        return {f"turn.{name}": array for name, array in names}
