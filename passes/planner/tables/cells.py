"""Costs of stages by option and range of layers, each computed when a search first asks for it.

In: options of stages (stages.py). Out: a number for each, and cost and pace of many options and ranges at once. A
search looks at a small part of all ranges of most groups of unequal devices, and to deal out their microbatches is most
of the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..chain import Floats, Ints
from ..stages import Option, Stages, UnequalOption

# How many times as many options there is room for as are likely; numbers of places take memory once they are used.
_ROOM = 8
# The places of what is not known yet, and of what does not fit.
_UNKNOWN, _NOWHERE = 0, 1


class StageCells:
    """Cost and pace of options, about as many as `likely`. Under schedules with a delay pace is the same as cost, and
    that of sums of gradients stands in its place."""

    def __init__(self, stages: Stages, likely: int) -> None:
        self.stages, self.side = stages, stages.table.count + 1
        self.options: list[Option | UnequalOption] = []
        self._numbers: dict[int, int] = {}
        # The place of each option and range in the rows of costs and paces, of which the first `_used` are filled.
        self._places = np.zeros((_ROOM * likely, self.side**2), np.int32)
        self._values, self._used = np.full((2, 1024), np.inf), 2
        # Options of one case have one number here.
        self._cases: dict[object, int] = {}
        self._case_of: list[int] = []

    @property
    def elements(self) -> int:
        """Return about how many elements of eight bytes this has."""
        return self._values.size + len(self.options) * self.side**2 // 2

    def number(self, option: Option | UnequalOption) -> int:
        """Return the number of an option, which must not be dropped while this is in use."""
        if id(option) not in self._numbers:
            number = len(self.options)
            if number == len(self._places):
                places = np.zeros((2 * number, self.side**2), np.int32)
                places[:number] = self._places
                self._places = places
            case = option.case if isinstance(option, UnequalOption) else None
            # The number stands last, so that an interrupt leaves no option with half of what it needs.
            self._case_of[number:] = [self._cases.setdefault(case, len(self._cases))]
            self.options.append(option)
            self._numbers[id(option)] = number
        return self._numbers[id(option)]

    def look(self, numbers: Ints, first: Ints, last: Ints) -> tuple[Floats, Floats]:
        """Return cost and pace of options at ranges of layers."""
        cells = (numbers * self.side + first) * self.side + last
        places = self._places.take(cells)
        if (new := np.flatnonzero(places == _UNKNOWN)).size:
            self._compute(np.unique(cells[new]))
            places = self._places.take(cells)
        return self._values[0].take(places), self._values[1].take(places)

    def _compute(self, cells: Ints) -> None:
        """Fill in the places of options and ranges."""
        numbers, ranges = np.divmod(cells, self.side**2)
        cases = np.array(self._case_of)[numbers]
        for case in np.unique(cases).tolist():
            here = np.flatnonzero(cases == case)
            some, which = np.unique(numbers[here], return_inverse=True)
            first, last = np.divmod(ranges[here], self.side)
            self._fill(cells[here], [self.options[number] for number in some.tolist()], which, first, last)

    def _fill(
        self, cells: Ints, options: Sequence[Option | UnequalOption], which: Ints, first: Ints, last: Ints
    ) -> None:
        delayed, places = bool(self.stages.row.delay), np.full(len(cells), _NOWHERE)
        unequal = [option for option in options if isinstance(option, UnequalOption)]
        if unequal:
            fits = np.stack([option.fits for option in unequal])[which, first, last]
            pace, cost, ring = self.stages.priced(unequal, which[fits], first[fits], last[fits])
            other = ring if delayed else pace
        else:
            fits = np.ones(len(cells), np.bool_)
            rows = [(x.cost, x.pace if not delayed else x.cost if x.ring is None else x.ring) for x in options]
            cost, other = (np.stack(row)[which, first, last] for row in zip(*rows, strict=True))
        places[fits] = self._used + np.arange(len(cost))
        self._used += len(cost)
        if self._used > self._values.shape[1]:
            self._values = np.concatenate([self._values, np.empty((2, self._used))], 1)
        self._values[:, places[fits]] = cost, other
        self._places.reshape(-1)[cells] = places
