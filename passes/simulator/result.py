"""The result of a simulation: when every action ran and why not earlier, and what follows from it. Made by simulate.py.

Times of a step in steady state are taken from a window. It goes from the end of a batch in the middle of the run to
that of the last batch but one. The last one drains the pipeline and has no successor to share time with. In the window
a rank is in one of three states: *busy* (its actions take time), *waiting* (for a message or a sum over replicas) or
*idle* (it has nothing left to do). The bubble is 1 - busy / window. Runs of one or two batches have no steady state:
the window is the whole run.

The critical path goes back from the last action of the window. An action starts when the one before it on its rank
ends, or when the message that it waited for arrived. That was sent by an action of another rank, and so on. Its seconds
are those of computing on each rank, and of moving (transfer, its queue and latency) on each way. Others are those of
summing gradients over the replicas of a stage, and of waiting for a receive to be posted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.ir.schedule import RECEIVES, Action, Schedule

Floats = npt.NDArray[np.float64]


class SimulatedStep(NamedTuple):
    """An action of the period. It has the action as written for batch 1, its code in the simulation, its seconds, and
    its channel if it is a message. It may have to wait for a copy if it `waits`. In `exchanged` seconds of these values
    of collectives travel, and the rank waits."""

    action: Action
    code: int
    seconds: float
    channel: Any
    per_batch: bool
    waits: bool = False
    exchanged: float = 0.0


@dataclass(slots=True)
class RankTimeline:
    """One rank's run: its steps, their microbatches (batches), and when they ran."""

    steps: list[SimulatedStep]
    numbers: array[int]
    starts: array[float]
    finishes: array[float]

    def action(self, position: int, per_batch: int) -> Action:
        """Return the concrete action at a position."""
        step, number = self.steps[position], self.numbers[position]
        return step.action.shifted((number - step.action.mb) // (1 if step.per_batch else per_batch), per_batch)


@dataclass(slots=True)
class LinkUse:
    """The traffic of a link, one way, or of a NIC: bytes, and the seconds in which something moved."""

    name: str
    bandwidth: float
    nbytes: float = 0.0
    busy: float = 0.0


class Message(NamedTuple):
    """A message that a rank waited for. The action at `position` of rank `source` sent it. It is `ready` when the
    receive was posted and both knew, `begun` when its way was free."""

    source: int
    position: int
    sent: float
    posted: float
    ready: float
    begun: float
    arrived: float


class RankUse(NamedTuple):
    """The use that a rank makes of its time in the window, in seconds."""

    rank: int
    stage: int
    busy: float
    waiting: float
    idle: float
    bubble: float


@dataclass(frozen=True)
class Simulated:
    """A simulated run. `messages` are those that were waited for, by rank and position of the action that waited."""

    schedule: Schedule
    batches: int
    stage_of: Mapping[int, int]
    lines: Mapping[int, RankTimeline]
    links: tuple[LinkUse, ...]
    messages: Mapping[tuple[int, int], Message]

    @property
    def finish(self) -> float:
        """The end of the last action: all batches, from an empty pipeline to an empty pipeline."""
        return max((line.finishes[-1] for line in self.lines.values() if line.finishes), default=0.0)

    def timed(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """Yield the actions of a rank with start and finish."""
        line = self.lines[rank]
        for position, (start, finish) in enumerate(zip(line.starts, line.finishes, strict=True)):
            yield line.action(position, self.schedule.microbatches), start, finish

    @cached_property
    def ends(self) -> list[float]:
        """The times when the last rank is done with each batch."""
        ends: Floats = np.zeros(self.batches)
        for line in self.lines.values():
            numbers = np.frombuffer(line.numbers, dtype=np.int32) if line.numbers else np.zeros(0, np.int32)
            whole = np.fromiter((step.per_batch for step in line.steps), dtype=bool, count=len(line.steps))
            np.maximum.at(
                ends, np.where(whole, numbers, numbers // self.schedule.microbatches), np.frombuffer(line.finishes)
            )
        return [float(end) for end in ends]

    @cached_property
    def window(self) -> tuple[float, float, int]:
        """From, to, and the batches in between."""
        if self.batches < 3:
            return 0.0, self.finish, self.batches
        first, last = (self.batches - 1) // 2 - (self.batches == 3), self.batches - 2
        return self.ends[first], self.ends[last], last - first

    @property
    def step_seconds(self) -> float:
        """The seconds that one more batch costs in a long run."""
        start, end, count = self.window
        return (end - start) / count

    @cached_property
    def ranks(self) -> tuple[RankUse, ...]:
        start, end, _ = self.window
        uses = []
        for rank, line in self.lines.items():
            starts, finishes = np.frombuffer(line.starts), np.frombuffer(line.finishes)
            if not len(starts):
                uses.append(RankUse(rank, self.stage_of[rank], 0.0, 0.0, end - start, 1.0))
                continue
            busy = _within(starts, finishes, start, end)
            waiting = _within(np.concatenate([[0.0], finishes[:-1]]), starts, start, end)
            idle = max(0.0, end - start - busy - waiting)
            uses.append(
                RankUse(
                    rank, self.stage_of[rank], busy, waiting, idle, 1 - busy / (end - start) if end > start else 0.0
                )
            )
        return tuple(uses)

    @cached_property
    def critical_path(self) -> dict[str, float]:
        """Seconds of the window by the cause that the end of it had to wait for, largest first."""
        start, end, _ = self.window
        rank, position = min(
            (int(np.searchsorted(np.frombuffer(line.finishes), end)), rank)
            for rank, line in self.lines.items()
            if line.finishes and end in line.finishes
        )[::-1]
        seconds: dict[str, float] = {}
        until = end

        def spend(what: str, begin: float) -> None:
            nonlocal until
            if max(begin, start) < until:
                seconds[what] = seconds.get(what, 0.0) + until - max(begin, start)
            until = min(until, begin)

        known: set[tuple[int, int]] = set()
        while until > start and (rank, position) not in known:
            known.add((rank, position))
            line = self.lines[rank]
            spend(f"computing on rank {rank}", line.starts[position])
            message = self.messages.get((rank, position))
            if message is not None and (position == 0 or line.finishes[position - 1] < line.starts[position]):
                doing, way = self._moved(rank, position, message)
                spend(doing, message.begun)
                spend(f"queue of {way}", message.ready)
                if message.posted > message.sent and position:
                    # The receive was not posted in time: this rank was late itself.
                    spend(f"telling {way} of the receive", message.posted)
                    position = self._at(rank, message.posted, position)
                    continue
                spend(f"start of {way} put off", message.sent)
                rank, position = message.source, message.position
            elif position:
                position -= 1
            else:
                break
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def _moved(self, rank: int, position: int, message: Message) -> tuple[str, str]:
        """Say what a rank waited for: in words, and the way of it."""
        if self.lines[message.source].steps[message.position].action.item:
            return f"copying on rank {rank}", f"copies of rank {rank}"
        if self.lines[rank].steps[position].action.kind in RECEIVES:
            return f"moving {message.source}>{rank}", f"{message.source}>{rank}"
        return f"summing stage {self.stage_of[rank]}", f"the sum of stage {self.stage_of[rank]}"

    def _at(self, rank: int, time: float, before: int) -> int:
        """Return the last action of a rank, before a position, that had ended at a time."""
        finishes = self.lines[rank].finishes
        position = before - 1
        while position > 0 and finishes[position] > time:
            position -= 1
        return position


def _within(starts: Floats, finishes: Floats, first: float, last: float) -> float:
    """Return the seconds of the intervals that lie in a window."""
    return float(np.clip(np.minimum(finishes, last) - np.maximum(starts, first), 0.0, None).sum())
