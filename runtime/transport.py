"""Messages between ranks, sums over the ranks of a stage, and the meeting of the group, over gloo.

A channel is (source rank, destination rank, phase). The values of the edge between their stages travel, for each microbatch, in few messages: large values
straight from and into their tensors, small ones together (ir/parcels.py). A message has the tag

    16 + 4 · ((number mod 4096) · width + its number among those of the edge) + phase

where the number is that of the microbatch, or of the batch in phases P and N, phase is 0 to 3 for F, B, P, N and width the largest number of
messages of an edge. Gloo matches by (source, tag) and keeps equal tags in order, so that two channels cannot be mixed up and a message cannot be
taken for that of another microbatch; 4096 keeps the number of tags bounded.

Receives are posted ahead of their action (their buffers exist from then on), so that a message flows while its receiver computes; a receive that finds
its channel full is posted as soon as one before it is taken, while that one is waited for. Gloo moves
data in its own thread; a send holds its tensor until the peer has it, which one thread per channel waits for (senders.py). Every wait has a deadline, and
a failure says who waited for whom, for what. After a timeout gloo closes the connection, so a timeout is final.

A stage on a GPU sends from pinned host memory: the copy is made on torch's current stream and waited for, since gloo reads with the CPU. A receive
goes to pinned memory, too, and is copied to the GPU when its action comes. So every edge works for every pair of devices; two GPUs of one host
do not talk directly.

The ranks of a stage sum up their gradients in place, in the background; who needs them waits for the sum. Between GPUs that is NCCL's business
where torch has it, else gloo's with copies in pinned memory.

For measurements a transport can have a latency: sends are then started that much later, by a thread per channel, in order, any number of
them under way at once; computations do not wait for it.

Data between hosts is plain text: gloo's encryption is not part of the torch wheel.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ..ir.errors import PeerLost, VerifyError
from ..ir.graph import Edge
from ..ir.memory_walk import POSTED
from ..ir.parcels import parcels
from ..ir.schedule import PHASES, RECEIVES, SENDS, Action
from .ledger import Ledger
from .packing import Packing
from .senders import Failures, Link, Sender, Works
from .status import describe
from .store import CPU, Recycled

Result = TypeVar("Result")

_FIRST_TAG = 16
_MICROBATCHES = 4096


# ------------------------------------------------------------------------------------------------ the group


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks of one stage, as torch knows them."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    kind: str


class Group:
    """The ranks of one run, met at a store; `timeout` bounds every wait in it."""

    def __init__(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self.team: Team | None = None

    def connect(self) -> None:
        """Open the gloo connections of all ranks."""
        try:
            dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.world, timeout=time_span(self.timeout))
        except RuntimeError as error:
            raise PeerLost(
                f"the group of {self.world} ranks did not connect within {self.timeout:g} s: {error}", where=f"rank {self.rank}"
            ) from error

    def form_team(self, ranks: Sequence[int], device: torch.device) -> None:
        """Called by all `ranks` of a stage, this one among them, once they know what `device` they have: open the group in which they sum up."""
        found = [gpu.decode() for gpu in self.gather(f"gpu/{ranks[0]}", gpu_of(device).encode(), ranks)]
        kind = sum_kind(found)
        try:
            made = dist.new_group(list(ranks), timeout=time_span(self.timeout), backend=kind, use_local_synchronization=True)
        except RuntimeError as error:
            raise PeerLost(
                f"ranks {', '.join(map(str, ranks))}, which sum up gradients, did not connect within {self.timeout:g} s: {error}",
                where=f"rank {self.rank}",
            ) from error
        self.team = Team(tuple(ranks), made, kind)

    def put(self, key: str, value: bytes) -> None:
        self._guard(lambda: self.store.set(key, value.decode()), f"publishing {key!r}")

    def get(self, key: str, what: str) -> bytes:
        """A value that another rank puts there; PeerLost after the timeout."""

        def fetch() -> bytes:
            self.store.wait([key], time_span(self.timeout))
            return bytes(self.store.get(key))

        return self._guard(fetch, what)

    def gather(self, key: str, value: bytes, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Everybody's value, in the order of ranks; or that of `ranks`, each of which asks."""
        self.put(f"{key}/{self.rank}", value)
        return [self.get(f"{key}/{rank}", f"{key!r} of rank {rank}") for rank in (range(self.world) if ranks is None else ranks)]

    def agree(self, what: str, value: str, hint: str = "copy one bundle to all hosts") -> None:
        """Refuse to go on when a rank has another value than this one."""
        found = [v.decode() for v in self.gather(f"agree/{what}", value.encode())]
        if any(v != value for v in found):
            # The store may live in a rank that is about to end: everybody reads first.
            with contextlib.suppress(PeerLost):
                self.gather(f"agree/{what}/read", b"")
            listed = "".join(f"\n  - rank {rank}: {v}" for rank, v in enumerate(found))
            raise VerifyError(f"the ranks do not have the same {what}:{listed}", where=f"rank {self.rank}", hint=hint)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _guard(self, action: Callable[[], Result], waited_for: str) -> Result:
        try:
            return action()
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise PeerLost(f"waited up to {self.timeout:g} s for {waited_for}: {first}", where=f"rank {self.rank}") from error


