"""The latency of one sample against every placement, searched in full and by integer programming."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from penstock.passes.placement.calls import ends
from penstock.passes.placement.latency import place_for_latency
from penstock.passes.placement.problem import DeviceKind, PlacedNode, PlacementProblem
from penstock.passes.placement.sources import without_sources
from penstock.support.errors import DoesNotFit, UsageError

from .drawn import draw_problem, try_all_latencies

HOST = DeviceKind("CPU", 1, pays_transfers=False)


def inference(seeds: range, most: int) -> list[PlacementProblem]:
    return [
        problem
        for problem in (draw_problem(seed, most) for seed in seeds)
        if not any(node.backward for node in problem.nodes)
    ]


def compare(problems: list[PlacementProblem], **options: int) -> list[str]:
    notes = []
    for problem in problems:
        expected = try_all_latencies(problem)
        try:
            found = place_for_latency(problem, **options)
        except DoesNotFit:
            assert expected == inf
            continue
        times = ends(problem, found.device_of)
        assert times is not None
        assert found.value == max(end for _, end in times) == pytest.approx(expected, abs=1e-9)
        assert expected * (1 - 2e-6) - 1e-9 <= found.bound <= expected + 1e-9
        notes += found.notes
    return notes


def test_searched_in_full() -> None:
    notes = compare(inference(range(40), 6))
    assert len(notes) > 15
    assert all("searched in full" in note for note in notes)


def test_by_integer_programming() -> None:
    notes = compare(inference(range(40), 6), tries=0)
    assert len(notes) > 15
    assert all("integer programme" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("tries", [0, 20_000])
def test_of_larger_problems(tries: int) -> None:
    compare(inference(range(40, 120), 7), tries=tries)


def test_a_call_starts_when_all_it_uses_is_there() -> None:
    """Nodes 0 and 1 on the host side by side; 2 and 3 in one call that waits for both, and pays for both and for what goes out; 4 on the host."""
    times = ((1.0, 2.0), (1.0, 3.0), (4.0, 9.0), (5.0, 9.0), (1.0, 1.0))
    nodes = tuple(PlacedNode(str(i), t, transfer=0.5) for i, t in enumerate(times))
    problem = PlacementProblem((DeviceKind("accelerator", 2), HOST), nodes, ((0, 2), (1, 3), (2, 3), (3, 4)))
    assert ends(problem, (2, 2, 0, 0, 2)) == [(0.0, 2.0), (0.0, 3.0), (3.0, 13.5), (3.0, 13.5), (13.5, 14.5)]


def test_calls_do_not_wait_for_each_other() -> None:
    """0 -> 1 and 2 -> 3, with 0 and 3 in one call and 1 and 2 in another; and a set that is not contiguous."""
    nodes = tuple(PlacedNode(str(i), (0.0, 1.0)) for i in range(4))
    problem = PlacementProblem((DeviceKind("accelerator", 2), HOST), nodes, ((0, 1), (2, 3)))
    assert ends(problem, (0, 1, 1, 0)) is None
    assert ends(problem, (0, 0, 1, 1)) is not None
    assert ends(replace(problem, edges=((0, 1), (1, 2), (2, 3))), (0, 2, 0, 0)) is None


def test_branches_go_to_accelerators_side_by_side() -> None:
    """Two branches of four seconds between a source and a sink: throughput would not care where they are."""
    nodes = tuple(PlacedNode(str(i), (t, 50.0), transfer=0.25) for i, t in enumerate((1.0, 4.0, 4.0, 1.0)))
    problem = PlacementProblem((DeviceKind("accelerator", 4), HOST), nodes, ((0, 1), (0, 2), (1, 3), (2, 3)))
    found = place_for_latency(problem)
    assert found.value == try_all_latencies(problem) == 7.25
    alone = replace(problem, kinds=(DeviceKind("accelerator", 1), HOST))
    assert place_for_latency(alone).value == 10.0


def test_training_has_no_such_latency() -> None:
    nodes = (PlacedNode("0", (1.0,)), PlacedNode("1", (1.0,), backward=True))
    with pytest.raises(UsageError, match="backward"):
        place_for_latency(PlacementProblem((DeviceKind("accelerator", 1),), nodes, ((0, 1),)))


def test_a_search_that_ends_early_says_so() -> None:
    nodes = tuple(PlacedNode(str(i), (1.0 + i % 3, 3.0 + i % 2), 1.0, 0.1 * (i % 4)) for i in range(10))
    edges = tuple((i, j) for i in range(10) for j in (i + 2, i + 3) if j < 10)
    problem = PlacementProblem((DeviceKind("accelerator", 2, 6.0), HOST), nodes, edges)
    found = place_for_latency(problem, tries=10, nodes=1)
    assert found.bound <= place_for_latency(problem, tries=50_000).value <= found.value


def test_large_problems_are_improved_only_and_bounded() -> None:
    nodes = tuple(PlacedNode(str(i), (1.0, 12.0), transfer=0.25) for i in range(120))
    edges = tuple((i, j) for i in range(120) for j in (i + 2, i + 3) if j < 120)
    found = place_for_latency(PlacementProblem((DeviceKind("accelerator", 3), HOST), nodes, edges), tries=100)
    assert "too large" in found.notes[0]
    assert 60.0 <= found.bound <= found.value <= 120.0


def test_sources_go_with_what_uses_them() -> None:
    """A weight of its own colour, a shape used by that weight only, and a weight that is used in two places."""
    rows = [("w", 0.0, 5), ("shape", 0.0, 6), ("a", 1.0, 1), ("b", 1.0, 2), ("shared", 0.0, 7)]
    nodes = tuple(PlacedNode(name, (time, time), 2.0, 0.5, colour) for name, time, colour in rows)
    edges = ((1, 0), (0, 2), (2, 3), (4, 2), (4, 3))
    problem = PlacementProblem((DeviceKind("accelerator", 1, 100.0), HOST), nodes, edges)
    small, home = without_sources(problem)
    assert [node.name for node in small.nodes] == ["a", "b", "shared"]
    assert home == [0, 0, 0, 1, 2]
    assert [node.memory for node in small.nodes] == [6.0, 2.0, 2.0]
    tight = replace(problem, kinds=(DeviceKind("accelerator", 1, 9.0), HOST))
    assert without_sources(tight)[0] == tight
