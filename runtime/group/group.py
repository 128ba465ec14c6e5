"""The ranks of one run: where they meet, what they tell each other before it, and the connections they open.
In: a store that all reach. Out: a group.

What ranks put into the store is sealed where a secret was given (sealed.py). gloo connects every rank with every other one; a local run
whose messages all go through shared memory, and that sums nothing up, does without it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from penstock.ir.schedule import Schedule
from penstock.support.errors import PeerLost, VerifyError
from penstock.support.words import itemised

from .neighbours import End, connect, ends_of, identity

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks of one stage, as torch knows them."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    kind: str


class RankGroup:
    """The ranks of one run, met at a store; `timeout` bounds every wait in it. `reports`: reports go over gloo, too, as under torchrun."""

    def __init__(self, store: Store, rank: int, world: int, timeout: float, *, reports: bool = True) -> None:
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self._reports = reports
        self.team: Team | None = None

    def connect_stages(self, schedule: Schedule, device: torch.device) -> dict[End, socket.socket]:
        """Open what the ranks of a schedule need: the sockets of channels between ranks that share memory, and
        gloo, unless nothing would go over it."""
        own = identity(device)
        needed = self._reports or any(len(ranks) > 1 for ranks in schedule.members().values())
        # Everybody answers, and all come to the same end.
        found = {value.decode() for value in self.gather("near", own.encode())}
        if needed or found != {own} or not own:
            self.connect()
        return connect(self, ends_of(schedule, self.rank), own)

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
        """Called by all `ranks` of a stage, this one among them, once they know what `device` they
        have: open the group in which they sum up."""
        found = [gpu.decode() for gpu in self.gather(f"gpu/{ranks[0]}", gpu_of(device).encode(), ranks)]
        kind = sum_kind(found)
        try:
            made = dist.new_group(
                list(ranks), timeout=time_span(self.timeout), backend=kind, use_local_synchronization=True
            )
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
        return [
            self.get(f"{key}/{rank}", f"{key!r} of rank {rank}")
            for rank in (range(self.world) if ranks is None else ranks)
        ]

    def agree(self, what: str, value: str, hint: str = "copy one bundle to all hosts") -> None:
        """Refuse to go on when a rank has another value than this one."""
        found = [v.decode() for v in self.gather(f"agree/{what}", value.encode())]
        if any(v != value for v in found):
            # The store may live in a rank that is about to end: everybody reads first.
            with contextlib.suppress(PeerLost):
                self.gather(f"agree/{what}/read", b"")
            listed = itemised(f"rank {rank}: {v}" for rank, v in enumerate(found))
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
