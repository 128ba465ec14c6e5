"""A watch over transfers that devices wait for, while no thread does: messages, sums and collectives of NCCL.

In: works of torch, with the tensors that they use, and the error for a peer that is lost. Out: that error, of the first
work that fails or takes longer than the timeout.

A rank hands such a work to its device and goes on. Where the peer is gone, the device waits without end, and so does
the rank where it next needs a result: in a call that no exception ends. So the error ends the process, once it was
reported (`RankGroup.lost`). The deadline of torch's own watchdog, which aborts a process without a word, is later
(group/group.py). A work holds its tensors until it is done, so no memory is used again before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from penstock.support.errors import PenstockError

# Seconds between two looks at the works that are under way.
_LOOK = 0.005


class DeviceWork(Protocol):
    """A transfer that a device does, such as a work of torch."""

    def wait(self) -> object:
        """Let the device wait for it, behind what it does now."""

    def is_completed(self) -> bool:
        """Return whether it is done, or has failed."""

    def exception(self) -> BaseException | None:
        """Return why it failed, if it did."""


class _Watched(NamedTuple):
    """A work, its tensors, when it is overdue, and the error that an exception of it stands for."""

    work: DeviceWork
    held: tuple[torch.Tensor, ...]
    deadline: float
    error_of: Callable[[Exception], PenstockError]


class Overdue:
    """The works of one rank that are under way. `lost` is called once, by a thread, with the error of one."""

    def __init__(self, seconds: float, lost: Callable[[PenstockError], None]) -> None:
        self._seconds, self._lost = seconds, lost
        self._queue: queue.SimpleQueue[_Watched | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(
        self,
        works: Sequence[DeviceWork],
        held: Sequence[torch.Tensor],
        error_of: Callable[[Exception], PenstockError],
    ) -> None:
        """Watch works that have begun, with tensors that they use."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="overdue", daemon=True)
            self._thread.start()
        deadline = time.monotonic() + self._seconds
        for work in works:
            self._queue.put(_Watched(work, tuple(held), deadline, error_of))

    def settle(self) -> None:
        """Return when all works are done that have begun."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done)
            done.wait()  # bounded: works that take longer end the process

    def _run(self) -> None:
        under_way: list[_Watched] = []
        waiting: list[threading.Event] = []
        while True:
            self._take(under_way, waiting)
            try:
                under_way = [watched for watched in under_way if not _is_done(watched)]
            except _Lost as lost:
                self._lost(lost.error)
                return
            if not under_way:
                while waiting:
                    waiting.pop().set()

    def _take(self, under_way: list[_Watched], waiting: list[threading.Event]) -> None:
        """Add what has come since the last look; wait for it if there is no work under way."""
        if under_way:
            time.sleep(_LOOK)
            if self._queue.empty():
                return
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                waiting.append(item)
            else:
                under_way.append(item)
            if self._queue.empty():
                return


class _Lost(Exception):
    """The end of the watch."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(error.what)
        self.error = error


def _is_done(watched: _Watched) -> bool:
    """Return whether a work is done; _Lost if it failed or is overdue."""
    error: BaseException | None
    try:
        done = watched.work.is_completed()
        error = watched.work.exception() if done else None
    except RuntimeError as failure:
        done, error = True, failure
    if not done and time.monotonic() > watched.deadline:
        error = TimeoutError("timed out")
    if error is None:
        return done
    reason = error if isinstance(error, Exception) else RuntimeError(str(error))
    raise _Lost(watched.error_of(reason)) from error
