"""The benchmark of single kernels runs, checks what it measures, and reports rows that are wrong or do not compile instead of skipping them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

SMALL = "gemm NN 97x131x53|bias column sums 512x768"

# The program, run with several lists of arguments in one process, which loads torch and TVM once. The machine's peaks are measured briefly.
SEVERAL = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, {folder!r})
found = []
for words in json.loads(sys.argv[1]):
    sys.argv[:] = ["kernels.py", *words]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path({folder!r} + "/kernels.py", run_name="__main__")
        except SystemExit as end:
            code = end.code
    found.append([code, out.getvalue(), err.getvalue()])
    # Loaded by now, with as many threads as the program allows.
    import peak
    peak.TRIES, peak.COPIED = 2, 1 << 22
print(json.dumps(found))
"""

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


@dataclass
class Ended:
    """How one run of the program ended, what it printed, and the report it was to write."""

    code: int
    out: str
    err: str
    report: Path


CORE = min(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The list of rows, no row that matches, and two small rows."""
    report = tmp_path_factory.mktemp("kernels") / "report.json"
    several = {
        "list": ["--list"],
        "none": ["--only", "no such row"],
        "small": ["--only", SMALL, "--repeats", "3", "--core", str(CORE), "--json", str(report)],
    }
    done = run("-c", SEVERAL.format(folder=str(BENCHMARKS)), json.dumps([*several.values()]))
    assert done.returncode == 0, done.stderr
    return {name: Ended(*found, report) for name, found in zip(several, json.loads(done.stdout), strict=True)}


def test_the_rows_are_those_promised(ended: dict[str, Ended]) -> None:
    assert ended["list"].code == 0, ended["list"].err
    found = ended["list"].out.splitlines()
    assert len(found) == len(set(found)) >= 40
    for wanted in ("NN", "NT", "TN", "48x ", "97x131x53", "gemm NN 4x", "128x50257x768"):
        assert any(name.startswith("gemm") and wanted in name for name in found), wanted
    for positions in (128, 512, 2048):
        assert {f"attention forward {positions}", f"attention backward {positions}"} <= set(found)
    convolutions = {
        name.split(" ", 2)[2] for name in found if name.startswith(("conv forward", "conv dgrad", "conv wgrad"))
    }
    assert all(f"conv {which} {shape}" in found for which in ("forward", "dgrad", "wgrad") for shape in convolutions)
    assert len(convolutions) == 14
    for family in ("layer_norm", "softmax", "gelu", "cross_entropy", "embedding", "bias", "adamw"):
        assert any(name.startswith(family) for name in found), family


def test_small_rows_are_right_and_measured(ended: dict[str, Ended]) -> None:
    done = ended["small"]
    assert done.code == 0, done.out + done.err
    assert f"core {CORE}" in done.out
    assert "0 of 2 rows FAILED" in done.out
    document = json.loads(done.report.read_text())
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
    script.write_text(BROKEN.format(folder=str(BENCHMARKS)))
    done = run(script, "--only", "^row", "--repeats", "1", "--json", report)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(report.read_text())["rows"]}
    assert not rows["row neg"]["failure"]
    assert "our error 2.0e+00" in rows["row abs"]["failure"]
    assert "nonsense" in rows["row nonsense"]["failure"]
    assert "2 of 3 rows FAILED" in done.stdout
    assert " 1 rows, geometric mean" in done.stdout


def test_no_row_matches(ended: dict[str, Ended]) -> None:
    assert ended["none"].code == 2
    assert "no row matches" in ended["none"].err


@pytest.mark.slow
def test_every_row_is_right(ended: dict[str, Ended], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = [sys.executable, BENCHMARKS / "kernels.py", "--repeats", "1", "--json", report]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(report.read_text())["rows"]) == len(ended["list"].out.splitlines())
