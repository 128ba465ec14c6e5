"""The benchmark of inference has its rows and bounds. Nothing is asserted of measured times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "inference.py"


@pytest.mark.slow
def test_paced_rows_have_their_bounds(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--only", "paced", "--rounds", "2", "--microbatches", "8", "--forward", "0.002", "--json", str(report)]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = json.loads(report.read_text())["lines"]
    assert [x["bound"] / 0.002 for x in lines] == pytest.approx([8, 8, 2 * 4])
    # No forward is quicker than its pace, so nothing beats its bound.
    assert all(min(x["times"]) >= x["bound"] for x in lines)
    assert all(len(x["times"]) == 2 for x in lines)
    assert done.stdout.count("\n| ") == 4