def _world() -> dist.ProcessGroup:
    """The group of all ranks. Its own `send` and `recv` take a third of the time of torch's functions around them, which look up the same each time."""
    group = dist.group.WORLD
    assert group is not None
    return group


def gpu_of(device: torch.device) -> str:
    """Which GPU of the world a device is, if NCCL could use it from this process; else nothing."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def sum_kind(gpus: Sequence[str]) -> str:
    """What sums up over ranks with these GPUs: NCCL takes one rank per GPU, and no rank without."""
    return "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def host_store(world: int, timeout: float) -> TCPStore:
    """The meeting point of a local run: any free port, listening on loopback only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    try:
        return TCPStore("127.0.0.1", port, world, True, time_span(timeout), wait_for_workers=False, master_listen_fd=listener.detach())
    except RuntimeError as error:
        raise not_met(f"127.0.0.1:{port}", timeout, error) from error


def join_store(port: int, world: int, timeout: float) -> TCPStore:
    try:
        return TCPStore("127.0.0.1", port, world, False, time_span(timeout), wait_for_workers=False)
    except RuntimeError as error:
        raise not_met(f"127.0.0.1:{port}", timeout, error) from error


def time_span(seconds: float) -> timedelta:
    """A timeout for torch, which counts whole milliseconds and takes none of them for no limit."""
    return timedelta(seconds=max(seconds, 0.001))


def not_met(address: str, timeout: float, error: Exception, where: str = "") -> PeerLost:
    """What is said of a meeting point that could not be reached."""
    first = str(error).partition("\n")[0]
    return PeerLost(
        f"could not meet the group at {address} within {timeout:g} s: {first}",
        where=where,
        hint="if it was only slow, give a longer --timeout",
    )


# ------------------------------------------------------------------------------------------------ messages


@dataclass(slots=True)
class _Channel:
    """One direction of one phase between this rank and a peer, and what is under way on it. `tag` is that of the first message of microbatch 0."""

    edge: Edge
    peer: int
    tag: int
    names: tuple[str, ...]
    packing: Packing
    # Of receives.
    posted: dict[int, tuple[list[torch.Tensor], list[dist.Work]]]
    expected: deque[Action]
    # Of sends.
    sender: Sender | None = None
    link: Link | None = None


