"""Contiguous splits against every assignment, and against the published optima."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from oracles.repository import ROOT

from penstock.passes.placement import sweep
from penstock.passes.placement.contiguous import split_contiguously
from penstock.passes.placement.ideals import bits, enumerate_ideals, prefixes
from penstock.passes.placement.problem import DeviceKind, PlacedNode, Placement, PlacementProblem, fits, loads
from penstock.passes.placement.units import absorb, units_of
from penstock.passes.placement.workload import load_workload, read_workload
from penstock.support.errors import DoesNotFit

from .drawn import as_file, draw_problem, try_all

SAMPLES = Path(os.environ.get("PENSTOCK_PLACEMENT_SAMPLES") or ROOT.parent / "shared" / "data" / "placement")
KNOWN = {"bert24_inference": 17.78990625, "bert24_training": 41.7458125, "bert_l-3_inference": 27.9185676799}


def best(problem: PlacementProblem, **options: int) -> float:
    try:
        return checked(split_contiguously(problem, **options)).value
    except DoesNotFit:
        return inf


def checked(found: Placement) -> Placement:
    """The value is that of the assignment, and the assignment is allowed."""
    rows = loads(found.problem, found.device_of)
    assert fits(found.problem, rows)
    assert found.value == max(row.total for row in rows)
    colours = {(n.colour, d) for n, d in zip(found.problem.nodes, found.device_of, strict=True) if n.colour is not None}
    assert len(colours) == len({colour for colour, _ in colours})
    return found


def disagreements(seeds: range) -> list[tuple[int, float, float]]:
    compared = [(seed, best(problem := draw_problem(seed)), try_all(problem)) for seed in seeds]
    return [row for row in compared if row[1] != row[2] and abs(row[1] - row[2]) > 1e-9]


def path(count: int, accelerators: int = 2, **options: float) -> PlacementProblem:
    nodes = tuple(PlacedNode(str(i), (1.0, 10.0), memory=1.0, transfer=0.25) for i in range(count))
    kinds = (DeviceKind("accelerator", accelerators, **options), DeviceKind("CPU", 0, pays_transfers=False))
    return PlacementProblem(kinds, nodes, tuple((i, i + 1) for i in range(count - 1)))


@pytest.mark.parametrize("name", KNOWN)
def test_optima_are_the_published_ones(name: str) -> None:
    file = SAMPLES / f"{name}.json"
    if not file.exists():
        pytest.skip("PENSTOCK_PLACEMENT_SAMPLES names no folder with the public samples")
    found = checked(split_contiguously(load_workload(file).problem))
    assert found.value == pytest.approx(KNOWN[name], abs=1e-9)
    assert found.gap == 0


def test_optima_are_those_of_all_assignments() -> None:
    seeds = range(60)
    assert not disagreements(seeds)
    drawn = [draw_problem(seed) for seed in seeds]
    assert sum(any(node.backward for node in problem.nodes) for problem in drawn) >= 20
    assert sum(try_all(problem) < inf for problem in drawn[:20]) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(60, 560, 50))
def test_optima_are_those_of_all_assignments_of_many(first: int) -> None:
    assert not disagreements(range(first, first + 50))


def test_a_sweep_that_forgets_transfers_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what crosses both borders of a device counted wrong, and too much pruned."""
    with monkeypatch.context() as patch:
        patch.setattr(sweep.Tables, "_remainders", lambda self, i: ({}, {}))
        with pytest.raises(AssertionError, match="the search said"):
            disagreements(range(60))
    late = lambda floor, left, upper: np.full(len(left), len(floor) - 1)  # noqa: E731
    monkeypatch.setattr(sweep, "_begins", late)
    assert disagreements(range(60))


def test_without_contiguity_some_optima_are_smaller() -> None:
    """The control of the rule: otherwise the two would be the same in all draws."""
    both = [(try_all(problem), try_all(problem, contiguous=False)) for problem in map(draw_problem, range(40))]
    assert all(free <= strict for strict, free in both)
    assert any(free < strict - 1e-9 for strict, free in both)


def test_a_transfer_is_paid_once_on_each_side() -> None:
    """Two stages of a path of four: two nodes and one transfer each. Node 1 has a second user, that costs nothing more."""
    problem = replace(path(4), edges=((0, 1), (1, 2), (1, 3), (2, 3)))
    found = checked(split_contiguously(problem))
    assert found.value == 2.25
    assert [row.transfer for row in loads(problem, found.device_of)] == [0.25, 0.25]


def test_devices_may_stay_empty() -> None:
    dear = replace(path(4), nodes=tuple(replace(node, transfer=10.0) for node in path(4).nodes))
    assert checked(split_contiguously(dear)).value == 4.0


