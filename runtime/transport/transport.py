"""Messages between ranks, and sums over the ranks of a stage.

A channel is (source rank, destination rank, phase). The values of the edge between their stages travel, for each
microbatch, in few messages. Large values go straight from and into their tensors, small ones together (ir/messages.py).
Between ranks that share a host's memory they are copied there (shared_memory.py), and GPUs of a host write to each
other's memory (ipc_wire.py). Between other GPUs NCCL carries them (device_wire.py). Between all others gloo does.
Receives are posted ahead of their action (their buffers exist from then on), so that a message flows while its
receiver computes. What other ranks of the stage need, too, is handed on while it comes (gloo_wire.py). A receive that
finds its channel full is posted as soon as one before it is taken, while that one is waited for. Gloo moves data in its
own thread. A send holds its tensor until the peer has it, which one thread per channel waits for (senders.py). Every
wait has a deadline, and a failure names the rank that waited, its peer and the message. After a timeout gloo closes the
connection, so a timeout is final.

Over gloo, a stage on a GPU sends from pinned host memory. A thread of the channel waits for the copy, and sends then. A
receive goes to pinned memory, too, and is copied to the GPU at its action. So every edge works for every pair of
devices, and the rank never waits for its own device (state/device_copies.py).

The ranks of a stage sum up their gradients in place, in the background; an action that needs them waits for the sum
(sums.py).

For measurements a transport can have a latency. Sends are then started that much later, by a thread per channel, in
order, any number of them under way at once. Computations do not wait for it.

Data between hosts is plain text: gloo's encryption is not part of the torch wheel.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch
import torch.distributed as dist

from penstock.ir.action_kinds import ACTION_KINDS
from penstock.ir.graph import Edge, Value
from penstock.ir.memory.walk import POSTED, SENDS_TOGETHER
from penstock.ir.messages import parcels
from penstock.ir.schedule import HAND_OF, HANDS, RECEIVES, SENDS, Action
from penstock.ir.sharding.tile_messages import TileMessages
from penstock.runtime.group.group import Team, time_span
from penstock.runtime.group.neighbours import End, end_of
from penstock.runtime.messages.ledger import Ledger
from penstock.runtime.messages.status import describe
from penstock.runtime.state.device_copies import DeviceCopies
from penstock.runtime.state.tensors import CPU, Recycled
from penstock.runtime.telemetry.device_memory import device_without_memory
from penstock.support.errors import DoesNotFit, PeerLost, PenstockError, VerifyError
from penstock.support.out_of_memory import is_out_of_memory
from penstock.support.words import counted

from .device_wire import DeviceWire
from .gloo_wire import CopiedWire, GlooWire, HandedOn, HandingLink
from .ipc_wire import IpcIncoming, IpcOutgoing
from .overdue import DeviceWork, Overdue
from .packing import EdgePackings, TiledMessages
from .senders import LOST, BackgroundWork, Failures, LateSender, Outgoing, Sender, Works
from .shared_memory import OutOfTurn, SharedBlocks, SharedIncoming, SharedOutgoing
from .sums import GradientSums

# Wires from device to device.
_ON_DEVICES = (DeviceWire, IpcIncoming, IpcOutgoing)
# Values of an edge that an error names.
_SHOWN = 6
# The source of an edge, its destination, and its phase.
_Ends = tuple[int, int, str]


# ------------------------------------------------------------------------------------------------ messages


@dataclass(slots=True)
class _Channel:
    """One direction of one phase between this rank and a peer, and the messages under way on it."""

    packings: EdgePackings
    # The state of receives.
    incoming: Incoming | None = None
    posted: dict[int, tuple[list[torch.Tensor], Sequence[BackgroundWork]]] = field(default_factory=dict)
    expected: deque[Action] = field(default_factory=deque)
    # The state of sends.
    outgoing: Outgoing | None = None
    sender: Sender | None = None
    link: LateSender | None = None


class Incoming(Protocol):
    """The place where the messages of a channel arrive."""

    def post(self, mb: int) -> tuple[list[torch.Tensor], Sequence[BackgroundWork]]:
        """Return memory for the messages of a microbatch, and works that wait until they are there."""


class RankTransport:
    """The channels of one rank. `homes` are the stages of all ranks; `team` the ranks that it sums up gradients with.
    `latency` is for measurements. `near` are the sockets of channels whose other end shares this host's memory
    (group/neighbours.py), which are the transport's from here on."""

    def __init__(
        self,
        rank: int,
        edges: Sequence[Edge],
        homes: Sequence[int],
        timeout: float,
        device: torch.device = CPU,
        latency: float = 0.0,
        team: Team | None = None,
        near: Mapping[End, socket.socket] | None = None,
    ) -> None:
        self.device, self._latency, self._team, self._near = device, latency, team, dict(near or {})
        self.rank, self._homes, self.seconds = rank, list(homes), timeout
        self._timeout = time_span(timeout)
        self._edges = _by_ends(edges)
        # The ends of what sends and receives move, by kind, stage, peer and the stage there.
        self._ends: dict[tuple[str, int, int | None, int | None], _Ends] = {}
        # The edges of every size of the model, the largest first, and the size of a microbatch.
        self._rungs: dict[str, dict[_Ends, Edge]] = {"": self._edges}
        self.rung_of: Callable[[int], str] = lambda mb: ""
        self._tiles: dict[str, TiledMessages] = {}
        self._width = max((len(parcels(edge.values)) for edge in edges), default=1)
        # Memory that gloo may write to.
        self._buffers = Recycled(pinned=device != CPU)
        # Memory that ranks of this host may write to.
        self._blocks = SharedBlocks(device)
        self._shared = Recycled(memory=self._blocks.allocate)
        self._channels: dict[tuple[str, int | None, int, int | None], _Channel] = {}
        self._failed: Failures = []
        self._relays = HandedOn(self._failed, self._note_handed)
        self.ledger: Ledger | None = None
        # The communicators of channels between GPUs, the channels whose GPUs write to each other's memory, and who
        # looks after what devices wait for.
        self._far: dict[End, dist.ProcessGroup] = {}
        self._direct: Set[End] = frozenset()
        self._overdue: Overdue | None = None

    def use_library(
        self, lines: Mapping[End, dist.ProcessGroup], overdue: Overdue, direct: Set[End] = frozenset()
    ) -> None:
        """Let NCCL carry the messages of these channels, and look after its works. Let GPUs write to each other's
        memory in those that are direct. Before the first message."""
        self._far, self._overdue, self._direct = dict(lines), overdue, direct

    def use_rungs(self, rungs: Mapping[str, Sequence[Edge]]) -> None:
        """Take the edges of every size of the model, the largest first. `rung_of` says which a microbatch has. Before
        the first message."""
        self._rungs = {rung: _by_ends(edges) for rung, edges in rungs.items()}
        self._width = max((len(parcels(edge.values)) for edges in rungs.values() for edge in edges), default=1)

    def use_tiles(self, messages: Mapping[str, TileMessages]) -> None:
        """Take what ranks send each other over edges between unlike meshes, for every size of the model. Behind
        `use_rungs`, and before the first message."""
        self._tiles = {rung: TiledMessages(of_rung, self.rank, self.device) for rung, of_rung in messages.items()}
        self._width = max(self._width, *(tiles.width for tiles in self._tiles.values()))

    def _tiles_of(self, action: Action) -> TiledMessages | None:
        """Return the tiles of the size of a microbatch; None where values of its edge travel as they are."""
        if not self._tiles:
            return None
        tiles = self._tiles[self.rung_of(action.mb)] if len(self._tiles) > 1 else next(iter(self._tiles.values()))
        return tiles if self._ends_of(action) in tiles else None

    def edge_of(self, action: Action) -> Edge:
        """Return the edge whose values a send or receive moves."""
        edges = self._edges if len(self._rungs) == 1 else self._rungs[self.rung_of(action.mb)]
        return edges[self._ends_of(action)]

    def _ends_of(self, action: Action) -> _Ends:
        key = action.kind, action.stage, action.peer, action.end
        ends = self._ends.get(key)
        if ends is None:
            ends = self._ends[key] = self._find_ends(action)
        return ends

    def _find_ends(self, action: Action) -> _Ends:
        assert action.peer is not None
        peer = action.other(self._homes)
        src, dst = (action.stage, peer) if action.kind in SENDS else (peer, action.stage)
        if (src, dst, action.phase) not in self._edges:
            raise VerifyError(
                f"no edge from stage {src} to stage {dst} in phase {action.phase}", where=f"action {action}"
            )
        return src, dst, action.phase

    def send(self, action: Action, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start a send; it goes on in the background."""
        if self._failed:
            self.check()
        channel = self._channels.get((action.kind, action.peer, action.stage, action.end)) or self._open(action)
        outgoing, sender = channel.outgoing, channel.sender
        assert outgoing is not None
        assert sender is not None
        if self._tiles and (tiles := self._tiles_of(action)) is not None:
            assert action.peer is not None
            sent = tiles.cut(self._ends_of(action), action.peer, tensors)
        else:
            sent = [tensors[name].contiguous() for name in channel.packings.of(action.mb).names]
        prepared = outgoing.prepare(action.mb, sent)
        if channel.link is not None:
            channel.link.begin(action, lambda: self._start(action, outgoing, prepared))
            return
        try:
            works = self._start(action, outgoing, prepared)
        except LOST as error:
            raise self._lost(action, error) from error
        if works:
            sender.hold(action, works)

    def hand_on(self, action: Action, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send what has come to another rank of the stage, if that does not go on since it comes (gloo_wire.py)."""
        try:
            if self._relays.finish(action, self._timeout):
                return
        except LOST as error:
            raise self._lost(action, error) from error
        self.send(action, tensors)

    def _note_handed(self, action: Action, message: torch.Tensor) -> None:
        if self.ledger is not None:
            self._note("send", action, message)

    def _links(self, action: Action) -> list[HandingLink]:
        """Return the channels on which what a receive brings is handed on as it comes."""
        ends, tiles, links = self._ends_of(action), self._tiles_of(action), list[HandingLink]()
        assert tiles is not None
        for target in tiles.handed_on(ends, action.holder)[0]:
            link = Action(HAND_OF[action.phase], action.stage, action.mb, None, target, ends[0])
            channel = self._channels.get((link.kind, target, link.stage, link.end)) or self._open(link)
            if isinstance(channel.outgoing, GlooWire) and channel.link is None:
                assert channel.sender is not None
                packing, pieces = channel.packings.of(action.mb), tiles.pieces(ends, self.rank, target)
                links.append(HandingLink(link, pieces, packing, channel.outgoing, channel.sender))
        return links

    def _is_relayed(self, action: Action) -> bool:
        """Return whether what a receive brings is handed on, and all that goes with it comes over gloo."""
        if self.device != CPU or (tiles := self._tiles_of(action)) is None:
            return False
        targets, senders = tiles.handed_on(self._ends_of(action), action.holder)
        return bool(targets) and not {peer for _, peer in (*self._near, *self._far)} & set(senders)

    def _start(self, action: Action, outgoing: Outgoing, prepared: Sequence[torch.Tensor]) -> Works:
        works = outgoing.start(action.mb, prepared)
        if self.ledger is not None:
            for _, held in works:
                self._note("send", action, held)
        return works

    def post(self, action: Action) -> bool:
        """Post a receive ahead of its action, unless its channel has enough of them under way, or lets none be posted
        ahead."""
        channel = self._channels.get((action.kind, action.peer, action.stage, action.end)) or self._open(action)
        if action.mb in channel.posted:
            return True
        if isinstance(channel.incoming, _ON_DEVICES):
            return False
        if len(channel.posted) >= POSTED:
            return False
        self._post(action, channel)
        return True

    def expect(self, action: Action) -> None:
        """Post a receive, now or as soon as its channel has room; those of a channel in their order, each once."""
        channel = self._channels.get((action.kind, action.peer, action.stage, action.end)) or self._open(action)
        if isinstance(channel.incoming, _ON_DEVICES):
            return
        if channel.expected or len(channel.posted) >= POSTED:
            channel.expected.append(action)
        else:
            self._post(action, channel)

    def receive(self, action: Action) -> dict[str, torch.Tensor]:
        """Wait for the values of a receive action."""
        channel = self._channels.get((action.kind, action.peer, action.stage, action.end)) or self._open(action)
        if action.mb not in channel.posted:
            if action in channel.expected:
                channel.expected.remove(action)
            self._post(action, channel)
        messages, works = channel.posted.pop(action.mb)
        if channel.expected:
            # There is time for it while this message is on its way.
            self._post(channel.expected.popleft(), channel)
        for work in works:
            try:
                work.wait(self._timeout)
            except LOST as error:
                raise self._lost(action, error) from error
        if self._failed:
            self.check()
        if self.device != CPU and not isinstance(channel.incoming, _ON_DEVICES):
            messages = [self.copies.upload(message) for message in messages]
        packing = channel.packings.of(action.mb)
        if self._tiles and (tiles := self._tiles_of(action)) is not None:
            assert action.peer is not None
            return tiles.put(self._ends_of(action), action.peer, action.holder, packing.unpack(messages))
        return dict(zip(packing.names, packing.unpack(messages), strict=True))

    @cached_property
    def copies(self) -> DeviceCopies:
        """The copies to and from the rank's GPU."""
        return DeviceCopies(self.device)

    @cached_property
    def _sums(self) -> GradientSums:
        assert self._team is not None, f"rank {self.rank} sums nothing up"
        on_host = self.device == CPU or self._team.kind != "gloo"
        return GradientSums(self._team, self.seconds, self._lost_sum, None if on_host else self.copies, self._overdue)

    def sum_up(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Start to sum up tensors over the ranks of the stage, in place; no action may touch them until
        `finish_sum`."""
        self.check()
        self._sums.begin(action, tensors)

    def finish_sum(self, action: Action) -> None:
        """Wait for the sum of the batch that an action uses, if it has not been waited for."""
        if self._team is not None:
            self._sums.finish(action)

    def _watch(
        self,
        works: Sequence[DeviceWork],
        held: Sequence[torch.Tensor],
        error_of: Callable[[Exception], PenstockError],
    ) -> None:
        assert self._overdue is not None
        self._overdue.watch(works, held, error_of)

    def _lost_sum(self, action: Action, error: Exception) -> PeerLost:
        assert self._team is not None
        others = ", ".join(str(rank) for rank in self._team.ranks if rank != self.rank)
        what, hint = self._what_failed(error)
        return PeerLost(
            f"rank {others} (stage {action.stage}) {what}; waited for the sum of the gradients of batch {action.mb}",
            where=f"rank {self.rank}, stage {action.stage}, action {action}",
            hint=hint,
        )

    def flush(self) -> None:
        """Wait until the peers have everything that was sent."""
        ends = [end for channel in self._channels.values() if (end := channel.link or channel.sender) is not None]
        done = [threading.Event() for _ in ends]
        for end, event in zip(ends, done, strict=True):
            end.tell(event)
        for event in done:
            event.wait()  # bounded: each wait of the sender's thread is
        if self._overdue is not None:
            self._overdue.settle()
        self.check()

    def check(self) -> None:
        """Raise the error of a message in the background."""
        if self._failed:
            action, error = self._failed[0]
            raise self._lost(action, error) from error

    def close(self) -> None:
        """Release memory and sockets that are shared with other processes; messages under way are lost."""
        for end in self._near.values():
            end.close()
        self._blocks.close()

    def _post(self, action: Action, channel: _Channel) -> None:
        assert channel.incoming is not None
        try:
            messages, works = channel.incoming.post(action.mb)
        except LOST as error:
            raise self._lost(action, error) from error
        if self._tiles and self._is_relayed(action):
            tiles, ends = self._tiles_of(action), self._ends_of(action)
            assert tiles is not None
            assert action.peer is not None
            arriving, links = (channel.packings.of(action.mb), messages, works), partial(self._links, action)
            pieces = tiles.pieces(ends, action.peer, self.rank)
            works = self._relays.follow(action, ends[0], links, pieces, arriving)
        channel.posted[action.mb] = (messages, works)
        if self.ledger is not None and self.device == CPU:
            for message in messages:
                self._note("post", action, message)

    def _note(self, what: str, action: Action, message: torch.Tensor) -> None:
        assert self.ledger is not None
        self.ledger.value(what, f"{action.kind}{ACTION_KINDS[action.kind].arrow}{action.peer}", action.holder, message)

    def _open(self, action: Action) -> _Channel:
        """Open the channel of a send or receive, at its first use."""
        peer, end = action.peer, end_of(action)
        assert peer is not None
        near = None if end in self._far else self._near.get(end)
        packings = self._packings_of(action)
        channel = self._channels[action.kind, peer, action.stage, action.end] = _Channel(packings)
        if action.kind not in RECEIVES:
            note_sent = None if self.ledger is None else lambda action, message: self._note("sent", action, message)
            # A message to shared memory that has to wait is written by the thread, so it is handed to that at once.
            channel.sender = Sender(self._timeout, self._failed, note_sent, few=SENDS_TOGETHER if near is None else 1)
            channel.outgoing = self._wire(action, packings) if near is None else self._to_near(action, packings, near)
            if self.device != CPU and not isinstance(channel.outgoing, _ON_DEVICES):
                channel.outgoing = CopiedWire(channel.outgoing, self.copies)
            if self._latency or isinstance(channel.outgoing, CopiedWire | IpcOutgoing):
                channel.link = LateSender(self._latency, channel.sender, self._failed)
        else:
            channel.incoming = self._wire(action, packings) if near is None else self._from_near(action, packings, near)
        return channel

    def _packings_of(self, action: Action) -> EdgePackings:
        """Return the messages of a channel, in memory that its wire can take them from or write them to."""
        end, sends = end_of(action), action.kind not in RECEIVES
        if end in self._far or end in self._direct or (sends and (end in self._near or self.device != CPU)):
            # A GPU packs in its own memory, and copies whole messages.
            buffers = Recycled(self.device)
        else:
            buffers = self._shared if end in self._near else self._buffers
        ends = self._ends_of(action)
        values: dict[str, Sequence[Value]] = {rung: edges[ends].values for rung, edges in self._rungs.items()}
        if self._tiles_of(action) is not None:
            assert action.peer is not None
            ranks = (self.rank, action.peer) if sends else (action.peer, self.rank)
            values = {rung: tiles.values(ends, *ranks) for rung, tiles in self._tiles.items()}
        return EdgePackings(values, lambda mb: self.rung_of(mb), buffers, self.device)

    def _to_near(self, action: Action, packings: EdgePackings, near: socket.socket) -> SharedOutgoing | IpcOutgoing:
        """Return the wire of sends to a rank of this host."""
        if self.device != CPU and end_of(action) in self._direct:
            return IpcOutgoing(near, packings, self.device, self.seconds)
        return SharedOutgoing(near, packings, self.seconds, packs=self.device != CPU)

    def _from_near(self, action: Action, packings: EdgePackings, near: socket.socket) -> SharedIncoming | IpcIncoming:
        """Return the wire of receives from a rank of this host."""
        if end_of(action) in self._direct:
            return IpcIncoming(near, packings, self.device, self.seconds)
        return SharedIncoming(near, packings, self._blocks, self.seconds)

    def _wire(self, action: Action, packings: EdgePackings) -> GlooWire | DeviceWire:
        """Return the wire of a channel whose ends share no memory."""
        peer = action.peer
        assert peer is not None
        line = self._far.get(end_of(action))
        if line is not None:

            def watch(mb: int, works: Sequence[DeviceWork], held: Sequence[torch.Tensor]) -> None:
                self._watch(works, held, partial(self._lost, action._replace(mb=mb)))

            return DeviceWire(line, int(peer > self.rank), packings, watch)
        lane = (0, 1) if action.end is None else (list(self._edges).index(self._ends_of(action)), len(self._edges))
        return GlooWire(peer, action.phase, self._width, packings, *lane)

    def _lost(self, action: Action, error: Exception) -> PenstockError:
        """Return the error for a message that failed: of the peer, or of this process."""
        assert action.peer is not None
        place = f"rank {self.rank}, stage {action.stage}, action {action}"
        if is_out_of_memory(error):
            # Its own, in a copy or in a message that was opened: no peer is lost.
            what = device_without_memory(error, self.device) or "the system gave no more memory"
            return DoesNotFit(f"{what}; it was needed for {describe(action)}", where=place)
        if isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError):
            what = f"the system did not let {describe(action)} be handed over: {error.strerror}"
            return DoesNotFit(
                what,
                where=place,
                hint="`ulimit -a` lists limits of this process; PENSTOCK_SHARED_MEMORY=0 needs fewer files",
            )
        what, hint = self._what_failed(error)
        carried = self.edge_of(action).values
        values = ", ".join(f"%{v.name} : {v.type}" for v in carried[:_SHOWN])
        if len(carried) > _SHOWN:
            values += f" and {counted(len(carried) - _SHOWN, 'more value')}"
        return PeerLost(
            f"rank {action.peer} (stage {self._stage_of_peer(action)}) {what}; waited for {describe(action)}, "
            f"which carries {values}",
            where=place,
            hint=hint,
        )

    def _stage_of_peer(self, action: Action) -> int:
        """Return the stage of the rank at the other end; that of this one where one hands on to the other."""
        if action.kind in HANDS:
            return action.stage
        tiles, peer = self._tiles_of(action) if action.kind in RECEIVES else None, action.peer
        if tiles is not None and peer is not None and tiles.hands_on(self._ends_of(action), peer):
            return action.stage
        return action.other(self._homes)

    def _what_failed(self, error: Exception) -> tuple[str, str]:
        """Return the words of torch or the system about a peer, and a hint."""
        text = str(error).splitlines()[0] if str(error) else ""
        if isinstance(error, OutOfTurn):
            return text, ""
        # Gloo puts the place in its own source in front, and advice behind.
        detail = (text.partition("] ")[2] if text.startswith("[") else text).partition(". ")[0]
        if "imed out" in text or "timeout" in text:
            return f"did not answer within {self.seconds:g} s", "if it was only slow, give a longer --timeout"
        return f"closed the connection ({detail.rstrip('.')})", ""


def _by_ends(edges: Sequence[Edge]) -> dict[_Ends, Edge]:
    return {(edge.src, edge.dst, edge.phase): edge for edge in edges}
