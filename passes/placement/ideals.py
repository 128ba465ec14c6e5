"""Ideals of an order: sets of units that hold, with a unit, all its predecessors. A device with a contiguous set of
units has the difference of two.

`enumerate_ideals` finds all of them, level by level: an ideal of i+1 units is one of i units and a unit all of whose
predecessors it holds. It gives up beyond a limit, as their number is exponential in the width of the order. `prefixes`
are those of one linear order: as many as units, plus one.

A set is a Python integer, bit u for unit u. The dynamic programme wants the transposed table too: for every unit a byte
per ideal, so that "which of these ten thousand ideals hold unit u" is one row. That is what takes the memory: units x
ideals bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .problem import Progress

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Ideals:
    """A list of ideals, smaller sets first: `sets[0]` is empty, the last is everything.

    `tops[i]` are the units of `sets[i]` without a successor in it, or enough of them that another ideal here holds it
    if it holds these.
    """

    units: int
    sets: tuple[int, ...]
    tops: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sets)

    def rows(self) -> Bytes:
        """Return the membership table: entry [u, i] is 1 where ideal i holds unit u."""
        width = (self.units + 7) // 8
        packed = np.frombuffer(b"".join(s.to_bytes(width, "little") for s in self.sets), np.uint8).reshape(
            len(self), width
        )
        table = np.empty((self.units, len(self)), np.uint8)
        for column in range(width):
            bits = np.unpackbits(packed[:, column][None], axis=0, bitorder="little")
            first = 8 * column
            table[first : first + 8] = bits[: self.units - first]
        return table


def bits(set: int) -> Iterator[int]:
    """Yield the units of a set, in order."""
    while set:
        low = set & -set
        yield low.bit_length() - 1
        set ^= low


def masks(neighbours: Sequence[set[int]]) -> list[int]:
    """Return sets of units as integers."""
    return [sum(1 << u for u in units) for units in neighbours]


def enumerate_ideals(
    before: Sequence[set[int]], after: Sequence[set[int]], limit: int, progress: Progress | None = None
) -> Ideals | None:
    """Return all ideals, or None where there are more than `limit`."""
    units = len(before)
    below = masks(before)
    sets, tops = [0], [0]
    # Per ideal of the level: its tops, and the units that can be added to it.
    level: dict[int, tuple[int, list[int]]] = {0: (0, [u for u in range(units) if not below[u]])}
    for _ in range(units):
        grown: dict[int, tuple[int, list[int]]] = {}
        for ideal, (top, free) in level.items():
            for u in free:
                larger = ideal | 1 << u
                if larger not in grown:
                    added = [v for v in after[u] if not below[v] & ~larger]
                    grown[larger] = (top & ~below[u] | 1 << u, [v for v in free if v != u] + added)
            if len(sets) + len(grown) > limit:
                return None
        sets += grown
        tops += [top for top, _ in grown.values()]
        level = grown
        if progress is not None:
            progress(len(sets), limit, "ideals found")
    return Ideals(units, tuple(sets), tuple(tops))


def prefixes(line: Sequence[int]) -> Ideals:
    """Return the ideals that a linear order passes through: each holds those before it, so one that has the last unit
    has all."""
    sets = [0]
    for u in line:
        sets.append(sets[-1] | 1 << u)
    return Ideals(len(line), tuple(sets), (0, *(1 << u for u in line)))
