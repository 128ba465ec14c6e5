"""Coarsen a problem with too many ideals: merge neighbours in a linear order that respects the order of the units.

That never makes a cycle. Light pairs are merged first, so that clusters are of like weight. `cuts` stay apart, so that
the split that has them is still possible: the best split of the clusters is never worse than it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from heapq import heapify, heappop, heappush

from .units import Units

Pick = Callable[[int], float]


def linear(before: Sequence[set[int]], after: Sequence[set[int]], rank: Pick) -> list[int]:
    """Return a topological order of the units: of those that may come next, the one of the smallest rank goes first."""
    waiting = [len(units) for units in before]
    free = [(rank(u), u) for u, count in enumerate(waiting) if not count]
    heapify(free)
    line: list[int] = []
    while free:
        _, u = heappop(free)
        line.append(u)
        for v in sorted(after[u]):
            waiting[v] -= 1
            if not waiting[v]:
                heappush(free, (rank(v), v))
    return line


def deep(before: Sequence[set[int]], after: Sequence[set[int]]) -> list[int]:
    """Return a linear order that finishes a branch before it begins another."""
    waiting = [len(units) for units in before]
    free = [u for u, count in reversed(list(enumerate(waiting))) if not count]
    line: list[int] = []
    while free:
        u = free.pop()
        line.append(u)
        for v in sorted(after[u], reverse=True):
            waiting[v] -= 1
            if not waiting[v]:
                free.append(v)
    return line


def lines(units: Units) -> list[list[int]]:
    """Return several linear orders: as the nodes stand, by branches, and by branches from the end, where sources stand
    right before their users."""
    before, after = units.neighbours()
    orders = [linear(before, after, lambda u: units.nodes[u][0]), deep(before, after), deep(after, before)[::-1]]
    return [line for i, line in enumerate(orders) if line not in orders[:i]]


def clusters(weights: Sequence[float], line: Sequence[int], cuts: Collection[int], count: int) -> list[int]:
    """Return the group of every unit: at most `count` stretches of the line, or one between each two cuts, where that
    is more. A cut is a position."""
    last = list(range(len(line)))
    weight = [weights[u] for u in line]
    follower = [i + 1 for i in range(len(line))]
    leader = [i - 1 for i in range(len(line))]
    alive = [True] * len(line)
    pairs = [(weight[i] + weight[i + 1], i, i + 1) for i in range(len(line) - 1) if i + 1 not in cuts]
    heapify(pairs)
    groups = len(line)
    while groups > count and pairs:
        total, a, b = heappop(pairs)
        if not (alive[a] and alive[b]) or follower[a] != b or total != weight[a] + weight[b]:
            continue
        alive[b], weight[a], last[a], follower[a] = False, total, last[b], follower[b]
        groups -= 1
        if follower[a] < len(line):
            leader[follower[a]] = a
            if follower[a] not in cuts:
                heappush(pairs, (weight[a] + weight[follower[a]], a, follower[a]))
        if leader[a] >= 0 and a not in cuts:
            heappush(pairs, (weight[leader[a]] + weight[a], leader[a], a))
    group_of = [0] * len(line)
    number = 0
    for i in range(len(line)):
        if alive[i]:
            for j in range(i, last[i] + 1):
                group_of[line[j]] = number
            number += 1
    return group_of
