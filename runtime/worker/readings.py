"""Losses and norms on their way from a stage's device to the program.

In: the losses of microbatches, the norm of a batch's gradient. Out: both, once for each batch, as numbers.

On a CPU they are read as they come. A GPU computes behind its rank, which is done with a batch long before. The rank
waits for the batch before that one, once for each batch, and for nothing else: `wait` is the only place in the loop of
a rank where it waits for its GPU. Numbers of that batch are in pinned memory then. They are read sooner where the GPU
has got there, which `look` finds out without waiting. So a rank is ahead of its GPU by at most two batches, and
numbers come at most one batch later than the actions that they are of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from penstock.runtime.state.device_copies import DeviceCopies, is_reached

# Takes a batch, its losses, and its norm.
Finish = Callable[[int, tuple[float, ...], float | None], None]


class _Ended(NamedTuple):
    """A batch that the rank is done with: the event behind it, and copies of its numbers."""

    batch: int
    event: torch.cuda.Event
    numbers: list[torch.Tensor]


class Readings:
    """The numbers of one rank. `copies` are those of its GPU; none on a CPU. `finish` gets what is read, on a rank that
    has losses."""

    def __init__(self, copies: DeviceCopies | None, finish: Finish) -> None:
        self._copies, self._finish = copies, finish
        self._losses: dict[int, list[torch.Tensor]] = {}
        self._ended: deque[_Ended] = deque()

    def take(self, batch: int, loss: torch.Tensor) -> int:
        """Keep the loss of a microbatch; return how many there are of its batch."""
        losses = self._losses.setdefault(batch, [])
        losses.append(loss)
        return len(losses)

    def end(self, batch: int, norm: torch.Tensor | None = None) -> None:
        """Say that all actions of a batch were begun."""
        losses = self._losses.pop(batch, [])
        if self._copies is None:
            if losses:
                self._finish(batch, tuple(map(float, losses)), None if norm is None else float(norm))
            return
        if losses:
            numbers, event = self._copies.download([torch.stack(losses), *([] if norm is None else [norm])])
        else:
            numbers, event = [], self._copies.mark()
        self._ended.append(_Ended(batch, event, numbers))
        while len(self._ended) > 1:
            self.wait()

    def look(self) -> None:
        """Read what is there."""
        while self._ended and is_reached(self._ended[0].event):
            self._read()

    def settle(self) -> None:
        """Read the numbers of all batches that have ended."""
        while any(ended.numbers for ended in self._ended):
            self.wait()

    def wait(self) -> None:
        """Wait for the oldest batch that has ended, and read its numbers."""
        self._ended[0].event.synchronize()
        self._read()

    def _read(self) -> None:
        batch, _, numbers = self._ended.popleft()
        if numbers:
            losses, *norm = numbers
            self._finish(batch, tuple(losses.tolist()), float(norm[0]) if norm else None)
