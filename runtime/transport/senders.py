"""Messages after their sends have begun: threads that hold their tensors until the peer has them, and that begin sends
late.

In: works of gloo with the tensors that they read. Out: a list of sends that failed, which the transport raises at
the next occasion.

gloo does not say whether a work is done, only waits for it; so one thread per channel waits, in order. To wake it
takes longer than to send a small message. Small tensors may stay a little longer: they are handed over several at a
time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch

from penstock.ir.memory.walk import BYTES_TOGETHER, SENDS_TOGETHER
from penstock.ir.schedule import Action


class BackgroundWork(Protocol):
    """A transfer that goes on in the background, such as a work of torch."""

    def wait(self, timeout: timedelta, /) -> object:
        """Return when it is done; raise one of LOST when it failed, or took longer."""


# Works to wait for, each with the tensor that may not be let go of before.
Works = list[tuple[BackgroundWork, torch.Tensor]]
# Errors of a peer that does not answer or is gone: those of gloo, and those of the system.
LOST = (RuntimeError, OSError)
Failures = list[tuple[Action, Exception]]


class Outgoing(Protocol):
    """The place where the messages of a channel leave this rank."""

    def prepare(self, mb: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return what is to be sent of the values of a microbatch, unchanged from here on."""

    def start(self, mb: int, prepared: Sequence[torch.Tensor]) -> Works:
        """Start to send it; works that are not done when this returns are to be waited for, in order."""


class Sender(threading.Thread):
    """The sends of one channel, in order, with their tensors, which are held until the peer has them. `sent` is called
    for each that it lets go of."""

    def __init__(
        self,
        timeout: timedelta,
        failed: Failures,
        sent: Callable[[Action, torch.Tensor], None] | None = None,
        few: int = SENDS_TOGETHER,
    ) -> None:
        super().__init__(name="sender", daemon=True)
        self._timeout, self._failed, self._sent, self._few = timeout, failed, sent, few
        self._queue: queue.SimpleQueue[list[tuple[Action, Works]] | threading.Event] = queue.SimpleQueue()
        self._kept: list[tuple[Action, Works]] = []
        self._bytes = 0
        self.start()

    def hold(self, action: Action, works: Works) -> None:
        """Keep the memory of a send that has begun. Called by one thread at a time."""
        self._kept.append((action, works))
        for _, tensor in works:
            self._bytes += tensor.nbytes
        if self._bytes >= BYTES_TOGETHER or len(self._kept) >= self._few:
            self._hand_over()

    def tell(self, event: threading.Event) -> None:
        """Set the event when everything before is with the peer, or has failed."""
        self._hand_over()
        self._queue.put(event)

    def _hand_over(self) -> None:
        if self._kept:
            self._queue.put(self._kept)
            self._kept, self._bytes = [], 0

    def run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            item.reverse()
            while item:
                action, works = item.pop()
                try:
                    # The loop has no variable for the work: it would keep the last tensor while the queue is empty.
                    while works:
                        works[0][0].wait(self._timeout)
                        if self._sent is not None:
                            self._sent(action, works[0][1])
                        del works[0]
                except LOST as error:
                    self._failed.append((action, error))
                # After an error, these must not keep tensors either.
                del action, works
            del item


class LateSender(threading.Thread):
    """A delay of the sends of one channel. It starts them some time after they were handed over, in order, and gives
    them to the channel's sender."""

    def __init__(self, latency: float, sender: Sender, failed: Failures) -> None:
        super().__init__(name="link", daemon=True)
        self._latency, self._sender, self._failed = latency, sender, failed
        self._queue: queue.SimpleQueue[tuple[float, Action, Callable[[], Works]] | threading.Event] = (
            queue.SimpleQueue()
        )
        self.start()

    def begin(self, action: Action, start: Callable[[], Works]) -> None:
        self._queue.put((time.monotonic(), action, start))

    def tell(self, event: threading.Event) -> None:
        """Set the event as the sender does."""
        self._queue.put(event)

    def run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                self._sender.tell(item)
                continue
            handed, action, start = item
            time.sleep(max(0.0, handed + self._latency - time.monotonic()))
            try:
                self._sender.hold(action, start())
            except LOST as error:
                self._failed.append((action, error))
            # Hold no tensors while there is nothing to do, as in the sender.
            del item, start
