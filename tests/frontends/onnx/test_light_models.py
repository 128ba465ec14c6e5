"""The nine models that the onnx package brings along (opset 9, IR 3), with seeded random weights: theirs are one number throughout and hide every mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from penstock.frontends.onnx import import_onnx

from .cases import judge, run

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = [path.stem.removeprefix("light_") for path in sorted(FOLDER.glob("light_*.onnx"))]


def with_random_weights(path: Path, out: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The model with numbers in place of its ConstantOfShape nodes, and an image. Sizes of activations stay near one."""
    model = onnx.load(path)
    shapes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    variances = {node.input[4] for node in model.graph.node if node.op_type == "BatchNormalization"}
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        name, shape = node.output[0], tuple(shapes[node.input[0]].tolist())
        drawn = np.random.default_rng([*name.encode()]).standard_normal(shape, np.float32)
        scale = (2 / max(1, int(np.prod(shape[1:])))) ** 0.5 if len(shape) > 1 else 0.1
        array = (
            np.abs(drawn) * np.float32(0.1) + 1
            if name in variances
            else drawn * np.float32(scale) + np.float32(len(shape) == 1)
        )
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
        model.graph.input.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        )  # as IR 3 wants it
    if kept[-1].op_type == "Softmax":  # it makes of large numbers a one and zeros, whatever they are
        model.graph.output[0].name = kept.pop().input[0]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    onnx.save(model, out)
    stored = {t.name for t in model.graph.initializer}
    (data,) = (v for v in model.graph.input if v.name not in stored)
    image = np.random.default_rng(0).standard_normal([d.dim_value for d in data.type.tensor_type.shape.dim])
    return out, {data.name: image.astype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_light_models_agree_with_onnxruntime(tmp_path: Path, name: str) -> None:
    path, feeds = with_random_weights(FOLDER / f"light_{name}.onnx", tmp_path / "model.onnx")
    imported = import_onnx(path)
    (found,), (expected,) = (
        run(imported, {imported.module.inputs[0].name: next(iter(feeds.values()))}),
        judge(path, feeds),
    )
    assert found.shape == expected.shape
    assert expected.std() > 1e-5  # a result that depends on nothing would prove nothing
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    other = run(imported, {imported.module.inputs[0].name: np.flip(next(iter(feeds.values())), 3).copy()})[0]
    assert np.abs(other - expected).max() > 10 * np.abs(found - expected).max()
