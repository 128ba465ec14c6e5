"""Layouts: the graphs of device choices that the search walks. In: a fleet. Out: `DeviceLayout`s.

A node is (devices used so far, devices of the stage placed last, forwards that those have in hand). Stages are placed
from the last one to the first. An edge places one more stage: its devices, how many devices run later stages, its
forwards in hand, and the boundary between it and the stage behind it. A path from node 0 is the devices of a plan.

`exhaustive` has an edge for every choice of devices, up to exchange of devices that are alike and connected alike
(fleet.classes). So a search over it misses nothing. Its edges grow with product over classes of (n+1)(n+2)(n+3)/6.
`in_a_row` is for larger fleets: devices in a row, stages take the next ones. `rows` makes the rows of hosts one after
another, or of the first devices of p hosts, their second devices, and so on. In the latter the replicas of a stage lie
on different hosts. Slower devices are at either end or left out. All stages have equally many replicas, or any number
from a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from .cost import Hop, Ring, forwards_ahead, hop_of, ring_of
from .fleet import Fleet


@dataclass(frozen=True, slots=True)
class LayoutEdge:
    """The placement of one more stage, on `devices`, in front of `later` devices that run later stages."""

    source: int
    target: int
    devices: tuple[int, ...]
    later: int
    ahead: int
    hop: Hop | None
    ring: Ring


@dataclass(frozen=True)
class DeviceLayout:
    """A graph of device choices. A `complete` one leaves no choice out.

    `last[n]` are the devices of the stage placed last at node n, `placed[n]` all that are used. Edges come in the order
    of how many devices their source uses.
    """

    name: str
    complete: bool
    last: tuple[tuple[int, ...], ...]
    placed: tuple[frozenset[int], ...]
    edges: tuple[LayoutEdge, ...]


class _Builder:
    """A maker of edges, which share their boundaries and rings."""

    def __init__(self, fleet: Fleet, kinds: Sequence[int]) -> None:
        self.fleet, self.kinds = fleet, kinds
        self.hops: dict[tuple[tuple[int, ...], tuple[int, ...]], Hop] = {}
        self.rings: dict[tuple[int, ...], Ring] = {}

    def edge(
        self, source: int, target: int, devices: tuple[int, ...], later: int, ahead: int, behind: tuple[int, ...]
    ) -> LayoutEdge:
        if devices not in self.rings:
            self.rings[devices] = ring_of(self.fleet, devices)
        hop = None
        if behind:
            if (devices, behind) not in self.hops:
                self.hops[devices, behind] = hop_of(self.fleet, self.kinds, devices, behind)
            hop = self.hops[devices, behind]
        return LayoutEdge(source, target, devices, later, ahead, hop, self.rings[devices])


def exhaustive_size(classes: Sequence[Sequence[int]]) -> int:
    """Return the number of edges of the exhaustive layout, without a limit on replicas."""
    edges = 1
    for group in classes:
        n = len(group)
        edges *= (n + 1) * (n + 2) * (n + 3) // 6
    return edges


def exhaustive(fleet: Fleet, most_replicas: int = 0) -> DeviceLayout:
    classes = fleet.classes()
    most = most_replicas or len(fleet)
    build = _Builder(fleet, fleet.kinds())
    empty = tuple(0 for _ in classes)
    index = {(empty, empty, 0): 0}
    last: list[tuple[int, ...]] = [()]
    levels: list[list[tuple[tuple[int, ...], tuple[int, ...], int]]] = [
        [(empty, empty, 0)],
        *([] for _ in fleet.devices),
    ]
    edges: list[LayoutEdge] = []
    for level, nodes in enumerate(levels):
        for used, before, ready in nodes:
            for more in product(*(range(len(group) - n + 1) for group, n in zip(classes, used, strict=True))):
                if not 1 <= sum(more) <= most:
                    continue
                now = tuple(a + b for a, b in zip(used, more, strict=True))
                # Devices of a class are used in order, as they are interchangeable. Replicas stand class by class.
                devices = tuple(i for group, a, b in zip(classes, used, now, strict=True) for i in group[a:b])
                ahead = forwards_ahead(len(devices), sum(before), ready) if level else 0
                key, source = (now, more, ahead), index[used, before, ready]
                if key not in index:
                    index[key] = len(last)
                    last.append(devices)
                    levels[sum(now)].append(key)
                edges.append(build.edge(source, index[key], devices, level, ahead, last[source]))
    placed = [frozenset(i for group, n in zip(classes, used, strict=True) for i in group[:n]) for used, _, _ in index]
    return DeviceLayout("every choice of devices", True, tuple(last), tuple(placed), tuple(edges))


def in_a_row(
    fleet: Fleet, kinds: Sequence[int], row: Sequence[int], sizes: Sequence[int], name: str, most_stages: int
) -> DeviceLayout:
    """Return the layout in which stages take the next devices of the row, the last stage first, a number from `sizes`
    each."""
    build = _Builder(fleet, kinds)
    index = {(0, 0, 0): 0}
    last: list[tuple[int, ...]] = [()]
    edges: list[LayoutEdge] = []
    levels: list[list[tuple[int, int, int]]] = [[(0, 0, 0)], *([] for _ in row)]
    for level, nodes in enumerate(levels):
        for used, size, ready in nodes:
            for more in sizes:
                if used + more > len(row) or (len(sizes) == 1 and used // more >= most_stages):
                    continue
                ahead = forwards_ahead(more, size, ready) if level else 0
                key, source = (used + more, more, ahead), index[used, size, ready]
                # Replicas in the order of the fleet: a ring then crosses between hosts as seldom as it can.
                devices = tuple(sorted(row[used : used + more]))
                if key not in index:
                    index[key] = len(last)
                    last.append(devices)
                    levels[used + more].append(key)
                edges.append(build.edge(source, index[key], devices, level, ahead, last[source]))
    return DeviceLayout(name, False, tuple(last), tuple(frozenset(row[:used]) for used, _, _ in index), tuple(edges))


def rows(fleet: Fleet, speed: Sequence[float]) -> Iterator[tuple[str, list[int]]]:
    """Yield orders in which stages may take devices, by name, without repetitions. `speed` is the relative speed of
    each device."""
    hosts: dict[str, list[int]] = {}
    for i, device in enumerate(fleet.devices):
        hosts.setdefault(device.host, []).append(i)
    groups = list(hosts.values())
    seen: set[tuple[int, ...]] = set()
    kinds = fleet.kinds()
    ranks = sorted({kinds[i]: speed[i] for i in range(len(fleet))}.items(), key=lambda item: -item[1])
    for kept in range(len(ranks), 0, -1):
        chosen = {kind for kind, _ in ranks[:kept]}
        spans = [p for p in range(1, len(groups) + 1) if len(groups) % p == 0]
        for span in spans:
            row = [
                i
                for start in range(0, len(groups), span)
                for i in _dealt([[x for x in group if kinds[x] in chosen] for group in groups[start : start + span]])
            ]
            for way, order in (
                ("", row),
                (", slow first", sorted(row, key=lambda i: speed[i])),
                (", fast first", sorted(row, key=lambda i: -speed[i])),
            ):
                if tuple(order) not in seen:
                    seen.add(tuple(order))
                    yield (
                        f"{span} hosts at a time{way}" + ("" if kept == len(ranks) else f", {kept} fastest kinds"),
                        order,
                    )


def _dealt(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the first of each group, the second of each, and so on."""
    return [group[n] for n in range(max(map(len, groups), default=0)) for group in groups if n < len(group)]
