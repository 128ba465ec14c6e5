"""The first run on a machine with a GPU, rehearsed: the payload is packed with the nvcc of straw, and every step runs on a device of straw, in an
environment that holds torch and what torch needs. The controls are a damaged payload, and losses that are not to be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS, bare_python

from . import libraries

STEPS = ("machine", "load", "kernels", "libraries", "training", "two-ranks", "graphs", "kill", "memory", "speed")


def environment(straw: Path, folder: Path) -> dict[str, str]:
    (folder / "shared").mkdir(exist_ok=True)
    own = {"PENSTOCK_CACHE": str(folder / "cache"), "STRAW_SHARED": str(folder / "shared"), "PYTHONSAFEPATH": "1"}
    return {**libraries.environment(straw), **own}


def said(words: list[str | Path], variables: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, words)), env=variables, cwd=folder, capture_output=True, text=True, timeout=1500, check=False
    )


@pytest.mark.slow
def test_every_step_passes_on_a_device_of_straw(straw: Path, tmp_path: Path) -> None:
    variables = environment(straw, tmp_path)
    less = ["--architectures", "sm_90", "--samples", "2", "--rows", "neg", "softmax", "matmul", "gather_grad", "--tiny"]
    packed = said([sys.executable, BENCHMARKS / "gpu_pack.py", tmp_path / "first.tar.gz", *less], variables, tmp_path)
    assert packed.returncode == 0, packed.stdout + packed.stderr
    with tarfile.open(tmp_path / "first.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    payload, results = tmp_path / "gpu-first", tmp_path / "results.txt"
    variables["PYTHON"] = str(bare_python(tmp_path / "bare", ["torch"]))
    missing = said([variables["PYTHON"], "-c", "import numpy, tvm"], variables, tmp_path)
    assert missing.returncode != 0
    done = said(["sh", payload / "gpu_first.sh", results], variables, tmp_path)
    text = results.read_text()
    assert done.returncode == 0, text[-4000:] + done.stderr[-4000:]
    assert done.stdout == text
    assert [line.removeprefix("passed: ") for line in text.splitlines() if line.startswith("passed")] == list(STEPS)
    assert text.count("==") >= len(STEPS)
    check_controls(payload, variables, tmp_path)


def check_controls(payload: Path, variables: dict[str, str], folder: Path) -> None:
    facts = json.loads((payload / "payload.json").read_text())
    name, *_ = facts["losses"]
    facts["losses"][name][-1] *= 1.01
    (payload / "payload.json").write_text(json.dumps(facts))
    parts = os.pathsep.join(
        str(payload / part)
        for part in ("src", "benchmarks", "tests", *(f"packages/{p.name}" for p in (payload / "packages").iterdir()))
    )
    path = {**variables, "PYTHONPATH": os.pathsep.join([parts, variables["PYTHONPATH"]])}
    trained = said([variables["PYTHON"], payload / "benchmarks" / "gpu_first.py", payload, "training"], path, folder)
    assert trained.returncode == 1
    assert "losses differ by more than 0.0001" in trained.stdout
    library = payload / "sm_90" / "rows.so"
    library.write_bytes(library.read_bytes()[:-1])
    done = said(["sh", payload / "gpu_first.sh", folder / "damaged.txt"], variables, folder)
    assert done.returncode == 1
    assert "WRONG: sm_90/rows.so is not the file that was packed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("FAILED: machine ended with 1 after 0 steps")
    assert "== load" not in done.stdout
