"""The best contiguous split of a problem: exact as long as its ideals can be counted, with a lower bound beside it
otherwise.

    1. nodes that must share a device are merged, and those that may without loss (units.py)
    2. three linear orders are cut as well as they can be: the best of the three is the upper bound
    3. a tie that costs as much as that bound is not cut by anything better, so its units are merged
    4. all ideals, at most `limit` of them, and the dynamic programme over them (sweep.py)

Where there are more ideals than the limit, small units with one neighbour are merged with it, whatever memory says.
Where that is not enough, the units are clustered along the best linear order (coarsen.py), until their ideals can be
counted. The value is then the best over clusters, never worse than the best linear order. `bound` limits the loss. It
is the relaxation of bounds.py. It is also the optimum without memory limits and without the times of such small units,
where its ideals can be counted.

Time: in proportion to pairs of ideals within reach of each other, some 30 ns each. Memory: ideals x (units + 18 x
states) bytes, where the states are the numbers of devices that can be in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from penstock.support.errors import DoesNotFit

from .bounds import check_room, lower_bound
from .coarsen import clusters, lines
from .ideals import Ideals, bits, enumerate_ideals, prefixes
from .problem import Placement, PlacementProblem, Progress, fits, loads
from .sweep import Fillings, KindUnits, Tables, sweep
from .units import Units, absorb, circles, relaxed, units_of

LIMIT = 50_000
# The factor by which the number of units shrinks when there are too many ideals.
_SHRINK = 0.75
# Units with one neighbour that take less than this part of the largest load are merged with it when there are too many
# ideals.
_SMALL = 2e-3
# Linear orders of more units take too much memory: a byte for each pair.
_LONGEST = 4_000


@dataclass(frozen=True, slots=True)
class _Split:
    """Sets of units, one after the other. `line` is the linear order that it was cut from, if it was cut from one."""

    value: float
    parts: tuple[KindUnits, ...]
    units: Units
    line: tuple[int, ...] = ()


def split_contiguously(problem: PlacementProblem, limit: int = LIMIT, progress: Progress | None = None) -> Placement:
    """Return the contiguous split with the smallest largest load."""
    all_units = units_of(problem)
    check_room(problem, all_units)
    units = absorb(all_units)
    fillings = Fillings.of_kinds([min(kind.count, len(units)) for kind in units.kinds])
    notes: list[str] = []
    if len(units) > _LONGEST:
        units = units.merged(clusters(_weights(units), lines(units)[-1], (), _LONGEST))
        notes.append(f"the graph is clustered into {len(units)} pieces first")
    known = _best_line(units, fillings, None)
    tight = _fused(units, known.value) if known is not None else units
    ideals = enumerate_ideals(*tight.neighbours(), limit, progress)
    if ideals is None:
        tight, ideals, known = _clustered(units, fillings, known, limit, progress)
        notes.append(f"more than {limit} ideals: the best split of {len(tight)} clusters of nodes, not of all nodes")
    exact = not notes
    notes.insert(0, f"{len(ideals)} ideals of {len(tight)} units, made of {len(problem.nodes)} nodes")
    split = _swept(tight, ideals, fillings, known, progress)
    if split is None:
        reason = "no contiguous split fits the memory of the devices" + (
            "" if exact else f", of {len(tight)} clusters of nodes"
        )
        raise DoesNotFit(reason, hint="add devices or memory" + ("" if exact else ", or raise the limit of ideals"))
    device_of, value = _placed(problem, split)
    assert abs(value - split.value) <= 1e-9 * max(1.0, value), f"the split takes {value}, the search said {split.value}"
    if exact:
        return Placement(problem, device_of, value, value, tuple(notes))
    better, bound = _relaxed(all_units, fillings, value, limit, progress)
    if better is not None:
        candidate, candidate_value = _placed(problem, better)
        if fits(problem, loads(problem, candidate)) and candidate_value < value:
            device_of, value = candidate, candidate_value
    return Placement(problem, device_of, value, min(value, max(bound, lower_bound(all_units))), tuple(notes))


def _placed(problem: PlacementProblem, split: _Split) -> tuple[tuple[int, ...], float]:
    """Return the devices of the nodes, and the largest load, from the definition."""
    device_of = split.units.spread(_devices(split.units, split.parts), len(problem.nodes))
    return device_of, max(row.total for row in loads(problem, device_of))


def _weights(units: Units) -> list[float]:
    return [min(times) for times in units.times]


def _swept(
    units: Units, ideals: Ideals, fillings: Fillings, known: _Split | None, progress: Progress | None = None
) -> _Split | None:
    """Return a split that is better than the known one, or else the known one."""
    better = sweep(Tables(units, ideals), fillings, known.value if known is not None else inf, progress)
    return known if better is None else _Split(better[0], tuple(better[1]), units)


def _best_line(units: Units, fillings: Fillings, known: _Split | None) -> _Split | None:
    """Return the best split into stretches of one of several linear orders, if it is better than the known one."""
    for line in lines(units):
        split = _swept(units, prefixes(line), fillings, known)
        if split is not None and split is not known:
            known = replace(split, line=tuple(line))
    return known


def _fused(units: Units, upper: float) -> Units:
    """Merge units that nothing better than `upper` parts: some device with a part of them would pay as much for their
    tie alone."""
    if sum(kind.count for kind in units.kinds if not kind.pays_transfers) > 1:
        return units
    edges = list(units.order)
    for tie, cost in units.ties:
        if cost >= upper:
            circle = sorted(tie)
            edges += zip(circle, [*circle[1:], circle[0]], strict=True)
    group_of = circles(len(units), edges)
    return units if len(set(group_of)) == len(units) else units.merged(group_of)


def _clustered(
    units: Units, fillings: Fillings, known: _Split | None, limit: int, progress: Progress | None
) -> tuple[Units, Ideals, _Split | None]:
    """Merge units until their ideals are within the limit. Return both, and the best split known by then."""
    small = (known.value if known is not None else sum(_weights(units))) * _SMALL
    loose = absorb(units, small)
    if loose is not units:
        known = _best_line(loose, fillings, known)
        ideals = enumerate_ideals(*loose.neighbours(), limit, progress)
        if ideals is not None:
            return loose, ideals, known
    line, cuts = lines(loose)[-1], set[int]()
    if known is not None and known.units is loose:
        line = list(known.line)
        for part in known.parts:
            cuts.add(max(cuts, default=0) + part.units.bit_count())
    count = len(loose)
    while count > max(1, len(cuts)):
        count = min(count - 1, int(count * _SHRINK))
        coarse = loose.merged(clusters(_weights(loose), line, cuts, count))
        ideals = enumerate_ideals(*coarse.neighbours(), limit, progress)
        if ideals is not None:
            return coarse, ideals, known
    # With very many devices side by side, only the known split is left.
    return loose, prefixes(line), known


def _relaxed(
    all_units: Units, fillings: Fillings, value: float, limit: int, progress: Progress | None
) -> tuple[_Split | None, float]:
    """Return the optimum without memory limits and without the times of small units with one neighbour: a bound. Its
    split may even fit."""
    units = absorb(relaxed(all_units, value * _SMALL))
    if len(units) > _LONGEST:
        return None, 0.0
    known = _best_line(units, fillings, None)
    assert known is not None
    tight = _fused(units, known.value)
    ideals = enumerate_ideals(*tight.neighbours(), limit, progress)
    if ideals is None:
        return None, 0.0
    split = _swept(tight, ideals, fillings, known, progress)
    return split, split.value if split is not None else 0.0


def _devices(units: Units, parts: Sequence[KindUnits]) -> list[int]:
    """Return the device of every unit: those of a kind are used in order."""
    first = [sum(kind.count for kind in units.kinds[:k]) for k in range(len(units.kinds))]
    device_of = [-1] * len(units)
    for part in parts:
        for u in bits(part.units):
            device_of[u] = first[part.kind]
        first[part.kind] += 1
    return device_of
