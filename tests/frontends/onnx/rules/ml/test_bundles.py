"""Models of domain ai.onnx.ml as compiled bundles of two devices: real processes give onnxruntime's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

import penstock as ps

from ...cases import judge
from .cases import MODES, features_of, leaves_of, random_trees

F32 = np.float32


def _write_trees(path: Path, rows: int, features: int) -> Path:
    """Write scaled features, random trees of three classes on them, and trees with missing values that are summed."""
    random = np.random.default_rng(5)
    nodes = random_trees(random, 6, features, MODES)
    weights = [
        (tree, node, kind, float(random.standard_normal())) for tree, node in leaves_of(nodes) for kind in range(3)
    ]

    def owned(what: str) -> dict[str, list]:
        names = ("treeids", "nodeids", "ids", "weights")
        return {f"{what}_{name}": list(column) for name, column in zip(names, zip(*weights, strict=True), strict=True)}

    def node(kind: str, ins: list[str], outs: list[str], **attributes) -> onnx.NodeProto:
        return helper.make_node(kind, ins, outs, name=kind, domain="ai.onnx.ml", **attributes)

    halves = [0.5] * features
    made = [
        node("Scaler", ["x"], ["scaled"], offset=[0.25] * features, scale=halves),
        node("TreeEnsembleRegressor", ["scaled"], ["sums"], n_targets=3, **nodes, **owned("target")),
        node("FeatureVectorizer", ["sums", "x"], ["joined"], inputdimensions=[3, features]),
        node(
            "TreeEnsembleClassifier", ["joined"], ["label", "scores"], classlabels_int64s=[4, 2, 7],
            post_transform="SOFTMAX", **nodes, **owned("class"),
        ),
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, features])]
    outputs = [
        helper.make_tensor_value_info("label", onnx.TensorProto.INT64, [rows]),
        helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [rows, 3]),
    ]
    graph = helper.make_graph(made, "trees", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=10), path)
    return path


def test_trees_on_two_devices_give_what_onnxruntime_gives(tmp_path: Path) -> None:
    path = _write_trees(tmp_path / "trees.onnx", 8, 4)
    plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(2))
    assert len(plan.module.graphs) == 2
    bundle = ps.compile(plan, tmp_path / "bundle", backend="tvm")
    random = np.random.default_rng(6)
    x = features_of(random, np.dtype(F32), 8, 4)
    x[random.random(x.shape) < 0.2] = np.nan
    label, scores = judge(path, {"x": x})
    with ps.open(bundle) as job:
        found = job.infer({"x": x})
        np.testing.assert_array_equal(found["label"], label)
        np.testing.assert_allclose(found["scores"], scores, rtol=1e-5, atol=1e-6)
        # The control: other rows have other leaves.
        assert not np.allclose(job.infer({"x": x[::-1].copy()})["scores"], scores)
