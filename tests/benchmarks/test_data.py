"""The benchmark of reading ahead has its rows, and bounds that nothing beats. Nothing is asserted of measured times beside what a sleep guarantees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

SCRIPT = BENCHMARKS / "data.py"


@pytest.mark.slow
def test_rows_have_their_times(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--only", "npz", "slow-2", "--rounds", "2", "--steps", "3", "--json", str(report)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    plain, slow = json.loads(report.read_text())["lines"]
    assert (plain["row"], plain["wait_s"], slow["row"]) == ("npz", 0, "slow-2")
    assert {way: len(times) for way, times in slow["times"].items()} == {"read": 2, "without": 2, "with": 2}
    # Four microbatches a step, each of which waits; reading ahead begins a run with nothing read.
    assert slow["wait_s"] > 0
    assert all(seconds >= 4 * slow["wait_s"] for times in slow["times"].values() for seconds in times)
    assert slow["bound"] == max(slow["rest"], slow["read"])
    assert done.stdout.count("\n| ") == 3
