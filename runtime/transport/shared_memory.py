"""Messages between two ranks of one host: the sender writes its values into memory of the receiver.

In: one end of a socket between two processes, for one direction of one phase (group/neighbours.py). Out: a wire, as the
transport uses it.

The receiver owns the memory (memfd, sealed against any change of size) and maps it. The sender has it as a file
only: it can hurt the receiver by wrong contents, and by nothing else. The bytes count once. Each value is copied once,
by the thread that sends it, and read where it arrived.

    receiver to sender   file S (with the file)     memory that the sender does not know yet
                         free N (S, place)...       message N may be written to these blocks, one for each parcel
    sender to receiver   done N                     message N is there

Messages of a wire go in order. One whose memory is free is written before `start` returns; another one waits in the
channel's sender thread. The end of a process ends its sockets, which the other side sees at once.

A receiver with a GPU lets CUDA pin the memory, so that its GPU copies from there without a wait of the rank. A sender
with a GPU packs the values of a parcel there, and writes a copy of it (gloo_wire.CopiedWire).

Known limits: Linux.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache

import numpy as np
import torch

from penstock.ir.messages import Parcel
from penstock.runtime.messages.status import LOOK_SECONDS, Deadline
from penstock.runtime.state.pinned import pin, unpin
from penstock.runtime.state.tensors import CPU
from penstock.support.errors import DoesNotFit

from .packing import EdgePackings
from .senders import BackgroundWork, Works

_NEW, _FREE, _DONE = 0, 1, 2
_HEAD = struct.Struct("<Bq")
_BLOCK = struct.Struct("<IQ")
# Bytes of a file; unused pages take no memory.
_SEGMENT = 256 << 20
# fcntl's F_ADD_SEALS with F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW, which Python 3.11 does not name.
ADD_SEALS, FIXED_SIZE = 1033, 1 | 2 | 4
_FILE = struct.Struct("i")
_RIGHTS = socket.CMSG_SPACE(_FILE.size)


class OutOfTurn(RuntimeError):
    """The error that the other end speaks of another message than the one whose turn it is."""


class PacketSocket:
    """A socket that keeps packets apart. Every wait has a deadline, that for room in the socket after `seconds`. One
    that takes no `files` drops those that come with packets."""

    def __init__(self, end: socket.socket, largest: int, seconds: float, *, files: bool = True) -> None:
        end.setblocking(False)
        self._end, self._largest, self._seconds, self._files = end, largest, seconds, files
        self._ready = select.poll()
        self._ready.register(end, select.POLLIN)
        self._room = select.poll()
        self._room.register(end, select.POLLOUT)

    def send(self, packet: bytes, file: int | None = None) -> None:
        rights = [] if file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        deadline: Deadline | None = None
        while True:
            try:
                if rights:
                    self._end.sendmsg([packet], rights)
                else:
                    self._end.send(packet)
            except BlockingIOError:
                # Packets that were not read yet are few, but the system says how many it takes.
                deadline = deadline or Deadline(self._seconds)
                _poll(self._room, deadline)
            else:
                return

    def take(self) -> tuple[bytes, int | None] | None:
        """Return a packet and the file that came with it; None if there is none yet."""
        rights: Sequence[tuple[int, int, bytes]] = ()
        try:
            if self._files:
                packet, rights, _, _ = self._end.recvmsg(self._largest, _RIGHTS, socket.MSG_CMSG_CLOEXEC)
            else:
                packet = self._end.recv(self._largest)
        except BlockingIOError:
            return None
        if not packet:
            raise ConnectionResetError("end of file")
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                return packet, _FILE.unpack(data)[0]
        return packet, None

    def wait(self, deadline: Deadline) -> tuple[bytes, int | None]:
        """Return a packet; TimeoutError if there is none in time."""
        while (received := self.take()) is None:
            _poll(self._ready, deadline)
        return received

    def close(self) -> None:
        self._end.close()


def _poll(ready: select.poll, deadline: Deadline) -> None:
    left = deadline.left()
    if left <= 0:
        raise TimeoutError("timed out")
    ready.poll(min(left, LOOK_SECONDS) * 1e3)


class SharedBlocks:
    """Memory of this process that other processes may write to, in a few files; a block is found again by its
    address. A device that is a GPU copies from it."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self.files: list[int] = []
        self._memory: mmap.mmap | None = None
        self._used = self._size = 0
        self._places: dict[int, tuple[int, int]] = {}

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return memory, in whole pages of its own. It is never given back: blocks are used again (store.Recycled)."""
        if self._memory is None or self._used + nbytes > self._size:
            self._grow(nbytes)
        assert self._memory is not None
        memory = np.frombuffer(self._memory, np.uint8, nbytes, self._used)
        self._places[memory.ctypes.data] = len(self.files) - 1, self._used
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._used += whole
        if self._device != CPU:
            hint = "PENSTOCK_SHARED_MEMORY=0 lets ranks of one host talk over sockets"
            pin(memory.ctypes.data, whole, self._device, "that are shared with other ranks", hint)
        return memory

    def _grow(self, nbytes: int) -> None:
        size = max(nbytes, _SEGMENT)
        try:
            file = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.files.append(file)
            os.ftruncate(file, size)
            fcntl.fcntl(file, ADD_SEALS, FIXED_SIZE)
            self._memory = mmap.mmap(file, size)
        except OSError as error:
            hint = (
                "`ulimit -n` and `ulimit -v` set limits; PENSTOCK_SHARED_MEMORY=0 lets ranks of one host talk "
                "over sockets"
            )
            raise DoesNotFit(f"no memory to share with other ranks: {error.strerror}", hint=hint) from error
        self._used, self._size = 0, size

    def place(self, message: torch.Tensor) -> tuple[int, int]:
        """Return the number of the file that a block is in, and where."""
        return self._places[message.data_ptr()]

    def close(self) -> None:
        """Close the files, once. The memory stays as long as anything is in it."""
        for file in self.files:
            os.close(file)
        if self._device != CPU:
            for address in self._places:
                unpin(address, self._device)
        self.files.clear()
        self._places.clear()


class SharedIncoming:
    """The receiver's end of a wire. The messages of `packings` lie in `blocks`."""

    def __init__(self, end: socket.socket, packings: EdgePackings, blocks: SharedBlocks, seconds: float) -> None:
        self._line = PacketSocket(end, _HEAD.size, seconds, files=False)
        self._blocks, self._known = blocks, set[int]()
        self.packings = packings

    def post(self, number: int) -> tuple[list[torch.Tensor], Sequence[BackgroundWork]]:
        """Return memory for a message, and works that wait for it."""
        messages = self.packings.of(number).messages()
        packet = _HEAD.pack(_FREE, number)
        for message in messages:
            file, place = self._blocks.place(message)
            if file not in self._known:
                self._known.add(file)
                self._line.send(_HEAD.pack(_NEW, file), self._blocks.files[file])
            packet += _BLOCK.pack(file, place)
        self._line.send(packet)
        return messages, [Arrival(self, number)]

    def wait(self, number: int, timeout: timedelta) -> None:
        packet, _ = self._line.take() or self._line.wait(Deadline(timeout.total_seconds()))
        kind, arrived = _HEAD.unpack(packet)
        if (kind, arrived) != (_DONE, number):
            raise OutOfTurn(f"sent message {arrived} where {number} was expected")

    def close(self) -> None:
        self._line.close()


