"""The layers that groups of devices get to under a limit on the pace of a stage.

In: what no stage of each group is below for each range of layers (least.py). Out: for a limit the last layer that a
group can get to from each layer, and the first one from which it gets to each layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..chain import Ints
from .least import Singles

# The most elements that are gone through again and again at a time: so many are in a cache.
_CACHED = 150_000


class RangeLimits:
    """The ranges of layers of groups under limits, from `paces` as [group, first layer, last layer + 1]."""

    def __init__(self, paces: Singles) -> None:
        self.paces = paces
        # The least pace from y or before it to x or behind it: no element of a row is below the one before.
        self._longer = paces.copy()
        for some in np.array_split(self._longer, -(-paces.size // _CACHED)):
            for y in range(1, some.shape[1]):
                np.minimum(some[:, y], some[:, y - 1], out=some[:, y])
            for x in range(some.shape[2] - 1, 0, -1):
                np.minimum(some[:, :, x - 1], some[:, :, x], out=some[:, :, x - 1])

    def reach(self, limit: float, asked: int) -> Callable[[Ints, Ints], Ints]:
        """Return the function that says how far groups g get from positions y, but never back. It is `asked` about so
        many of them."""
        groups, positions, _ = self._longer.shape
        most = np.float32(limit)
        # What fits is the first of a row. It is looked up for each that is asked about, or once for all.
        if asked < groups * positions:
            return lambda group, at: np.maximum(self._count(group * positions + at, most) - 1, at)
        table = np.maximum(self._count(np.arange(groups * positions), most) - 1, np.tile(np.arange(positions), groups))
        return lambda group, at: np.asarray(table.take(group * positions + at))

    def _count(self, rows: Ints, most: np.float32) -> Ints:
        """Return how many elements of rows are at most `most`."""
        length = self._longer.shape[2]
        values, begin = self._longer.reshape(-1), rows * length
        count = np.zeros_like(rows)
        for step in (1 << k for k in reversed(range(length.bit_length()))):
            able = count + step <= length
            able &= values.take(begin + np.minimum(count + step, length) - 1) <= most
            count += step * able
        return count

    def begins(self, limit: float) -> Ints:
        """Return the first layer from which each group gets to each layer; where there is none, one more than are."""
        groups, positions, _ = self.paces.shape
        most = np.float32(limit)
        lowest = np.full((groups, positions), positions)
        for y in range(positions - 1, -1, -1):
            np.copyto(lowest[:, y:], y, where=self.paces[:, y, y:] <= most)
        return lowest
