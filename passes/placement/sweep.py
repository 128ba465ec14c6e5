"""The dynamic programme over ideals: the best way to fill devices one after the other, each with the difference of two
ideals.

With best(I, used) the smallest largest load over all ways to put exactly the units of ideal I on the devices `used`,

    best(I', used + d) = min over ideals I of I' of max(best(I, used), load(d, I' - I))

and devices of a kind are equal, so `used` counts them. Ideals are visited in an order in which smaller sets come first,
and each passes its values on to all larger ones at once. So the memory is one value per ideal and `used`, not one per
pair of ideals. Let T be the sum of times and C(I) the cost of the ties that I splits. Let R = h - I for a tie h that I
splits. Then

    load(I' - I) = T(I') - T(I) + C(I') - C(I)
                   + sum over ties h that I splits of cost(h) ([R meets I'] + [R within I'])

on devices that pay transfers. All of it sums over rows of the table of ideals, for any set of I'.

The sweep prunes by `upper`, the value of a known solution. Ideals are sorted by the least time of their units, so those
within reach of I are one stretch. It ends where a device would be too slow, and begins where too much would be left for
the devices that remain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np
import numpy.typing as npt

from .ideals import Bytes, Ideals, bits
from .problem import Progress
from .units import Units

Reals = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

# Sums of the same numbers in another order differ in the last digits.
_SLACK = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class KindUnits:
    """A device of this kind with the units of a set."""

    kind: int
    units: int


@dataclass(frozen=True, slots=True)
class Fillings:
    """An automaton of the orders in which devices may be filled.

    A state says which devices are used. `moves[state]` are the kinds that may come next, with the state after;
    `left[state]` devices remain. State 0 is the first, `last` the last. Where `last` is None devices may stay empty,
    and any state may be the last.
    """

    moves: tuple[tuple[tuple[int, int], ...], ...]
    left: tuple[int, ...]
    last: int | None = None

    @staticmethod
    def of_kinds(counts: Sequence[int]) -> Fillings:
        """Allow any device to come next; those of a kind are equal."""
        used = list(product(*(range(count + 1) for count in counts)))
        number = {state: i for i, state in enumerate(used)}
        moves = []
        for state in used:
            after = [(k, (*state[:k], n + 1, *state[k + 1 :])) for k, n in enumerate(state) if n < counts[k]]
            moves.append(tuple((k, number[next_state]) for k, next_state in after))
        return Fillings(tuple(moves), tuple(sum(counts) - sum(state) for state in used))

    @staticmethod
    def in_order(count: int) -> Fillings:
        """Allow one device of each kind, in the order of the kinds, none of them empty."""
        return Fillings((*(((k, k + 1),) for k in range(count)), ()), tuple(range(count, -1, -1)), count)


class Tables:
    """The ideals as the sweep reads them, sorted by `floor`: the least time of their units. It computes the loads
    between them."""

    def __init__(self, units: Units, ideals: Ideals) -> None:
        self.kinds, self._ties = units.kinds, units.ties
        rows = ideals.rows()
        times = np.array(units.times, dtype=np.float64)
        # Added up unit by unit, so that rounding never makes a larger set smaller.
        floor = _sums(rows, times.min(axis=1))
        sizes = np.array([s.bit_count() for s in ideals.sets])
        order = np.lexsort((sizes, floor))
        for u in range(len(rows)):
            rows[u] = rows[u][order]
        self.rows, self.floor = rows, floor[order]
        self.sets = [ideals.sets[i] for i in order]
        self.tops = [ideals.tops[i] for i in order]
        runs = np.isfinite(times)
        self._memory = _sums(rows, np.array(units.memory))
        self._barred = [None if column.all() else _sums(rows, (~column).astype(np.float64)) for column in runs.T]
        time = [_sums(rows, np.where(runs[:, k], times[:, k], 0.0)) for k in range(len(self.kinds))]
        split, self._split_at, self._split_ties = self._splits()
        self._base = [t + split if kind.pays_transfers else t for t, kind in zip(time, self.kinds, strict=True)]
        self._members = [sum(1 << u for u in tie) for tie, _ in self._ties]

    def __len__(self) -> int:
        return len(self.sets)

    def _splits(self) -> tuple[Reals, Places, npt.NDArray[np.int32]]:
        """Return the cost of the ties that each ideal splits, and their numbers: those of ideal i from
        `starts[i]` on."""
        cost_of = np.zeros(len(self))
        where: list[npt.NDArray[np.int32]] = []
        which: list[npt.NDArray[np.int32]] = []
        for number, (tie, cost) in enumerate(self._ties):
            held = [self.rows[u] for u in tie]
            split = np.flatnonzero(np.bitwise_or.reduce(held) > np.bitwise_and.reduce(held))
            cost_of[split] += cost
            where.append(split.astype(np.int32))
            which.append(np.full(len(split), number, dtype=np.int32))
        places = np.concatenate([*where, np.zeros(0, np.int32)])
        sorting = np.argsort(places, kind="stable")
        starts = np.searchsorted(places[sorting], np.arange(len(self) + 1))
        return cost_of, starts, np.concatenate([*which, np.zeros(0, np.int32)])[sorting]

    def larger(self, i: int, first: int, last: int) -> Places:
        """Return the ideals from `first` to `last` - 1 that are proper supersets of ideal i."""
        first = max(first, i + 1)
        tops = [self.rows[u, first:last] for u in bits(self.tops[i])]
        held = np.bitwise_and.reduce(tops) if tops else np.ones(max(0, last - first), np.uint8)
        return np.flatnonzero(held) + first

    def loads(self, i: int, kind: int, among: Places, upper: float) -> tuple[Places, Reals]:
        """Return the loads of a device of this kind with the units that an ideal has over ideal i. Only ideals of
        `among` with a load below `upper` are returned."""
        base, device = self._base[kind], self.kinds[kind]
        cost = base[among] - base[i]
        fine = cost < upper
        if (barred := self._barred[kind]) is not None:
            fine &= barred[among] == barred[i]
        if device.memory < inf:
            fine &= self._memory[among] - self._memory[i] <= device.memory * _SLACK
        among, cost = among[fine], cost[fine]
        if not device.pays_transfers:
            return among, cost
        twice, several = self._remainders(i)
        for u, weight in twice.items():
            cost += weight * self.rows[u].take(among)
        for units, weight in several.items():
            held = [self.rows[u].take(among) for u in bits(units)]
            cost += weight * (np.bitwise_or.reduce(held) + np.bitwise_and.reduce(held))
        fine = cost < upper
        return among[fine], cost[fine]

    def _remainders(self, i: int) -> tuple[Mapping[int, float], Mapping[int, float]]:
        """Return the units that ideal i lacks of the ties it splits: single units, whose cost counts twice, and sets of
        several."""
        inside = ~self.sets[i]
        twice: dict[int, float] = {}
        several: dict[int, float] = {}
        for number in self._split_ties[self._split_at[i] : self._split_at[i + 1]]:
            missing, cost = self._members[number] & inside, self._ties[number][1]
            if missing & (missing - 1):
                several[missing] = several.get(missing, 0.0) + cost
            else:
                unit = missing.bit_length() - 1
                twice[unit] = twice.get(unit, 0.0) + 2.0 * cost
        return twice, several


def _sums(rows: Bytes, amounts: Reals) -> Reals:
    total = np.zeros(rows.shape[1])
    for row, amount in zip(rows, amounts, strict=True):
        if amount:
            total += amount * row
    return total


def sweep(
    tables: Tables, fillings: Fillings, upper: float = inf, progress: Progress | None = None
) -> tuple[float, list[KindUnits]] | None:
    """Return the best value below `upper` and its parts, first to last; None where nothing is below."""
    count, states = len(tables), len(fillings.moves)
    best = np.full((states, count), inf)
    best[0, 0] = 0.0
    came_from = np.zeros((states, count), np.int32)
    by_kind, by_state = np.zeros((states, count), np.int16), np.zeros((states, count), np.int32)
    floor = tables.floor
    final_states: list[int] = []
    earlier: list[list[int]] = [[] for _ in range(states)]
    for state, choices in enumerate(fillings.moves):
        for _, after in choices:
            earlier[after].append(state)
    begin = _begins(floor, fillings.left, upper)
    for i in range(count - 1):
        if progress is not None and i % 256 == 0:
            progress(i, count, "ideals")
        live = np.flatnonzero((best[:, i] < upper) & (begin <= i))
        # Where devices may stay empty, a state is useless if another with fewer devices has a value as good.
        sources = [
            int(s) for s in live if fillings.last is not None or all(best[e, i] > best[s, i] for e in earlier[s])
        ]
        moves = [(kind, state, after) for state in sources for kind, after in fillings.moves[state]]
        if not moves:
            continue
        last = int(np.searchsorted(floor, (floor[i] + upper) * _SLACK, side="right")) if upper < inf else count
        among = tables.larger(i, min(int(begin[after]) for _, _, after in moves), last)
        if not len(among):
            continue
        for kind in sorted({kind for kind, _, _ in moves}):
            reachable, cost = tables.loads(i, kind, among, upper)
            for _, state, after in (move for move in moves if move[0] == kind):
                start = int(np.searchsorted(reachable, begin[after]))
                places = reachable[start:]
                value = np.maximum(cost[start:], best[state, i])
                better = value < best[after].take(places)
                places, value = places[better], value[better]
                best[after, places] = value
                came_from[after, places], by_kind[after, places], by_state[after, places] = i, kind, state
                if len(places) and places[-1] == count - 1 and value[-1] < upper and fillings.last in (None, after):
                    upper, final_states = float(value[-1]), [after]
                    begin = _begins(floor, fillings.left, upper)
    if not final_states:
        return None
    parts: list[KindUnits] = []
    state, place = final_states[0], count - 1
    while place:
        before = int(came_from[state, place])
        parts.append(KindUnits(int(by_kind[state, place]), tables.sets[place] & ~tables.sets[before]))
        state, place = int(by_state[state, place]), before
    return upper, parts[::-1]


def _begins(floor: Reals, left: Sequence[int], upper: float) -> Places:
    """Return, per state, the first ideal that leaves no more than the devices that remain can do."""
    reach = np.array([n * upper if n else 0.0 for n in left])
    begins: Places = np.searchsorted(floor, floor[-1] / _SLACK - reach * _SLACK, side="left")
    return begins