class Transport:
    """The channels of one rank. `homes` are the stages of all ranks; `team` the ranks that it sums up gradients with; `latency` is for measurements."""

    def __init__(
        self,
        rank: int,
        edges: Sequence[Edge],
        homes: Sequence[int],
        timeout: float,
        device: torch.device = CPU,
        latency: float = 0.0,
        team: Team | None = None,
    ) -> None:
        self.device, self._latency, self._team = device, latency, team
        self.rank, self._homes, self.seconds = rank, list(homes), timeout
        self._timeout = time_span(timeout)
        self._edges = {(edge.src, edge.dst, edge.phase): edge for edge in edges}
        self._width = max((len(parcels(edge.values)) for edge in edges), default=1)
        # Where gloo may write.
        self._buffers = Recycled(pinned=device != CPU)
        self._channels: dict[tuple[str, int | None], _Channel] = {}
        self._failed: Failures = []
        self.ledger: Ledger | None = None
        # Sums under way, by batch: the works, and where copies of them have to go.
        self._sums: dict[int, tuple[list[dist.Work], list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def edge_of(self, action: Action) -> Edge:
        """The edge whose values a send or receive moves."""
        assert action.peer is not None
        peer = self._homes[action.peer]
        ends = (action.stage, peer) if action.kind in SENDS else (peer, action.stage)
        edge = self._edges.get((*ends, action.kind[1]))
        if edge is None:
            raise VerifyError(f"no edge from stage {ends[0]} to stage {ends[1]} in phase {action.kind[1]}", where=f"action {action}")
        return edge

    def send(self, action: Action, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start a send; it goes on in the background."""
        if self._failed:
            self.check()
        channel = self._channels.get((action.kind, action.peer)) or self._open(action)
        messages = [self._on_host(x) for x in channel.packing.pack([tensors[name].contiguous() for name in channel.names])]
        if self.ledger is not None:
            for message in messages:
                self._note("send", action, message)
        if channel.link is not None:
            channel.link.begin(action, lambda: self._start_send(action, channel, messages))
            return
        assert channel.sender is not None
        try:
            channel.sender.hold(action, self._start_send(action, channel, messages))
        except RuntimeError as error:
            raise self._lost(action, error) from error

    def post(self, action: Action) -> bool:
        """Post a receive ahead of its action, unless its channel has enough of them under way."""
        channel = self._channels.get((action.kind, action.peer)) or self._open(action)
        if action.mb in channel.posted:
            return True
        if len(channel.posted) >= POSTED:
            return False
        self._post(action, channel)
        return True

    def expect(self, action: Action) -> None:
        """Post a receive, now or as soon as its channel has room; those of a channel in their order, each once."""
        channel = self._channels.get((action.kind, action.peer)) or self._open(action)
        if channel.expected or len(channel.posted) >= POSTED:
            channel.expected.append(action)
        else:
            self._post(action, channel)

    def receive(self, action: Action) -> dict[str, torch.Tensor]:
        """Wait for the values of a receive action."""
        channel = self._channels.get((action.kind, action.peer)) or self._open(action)
        if action.mb not in channel.posted:
            if action in channel.expected:
                channel.expected.remove(action)
            self._post(action, channel)
        messages, works = channel.posted.pop(action.mb)
        if channel.expected:
            # While this one is on its way there is time for it.
            self._post(channel.expected.popleft(), channel)
        for work in works:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise self._lost(action, error) from error
        if self._failed:
            self.check()
        if self.device != CPU:
            # The pinned memory may be used again only when the copy is done, so it is waited for.
            messages = [message.to(self.device) for message in messages]
        return dict(zip(channel.names, channel.packing.unpack(messages), strict=True))

    def sum_up(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Start to sum up tensors over the ranks of the stage, in place; nobody may touch them until `finish_sum`."""
        assert self._team is not None, f"{action} on a stage of one rank"
        self.check()
        works, copies = [], []
        try:
            for tensor in tensors:
                held = tensor
                if self._team.kind == "gloo" and self.device != CPU:
                    held = self._on_host(tensor)
                    copies.append((tensor, held))
                work = dist.all_reduce(held, group=self._team.group, async_op=True)
                assert work is not None
                works.append(work)
        except RuntimeError as error:
            raise self._lost_sum(action, error) from error
        self._sums[action.mb] = (works, copies)

    def finish_sum(self, action: Action) -> None:
        """Wait for the sum of the batch that an action uses, if it has not been waited for."""
        works, copies = self._sums.pop(action.mb, ([], []))
        for work in works:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                raise self._lost_sum(action, error) from error
        for tensor, held in copies:
            tensor.copy_(held)

    def _lost_sum(self, action: Action, error: RuntimeError) -> PeerLost:
        assert self._team is not None
        others = ", ".join(str(rank) for rank in self._team.ranks if rank != self.rank)
        what, hint = self._what_failed(error)
        return PeerLost(
            f"rank {others} (stage {action.stage}) {what}; waited for the sum of the gradients of batch {action.mb}",
            where=f"rank {self.rank}, stage {action.stage}, action {action}",
            hint=hint,
        )

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What gloo can read: the tensor, or a pinned copy of it that is complete."""
        if tensor.device == CPU:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)

    def flush(self) -> None:
        """Wait until the peers have everything that was sent."""
        ends = [end for channel in self._channels.values() if (end := channel.link or channel.sender) is not None]
        done = [threading.Event() for _ in ends]
        for end, event in zip(ends, done, strict=True):
            end.tell(event)
        for event in done:
            event.wait()  # bounded: each wait of the sender's thread is
        self.check()

    def check(self) -> None:
        """Raise what went wrong in the background."""
        if self._failed:
            action, error = self._failed[0]
            raise self._lost(action, error) from error

    def _start_send(self, action: Action, channel: _Channel, messages: Sequence[torch.Tensor]) -> Works:
        tag, group, peer = self._tag(channel, action.mb), _world(), channel.peer
        return [(group.send([x], peer, tag + len(PHASES) * i), x) for i, x in enumerate(messages)]

    def _post(self, action: Action, channel: _Channel) -> None:
        tag, group, peer = self._tag(channel, action.mb), _world(), channel.peer
        messages = channel.packing.messages()
        try:
            works = [group.recv([x], peer, tag + len(PHASES) * i) for i, x in enumerate(messages)]
        except RuntimeError as error:
            raise self._lost(action, error) from error
        channel.posted[action.mb] = (messages, works)
        if self.ledger is not None and self.device == CPU:
            for message in messages:
                self._note("post", action, message)

    def _note(self, what: str, action: Action, message: torch.Tensor) -> None:
        assert self.ledger is not None
        self.ledger.value(what, f"{action.kind}{'<' if action.kind in RECEIVES else '>'}{action.peer}", action.holder, message)

    def _open(self, action: Action) -> _Channel:
        """The channel of a send or receive, from its first use on."""
        edge = self.edge_of(action)
        assert action.peer is not None
        names, tag = tuple(value.name for value in edge.values), _FIRST_TAG + PHASES.index(edge.phase)
        channel = _Channel(edge, action.peer, tag, names, Packing(edge.values, self._buffers, self.device), {}, deque())
        if action.kind in SENDS:
            told = None if self.ledger is None else lambda action, message: self._note("sent", action, message)
            channel.sender = Sender(self._timeout, self._failed, told)
            channel.link = Link(self._latency, channel.sender, self._failed) if self._latency else None
        self._channels[action.kind, action.peer] = channel
        return channel

    def _tag(self, channel: _Channel, mb: int) -> int:
        return channel.tag + len(PHASES) * (mb % _MICROBATCHES * self._width)

    def _lost(self, action: Action, error: RuntimeError) -> PeerLost:
        assert action.peer is not None
        what, hint = self._what_failed(error)
        values = ", ".join(f"%{v.name} : {v.type}" for v in self.edge_of(action).values)
        return PeerLost(
            f"rank {action.peer} (stage {self._homes[action.peer]}) {what}; waited for {describe(action)}, which carries {values}",
            where=f"rank {self.rank}, stage {action.stage}, action {action}",
            hint=hint,
        )

    def _what_failed(self, error: RuntimeError) -> tuple[str, str]:
        """What torch says of a peer, in words, and a hint."""
        text = str(error).splitlines()[0] if str(error) else ""
        # Gloo puts the place in its own source in front, and advice behind.
        detail = (text.partition("] ")[2] if text.startswith("[") else text).partition(". ")[0]
        if "imed out" in text or "timeout" in text:
            return f"did not answer within {self.seconds:g} s", "if it was only slow, give a longer --timeout"
        return f"closed the connection ({detail.rstrip('.')})", ""
