"""The choices of devices to search. In: a fleet. Out: a `DeviceSets`, or `DeviceLayout`s where the fleet is large.

A `DeviceSets` has the sets of devices that a plan uses, and the groups that a stage may take, as numbers. Devices that
are alike and connected alike form a class (fleet.classes), and a set is how many it has of each. Its number is the sum
over classes of that count times the weight of the class. A group is such a vector, too. Group g may follow set u where
no class has too few devices left: such a pair leads to set u + weight[g].

Small fleets have every group, so that no choice is left out (`complete`). Larger ones have groups of one and of two
devices, and the runs of devices in the order of their speed. Where there are too many sets, there is no `DeviceSets`,
but layouts.

A `DeviceLayout` is a graph of device choices. A node is (devices used so far, devices of the stage placed last,
forwards that those have in hand). Stages are placed from the last one to the first. An edge places one more stage: its
devices, how many devices run later stages, its forwards in hand, and the boundary between it and the stage behind it. A
path from node 0 is the devices of a plan.

In `in_a_row` devices stand in a row, and stages take the next ones. `rows` makes the rows of hosts one after another,
or of the first devices of p hosts, their second devices, and so on. In the latter the replicas of a stage lie on
different hosts. Slower devices are at either end or left out. All stages have equally many replicas, or any number from
a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product
from math import comb, prod

import numpy as np
import numpy.typing as npt

from .cost import forwards_ahead, hop_of, ring_of
from .fleet import Fleet, Hop, Ring

Numbers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Counts = tuple[int, ...]

# The elements of one step of a sum.
_CHUNK = 1_000_000
# The most devices, sets, pairs of a set and a group, and elements of the matrices of all groups.
_MOST_DEVICES, _MOST_SETS, _MOST_PAIRS, _MOST_ELEMENTS = 32, 70_000, 1_000_000, 10_000_000


class Pairs:
    """Pairs of a set of devices and a group that may follow it, in the order of the sets that they lead to. Those to
    `ends[i]` begin at `starts[i]`."""

    def __init__(self, source: Numbers, group: Numbers, target: Numbers) -> None:
        self.source, self.group, self.target = source, group, target
        self.starts = np.flatnonzero(np.diff(target, prepend=-1))
        self.ends = target[self.starts]

    def __len__(self) -> int:
        return len(self.source)

    def only(self, which: Numbers | Bools | slice) -> Pairs:
        return Pairs(self.source[which], self.group[which], self.target[which])


class DeviceSets:
    """The sets of devices and the groups of a fleet, with the boundaries between groups."""

    def __init__(
        self, fleet: Fleet, classes: Sequence[Sequence[int]], groups: Sequence[Counts], complete: bool
    ) -> None:
        self.fleet, self.classes, self.complete = fleet, classes, complete
        self.name = "every choice of devices" if complete else "single devices, pairs, and devices of like speed"
        sizes = np.array([len(members) for members in classes], np.int64)
        weights = np.concatenate([[1], np.cumprod(sizes + 1)[:-1]])
        self.count = int(np.prod(sizes + 1))
        self.digits = np.arange(self.count)[:, None] // weights % (sizes + 1)
        self.used = self.digits.sum(1)
        self.groups = list(groups)
        more = np.array(groups, np.int64)
        self.weight, self.replicas = more @ weights, more.sum(1)
        fitting = [_numbers_up_to(sizes - row, weights) for row in more]
        source = np.concatenate(fitting)
        group = np.repeat(np.arange(len(more)), [len(x) for x in fitting])
        order = np.argsort(source, kind="stable")
        # Pairs in the order of their sets: those of set u are begin[u] .. begin[u + 1] - 1.
        self.source, self.group = source[order], group[order]
        self.target = self.source + self.weight[self.group]
        self.begin = np.searchsorted(self.source, np.arange(self.count + 1))
        size = self.used[self.source]
        by_size = np.argsort(size * self.count + self.target, kind="stable")
        # The same pairs by the size of their sets.
        every = Pairs(self.source[by_size], self.group[by_size], self.target[by_size])
        ends = np.searchsorted(size[by_size], np.arange(len(fleet) + 1))
        self.by_size = [every.only(slice(begin, end)) for begin, end in pairwise(ends.tolist())]
        self.weights = weights
        # The boundaries between groups that were asked for, their numbers, and those of equal ways and loads.
        self._crossings = np.full((len(self.groups), len(self.groups)), -1, np.int32)
        self._hops: list[Hop] = []
        self._hop_numbers: dict[object, int] = {}
        # Whether a group's devices depend on the set that is taken, and those of groups where nothing is taken.
        self._shifts = bool((sizes > 1).any())
        self._devices: dict[int, tuple[int, ...]] = {}
        # The number of the set of devices that no plan may use.
        self.left_out = 0
        self.alike = self._alike()

    def devices(self, group: int, used: int = 0) -> tuple[int, ...]:
        """Return the devices of a group when those of a set are taken, class by class."""
        if used and self._shifts:
            return self._members_of(group, used)
        if group not in self._devices:
            self._devices[group] = self._members_of(group, 0)
        return self._devices[group]

    def _members_of(self, group: int, used: int) -> tuple[int, ...]:
        classes = zip(self.classes, self.digits[used], self.groups[group], strict=True)
        return tuple(i for members, begin, more in classes for i in members[begin : begin + more])

    def members(self, used: int) -> frozenset[int]:
        """Return the devices of a set."""
        return frozenset(i for members, n in zip(self.classes, self.digits[used], strict=True) for i in members[:n])

    def ends(self, using: Callable[[frozenset[int]], bool] | None) -> Bools:
        """Return with which sets a plan may end. Those that are left out are among them."""
        return (
            self.used > self.used[self.left_out]
            if using is None
            else np.array([using(self.members(u)) for u in range(self.count)])
        )

    def ring(self, group: int) -> Ring:
        return ring_of(self.fleet, self.devices(group))

    def hop(self, group: int, behind: int) -> Hop:
        """Return the boundary from a group to one that stands behind it."""
        return hop_of(self.fleet, self.devices(group, int(self.weight[behind])), self.devices(behind))

    def hop_numbers(self, groups: Numbers, behind: Numbers) -> tuple[Numbers, list[Hop]]:
        """Return the numbers of boundaries from groups to others behind them, and the boundary of each number. Those
        with the same ways and loads have one number. Devices of one class may be exchanged, so they are those of any
        set."""
        numbers = self._crossings[groups, behind]
        if (new := np.flatnonzero(numbers < 0)).size:
            for pair in np.unique(groups[new] * len(self.groups) + behind[new]).tolist():
                a, b = divmod(pair, len(self.groups))
                hop = self.hop(a, b)
                if (number := self._hop_numbers.get((hop.ways, hop.busy), -1)) < 0:
                    number = len(self._hops)
                    self._hops.append(hop)
                    self._hop_numbers[hop.ways, hop.busy] = number
                self._crossings[a, b] = number
            numbers = self._crossings[groups, behind]
        return numbers.astype(np.int64), self._hops

    def single_hops(self) -> Iterator[Hop]:
        """Yield the boundaries between any two groups of one device."""
        single = [g for g, n in enumerate(self.replicas) if n == 1]
        for a, b in product(single, repeat=2):
            if a != b or len(self.classes[self.groups[a].index(1)]) > 1:
                yield self.hop(a, b)

    def reached(self, reach: Callable[[Numbers, Numbers], Numbers]) -> Numbers:
        """Return how far each set gets, where groups g get from positions y to `reach(g, y)`, but never back."""
        far = np.zeros(self.count, np.int64)
        for pairs in self.by_size:
            if len(pairs):
                most = np.maximum.reduceat(reach(pairs.group, far.take(pairs.source)), pairs.starts)
                far[pairs.ends] = np.maximum(far[pairs.ends], most)
        return far

    def without(self, devices: Collection[int]) -> DeviceSets:
        """Return the same sets for plans that leave some devices out: these count as used from the beginning. What is
        reached and summed up is then that of sets without them."""
        other = copy(self)
        other.classes = [sorted(members, key=lambda i: i not in devices) for members in self.classes]
        gone = np.array([sum(i in devices for i in x) for x in self.classes])
        other.left_out = int(gone @ self.weights)
        able = (self.digits <= np.array([len(x) for x in self.classes]) - gone).all(1)
        other.by_size = [pairs.only(able[pairs.target]) for pairs in self.by_size]
        other._devices = {}
        return other

    def sums(self, each: Floats) -> Floats:
        """Return the least sum with which each set, or a part of it, gets from position 0 to every other.

        Group g adds `each[g, y, x]` from y to x, and x is not before y.
        """
        positions = each.shape[1]
        # Rows are positions here: what is added and compared lies side by side.
        least = np.full((positions, self.count), np.inf)
        least[0, 0] = 0.0
        # No group gets back: of the ways to x those from positions behind it need no look.
        to = np.ascontiguousarray(each.transpose(2, 1, 0))
        for level in self.by_size:
            for part in np.array_split(np.arange(len(level)), max(1, len(level) * positions // _CHUNK)):
                pairs = level.only(part)
                behind = least.take(pairs.source, 1)
                for x in range(positions if len(pairs) else 0):
                    ways = to[x, : x + 1].take(pairs.group, 1)
                    ways += behind[: x + 1]
                    better = np.minimum.reduceat(ways.min(0), pairs.starts)
                    least[x, pairs.ends] = np.minimum(least[x, pairs.ends], better)
        least = np.ascontiguousarray(least.T)
        for column, weight in zip(self.digits.T, self.weights, strict=True):
            for n in range(1, int(column.max()) + 1):
                rows = np.flatnonzero(column == n)
                least[rows] = np.minimum(least[rows], least[rows - weight])
        return least

    def _alike(self) -> Numbers:
        """Return for each group the first one whose boundaries with stages in front are the same, whatever these take.
        Groups of several devices, whose messages may share links, stand for themselves."""
        first = np.arange(len(self.groups))
        homes: list[list[int]] = []
        for g in np.flatnonzero(self.replicas == 1):
            home = next((home for home in homes if all(self._same(int(g), other) for other in home)), None)
            if home is None:
                homes.append([int(g)])
            else:
                home.append(int(g))
                first[g] = home[0]
        return first

    def _same(self, a: int, b: int) -> bool:
        """Return whether every other device has the same paths from and to two groups of one device."""
        x, y = self.devices(a)[0], self.devices(b)[0]
        for other in range(len(self.fleet)):
            if other not in (x, y):
                ways = [(self.fleet.path(other, i), self.fleet.path(i, other)) for i in (x, y)]
                if ways[0] != ways[1] or any(way.shares for way in ways[0]):
                    return False
        return True


def _numbers_up_to(most: Numbers, weights: Numbers) -> Numbers:
    """Return the numbers of the sets with at most so many devices of each class, in ascending order."""
    numbers = np.zeros(1, np.int64)
    for count, weight in zip(most.tolist(), weights.tolist(), strict=True):
        numbers = (np.arange(count + 1)[:, None] * weight + numbers).ravel()
    return numbers


def device_sets(fleet: Fleet, speed: Sequence[float], most_replicas: int, layers: int) -> DeviceSets | None:
    """Return the sets and groups of a fleet with these relative speeds, or None where there are too many sets."""
    classes = fleet.classes() if len(fleet) <= _MOST_DEVICES else []
    most = most_replicas or len(fleet)
    sets = prod(len(members) + 1 for members in classes)
    if not classes or sets > _MOST_SETS:
        return None
    every = _pairs(classes) <= _MOST_PAIRS and sets * (layers + 1) ** 2 <= _MOST_ELEMENTS
    groups: Iterable[Counts] = product(*(range(len(x) + 1) for x in classes)) if every else _few(classes, speed)
    chosen = [group for group in dict.fromkeys(groups) if 1 <= sum(group) <= most]
    return DeviceSets(fleet, classes, chosen, every or most == 1)


def _pairs(classes: Sequence[Sequence[int]]) -> int:
    """Return the number of pairs of a set and a group, without a limit on replicas."""
    return prod(comb(len(members) + 2, 2) for members in classes)


def _few(classes: Sequence[Sequence[int]], speed: Sequence[float]) -> Iterator[Counts]:
    """Yield the groups of one and two devices, and those of devices one after another, in the order of their speed and
    in that of the cluster."""
    home = {i: c for c, members in enumerate(classes) for i in members}
    row = sorted(home, key=lambda i: (-speed[i], i))

    def counted(devices: Sequence[int]) -> Counts:
        return tuple(sum(home[i] == c for i in devices) for c in range(len(classes)))

    for size in (1, 2):
        for devices in combinations(row, size):
            yield counted(devices)
    for size in range(3, len(row) + 1):
        for start in range(len(row) - size + 1):
            yield counted(row[start : start + size])
            yield counted(range(start, start + size))


@dataclass(frozen=True, slots=True)
class LayoutEdge:
    """The placement of one more stage, on `devices`, in front of `later` devices that run later stages. The next stage
    is on those `behind`."""

    source: int
    target: int
    devices: tuple[int, ...]
    later: int
    ahead: int
    behind: tuple[int, ...]


@dataclass(frozen=True)
class DeviceLayout:
    """A graph of device choices. It is not `complete`, as it leaves choices out.

    `last[n]` are the devices of the stage placed last at node n, `placed[n]` all that are used. Edges come in the order
    of how many devices their source uses. `used` are how many devices of each kind a plan may use at most.
    """

    name: str
    last: tuple[tuple[int, ...], ...]
    placed: tuple[frozenset[int], ...]
    edges: tuple[LayoutEdge, ...]
    used: tuple[tuple[int, int], ...]
    complete: bool = False

    @cached_property
    def most(self) -> int:
        """Return the most devices of a stage."""
        return max(map(len, self.last))


def in_a_row(
    kinds: Sequence[int], row: Sequence[int], sizes: Sequence[int], name: str, most_stages: int
) -> DeviceLayout:
    """Return the layout in which stages take the next devices of the row, the last stage first, a number from `sizes`
    each."""
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
                edges.append(LayoutEdge(source, index[key], devices, level, ahead, last[source]))
    of_kind = Counter(kinds[i] for i in sorted({i for devices in last for i in devices}))
    return DeviceLayout(
        name, tuple(last), tuple(frozenset(row[:n]) for n, _, _ in index), tuple(edges), tuple(of_kind.items())
    )


def one_after_another(kinds: Sequence[int], groups: Sequence[tuple[int, ...]], name: str) -> DeviceLayout:
    """Return the layout in which stages take these groups of devices, the first group in front. The first of them may
    stay without a stage."""
    last, placed = [tuple[int, ...]()], [frozenset[int]()]
    edges, ahead = list[LayoutEdge](), 0
    for n, devices in enumerate(reversed(groups)):
        ahead = forwards_ahead(len(devices), len(last[n]), ahead) if n else 0
        edges.append(LayoutEdge(n, n + 1, devices, len(placed[n]), ahead, last[n]))
        last.append(devices)
        placed.append(placed[n] | {*devices})
    of_kind = Counter(kinds[i] for i in sorted(placed[-1]))
    return DeviceLayout(name, tuple(last), tuple(placed), tuple(edges), tuple(of_kind.items()))


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
