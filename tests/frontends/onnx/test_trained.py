"""Flags, metadata and rules on which initializers are trained, and what `penstock plan` says of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.commands.parser import main
from penstock.frontends.onnx import import_onnx
from penstock.frontends.onnx.trained import KIND

from .cases import compare, draw, write_model

F32 = np.dtype(np.float32)
# What torch.onnx.export(dynamo=True) writes: names of the state dict with their kinds, and made-up names of constants.
TEXT = """(float[2,8] x) => (float[2,8] y) {
  a = MatMul(x, val_3) b = Add(a, lin_bias) c = Mul(b, scale) d = Max(c, scalar_tensor_default) e = Add(d, lifted_tensor_0)
  f = MatMul(e, table) g = Div(f, val_9) y = Mul(g, weights)
}"""
ARRAYS = {
    "val_3": draw("t", F32, (8, 8)),  # the weight of a layer, transposed by the exporter, and without a kind
    "lin_bias": np.zeros(8, F32),
    "scale": np.array(2.0, F32),
    "scalar_tensor_default": np.array([-0.4], F32),
    "lifted_tensor_0": draw("l", F32, (8,)),
    "table": draw("u", F32, (8, 8)),
    "val_9": np.array([1.5], F32),
    "weights": np.hanning(8).astype(F32),  # a parameter, though it begins as a window
}
KINDS = {
    "lin_bias": "PARAMETER",
    "scale": "PARAMETER",
    "lifted_tensor_0": "CONSTANT_TENSOR",
    "table": "BUFFER",
    "weights": "PARAMETER",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = write_model(tmp_path / "a.onnx", TEXT, arrays=ARRAYS)
    model = onnx.load(path)
    model.producer_name = "pytorch"
    for name, kind in KINDS.items():
        model.graph.value_info.add(name=name).metadata_props.add(key=KIND, value=kind)
    onnx.save(model, path)
    return path


def params(path: Path, **options: str) -> set[str]:
    return {v.name for v in import_onnx(path, **options).module.vars.values() if v.role == "param"}


def test_the_kinds_of_a_file_come_before_rules_and_rules_decide_on_the_rest(path: Path) -> None:
    imported = compare(path, {"x": draw("x", F32, (2, 8))})
    assert params(path) == {"val_3", "lin_bias", "scale", "weights"}
    report = "\n".join(imported.report)
    assert "buffers of the exported module, not trained: lifted_tensor_0, table" in report
    assert "not trained by rule bound, 1: scalar_tensor_default (" in report
    assert "not trained by rule number, 1: val_9 (" in report
    assert "trained though unusual, 1: scale (one element; told to be trained)" in report
    assert "trained though unusual, 1: weights (told to be trained; but a Hann, Hamming" in report


def test_without_kinds_rules_decide_on_everything(path: Path) -> None:
    """The control: `table` is like a weight, `weights` like a window."""
    model = onnx.load(path)
    del model.graph.value_info[:]
    onnx.save(model, path)
    assert params(path) == {"val_3", "lin_bias", "scale", "lifted_tensor_0", "table"}


def test_flags_come_before_kinds_and_rules(path: Path) -> None:
    assert params(path, trained="val_9|table") == {"val_3", "lin_bias", "scale", "weights", "val_9", "table"}
    assert params(path, frozen="val|weights") == {"lin_bias", "scale"}
    assert params(path, frozen="val_9", trained="val") == {"val_3", "lin_bias", "scale", "weights"}


def test_plan_tells_people_and_not_data(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(path), "--loss", "mse"]) == 0
    out, err = capsys.readouterr()
    for line in ("not trained by rule bound, 1: scalar_tensor_default (a bound", "trained though unusual, 1: scale ("):
        assert line in err
        assert line not in out
    assert "--trained REGEX makes parameters" in err


def test_weights_in_constant_nodes_are_trained_after_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = onnx.numpy_helper.from_array(draw("w", F32, (8, 8)), "inside")
    nodes = [
        onnx.helper.make_node("Constant", [], ["w"], value=weight),
        onnx.helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    kinds = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 8]) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "inside", kinds[:1], kinds[1:])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "model.onnx",
    )
    training = ["--loss", "mse", "--optimizer", "sgd", "--lr", "0.1"]
    assert main(["plan", str(tmp_path / "model.onnx"), *training]) == 2
    assert "docs/frontends.md, What becomes a parameter" in capsys.readouterr().err
    page = (Path(__file__).parents[3] / "docs" / "frontends.md").read_text()
    block = next(text for text in re.findall(r"```python\n(.*?)```", page, re.S) if '"Constant"' in text)
    subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, timeout=60)
    assert main(["plan", str(tmp_path / "trainable.onnx"), *training]) == 0
    assert "1 parameters with 64 elements" in capsys.readouterr().err
