"""The benchmark of a folder larger than memory, with few layers: it is compiled under a limit below its size, and refused
under one of a fifteenth of that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.oracles.repository import BENCHMARKS

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no memory cgroups can be made here")
def test_a_folder_is_compiled_in_less_memory_than_it_has(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "large_folder.py", "--out", tmp_path, "--layers", "4", "--limit", "1000"]
    ended = subprocess.run([*command, "--json", tmp_path / "r.json"], capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *compiles, control = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert {row["weights"] for row in compiles} == {"f32", "int4"}
    assert all(row["folder"] > row["limit"] and row["kills"] == 0 and len(row["tokens"]) == 3 for row in compiles)
    assert control["exit"]
