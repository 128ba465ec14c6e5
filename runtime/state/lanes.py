"""The lanes of a rank: what copies items to and from their homes, one copy after the other in each direction, while the
rank goes on.

In: a device, and copies as functions. Out: for each a `Copying` (homes.py), which is waited for where the item is
needed.

On a CPU a lane is a thread. An error of it is raised where the copy is waited for. So is one where nothing moved for a
whole time limit: the threads end with the process, even where a disk never answers. On a GPU a lane is a stream. A copy
begins when the device has done what it was told before, and what it is told after a wait stands behind the copy. The
rank itself waits for neither. Times of such copies are those of events, on the host's clock.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from penstock.ir.action_kinds import COPY_IN, COPY_OUT
from penstock.ir.cluster.spaces import Space
from penstock.ir.memory.items import Image
from penstock.ir.memory.saved_sets import SavedSet
from penstock.runtime.messages.ledger import CopyTimes
from penstock.support.errors import PenstockError
from penstock.support.words import shown_bytes

from .home_files import FileHome, memory_for
from .homes import Copying, Home, Lanes, Moved
from .pinned import HostHome


def lanes_of(device: torch.device, timeout: float) -> Lanes:
    """Return the lanes of a rank with a device. `timeout` are the seconds without any progress after which a copy of a
    CPU is given up."""
    return StreamLanes(device) if device.type == "cuda" else ThreadLanes(timeout)


_Entry = TypeVar("_Entry")


class _Record(Generic[_Entry]):
    """The copies of lanes, where these are asked for. Those of evaluations are no actions of the program, and have no
    text."""

    def __init__(self) -> None:
        self._entries: list[_Entry] | None = None

    @property
    def is_asked_for(self) -> bool:
        return self._entries is not None

    def begin(self) -> None:
        self._entries = []

    def add(self, text: str, entry: _Entry) -> None:
        if self._entries is not None and text:
            self._entries.append(entry)

    def taken(self) -> list[_Entry]:
        """Return the entries since the last call."""
        entries = self._entries or []
        self._entries = None if self._entries is None else []
        return entries


class _Done(NamedTuple):
    """A copy that ended: the times of its begin and its end, and the bytes that it moved."""

    begun: float
    ended: float
    nbytes: int


# ------------------------------------------------------------------------------------------------ CPUs


class _LaneThread:
    """A thread that does one copy after the other, and when it last moved something."""

    def __init__(self, name: str) -> None:
        self._name, self._work = name, queue.SimpleQueue[Callable[[], None] | None]()
        self._thread: threading.Thread | None = None
        self.moved_at = 0.0

    def moved(self) -> None:
        self.moved_at = time.monotonic()

    def submit(self, copy: Callable[[], _Done]) -> Future[_Done]:
        """Have a copy done; the first one begins the thread."""
        future: Future[_Done] = Future()

        def work() -> None:
            self.moved()
            try:
                future.set_result(copy())
            except BaseException as error:  # it is raised where the copy is waited for
                future.set_exception(error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)
        return future

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # It has the memory of the copy.
            del work

    def close(self) -> None:
        """End the thread behind what it has to do."""
        self._work.put(None)


class ThreadLanes:
    """The lanes of a rank on a CPU. Its homes are files."""

    def __init__(self, timeout: float = 300.0) -> None:
        self._threads = {COPY_IN: _LaneThread("copies in"), COPY_OUT: _LaneThread("copies out")}
        # Threads end when nobody can ask them for a copy any more.
        for thread in self._threads.values():
            weakref.finalize(self, thread.close).atexit = False
        self.timeout, self.record = timeout, _Record[CopyTimes]()

    def open(self, space: Space, nbytes: int) -> Home:
        return FileHome(space, nbytes)

    def memory(self, nbytes: int, *, zeros: bool = False) -> torch.Tensor:
        # The system gives zeros.
        return memory_for(nbytes)

    def pieces(self, nbytes: int) -> torch.Tensor:
        return memory_for(nbytes)

    def begin(self, text: str, kind: str, image: Image | SavedSet, copy: Callable[[Moved], None]) -> Copying:
        thread = self._threads[kind]

        def run() -> _Done:
            begun, pieces = time.monotonic(), list[int]()

            def moved(nbytes: int) -> None:
                pieces.append(nbytes)
                thread.moved()

            copy(moved)
            return _Done(begun, time.monotonic(), sum(pieces))

        return _ThreadCopying(self, text, "from" if kind == COPY_IN else "to", image, thread, thread.submit(run))

    def trace(self) -> None:
        self.record.begin()

    def copied(self) -> tuple[CopyTimes, ...]:
        return tuple(self.record.taken())


@dataclass(frozen=True)
class _ThreadCopying:
    """A copy that a thread does, and the direction in words."""

    lanes: ThreadLanes
    text: str
    direction: str
    image: Image | SavedSet
    thread: _LaneThread
    done: Future[_Done]

    def wait(self) -> None:
        since = time.monotonic()
        begun, ended, nbytes = self._result()
        self.lanes.record.add(self.text, CopyTimes(self.text, nbytes, begun, ended, max(0.0, ended - since)))

    def settle(self) -> None:
        self._result()

    def _result(self) -> _Done:
        """Return what the copy did; an error where nothing of its lane moves any more."""
        since, timeout = time.monotonic(), self.lanes.timeout
        while True:
            left = max(self.thread.moved_at, since) + timeout - time.monotonic()
            with suppress(TimeoutError):
                return self.done.result(max(0.001, left))
            # The copy itself may raise such an error, too.
            if self.done.done():
                return self.done.result()
            if left <= 0:
                raise PenstockError(
                    f"copying {shown_bytes(self.image.nbytes)} {self.direction} memory space {self.image.space} "
                    f"has not moved on for {timeout:g} s",
                    where=self.text,
                    hint="the disk of the space does not answer; --timeout allows more",
                )


# ------------------------------------------------------------------------------------------------ GPUs


class _Origin(NamedTuple):
    """An event of a run that the host waited for, and its time on the host's monotonic clock."""

    event: torch.cuda.Event
    at: float

    def time_of(self, event: torch.cuda.Event) -> float:
        """Return the time of a later event that the device has got to."""
        return self.at + _seconds(self.event, event)


