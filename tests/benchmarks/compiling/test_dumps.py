"""The benchmarks of dumps and of large modules measure what they say, when run small."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..benchmark_report import run_benchmark

SMALL = "--layers 2 --width 32 --heads 2 --vocab 64 --positions 16 --rounds 1 --cold-rounds 1 --most 1000"


@pytest.mark.slow
def test_dumps_are_made_in_every_state(tmp_path: Path) -> None:
    report, _ = run_benchmark("dumps", SMALL.split(), tmp_path)
    assert {state: [len(times) for times in ways.values()] for state, ways in report["states"].items()} == {
        "cold": [1, 1],
        "warm": [1, 1],
        "first": [1, 1],
    }
    assert report["files"] > 40
    # The control: a cold compile makes what a warm one finds.
    assert report["states"]["cold"]["on"][0][1] > report["states"]["warm"]["on"][0][1]


def test_a_large_module_is_counted(tmp_path: Path) -> None:
    report, done = run_benchmark("large_module", ["--layers", "2", "--rounds", "1"], tmp_path)
    assert report["operations"] > 300
    assert set(report["seconds"]) == {"parse", "error", "print", "verify", "diff same", "diff cut", "diff kernels"}
    assert f"{report['operations']} operations" in done.stdout
