"""The best split of any kind, contiguous or not, by integer programming.

Let x[u, d] = 1 where unit u is on device d. Take every tie h and device d that pays transfers. Let `any[h, d]` be at
least every x[u, d] of its units, and `all[h, d]` at most each of them:

    least L:  sum over u of times[u][d] x[u, d] + sum over h of cost(h) (any[h, d] - all[h, d]) <= L
              for every device d, and
              sum over d of x[u, d] = 1,     sum over u of memory[u] x[u, d] <= memory of d

Equal devices could change places: a unit may be on one only if a unit before it, in the order of their times, is on the
one before.

The search starts from the best contiguous split, so its result is never worse. It ends when the optimum is proven to a
millionth, or after a number of nodes of its tree; `bound` is what it has proven until then.
"""

from __future__ import annotations

from math import inf

from penstock.support.errors import DoesNotFit

from .bounds import check_room, lower_bound
from .contiguous import split_contiguously
from .problem import Placement, PlacementProblem, Progress, fits, holds, loads
from .programme import Programme
from .units import Units, absorb, units_of

NODES = 2_000
# The feasibility tolerance of rows.
_TOLERANCE = 1e-6


def split_freely(problem: PlacementProblem, nodes: int = NODES, progress: Progress | None = None) -> Placement:
    """Return the split with the smallest largest load."""
    all_units = units_of(problem, contiguous=False)
    check_room(problem, all_units)
    units = absorb(all_units)
    known, reason = _contiguous(problem, progress)
    # Times are in units of the upper bound, so that tolerances mean the same in all problems.
    scale = known.value if known is not None else sum(max(t for t in times if t < inf) for times in units.times)
    if scale == 0 and known is not None:
        return known
    model = _FreeProgramme(units, problem.devices, scale or 1.0)
    start = model.start([known.device_of[head] for head in units.heads]) if known is not None else []
    answer = model.programme.minimise(start, nodes, progress)
    placement = known
    if answer.values:
        device_of = units.spread(model.devices(answer.values), len(problem.nodes))
        rows = loads(problem, device_of)
        value = max(row.total for row in rows)
        if fits(problem, rows) and (known is None or value < known.value):
            placement = Placement(problem, device_of, value, 0.0)
    if placement is None:
        searched = "proven" if answer.bound == inf else f"none found in {answer.nodes} nodes of the search tree"
        raise DoesNotFit(
            f"no split fits the memory of the devices ({searched}); {reason}", hint="add devices or memory"
        )
    bound = max(lower_bound(units), min(answer.bound, 1e9) * scale * (1 - _TOLERANCE))
    size = (
        f"integer programme of {len(units)} units on {len(problem.devices)} devices, "
        f"{answer.nodes} nodes of the search tree"
    )
    notes = (size, *(f"contiguous: {text}" for text in (known.notes if known is not None else ())))
    if known is not None:
        notes = (*notes, f"the best contiguous split found takes {known.value:.9g}")
    return Placement(problem, placement.device_of, placement.value, min(placement.value, bound), notes)


def _contiguous(problem: PlacementProblem, progress: Progress | None) -> tuple[Placement | None, str]:
    try:
        return split_contiguously(problem, progress=progress), ""
    except DoesNotFit as error:
        return None, error.what


class _FreeProgramme:
    """The integer programme, with the meaning of its variables."""

    def __init__(self, units: Units, kind_of: tuple[int, ...], scale: float) -> None:
        numbers = sorted(set(kind_of))
        self.units, self.programme = units, Programme()
        self._kind_of = [numbers.index(kind) for kind in kind_of]
        self._first = [self._kind_of.index(kind) for kind in self._kind_of]
        self._order = sorted(range(len(units)), key=lambda u: (-min(units.times[u]), u))
        level = self.programme.variable()
        self._at = [[self._switch(u, kind) for kind in self._kind_of] for u in range(len(units))]
        self._spans: list[tuple[int, int, frozenset[int], int]] = []
        for at in self._at:
            self.programme.row(((x, 1.0) for x in at), least=1.0, most=1.0)
        for d, number in enumerate(self._kind_of):
            kind = units.kinds[number]
            terms = [(at[d], t[number] / scale) for at, t in zip(self._at, units.times, strict=True) if t[number] < inf]
            if kind.pays_transfers:
                for tie, cost in units.ties:
                    some, every = self._span(tie, d)
                    terms += [(some, cost / scale), (every, -cost / scale)]
            self.programme.row([*terms, (level, -1.0)], most=0.0)
            if kind.memory < sum(units.memory):
                self.programme.row(
                    ((at[d], m / kind.memory) for at, m in zip(self._at, units.memory, strict=True)), most=1.0
                )
        self._break_symmetry()

    def _switch(self, u: int, kind: int) -> int:
        fine = self.units.times[u][kind] < inf and holds(self.units.kinds[kind], self.units.memory[u])
        return self.programme.variable(0.0, 1.0 if fine else 0.0, whole=True)

    def _span(self, tie: frozenset[int], d: int) -> tuple[int, int]:
        some, every = self.programme.variable(0.0, 1.0), self.programme.variable(0.0, 1.0)
        for u in sorted(tie):
            self.programme.row(((some, 1.0), (self._at[u][d], -1.0)), least=0.0)
            self.programme.row(((every, 1.0), (self._at[u][d], -1.0)), most=0.0)
        self._spans.append((some, every, tie, d))
        return some, every

    def _break_symmetry(self) -> None:
        for d, first in enumerate(self._first):
            if d == first:
                continue
            for i, u in enumerate(self._order):
                earlier = ((self._at[v][d - 1], -1.0) for v in self._order[:i])
                self.programme.row([(self._at[u][d], 1.0), *earlier], most=0.0)

    def start(self, device_of: list[int]) -> list[float]:
        """Return a known split as values of all variables, with equal devices numbered as the programme wants them."""
        number: dict[int, int] = {}
        used = dict.fromkeys(self._first, 0)
        for u in self._order:
            if (device := device_of[u]) not in number:
                first = self._first[device]
                number[device] = first + used[first]
                used[first] += 1
        values = [0.0] * len(self.programme.lower)
        place = [number[device] for device in device_of]
        for at, d in zip(self._at, place, strict=True):
            values[at[d]] = 1.0
        for some, every, tie, d in self._spans:
            here = [place[u] == d for u in tie]
            values[some], values[every] = float(any(here)), float(all(here))
        values[0] = 1.0
        return values

    def devices(self, values: tuple[float, ...]) -> list[int]:
        return [max(range(len(at)), key=lambda d: values[at[d]]) for at in self._at]
