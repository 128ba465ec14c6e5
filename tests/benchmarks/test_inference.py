"""The benchmark of inference has its rows and bounds. Nothing is asserted of measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from .benchmark_report import run_benchmark


@pytest.mark.slow
def test_paced_rows_have_their_bounds(tmp_path: Path) -> None:
    words = ["--only", "paced", "--rounds", "2", "--microbatches", "8", "--forward", "0.002"]
    report, done = run_benchmark("inference", words, tmp_path)
    lines = report["lines"]
    assert [x["bound"] / 0.002 for x in lines] == pytest.approx([8, 8, 2 * 4])
    # No forward is quicker than its pace, so nothing beats its bound.
    assert all(min(x["times"]) >= x["bound"] for x in lines)
    assert all(len(x["times"]) == 2 for x in lines)
    assert done.stdout.count("\n| ") == 4