def test_memory_decides_where_nothing_fits() -> None:
    assert split_contiguously(path(6, memory=3.0)).value == 3.25
    with pytest.raises(DoesNotFit, match="all nodes take 6 B, all devices have 4 B"):
        split_contiguously(path(6, memory=2.0))
    together = replace(path(6, memory=3.5), nodes=tuple(replace(n, colour=i % 2) for i, n in enumerate(path(6).nodes)))
    with pytest.raises(DoesNotFit, match=r"0, 1, 2, 3, 4, \.\.\.: 6 B that must be on one device"):
        split_contiguously(together)
    lumps = PlacementProblem(
        (DeviceKind("accelerator", 2, 5.0),), tuple(PlacedNode(str(i), (1.0,), memory=3.0) for i in range(3)), ()
    )
    with pytest.raises(DoesNotFit, match="no contiguous split fits"):
        split_contiguously(lumps)
    lost = replace(
        path(3),
        nodes=tuple(replace(n, times=tuple(inf for _ in n.times)) if n.name == "1" else n for n in path(3).nodes),
    )
    with pytest.raises(DoesNotFit, match=r"fits:\n  - node 1 is supported by no device\n"):
        split_contiguously(lost)


def test_backward_nodes_go_with_their_forward_nodes() -> None:
    """A chain and its mirror image: the optimum is that of the chain with twice the work. The backward of node 0 is orphaned, and goes first."""
    count = 6
    forward = [PlacedNode(f"f{i}", (1.0,), colour=i) for i in range(count)]
    backward = [PlacedNode(f"b{i}", (1.0,), colour=i if i else None, backward=True) for i in range(count)]
    edges = [(i, i + 1) for i in range(count - 1)] + [(count + i + 1, count + i) for i in range(count - 1)]
    problem = PlacementProblem((DeviceKind("accelerator", 3),), (*forward, *backward), tuple(edges))
    found = checked(split_contiguously(problem))
    assert found.value == 4.0
    assert found.device_of[count] == 0


def test_ideals_are_as_many_as_antichains() -> None:
    for seed in range(30):
        units = units_of(draw_problem(seed))
        before, after = units.neighbours()
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(units)))
        graph.add_edges_from(units.order)
        antichains = {frozenset(chain) for chain in nx.antichains(graph)}
        found = enumerate_ideals(before, after, 10**6)
        assert found is not None
        assert {frozenset(bits(tops)) for tops in found.tops} == antichains
        assert len(set(found.sets)) == len(found) == len(antichains)
        assert enumerate_ideals(before, after, len(found) - 1) is None
        rows = found.rows()
        assert [[u for u in range(len(units)) if rows[u, i]] for i in range(len(found))] == [
            list(bits(s)) for s in found.sets
        ]


def test_prefixes_hold_each_other() -> None:
    units = units_of(path(5))
    found = prefixes(range(len(units)))
    assert found.sets == (0, 1, 3, 7, 15, 31)
    assert found.tops == (0, 1, 2, 4, 8, 16)


def test_sources_that_cost_nothing_are_absorbed_where_memory_is_no_matter() -> None:
    """Ten weights in front of one node each: 2^10 times as many ideals without that."""
    chain = path(10)
    nodes = (*chain.nodes, *(PlacedNode(f"w{i}", (0.0, 0.0), memory=5.0, transfer=0.5) for i in range(10)))
    problem = PlacementProblem(
        (DeviceKind("accelerator", 2, 100.0), chain.kinds[1]),
        nodes,
        chain.edges + tuple((10 + i, i) for i in range(10)),
    )
    units = units_of(problem)
    assert len(absorb(units)) == 10
    tight = units_of(replace(problem, kinds=(DeviceKind("accelerator", 2, 59.0), chain.kinds[1])))
    assert absorb(tight) is tight
    assert best(problem) == 5.25


def test_clusters_are_bounded_and_said() -> None:
    loose = 0
    for seed in range(60):
        problem = draw_problem(seed)
        optimum = try_all(problem)
        try:
            found = checked(split_contiguously(problem, limit=6))
        except DoesNotFit:
            continue
        assert found.bound <= optimum + 1e-9 <= found.value + 2e-9
        clustered = any("clusters of nodes" in note for note in found.notes)
        assert clustered or found.value == pytest.approx(optimum, abs=1e-9)
        loose += clustered and found.value > optimum + 1e-9
    assert loose, "the control: some clusters lose something"


def test_the_same_problem_gives_the_same_split() -> None:
    for seed in range(10):
        problem = draw_problem(seed)
        if best(problem) < inf:
            assert split_contiguously(problem) == split_contiguously(problem)


def test_files_give_the_same_problem() -> None:
    for seed in range(60):
        problem = draw_problem(seed)
        if len(problem.kinds) == 2:
            read = read_workload(as_file(problem))
            assert best(read.problem) == pytest.approx(best(problem), abs=1e-9)
            assert [node.name for node in read.problem.nodes] == [str(number) for number in read.ids]
