"""The benchmark runs, and its contenders do the same work: they start from equal weights, so equal recurrences give equal losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "train_gpt.py"
SMALL = "--layers 2 --width 64 --heads 2 --vocab 256 --positions 32 --steps 3 --rounds 2 --torch-form accumulated-passive"


@pytest.mark.slow
def test_all_contenders_train_the_same_model(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the benchmark needs two cores")
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL.split(), "--json", str(report)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "vs torch-1f1b" in done.stdout
    rows = json.loads(report.read_text())["contenders"]
    losses = {name: row["losses"] for name, row in rows.items()}
    assert {len(found) for found in losses.values()} == {7}
    for name in ("penstock-1f1b", "torch-1f1b"):
        assert losses[name] == pytest.approx(losses["torch-single"], rel=1e-5)
    # The control: gradients one update late are another recurrence, and the comparison sees it. Batch 0 is of equal weights still.
    assert losses["penstock-2bw"][0] == pytest.approx(losses["torch-single"][0], rel=1e-5)
    assert losses["penstock-2bw"][1:] != pytest.approx(losses["torch-single"][1:], rel=1e-5)
    for row in rows.values():
        assert all(peak > 10**7 for peak in row["peak_bytes"].values())
