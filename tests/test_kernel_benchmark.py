"""The benchmark of single kernels runs, checks what it measures, and reports rows that are wrong or do not compile instead of skipping them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SMALL = "gemm NN 97x131x53|bias column sums 512x768"

# Rows that must fail: one computes something else than torch, one no compiler can make, and one that is right, as the control.
BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import kernels
kernels._settle(None)
import torch
import kernel_rows
from kernel_rows import Row, pure

def work(kind):
    x = torch.ones(4, 32)
    return pure({{"x": x}}, lambda g, v: [g.emit(kind, v["x"])], {{"neg": lambda x: [-x]}}, lambda x: [-x], flops=1.0)

kernel_rows.ROWS[:] = [Row(f"row {{kind}}", "rows", lambda kind=kind: work(kind)) for kind in ("neg", "abs", "nonsense")]
sys.exit(kernels.main(sys.argv[1:]))
"""


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, check=False)


def names() -> list[str]:
    done = run(FOLDER / "kernels.py", "--list")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_rows_are_those_promised() -> None:
    found = names()
    assert len(found) == len(set(found)) >= 40
    for wanted in ("NN", "NT", "TN", "48x ", "97x131x53", "gemm NN 4x", "128x50257x768"):
        assert any(name.startswith("gemm") and wanted in name for name in found), wanted
    for positions in (128, 512, 2048):
        assert {f"attention forward {positions}", f"attention backward {positions}"} <= set(found)
    convolutions = {name.split(" ", 2)[2] for name in found if name.startswith(("conv forward", "conv dgrad", "conv wgrad"))}
    assert all(f"conv {which} {shape}" in found for which in ("forward", "dgrad", "wgrad") for shape in convolutions)
    assert len(convolutions) == 14
    for family in ("layer_norm", "softmax", "gelu", "cross_entropy", "embedding", "bias", "adamw"):
        assert any(name.startswith(family) for name in found), family


def test_small_rows_are_right_and_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    core = min(os.sched_getaffinity(0))
    done = run(FOLDER / "kernels.py", "--only", SMALL, "--repeats", "3", "--core", str(core), "--json", report)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"core {core}" in done.stdout
    assert "0 of 2 rows FAILED" in done.stdout
    document = json.loads(report.read_text())
    assert len(document["rows"]) == 2
    for row in document["rows"]:
        assert not row["failure"]
        assert 0 < row["ours"]["error"] < 1e-5
        assert 0 < row["theirs"]["error"] < 1e-5
        assert len(row["ours"]["cpu_s"]) == len(row["theirs"]["wall_s"]) >= 3
    assert document["peaks"]["flops"] > 1e9


@pytest.mark.slow
def test_rows_that_are_wrong_or_do_not_compile_fail(tmp_path: Path) -> None:
    report, script = tmp_path / "report.json", tmp_path / "broken.py"
    script.write_text(BROKEN.format(folder=str(FOLDER)))
    done = run(script, "--only", "^row", "--repeats", "1", "--json", report)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(report.read_text())["rows"]}
    assert not rows["row neg"]["failure"]
    assert "our error 2.0e+00" in rows["row abs"]["failure"]
    assert "nonsense" in rows["row nonsense"]["failure"]
    assert "2 of 3 rows FAILED" in done.stdout
    assert " 1 rows, geometric mean" in done.stdout


def test_no_row_matches() -> None:
    done = run(FOLDER / "kernels.py", "--only", "no such row")
    assert done.returncode == 2
    assert "no row matches" in done.stderr


@pytest.mark.slow
def test_every_row_is_right(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = [sys.executable, FOLDER / "kernels.py", "--repeats", "1", "--json", report]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(report.read_text())["rows"]) == len(names())
