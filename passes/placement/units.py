"""Merge nodes that must share a device, or may share one without loss: a problem over units instead of nodes.

In: a problem. Out: units with times per kind and bytes, an acyclic order among them, and ties. A tie is a set of units
with a cost (a node's output, its maker and its users). Every device that has some of its units but not all pays the
cost.

Nodes of a colour are one unit, backward nodes with the forward nodes of theirs. The order is that of the edges among
forward nodes. A unit without forward nodes (orphaned backward nodes) takes its place in the order from the edges among
backward nodes, read the other way round. Units in a cycle of the order can only be on one device: they are one unit.

`absorb` goes on merging as long as that cannot change the optimum. Unit s is merged into unit m if the device of m is
always at least as good for it as another. That is so under four conditions. No other unit comes right before or after
s. Every tie of s holds m as well. The time that s adds to a device of m is not more than the ties of just s and m would
cost there. And s cannot exceed the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import networkx as nx

from .problem import DeviceKind, PlacementProblem, holds


@dataclass(frozen=True, slots=True)
class Units:
    """The merged problem. `order` are pairs of units, one before the other.

    `nodes` are the nodes of each unit, `heads` the node of each unit that absorbed the others.
    """

    kinds: tuple[DeviceKind, ...]
    times: tuple[tuple[float, ...], ...]
    memory: tuple[float, ...]
    order: tuple[tuple[int, int], ...]
    ties: tuple[tuple[frozenset[int], float], ...]
    nodes: tuple[tuple[int, ...], ...]
    heads: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.times)

    def neighbours(self) -> tuple[list[set[int]], list[set[int]]]:
        """Return the units right before each unit, and right after it."""
        before: list[set[int]] = [set() for _ in self.times]
        after: list[set[int]] = [set() for _ in self.times]
        for a, b in self.order:
            before[b].add(a)
            after[a].add(b)
        return before, after

    def merged(self, group_of: Sequence[int], lead: Collection[int] = ()) -> Units:
        """Merge each group into one unit, numbered from 0 on. The head of a group is that of its first unit, or of one
        that is to `lead`."""
        count = max(group_of) + 1
        members: list[list[int]] = [[] for _ in range(count)]
        for unit, group in enumerate(group_of):
            members[group].append(unit)
        ties: dict[frozenset[int], float] = {}
        for tie, cost in self.ties:
            groups = frozenset(group_of[u] for u in tie)
            if len(groups) > 1:
                ties[groups] = ties.get(groups, 0.0) + cost
        return Units(
            self.kinds,
            tuple(tuple(sum(self.times[u][k] for u in group) for k in range(len(self.kinds))) for group in members),
            tuple(sum(self.memory[u] for u in group) for group in members),
            tuple(sorted({(group_of[a], group_of[b]) for a, b in self.order if group_of[a] != group_of[b]})),
            tuple(sorted(ties.items(), key=lambda row: sorted(row[0]))),
            tuple(tuple(sorted(n for u in group for n in self.nodes[u])) for group in members),
            tuple(self.heads[next((u for u in group if u in lead), group[0])] for group in members),
        )

    def spread(self, device_of: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the devices of the `count` nodes, from those of the units."""
        device_of_node = [-1] * count
        for nodes, device in zip(self.nodes, device_of, strict=True):
            for node in nodes:
                device_of_node[node] = device
        return tuple(device_of_node)


