"""The devices and the paths between them by index, as the planner uses them. In: a Cluster. Out: a `Fleet`.

`classes` groups devices that are interchangeable: alike themselves, and connected alike to every other device. `kinds`
groups those that are alike themselves. `Cluster.path` says what transfers share: links in each direction and network
cards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from penstock.ir.cluster.cluster import HOST_TO_DEVICE, OTHER_HOST, SAME_HOST, Cluster, Device, Host, LinkClass, Path

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hop:
    """A boundary between the devices of two stages.

    A message takes latency + bytes / bandwidth on each path in `ways`, a row (latency, forward bandwidth, back latency,
    back bandwidth). `busy` is the traffic of a microbatch over a link or NIC, without repetitions: (forward part, back
    part, bytes per second). `nics` is the same by name of the NIC.
    """

    ways: tuple[tuple[float, float, float, float], ...]
    busy: tuple[tuple[float, float, float], ...]
    nics: tuple[tuple[str, float, float, float], ...]

    def round_trip(self, out: float, back: float) -> float:
        forward = max(latency + out / speed for latency, speed, _, _ in self.ways) if out else 0.0
        return forward + (max(latency + back / speed for _, _, latency, speed in self.ways) if back else 0.0)

    def load(self, out: float, back: float) -> float:
        """Return the seconds of one microbatch on the busiest link or NIC."""
        return max((out * forward + back * backward) / speed for forward, backward, speed in self.busy)


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring all-reduce: x bytes take fixed + x * each seconds. `nics` are seconds per byte of each NIC."""

    fixed: float = 0.0
    each: float = 0.0
    nics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Fleet:
    """The devices of a cluster. `path(a, b)` is the path from device to device, by index. `hops` and `rings` are the
    boundaries and sums of stages that were asked for (cost.py). Where it does not train, there are no sums."""

    devices: tuple[Device, ...]
    path: Callable[[int, int], Path]
    trains: bool = True
    hops: dict[tuple[Indices, Indices], Hop] = field(default_factory=dict, repr=False, compare=False)
    rings: dict[Indices, Ring] = field(default_factory=dict, repr=False, compare=False)
    apart: dict[tuple[frozenset[tuple[Path, Path]], int], Hop] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.devices)

    def ways_apart(self, pairs: Sequence[tuple[int, int]]) -> set[tuple[Path, Path]] | None:
        """Return the ways there and back between pairs of devices, where no two have a network card in common that
        counts; None where they may."""
        ways = {(self.path(a, b), self.path(b, a)) for a, b in pairs}
        return None if any(there.shares or back.shares for there, back in ways) else ways

    def but(self, devices: Sequence[Device]) -> Fleet:
        """Return the same connections between devices that are changed, one for one."""
        assert len(devices) == len(self.devices)
        return Fleet(tuple(devices), self.path, self.trains)

    def with_memory(self, factor: float) -> Fleet:
        """Return the same fleet with the memory times the factor."""
        return self.but(
            [replace(d, spaces=tuple((name, int(size * factor)) for name, size in d.spaces)) for d in self.devices]
        )

    def only(self, indices: Sequence[int]) -> Fleet:
        """Return the fleet of some of the devices, in this order."""
        chosen, path = tuple(indices), self.path
        return Fleet(tuple(self.devices[i] for i in chosen), lambda a, b: path(chosen[a], chosen[b]), self.trains)

    def is_apart(self, devices: Sequence[int]) -> bool:
        """Say whether these devices are on several hosts."""
        return len({self.devices[i].host for i in devices}) > 1

    def kinds(self) -> list[int]:
        """Return for every device the first one that is alike."""
        return list(self._kinds)

    @cached_property
    def _kinds(self) -> Indices:
        first: dict[Device, int] = {}
        return tuple(first.setdefault(replace(device, name="", host=""), i) for i, device in enumerate(self.devices))

    @cached_property
    def exchangeable(self) -> Indices:
        """For every device the first one that it is interchangeable with."""
        first = {i: group[0] for group in self.classes() for i in group}
        return tuple(first[i] for i in range(len(self.devices)))

    def classes(self) -> list[list[int]]:
        """Return the groups of interchangeable devices, in order of their first."""
        kinds, groups = self.kinds(), list[list[int]]()
        for i in range(len(self.devices)):
            home = next(
                (group for group in groups if kinds[group[0]] == kinds[i] and self._exchangeable(group, i)), None
            )
            if home is None:
                groups.append([i])
            else:
                home.append(i)
        return groups

    def _exchangeable(self, group: list[int], new: int) -> bool:
        old = group[0]
        inside = (
            [self.path(a, b) for a in group for b in group if a != b]
            + [self.path(a, new) for a in group]
            + [self.path(new, a) for a in group]
        )
        if any(way != inside[0] for way in inside):
            return False
        others = [x for x in range(len(self.devices)) if x not in (*group, new)]
        return all(self.path(old, x) == self.path(new, x) and self.path(x, old) == self.path(x, new) for x in others)


def fleet_of(cluster: Cluster) -> Fleet:
    """Return the devices of a cluster, with its links or the usual ones between hosts of their kind."""
    names = [device.name for device in cluster.devices]
    # Where no link is named, those of devices alike on the same hosts are the same.
    alike: dict[Device, int] = {}
    groups = [
        alike.setdefault(replace(x, name=x.name if cluster.links else ""), i) for i, x in enumerate(cluster.devices)
    ]
    paths: dict[tuple[int, int, bool], Path] = {}

    @cache
    def path(a: int, b: int) -> Path:
        key = groups[a], groups[b], a == b
        if key not in paths:
            paths[key] = cluster.path(names[a], names[b])
        return paths[key]

    return Fleet(cluster.devices, path)


def equal_hosts(
    hosts: int, each: int, device: Device, inside: tuple[float, float], across: tuple[float, float]
) -> Cluster:
    """Make a cluster of `hosts` hosts of `each` devices.

    `inside` is (bandwidth, latency) between devices of one host, `across` that of the one network card of each host.
    """
    devices = tuple(replace(device, name=f"h{h}:{i}", host=f"h{h}") for h in range(hosts) for i in range(each))
    classes = tuple(
        LinkClass(kind, *rates) for kind, rates in ((SAME_HOST, inside), (HOST_TO_DEVICE, inside), (OTHER_HOST, across))
    )
    return Cluster(devices, hosts=tuple(Host(f"h{h}", nic_bandwidth=across[0]) for h in range(hosts)), classes=classes)
