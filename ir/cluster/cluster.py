"""The cluster: hosts, devices with their memory spaces and rates, and the links between them.

    Device     where a stage runs, and what it can do; `flops` is the rate of a large float32 product, `efficiency` what
               families of work reach of it
    Link       a two-way connection between two devices
    Space      a memory space beside those of devices, where items are that a device lets go of (spaces.py); to it goes
               a SpaceWay
    Host       where devices are, and the network card through which its links go
    LinkClass  what a pair of devices without a link of its own gets, by kind: same-host, other-host, host-to-device
    Path       what a transfer from one device to another goes through: rate, latency, and what it shares with other
               transfers

Devices are those of device.py; links, hosts and paths those of links.py. This file has their names, too: it is where
others import them from. Files are read and written by file.py, which says what they look like.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral

from penstock.support.errors import UsageError
from penstock.support.hardware import gpus, usable_cores, usable_memory

from .device import (
    COPY_BANDWIDTH,
    EFFICIENCY_PREFIX,
    KINDS,
    MEASURED,
    TAKEN,
    THREAD_FLOPS,
    Device,
    cuda_device,
    device_of_gpu,
    is_architecture,
)
from .gpus import LIBRARY_OVERHEAD
from .links import (
    CLASSES,
    GLOO,
    HOST_TO_DEVICE,
    IPC,
    MEMORY,
    NCCL,
    OTHER_HOST,
    PINNED,
    SAME_HOST,
    Host,
    Link,
    LinkClass,
    Path,
    class_between,
)
from .spaces import CARD, RAM, SPACE_KINDS, Space, SpaceWay

__all__ = [
    "CLASSES",
    "COPY_BANDWIDTH",
    "EFFICIENCY_PREFIX",
    "GLOO",
    "HOST_TO_DEVICE",
    "IPC",
    "KINDS",
    "MEASURED",
    "MEMORY",
    "NCCL",
    "OTHER_HOST",
    "PINNED",
    "SAME_HOST",
    "TAKEN",
    "THREAD_FLOPS",
    "Cluster",
    "Device",
    "Host",
    "Link",
    "LinkClass",
    "Path",
    "class_between",
    "device_of_gpu",
    "is_architecture",
]


@dataclass(frozen=True)
class Cluster:
    """Devices, the links between them, their hosts, and memory spaces. `classes` are the link classes that differ from
    the usual ones, and `ways` those of devices to spaces. A host that no entry describes has no network card worth
    knowing."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    hosts: tuple[Host, ...] = ()
    classes: tuple[LinkClass, ...] = ()
    spaces: tuple[Space, ...] = ()
    ways: tuple[SpaceWay, ...] = ()

    @cached_property
    def _devices(self) -> dict[str, Device]:
        return {device.name: device for device in reversed(self.devices)}

    @cached_property
    def _links(self) -> dict[frozenset[str], Link]:
        return {frozenset((link.a, link.b)): link for link in reversed(self.links)}

    @cached_property
    def _hosts(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def _cards(self) -> dict[str, tuple[float, frozenset[str]]]:
        """Return the rate of each named network card, that of the fastest of its links, and the hosts that all of its
        links touch."""
        cards: dict[str, tuple[float, frozenset[str]]] = {}
        for link in self.links:
            if link.nic:
                ends = frozenset(self.device(end).host for end in (link.a, link.b))
                rate, owners = cards.get(link.nic, (0.0, ends))
                cards[link.nic] = max(rate, link.bandwidth), owners & ends
        return cards

    def device(self, name: str) -> Device:
        """Return the device of that name; UsageError where there is none."""
        device = self._devices.get(name)
        if device is None:
            raise UsageError(
                f"no device {name!r} in the cluster", hint=f"it has {', '.join(d.name for d in self.devices)}"
            )
        return device

    def spaces_of(self, device: str) -> tuple[Space, ...]:
        """Return the spaces beside its memory that a device reaches: those of its host, of the kind for it."""
        end = self.device(device)
        return tuple(s for s in self.spaces if s.host in ("", end.host) and SPACE_KINDS[s.kind] == end.kind)

    def space(self, name: str, device: str) -> Space:
        """Return the space of that name that a device reaches; UsageError where there is none."""
        spaces = {space.name: space for space in reversed(self.spaces_of(device))}
        if name not in spaces:
            kind = next(kind for kind, user in SPACE_KINDS.items() if user == self.device(device).kind)
            known = f"it reaches {', '.join(sorted(spaces))}" if spaces else "add a [[space]] to the cluster file"
            raise UsageError(
                f"device {device} reaches no memory space {name!r} of kind {kind!r}, which its kind of device uses",
                hint=known,
            )
        return spaces[name]

    def way(self, device: str, space: Space) -> Path:
        """Return what copies between a device and a space go through, in each direction: its way there, the card of
        that way, with the rate of the fastest of its ways, and what all devices of the host share. A GPU without a way
        of its own has that of its link with the host."""
        host = self.device(device).host
        usual = SpaceWay(device, space.name, *self.link_class(HOST_TO_DEVICE)) if space.kind == RAM else None
        ways = (way for way in self.ways if (way.device, way.space) == (device, space.name))
        alone = next(ways, usual)
        shares = [] if alone is None else [(f"{device} on {host}", alone.bandwidth)]
        if alone is not None and alone.nic:
            together = (way.bandwidth for way in self.ways if way.nic == alone.nic and self._host_of(way) == host)
            shares.append((f"{CARD}{alone.nic} on {host}", max(together)))
        shares += [(host, space.bandwidth)] if space.bandwidth else []
        latency = space.latency if alone is None else alone.latency
        return Path(min((rate for _, rate in shares), default=math.inf), latency, tuple(shares))

    def _host_of(self, way: SpaceWay) -> str:
        """Return the host of the device of a way; of one that is not there, none."""
        return self._devices[way.device].host if way.device in self._devices else ""

    def shares_memory(self, a: str, b: str) -> bool:
        """Return whether ranks on two devices hand messages over in memory, rather than through sockets."""
        return self.carrier(a, b) in (MEMORY, PINNED)

    def carrier(self, a: str, b: str) -> str:
        """Return what carries messages between ranks on two devices: memory, pinned, ipc, nccl or gloo."""
        first, second = self.device(a), self.device(b)
        near, gpus = first.host == second.host, (first.kind == "cuda") + (second.kind == "cuda")
        if near:
            return (MEMORY, PINNED, IPC)[gpus]
        return NCCL if gpus == 2 else GLOO

    @property
    def is_shared(self) -> bool:
        """Return whether all messages go through memory."""
        return all(self.shares_memory(self.devices[0].name, device.name) for device in self.devices)

    def message_overhead(self, a: str, b: str) -> float:
        """Return the seconds of a rank on `a` for its end of a message to or from `b`."""
        carrier = self.carrier(a, b)
        if carrier in (IPC, NCCL):
            return LIBRARY_OVERHEAD
        return self.device(a).message_overhead if carrier == GLOO else self.device(a).shared_overhead

    def link(self, a: str, b: str) -> Link:
        """Return the connection between two devices, by entry or by class. That of a class is no faster than the
        network cards it goes through."""
        link = self._links.get(frozenset((a, b)))
        return link if link is not None else self._by_class(a, b)

    def _by_class(self, a: str, b: str) -> Link:
        first, second = self.device(a), self.device(b)
        if first.host == second.host:
            return Link(a, b, *self.link_class(class_between(first, second)))
        bandwidth, latency = self.link_class(OTHER_HOST)
        cards = [self._hosts[h] for h in (first.host, second.host) if h in self._hosts]
        rates = [card.nic_bandwidth for card in cards if card.nic_bandwidth]
        if rates and not any(c.kind == OTHER_HOST for c in self.classes):
            bandwidth = min(rates)  # better than a guess
        return Link(a, b, min((bandwidth, *rates)), latency + sum(card.nic_latency for card in cards))

    def message_link(self, a: str, b: str) -> Link:
        """Return the connection of two devices as messages use it. Those of a GPU go through memory of its host, unless
        NCCL carries them. They are copied as a whole, and then the sender writes them to memory of the receiver, or
        gloo to a socket."""
        link, ends = self.link(a, b), (self.device(a), self.device(b))
        copies, carrier = sum(device.kind == "cuda" for device in ends), self.carrier(a, b)
        if carrier == PINNED:
            # The link of the pair is that of the copies.
            written = min(device.copy_bandwidth for device in ends)
            return replace(link, bandwidth=1 / (copies / link.bandwidth + 1 / written))
        if not copies or carrier != GLOO:
            return link
        sockets = min(device.socket_bandwidth for device in ends)
        rate, latency = self.link_class(HOST_TO_DEVICE)
        seconds = 1 / min(link.bandwidth, sockets) + copies / rate
        return replace(link, bandwidth=1 / seconds, latency=link.latency + copies * latency)

    def link_class(self, kind: str) -> tuple[float, float]:
        """Return the bandwidth and latency of a class of links."""
        return next(((c.bandwidth, c.latency) for c in self.classes if c.kind == kind), CLASSES[kind])

    def path(self, a: str, b: str) -> Path:
        """Return the links and cards that a transfer from `a` to `b` goes through. The card of a link is shared by
        direction where all its links have one host in common and this one leaves it; otherwise it is one medium for
        all. Links by class share the cards of both hosts."""
        link, source, target = self.message_link(a, b), self.device(a), self.device(b)
        shares: list[tuple[str, float]] = []
        if link.nic:
            rate, owners = self._cards[link.nic]
            way = "" if len(owners) != 1 or source.host == target.host else " out" if source.host in owners else " in"
            shares.append((f"{link.nic}{way}", rate))
        elif frozenset((a, b)) not in self._links and source.host != target.host:
            for host, way in ((source.host, "out"), (target.host, "in")):
                card = self._hosts.get(host)
                if card is not None and card.nic_bandwidth:
                    shares.append((f"nic of {host} {way}", card.nic_bandwidth))
        summing = min(source.socket_bandwidth, target.socket_bandwidth) if self.shares_memory(a, b) else math.inf
        return Path(link.bandwidth, link.latency, tuple(shares), summing)

    @staticmethod
    def local(count: int | None = None, threads: Sequence[int] = ()) -> Cluster:
        """Return a cluster of CPU devices on this machine. `count` equal ones share its threads and memory evenly. With
        numbers of threads there is one device for each, with memory in proportion. Rates are guesses; `penstock doctor`
        measures them."""
        if count is None:
            count = len(threads) or 1
        if not _whole(count) or count < 1:
            raise UsageError(f"a cluster needs a whole number of devices, one or more, got {count!r}")
        if not all(map(_whole, threads)):
            raise UsageError(f"threads must be whole numbers, got {', '.join(map(repr, threads))}")
        if threads and (len(threads) != count or min(threads) < 1):
            raise UsageError(
                f"{count} devices need {count} numbers of threads of 1 or more, got {', '.join(map(str, threads))}"
            )
        each = tuple(threads) or (max(1, usable_cores() // count),) * count
        total = usable_memory()
        rams = [total * n // sum(each) // 2**30 * 2**30 or total * n // sum(each) for n in each]
        return Cluster(
            tuple(
                Device(f"cpu:{i}", threads=n, flops=THREAD_FLOPS * n, spaces=(("ram", ram),) if ram else ())
                for i, (n, ram) in enumerate(zip(each, rams, strict=True))
            )
        )

    @staticmethod
    def detect() -> Cluster:
        """Return the devices of this machine without measuring them: its NVIDIA devices where a driver answers, and one
        CPU device with all cores."""
        return Cluster((*Cluster.local(1).devices, *(device_of_gpu(gpu) for gpu in gpus()[0])))

    @staticmethod
    def listed(names: str) -> Cluster:
        """Return devices of this machine by a list such as `cpu,sm_90,sm_90`: CPU devices share its threads,
        architectures stand for its GPUs in order."""
        words = [word.strip() for word in names.split(",")]
        bad = [word for word in words if word != "cpu" and not is_architecture(word)]
        if bad:
            raise UsageError(
                f"unknown device {bad[0]!r}",
                hint="a number of CPU devices, or a list of `cpu` and CUDA architectures: cpu,sm_90",
            )
        cpus = iter(Cluster.local(max(words.count("cpu"), 1)).devices)
        devices: list[Device] = []
        for word in words:
            number = sum(d.kind == "cuda" for d in devices)
            devices.append(next(cpus) if word == "cpu" else cuda_device(f"cuda:{number}", word))
        return Cluster(tuple(devices))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster file, TOML or YAML; one UsageError lists everything that is wrong with it."""
        from .file import read_cluster  # lazy: heavy

        if not isinstance(path, str | os.PathLike):
            raise UsageError(
                f"a cluster is loaded from the path of a file, got {path!r}", hint="Cluster.local(N) makes N devices"
            )
        return read_cluster(path)

    def to_toml(self) -> str:
        """Return the cluster file that `load` reads back as this cluster."""
        from .file import cluster_toml  # lazy: heavy

        return cluster_toml(self)


def _whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)
