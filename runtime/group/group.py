"""The ranks of one run: where they meet, the values they exchange before it, and the connections they open.

In: a store that all reach. Out: a group.

Values in the store are sealed where a secret was given (sealed.py). gloo connects every rank with every other one. A
local run whose messages all go through shared memory, and that sums nothing up, does without it.

NCCL connects GPUs: the ranks of a sum or a collective, and the two ranks of a channel, each direction and phase by
itself. Its communicators are made at once, not at their first use, and in one order on all ranks. It takes one rank per
GPU, and none without: there, and with PENSTOCK_NCCL=0 on one of the ranks, gloo carries the bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from penstock.ir.schedule import Schedule
from penstock.support.errors import PeerLost, PenstockError, UsageError, VerifyError
from penstock.support.terminal import say
from penstock.support.words import itemised

from .neighbours import End, can_see_stores, connect, connect_pairs, ends_of, identity, is_sent, partner_of
from .reach import reach_from, reach_of

Result = TypeVar("Result")
# The library between GPUs. Its own deadlines, after which it aborts the process, come well after those of the run.
NCCL = "nccl"
_ABORT_FACTOR, _ABORT_SECONDS = 2.0, 60.0
_LOOPBACK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks of one stage, as torch knows them."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    kind: str


@dataclass(frozen=True, slots=True)
class Circle:
    """A group of ranks that do collectives together, as this rank knows it. `number` is the same on all of them. They
    have sockets between them if they share memory, else a group of torch with the library that moves its bytes."""

    ranks: tuple[int, ...]
    number: int
    lines: Mapping[int, socket.socket]
    group: dist.ProcessGroup | None = None
    kind: str = ""


class RankGroup:
    """The ranks of one run, met at a store; `timeout` bounds every wait in it. `reports`: reports go over gloo, too, as
    under torchrun."""

    def __init__(self, store: Store, rank: int, world: int, timeout: float, *, reports: bool = True) -> None:
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self._reports = reports
        self.team: Team | None = None
        self._keys: list[str] = []
        # Ends the process with an error, where its main thread may wait for a device that will not answer.
        self.lost: Callable[[PenstockError], None] = _end_with

    def connect_stages(self, schedule: Schedule, device: torch.device) -> dict[End, socket.socket]:
        """Open the connections that the ranks of a schedule need. They are the sockets of channels between ranks that
        share memory, and gloo, unless nothing would go over it."""
        key = identity()
        needed = self._reports or any(len(ranks) > 1 for ranks in schedule.replicas().values())
        # All ranks answer, and all decide the same. NCCL's groups are made in that of gloo.
        if needed or set(self._host_keys(device)) != {f"{key} cpu"} or not key:
            self.connect()
        return connect(self, ends_of(schedule, self.rank), key)

    def connect(self) -> None:
        """Open the gloo connections of all ranks."""
        try:
            dist.init_process_group(
                "gloo", store=self.store, rank=self.rank, world_size=self.world, timeout=time_span(self.timeout)
            )
        except RuntimeError as error:
            raise PeerLost(
                f"the group of {self.world} ranks did not connect within {self.timeout:g} s: {error}",
                where=f"rank {self.rank}",
            ) from error

    def form_team(self, ranks: Sequence[int], device: torch.device) -> None:
        """Open the group in which `ranks` sum up. All ranks of the stage call this, once they know what `device` they
        have."""
        gpus = [gpu.decode() for gpu in self.gather(f"gpu/{ranks[0]}", gpu_of(device).encode(), ranks)]
        kind = library_of(gpus)
        self.team = Team(tuple(ranks), self._new_group(ranks, kind, "sum up gradients", device), kind)

    def form_circles(self, groups: Sequence[tuple[int, ...]], device: torch.device) -> list[Circle]:
        """Open the groups in which this rank does collectives. All ranks call this with all groups, in one order."""
        # Collectives in memory are between CPUs.
        hosts = [value.partition(" ") for value in self._host_keys(device)] if groups else []
        keys = [key if kind == "cpu" else "" for key, _, kind in hosts]
        near = {ranks for ranks in groups if can_see_stores() and _are_equal([keys[rank] for rank in ranks])}
        far = [ranks for ranks in groups if ranks not in near]
        gpus = [gpu.decode() for gpu in self.gather("gpus", gpu_of(device).encode())] if far else []
        # Groups of the same ranks in another order share one of torch's, whose members are in the order of ranks. All
        # ranks open all of them: torch names groups by their number.
        opened: dict[tuple[int, ...], tuple[dist.ProcessGroup, str]] = {}
        for ranks in far:
            members = tuple(sorted(ranks))
            if members not in opened:
                kind = library_of([gpus[rank] for rank in members])
                opened[members] = self._new_group(members, kind, "do collectives", device, own=False), kind
        peers = {rank for ranks in near if self.rank in ranks for rank in ranks} - {self.rank}
        lines = connect_pairs(self, peers, keys[self.rank], "collectives") if peers else {}
        circles = []
        for number, ranks in enumerate(groups):
            if self.rank in ranks:
                of_group = {rank: lines[rank] for rank in ranks if ranks in near and rank != self.rank}
                circles.append(Circle(ranks, number, of_group, *opened.get(tuple(sorted(ranks)), (None, ""))))
        return circles

    def find_direct(self, schedule: Schedule, device: torch.device) -> set[tuple[int, str, int]]:
        """Return the channels between GPUs of one host that write to each other's memory. All ranks call this."""
        reach = [reach_from(text.decode()) for text in self.gather("reach", reach_of(device).text().encode())]
        return {channel for channel in channels_of(schedule) if reach[channel[0]].writes_to(reach[channel[2]])}

    def form_edges(
        self, schedule: Schedule, device: torch.device, direct: Collection[tuple[int, str, int]] = ()
    ) -> dict[End, dist.ProcessGroup]:
        """Open the communicators of channels between GPUs, but for those that are direct, and return those of this
        rank. All ranks call this."""
        gpus = [gpu.decode() for gpu in self.gather("gpus of edges", gpu_of(device).encode())]
        lines: dict[End, dist.ProcessGroup] = {}
        for source, kind, target in channels_of(schedule):
            library = library_of([gpus[source], gpus[target]])
            if library == "gloo" or (source, kind, target) in direct:
                continue
            pair = sorted((source, target))
            opened = self._new_group(pair, library, f"exchange messages {kind}", device, own=False)
            if self.rank == source:
                lines[kind, target] = opened
            elif self.rank == target:
                lines[partner_of(kind), source] = opened
        return lines

    def _host_keys(self, device: torch.device) -> list[str]:
        """Return what ranks that can share memory have in common, and the kind of device, by rank. All ranks ask each
        other once."""
        if not self._keys:
            key = f"{identity()} {device.type}"
            self._keys = [value.decode() for value in self.gather("near", key.encode())]
        return self._keys

    def _new_group(
        self, ranks: Sequence[int], kind: str, purpose: str, device: torch.device, *, own: bool = True
    ) -> dist.ProcessGroup:
        """Open a group of torch. With `own` its ranks call this, else all ranks of the run."""
        late = kind != "gloo"
        try:
            opened: dist.ProcessGroup = dist.new_group(
                list(ranks),
                timeout=time_span(self.timeout * _ABORT_FACTOR + _ABORT_SECONDS if late else self.timeout),
                backend=kind,
                use_local_synchronization=own,
                # With a device the communicator is made now.
                device_id=device if device.type == "cuda" and kind == NCCL else None,
            )
        except RuntimeError as error:
            raise PeerLost(
                f"ranks {', '.join(map(str, ranks))}, which {purpose}, did not connect within "
                f"{self.timeout:g} s: {error}",
                where=f"rank {self.rank}",
            ) from error
        return opened

    def put(self, key: str, value: bytes) -> None:
        self._guard(lambda: self.store.set(key, value.decode()), f"publishing {key!r}")

    def get(self, key: str, what: str) -> bytes:
        """Return a value that another rank puts there; PeerLost after the timeout."""

        def fetch() -> bytes:
            self.store.wait([key], time_span(self.timeout))
            return bytes(self.store.get(key))

        return self._guard(fetch, what)

    def gather(self, key: str, value: bytes, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Return the values of all ranks, in their order; or those of `ranks`, each of which asks."""
        self.put(f"{key}/{self.rank}", value)
        return [
            self.get(f"{key}/{rank}", f"{key!r} of rank {rank}")
            for rank in (range(self.world) if ranks is None else ranks)
        ]

    def forget(self, key: str) -> None:
        """Remove the value of this rank from what was gathered under a key, once no rank asks for it any more."""
        self._guard(lambda: self.store.delete_key(f"{key}/{self.rank}"), f"removing {key!r}")

    def agree(self, what: str, value: str, hint: str = "copy one bundle to all hosts") -> None:
        """Refuse to go on when a rank has another value than this one."""
        values = [v.decode() for v in self.gather(f"agree/{what}", value.encode())]
        if any(v != value for v in values):
            # The store may live in a rank that is about to end: all ranks read first.
            with contextlib.suppress(PeerLost):
                self.gather(f"agree/{what}/read", b"")
            listed = itemised(f"rank {rank}: {v}" for rank, v in enumerate(values))
            raise VerifyError(f"the ranks do not have the same {what}:{listed}", where=f"rank {self.rank}", hint=hint)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _guard(self, action: Callable[[], Result], waited_for: str) -> Result:
        try:
            return action()
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise PeerLost(
                f"waited up to {self.timeout:g} s for {waited_for}: {first}", where=f"rank {self.rank}"
            ) from error


def _end_with(error: PenstockError) -> None:
    say(f"penstock: error: {error}")
    os._exit(error.exit_code)


def _are_equal(keys: Sequence[str]) -> bool:
    """Return whether ranks with these keys share memory."""
    return len(set(keys)) == 1 and "" not in keys


def channels_of(schedule: Schedule) -> list[tuple[int, str, int]]:
    """Return the channels of a schedule as (source, kind of its sends, target), in the order in which all ranks open
    them."""
    return sorted(
        (rank, kind, peer)
        for rank in range(len(schedule.ranks))
        for kind, peer in ends_of(schedule, rank)
        if is_sent(kind)
    )


def ends_among(channels: Collection[tuple[int, str, int]], rank: int) -> set[End]:
    """Return the ends of channels that a rank has."""
    sends = {(kind, target) for source, kind, target in channels if source == rank}
    return sends | {(partner_of(kind), source) for source, kind, target in channels if target == rank}


def gpu_of(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of a device's GPU in the world, if NCCL could use it from this process; else nothing."""
    wanted = environment.get("PENSTOCK_NCCL", "1")
    if wanted not in ("0", "1"):
        raise UsageError(f"PENSTOCK_NCCL must be 0 or 1, got {wanted!r}")
    if device.type != "cuda" or wanted == "0" or not dist.is_nccl_available():
        return ""
    # Its UUID is the same in every container that shows it, whatever these call their host.
    return str(torch.cuda.get_device_properties(device).uuid)


def library_of(gpus: Sequence[str]) -> str:
    """Return the library for ranks with these GPUs: NCCL takes one rank per GPU, and no rank without."""
    return NCCL if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"


def host_store(world: int, timeout: float) -> TCPStore:
    """Open the meeting point of a local run: any free port, listening on loopback only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    _check_loopback(port)
    try:
        return TCPStore(
            "127.0.0.1",
            port,
            world,
            True,
            time_span(timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as error:
        raise not_met(f"127.0.0.1:{port}", timeout, error) from error


def _check_loopback(port: int) -> None:
    """Refuse a host that cannot reach itself: the store would try for as long as its timeout."""
    try:
        socket.create_connection(("127.0.0.1", port), _LOOPBACK_SECONDS).close()
    except OSError as error:
        raise UsageError(
            f"ranks of one host meet at 127.0.0.1, which cannot be reached: {error.strerror or error}",
            hint="the loopback interface of this host or container must be up: ip link set lo up",
        ) from error


def join_store(port: int, world: int, timeout: float) -> TCPStore:
    try:
        return TCPStore("127.0.0.1", port, world, False, time_span(timeout), wait_for_workers=False)
    except RuntimeError as error:
        raise not_met(f"127.0.0.1:{port}", timeout, error) from error


def time_span(seconds: float) -> timedelta:
    """Return a timeout for torch, which counts whole milliseconds and takes none of them for no limit."""
    return timedelta(seconds=max(seconds, 0.001))


def not_met(address: str, timeout: float, error: Exception, where: str = "") -> PeerLost:
    """Return the error for a meeting point that could not be reached."""
    first = str(error).partition("\n")[0]
    return PeerLost(
        f"could not meet the group at {address} within {timeout:g} s: {first}",
        where=where,
        hint="if it was only slow, give a longer --timeout",
    )
