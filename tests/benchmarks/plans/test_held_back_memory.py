"""The benchmark of memory of chosen plans: its cells, and its verdict. Nothing is run."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from oracles.repository import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import held_back
import held_back_memory as benchmark

BESIDE = [10.0, 20.0]


def row(**changes: Any) -> dict[str, Any]:
    listed = {"planned": [90, 80], "replicas": [1, 2], "peaks": [100, 100]}
    return {"cell": "0-mlp", "schedule": "1f1b", "devices": [["d0"], ["d1", "d2"]], **listed, **changes}


def test_ranks_that_sum_up_gradients_take_more_beside_tensors() -> None:
    assert benchmark.ratios(row(), BESIDE) == [1.0, 1.0]
    assert benchmark.ratios(row(replicas=[1, 1]), BESIDE) == pytest.approx([1.0, 0.9])


def test_a_rank_off_its_plan_is_told() -> None:
    assert benchmark.verdict([row()], BESIDE).startswith("2 of 2 ranks of 1 cells within 10%")
    for peak in (85, 120):
        missed = row(peaks=[100, peak])
        assert (benchmark.is_over(missed, BESIDE), benchmark.is_over(row(), BESIDE)) == (True, False)
        assert benchmark.verdict([row(), missed], BESIDE).startswith("3 of 4 ranks of 2 cells")
        assert benchmark.table_of([missed], BESIDE)[1][0][-1] == f"{100 / peak:.3f}"


def test_cells_are_those_of_one_host() -> None:
    alike = [held_back.cell_name(*cell) for cell in held_back.cells() if not cell[0].rate]
    assert [held_back.cell_name(*cell) for cell in benchmark.wanted_cells()] == alike
    assert 0 < len(alike) < len(held_back.cells())
