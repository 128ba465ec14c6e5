"""Messages over gloo, between any two ranks.

In: the values of an edge. Out: a wire, as the transport uses it. A message has the tag

    16 + 4 · (((number mod 4096) · lanes + lane) · width + its number among those of the edge) + phase

where the number is that of the microbatch, or of the batch in phases P and N. The phase is 0 to 3 for F, B, P, N,
and width the largest number of messages of an edge. Where ranks run several stages, lane is the number of the edge
among all `lanes`. Gloo matches by (source, tag) and keeps equal tags in order. So two
channels cannot be mixed up, and a message cannot be taken for that of another microbatch. 4096 keeps the number of tags
bounded.

Gloo reads and writes memory of the host. A stage on a GPU copies what it sends there; a thread waits for the copy and
begins to send, and the rank goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from penstock.ir.schedule import PHASES
from penstock.runtime.state.device_copies import DeviceCopies

from .packing import EdgePackings
from .senders import BackgroundWork, Outgoing, Works

_FIRST_TAG = 16
_MICROBATCHES = 4096


def _world() -> dist.ProcessGroup:
    """Return the group of all ranks. Its own `send` and `recv` take a third of the time of torch's functions around
    them, which look up the same each time."""
    group = dist.group.WORLD
    assert group is not None
    return group


class GlooWire:
    """Both ends of a channel over gloo, in memory that gloo can read. `width` is the number of messages of a microbatch
    on the edge that has most, `lane` tells apart the edges of two ranks, of which there are less than `lanes`."""

    def __init__(
        self, peer: int, phase: str, width: int, packings: EdgePackings, lane: int = 0, lanes: int = 1
    ) -> None:
        self.peer, self.packings = peer, packings
        self._tag, self._width, self._lane, self._lanes = _FIRST_TAG + PHASES.index(phase), width, lane, lanes

    def prepare(self, mb: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.packings.of(mb).pack(values)

    def start(self, mb: int, prepared: Sequence[torch.Tensor]) -> Works:
        tag, group = self._first(mb), _world()
        return [(group.send([x], self.peer, tag + len(PHASES) * i), x) for i, x in enumerate(prepared)]

    def post(self, mb: int) -> tuple[list[torch.Tensor], Sequence[BackgroundWork]]:
        tag, group = self._first(mb), _world()
        messages = self.packings.of(mb).messages()
        return messages, [group.recv([x], self.peer, tag + len(PHASES) * i) for i, x in enumerate(messages)]

    def _first(self, mb: int) -> int:
        return self._tag + len(PHASES) * ((mb % _MICROBATCHES * self._lanes + self._lane) * self._width)


class CopiedWire:
    """The sender's end of a channel whose values are on a GPU, over a wire that reads memory of the host. Its messages
    leave in a thread, in order."""

    def __init__(self, wire: Outgoing, copies: DeviceCopies) -> None:
        self._wire, self._copies = wire, copies
        self._ready: deque[torch.cuda.Event] = deque()

    def prepare(self, mb: int, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        copied, ready = self._copies.download(self._wire.prepare(mb, values))
        self._ready.append(ready)
        return copied

    def start(self, mb: int, prepared: Sequence[torch.Tensor]) -> Works:
        self._ready.popleft().synchronize()
        return self._wire.start(mb, prepared)
