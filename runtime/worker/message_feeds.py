"""Feeds of inputs that arrive in messages: batches of a training, microbatches of requests. In order, then End.

In: a function that receives messages, and the first number. Out: feeds of the executor (feeds.py), whose batches may be
run as soon as they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from penstock.ir.batch_shares import share_of
from penstock.ir.graph import Module
from penstock.runtime.data.batches import BatchCuts
from penstock.runtime.messages.control import Arrays, Batch, End, Message, RequestBatch
from penstock.runtime.messages.status import Status
from penstock.support.errors import VerifyError

from .feeds import InputCuts
from .stage_graphs import ONE_SIZE

# Microbatches whose size is remembered, which are many more than are ever under way: two for each rank, and two.
_REMEMBERED = 1 << 14

# (message, its arrays); None when nothing is there and the caller did not want to wait
Receive = Callable[[bool], tuple[Message, Arrays] | None]


class _MessageFeed:
    """A feed that counts the messages that arrived, from `first` on."""

    def __init__(self, first: int, receive: Receive) -> None:
        self._receive = receive
        self._held: dict[int, Arrays] = {}
        self._next, self._ended = first, False

    def exists(self, unit: int) -> bool | None:
        while unit >= self._next and not self._ended:
            message = self._receive(False)
            if message is None:
                return None
            self._take(*message)
        return unit < self._next

    def wait(self, unit: int) -> None:
        while unit >= self._next and not self._ended:
            message = self._receive(True)
            assert message is not None
            self._take(*message)

    def finish(self, unit: int) -> None:
        self._held.pop(unit, None)

    def _take(self, message: Message, arrays: Arrays) -> None:
        if isinstance(message, End):
            self._ended = True
        elif self._unit_of(message) == self._next:
            if arrays:  # none for a microbatch that another rank of the stage runs
                self._held[self._next] = arrays
            self._next += 1
        else:
            raise VerifyError(f"command {type(message).__name__} is out of place among {self._words}")

    # The messages in words, and the number of the one that a message brings.
    _words: str

    def _unit_of(self, message: Message) -> int | None:
        raise NotImplementedError


class BatchFeed(_MessageFeed):
    """Batches as the launcher sends them: the microbatches that this rank runs, whole."""

    _words = "batches"

    def __init__(self, module: Module, rank: int, first: int, receive: Receive) -> None:
        super().__init__(first, receive)
        assert module.schedule is not None
        self._per_batch = module.schedule.microbatches
        self._place = {index: i for i, index in enumerate(share_of(module, rank))}
        self._batches, self._cuts = BatchCuts(module), InputCuts(module, rank)

    def _unit_of(self, message: Message) -> int | None:
        return message.index if isinstance(message, Batch) else None

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        batch, index = divmod(mb, self._per_batch)
        return self._cuts(name, self._batches.part(name, self._held[batch][name], self._place[index]))


class RequestFeed(_MessageFeed):
    """Microbatches of requests. `cuts` are the slices of inputs of every size of the model, by rung."""

    _words = "requests"

    def __init__(self, first: int, receive: Receive, status: Status, cuts: Mapping[str, InputCuts]) -> None:
        super().__init__(first, receive)
        self._status, self._cuts = status, cuts
        self._rungs: dict[int, str] = {}

    def rung(self, mb: int) -> str:
        """Return the size of the model that computes a microbatch: also after its inputs were let go of, as messages
        of its results may be on their way."""
        return self._rungs[mb]

    def wait(self, unit: int) -> None:
        # Requests may be a long time coming: the last action must not look like one that hangs.
        self._status.show("waiting for requests")
        super().wait(unit)

    def _unit_of(self, message: Message) -> int | None:
        if not isinstance(message, RequestBatch):
            return None
        if message.rung not in self._cuts:
            raise VerifyError(f"microbatch {message.mb} has size {message.rung!r}, which the bundle does not have")
        if message.rung != ONE_SIZE:
            self._rungs[message.mb] = message.rung
            self._rungs.pop(message.mb - _REMEMBERED, None)
        return message.mb

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        return self._cuts[self._rungs.get(mb, ONE_SIZE)](name, self._held[mb][name])
