"""Recurrent layers in one loop, compiled, against torch and onnxruntime: cells, directions, sizes that leave lanes and
rows of the batch over; and layers that are no recurrence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from penstock.ir.graph import Graph
from penstock.passes.kernels.fuse import choose_kernels

STEPS = 7
Arrays = dict[str, np.ndarray]


def loops(graph: Graph) -> int:
    """Count the kernels with several products."""
    products: dict[object, int] = {}
    for op in graph.ops:
        if op.kind == "matmul":
            products[op.attrs["kernel"]] = products.get(op.attrs["kernel"], 0) + 1
    return sum(count > 1 for count in products.values())


def layer(path: Path, kind: str, batch: int, size: int, seed: int = 0, **attrs: Any) -> Path:
    """Write a model of one recurrent layer, with all results that its operator has."""
    random, width = np.random.default_rng(seed), 5
    directions = 2 if attrs.get("direction") == "bidirectional" else 1
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    shapes = {
        "w": (directions, gates * size, width),
        "r": (directions, gates * size, size),
        "b": (directions, 2 * gates * size),
    }
    weights = [numpy_helper.from_array(random.normal(0, 0.4, s).astype(np.float32), n) for n, s in shapes.items()]
    names = ["x", "w", "r", "b"]
    if attrs.pop("lengths", False):
        weights.append(numpy_helper.from_array(random.integers(2, STEPS, batch).astype(np.int32), "lengths"))
        names += ["lengths"]
    if attrs.pop("peepholes", False):
        weights.append(numpy_helper.from_array(random.normal(0, 1, (directions, 3 * size)).astype(np.float32), "p"))
        names += ["", "", "", "p"]
    outs = ["y", "h", "c"][: 3 if kind == "LSTM" else 2]
    node = helper.make_node(kind, names, outs, hidden_size=size, **attrs)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (STEPS, batch, width))
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outs]
    graph = helper.make_graph([node], "layer", [x], results, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8), path)
    return path


def compiled(path: Path, folder: Path) -> tuple[Graph, Any]:
    plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(1, threads=[1]))
    return plan.module.graphs["s0.F"], ps.load(ps.compile(plan, folder / "bundle"))


def largest_difference(found: Arrays, expected: Arrays) -> float:
    assert set(found) == set(expected)
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)


def results_of(path: Path, x: np.ndarray) -> Arrays:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x}), strict=True))


CASES: dict[str, tuple[str, int, int, dict[str, Any], int]] = {
    "rnn": ("RNN", 1, 16, {}, 1),
    "gru": ("GRU", 1, 64, {"linear_before_reset": 1}, 1),
    "gru, ragged": ("GRU", 3, 13, {"linear_before_reset": 1}, 1),
    "gru, backward": ("GRU", 2, 16, {"linear_before_reset": 1, "direction": "reverse"}, 1),
    "lstm, rows left over": ("LSTM", 19, 10, {}, 1),
    "lstm, both directions": ("LSTM", 16, 32, {"direction": "bidirectional"}, 2),
    "lstm, peepholes": ("LSTM", 2, 16, {"peepholes": True}, 0),
    "lstm, coupled": ("LSTM", 1, 16, {"input_forget": 1}, 1),
    "lstm, wide": ("LSTM", 1, 200, {}, 1),
    "gru, reset first": ("GRU", 2, 16, {"linear_before_reset": 0}, 0),
    "lstm, lengths": ("LSTM", 3, 8, {"lengths": True}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_onnxruntimes(name: str, tmp_path: Path) -> None:
    kind, batch, size, attrs, count = CASES[name]
    path = layer(tmp_path / "layer.onnx", kind, batch, size, **attrs)
    graph, model = compiled(path, tmp_path)
    assert loops(graph) == count
    x = np.random.default_rng(1).standard_normal((STEPS, batch, 5)).astype(np.float32)
    expected = results_of(path, x)
    assert largest_difference(model({"x": x}), expected) < 2e-6
    # Control: other weights, or the steps in another order, are noticed.
    assert largest_difference(model({"x": x[::-1].copy()}), expected) > 1e-3
    other = layer(tmp_path / "other.onnx", kind, batch, size, seed=2, **attrs)
    assert largest_difference(model({"x": x}), results_of(other, x)) > 1e-3


def test_layers_of_torch_are_loops(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.LSTM(6, 24, num_layers=2).eval()
    x = torch.randn(STEPS, 3, 6)
    plan = ps.plan(ps.from_torch(module, (x,)), ps.Cluster.local(1, threads=[1]))
    assert loops(plan.module.graphs["s0.F"]) == 2
    model = ps.load(ps.compile(plan, tmp_path / "bundle"))
    with torch.no_grad():
        y, (h, c) = module(x)
    ours = model({plan.module.graphs["s0.F"].ins[0].name: x.numpy()})
    for found, expected in zip(ours.values(), (y, h, c), strict=True):
        assert np.abs(found - expected.numpy()).max() < 2e-6


def test_training_keeps_the_steps_apart(tmp_path: Path) -> None:
    path = layer(tmp_path / "layer.onnx", "GRU", 2, 8, linear_before_reset=1)
    graph = ps.plan(ps.from_onnx(path), ps.Cluster.local(1)).module.graphs["s0.F"]
    assert loops(graph) == 1
    assert loops(choose_kernels(graph)) == 0
