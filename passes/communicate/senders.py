"""The choice of senders where stages have unlike meshes: which ranks send the tiles that a rank takes.

In: an edge that travels in tiles, the meshes at its ends, a cluster. Out: for every place of the team that takes, the
places that it receives from, in order (ir/sharding/tile_messages.py).

Several ranks may have the same tile. The choice is that with which the busiest part of the network is done first: a
link, a network card in one direction, a rank that sends or receives. Of equally good choices it is the one that takes
least of all parts together, and then ranks at the same places. Up to EXACT combinations are all tried. Where there are
more, tiles go one after the other to the sender that is done first, the largest first; then single tiles change their
sender as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.sharding.tile_messages import TileEnds

EXACT = 4096


class TileTask(NamedTuple):
    """The bytes that a place takes from one of some places that have them."""

    taker: int
    holders: tuple[int, ...]
    nbytes: int


# How long one choice takes: the seconds of the busiest part, those of all parts, and the tiles from other places.
_Score = tuple[float, float, int]


class SenderChoice:
    """The tasks of an edge between two teams, and what a choice of senders costs. `devices` are those of the teams;
    without them those of the first ones."""

    def __init__(
        self, ends: TileEnds, cluster: Cluster | None, devices: tuple[Sequence[str], Sequence[str]] | None = None
    ) -> None:
        meshes = ends.source, ends.target
        self._cluster, self._teams = cluster, (meshes[0].teams()[0], meshes[1].teams()[0])
        names = devices or [[mesh.devices[i] for i in team] for mesh, team in zip(meshes, self._teams, strict=True)]
        self._names = [dict(zip(team, line, strict=True)) for team, line in zip(self._teams, names, strict=True)]
        # Tiles that fewer ranks have come first: those of others may come from the same ranks.
        self.tasks = [
            TileTask(taker, holders, nbytes)
            for taker in self._teams[1]
            for holders, nbytes in sorted(ends.needs(taker).items(), key=lambda item: (len(item[0]), -item[1], item[0]))
        ]
        self._ports: dict[tuple[int, int], tuple[tuple[str, float], ...]] = {}

    def best(self) -> dict[int, tuple[int, ...]]:
        """Return the senders of every taker, in order."""
        count = prod(len(task.holders) for task in self.tasks)
        choices = product(*[task.holders for task in self.tasks]) if count <= EXACT else self._improved()
        return self._in_order(min(map(tuple, choices), key=self.score))

    def score(self, choice: Sequence[int]) -> _Score:
        """Return what a choice costs: a sender for each task."""
        loads: dict[str, float] = {}
        away = 0
        for (taker, _), sender, nbytes in self._sent(choice):
            for port, rate in self._way(sender, taker):
                loads[port] = loads.get(port, 0.0) + nbytes / rate
            away += sender != self._across(taker)
        return max(loads.values(), default=0.0), sum(loads.values()), away

    def makespan(self, senders: Mapping[int, Sequence[int]]) -> float:
        """Return the seconds of the busiest part of the network, where takers receive from others in an order."""
        choice = [next(one for one in senders[task.taker] if one in task.holders) for task in self.tasks]
        return self.score(choice)[0]

    def _in_order(self, choice: Sequence[int]) -> dict[int, tuple[int, ...]]:
        senders: dict[int, dict[int, None]] = {taker: {} for taker in self._teams[1]}
        for (taker, _), sender, _ in self._sent(choice):
            senders[taker].setdefault(sender)
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
        loads: dict[str, float] = {}
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
        if (sender, taker) not in self._ports:
            a, b = self._names[0][sender], self._names[1][taker]
            if a == b:
                self._ports[sender, taker] = ()
            elif self._cluster is None:
                self._ports[sender, taker] = ((f"{a}>", 1.0), (f">{b}", 1.0))
            else:
                path = self._cluster.path(a, b)
                ends = ((f"{a}>", path.bandwidth), (f">{b}", path.bandwidth), (f"{a}>{b}", path.bandwidth))
                self._ports[sender, taker] = (*ends, *path.shares)
        return self._ports[sender, taker]


def balanced_senders(
    ends: TileEnds, cluster: Cluster | None, teams: tuple[Sequence[int], Sequence[int]], devices: Sequence[str]
) -> Mapping[int, tuple[int, ...]]:
    """Return the ranks that every rank of a team takes tiles from, in order. `teams` are the ranks at both ends, and
    `devices` those of all ranks."""
    names = [devices[rank] for rank in teams[0]], [devices[rank] for rank in teams[1]]
    best = SenderChoice(ends, cluster, names).best()
    places = ends.source.teams()[0], ends.target.teams()[0]
    return {
        teams[1][places[1].index(taker)]: tuple(teams[0][places[0].index(sender)] for sender in senders)
        for taker, senders in best.items()
    }
