"""A model file with unusual features, its training, and the comparisons in tests of export."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from penstock.frontends.onnx import structure

TIMEOUT = 20
TRAINED = {"first layer/weight", "half", "brain", "tied"}


def write_rich(path: Path, seed: int = 0, external: bool = False) -> Path:
    """Write a model with unusual features.

    It has odd names, all ways to store elements, 16-bit weights, a tied one, a local function and constants. It also
    has frozen and unused tensors, a second output that no loss sees, documentation and metadata.
    """
    random = np.random.default_rng(seed)

    def normal(*shape: int, dtype: object = np.float32) -> np.ndarray:
        return (random.standard_normal(shape) * 0.4).astype(dtype)

    odd = helper.make_tensor("first layer/weight", TensorProto.FLOAT, (8, 8), normal(8, 8).reshape(-1), raw=False)
    half = helper.make_tensor("half", TensorProto.BFLOAT16, (8, 8), normal(8, 8).reshape(-1), raw=False)
    arrays = {
        "brain": normal(8, 8, dtype=ml_dtypes.bfloat16),
        "tied": normal(8, 8),
        "frozen": normal(8, 8),
        "scale": np.float32(0.5),
        "flat": np.array([4, 8], np.int64),
        "unused": normal(3),
        "other": normal(8, 3),
        "corner": np.array([[1.0, 2.0]] * 4 + [[3.0, 4.0]] * 4, np.float32),
    }
    tensors = [odd, half, *(numpy_helper.from_array(array, name) for name, array in arrays.items())]
    tensors[3].doc_string = "read by two nodes"
    nodes = [
        helper.make_node("MatMul", ["x", "first layer/weight"], ["h 0"], name="first layer", doc_string="a product"),
        helper.make_node("Twice", ["h 0"], ["h1"], name="twice", domain="mine"),
        helper.make_node("Cast", ["half"], ["half.wide"], name="widen", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["h1", "half.wide"], ["h2"], name="second"),
        helper.make_node("Tanh", ["h2"], ["h3"]),
        helper.make_node("Cast", ["brain"], ["brain.wide"], name="widen2", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["h3", "brain.wide"], ["h4"], name="third"),
        helper.make_node("Mul", ["h4", "scale"], ["h5"], name="scaled"),
        helper.make_node("Reshape", ["h5", "flat"], ["h6"], name="reshaped"),
        helper.make_node("MatMul", ["h6", "tied"], ["h7"], name="fourth"),
        helper.make_node("Tanh", ["h7"], ["h8"], name="tanh"),
        helper.make_node("MatMul", ["h8", "tied"], ["h9"], name="fifth"),
        helper.make_node("MatMul", ["h9", "frozen"], ["y"], name="last"),
        helper.make_node("MatMul", ["h9", "other"], ["z"], name="unseen"),
        helper.make_node("MatMul", ["h9", "corner"], ["v"], name="unseen too"),
    ]
    twice = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 20)]
    )
    graph = helper.make_graph(
        nodes,
        "rich",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 8], "what goes in")],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size])
            for name, size in (("y", 8), ("z", 3), ("v", 2))
        ],
        tensors,
        doc_string="a graph",
        value_info=[helper.make_tensor_value_info("h1", TensorProto.FLOAT, ["rows", 8])],
    )
    model = helper.make_model(
        graph,
        functions=[twice],
        producer_name="a test",
        doc_string="a model",
        model_version=7,
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)],
        ir_version=10,
    )
    helper.set_model_props(model, {"author": "nobody"})
    nodes_of = model.graph.node
    nodes_of[3].metadata_props.append(onnx.StringStringEntryProto(key="source", value="line 3"))
    onnx.checker.check_model(model)
    if external:
        onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=64)
    else:
        onnx.save_model(model, path)
    return path


def compiled(
    path: Path, out: Path, schedule: str = "1f1b", frozen: str | None = "frozen|corner", **options: object
) -> Path:
    """Compile a model for training on two stages."""
    model = ps.from_onnx(path, dims={"rows": 4}, frozen=frozen)
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.05), microbatches=2)
    return ps.compile(ps.plan(model, ps.Cluster.local(2), training, schedule=schedule, **options), out, backend="numpy")


def batches(count: int) -> list[dict[str, np.ndarray]]:
    """Draw batches of inputs and labels."""
    random = np.random.default_rng(5)
    return [{name: random.standard_normal((8, 8)).astype(np.float32) for name in ("x", "labels")} for _ in range(count)]


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Return the initializers of a file as arrays."""
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def bits(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """Return the element type, shape and bytes of an array."""
    return array.dtype.name, array.shape, array.tobytes()


def bones(path: Path) -> onnx.ModelProto:
    """Return a model without the elements of its initializers."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for name in structure._ELEMENTS:
            tensor.ClearField(name)
        tensor.ClearField("data_location")
    return model


def outputs(path: Path, x: np.ndarray) -> list[np.ndarray]:
    """Run a model in onnxruntime."""
    return list(onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x}))
