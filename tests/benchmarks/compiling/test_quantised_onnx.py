"""Small models that onnxruntime quantised: compiled, they give onnxruntime's numbers, on kernels for bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
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


def test_a_model_is_quantised_in_both_ways_and_runs_on_bytes(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    small (float[1,4,9,9] x) => (float[1,5] y) {
        a = Conv<pads = [1, 1, 1, 1]>(x, filters) b = Relu(a) c = GlobalAveragePool(b) d = Flatten(c) y = MatMul(d, last)
    }"""
    model, random = onnx.parser.parse_model(text), np.random.default_rng(1)
    for name, dims in {"filters": (8, 4, 3, 3), "last": (8, 5)}.items():
        array = random.standard_normal(dims).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    (tmp_path / "floats").mkdir()
    onnx.save(model, tmp_path / "floats/small.onnx")
    x = random.standard_normal((1, 4, 9, 9)).astype(np.float32)
    (floats,) = onnxruntime.InferenceSession(str(tmp_path / "floats/small.onnx")).run(None, {"x": x})
    for path in quantised_onnx.quantise_model(tmp_path / "floats/small.onnx", tmp_path):
        (right,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})
        imported = import_onnx(path)
        main = imported.module.graphs["main"]
        assert {op.kind for op in main.ops} >= {"conv_bytes", "matmul_bytes"}
        (meant,) = run_graph(main, [x], DictStore(imported.weights))
        off = np.abs(right - floats).max()
        assert off > 0, "quantising changes nothing"
        assert np.abs(meant - right).max() < max(off / 2, 0.02 * np.abs(right).max()), path.stem
        assert np.abs(meant + right).max() > 0.02 * np.abs(right).max(), "control: the other sign"
