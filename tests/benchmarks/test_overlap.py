"""The benchmarks of hidden messages and of traces measure what they say they measure. Nothing is asserted of measured times."""

from __future__ import annotations

from pathlib import Path

import pytest

from .benchmark_report import run_benchmark


@pytest.mark.slow
def test_a_row_of_hidden_messages(tmp_path: Path) -> None:
    report, done = run_benchmark("overlap", ["--only", "loopback", "--rounds", "1", "--batches", "1"], tmp_path)
    (line,) = report["lines"]
    assert (line["row"], line["rate"], line["bytes"]) == ("loopback", None, 16 << 20)
    seconds = line["seconds"]
    assert seconds.keys() == line["times"].keys() == {"compute", "messages", "gloo", "over gloo", "shared"}
    assert min(seconds.values()) > 0
    assert all(len(times) == 1 for times in line["times"].values())
    for name, share in line["hidden"].items():
        assert share == pytest.approx(1 - (seconds[name] - seconds["compute"]) / seconds["messages"])
    assert line["not_waited_for"].keys() == {"over gloo", "shared"}
    assert max(line["not_waited_for"].values()) < 1
    assert done.stdout.count("\n| ") == 2


@pytest.mark.slow
def test_rows_of_traces(tmp_path: Path) -> None:
    report, done = run_benchmark("tracing", ["--rounds", "2"], tmp_path)
    lines = report["lines"]
    assert [line["schedule"] for line in lines] == ["1f1b", "2bw"]
    for line in lines:
        assert all(len(times) == 2 and min(times) > 0 for times in line["times"].values())
        # F, SF, RB, B and D of each microbatch, and an update per batch of eight.
        assert line["actions"] == 5 + 1 / 8
        assert line["entries"] > line["actions"]
    assert done.stdout.count("\n| ") == 3
