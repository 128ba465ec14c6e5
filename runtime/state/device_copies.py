"""Copies between pinned memory of the host and a GPU, for which its rank does not wait.

In: tensors on either side. Out: tensors on the other one, which are there when the device, or a thread, has waited for
an event. A copy of some size runs beside the computations, in a stream of its own, through one of two buffers on the
device. The computations' stream copies between that buffer and the tensor, which takes a hundredth of the time. So the
order of that stream alone says when a tensor's memory may be used again, whichever allocator it is from. A buffer is
used again behind an event of its last use, for which the device waits and not the rank.

Pinned memory is held here until the device has read it. How much that is follows from how far a rank is ahead of its
device (worker/readings.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from penstock.ir.memory.passages import BESIDE_BYTES, BUFFERS
from penstock.ir.types import TensorType

from .tensors import TORCH_DTYPES, Recycled, fill

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class _Passage:
    """Two buffers on the device for copies of so many bytes in one direction, used in turn. `used` are the events
    behind their last uses."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        # Work that was queued before may still use this memory.
        self.used = [_event_of(torch.cuda.current_stream(device))] * BUFFERS
        self.turn = 0

    def next(self, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer whose turn it is, as a tensor like another one."""
        self.turn ^= 1
        return self._buffers[self.turn].view(like.dtype).view(like.shape)


class DeviceCopies:
    """The copies of one rank to and from its GPU. Used by the rank's main thread alone."""

    def __init__(self, device: torch.device, beside: int = BESIDE_BYTES) -> None:
        self.device, self._beside = device, beside
        self._pinned = Recycled(pinned=True)
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._passages: dict[tuple[int, bool], _Passage] = {}
        self._held: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all that the device was told to compute."""
        return _event_of(torch.cuda.current_stream(self.device))

    def pinned(self, type: TensorType) -> torch.Tensor:
        """Return pinned memory that nothing uses."""
        self._let_go()
        return self._pinned.tensor(type)

    def feed(self, array: np.ndarray, type: TensorType) -> torch.Tensor:
        """Return an array as a tensor of the device. The array may change once this returns."""
        return self.upload(fill(self.pinned(type), array))

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of a tensor in pinned memory."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        if source.nbytes < self._beside:
            return self.write(target, source)
        passage, current = self._passage(source.nbytes, inwards=True), torch.cuda.current_stream(self.device)
        buffer, used = passage.next(source), passage.used[passage.turn]
        with torch.cuda.stream(self._in):
            self._in.wait_event(used)
            buffer.copy_(source, non_blocking=True)
            arrived = _event_of(self._in)
        current.wait_event(arrived)
        target.copy_(buffer)
        passage.used[passage.turn] = _event_of(current)
        self._held.append((arrived, source))
        return target

    def write(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy pinned memory into a tensor of the device, behind its computations. Return the tensor."""
        target.copy_(source, non_blocking=True)
        self._held.append((self.mark(), source))
        return target

    def download(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        """Return copies of tensors in pinned memory, and the event behind which they are there."""
        copies, current = [], torch.cuda.current_stream(self.device)
        for x in tensors:
            copy = self.pinned(_type_of(x))
            copies.append(copy)
            if x.nbytes < self._beside:
                copy.copy_(x, non_blocking=True)
                continue
            passage = self._passage(x.nbytes, inwards=False)
            buffer, used = passage.next(x), passage.used[passage.turn]
            current.wait_event(used)
            buffer.copy_(x)
            with torch.cuda.stream(self._out):
                self._out.wait_event(_event_of(current))
                copy.copy_(buffer, non_blocking=True)
                passage.used[passage.turn] = _event_of(self._out)
        self._out.wait_event(_event_of(current))
        return copies, _event_of(self._out)

    def read(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Return a copy of a tensor that keeps its value and its memory until the event."""
        copy = self.pinned(_type_of(x))
        self._out.wait_event(self.mark())
        with torch.cuda.stream(self._out):
            copy.copy_(x, non_blocking=True)
        return copy, _event_of(self._out)

    def _passage(self, nbytes: int, *, inwards: bool) -> _Passage:
        key = (nbytes, inwards)
        if key not in self._passages:
            self._passages[key] = _Passage(nbytes, self.device)
        return self._passages[key]

    def _let_go(self) -> None:
        """Let go of pinned memory that the device has read. Nothing is waited for."""
        while self._held and is_reached(self._held[0][0]):
            self._held.popleft()


def is_reached(event: torch.cuda.Event) -> bool:
    """Return whether the device has got to an event. Nothing is waited for."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def _event_of(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # A thread that waits for it sleeps: the cores are for other ranks.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _type_of(x: torch.Tensor) -> TensorType:
    return TensorType(_NAMES[x.dtype], tuple(x.shape))
