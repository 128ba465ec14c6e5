"""Blocks of the caches: their owners, and how many are promised.

A block is 16 positions of a sequence in the caches of all layers. A sequence is promised the blocks that it may need at
most before it begins, and takes them as it grows. So a sequence that began can always end.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.ir.ops.caches import BLOCK


def blocks_for(positions: int) -> int:
    """Return the blocks that so many positions lie in."""
    return -(-positions // BLOCK)


class CacheBlocks:
    """The blocks that no sequence has. The one that was given back last is taken first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.promised = 0
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def promise(self, blocks: int) -> bool:
        """Promise blocks to a sequence if there are as many that are not promised yet."""
        if self.promised + blocks > self.count:
            return False
        self.promised += blocks
        return True

    def take(self) -> int:
        """Return a block that was promised."""
        return self._free.pop()

    def give_back(self, blocks: Iterable[int], promised: int) -> None:
        """Free the blocks of a sequence that ended, and what it was promised."""
        self._free.extend(blocks)
        self.promised -= promised
