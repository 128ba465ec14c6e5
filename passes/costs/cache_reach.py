"""Count the bytes of a graph's kernels that are in a cache, by their reuse distance.

In: the kernels of a graph in their order, and the size of the cache. Out: for each kernel the bytes that it finds
there, or leaves there for the next kernel that wants them. The graph runs again and again, as for one microbatch after
the other; other kernels touch `between` bytes before it runs again:

    distance of a touch   bytes that were touched since the place was touched before (for a write: until it is touched
                          next)
    in the cache          if the distance is at most the size of the cache

Limits: the cache keeps what was touched last, and nothing else; what is touched twice counts twice in a distance;
memory of a value that was freed counts as fresh memory of the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.passes.kernels.divide import Kernel, Place


def bytes_near(kernels: Sequence[Kernel], cache: int, between: float = 0.0) -> list[float]:
    """Return, for each kernel, the bytes that move at the rate of the cache."""
    near = [0.0] * len(kernels)
    if not cache:
        return near
    clock = 0.0
    last: dict[Place, float] = {}
    # The writes of the second turn that were not touched since: kernel and bytes.
    waiting: dict[Place, tuple[int, float]] = {}
    for turn in range(3):
        for number, kernel in enumerate(kernels):
            for touch in kernel.touches:
                close = clock - last.get(touch.place, -math.inf) <= cache
                writer, count = waiting.pop(touch.place, (0, 0.0))
                if close:
                    near[writer] += count
                if turn == 1 and touch.written:
                    waiting[touch.place] = (number, touch.bytes)
                elif turn == 1 and close:
                    near[number] += touch.bytes
                clock += touch.bytes
                last[touch.place] = clock
        clock += between
    return near
