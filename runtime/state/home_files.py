"""Homes in files: memory for an image in the folder of a space.

In: a space and a number of bytes. Out: a `FileHome`, a file without a name: it goes with the process, however that
ends. Its room is reserved at once: a disk that is full says so before training begins.

The system's cache of files has no part in it: what is read and written in pieces of 4 MiB goes between the disk and the
memory of the rank (direct input and output). So a home takes memory nowhere, and has the disk's bandwidth. File systems
that have none of that, such as those in memory, go through the cache, which is dropped behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from penstock.ir.cluster.spaces import Space
from penstock.support.errors import PenstockError
from penstock.support.words import shown_bytes

from .home_folders import folder_of
from .homes import Moved, Parts, unheard

_PIECE = 4 << 20
# What goes through the cache is flushed after so many bytes: until then the system holds it in memory.
_FLUSHED = 32 << 20
# Direct reads and writes are of whole blocks, from memory that begins at one.
_BLOCK = 4096
LARGE_PAGE = 2 << 20


def room_of(nbytes: int) -> int:
    """Return the bytes of memory and file that an image takes: whole blocks."""
    return -(-nbytes // _BLOCK) * _BLOCK


def memory_for(nbytes: int) -> torch.Tensor:
    """Take memory for an image: new and private, at the beginning of a page. It goes with the last tensor of it.

    It is new each time, and large pages come faster. They are asked for only where they are wholly inside: others would
    reach into neighbours, and stay when this memory goes. A limit of memory is then reached too soon, and the process
    waits until the kernel has made room."""
    memory = mmap.mmap(-1, max(_BLOCK, room_of(nbytes)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LARGE_PAGE
    inside = (len(memory) - begin) // LARGE_PAGE * LARGE_PAGE
    if inside > 0:
        # A system that has none refuses the advice.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, begin, inside)
    return torch.frombuffer(memory, dtype=torch.uint8)


class FileHome:
    """A home in a file of a folder; of the folder for temporary files if none is named. It reads and writes memory of
    `memory_for`, and calls `moved` for every piece with its bytes."""

    def __init__(self, space: Space, nbytes: int) -> None:
        self._space, self._nbytes, self._room = space, nbytes, max(_BLOCK, room_of(nbytes))
        self._folder = folder_of(space)
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                self._file = os.dup(file.fileno())
            # At the end of the process threads may still copy, and the system closes the file.
            weakref.finalize(self, os.close, self._file).atexit = False
            os.posix_fallocate(self._file, 0, self._room)
            self._direct = _without_cache(self._file)
        except OSError as error:
            raise self._error("make room in", error) from error

    def read(self, memory: torch.Tensor, moved: Moved = unheard) -> None:
        view = memory.numpy().data
        try:
            for start, size in self._pieces():
                self._fill(view[start : start + size], start)
                if not self._direct:
                    self._forget(start, size)
                moved(self._image_bytes(start, size))
        except OSError as error:
            raise self._error("read from", error) from error

    def write(self, memory: torch.Tensor, moved: Moved = unheard) -> None:
        view = memory.numpy().data
        self._write(lambda start, size: view[start : start + size], moved)

    def write_parts(self, parts: Parts, pieces: torch.Tensor, moved: Moved = unheard) -> None:
        """Write bytes that lie apart, gathered in the memory for pieces."""
        gathering, view = _Gathering(parts, pieces), pieces.numpy().data

        def piece(start: int, size: int) -> memoryview:
            gathering.fill(start, size)
            return view[:size]

        self._write(piece, moved)

    def _write(self, piece: Callable[[int, int], memoryview], moved: Callable[[int], None]) -> None:
        unflushed = 0
        try:
            for start, size in self._pieces():
                self._put(piece(start, size), start)
                end = start + size
                if not self._direct and (end - unflushed >= _FLUSHED or end >= self._room):
                    os.fdatasync(self._file)
                    self._forget(unflushed, end - unflushed)
                    unflushed = end
                moved(self._image_bytes(start, size))
        except OSError as error:
            raise self._error("write to", error) from error

    def contents(self) -> torch.Tensor:
        """Return what is at home as memory, without a copy."""
        return torch.frombuffer(mmap.mmap(self._file, self._room), dtype=torch.uint8)

    def copied(self) -> torch.Tensor:
        """Return what is at home, copied within the space."""
        other, memory = FileHome(self._space, self._nbytes), memory_for(min(_PIECE, self._room))
        view = memory.numpy().data
        try:
            for start, size in self._pieces():
                self._fill(view[:size], start)
                other._put(view[:size], start)
        except OSError as error:
            raise self._error("copy", error) from error
        return other.contents()

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._room, _PIECE):
            yield start, min(_PIECE, self._room - start)

    def _image_bytes(self, start: int, size: int) -> int:
        """Return the bytes of a piece that are of the image, as the last block has some beyond it."""
        return max(0, min(size, self._nbytes - start))

    def _fill(self, piece: memoryview, start: int) -> None:
        read = 0
        while read < len(piece):
            count = os.preadv(self._file, [piece[read:]], start + read)
            if not count or (count % _BLOCK and self._direct):
                raise OSError(f"the file ends at {start + read + count} bytes")
            read += count

    def _put(self, piece: memoryview, start: int) -> None:
        written = 0
        while written < len(piece):
            count = os.pwrite(self._file, piece[written:], start + written)
            if not count or (count % _BLOCK and self._direct):
                raise OSError(f"the file takes {start + written + count} bytes and no more")
            written += count

    def _forget(self, start: int, nbytes: int) -> None:
        os.posix_fadvise(self._file, start, nbytes, os.POSIX_FADV_DONTNEED)

    def _error(self, what: str, error: OSError) -> PenstockError:
        return PenstockError(
            f"cannot {what} memory space {self._space.name}, {shown_bytes(self._nbytes)}: {error.strerror or error}",
            where=self._folder,
            hint="`path` of the [[space]] in the cluster file, or --spill, names another folder",
        )


class _Gathering:
    """Values that lie apart, copied into pieces of an image one after the other."""

    def __init__(self, parts: Parts, memory: torch.Tensor) -> None:
        self._parts, self._memory = parts, memory
        self._next = 0

    def fill(self, start: int, size: int) -> None:
        """Fill the memory with the bytes of the image from a place on. Places only grow."""
        end = start + size
        while self._next < len(self._parts):
            place, part = self._parts[self._next]
            first, last = max(place, start), min(place + part.numel(), end)
            if first < last:
                self._memory[first - start : last - start].copy_(part[first - place : last - place])
            if place + part.numel() > end:
                return
            self._next += 1


def _without_cache(file: int) -> bool:
    """Take the system's cache out of the way to a file; return whether the file system can do that. It may refuse the
    flag, or only what is read and written then, so a block is written and read."""
    direct, flags = getattr(os, "O_DIRECT", 0), fcntl.fcntl(file, fcntl.F_GETFL)
    if not direct:
        return False
    block = memory_for(_BLOCK).numpy().data
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct)
        if os.pwrite(file, block, 0) == _BLOCK and os.preadv(file, [block], 0) == _BLOCK:
            return True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return False
