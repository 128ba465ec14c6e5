"""Committed runs of packs and of memory beyond the device, against their goals. No time is measured here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.oracles.repository import BENCHMARKS


def committed(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    return document


@pytest.mark.parametrize("name", ["packs_timed", "fates_timed"])
def test_timed_schedules_take_three_percent_more_than_their_formulas_at_most(name: str) -> None:
    rows = committed(name)["rows"]
    assert all(1 <= row["seconds"] / row["formula"] <= 1.03 for row in rows)
    assert all(row["live"] == row["versions"] for row in rows)


def test_packs_are_timed_with_two_and_four_stages_on_two_and_four_devices() -> None:
    """With four and eight microbatches. The control: short computations, in some of which the runtime's share shows."""
    shapes = {(r["stages"], r["microbatches"], r["schedule"]) for r in committed("packs_timed")["rows"]}
    assert {(d, m, f"interleaved /{v}") for d in (2, 4) for m in (4, 8) for v in (2, 4)} <= shapes
    assert {(2, 4, "interleaved-2bw /2"), (4, 8, "interleaved-2bw /2")} <= shapes
    assert any(row["seconds"] > 1.03 * row["formula"] for row in committed("packs_timed_short")["rows"])


def test_a_model_of_four_times_the_memory_trains_as_fast_as_the_way_allows() -> None:
    rows = committed("beyond_memory")["rows"]
    assert [row["devices"] for row in rows] == [1, 2]
    for row in rows:
        assert row["weights, gradients and state"] >= 4 * row["cap"] * 0.999
        assert all(peak <= row["cap"] / row["devices"] for peak in row["planned"])
        assert row["steps"] == 50
        assert row["reached"] >= 0.8
        assert row["same losses"]
        assert (row["kills"], row["control ended"]) == (0, True)


def test_plans_for_budgets_finish_as_predicted() -> None:
    """Within 15 %, and no slower than everything again where that fits."""
    rows = committed("budgets")["rows"]
    assert len(rows) == 20
    assert all(row["finished"] and not row["kills"] for row in rows)
    assert all(abs(row["predicted / step"] - 1) <= 0.15 for row in rows)
    fitting = [row for row in rows if row["everything again fits"]]
    assert fitting
    assert all(row["step / everything again"] <= 1 for row in fitting)


def test_plans_for_budgets_finish_on_a_machine_of_another_kind() -> None:
    """Where the machine changed its speed, and copies took the rank longer than predicted: the control of the above."""
    rows = committed("budgets_xeon")["rows"]
    assert len(rows) == 20
    assert all(row["finished"] and not row["kills"] for row in rows)
    assert all(row["step / everything again"] <= 1 for row in rows if row["everything again fits"])
    far = [row for row in rows if abs(row["predicted / step"] - 1) > 0.15]
    assert len(far) == 9
    assert sum("moving" in row["does"] for row in far) == 7


def test_packs_are_faster_than_those_of_torch() -> None:
    for row in committed("interleaved")["schedules"].values():
        assert row["times_as_fast"] >= 1.4
        assert row["losses"]["penstock"] == pytest.approx(row["losses"]["torch"], rel=1e-6)


def test_state_elsewhere_takes_half_of_the_time_of_fsdp_offloading_at_most() -> None:
    rows = {row["contender"]: row for row in committed("zero")["rows"]}
    ours, theirs = rows["level 3, state elsewhere"], rows["fsdp2, offloaded"]
    assert ours["ms"] <= 0.5 * theirs["ms"]
    assert max(ours["error"], theirs["error"]) <= 1e-5
