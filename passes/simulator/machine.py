"""The machine that a schedule is simulated on: the links that messages go through, and the ranks that share the cores
of a host.

In: a cluster, and where ranks are. Out: a SimulatedMachine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.memory.walk import LOOK_AHEAD, POSTED
from penstock.ir.schedule import Action
from penstock.ir.sharding.tile_messages import goes_in_parcels

# The bytes that a send of gloo writes before it returns, where they were measured (benchmarks/truth.py --calibrate).
SOCKET_BUFFER = 4e6


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a message between two ranks. `shares` are (name, bytes per second) of links and NICs, which all
    messages with the same name share; `shared`: memory of both. Sums of gradients go at `summing` bytes per second at
    most. What is handed on goes `whole`, or in parcels while it comes."""

    shares: tuple[tuple[str, float], ...] = ()
    latency: float = 0.0
    shared: bool = False
    summing: float = math.inf
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Seat:
    """The needs of a rank of a host's cores: `threads` while it computes, of each of which a quota may leave only a
    part (`quota`), granted anew after each `period` (0: nothing is saved up, quotas.py). `speeds` are those of the
    host: the speed of a core while 1, 2, ... threads are busy, compared with one thread alone. There may be more of
    them than cores. Sockets take processor time: a send writes its first `buffer` bytes itself, at `writing` seconds a
    byte, before the rank goes on. A received byte takes `reading` seconds of a core, beside the computations of the
    rank. Into shared memory a send writes all its bytes itself, at `copying` seconds a byte."""

    host: str
    cores: float
    threads: int = 1
    quota: float = 1.0
    period: float = 0.0
    writing: float = 0.0
    buffer: float = 0.0
    reading: float = 0.0
    copying: float = 0.0
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TransportModel:
    """The rules of messages. `posted` None: messages need no posted receive."""

    posted: int | None = POSTED
    look_ahead: int = LOOK_AHEAD
    late: float = 0.0


class Copy(NamedTuple):
    """A copy between a device and another memory space: its way, its bytes, and the kinds of computations that touch
    what is copied."""

    route: Route = Route()
    nbytes: float = 0.0
    users: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """Routes between ranks, and seats of those that share a host's cores; a rank without a seat has its device to
    itself. `together` are the ranks that run a computation at once, by rank, stage and kind. `exchanged` says how many
    seconds values of its collectives travel in an action, beside its own. `copied` says what an action of a rank
    copies. `tiles` are the bytes of messages between unlike meshes and of their largest parcels, by
    channel."""

    route: Callable[[int, int], Route] = lambda source, target: Route()
    seats: Mapping[int, Seat] = field(default_factory=dict)
    transport: TransportModel = TransportModel()
    together: Mapping[tuple[int, int, str], tuple[int, ...]] = field(default_factory=dict)
    exchanged: Callable[[int, Action], float] = lambda rank, action: 0.0
    copied: Callable[[int, Action], Copy] = lambda rank, action: Copy()
    tiles: Mapping[tuple[str, int, int, int, int], tuple[float, float]] = field(default_factory=dict)

    def size_of(
        self, message: tuple[str, int, int, int, int], nbytes: Callable[[str, int, int], float]
    ) -> tuple[float, float]:
        """Return the bytes of a message, and of its largest parcel: phase, ranks, stages. `nbytes` are those of edges
        without tiles."""
        phase, _, _, *stages = message
        if message in self.tiles:
            return self.tiles[message]
        whole = nbytes(phase, *stages)
        return whole, whole


def with_messages(seat: Seat, device: Device) -> Seat:
    """Return the seat of a rank whose messages take a core's time, in sockets and in shared memory. Rates of a device
    are within its quota, and what is read takes seconds of a core."""
    socket, reading = 1 / device.socket_bandwidth, device.quota / device.socket_bandwidth
    return replace(seat, writing=socket, buffer=SOCKET_BUFFER, reading=reading, copying=1 / device.copy_bandwidth)


# Messages take no time, and every rank has its device to itself.
FREE = SimulatedMachine()


def machine_of(
    cluster: Cluster,
    devices: Mapping[int, str],
    seats: Mapping[int, Seat] | None = None,
    transport: TransportModel = TransportModel(),
) -> SimulatedMachine:
    """Return the machine of a cluster file; `devices` says where each rank is. A link has its bandwidth in each
    direction. The resources that messages share beside it are those that `Cluster.path` names: network cards, by
    direction where that can be known."""

    @cache
    def through(a: str, b: str) -> Route:
        if a == b:
            return Route()
        path, whole = cluster.path(a, b), not goes_in_parcels(cluster, a, b)
        shares = ((f"{a}>{b}", path.bandwidth), *path.shares)
        return Route(shares, path.latency, cluster.shares_memory(a, b), path.summing, whole)

    return SimulatedMachine(lambda source, target: through(devices[source], devices[target]), seats or {}, transport)
