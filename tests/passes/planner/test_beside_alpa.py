"""Searches beside Alpa's: stages of 200 drawn chains, and layouts of three exported problems."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import combinations, pairwise
from math import inf, prod
from typing import Any

import pytest
from oracles.beside_alpa.problems import DATA, TABLES, DrawnTable, from_data

from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.planner import Planner
from penstock.planning.layouts.search import best_options

# Alpa adds in float32.
SINGLE = 1e-5


@cache
def alpa() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return kept


def planned(table: DrawnTable) -> float:
    wanted = PlanRequest(table.microbatches, ("1f1b",), "none", (1,), replicas=1, tolerance=1e-12)
    outcome = Planner(table.chain(), table.fleet(), wanted).best("1f1b")
    return inf if outcome is None else outcome.step


def every_plan(table: DrawnTable) -> float:
    layers, best = len(table.seconds), inf
    for count in range(1, min(table.devices, layers) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            ranges = list(pairwise((0, *cuts, layers)))
            stages = [sum(table.seconds[a:b]) for a, b in ranges]
            held = [
                sum(table.weights[a:b]) + sum(table.saved[a:b]) * min(table.microbatches, count - number)
                for number, (a, b) in enumerate(ranges)
            ]
            if max(held) <= table.memory:
                best = min(best, sum(stages) + (table.microbatches - 1) * max(stages))
    return best


def test_stages_equal_those_of_alpa_and_of_every_plan() -> None:
    theirs = [inf if seconds is None else seconds for seconds in alpa()["stages"]]
    assert len(theirs) == TABLES
    tables = [DrawnTable.of(seed) for seed in range(TABLES)]
    ours = [planned(table) for table in tables]
    assert ours == pytest.approx(theirs, rel=SINGLE)
    assert ours == pytest.approx(list(map(every_plan, tables)), rel=1e-9)
    assert 10 < sum(seconds == inf for seconds in ours) < TABLES / 2


@pytest.mark.parametrize(
    "change", [{"memory": 10**9}, {"microbatches": 1}, {"devices": 1}], ids=["memory", "microbatches", "devices"]
)
def test_control_other_tables_have_other_optima(change: dict[str, int]) -> None:
    theirs = [inf if seconds is None else seconds for seconds in alpa()["stages"]]
    others = [planned(replace(DrawnTable.of(seed), **change)) for seed in range(TABLES)]
    assert sum(a != pytest.approx(b, rel=SINGLE) for a, b in zip(others, theirs, strict=True)) > TABLES / 5


@pytest.mark.parametrize("name", ["gpt", "cnn", "mlp"])
def test_layouts_take_what_alpas_solver_says(name: str) -> None:
    data = alpa()["layouts"][name]
    costs = from_data(data)
    best = best_options(costs)
    assert best.options is not None
    assert costs.held(best.options) <= costs.room * (1 + 1e-6)
    assert costs.total(best.options) == pytest.approx(data["objective"], rel=1e-5)
    # Far more than eight choices, which enumeration covers.
    assert prod(map(len, costs.seconds)) > 10**6
    # Controls: the first options, and the best of each choice by itself, take longer or do not fit.
    alone = [min(range(len(row)), key=row.__getitem__) for row in costs.seconds]
    for other in ([0] * len(costs.seconds), alone):
        assert costs.total(other) > data["objective"] * 1.01 or costs.held(other) > costs.room


def test_the_limit_of_memory_binds() -> None:
    costs = from_data(alpa()["layouts"]["mlp"])
    free = best_options(replace(costs, room=inf)).options
    assert free is not None
    assert costs.held(free) > costs.room


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("alpa") is None or find_spec("pulp") is None,
    reason="needs alpa 0.2.3 without what it depends on, and pulp",
)
def test_the_data_is_what_alpa_gives() -> None:
    made = subprocess.run(
        [sys.executable, str(DATA.with_name("in_alpa.py")), "--print"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    here, kept = json.loads(made.stdout), alpa()
    assert [inf if x is None else x for x in here["stages"]] == pytest.approx(
        [inf if x is None else x for x in kept["stages"]], rel=SINGLE
    )
    for data in here["layouts"].values():
        costs = from_data(data)
        options = best_options(costs).options
        assert options is not None
        assert data["objective"] == pytest.approx(costs.total(options), rel=1e-5)
