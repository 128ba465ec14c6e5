"""The benchmark of exported models compares outputs, and has figures of both for each number of threads."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
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


@pytest.mark.slow
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
        if "bound" in row:
            times = [row["work"][what] / row["rates"][what] for what in ("operations", "weight_bytes")]
            assert row["bound"] == row["medians"]["onnxruntime"] / max(times)
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


# A table of 1000 rows of 8, of which a row is looked up for each of 4 numbers, before a layer of 8 to 4.
WORK = """
import sys
sys.path.insert(0, {folder!r})
from bounds import Rates, Work, shortest_s, work_of
import penstock as ps

plan = ps.plan(ps.from_onnx({model!r}), ps.Cluster.local(1))
print(work_of(plan.module).operations, work_of(plan.module).weight_bytes)
print(shortest_s(Work(100.0, 30), Rates(50.0, 10.0)), shortest_s(Work(100.0, 30), Rates(50.0, 60.0)))
"""


def _write_looked_up(path: Path) -> None:
    nodes = [helper.make_node("Gather", ["table", "x"], ["rows"]), helper.make_node("MatMul", ["rows", "w"], ["y"])]
    weights = {"table": np.ones((1000, 8), np.float32), "w": np.ones((8, 4), np.float32)}
    x = helper.make_tensor_value_info("x", onnx.TensorProto.INT64, [4])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 4])
    held = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "looked_up", [x], [y], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def test_a_bound_is_the_slower_of_computing_and_reading_the_weights(tmp_path: Path) -> None:
    script, model = tmp_path / "work.py", tmp_path / "looked_up.onnx"
    _write_looked_up(model)
    script.write_text(WORK.format(folder=str(BENCHMARKS), model=str(model)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    # A product of 4 x 8 and 8 x 4; the control is the table, of which all but four rows are not read.
    work, seconds = done.stdout.splitlines()
    operations, weight_bytes = map(float, work.split())
    assert 2 * 4 * 8 * 4 <= operations < 2 * 4 * 8 * 4 + 64
    assert weight_bytes == 8 * 4 * 4 < 1000 * 8 * 4
    assert [float(second) for second in seconds.split()] == [3.0, 2.0]


def test_the_list_has_twenty_models_of_their_own_names() -> None:
    rows = tomllib.loads((BENCHMARKS / "exports.toml").read_text(encoding="utf-8"))["model"]
    assert len({row["name"] for row in rows}) == len(rows) == 20
    assert {row["library"] for row in rows} == {"timm", "torchvision", "transformers", "torch"}
