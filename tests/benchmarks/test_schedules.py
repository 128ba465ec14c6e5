"""The benchmark of schedules counts versions in the stores and compares with the right formulas. Nothing is asserted of measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from .benchmark_report import run_benchmark


@pytest.mark.slow
def test_rows_have_their_formulas_and_versions(tmp_path: Path) -> None:
    words = ["--only", "2x2", "--forward", "0.002", "--rounds", "2", "--batches", "3"]
    report, done = run_benchmark("schedules", words, tmp_path)
    lines = report["lines"]
    assert [(x["schedule"], x["live"]) for x in lines] == [("1f1b", 1), ("zb-1f1b", 1), ("2bw", 2)]
    # In forwards: (m+d-1)(tf+tb), m(tf+tb) + (d-1)(tf+tb-2tw), m(tf+tb).
    assert [x["formula"] / 0.002 for x in lines] == pytest.approx([9, 7, 6])
    assert all(len(x["times"]) == 4 for x in lines)
    assert done.stdout.count("\n| ") == 4
    assert "2x2: round 2 of 2" in done.stderr
