"""The latency model: the times at which nodes run where one sample goes through a placement alone. latency.py minimises
it.

An accelerator (a device that pays transfers) takes one set of nodes and runs it as one call:

    start(call)  = the last end of nodes elsewhere whose outputs the set uses
    end(call)    = start + sum of times + transfers of what comes in and of what goes out, each once per node;
                   all nodes of the set end then

The host (devices that pay none) runs each node by itself, as soon as what it uses has ended. It runs as many at once as
there are to run. The number of CPUs does not matter, only whether there are any. The latency is the last end. No call
may wait for itself through others: sets are contiguous, and accelerators can be put in an order. Colours share an
accelerator or are all on the host; memory limits hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import networkx as nx

from penstock.support.errors import UsageError

from .problem import Placement, PlacementProblem, holds
from .units import Units, units_of


@dataclass(frozen=True, slots=True)
class Places:
    """The places where colours may be: accelerators, each by itself, and per kind of host device one place for all of
    them.

    Nodes stand in an order of the graph.
    """

    problem: PlacementProblem
    units: Units
    unit_of: tuple[int, ...]
    order: tuple[int, ...]
    users: tuple[tuple[int, ...], ...]
    makers: tuple[tuple[int, ...], ...]
    kind_of: tuple[int, ...]
    device_of: tuple[int, ...]

    @staticmethod
    def of(problem: PlacementProblem) -> Places:
        if any(node.backward for node in problem.nodes):
            raise UsageError(
                "the latency of a sample is that of inference: the workload has backward nodes",
                hint="plan for throughput",
            )
        units = units_of(problem, contiguous=False)
        unit_of = [0] * len(problem.nodes)
        for unit, nodes in enumerate(units.nodes):
            for node in nodes:
                unit_of[node] = unit
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(problem.nodes)))
        graph.add_edges_from(problem.edges)
        kinds = problem.devices
        devices = [d for d, kind in enumerate(kinds) if problem.kinds[kind].pays_transfers or kinds.index(kind) == d]
        return Places(
            problem,
            units,
            tuple(unit_of),
            tuple(nx.lexicographical_topological_sort(graph)),
            tuple(tuple(sorted(graph.successors(n))) for n in range(len(problem.nodes))),
            tuple(tuple(sorted(graph.predecessors(n))) for n in range(len(problem.nodes))),
            tuple(kinds[d] for d in devices),
            tuple(devices),
        )

    def __len__(self) -> int:
        return len(self.kind_of)

    def is_host(self, place: int) -> bool:
        return not self.problem.kinds[self.kind_of[place]].pays_transfers

    def time(self, unit: int, place: int) -> float:
        """Return the seconds of all nodes of a unit, infinity where it cannot be."""
        kind = self.problem.kinds[self.kind_of[place]]
        here = sum(self.problem.nodes[n].times[self.kind_of[place]] for n in self.units.nodes[unit])
        return here if self.is_host(place) or holds(kind, self.units.memory[unit]) else inf

    def has_room(self, place_of: Sequence[int]) -> bool:
        """Return whether every unit can run where it is. A unit without a place (-1) takes nothing."""
        held = [0.0] * len(self)
        for unit, place in enumerate(place_of):
            if place >= 0:
                held[place] += self.units.memory[unit]
                if self.time(unit, place) == inf:
                    return False
        return all(self.is_host(p) or holds(self.problem.kinds[self.kind_of[p]], m) for p, m in enumerate(held))

    def twins(self, place: int) -> int:
        """Return the first place that is equal to this one."""
        return (
            place
            if self.is_host(place)
            else next(p for p in range(len(self)) if self.kind_of[p] == self.kind_of[place])
        )

    def placement(self, place_of: Sequence[int], value: float, bound: float, notes: tuple[str, ...]) -> Placement:
        devices = [self.device_of[place_of[unit]] for unit in self.unit_of]
        return Placement(self.problem, tuple(devices), value, min(value, bound), notes)


def ends(problem: PlacementProblem, device_of: Sequence[int]) -> list[tuple[float, float]] | None:
    """Return the start and the end of each node; None where calls wait in a cycle."""
    kinds = problem.devices
    call_of = [device if problem.kinds[kinds[device]].pays_transfers else -1 - n for n, device in enumerate(device_of)]
    duration: dict[int, float] = {}
    for node, call, device in zip(problem.nodes, call_of, device_of, strict=True):
        duration[call] = duration.get(call, 0.0) + node.times[kinds[device]]
    waits: dict[int, set[int]] = {call: set() for call in duration}
    crossing: set[tuple[int, int]] = set()
    for source, target in problem.edges:
        a, b = call_of[source], call_of[target]
        if a != b:
            waits[b].add(a)
            crossing |= {(source, a), (source, b)}
    for n, call in sorted(crossing):
        duration[call] += problem.nodes[n].transfer if call >= 0 else 0.0
    graph = nx.DiGraph()
    graph.add_nodes_from(duration)
    graph.add_edges_from((a, b) for b, before in waits.items() for a in sorted(before))
    start: dict[int, float] = {}
    try:
        for call in nx.topological_sort(graph):
            start[call] = max((start[a] + duration[a] for a in waits[call]), default=0.0)
    except nx.NetworkXUnfeasible:
        return None
    return [(start[call], start[call] + duration[call]) for call in call_of]


def latency(places: Places, place_of: Sequence[int]) -> float:
    """Return the last end, infinity where the placement is not allowed."""
    if not places.has_room(place_of):
        return inf
    times = ends(places.problem, [places.device_of[place_of[unit]] for unit in places.unit_of])
    return inf if times is None else max(end for _, end in times)
