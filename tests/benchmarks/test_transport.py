"""The benchmark of messages moves what it says it moves, and compares contents itself. Nothing is asserted of measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from .benchmark_report import run_benchmark


@pytest.mark.slow
def test_rows_of_both_parts(tmp_path: Path) -> None:
    report, done = run_benchmark(
        "transport", ["--sizes", "8192", "--schedules", "2bw", "forward", "--rounds", "2"], tmp_path
    )
    lines = report["lines"]
    assert [(x["part"], x.get("schedule"), x["bytes"]) for x in lines] == [
        ("pipeline", "2bw", 8192),
        ("pipeline", "forward", 8192),
        ("stream", None, 8192),
    ]
    assert all(len(times) == 2 and min(times) > 0 for x in lines for times in x["times"].values())
    assert done.stdout.count("\n| ") == 4
