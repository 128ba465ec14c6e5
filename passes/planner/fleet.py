"""The devices and the ways between them as the planner sees them: by index. In: a Cluster. Out: a `Fleet`.

`classes` groups devices that may be exchanged for one another: alike themselves, and connected alike to every other device. `kinds` groups
those that are alike themselves. What transfers share, links in each direction and network cards, is what `Cluster.path` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from penstock.ir.cluster.cluster import HOST_TO_DEVICE, OTHER_HOST, SAME_HOST, Cluster, Device, Host, LinkClass, Path


@dataclass(frozen=True)
class Fleet:
    """`path(a, b)` leads from device to device, by index."""

    devices: tuple[Device, ...]
    path: Callable[[int, int], Path]

    def __len__(self) -> int:
        return len(self.devices)

    def but(self, devices: Sequence[Device]) -> Fleet:
        """The same connections between devices that are changed, one for one."""
        assert len(devices) == len(self.devices)
        return Fleet(tuple(devices), self.path)

    def with_memory(self, factor: float) -> Fleet:
        """The same with so many times the memory."""
        return self.but(
            [replace(d, spaces=tuple((name, int(size * factor)) for name, size in d.spaces)) for d in self.devices]
        )

    def only(self, indices: Sequence[int]) -> Fleet:
        """A part of the devices, in this order."""
        chosen, path = tuple(indices), self.path
        return Fleet(tuple(self.devices[i] for i in chosen), lambda a, b: path(chosen[a], chosen[b]))

    def kinds(self) -> list[int]:
        """For every device the first one that is alike."""
        first: dict[Device, int] = {}
        return [first.setdefault(replace(device, name="", host=""), i) for i, device in enumerate(self.devices)]

    def classes(self) -> list[list[int]]:
        """Devices that can be exchanged, in order of their first."""
        kinds, found = self.kinds(), list[list[int]]()
        for i in range(len(self.devices)):
            home = next(
                (group for group in found if kinds[group[0]] == kinds[i] and self._exchangeable(group, i)), None
            )
            if home is None:
                found.append([i])
            else:
                home.append(i)
        return found

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
    """The devices of a cluster, with its links or the usual ones between hosts of their kind."""
    names = [device.name for device in cluster.devices]

    @cache
    def path(a: int, b: int) -> Path:
        return cluster.path(names[a], names[b])

    return Fleet(cluster.devices, path)


def equal_hosts(
    hosts: int, each: int, device: Device, inside: tuple[float, float], across: tuple[float, float]
) -> Cluster:
    """`hosts` hosts of `each` devices: (bandwidth, latency) between devices of one host, and of the one network card that each host has."""
    devices = tuple(replace(device, name=f"h{h}:{i}", host=f"h{h}") for h in range(hosts) for i in range(each))
    classes = tuple(
        LinkClass(kind, *rates) for kind, rates in ((SAME_HOST, inside), (HOST_TO_DEVICE, inside), (OTHER_HOST, across))
    )
    return Cluster(devices, hosts=tuple(Host(f"h{h}", nic_bandwidth=across[0]) for h in range(hosts)), classes=classes)
