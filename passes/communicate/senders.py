"""The choice of senders where stages have unlike meshes: which ranks send the tiles that a rank takes.

In: an edge that travels in tiles, the meshes at its ends, a cluster. Out: for every place of the team that takes, the
places that it receives from, in order (ir/sharding/tile_messages.py).

Where hosts need the same tiles, a chain is tried, too: the first host takes them, and each hands on what comes to the
next, in parcels. Ranks of one host take them from the first of it. A chain is chosen where it is done clearly sooner.

Several ranks may have the same tile. The choice is that with which the busiest part of the network is done first: a
link, a network card in one direction, a rank that sends or receives. Of equally good choices it is the one that takes
least of all parts together, and then ranks at the same places. Up to EXACT combinations are all tried. Where there are
more, tiles go one after the other to the sender that is done first, the largest first; then single tiles change their
sender as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import product
from math import prod
from typing import NamedTuple

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.sharding.tile_messages import TileEnds, TileSender, goes_in_parcels
from penstock.ir.sharding.tiles import Ranges

EXACT = 4096
# A chain takes at most this part of the time that tiles take one by one.
CLEARLY = 0.9


class TileTask(NamedTuple):
    """The bytes that a place takes from one of some places that have them."""

    taker: int
    holders: tuple[int, ...]
    nbytes: int


# How long one choice takes: the seconds of the busiest part, those of all parts, and the tiles from other places.
_Score = tuple[float, float, int]


class SenderChoice:
    """The tasks of an edge between two teams, and what a choice of senders costs. `devices` are those of the teams;
    without them those of the first ones. `fellows` hand on to others of their team what both take."""

    def __init__(
        self,
        ends: TileEnds,
        cluster: Cluster | None,
        devices: tuple[Sequence[str], Sequence[str]] | None = None,
        fellows: Mapping[int, int] | None = None,
    ) -> None:
        meshes = ends.source, ends.target
        self._cluster, self._teams = cluster, (meshes[0].teams()[0], meshes[1].teams()[0])
        names = devices or [[mesh.devices[i] for i in team] for mesh, team in zip(meshes, self._teams, strict=True)]
        self._names = [dict(zip(team, line, strict=True)) for team, line in zip(self._teams, names, strict=True)]
        self._fellows = dict(fellows or {})
        alike = {taker: ends.alike(fellow, taker) for taker, fellow in self._fellows.items()}
        # Tiles that fewer ranks have come first: those of others may come from the same ranks.
        self.tasks = [
            TileTask(taker, holders, nbytes)
            for taker in self._teams[1]
            for holders, nbytes in sorted(
                ends.needs(taker, alike.get(taker, frozenset())).items(),
                key=lambda item: (len(item[0]), -item[1], item[0]),
            )
        ]
        self._ports: dict[tuple[str, str], tuple[tuple[str, float], ...]] = {}
        self._links, self._delay = self._chain_loads(ends, alike)

    def best(self) -> dict[int, tuple[TileSender, ...]]:
        """Return the senders of every taker, in order."""
        count = prod(len(task.holders) for task in self.tasks)
        choices = product(*[task.holders for task in self.tasks]) if count <= EXACT else self._improved()
        return self._in_order(min(map(tuple, choices), key=self.score))

    def score(self, choice: Sequence[int]) -> _Score:
        """Return what a choice costs: a sender for each task."""
        loads = dict(self._links)
        away = len(self._fellows)
        for (taker, _), sender, nbytes in self._sent(choice):
            for port, rate in self._way(sender, taker):
                loads[port] = loads.get(port, 0.0) + nbytes / rate
            away += sender != self._across(taker)
        return max(loads.values(), default=0.0) + self._delay, sum(loads.values()), away

    def makespan(self, senders: Mapping[int, Sequence[TileSender]]) -> float:
        """Return the seconds of the busiest part of the network, where takers receive from others in an order. Those
        until the first parcel of a chain is with its last rank are added."""
        lines = {taker: [one.place for one in line if not one.hands_on] for taker, line in senders.items()}
        choice = [next(one for one in lines[task.taker] if one in task.holders) for task in self.tasks]
        return self.score(choice)[0]

    def _chain_loads(self, ends: TileEnds, alike: Mapping[int, Set[int]]) -> tuple[dict[str, float], float]:
        """Return the seconds that parts of the network are busy with what is handed on, and the longest time until a
        parcel is at the end of a chain."""
        loads: dict[str, float] = {}
        late: dict[int, float] = {}
        for taker, fellow in self._fellows.items():
            sizes = [ends.taken_bytes(number, taker) for number in alike[taker]]
            names = self._names[1][fellow], self._names[1][taker]
            way = self._between(*names)
            is_cut = self._cluster is None or goes_in_parcels(self._cluster, *names)
            largest = [ends.parcel_bytes(number, taker) for number in alike[taker]] if is_cut else sizes
            parcel = max(largest, default=0)
            for port, rate in way:
                loads[port] = loads.get(port, 0.0) + sum(sizes) / rate
            late[taker] = late.get(fellow, 0.0) + max((parcel / rate for _, rate in way), default=0.0)
        return loads, max(late.values(), default=0.0)

    def _in_order(self, choice: Sequence[int]) -> dict[int, tuple[TileSender, ...]]:
        senders: dict[int, dict[TileSender, None]] = {taker: {} for taker in self._teams[1]}
        for taker, fellow in self._fellows.items():
            senders[taker][TileSender(fellow, True)] = None
        for (taker, _), sender, _ in self._sent(choice):
            senders[taker].setdefault(TileSender(sender))
        return {taker: tuple(line) for taker, line in senders.items()}

    def _sent(self, choice: Sequence[int]) -> Iterator[tuple[tuple[int, int], int, int]]:
        """Yield each task with the sender that has it first. A task whose tile comes from a sender that was chosen
        before needs no other."""
        known: dict[int, list[int]] = {}
        for number, (task, chosen) in enumerate(zip(self.tasks, choice, strict=True)):
            before = known.setdefault(task.taker, [])
            sender = next((one for one in before if one in task.holders), chosen)
            if sender not in before:
                before.append(sender)
            yield (task.taker, number), sender, task.nbytes

    def _across(self, taker: int) -> int:
        """Return the place of the other team that a taker has in its own."""
        senders, takers = self._teams
        return senders[takers.index(taker) % len(senders)]

    def _improved(self) -> list[list[int]]:
        """Return a choice that no change of one sender makes better."""
        choice = [task.holders[0] for task in self.tasks]
        loads = dict(self._links)
        for i in sorted(range(len(self.tasks)), key=lambda i: -self.tasks[i].nbytes):
            task = self.tasks[i]
            across = self._across(task.taker)

            def after(sender: int, task: TileTask = task, across: int = across) -> tuple[float, bool]:
                way = self._way(sender, task.taker)
                return max(
                    (loads.get(port, 0.0) + task.nbytes / rate for port, rate in way), default=0.0
                ), sender != across

            choice[i] = min(task.holders, key=after)
            for port, rate in self._way(choice[i], task.taker):
                loads[port] = loads.get(port, 0.0) + task.nbytes / rate
        best, better = self.score(choice), True
        while better:
            better = False
            for i, task in enumerate(self.tasks):
                for sender in task.holders:
                    tried = [*choice[:i], sender, *choice[i + 1 :]]
                    if (score := self.score(tried)) < best:
                        choice, best, better = tried, score, True
        return [choice]

    def _way(self, sender: int, taker: int) -> tuple[tuple[str, float], ...]:
        """Return what a message goes through, with bytes per second."""
        return self._between(self._names[0][sender], self._names[1][taker])

    def _between(self, a: str, b: str) -> tuple[tuple[str, float], ...]:
        """Return what a message between two devices goes through."""
        if (a, b) not in self._ports:
            if a == b:
                self._ports[a, b] = ()
            elif self._cluster is None:
                self._ports[a, b] = ((f"{a}>", 1.0), (f">{b}", 1.0))
            else:
                path = self._cluster.path(a, b)
                ends = ((f"{a}>", path.bandwidth), (f">{b}", path.bandwidth), (f"{a}>{b}", path.bandwidth))
                self._ports[a, b] = (*ends, *path.shares)
        return self._ports[a, b]


def chains(ends: TileEnds, cluster: Cluster, devices: Sequence[Sequence[str]]) -> Iterator[dict[int, int]]:
    """Yield ways to hand tiles on, the fellow of every place that has one: for each value, the takers of one tile in
    the order of their hosts. `devices` are those of both teams. Takers on a host that sends need no chain."""
    sending = {cluster.device(name).host for name in devices[0]}
    team = ends.target.teams()[0]
    hosts = {place: cluster.device(name).host for place, name in zip(team, devices[1], strict=True)}
    known: list[dict[int, int]] = [{}]
    for number in range(len(ends.edge.values)):
        same: dict[Ranges, dict[str, list[int]]] = {}
        for place in team:
            if hosts[place] not in sending:
                same.setdefault(ends.arrived(number, place).ranges, {}).setdefault(hosts[place], []).append(place)
        fellows: dict[int, int] = {}
        for by_host in same.values():
            firsts = [places[0] for places in by_host.values()]
            fellows.update(zip(firsts[1:], firsts, strict=False))
            fellows.update((place, places[0]) for places in by_host.values() for place in places[1:])
        if fellows not in known:
            known.append(fellows)
            yield fellows


def best_choice(
    ends: TileEnds, cluster: Cluster | None, devices: tuple[Sequence[str], Sequence[str]] | None = None
) -> SenderChoice:
    """Return the choice that is done first: one tile after the other from those that have it, or with a chain."""
    plain = SenderChoice(ends, cluster, devices)
    if cluster is None:
        return plain
    names = devices or [[m.devices[i] for i in m.teams()[0]] for m in (ends.source, ends.target)]
    ways = [plain, *(SenderChoice(ends, cluster, devices, fellows) for fellows in chains(ends, cluster, names))]
    seconds = [way.makespan(way.best()) for way in ways]
    at = min(range(len(ways)), key=seconds.__getitem__)
    return ways[at] if seconds[at] < CLEARLY * seconds[0] else plain


def balanced_senders(
    ends: TileEnds, cluster: Cluster | None, teams: tuple[Sequence[int], Sequence[int]], devices: Sequence[str]
) -> Mapping[int, tuple[int, ...]]:
    """Return the ranks that every rank of a team takes tiles from, in order. `teams` are the ranks at both ends, and
    `devices` those of all ranks."""
    names = [devices[rank] for rank in teams[0]], [devices[rank] for rank in teams[1]]
    best = best_choice(ends, cluster, names).best()
    places = ends.source.teams()[0], ends.target.teams()[0]
    return {
        teams[1][places[1].index(taker)]: tuple(
            teams[one.hands_on][places[one.hands_on].index(one.place)] for one in senders
        )
        for taker, senders in best.items()
    }
