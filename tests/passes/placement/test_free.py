"""Splits that need not be contiguous against every assignment, and against the contiguous ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from penstock.passes.placement.contiguous import split_contiguously
from penstock.passes.placement.free import split_freely
from penstock.passes.placement.problem import DeviceKind, PlacedNode, PlacementProblem, fits, loads
from penstock.passes.placement.programme import Answer, Programme
from penstock.support.errors import DoesNotFit

from .drawn import draw_problem, try_all


def compare(seeds: range) -> list[tuple[float, float]]:
    """Contiguous and free optima; every value is checked on the way."""
    found = []
    for seed in seeds:
        problem = draw_problem(seed)
        expected = try_all(problem, contiguous=False)
        try:
            placed = split_freely(problem)
        except DoesNotFit:
            assert expected == inf
            continue
        rows = loads(problem, placed.device_of)
        assert fits(problem, rows)
        assert placed.value == max(row.total for row in rows) == pytest.approx(expected, abs=1e-9)
        assert placed.bound <= expected + 1e-9
        assert placed.gap <= 2e-6
        found.append((try_all(problem), expected))
    return found


def test_optima_are_those_of_all_assignments() -> None:
    found = compare(range(40))
    assert any(free < contiguous - 1e-9 for contiguous, free in found), "the control: the two are not the same"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 240, 50))
def test_optima_are_those_of_all_assignments_of_many(first: int) -> None:
    compare(range(first, first + 50))


def test_a_search_that_ends_early_is_never_worse_than_contiguous() -> None:
    """A grid of 5 x 5 on three devices: no optimum in one node, so the bound stays below."""
    nodes = tuple(PlacedNode(str(i), (1.0 + (i * 7 % 5) / 4, 10.0), 1.0, 0.2 + (i % 3) / 10) for i in range(25))
    edges = [(i, i + 1) for i in range(25) if i % 5 < 4] + [(i, i + 5) for i in range(20)]
    problem = PlacementProblem(
        (DeviceKind("accelerator", 3, 10.0), DeviceKind("CPU", 1, pays_transfers=False)), nodes, tuple(edges)
    )
    contiguous = split_contiguously(problem)
    free = split_freely(problem, nodes=1)
    assert free.value <= contiguous.value
    assert free.bound < free.value
    assert "1 nodes of the search tree" in free.notes[0]
    assert free == split_freely(problem, nodes=1), "same problem, same answer"


def test_without_a_solution_of_the_programme_the_contiguous_split_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Programme, "minimise", lambda *_: Answer((), -inf, 0))
    problem = draw_problem(3)
    contiguous, free = split_contiguously(problem), split_freely(problem)
    assert (free.value, free.device_of) == (contiguous.value, contiguous.device_of)
    assert free.bound <= try_all(problem, contiguous=False)


def test_what_fits_only_in_pieces_is_found_without_contiguity() -> None:
    """Bytes 4 4 2 2 along a chain on two devices of 6: no two stretches fit, but every second node does."""
    chain = ((0, 1), (1, 2), (2, 3))
    problem = PlacementProblem(
        (DeviceKind("accelerator", 2, 6.0),),
        tuple(PlacedNode(str(i), (1.0,), float(m)) for i, m in enumerate((4, 4, 2, 2))),
        chain,
    )
    with pytest.raises(DoesNotFit):
        split_contiguously(problem)
    assert split_freely(problem).value == 2.0


def test_the_start_is_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the search is started with meets all rows: otherwise the solver would drop it without a word."""
    starts = []
    plain = Programme.minimise

    def spied(self: Programme, start: Sequence[float] = (), *rest: object) -> Answer:
        starts.append(bool(start))
        for i, (least, most) in enumerate(zip(self._least, self._most, strict=True)):
            cells = range(self._starts[i], self._starts[i + 1])
            total = sum(self._weights[c] * start[self._columns[c]] for c in cells) if start else least
            assert least - 1e-9 <= total <= most + 1e-9
        return plain(self, start)

    monkeypatch.setattr(Programme, "minimise", spied)
    for seed in range(20):
        problem = draw_problem(seed)
        if try_all(problem) < inf:
            split_freely(problem)
    assert any(starts)
