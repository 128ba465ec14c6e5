"""The benchmark of a GPT of four times the memory of its device, with few steps: it ends under the limit of the kernel
with the losses of a run without, which the kernel ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.oracles.repository import BENCHMARKS


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no memory cgroups can be made here")
def test_a_gpt_of_four_times_the_memory_trains_and_is_ended_without_the_pass(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "beyond_memory.py", "--out", tmp_path, "--steps", "3", "--rows", "1"]
    ended = subprocess.run([*command, "--json", tmp_path / "r.json"], capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["cap"] * 4 <= row["weights, gradients and state"]
    assert row["same losses"]
    assert row["control ended"]
    assert row["kills"] == 0
    assert len(row["reached in turns"]) == len(row["way seconds"]) == 1
