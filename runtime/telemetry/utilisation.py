"""The utilisation of stages, for the line of progress.

In: the seconds that each rank has computed so far, asked for now and then. Out: a share of the last few seconds for
each stage, the mean of its ranks.

A computation counts when it is finished, so the window is longer than most of them take. Where they take longer,
shares are of a longer time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

WINDOW_SECONDS = 5.0
# More stages than these are not listed one by one.
_MOST_LISTED = 8


class Utilisation:
    """The shares of time that stages compute. `stages` is the stage of every rank, `read` gives the seconds of every
    rank."""

    def __init__(
        self, stages: Sequence[int], read: Callable[[], Sequence[float]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stages, self._read, self._clock = stages, read, clock
        self._seen: deque[tuple[float, tuple[float, ...]]] = deque()

    def look(self) -> list[float] | None:
        """Return the share of each stage since the last look but for so many seconds; None where nothing is known
        yet."""
        now, busy = self._clock(), tuple(self._read())
        if len(busy) != len(self._stages):
            return None
        self._seen.append((now, busy))
        # The newest of those that are old enough, else the oldest.
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        if now <= then:
            return None
        shares: dict[int, list[float]] = {}
        for stage, old, new in zip(self._stages, before, busy, strict=True):
            shares.setdefault(stage, []).append(min((new - old) / (now - then), 1.0))
        return [sum(shares[stage]) / len(shares[stage]) for stage in sorted(shares)]

    def text(self) -> str:
        """Return the shares for people: `busy 91% 64%`, one number for each stage; empty where nothing is known yet."""
        shares = self.look()
        if shares is None:
            return ""
        percent = [f"{share:.0%}" for share in shares]
        return (
            f"busy {' '.join(percent)}"
            if len(shares) <= _MOST_LISTED
            else f"busy {min(shares):.0%} to {max(shares):.0%}"
        )
