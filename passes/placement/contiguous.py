"""The best contiguous split of a problem: exact as long as its ideals can be counted, with a bound beside it otherwise.

    1. what must share a device is made one, and what may without loss (units.py)
    2. three linear orders are cut as well as they can be: the best of the three is the value to beat
    3. a tie that costs as much as that value is not cut by anything better, so its units are made one
    4. all ideals, at most `limit` of them, and the dynamic programme over them (sweep.py)

Where there are more ideals than the limit, the units are clustered along the best of the linear orders (coarsen.py), fewer and fewer, until their
ideals can be counted. The value is then the best over clusters, never worse than the best linear order, and `bound` says what is lost at
most: the relaxation of bounds.py.

Time: in proportion to pairs of ideals within reach of each other, some 30 ns each. Memory: ideals x (units + 18 x states) bytes, where the states
are the numbers of devices that can be in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import networkx as nx

from ...ir.errors import DoesNotFit
from .bounds import check_room, lower_bound
from .coarsen import clusters, lines
from .ideals import Ideals, bits, enumerate_ideals, prefixes
from .problem import Placement, Problem, Progress, fits, loads
from .sweep import Fillings, Part, Tables, sweep
from .units import Units, absorb, units_of

LIMIT = 50_000
# How far the number of units goes down when there are too many ideals.
_SHRINK = 0.75
# Linear orders of more units take too much memory: a byte for each pair.
_LONGEST = 4_000


@dataclass(frozen=True, slots=True)
class _Split:
    """Sets of the units it was found on, one after the other."""

    value: float
    parts: tuple[Part, ...]
    line: tuple[int, ...] = ()


def split_contiguously(problem: Problem, limit: int = LIMIT, progress: Progress | None = None) -> Placement:
    """The contiguous split with the smallest largest load."""
    whole = units_of(problem)
    check_room(problem, whole)
    units = absorb(whole)
    fillings = Fillings.of_kinds([min(kind.count, len(units)) for kind in units.kinds])
    notes: list[str] = []
    if len(units) > _LONGEST:
        weights = [min(times) for times in units.times]
        units = units.merged(clusters(weights, lines(units)[-1], (), _LONGEST))
        notes.append(f"the graph is clustered into {len(units)} pieces first")
    known = _best_line(units, fillings)
    found = known
    tight = _fused(units, known.value) if known is not None else units
    before, after = tight.neighbours()
    ideals = enumerate_ideals(before, after, limit, progress)
    if ideals is None:
        tight, ideals = _clustered(units, known, limit, progress)
        notes.append(f"more than {limit} ideals: the best split of {len(tight)} clusters of nodes, not of all nodes")
    exact = not notes
    notes.insert(0, f"{len(ideals)} ideals of {len(tight)} units, made of {len(problem.nodes)} nodes")
    better = sweep(Tables(tight, ideals), fillings, known.value if known is not None else inf, progress)
    if better is not None:
        found, units = _Split(better[0], tuple(better[1])), tight
    if found is None:
        reason = "no contiguous split fits the memory of the devices" + ("" if exact else f", of {len(tight)} clusters of nodes")
        raise DoesNotFit(reason, hint="add devices or memory" + ("" if exact else ", or raise the limit of ideals"))
    device_of = units.spread(_devices(units, found.parts), len(problem.nodes))
    rows = loads(problem, device_of)
    assert fits(problem, rows), "the split does not fit"
    value = max(row.total for row in rows)
    assert abs(value - found.value) <= 1e-9 * max(1.0, value), f"the split takes {value}, the search said {found.value}"
    bound = value if exact else min(value, lower_bound(whole))
    return Placement(problem, device_of, value, bound, tuple(notes))


def _best_line(units: Units, fillings: Fillings) -> _Split | None:
    """The best split into stretches of one of several linear orders."""
    before, _ = units.neighbours()
    best: _Split | None = None
    for line in lines(units):
        found = sweep(Tables(units, prefixes(line, before)), fillings, best.value if best is not None else inf)
        if found is not None:
            best = _Split(found[0], tuple(found[1]), tuple(line))
    return best


def _fused(units: Units, upper: float) -> Units:
    """Units that nothing better than `upper` parts: some device with a part of them would pay as much for their tie alone."""
    if sum(kind.count for kind in units.kinds if not kind.pays_transfers) > 1:
        return units
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(units)))
    graph.add_edges_from(units.order)
    for tie, cost in units.ties:
        if cost >= upper:
            circle = sorted(tie)
            graph.add_edges_from(zip(circle, [*circle[1:], circle[0]], strict=True))
    groups = sorted(sorted(group) for group in nx.strongly_connected_components(graph))
    group_of = {u: i for i, group in enumerate(groups) for u in group}
    return units if len(groups) == len(units) else units.merged([group_of[u] for u in range(len(units))])


def _clustered(units: Units, known: _Split | None, limit: int, progress: Progress | None) -> tuple[Units, Ideals]:
    """Units made of units, as many as there may be for the limit."""
    line = list(known.line) if known is not None else lines(units)[-1]
    cuts: set[int] = set()
    for part in known.parts if known is not None else ():
        cuts.add(max(cuts, default=0) + part.units.bit_count())
    weights = [min(times) for times in units.times]
    count = len(units)
    while count > max(1, len(cuts)):
        count = min(count - 1, int(count * _SHRINK))
        coarse = units.merged(clusters(weights, line, cuts, count))
        ideals = enumerate_ideals(*coarse.neighbours(), limit, progress)
        if ideals is not None:
            return coarse, ideals
    # Very many devices side by side: nothing but the known split is left.
    return units, prefixes(line, units.neighbours()[0])


def _devices(units: Units, parts: Sequence[Part]) -> list[int]:
    """The device of every unit: those of a kind are taken in order."""
    first = [sum(kind.count for kind in units.kinds[:k]) for k in range(len(units.kinds))]
    device_of = [-1] * len(units)
    for part in parts:
        for u in bits(part.units):
            device_of[u] = first[part.kind]
        first[part.kind] += 1
    return device_of
