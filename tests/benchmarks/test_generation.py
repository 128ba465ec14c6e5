"""The benchmark of text runs in small, goes on where a file of results ends, and says who cannot take part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import BENCHMARKS

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "generation.py"), "--tiny", "--threads", "1", "--rounds", "2"]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=300, check=False)


def test_rates_of_two_contenders_in_a_file_that_is_not_measured_again(tmp_path: Path):
    file = tmp_path / "results.json"
    done = run("--json", file)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    assert set(results) == {"llama 1 penstock f32", "llama 1 transformers f32"}
    assert all(row["tokens/s"] > 0 and len(row["turns"]) == 2 for row in results.values())
    results["llama 1 penstock f32"]["tokens/s"] = 123456.0
    file.write_text(json.dumps({"results": results}))
    assert "123456.0" in run("--json", file).stdout


def test_a_contender_that_cannot_take_part_has_a_reason(tmp_path: Path):
    """The control: its bundle is damaged."""
    bundle = tmp_path / "llama" / "penstock-f32-1-32"
    bundle.mkdir(parents=True)
    done = run("--folder", tmp_path, "--contenders", "penstock f32")
    assert done.returncode == 1
    assert "not here: VerifyError" in done.stdout