def circles(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the number of the circle that each node lies in, counted in the order of their first nodes. A node on no
    circle is one by itself."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(edges)
    parts = sorted(sorted(part) for part in nx.strongly_connected_components(graph))
    circle_of = {node: i for i, part in enumerate(parts) for node in part}
    return [circle_of[node] for node in range(count)]


def units_of(problem: PlacementProblem, contiguous: bool = True) -> Units:
    """Merge colours and cycles into units; only colours, without an order, where splits need not be contiguous."""
    colours: dict[object, int] = {}
    colour_of = [
        colours.setdefault(i if n.colour is None else (n.colour,), len(colours)) for i, n in enumerate(problem.nodes)
    ]
    used_by: list[set[int]] = [set() for _ in problem.nodes]
    order: set[tuple[int, int]] = set()
    orphaned = set(colour_of) - {c for c, node in zip(colour_of, problem.nodes, strict=True) if not node.backward}
    for source, target in problem.edges:
        used_by[source].add(target)
        pair = colour_of[source], colour_of[target]
        if not contiguous:
            continue
        if not problem.nodes[target].backward:
            order.add(pair)
        elif problem.nodes[source].backward and not orphaned.isdisjoint(pair):
            order.add((pair[1], pair[0]))
    ties = [
        (frozenset((i, *used_by[i])), node.transfer)
        for i, node in enumerate(problem.nodes)
        if node.transfer > 0 and used_by[i]
    ]
    single = Units(
        tuple(kind for kind in problem.kinds if kind.count),
        tuple(tuple(t for t, kind in zip(n.times, problem.kinds, strict=True) if kind.count) for n in problem.nodes),
        tuple(node.memory for node in problem.nodes),
        (),
        tuple(ties),
        tuple((i,) for i in range(len(problem.nodes))),
        tuple(range(len(problem.nodes))),
    )
    circle_of = circles(len(colours), order)
    units = single.merged([circle_of[colour] for colour in colour_of])
    pairs = {(circle_of[a], circle_of[b]) for a, b in order}
    return replace(units, order=tuple(sorted((a, b) for a, b in pairs if a != b)))


def absorb(units: Units, slack: float | None = None) -> Units:
    """Merge units into a neighbour as long as the optimum cannot change; return the same object where nothing can be
    merged.

    With a `slack` the optimum may change: a unit may add this much time, and memory only has to be enough for what is
    merged.
    """
    roomy = all(holds(kind, sum(units.memory)) for kind in units.kinds)
    before, after = units.neighbours()
    group = list(range(len(units)))
    times, memory = list(units.times), list(units.memory)
    ties: list[dict[frozenset[int], float]] = [{} for _ in group]
    for tie, cost in units.ties:
        for u in tie:
            ties[u][tie] = ties[u].get(tie, 0.0) + cost
    waiting = list(range(len(units)))
    while waiting:
        s = waiting.pop()
        if group[s] != s:
            continue
        near = before[s] | after[s]
        # A unit without neighbours in the order may stand anywhere.
        hosts = near or (frozenset.intersection(*ties[s]) - {s} if ties[s] else frozenset())
        if not hosts or len(near) > 1 or not (roomy or memory[s] == 0 or slack is not None):
            continue
        m = min(hosts)
        if any(m not in tie for tie in ties[s]):
            continue
        saved = ties[s].get(frozenset((s, m)), 0.0)
        if not _worth(units.kinds, times[s], times[m], saved, slack or 0.0):
            continue
        if not roomy and not any(
            holds(kind, memory[s] + memory[m]) for kind, t in zip(units.kinds, times[m], strict=True) if t < inf
        ):
            continue
        group[s] = m
        times[m] = tuple(a + b for a, b in zip(times[m], times[s], strict=True))
        memory[m] += memory[s]
        before[m].discard(s)
        after[m].discard(s)
        for tie, cost in ties[s].items():
            smaller = tie - {s}
            for u in smaller:
                del ties[u][tie]
                if len(smaller) > 1:
                    ties[u][smaller] = ties[u].get(smaller, 0.0) + cost
        # The merge may have freed m and its neighbours to be merged as well.
        waiting += [m, *before[m], *after[m]]
    roots = {u for u, host in enumerate(group) if u == host}
    return units if len(roots) == len(units) else units.merged(_numbered(group), roots)


def _worth(
    kinds: Sequence[DeviceKind], small: Sequence[float], large: Sequence[float], saved: float, slack: float
) -> bool:
    """Return whether moving the small unit to the device of the large one makes no device slower, by more than
    `slack`."""
    return all(
        s <= slack + (saved if kind.pays_transfers else 0.0)
        for kind, s, t in zip(kinds, small, large, strict=True)
        if t < inf
    )


def _numbered(parent: list[int]) -> list[int]:
    """Number the groups from 0 on, from links that lead to each group's root."""
    roots: list[int] = []
    for unit in range(len(parent)):
        root = unit
        while parent[root] != root:
            root = parent[root]
        roots.append(root)
    numbers: Mapping[int, int] = {root: i for i, root in enumerate(sorted(set(roots)))}
    return [numbers[root] for root in roots]


def relaxed(units: Units, slack: float) -> Units:
    """Relax the problem: unlimited memory, and no time for units with at most one neighbour that take no more than
    `slack`.

    No optimum of the result is above that of the units.
    """
    before, after = units.neighbours()
    leaf = [
        len(before[u] | after[u]) <= 1 and all(t <= slack for t in units.times[u] if t < inf) for u in range(len(units))
    ]
    times = tuple(
        tuple(t if t == inf else 0.0 for t in row) if small else row
        for row, small in zip(units.times, leaf, strict=True)
    )
    return replace(units, times=times, kinds=tuple(replace(kind, memory=inf) for kind in units.kinds))
