"""A rank's program as a stream of actions with look-ahead, for a number of batches that may not be known yet.

The stream gives what `Schedule.expand` gives, lazily: an action is let through once it is known that its batch exists and dropped once it is
known that it does not, which is what drains the pipeline; the list after that of the last batch may still hold what belongs to it. A feed says
which batches exist; where requests are answered it counts single microbatches, each of which goes its way as soon as it is known. Beside each action stands the weight version that has no reader after it: the last action of the batch list that reads the
oldest version of that list, in every batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from math import gcd
from typing import NamedTuple, Protocol

import numpy as np

from ..ir.graph import Module
from ..ir.schedule import Action, Program, Schedule


class Feed(Protocol):
    """Batches of a run and their inputs. Batch numbers count from the beginning of training, not of the run."""

    def exists(self, batch: int) -> bool | None:
        """Whether a batch is part of the run; None when that is not known yet. Does not wait."""

    def wait(self, batch: int) -> None:
        """Wait until `exists` knows."""

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        """The samples of one input for one microbatch."""

    def finish(self, batch: int) -> None:
        """The batch's inputs are not needed any more."""


class Upcoming(NamedTuple):
    action: Action
    retires: int | None


def retiring(program: Program) -> dict[int, int]:
    """Where in the batch list a version has had its last reader: position -> that version, as written for batch 1."""
    readers = [
        (action.version, i) for i, action in enumerate(program.batch) if action.kind in ("F", "B", "W") and action.version is not None
    ]
    if not readers:
        return {}
    oldest = min(version for version, _ in readers)
    return {max(i for version, i in readers if version == oldest): oldest}


class ActionStream:
    """The program of one rank from batch `first` on. `peek` never waits; `pop` waits for the feed when it has to. `unit` is how many microbatches
    the feed counts as one: those of a batch unless told otherwise."""

    def __init__(self, schedule: Schedule, rank: int, first: int, feed: Feed, unit: int | None = None) -> None:
        self._per_batch = schedule.microbatches
        self._unit = unit or schedule.microbatches
        self._units = self._per_batch // self._unit
        self._first, self._feed = first, feed
        self._raw = self._unroll(schedule.ranks[rank], first)
        self._ahead: deque[Upcoming] = deque()
        self._next = next(self._raw, None)

    def pop(self) -> Upcoming | None:
        """The next action; None at the end of the run."""
        if not self._ahead:
            self._advance(1, wait=True)
        return self._ahead.popleft() if self._ahead else None

    def peek(self, number: int) -> Iterator[Action]:
        """Up to `number` actions that follow, as far as they are known."""
        self._advance(number, wait=False)
        for i in range(min(number, len(self._ahead))):
            yield self._ahead[i].action

    def _unroll(self, program: Program, first: int) -> Iterator[tuple[int, Upcoming]]:
        m, last_reader = self._per_batch, retiring(program)
        for action in program.start:
            yield first, Upcoming(action.shifted(first - 1, m), None)
        for t in count(first):
            for i, action in enumerate(program.batch):
                version = last_reader.get(i, -1) + t - 1 if i in last_reader else -1
                yield t, Upcoming(action.shifted(t - 1, m), version if version >= 0 else None)

    def _advance(self, number: int, *, wait: bool) -> None:
        while len(self._ahead) < number and self._next is not None:
            part, upcoming = self._next
            counted = upcoming.action.batch(self._unit)
            if counted >= self._first * self._units:
                known = self._feed.exists(counted)
                if known is None:
                    if not wait:
                        return
                    self._feed.wait(counted)
                    continue
                if known:
                    self._ahead.append(upcoming)
            if part > self._first and self._feed.exists((part - 1) * self._units) is False:
                self._next = None
                return
            self._next = next(self._raw, None)


def fed_inputs(module: Module, stage: int) -> tuple[str, ...]:
    """The module inputs that a stage takes from the data, rather than from another stage."""
    received = {value.name for edge in module.edges if edge.dst == stage for value in edge.values}
    names = {value.name for value in module.data_inputs} - received
    graphs = [module.stage_graph(stage, kind) for kind in ("F", "B", "W")]
    taken = {value.name for graph in graphs if graph is not None for value in graph.ins}
    sent = {value.name for edge in module.edges if edge.src == stage and edge.phase == "F" for value in edge.values}
    return tuple(value.name for value in module.data_inputs if value.name in names & (taken | sent))


def share_of(module: Module, rank: int) -> list[int]:
    """The microbatches of a batch that a rank runs."""
    assert module.schedule is not None
    m = module.schedule.microbatches
    return sorted({action.mb % m for action in module.schedule.ranks[rank].batch if action.kind == "F"})


def loss_stage(module: Module) -> int | None:
    """The stage whose forward graph computes the module's first output; None for a module without a backward graph."""
    if not any(module.stage_graph(stage.index, "B") for stage in module.stages):
        return None
    for stage in module.stages:
        graph = module.stage_graph(stage.index, "F")
        if graph is not None and module.outputs[0] in {v.name for v in graph.outs} - {v.name for v in graph.ins}:
            return stage.index
    return None


def microbatch_size(module: Module) -> int:
    """Samples per microbatch: what the first dimensions of all inputs are multiples of."""
    return gcd(*(value.type.dims[0] for value in module.inputs if value.type.rank)) or 1
