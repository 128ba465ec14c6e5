"""The benchmark of small models compares outputs, and has a figure for every contender. Nothing is asserted of measured times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from oracles.repository import BENCHMARKS

from ..benchmark_report import run_benchmark

WORDS = ["--only", "mlp", "--rounds", "2", "--calls", "3"]
# The bundle that is loaded gives other numbers.
WRONG = """
import sys
sys.path.insert(0, {folder!r})
import one_process

load = one_process.ps.load

def other(bundle):
    model = load(bundle)
    return lambda inputs: {{name: array + 1 for name, array in model(inputs).items()}}

one_process.ps.load = other
sys.exit(one_process.main())
"""


def test_every_contender_is_compared_and_timed(tmp_path: Path) -> None:
    report, done = run_benchmark("one_process", WORDS, tmp_path)
    (row,) = report["rows"]
    names = {"load", "job", "workers", "onnxruntime"}
    assert row["seconds"].keys() == row["errors"].keys() == row["ratios"].keys() == names
    assert all(len(turns) == 2 for turns in row["seconds"].values())
    assert row["errors"]["onnxruntime"] == 0
    assert row["ratios"]["onnxruntime"] == 1
    assert done.stdout.count("\n| ") == 3


def test_control_other_numbers_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG.format(folder=str(BENCHMARKS)))
    done = subprocess.run(
        [sys.executable, str(script), *WORDS], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "| mlp |" in done.stdout
