"""Random training programs with random layouts: no check refuses them, and the devices together compute what one
does. Programs on which that is false are in tests/ir/verify/test_layouts.py."""

from __future__ import annotations

import pytest
from oracles.sharding.drawn_programs import drawn_program
from oracles.sharding.team_runs import differences

from penstock.ir.verify.verifier import check

QUICK, ALL = 30, 510


def compare(number: int) -> None:
    case = drawn_program(number)
    check(case.sharded, ("typed", "sharded"))
    local = case.local
    check(local, ("typed", "local"))
    assert differences(case, local) == [], f"program {number} on {case.mesh.axes} with {case.given}"


@pytest.mark.parametrize("number", range(QUICK))
def test_a_drawn_program_computes_what_one_device_does(number: int) -> None:
    compare(number)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, ALL, 30))
def test_more_drawn_programs_compute_what_one_device_does(first: int) -> None:
    for number in range(first, first + 30):
        compare(number)


def test_drawn_programs_split_tensors() -> None:
    """Most of them have layouts, and the local form moves data."""
    cases = [drawn_program(number) for number in range(10)]
    kinds = {op.kind for case in cases for graph in case.local.graphs.values() for op in graph.ops}
    assert {"all_reduce", "all_gather"} <= kinds
    assert sum(bool(case.given) for case in cases) >= 8
