"""Latency as an integer programme (after the one of Tarnawski et al.), for problems that are too large to search.

With x[u, p] = 1 where colour u is at place p, and for nodes n and accelerators p: in[n, p] where p uses n from
elsewhere, out[n, p] where n is used elsewhere,

    end[n] >= end[m] + time of n on the host, where it is there            for edges m -> n
    start[p] >= end[n] - M (1 - in[n, p])
    finish[p] = start[p] + times of its nodes + transfers in and out
    end[n] >= finish[p] - M (1 - x[n, p])
    least L >= end[n]

M is the known latency. Times alone would let calls that take no time wait for each other in a cycle. Ranks forbid it:
they go up by one along every edge but those within a call, whose nodes have one rank.

Known limit: conditions with M relax to next to nothing, so bounds of large problems are those of the longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from .calls import Places, ends
from .problem import Progress
from .programme import Programme

_TOLERANCE = 1e-6
# The most rows. With more of them the relaxation alone takes minutes, and its bound is next to nothing.
_LARGEST = 2_500


def minimise(
    places: Places, known: Sequence[int] | None, value: float, nodes: int, progress: Progress | None
) -> tuple[list[int] | None, float, int]:
    """Return a place for every colour, a bound on the latency of all placements, and the nodes of the search tree;
    None, 0 and -1 where the programme is too large."""
    horizon = value if value < inf else _sum_of_all(places)
    model = _LatencyProgramme(places, horizon or 1.0)
    if len(model.programme) > _LARGEST and known is not None:
        return None, 0.0, -1
    start = model.start(known, value) if known is not None else []
    answer = model.programme.minimise(start, nodes, progress)
    place_of = [max(range(len(at)), key=lambda p: answer.values[at[p]]) for at in model.at] if answer.values else None
    return place_of, min(answer.bound, 1e9) * (horizon or 1.0) * (1 - _TOLERANCE), answer.nodes


def _sum_of_all(places: Places) -> float:
    """Return an upper bound on any latency: every node after every other at its slowest, with all transfers on both
    sides."""
    slowest = [max((t for t in node.times if t < inf), default=0.0) for node in places.problem.nodes]
    return sum(slowest) + sum(2.0 * len(places) * node.transfer for node in places.problem.nodes)


class _LatencyProgramme:
    """The integer programme of a placement with the least latency. Times are fractions of the horizon."""

    def __init__(self, places: Places, horizon: float) -> None:
        self.places, self.programme, self._horizon = places, Programme(), horizon
        new, problem = self.programme, places.problem
        self._level = new.variable(0.0, 1.0)
        self.at = [
            [new.variable(0.0, float(places.time(u, p) < inf), whole=True) for p in range(len(places))]
            for u in range(len(places.units))
        ]
        self._calls = [p for p in range(len(places)) if not places.is_host(p)]
        self._end = [new.variable(0.0, 1.0) for _ in problem.nodes]
        self._start = {p: new.variable(0.0, 1.0) for p in self._calls}
        self._in = {
            (n, p): new.variable(0.0, 1.0) for n in range(len(problem.nodes)) for p in self._calls if places.users[n]
        }
        self._out = {key: new.variable(0.0, 1.0) for key in self._in}
        self._most = float(len(problem.nodes))
        self._rank = [new.variable(0.0, self._most) for _ in problem.nodes]
        self._rank_of_call = {p: new.variable(0.0, self._most) for p in self._calls}
        self._both = {(*edge, p): new.variable(0.0, 1.0) for edge in sorted(set(problem.edges)) for p in self._calls}
        for at in self.at:
            new.row(((x, 1.0) for x in at), least=1.0, most=1.0)
        self._add_edges()
        self._add_calls()
        self._break_symmetry()

    def _x(self, node: int, place: int) -> int:
        return self.at[self.places.unit_of[node]][place]

    def _host_time(self, node: int) -> list[tuple[int, float]]:
        times, places = self.places.problem.nodes[node].times, self.places
        hosts = [p for p in range(len(places)) if places.is_host(p) and times[places.kind_of[p]] < inf]
        return [(self._x(node, p), -times[places.kind_of[p]] / self._horizon) for p in hosts]

    def _add_edges(self) -> None:
        row = self.programme.row
        for node, end in enumerate(self._end):
            row([(end, 1.0), *self._host_time(node)], least=0.0)
            row([(self._level, 1.0), (end, -1.0)], least=0.0)
        for a, b in sorted(set(self.places.problem.edges)):
            row([(self._end[b], 1.0), (self._end[a], -1.0), *self._host_time(b)], least=0.0)
            within = [(self._both[a, b, p], 1.0) for p in self._calls]
            row([(self._rank[b], 1.0), (self._rank[a], -1.0), *within], least=1.0)
            for p in self._calls:
                here, there = self._x(a, p), self._x(b, p)
                row([(self._in[a, p], 1.0), (there, -1.0), (here, 1.0)], least=0.0)
                row([(self._out[a, p], 1.0), (here, -1.0), (there, 1.0)], least=0.0)
                row([(self._both[a, b, p], 1.0), (here, -1.0)], most=0.0)
                row([(self._both[a, b, p], 1.0), (there, -1.0)], most=0.0)

    def _add_calls(self) -> None:
        row, places, problem = self.programme.row, self.places, self.places.problem
        for p in self._calls:
            start, kind = self._start[p], problem.kinds[places.kind_of[p]]
            work = [
                (self._x(n, p), node.times[places.kind_of[p]] / self._horizon)
                for n, node in enumerate(problem.nodes)
                if node.times[places.kind_of[p]] < inf
            ]
            for n, node in enumerate(problem.nodes):
                if (n, p) in self._in:
                    work += [
                        (self._in[n, p], node.transfer / self._horizon),
                        (self._out[n, p], node.transfer / self._horizon),
                    ]
                    row([(start, 1.0), (self._end[n], -1.0), (self._in[n, p], -1.0)], least=-1.0)
            finish = [(start, 1.0), *work]
            row([*finish, (self._level, -1.0)], most=0.0)
            for n in range(len(problem.nodes)):
                late = [(variable, -weight) for variable, weight in finish]
                # A late call may end after the horizon only where it is empty, and an empty call is not late.
                row([(self._end[n], 1.0), (self._x(n, p), -1.0), *late], least=-1.0)
                row([(self._rank[n], 1.0), (self._rank_of_call[p], -1.0), (self._x(n, p), self._most)], most=self._most)
                row([(self._rank_of_call[p], 1.0), (self._rank[n], -1.0), (self._x(n, p), self._most)], most=self._most)
            if kind.memory < sum(places.units.memory):
                row(((at[p], m / kind.memory) for at, m in zip(self.at, places.units.memory, strict=True)), most=1.0)

    def _break_symmetry(self) -> None:
        """Allow a unit in a place only if a unit before it is in the equal place before."""
        for p in self._calls:
            if self.places.twins(p) != p:
                for unit, at in enumerate(self.at):
                    self.programme.row([(at[p], 1.0), *((self.at[u][p - 1], -1.0) for u in range(unit))], most=0.0)

    def start(self, place_of: Sequence[int], value: float) -> list[float]:
        """Return a known placement as values of all variables."""
        places, problem = self.places, self.places.problem
        used: dict[int, int] = {}
        number: dict[int, int] = {}
        for p in place_of:
            if p not in number:
                first = places.twins(p)
                number[p] = first + used.setdefault(first, 0)
                used[first] += 1
        place = [number[place_of[unit]] for unit in places.unit_of]
        times = ends(problem, [places.device_of[p] for p in place])
        assert times is not None, "the placement that is known waits in a circle"
        values = [0.0] * len(self.programme.lower)
        values[self._level] = value / self._horizon
        for unit, p in enumerate(place_of):
            values[self.at[unit][number[p]]] = 1.0
        for n, (began, ended) in enumerate(times):
            values[self._end[n]] = ended / self._horizon
            if place[n] in self._start:
                values[self._start[place[n]]] = began / self._horizon
        for (n, p), variable in self._in.items():
            elsewhere = [place[user] for user in places.users[n] if place[user] != place[n]]
            values[variable] = float(place[n] != p and p in elsewhere)
            values[self._out[n, p]] = float(place[n] == p and bool(elsewhere))
        for (a, b, p), variable in self._both.items():
            values[variable] = float(place[a] == place[b] == p)
        self._rank_all(values, place)
        return values

    def _rank_all(self, values: list[float], place: Sequence[int]) -> None:
        """Set the ranks by iteration to a fixed point: the nodes of a call go up together."""
        rank = [0] * len(place)
        calls = set(self._calls)
        moved = True
        while moved:
            moved = False
            for n in self.places.order:
                wanted = max(
                    (rank[m] + (place[m] != place[n] or place[n] not in calls) for m in self.places.makers[n]),
                    default=0,
                )
                if wanted > rank[n]:
                    moved = True
                    for other in range(len(place)) if place[n] in calls else (n,):
                        if other == n or place[other] == place[n]:
                            rank[other] = wanted
        for n, variable in enumerate(self._rank):
            values[variable] = float(rank[n])
            if place[n] in self._rank_of_call:
                values[self._rank_of_call[place[n]]] = float(rank[n])
