"""Turns among synthetic inputs: those of a decoder fit together, which no range of numbers says.

In: the types of a module's inputs, the blocks of its caches, limits of tokens and positions. Out: some sequences with
rows of their own, as a server would send them: prompts from the first position on, and sequences that go on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.ir.graph import CACHE, Module
from penstock.ir.ops.caches import BLOCK
from penstock.ir.types import TensorType
from penstock.runtime.generation.turn import Draw, Share, TokenTurn

from .ranges import integer_range

# The inputs whose first dimension is that of the rows, and that of the sequences.
_ROWS = ("turn.tokens", "turn.positions", "turn.places")
_SEQUENCES = ("turn.lengths", "turn.table", "turn.chosen", "turn.draws", "turn.temperature", "turn.top_k", "turn.top_p")


class SyntheticTurns:
    """Turns for the caches of a module."""

    def __init__(self, module: Module) -> None:
        self.types: Mapping[str, TensorType] = {value.name: value.type for value in module.data_inputs}
        self.blocks = min((var.type.dims[0] for var in module.vars.values() if var.role == CACHE), default=0)
        limits = {name: integer_range(module, name) for name in _ROWS[:2] if name in self.types}
        self.words, self.positions = (limits.get(name) for name in _ROWS[:2])
        self.rows = self._size(_ROWS)
        self.sequences = self._size(_SEQUENCES)
        self.each = self.types["turn.table"].dims[1] if "turn.table" in self.types else self.blocks

    def _size(self, names: tuple[str, ...]) -> int:
        return next((self.types[name].dims[0] for name in names if name in self.types), 0)

    @property
    def exist(self) -> bool:
        """Return whether the module has caches, and the inputs of turns."""
        return min(self.blocks, self.rows, self.sequences) > 0

    def turn(self, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Draw the inputs of one turn."""
        return self.drawn(generator).arrays(self.sequences, self.each)

    def drawn(self, generator: np.random.Generator) -> TokenTurn:
        """Draw one turn."""
        count = int(generator.integers(1, min(self.sequences, self.rows, self.blocks) + 1))
        each = min(self.each, self.blocks // count)
        room = each * BLOCK if self.positions is None else min(each * BLOCK, self.positions[1])
        sizes = 1 + generator.multinomial(int(generator.integers(0, self.rows - count + 1)), [1 / count] * count)
        blocks = generator.permutation(self.blocks)
        shares = []
        for s, size in enumerate(np.minimum(sizes, room).tolist()):
            tokens = generator.integers(0, self.words[1] if self.words else 2, size).tolist()
            # A prompt, or what goes on behind earlier positions; so does a token alone.
            first = int(generator.integers(0, room - size + 1)) if s % 2 or size == 1 else 0
            mine = tuple(blocks[s * each : (s + 1) * each].tolist())
            draw = Draw(s % 2, int(generator.integers(0, 4)), 0.9, int(generator.integers(0, 1 << 32)))
            shares.append(Share(s, tuple(tokens), first, mine, draw, chooses=True))
        return TokenTurn(self.rows, tuple(shares))