class Arrival:
    """A message that is on its way: waits as a work of gloo does."""

    def __init__(self, wire: SharedIncoming, number: int) -> None:
        self._wire, self._number = wire, number

    def wait(self, timeout: timedelta) -> None:
        self._wire.wait(self._number, timeout)


class SharedOutgoing:
    """The sender's end of a wire. Where it `packs`, values are put together before they are written."""

    def __init__(self, end: socket.socket, packings: EdgePackings, seconds: float, *, packs: bool = False) -> None:
        self._packings, self._packs = packings, packs
        # The parcels of messages that were prepared, which are written in this order.
        self._parcels: deque[tuple[Parcel, ...]] = deque()
        self._line = PacketSocket(end, _HEAD.size + _BLOCK.size * max(map(len, packings.all)), seconds)
        self._files: dict[int, int] = {}
        # Messages that had to wait, begun by the thread that sends and ended by the channel's own.
        self._begun = self._ended = 0

    def prepare(self, number: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        packing = self._packings.of(number)
        self._parcels.append(packing.parcels)
        return packing.pack(values) if self._packs else values

    def start(self, number: int, values: Sequence[torch.Tensor]) -> Works:
        """Write a message, if there is memory for it; else return works that wait for that and write it then."""
        if self._begun == self._ended and (blocks := self._free(number, None)) is not None:
            self._write(number, blocks, values)
            return []
        self._begun += 1
        late = Departure(self, number, values)
        return [(late, value) for value in values]

    def finish(self, number: int, values: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """Write a message that had to wait."""
        blocks = self._free(number, Deadline(timeout.total_seconds()))
        assert blocks is not None
        self._write(number, blocks, values)
        # After an error nothing goes past the message that failed.
        self._ended += 1

    def _free(self, number: int, deadline: Deadline | None) -> list[tuple[int, int]] | None:
        """Return the blocks that a message goes to, as files and places. None if there are none yet and it is not to be
        waited for them."""
        while True:
            received = self._line.take() if deadline is None else self._line.wait(deadline)
            if received is None:
                return None
            packet, file = received
            kind, arrived = _HEAD.unpack_from(packet)
            if kind == _NEW:
                if file is None:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                self._files[arrived] = file
                continue
            if (kind, arrived) != (_FREE, number):
                raise OutOfTurn(f"expects message {arrived} where {number} is sent")
            return [(self._files[name], place) for name, place in _BLOCK.iter_unpack(packet[_HEAD.size :])]

    def _write(self, number: int, blocks: Sequence[tuple[int, int]], values: Sequence[torch.Tensor]) -> None:
        for i, ((file, begin), parcel) in enumerate(zip(blocks, self._parcels.popleft(), strict=True)):
            if self._packs:
                _write_all(file, values[i], begin)
                continue
            for value, place in zip(parcel.numbers, parcel.places, strict=True):
                _write_all(file, values[value], begin + place)
        self._line.send(_HEAD.pack(_DONE, number))

    def close(self) -> None:
        self._line.close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class Departure:
    """A message whose receiver has no memory for it yet: to wait for it is to write it."""

    def __init__(self, wire: SharedOutgoing, number: int, values: Sequence[torch.Tensor]) -> None:
        self._wire, self._number, self._values = wire, number, values
        self._gone = False

    def wait(self, timeout: timedelta) -> None:
        """Write the message; called for each of the values, in one thread."""
        if not self._gone:
            self._wire.finish(self._number, self._values, timeout)
            self._values, self._gone = (), True


def _write_all(file: int, tensor: torch.Tensor, place: int) -> None:
    address, nbytes, written = tensor.data_ptr(), tensor.nbytes, 0
    while written < nbytes:
        left = _bytes_type(nbytes - written).from_address(address + written)
        written += os.pwrite(file, left, place + written)


@lru_cache(maxsize=256)
def _bytes_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the type of memory that is given by its address. An array of a tensor takes longer to make than a small
    message to write, where the caches of the processor have other things in them."""
    return ctypes.c_char * nbytes
