"""Messages between two GPUs of one host, by CUDA: the sender's GPU writes into memory of the receiver's.

In: one end of a socket between two processes, for one direction of one phase (group/neighbours.py). Out: a wire, as the
transport uses it. No copy is in memory of the host, and neither rank waits for its GPU.

The receiver has a few slots of the size of a message (state/cuda_ipc.py). Both ends have an event for each. The
sender's stands behind the copy into a slot, the receiver's behind the copy out of it, into a tensor of its own. Each
GPU waits for the event of the other one. The socket says that an event was put there.

    both ways            handles               of slots and events, at the first message
    sender to receiver   written N             message N is in its slot when the event is reached
    receiver to sender   read N                its slot is free when the event is reached

Slots are used in turn. A sender whose slot is not free waits in the channel's thread (senders.py). An end of a process
ends its sockets, which the other side sees at once.

Known limits: Linux; never run on a GPU.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate

import torch

from penstock.ir.memory.passages import BOUNDARY, BUFFERS
from penstock.runtime.messages.status import Deadline
from penstock.runtime.state.cuda_ipc import HANDLE_BYTES, SharedEvent, copy, open_memory, take_memory

from .packing import EdgePackings
from .senders import BackgroundWork, Works
from .shared_memory import OutOfTurn, PacketSocket

_WRITTEN, _READ = 1, 2
_HEAD = struct.Struct("<Bq")


def _places(sizes: Sequence[int]) -> list[int]:
    """Return where messages lie in a slot, and where it ends."""
    return list(accumulate((-(-size // BOUNDARY) * BOUNDARY for size in sizes), initial=0))


class IpcIncoming:
    """The receiver's end of a wire."""

    def __init__(self, end: socket.socket, packings: EdgePackings, device: torch.device, seconds: float) -> None:
        self.packings, self._device = packings, device
        self._line = PacketSocket(end, BUFFERS * HANDLE_BYTES, seconds)
        self._seconds, self._count = seconds, 0
        nbytes = max(_places(packing.sizes())[-1] for packing in packings.all)
        with torch.cuda.device(device):
            memory = [take_memory(max(nbytes, 1)) for _ in range(BUFFERS)]
            self._read = [SharedEvent() for _ in range(BUFFERS)]
        self._slots = [address for address, _ in memory]
        self._written: list[SharedEvent] = []
        self._line.send(b"".join([*(handle for _, handle in memory), *(event.handle() for event in self._read)]))

    def post(self, number: int) -> tuple[list[torch.Tensor], Sequence[BackgroundWork]]:
        """Return memory for a message, and a work that lets the device wait for it."""
        messages = self.packings.of(number).messages()
        return messages, [_IpcArrival(self, number, messages)]

    def take(self, number: int, messages: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """Wait until the sender has begun a message, and let the device copy it when it is there."""
        deadline = Deadline(timeout.total_seconds())
        if not self._written:
            packet, _ = self._line.wait(deadline)
            with torch.cuda.device(self._device):
                self._written = [SharedEvent(handle) for handle in _handles(packet)]
        kind, arrived = _HEAD.unpack(self._line.wait(deadline)[0])
        if (kind, arrived) != (_WRITTEN, number):
            raise OutOfTurn(f"sent message {arrived} where {number} was expected")
        slot, stream = self._count % BUFFERS, torch.cuda.current_stream(self._device)
        self._count += 1
        with torch.cuda.device(self._device):
            self._written[slot].wait(stream)
            for message, place in zip(messages, _places([x.nbytes for x in messages]), strict=False):
                copy(message.data_ptr(), self._slots[slot] + place, message.nbytes, stream)
            self._read[slot].record(stream)
        self._line.send(_HEAD.pack(_READ, number))


class _IpcArrival:
    """A message on its way, as the transport waits for one."""

    def __init__(self, wire: IpcIncoming, number: int, messages: Sequence[torch.Tensor]) -> None:
        self._wire, self._number, self._messages = wire, number, messages

    def wait(self, timeout: timedelta, /) -> None:
        """Wait for the other rank; let the device wait for the message."""
        self._wire.take(self._number, self._messages, timeout)
        self._messages = ()


class IpcOutgoing:
    """The sender's end of a wire. Messages leave in a thread, in order."""

    def __init__(self, end: socket.socket, packings: EdgePackings, device: torch.device, seconds: float) -> None:
        self.packings, self._device, self._seconds = packings, device, seconds
        self._line = PacketSocket(end, 2 * BUFFERS * HANDLE_BYTES, seconds)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready: deque[torch.cuda.Event] = deque()
        self._slots: list[int] = []
        # The numbers of messages whose slots were not given back yet.
        self._under_way: deque[int] = deque()
        self._count = 0

    def prepare(self, number: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        packed, ready = self.packings.of(number).pack(values), torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        self._ready.append(ready)
        return packed

    def start(self, number: int, prepared: Sequence[torch.Tensor]) -> Works:
        """Let the device write a message when it is computed and its slot is free. Waits until the other rank has said
        that it will be."""
        deadline, ready = Deadline(self._seconds), self._ready.popleft()
        if not self._slots:
            self._open(deadline)
        while len(self._under_way) >= BUFFERS:
            kind, given_back = _HEAD.unpack(self._line.wait(deadline)[0])
            if (kind, given_back) != (_READ, self._under_way.popleft()):
                raise OutOfTurn(f"read message {given_back} out of turn")
        slot = self._count % BUFFERS
        self._count += 1
        self._under_way.append(number)
        with torch.cuda.device(self._device):
            self._stream.wait_event(ready)
            if self._count > BUFFERS:
                self._read[slot].wait(self._stream)
            for x, place in zip(prepared, _places([x.nbytes for x in prepared]), strict=False):
                copy(self._slots[slot] + place, x.data_ptr(), x.nbytes, self._stream)
            self._written[slot].record(self._stream)
            sent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            sent.record(self._stream)
        self._line.send(_HEAD.pack(_WRITTEN, number))
        return [(_Sent(sent), x) for x in prepared]

    def _open(self, deadline: Deadline) -> None:
        handles = _handles(self._line.wait(deadline)[0])
        with torch.cuda.device(self._device):
            self._slots = [open_memory(handle) for handle in handles[:BUFFERS]]
            self._read = [SharedEvent(handle) for handle in handles[BUFFERS:]]
            self._written = [SharedEvent() for _ in range(BUFFERS)]
        self._line.send(b"".join(event.handle() for event in self._written))


class _Sent:
    """A copy under way, as the channel's sender waits for it."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, timeout: timedelta, /) -> None:
        """Wait until the tensor was copied. The GPU of the peer is waited for in the copy before."""
        self._event.synchronize()


def _handles(packet: bytes) -> list[bytes]:
    return [packet[at : at + HANDLE_BYTES] for at in range(0, len(packet), HANDLE_BYTES)]
