"""The benchmark of split training compares losses of all contenders. Nothing is asserted of measured times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

from penstock.ir.cluster.cluster import Cluster

from ..benchmark_report import run_benchmark

WORDS = ["--only", "tiny", "--rounds", "2", "--steps", "2"]
# The losses of the split job are a tenth too large.
WRONG = """
import sys
sys.path.insert(0, {folder!r})
import tensor_parallel

if __name__ == "__main__":
    right = tensor_parallel.PenstockContender.run

    def other(self, count):
        seconds, losses = right(self, count)
        return seconds, [loss * 1.1 for loss in losses] if self.ranks > 1 else losses

    tensor_parallel.PenstockContender.run = other
    sys.exit(tensor_parallel.main())
"""


@pytest.mark.slow
def test_every_contender_is_compared_and_timed(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(Cluster.local(2).to_toml())
    report, done = run_benchmark("tensor_parallel", [*WORDS, "--cluster", str(cluster)], tmp_path)
    (row,) = report["rows"]
    assert row["turns"].keys() == {"torch", "penstock", "one", "two"}
    assert all(len(turns) == 2 for turns in row["turns"].values())
    assert row["error"] < 1e-4
    assert done.stdout.count("\n| ") == 2


@pytest.mark.slow
def test_control_other_losses_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG.format(folder=str(BENCHMARKS)))
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(Cluster.local(2).to_toml())
    done = subprocess.run(
        [sys.executable, str(script), *WORDS, "--cluster", str(cluster)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
