"""The nine light models of the onnx package, with seeded random weights in place of their constants, through the interpreter against onnxruntime.

The files make every weight by a ConstantOfShape of one value, so that their own expected outputs say next to nothing about numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
import onnxruntime
import pytest
from onnx import numpy_helper

from penstock.frontends.onnx import import_onnx
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore

FOLDER = Path(next(iter(onnx.backend.test.__path__))) / "data" / "light"
MODELS = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)


def with_random_weights(name: str) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """The model with an initializer for each constant, and the shape of its input. Vectors, which may be variances, are around 1."""
    model = onnx.load(FOLDER / f"light_{name}.onnx")
    graph, random = model.graph, np.random.default_rng(0)
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    kept = []
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = tuple(int(n) for n in stored[node.input[0]])
        drawn = (
            random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) / 2)
            if len(shape) > 1
            else random.uniform(0.5, 1.5, shape)
        )
        graph.initializer.append(numpy_helper.from_array(drawn.astype(np.float32), node.output[0]))
        graph.input.append(
            onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, shape)
        )  # IR 3 lists initializers there
    del graph.node[:]
    graph.node.extend(kept)
    inputs = [v for v in graph.input if v.name not in {t.name for t in graph.initializer}]
    (value,) = inputs
    return model, tuple(d.dim_value for d in value.type.tensor_type.shape.dim)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_light_models_are_onnxruntimes(name: str, tmp_path: Path) -> None:
    model, shape = with_random_weights(name)
    path = tmp_path / f"{name}.onnx"
    onnx.save(model, path)
    imported = import_onnx(path)
    (value,) = imported.module.inputs
    x = np.random.default_rng(1).random(shape, np.float32)
    (found,) = run_graph(imported.module.graphs["main"], {value.name: x}, DictStore(imported.weights))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {session.get_inputs()[0].name: x})
    assert np.ptp(expected) > 1e-3 * np.abs(expected).max()  # what the files' own constants do not give
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * float(np.abs(expected).max()))
