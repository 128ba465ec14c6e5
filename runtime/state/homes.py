"""Homes: memory in other spaces, where a rank's items lie between their uses, and the threads that copy.

In: the image of an item (ir/memory/items.py) and a space of the cluster. Out: the item's variables as tensors while it
is on the device.

A home is a `Home`, which moves whole images; the only kind so far is a file (home_files.py). A rank has one thread for
each direction. `bring` takes memory and begins to read, `store` begins to write, and `let_go` gives the memory back
once that is done. Nothing but these waits holds the program up. An error of a thread is raised where it is waited for.
So is one where nothing moved for a whole time limit: the threads end with the process, even where a disk never answers.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import torch

from penstock.ir.action_kinds import COPY_IN, COPY_OUT
from penstock.ir.cluster.cluster import Space
from penstock.ir.memory.items import Image
from penstock.ir.memory.saved_sets import SavedSet
from penstock.ir.types import LONG_NAMES, TensorType
from penstock.runtime.messages.ledger import CopyTimes
from penstock.support.errors import PenstockError, VerifyError
from penstock.support.words import shown_bytes

from .home_files import FileHome, memory_for


class Home(Protocol):
    """Memory for an image in another space. Reads and writes move all of it, and call `moved` as they get on, with the
    bytes of the image that they moved since the last call."""

    def read(self, memory: memoryview, moved: Callable[[int], None] = ...) -> None: ...
    def write(self, memory: memoryview, moved: Callable[[int], None] = ...) -> None: ...

    def write_pieces(
        self, memory: memoryview, fill: Callable[[int, int], None], moved: Callable[[int], None] = ...
    ) -> None:
        """Write an image that is never whole: `fill` puts the bytes from a place on into the memory, so many."""

    def mapped(self) -> mmap.mmap:
        """Return what is at home as memory, without a copy."""

    def copied(self) -> Home:
        """Return a home with the same contents, which no later write changes."""


def open_home(space: Space, nbytes: int) -> Home:
    """Return a home for so many bytes in a space."""
    return FileHome(space, nbytes)


class CopyDone(NamedTuple):
    """A copy that ended: the times of its begin and its end, and the bytes that it moved."""

    begun: float
    ended: float
    nbytes: int


class Copying(NamedTuple):
    """A copy that goes on: its name, its direction, and what it did once that is known."""

    text: str
    kind: str
    done: Future[CopyDone]


class _Lane:
    """A thread that does one copy after the other, and when it last moved something."""

    def __init__(self, name: str) -> None:
        self._name, self._work = name, queue.SimpleQueue[Callable[[], None] | None]()
        self._thread: threading.Thread | None = None
        self.moved_at = 0.0

    def moved(self) -> None:
        self.moved_at = time.monotonic()

    def submit(self, copy: Callable[[], CopyDone]) -> Future[CopyDone]:
        """Have a copy done; the first one begins the thread."""
        future: Future[CopyDone] = Future()

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


class Lanes:
    """The threads of a rank that copy, one for each direction, and what they did where a run is traced. `timeout` are
    the seconds without any progress after which a copy is given up."""

    def __init__(self, timeout: float = 300.0) -> None:
        self._lanes = {COPY_IN: _Lane("copies in"), COPY_OUT: _Lane("copies out")}
        # Threads end when nobody can ask them for a copy any more.
        for lane in self._lanes.values():
            weakref.finalize(self, lane.close).atexit = False
        self._timeout = timeout
        self.done: list[CopyTimes] | None = None

    def begin(
        self, text: str, kind: str, copy: Callable[[memoryview, Callable[[int], None]], None], memory: mmap.mmap
    ) -> Copying:
        """Begin a copy."""
        lane = self._lanes[kind]

        def run() -> CopyDone:
            begun, pieces = time.monotonic(), list[int]()

            def moved(nbytes: int) -> None:
                pieces.append(nbytes)
                lane.moved()

            with memoryview(memory) as view:
                copy(view, moved)
            return CopyDone(begun, time.monotonic(), sum(pieces))

        return Copying(text, kind, lane.submit(run))

    def wait(self, copying: Copying, image: Image | SavedSet) -> None:
        """Wait for a copy, and write down its times and the bytes that it moved."""
        began_to_wait = time.monotonic()
        begun, ended, nbytes = self.result(copying, image)
        # Copies of evaluations are no actions of the program.
        if self.done is not None and copying.text:
            self.done.append(CopyTimes(copying.text, nbytes, begun, ended, max(0.0, ended - began_to_wait)))

    def result(self, copying: Copying, image: Image | SavedSet) -> CopyDone:
        """Return what a copy did; an error where nothing of its lane moves any more."""
        lane, since = self._lanes[copying.kind], time.monotonic()
        while True:
            left = max(lane.moved_at, since) + self._timeout - time.monotonic()
            with suppress(TimeoutError):
                return copying.done.result(max(0.001, left))
            # The copy itself may raise such an error, too.
            if copying.done.done():
                return copying.done.result()
            if left <= 0:
                raise PenstockError(
                    f"copying {shown_bytes(image.nbytes)} {'from' if copying.kind == COPY_IN else 'to'} memory space "
                    f"{image.space} has not moved on for {self._timeout:g} s",
                    where=copying.text,
                    hint="the disk of the space does not answer; --timeout allows more",
                )


class HomedItem:
    """An item of a stage: its variables at home, and on the device between `bring` and `let_go`. Without a home they
    are zero each time they come."""

    def __init__(self, image: Image, home: Home | None, lanes: Lanes) -> None:
        self.image, self._home, self._lanes = image, home, lanes
        self._memory: mmap.mmap | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._coming: Copying | None = None
        self._leaving: Copying | None = None

    @property
    def is_here(self) -> bool:
        """Return whether it has memory on the device."""
        return self._memory is not None

    def bring(self, text: str = "", *, filled: bool = True) -> None:
        """Take memory, and begin to copy what is at home into it, if it is to be `filled`."""
        if self._memory is not None:
            raise VerifyError("is on the device already", where=self._where)
        self._memory = memory_for(self.image.nbytes)
        self._tensors = self._cut(self._memory)
        if filled and self._home is not None:
            self._coming = self._lanes.begin(text, COPY_IN, self._home.read, self._memory)

    def wait(self) -> None:
        """Wait until it is on the device. A copy that failed is an error here each time."""
        if self._coming is not None:
            self._lanes.wait(self._coming, self.image)
            self._coming = None

    def store(self, text: str = "") -> None:
        """Begin to copy it to its home."""
        self.wait()
        if self._memory is None:
            raise VerifyError("is to be copied out, and is not on the device", where=self._where)
        self._await_home()
        if self._home is None:
            raise VerifyError("is to be copied out, and has no copy at home", where=self._where)
        self._leaving = self._lanes.begin(text, COPY_OUT, self._home.write, self._memory)

    def settle(self) -> None:
        """Wait until what was copied out is at home; an error of the copy is raised here."""
        if self._leaving is not None:
            self._lanes.result(self._leaving, self.image)

    def let_go(self) -> None:
        """Give its memory back, once it is at home."""
        self.wait()
        self._await_home()
        # The memory goes with the last tensor of it.
        self._tensors, self._memory = {}, None

    def _await_home(self) -> None:
        """Wait for the copy to its home. One that failed is kept: what is at home then may be torn."""
        if self._leaving is not None:
            self._lanes.wait(self._leaving, self.image)
            self._leaving = None

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Let the item be filled on the device for the first time."""
        self.bring(filled=False)
        yield
        if self._home is not None:
            self.store()
        self.let_go()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a variable on the device."""
        if name not in self._tensors:
            raise VerifyError(f"is asked for on the device, and is at home in {self.image.space}", where=f"@{name}")
        return self._tensors[name]

    def newest(self, name: str) -> torch.Tensor:
        """Return the newest contents of a variable, on the device or at home."""
        if self._coming is not None:
            self._lanes.result(self._coming, self.image)
        return self.tensor(name) if self._tensors or self._home is None else self._cut(self._home.mapped())[name]

    def apart(self) -> dict[str, torch.Tensor]:
        """Return all variables as they are at home, in a copy that nothing changes. What is on its way there is waited
        for: a run ends with it."""
        self.settle()
        return {} if self._home is None else self._cut(self._home.copied().mapped())

    def _cut(self, memory: mmap.mmap) -> dict[str, torch.Tensor]:
        types = {name: var.type for name, var in self.image.variables.items()}
        return cut(memory, self.image.nbytes, types, self.image.places)

    @property
    def _where(self) -> str:
        return f"@{min(self.image.variables)} and {len(self.image.variables) - 1} more"


def cut(
    memory: mmap.mmap, nbytes: int, types: Mapping[str, TensorType], places: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the tensors that lie one behind the other in memory, by their names."""
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    return {
        name: whole[places[name] : places[name] + t.nbytes].view(getattr(torch, LONG_NAMES[t.dtype])).view(t.dims)
        for name, t in types.items()
    }
