"""The benchmark on a GPU: tried in small on a processor, it says so where there is no GPU, and makes code for architectures without one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles.repository import BENCHMARKS

SCRIPT = BENCHMARKS / "gpu.py"

# Torch trains with another rate.
BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import gpu

made = gpu.torch_optimizer

def other_rate(spec, model):
    optimizer = made(spec, model)
    optimizer.param_groups[0]["lr"] *= 4
    return optimizer

gpu.torch_optimizer = other_rate
sys.exit(gpu.main())
"""


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_nothing_is_claimed() -> None:
    done = run(SCRIPT)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stdout + done.stderr
    assert "no CUDA device here: nothing was measured" in done.stdout


@pytest.mark.slow
def test_the_contenders_compute_the_same(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--tiny", "--no-torch-compile", "--rounds", "1", "--steps", "1")
    done = run(SCRIPT, *words, "--models", "gpt2-small", "resnet50", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["gpt2-small", "resnet50"]
    assert all(side["error"] < 2e-2 for row in rows for side in row["contenders"].values())
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN.format(folder=str(SCRIPT.parent)))
    done = run(broken, *words, "--models", "bert-base")
    assert done.returncode == 1
    assert "WRONG bert-base: penstock is off by" in done.stdout


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.slow
def test_code_is_made_without_a_gpu(tmp_path: Path) -> None:
    done = run(SCRIPT, "--tiny", "--models", "bert-base", "--compile", "sm_90", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert row["library_calls"] > 10
    assert row["bytes"] > 100_000
