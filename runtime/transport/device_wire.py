"""Messages between two GPUs, from the memory of one into that of the other, by NCCL.

In: the communicator of a channel (group/group.py): two ranks, one direction, one phase. Out: a wire, as the transport
uses it. No copy in host memory is made, and no thread waits: the sending device sends when the values are there, and
the receiving one waits for the message before it reads it.

Messages of a communicator arrive in the order in which both ends began them, which is that of the channel: the verifier
refuses schedules with another order on either side. A receive begins at its action and not ahead of it. A device whose
receive waits cannot be synchronised, as the allocator does when memory is short. So no receive may wait for a message
that depends on later actions of its own rank. As a rank runs ahead of its device, the receive begins early all
the same; it does not wait for computations before it (`_aside`).

Known limits: never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from .overdue import DeviceWork
from .packing import EdgePackings
from .senders import BackgroundWork, Works

_MICROBATCHES = 1 << 16
# Watches works of the message of a microbatch, with their tensors.
Watch = Callable[[int, Sequence[DeviceWork], Sequence[torch.Tensor]], None]


class DeviceWire:
    """Both ends of a channel; `peer` is the place of the other end in the communicator."""

    def __init__(self, group: dist.ProcessGroup, peer: int, packings: EdgePackings, watch: Watch) -> None:
        self.packings = packings
        self._group, self._peer, self._watch = group, peer, watch
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

    def prepare(self, mb: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.packings.of(mb).pack(values)

    def start(self, mb: int, prepared: Sequence[torch.Tensor]) -> Works:
        works = [self._group.send([x], self._peer, self._tag(mb, i)) for i, x in enumerate(prepared)]
        self._watch(mb, works, prepared)
        return []

    def post(self, mb: int) -> tuple[list[torch.Tensor], Sequence[BackgroundWork]]:
        with self._aside():
            messages = self.packings.of(mb).messages()
            works = [self._group.recv([x], self._peer, self._tag(mb, i)) for i, x in enumerate(messages)]
        self._watch(mb, works, messages)
        return messages, [
            _DeviceWait(work, x, self._stream is not None) for work, x in zip(works, messages, strict=True)
        ]

    def _tag(self, mb: int, number: int) -> int:
        """Return which message it is. NCCL does not look at it; tests do."""
        return mb % _MICROBATCHES * max(map(len, self.packings.all)) + number

    def _aside(self) -> AbstractContextManager[object]:
        """Return a context in which work for the device does not wait for its computations."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _DeviceWait:
    """A message on its way, as the transport waits for one."""

    def __init__(self, work: DeviceWork, message: torch.Tensor, on_streams: bool) -> None:
        self._work, self._message, self._on_streams = work, message, on_streams

    def wait(self, timeout: timedelta, /) -> None:
        """Let the device wait. The deadline is looked after elsewhere (overdue.py)."""
        self._work.wait()
        if self._on_streams:
            # Its memory comes from another stream than the one that reads it.
            self._message.record_stream(torch.cuda.current_stream())
