"""The benchmark of memory that saved values are written to: its estimates, and what its committed run shows. No time that
is measured here is judged."""

from __future__ import annotations

import json
import sys

import pytest
from tests.oracles.repository import BENCHMARKS

sys.path.append(str(BENCHMARKS))
import saved_memory


def test_the_committed_run_has_predictions_within_five_percent() -> None:
    """The control: without the price one of them is not."""
    rows = json.loads((BENCHMARKS / "results" / "saved_memory.json").read_text())["rows"]
    assert [row["forward"] for row in rows] == ["all is kept", "all is made again", "made again"]
    assert saved_memory.is_closer(rows)
    assert all(abs(row["predicted"] / row["measured"] - 1) < 0.05 for row in rows)
    assert not all(abs(row["no price"] / row["measured"] - 1) < 0.05 for row in rows)


def test_estimates_are_corrected_by_the_plan_that_keeps_everything() -> None:
    """A price that is right comes closer; the control is one where nothing costs more."""
    times = {"kept": {"F": 10.0}, "all": {"F": 9.0, "R": 10.0}}
    estimates = {("kept", "F"): (5.0, 0.5), ("all", "F"): (4.5, 0.0), ("all", "R"): (5.0, 0.5)}
    rows = saved_memory.rows_of(times, estimates)
    assert [row["predicted"] for row in rows] == pytest.approx([10, 9, 10])
    assert [row["no price"] for row in rows] == pytest.approx([10, 10, 10])
    assert saved_memory.is_closer(rows)
    assert not saved_memory.is_closer(saved_memory.rows_of({**times, "all": {"F": 10.0, "R": 10.0}}, estimates))
