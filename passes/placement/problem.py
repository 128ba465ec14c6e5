"""The placement problem: nodes, edges and devices, and the cost of a placement.

A node takes `times[kind]` on a device of that kind (infinity: it cannot run there) and `memory` on any device. Its
output costs `transfer` when it crosses the border of a device of a kind that pays transfers, in or out. That is once
per node and device, however many edges cross. Nodes of one colour share a device. With S the nodes on device d of kind
t,

    load(d) = sum over S of times[t]
              + sum of transfer over nodes in S with a successor elsewhere,
                and nodes elsewhere with a successor in S                      if t pays transfers
    sum over S of memory <= memory of t

and the throughput objective is the largest load: the time per sample of a pipeline that is full.

A split is contiguous when the devices have an order in which edges between forward nodes never lead to an earlier
device. Backward nodes are where the forward nodes of their colour are: a device has a contiguous set of forward nodes
with the backward nodes that belong to them. A colour may have backward nodes only, and a backward node no colour. Edges
from or to it among backward nodes are then read the other way round, as those of the forward node that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of `count` equal devices. `memory` is that of each device, infinity for no limit."""

    name: str
    count: int
    memory: float = inf
    pays_transfers: bool = True


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node of the problem: its time per kind of device, its memory, the cost to transfer its output, and its
    colour."""

    name: str
    times: tuple[float, ...]
    memory: float = 0.0
    transfer: float = 0.0
    colour: int | str | None = None
    backward: bool = False


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """The problem. `edges` are pairs of positions in `nodes`, from the maker of a value to a user."""

    kinds: tuple[DeviceKind, ...]
    nodes: tuple[PlacedNode, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """The kind of every device, kind after kind."""
        return tuple(k for k, kind in enumerate(self.kinds) for _ in range(kind.count))

    def device_names(self) -> list[str]:
        return [f"{kind.name} {i}" for kind in self.kinds for i in range(kind.count)]


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement with its value. `device_of` has a device for every node.

    No placement of this sort is better than `bound`, so the value is the optimum where they are equal.
    """

    problem: PlacementProblem
    device_of: tuple[int, ...]
    value: float
    bound: float
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """The most that the value can be above the optimum, as a part of the value."""
        return gap_between(self.value, self.bound)


def gap_between(value: float, bound: float) -> float:
    """Return how far a value is above a bound, as a part of the value."""
    return max(0.0, (value - bound) / value) if value > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one device: seconds, the part of them for transfers, and bytes."""

    total: float
    transfer: float
    memory: float
    nodes: int


def loads(problem: PlacementProblem, device_of: Sequence[int]) -> list[Load]:
    """Return the load of every device, from the definition."""
    kinds = problem.devices
    time, moved, memory, count = ([0.0] * len(kinds) for _ in range(4))
    for node, device in zip(problem.nodes, device_of, strict=True):
        time[device] += node.times[kinds[device]]
        memory[device] += node.memory
        count[device] += 1
    touched: list[set[int]] = [set() for _ in problem.nodes]
    for source, target in problem.edges:
        touched[source].add(device_of[target])
    for node, device, targets in zip(problem.nodes, device_of, touched, strict=True):
        elsewhere = targets - {device}
        for other in elsewhere | {device} if elsewhere else ():
            moved[other] += node.transfer if problem.kinds[kinds[other]].pays_transfers else 0.0
    rows = zip(time, moved, memory, count, strict=True)
    return [Load(seconds + transfer, transfer, held, int(nodes)) for seconds, transfer, held, nodes in rows]


def fits(problem: PlacementProblem, rows: Sequence[Load]) -> bool:
    """Return whether every node can run where it is, and no device has more than its memory."""
    kinds = problem.devices
    return all(
        load.total < inf and holds(problem.kinds[kind], load.memory) for load, kind in zip(rows, kinds, strict=True)
    )


def holds(kind: DeviceKind, memory: float) -> bool:
    """Return whether so many bytes fit. Sums that are no whole numbers are rounded, so limits are met to twelve
    digits."""
    return memory <= kind.memory * (1 + 1e-12)
