"""The benchmarks of variables that replicas share out, in small: each has a control, and ends with 0 where both are as it
says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracles.repository import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

from namespaces import available

spaces = pytest.mark.skipif(bool(available()), reason=f"no network namespaces: {available()}")
groups = pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no memory cgroups can be made here"
)


def _run(program: str, folder: Path, *words: str) -> list[dict[str, Any]]:
    report = folder / "report.json"
    command = [sys.executable, str(BENCHMARKS / program), *words, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert report.exists(), done.stderr
    rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    return rows


@pytest.mark.slow
@spaces
def test_gradients_are_half_of_the_bytes_of_fsdp2(tmp_path: Path) -> None:
    rows = {row["contender"]: row for row in _run("gradient_bytes.py", tmp_path)}
    assert rows["level 2"]["of_fsdp2"] <= 0.55
    # The control adds up whole gradients on all ranks, by a ring: 2P(N-1)/N of each of N ranks.
    for who in ("level 0", "fsdp2"):
        assert rows[who]["bytes"] == pytest.approx(2 * rows[who]["parameters"], rel=0.02)


@pytest.mark.slow
@groups
def test_a_model_of_twice_the_memory_trains_in_parts_and_is_ended_whole(tmp_path: Path) -> None:
    (row,) = _run("beyond_memory_parts.py", tmp_path, "--steps", "2")
    assert row["weights, gradients and state"] >= 2 * (row["limit"] - row["base"])
    assert row["same losses"]
    assert row["kills"] == 0
    assert row["control ended"]


@pytest.mark.slow
@spaces
def test_ranks_wait_for_sums_where_the_update_follows_at_once(tmp_path: Path) -> None:
    """Times are judged by the benchmark alone. Both schedules send as much."""
    rows = {row["schedule"]: row for row in _run("sums_behind.py", tmp_path, "--steps", "3")}
    assert rows["2bw"]["sums_s"] < rows["1f1b"]["sums_s"]
