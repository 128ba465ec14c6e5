"""A rank's program as a stream of actions with look-ahead, for a number of batches that may not be known yet.

The stream gives the actions of `Schedule.expand`, lazily. An action is let through once it is known that its batch
exists, and dropped once it is known that it does not. That drains the pipeline. The list after that of the last batch
may still hold actions that belong to it. A feed says which batches exist. Where requests are answered it counts single
microbatches, each of which goes its way as soon as it is known. Beside each action stands the weight version that has
no reader after it. It stands at the last action of the batch list that reads the oldest version of that list, in every
batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import NamedTuple, Protocol

import numpy as np

from penstock.ir.schedule import READERS, RECEIVES, Action, Program, Schedule

# Actions that are created beyond those that the caller needs: together they cost less.
_CHUNK = 16


class Feed(Protocol):
    """Batches of a run and their inputs. Batch numbers count from the beginning of training, not of the run."""

    def exists(self, batch: int) -> bool | None:
        """Return whether a batch is part of the run; None when that is not known yet. Does not wait."""

    def wait(self, batch: int) -> None:
        """Wait until `exists` knows."""

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        """Return the samples of one input for one microbatch."""

    def finish(self, batch: int) -> None:
        """Release the batch's inputs: they are not needed after this."""


class Upcoming(NamedTuple):
    action: Action
    retires: int | None


def retiring(program: Program) -> dict[int, int]:
    """Find where in the batch list a version of a stage has had its last reader: position -> that version, as written
    for batch 1."""
    readers: dict[int, list[tuple[int, int]]] = {}
    for i, action in enumerate(program.batch):
        if action.kind in READERS and action.version is not None:
            readers.setdefault(action.stage, []).append((action.version, i))
    retired = {}
    for of_stage in readers.values():
        oldest = min(version for version, _ in of_stage)
        retired[max(i for version, i in of_stage if version == oldest)] = oldest
    return retired


class ActionStream:
    """The program of one rank from batch `first` on. `receives` never waits; `pop` waits for the feed when it has to.
    `unit` is how many microbatches the feed counts as one: by default those of a batch. `idle` is called before it
    waits."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        first: int,
        feed: Feed,
        unit: int | None = None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._per_batch = schedule.microbatches
        self._unit = unit or schedule.microbatches
        self._units = self._per_batch // self._unit
        self._first, self._feed, self._idle = first, feed, idle
        self._raw = self._unroll(schedule.ranks[rank], first)
        self._ahead: deque[Upcoming] = deque()
        # The number of popped actions, the receives ahead with their places, and the last batch or microbatch of the
        # feed that is known to exist.
        self._popped, self._known = 0, -1
        self._receives: deque[tuple[int, Action]] = deque()
        self._next = next(self._raw, None)

    def pop(self) -> Upcoming | None:
        """Return the next action; None at the end of the run."""
        if not self._ahead:
            self._advance(1, wait=True)
            if not self._ahead:
                return None
        self._popped += 1
        return self._ahead.popleft()

    def receives(self, number: int) -> list[Action]:
        """Return the receives among the last action popped and the `number` that follow it, as far as they are known.
        Each is returned once, in order."""
        if len(self._ahead) < number:
            self._advance(number + _CHUNK, wait=False)
        actions: list[Action] = []
        end = self._popped + number
        while self._receives and self._receives[0][0] < end:
            place, action = self._receives.popleft()
            if place >= self._popped - 1:
                actions.append(action)
        return actions

    def _unroll(self, program: Program, first: int) -> Iterator[tuple[int, int, Upcoming]]:
        """Yield part of the list, number as the feed counts, action."""
        m, unit, retires = self._per_batch, self._unit, retiring(program)
        start: list[tuple[Action, bool, int | None]] = [(action, action.once, None) for action in program.start]
        batch = [(action, action.once, retires.get(i)) for i, action in enumerate(program.batch)]
        for t, actions in chain([(first, start)], ((t, batch) for t in count(first))):
            shift = t - 1
            for (kind, stage, mb, version, peer, end, item), once, last in actions:
                number = mb + (shift if once else shift * m)
                read = None if version is None else max(0, version + shift)
                gone = None if last is None or last + shift < 0 else last + shift
                counted = number if once else number // unit
                yield t, counted, Upcoming(Action(kind, stage, number, read, peer, end, item), gone)

    def _advance(self, number: int, *, wait: bool) -> None:
        while len(self._ahead) < number and self._next is not None:
            part, counted, upcoming = self._next
            if counted >= self._first * self._units:
                known = self._exists(counted)
                if known is None:
                    if not wait:
                        return
                    self._idle()
                    self._feed.wait(counted)
                    continue
                if known:
                    if upcoming.action.kind in RECEIVES:
                        self._receives.append((self._popped + len(self._ahead), upcoming.action))
                    self._ahead.append(upcoming)
            if part > self._first and self._exists((part - 1) * self._units) is False:
                self._next = None
                return
            self._next = next(self._raw, None)

    def _exists(self, counted: int) -> bool | None:
        if counted <= self._known:
            return True
        known = self._feed.exists(counted)
        if known:
            self._known = counted
        return known
