"""The benchmark of exported models compares outputs, and has figures of both for each number of threads."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from oracles.repository import BENCHMARKS

from penstock.models import write_cnn, write_mlp

from ..benchmark_report import run_benchmark

# The bundle that is loaded gives other numbers.
WRONG = """
import sys
sys.path.insert(0, {folder!r})
import beside_onnxruntime

load = beside_onnxruntime.ps.load

def other(bundle):
    model = load(bundle)
    return lambda inputs: {{name: array + 1 for name, array in model(inputs).items()}}

beside_onnxruntime.ps.load = other
(row,) = beside_onnxruntime.measure([beside_onnxruntime.Path({model!r})], 1, 1)
sys.exit(int(row["error"] > beside_onnxruntime.TOLERANCE))
"""


def test_both_are_compared_and_timed_for_each_number_of_threads(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    write_cnn(models / "cnn.onnx", 1)
    write_mlp(models / "mlp.onnx", [8, 8, 4], batch=2)
    report, done = run_benchmark("beside_onnxruntime", ["--models", str(models), "--rounds", "2"], tmp_path)
    assert [(row["model"], row["threads"]) for row in report["rows"]] == [
        ("cnn", 1),
        ("mlp", 1),
        ("cnn", 2),
        ("mlp", 2),
    ]
    for row in report["rows"]:
        assert row["error"] <= report["tolerance"]
        assert row["seconds"].keys() == {"penstock", "onnxruntime"}
        assert all(len(turns) == 2 for turns in row["seconds"].values())
        assert row["speedup"] == row["medians"]["onnxruntime"] / row["medians"]["penstock"]
    assert "2 threads: geometric mean" in done.stdout
    assert done.stdout.count("\n| ") == 4
    words = ["--models", str(models), "--rounds", "1", "--only", "mlp", "--threads", "2"]
    again, _ = run_benchmark("beside_onnxruntime", words, tmp_path)
    assert [len(row["seconds"]["penstock"]) for row in again["rows"]] == [2, 2, 2, 1]


def test_control_other_numbers_are_an_error(tmp_path: Path) -> None:
    script, model = tmp_path / "wrong.py", tmp_path / "mlp.onnx"
    write_mlp(model, [8, 8, 4], batch=2)
    script.write_text(WRONG.format(folder=str(BENCHMARKS), model=str(model)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "mlp, 1 thread" in done.stderr


def test_the_list_has_twenty_models_of_their_own_names() -> None:
    rows = tomllib.loads((BENCHMARKS / "exports.toml").read_text(encoding="utf-8"))["model"]
    assert len({row["name"] for row in rows}) == len(rows) == 20
    assert {row["library"] for row in rows} == {"timm", "torchvision", "transformers", "torch"}
