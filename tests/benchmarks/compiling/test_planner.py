"""The planner's benchmarks print what they promise; nothing is asserted of measured times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

LITTLE = ("--hosts", "1", "--batch", "16", "--layers", "6", "--width", "512")


def run(script: str, *words: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout


def test_every_schedule_is_planned() -> None:
    lines = run("planner.py", *LITTLE).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["1f1b", "gpipe", "2bw", "eager-2bw", "zb-1f1b", "all"]


def test_memory_above_what_is_promised_fails(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    lines = run("planner.py", *LITTLE, "--promised", "0", "--schedules", "2bw", "--json", str(report), status=1)
    (row,) = json.loads(report.read_text())["rows"]
    assert 0 < row["peak"] < 2**30
    assert lines.endswith("are more than promised\n")


def test_packs_are_searched_beside_plans_without(tmp_path: Path) -> None:
    """The control is the first row, with one stage on each device alone."""
    report = tmp_path / "report.json"
    run("planner.py", "--packs", "--json", str(report))
    alone, packed = json.loads(report.read_text())["rows"]
    assert (alone["tried"], packed["tried"]) == ([], ["interleaved", "zb-v"])
    assert packed["step"] <= alone["step"]


def test_paper_shapes_compare_what_can_be_compared(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run("paper_shapes.py", "--devices", "8", "--models", "1.3B", "--batch", "16", "--json", str(report))
    lines = {line["how"]: line for line in json.loads(report.read_text())["lines"]}
    assert list(lines) == ["2bw", "eager-2bw", "1f1b", "gpipe", "tensor, t <= 8", "no pipelining"]
    assert lines["2bw"]["ratio"] == 1
    # Flops alone: 16 samples of 512 positions, 6 operations per parameter and position, on 8 devices that reach 5e13 of them per second.
    least = 16 * 512 * 6 * 1.3e9 / (8 * 5e13)
    assert all(line["step"] > least for line in lines.values())
    assert lines["2bw"]["formula"] == pytest.approx(lines["2bw"]["step"], rel=0.05)
