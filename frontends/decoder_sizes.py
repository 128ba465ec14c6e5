"""The sizes that a decoder is compiled for, whatever it is read from."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ir.ops.caches import BLOCK


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes that a decoder is compiled for: positions of a sequence, sequences at once, and tokens of turns.

    Caches have blocks for all sequences at their full length, and elements of type `cache`. With `logits` a turn gives
    these, too.
    """

    context: int
    sequences: int
    rungs: tuple[int, ...]
    logits: bool = False
    cache: str = "f32"

    @property
    def blocks_each(self) -> int:
        return -(-self.context // BLOCK)

    @property
    def blocks(self) -> int:
        return self.sequences * self.blocks_each
