"""The steps of ranks batch after batch, and the moment from which a run repeats itself.

In: the period of each rank, and what has run. Out: the steps of so many batches, and the seconds from one batch to the
next, once a run repeats itself. It does where every action of a period starts and ends so much later than in the one
before, on all ranks. The next period is the same then. That holds where each batch waits for the updates of the one
before. Under delayed schedules ranks may still get ahead of each other. Turns on crowded cores go by the clock of the
host.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from .machine import TransportModel
from .result import RankTimeline, SimulatedStep

# The part of a period by which times of two periods may differ: what rounding leaves.
_SAME = 1e-9
# The periods of all ranks that are there at least: what begins, and two batches that are compared.
_LEAST = 3


def unrolled(
    start: Sequence[SimulatedStep], period: Sequence[SimulatedStep], batches: int, microbatches: int
) -> tuple[RankTimeline, list[int]]:
    """Return the steps of a rank in so many batches, and where each of its periods ends."""
    line, ends = RankTimeline([], array("i"), array("d"), array("d")), list[int]()
    for part, shift in [(start, -1), *((period, t - 1) for t in range(batches + 1))]:
        for step in part:
            mb = step.action.mb + (shift if step.per_batch else shift * microbatches)
            if 0 <= mb < (batches if step.per_batch else batches * microbatches):
                line.steps.append(step)
                line.numbers.append(mb)
        ends.append(len(line.steps))
    line.starts.extend([0.0] * len(line.steps))
    line.finishes.extend([0.0] * len(line.steps))
    return line, ends


def posts(line: RankTimeline, receive: int, transport: TransportModel) -> tuple[array[int], array[int]]:
    """Return before which action each receive is posted, as lists linked by position: the first of each action, and
    the one after each receive, whose code is `receive`."""
    first, after = array("i", [-1]) * len(line.steps), array("i", [-1]) * len(line.steps)
    limit, ahead = transport.posted or 0, transport.look_ahead
    recent: dict[object, deque[int]] = {}
    places: list[tuple[int, int]] = []
    for position, step in enumerate(line.steps):
        if step.code != receive:
            continue
        before = recent.setdefault(step.channel, deque(maxlen=limit))
        places.append((position, max(0, position - ahead, before[0] + 1 if len(before) == limit else 0)))
        before.append(position)
    for position, at in reversed(places):
        after[position], first[at] = first[at], position
    return first, after


class Repetition:
    """The watch over a run: `seconds` is the time from one batch to the next, None until the run repeats itself.
    `next_end` has the position of each rank at which it asks to be told, with `come`."""

    def __init__(self, lines: Mapping[int, RankTimeline], ends: Mapping[int, Sequence[int]]) -> None:
        self._lines, self._ends = lines, ends
        self._done = dict.fromkeys(lines, 0)
        self._seen = 0
        self.next_end: dict[int, float] = {rank: float(ends[rank][0]) for rank in lines}
        self.seconds: float | None = None

    def come(self, rank: int, position: int) -> None:
        """Take note that a rank has come to a position."""
        ends = self._ends[rank]
        while self._done[rank] < len(ends) and ends[self._done[rank]] <= position:
            self._done[rank] += 1
        done = self._done[rank]
        self.next_end[rank] = float(ends[done]) if done < len(ends) else float("inf")
        every = min(self._done.values())
        if every > self._seen:
            self._seen = every
            self.seconds = self._period(every)

    def _period(self, done: int) -> float | None:
        """Return by how much later the last period of all ranks is than the one before, if that is the same
        everywhere."""
        if done < _LEAST:
            return None
        later = list[np.ndarray]()
        for rank, line in self._lines.items():
            first, middle, last = self._ends[rank][done - 3 : done]
            if last - middle != middle - first:
                return None
            for times in (np.frombuffer(line.starts), np.frombuffer(line.finishes)):
                later.append(times[middle:last] - times[first:middle])
        if not (every := np.concatenate(later)).size:
            return None
        seconds = float(every.max())
        return seconds if seconds - float(every.min()) <= _SAME * seconds else None
