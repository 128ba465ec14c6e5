"""Models small enough to be run in the interpreter dozens of times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.models import write_gpt, write_mlp


def write_tied(path: Path) -> Path:
    """A table that is read at both ends: as embedding and, turned, as head."""
    source = np.random.default_rng(0)
    shapes = {"wte": (12, 8), "fc.weight": (8, 8), "fc.bias": (8,)}
    weights = [
        numpy_helper.from_array(source.standard_normal(shape).astype(np.float32) * 0.5, name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Gather", ["wte", "tokens"], ["h"], name="h"),
        helper.make_node("MatMul", ["h", "fc.weight"], ["fc.product"], name="fc.product"),
        helper.make_node("Add", ["fc.product", "fc.bias"], ["fc"], name="fc"),
        helper.make_node("Tanh", ["fc"], ["t"], name="t"),
        helper.make_node("Transpose", ["wte"], ["head"], name="head", perm=[1, 0]),
        helper.make_node("MatMul", ["t", "head"], ["logits"], name="logits"),
    ]
    tokens = helper.make_tensor_value_info("tokens", TensorProto.INT64, [2, 5])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [2, 5, 12])
    graph = helper.make_graph(nodes, "tied", [tokens], [logits], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def write_models(folder: Path) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    return {
        "gpt": write_gpt(folder / "gpt.onnx", layers=2, width=8, heads=2, vocab=12, positions=5, batch=2),
        "mlp": write_mlp(folder / "mlp.onnx", [6, 8, 8, 4], batch=8),
        "tied": write_tied(folder / "tied.onnx"),
    }


# The arguments that each of them is compiled with.
ARGUMENTS = {
    "gpt": [
        "--devices",
        "2",
        "--loss",
        "cross_entropy",
        "--optimizer",
        "adamw",
        "--weight-decay",
        "0.1",
        "--microbatches",
        "2",
        "--schedule",
        "2bw",
    ],
    "mlp": ["--devices", "2"],
    "tied": [
        "--devices",
        "2",
        "--split-at",
        "logits",
        "--loss",
        "cross_entropy",
        "--microbatches",
        "2",
        "--schedule",
        "2bw",
    ],
}