class _Timed(NamedTuple):
    """A copy by its events: those around it, and those around the wait of the computations for it."""

    text: str
    nbytes: int
    begun: torch.cuda.Event
    ended: torch.cuda.Event
    waiting: torch.cuda.Event
    went_on: torch.cuda.Event


class StreamLanes:
    """The lanes of a rank on a GPU. Its homes are pinned memory of the host. Memory that an item has on the device goes
    back in the order of the computations, as all that they are told after a wait stands behind the copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {
            kind: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for kind in (COPY_IN, COPY_OUT)
        }
        self.record = _Record[_Timed]()
        self._origin: _Origin | None = None

    def open(self, space: Space, nbytes: int) -> Home:
        return HostHome(space, nbytes, self.device)

    def memory(self, nbytes: int, *, zeros: bool = False) -> torch.Tensor:
        return (torch.zeros if zeros else torch.empty)(nbytes, dtype=torch.uint8, device=self.device)

    def pieces(self, nbytes: int) -> torch.Tensor:
        # Values go to their places by themselves.
        return torch.empty(0, dtype=torch.uint8)

    def begin(self, text: str, kind: str, image: Image | SavedSet, copy: Callable[[Moved], None]) -> Copying:
        stream, moved, behind = self._streams[kind], list[int](), self.mark()
        if self.record.is_asked_for and self._origin is None:
            behind.synchronize()
            self._origin = _Origin(behind, time.monotonic())
        stream.wait_event(behind)
        with torch.cuda.stream(stream):
            begun = self.mark()
            copy(moved.append)
            return _StreamCopying(self, text, sum(moved), begun, self.mark())

    def mark(self) -> torch.cuda.Event:
        """Return an event behind what the current stream was told, with a time where copies are written down."""
        event = torch.cuda.Event(enable_timing=self.record.is_asked_for, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def trace(self) -> None:
        self.record.begin()

    def copied(self) -> tuple[CopyTimes, ...]:
        timed, origin = self.record.taken(), self._origin
        self._origin = None
        if origin is None:
            return ()
        return tuple(
            CopyTimes(
                copy.text,
                copy.nbytes,
                origin.time_of(copy.begun),
                origin.time_of(copy.ended),
                _seconds(copy.waiting, copy.went_on),
            )
            for copy in timed
        )


@dataclass(frozen=True)
class _StreamCopying:
    """A copy that a stream does, between two events."""

    lanes: StreamLanes
    text: str
    nbytes: int
    begun: torch.cuda.Event
    ended: torch.cuda.Event

    def wait(self) -> None:
        waiting = self.lanes.mark()
        torch.cuda.current_stream(self.lanes.device).wait_event(self.ended)
        timed = _Timed(self.text, self.nbytes, self.begun, self.ended, waiting, self.lanes.mark())
        self.lanes.record.add(self.text, timed)

    def settle(self) -> None:
        self.ended.synchronize()


def _seconds(earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
    return float(earlier.elapsed_time(later)) / 1e3
