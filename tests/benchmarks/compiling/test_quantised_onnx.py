"""A small layer that onnxruntime's quantize_dynamic wrote: compiled, it gives onnxruntime's numbers, on kernels for bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime

import penstock as ps
from penstock.frontends.onnx import import_onnx
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import quantised_onnx

# Sums are the same integers, and floats around them differ in their last bits. A tie in rounding would be a step of
# about 0.02 in one operand: none occurs here.
TOLERANCE = 1e-5


def test_a_layer_of_bytes_gives_the_numbers_of_onnxruntime(tmp_path: Path) -> None:
    (path,) = quantised_onnx.write_models(tmp_path, [5], 36)
    x = np.random.default_rng(0).standard_normal((5, 36)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (right,) = session.run(None, {"x": x})
    imported = import_onnx(path)
    main = imported.module.graphs["main"]
    assert sum(op.kind == "matmul_bytes" for op in main.ops) == 2
    (meant,) = run_graph(main, [x], DictStore(imported.weights))
    np.testing.assert_allclose(meant, right, rtol=0, atol=TOLERANCE)
    plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(1, [1]))
    compiled = ps.load(ps.compile(plan, tmp_path / "bundle"))({"x": x})["y"]
    np.testing.assert_allclose(compiled, right, rtol=0, atol=TOLERANCE)
    wrong = {name: np.roll(w, 1) if name == "up_scale" else w for name, w in imported.weights.items()}
    (other,) = run_graph(main, [x], DictStore(wrong))
    assert np.abs(other - right).max() > 100 * TOLERANCE, "control: scales of neighbouring columns"
