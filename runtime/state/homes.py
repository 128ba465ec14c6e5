"""Homes: memory in other spaces, where a rank's items lie between their uses, and the threads that copy.

In: the image of an item (ir/memory/items.py) and a space of the cluster. Out: the item's variables as tensors while it
is on the device.

A home is a `Home`, which moves whole images. `FileHome` is a file without a name in the folder of the space: it goes
with the process, however that ends. It is read and written in pieces of 1 MiB, and what is in the system's cache of it
is dropped behind, so that it takes memory nowhere. Its room is reserved at once: a disk that is full says so before
training begins.

A rank has one thread for each direction. `bring` takes memory and begins to read, `store` begins to write, and
`let_go` gives the memory back once that is done. Nothing but these waits holds the program up. An error of a thread is
raised where it is waited for.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import torch

from penstock.ir.action_kinds import COPY_IN, COPY_OUT
from penstock.ir.cluster.cluster import Space
from penstock.ir.memory.items import Image
from penstock.ir.types import LONG_NAMES
from penstock.runtime.messages.ledger import CopyTimes
from penstock.support.errors import PenstockError, VerifyError
from penstock.support.words import shown_bytes

_PIECE = 1 << 20
# What is written is flushed after so many bytes: until then the system holds it in memory.
_FLUSHED = 32 << 20


class Home(Protocol):
    """Memory for an image in another space. Reads and writes move all of it."""

    def read(self, memory: memoryview) -> None: ...
    def write(self, memory: memoryview) -> None: ...

    def mapped(self) -> mmap.mmap:
        """Return what is at home as memory, without a copy."""

    def copied(self) -> Home:
        """Return a home with the same contents, which no later write changes."""


class FileHome:
    """A home in a file of a folder; of the folder for temporary files if none is named."""

    def __init__(self, space: Space, nbytes: int) -> None:
        self._space, self._nbytes = space, nbytes
        self._folder = space.path or tempfile.gettempdir()
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            os.posix_fallocate(self._file, 0, nbytes)
        except OSError as error:
            raise self._error("make room in", error) from error

    def read(self, memory: memoryview) -> None:
        try:
            for start in range(0, self._nbytes, _PIECE):
                self._fill(memory[start : start + _PIECE], start)
                self._forget(start, _PIECE)
        except OSError as error:
            raise self._error("read from", error) from error

    def write(self, memory: memoryview) -> None:
        unflushed = 0
        try:
            for start in range(0, self._nbytes, _PIECE):
                piece = memory[start : start + _PIECE]
                written = 0
                while written < len(piece):
                    written += os.pwrite(self._file, piece[written:], start + written)
                if start + _PIECE - unflushed >= _FLUSHED or start + _PIECE >= self._nbytes:
                    os.fdatasync(self._file)
                    self._forget(unflushed, start + _PIECE - unflushed)
                    unflushed = start + _PIECE
        except OSError as error:
            raise self._error("write to", error) from error

    def mapped(self) -> mmap.mmap:
        return mmap.mmap(self._file, self._nbytes)

    def copied(self) -> FileHome:
        other, piece = FileHome(self._space, self._nbytes), bytearray(min(_PIECE, self._nbytes))
        try:
            for start in range(0, self._nbytes, _PIECE):
                view = memoryview(piece)[: self._nbytes - start]
                self._fill(view, start)
                done = 0
                while done < len(view):
                    done += os.pwrite(other._file, view[done:], start + done)
        except OSError as error:
            raise self._error("copy", error) from error
        return other

    def _fill(self, piece: memoryview, start: int) -> None:
        read = 0
        while read < len(piece):
            count = os.preadv(self._file, [piece[read:]], start + read)
            if not count:
                raise OSError(f"the file ends at {start + read} bytes")
            read += count

    def _forget(self, start: int, nbytes: int) -> None:
        os.posix_fadvise(self._file, start, nbytes, os.POSIX_FADV_DONTNEED)

    def _error(self, what: str, error: OSError) -> PenstockError:
        return PenstockError(
            f"cannot {what} memory space {self._space.name}, {shown_bytes(self._nbytes)}: {error.strerror or error}",
            where=self._folder,
            hint="`path` of the [[space]] in the cluster file, or --spill, names another folder",
        )


def open_home(space: Space, nbytes: int) -> Home:
    """Return a home for so many bytes in a space."""
    return FileHome(space, nbytes)


class _Copying(NamedTuple):
    text: str
    times: Future[tuple[float, float]]


class Lanes:
    """The threads of a rank that copy, one for each direction, and what they did where a run is traced."""

    def __init__(self) -> None:
        self._threads = {
            kind: ThreadPoolExecutor(1, thread_name_prefix=name)
            for kind, name in ((COPY_IN, "copies in"), (COPY_OUT, "copies out"))
        }
        self.done: list[CopyTimes] | None = None

    def begin(self, kind: str, copy: Callable[[memoryview], None], memory: mmap.mmap) -> Future[tuple[float, float]]:
        """Begin a copy; its result are the times of its begin and its end."""

        def run() -> tuple[float, float]:
            begun = time.monotonic()
            with memoryview(memory) as view:
                copy(view)
            return begun, time.monotonic()

        return self._threads[kind].submit(run)

    def wait(self, copying: _Copying, nbytes: int) -> None:
        """Wait for a copy, and write down its times."""
        began_to_wait = time.monotonic()
        begun, ended = copying.times.result()
        if self.done is not None:
            self.done.append(CopyTimes(copying.text, nbytes, begun, ended, max(0.0, ended - began_to_wait)))


class HomedItem:
    """An item of a stage: its variables at home, and on the device between `bring` and `let_go`."""

    def __init__(self, image: Image, home: Home, lanes: Lanes) -> None:
        self.image, self._home, self._lanes = image, home, lanes
        self._memory: mmap.mmap | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._coming: _Copying | None = None
        self._leaving: _Copying | None = None

    @property
    def is_here(self) -> bool:
        """Return whether it has memory on the device."""
        return self._memory is not None

    def bring(self, text: str = "", *, filled: bool = True) -> None:
        """Take memory, and begin to copy what is at home into it, if it is to be `filled`."""
        if self._memory is not None:
            raise VerifyError("is on the device already", where=self._where)
        self._memory = mmap.mmap(-1, self.image.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Memory is new each time, and large pages come faster. A system that has none refuses the advice.
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._tensors = self._cut(self._memory)
        if filled:
            self._coming = _Copying(text, self._lanes.begin(COPY_IN, self._home.read, self._memory))

    def wait(self) -> None:
        """Wait until it is on the device."""
        coming, self._coming = self._coming, None
        if coming is not None:
            self._lanes.wait(coming, self.image.nbytes)

    def store(self, text: str = "") -> None:
        """Begin to copy it to its home."""
        self.wait()
        if self._memory is None:
            raise VerifyError("is to be copied out, and is not on the device", where=self._where)
        self._leaving = _Copying(text, self._lanes.begin(COPY_OUT, self._home.write, self._memory))

    def settle(self) -> None:
        """Wait until what was copied out is at home; an error of the copy is raised here."""
        if self._leaving is not None:
            self._leaving.times.result()

    def let_go(self) -> None:
        """Give its memory back, once it is at home."""
        self.wait()
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self._lanes.wait(leaving, self.image.nbytes)
        # The memory goes with the last tensor of it.
        self._tensors, self._memory = {}, None

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Let the item be filled on the device for the first time."""
        self.bring(filled=False)
        yield
        self.store()
        self.let_go()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a variable on the device."""
        if name not in self._tensors:
            raise VerifyError(f"is asked for on the device, and is at home in {self.image.space}", where=f"@{name}")
        return self._tensors[name]

    def newest(self, name: str) -> torch.Tensor:
        """Return the newest contents of a variable, on the device or at home."""
        return self._tensors[name] if self._tensors else self._cut(self._home.mapped())[name]

    def apart(self) -> dict[str, torch.Tensor]:
        """Return all variables as they are at home, in a copy that nothing changes. What is on its way there is waited
        for: a run ends with it."""
        self.settle()
        return self._cut(self._home.copied().mapped())

    def _cut(self, memory: mmap.mmap) -> dict[str, torch.Tensor]:
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=self.image.nbytes)
        tensors = {}
        for name, var in self.image.variables.items():
            start = self.image.places[name]
            part = whole[start : start + var.type.nbytes]
            tensors[name] = part.view(getattr(torch, LONG_NAMES[var.type.dtype])).view(var.type.dims)
        return tensors

    @property
    def _where(self) -> str:
        return f"@{min(self.image.variables)} and {len(self.image.variables) - 1} more"
