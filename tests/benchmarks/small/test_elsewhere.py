"""The benchmark of state that is elsewhere, in small: the same losses, less memory planned, and a floor that is told."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.oracles.repository import BENCHMARKS


def test_state_elsewhere_is_measured_beside_the_way(tmp_path) -> None:
    sizes = ["--width", "64", "--layers", "6", "--rounds", "1", "--steps", "1"]
    command = [sys.executable, BENCHMARKS / "elsewhere.py", "--out", tmp_path, *sizes, "--json", tmp_path / "r.json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "losses are the same" in ended.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["planned elsewhere"] < found["planned without"]
    assert 0 < found["state on device"] < found["state bytes"]
    assert found["reached"] == max(found["way seconds"], found["without"]) / found["elsewhere"]
