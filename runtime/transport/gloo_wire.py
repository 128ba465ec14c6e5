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

What other ranks of the stage need, too, is sent on while it comes, parcel by parcel (`HandedOn`): a parcel as soon as
all that is in it has come. One thread per channel waits for its messages, in order. A wait of a work of gloo cannot be
broken off without an end of the connection, and a receive is posted long before its turn. So the thread waits for as
long as it takes, and the rank that receives does so with its deadline.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.ir.schedule import PHASES, Action
from penstock.ir.sharding.tile_messages import TileSlice
from penstock.runtime.state.device_copies import DeviceCopies

from .packing import EdgePacking, EdgePackings
from .senders import LOST, BackgroundWork, Failures, Outgoing, Sender, Works

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

    def send(self, mb: int, number: int, message: torch.Tensor) -> BackgroundWork:
        """Start to send one message of a microbatch."""
        return _world().send([message], self.peer, self._first(mb) + len(PHASES) * number)

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


# ---------------------------------------------------------------------------------------------- handed on

# For as long as it takes: the end of the peer's process or of the connection ends it.
_PATIENCE = timedelta(days=30)
# Where elements lie in the part of a value.
_Place = tuple[str, tuple[tuple[int, int], ...]]


def _place(name: str, slices: Sequence[slice]) -> _Place:
    return name, tuple((part.start, part.stop) for part in slices)


class HandingLink(NamedTuple):
    """A channel to a rank that tiles are handed on to: the action, the slices, their packing, the wire."""

    action: Action
    pieces: tuple[TileSlice, ...]
    packing: EdgePacking
    wire: GlooWire
    sender: Sender


@dataclass(eq=False)
class Passage:
    """The tiles of a microbatch or batch on their way through this rank."""

    links: Sequence[HandingLink]
    come: dict[_Place, torch.Tensor] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._left = {(i, j) for i, link in enumerate(self.links) for j in range(len(link.packing.parcels))}

    def ready(self) -> list[tuple[HandingLink, int, list[torch.Tensor]]]:
        """Return the parcels of which everything has come, each once."""
        result = []
        for i, j in sorted(self._left):
            link = self.links[i]
            places = [_place(link.pieces[n].whole, link.pieces[n].taken) for n in link.packing.parcels[j].numbers]
            if all(place in self.come for place in places):
                result.append((link, j, [self.come[place] for place in places]))
                self._left.remove((i, j))
        return result

    def settle(self) -> None:
        """Say so when nothing is left to be sent, or it never will be."""
        if not self._left or self.error is not None:
            self.come.clear()
            self.done.set()


class Coming:
    """A message that a thread waits for."""

    def __init__(self, work: BackgroundWork) -> None:
        self.work, self.here = work, threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: timedelta) -> None:
        """Wait as a work of gloo does."""
        if not self.here.wait(timeout.total_seconds()):
            raise TimeoutError("timed out")
        if self.error is not None:
            raise self.error


class _Arrivals(threading.Thread):
    """The messages of one channel, in order."""

    def __init__(self, passed: Callable[[Passage, Mapping[_Place, torch.Tensor]], None]) -> None:
        super().__init__(name="relay", daemon=True)
        self.queue: queue.SimpleQueue[tuple[Passage, list[tuple[Coming, dict[_Place, torch.Tensor]]]]] = (
            queue.SimpleQueue()
        )
        self._passed = passed
        self.start()

    def run(self) -> None:
        while True:
            self._take(*self.queue.get())

    def _take(self, passage: Passage, coming: Sequence[tuple[Coming, dict[_Place, torch.Tensor]]]) -> None:
        """Wait for the messages of a receive. Errors of every kind go to the receive and to the end of the passage:
        nothing waits for this thread."""
        for message, tensors in coming:
            try:
                message.work.wait(_PATIENCE)
            except Exception as error:
                message.error = passage.error = error
            message.here.set()
            try:
                self._passed(passage, {} if message.error else tensors)
            except Exception as error:
                passage.error = error
                passage.settle()


class HandedOn:
    """The passages of one rank. `failed` are sends that failed; `sent` is called for each that begins."""

    def __init__(self, failed: Failures, sent: Callable[[Action, torch.Tensor], None]) -> None:
        self._sent, self._failed, self._lock = sent, failed, threading.Lock()
        self._threads: dict[tuple[str, int | None, int, int | None], _Arrivals] = {}
        self._passages: dict[tuple[str, int, int | None, int], tuple[Passage, set[int]]] = {}

    def follow(
        self,
        action: Action,
        source: int,
        links: Callable[[], Sequence[HandingLink]],
        pieces: Sequence[TileSlice],
        arriving: tuple[EdgePacking, Sequence[torch.Tensor], Sequence[BackgroundWork]],
    ) -> Sequence[BackgroundWork]:
        """Hand the messages of a receive on as they come, from a stage `source`. Return works that wait for them.
        Where there are no links, nothing goes on from here (`finish` says so), and nothing is kept of the receive."""
        key = action.phase, action.stage, source, action.mb
        if key not in self._passages:
            opened = links()
            if not opened:
                return arriving[2]
            self._passages[key] = Passage(opened), {link.action.peer for link in opened if link.action.peer is not None}
        passage, _ = self._passages[key]
        packing, messages, works = arriving
        coming = [
            (
                Coming(work),
                {
                    _place(pieces[n].whole, pieces[n].put): tensor
                    for n, tensor in zip(parcel.numbers, packing.values_in(i, message), strict=True)
                },
            )
            for i, (parcel, message, work) in enumerate(zip(packing.parcels, messages, works, strict=True))
        ]
        if not coming:
            # All its values are empty: there may be nothing to send on, either.
            self._passed(passage, {})
            return []
        channel = action.kind, action.peer, action.stage, action.end
        if channel not in self._threads:
            self._threads[channel] = _Arrivals(self._passed)
        self._threads[channel].queue.put((passage, coming))
        return [message for message, _ in coming]

    def _passed(self, passage: Passage, tensors: Mapping[_Place, torch.Tensor]) -> None:
        """Send on what is complete with the tensors of one more message."""
        with self._lock:
            passage.come.update(tensors)
            for link, number, values in passage.ready():
                try:
                    message = link.packing.message(number, values)
                    work = link.wire.send(link.action.mb, number, message)
                    self._sent(link.action, message)
                    link.sender.hold(link.action, [(work, message)])
                except LOST as error:
                    self._failed.append((link.action, error))
            passage.settle()

    def finish(self, action: Action, timeout: timedelta) -> bool:
        """Wait until all that a rank is handed on is being sent to it; False where that does not happen here."""
        key = action.phase, action.stage, action.end, action.mb
        passage, peers = self._passages.get(key, (None, set[int]()))
        if passage is None or action.peer not in peers:
            return False
        peers.remove(action.peer)
        if not peers:
            del self._passages[key]
        if not passage.done.wait(timeout.total_seconds()):
            raise TimeoutError("timed out")
        if passage.error is not None:
            raise passage.error
        return True
