"""The benchmark of budgets, with a small model: each plan finishes under its limit of the kernel, and the table says
where goals are missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.oracles.repository import BENCHMARKS

sys.path.append(str(BENCHMARKS))
import budgets

ROW = {
    "budget": 1 << 20, "does": "recomputing", "price": 0.1, "resident": 1 << 20, "predicted": 1.1, "step": 1.0,
    "predicted / step": 1.1, "everything again": 1.2, "everything again fits": True, "step / everything again": 0.9,
    "finished": True, "kills": 0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no memory cgroups can be made here")
def test_plans_finish_under_their_limits(tmp_path: Path) -> None:
    sizes = ["--width", "64", "--vocab", "64", "--budgets", "3", "--turns", "1"]
    command = [sys.executable, BENCHMARKS / "budgets.py", "--out", tmp_path, *sizes, "--json", tmp_path / "r.json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["finished"] for row in rows] == [True] * 3
    assert all(row["planned"] <= row["budget"] for row in rows)
    assert rows[-1]["does"] == "keeping everything" != rows[0]["does"]
    assert min(min(row["step"], row["predicted / step"], row["step / everything again"]) for row in rows) > 0


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        ({}, 3),
        ({"predicted / step": 1.2}, 2),
        ({"step / everything again": 1.01}, 2),
        ({"finished": False}, 2),
        ({"kills": 1}, 2),
    ],
    ids=lambda change: "-".join(change) if isinstance(change, dict) else "",
)
def test_a_goal_that_is_missed_is_told(change: dict[str, object], reached: int) -> None:
    _, rows = budgets.table_of_verdict([ROW | change])
    assert sum(row[1] == "1 of 1" for row in rows) == reached
