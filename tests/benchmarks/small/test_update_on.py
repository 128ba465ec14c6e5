"""The benchmark of updates elsewhere, in small, and what its committed run shows. No time that is measured here is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

from ..benchmark_report import run_benchmark

# The control: what FSDP2 found is a little larger.
WRONG = """
import sys
sys.path.insert(0, {folder!r})
import update_on

if __name__ == "__main__":
    right = update_on.TorchContender.run

    def other(self, count):
        seconds, losses = right(self, count)
        return seconds, [loss * 1.0001 for loss in losses]

    update_on.TorchContender.run = other
    sys.exit(update_on.main())
"""


def test_the_committed_run_reaches_its_goals() -> None:
    report = json.loads((BENCHMARKS / "results" / "update_on.json").read_text())
    rows = {(row["stages"], row["schedule"], row["update"]): row for row in report["rows"]}
    assert all(row["same"] for row in rows.values())
    assert rows[2, "2bw", 3]["over_here"] <= 1.03
    # The update takes 180 ms. All of it shows under 1f1b.
    assert rows[2, "1f1b", 3]["seconds"] - rows[2, "1f1b", 0]["seconds"] >= 0.97 * 0.18
    # The controls: updates that do not fit behind a batch.
    assert min(rows[2, "2bw", 5]["over_here"], rows[3, "2bw", 3]["over_here"]) > 1.03
    assert all(abs(row["seconds"] / row["expected"] - 1) < 0.04 for row in rows.values())
    assert all(one["elsewhere error"] <= 1e-5 < one["control error"] for one in report["losses"])


def test_the_committed_run_beside_fsdp2_takes_at_most_half_of_its_time() -> None:
    ours, theirs = json.loads((BENCHMARKS / "results" / "updates_beside.json").read_text())["rows"]
    assert (ours["contender"], theirs["contender"]) == ("updates elsewhere", "fsdp2, updates on the CPU")
    assert len(ours["turns"]) == len(theirs["turns"]) == 5
    assert all(2 * mine <= other for mine, other in zip(ours["turns"], theirs["turns"], strict=True))
    assert 0 < theirs["error"] <= 1e-5


@pytest.mark.slow
def test_all_rows_are_timed_and_all_losses_compared(tmp_path: Path) -> None:
    words = ["--rounds", "1", "--batches", "4", "--forward", "0.001", "--steps", "3"]
    report, done = run_benchmark("update_on", words, tmp_path)
    assert len(report["rows"]) == 7
    assert all(row["same"] and len(row["turns"]) == 2 for row in report["rows"])
    # In forwards: m(tf+tb), (m+d-1)(tf+tb) + U, and U + (d-1)(tf+tb) where that is longer.
    assert [row["expected"] / 0.001 for row in report["rows"]] == pytest.approx([12, 12, 15, 24, 18, 12, 15])
    assert done.stdout.count("| 2bw |") == 5


@pytest.mark.slow
def test_control_other_losses_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG.format(folder=str(BENCHMARKS)))
    words = ["--only", "losses", "--steps", "2"]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "tiny" in done.stdout
