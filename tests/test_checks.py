"""`penstock verify` of models and bundles whose outputs are not rows of samples."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from penstock.cli import main


def test_scalar_outputs_by_names_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scalar of one microbatch comes back in a row of one, and by a name that is spelled otherwise here; onnxruntime says what it is.
    Control: no difference at all is too little to allow."""
    inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 3])]
    outputs = [onnx.helper.make_tensor_value_info("the mean", onnx.TensorProto.FLOAT, [])]
    node = onnx.helper.make_node("ReduceMean", ["x"], ["the mean"], keepdims=0)
    graph = onnx.helper.make_graph([node], "mean", inputs, outputs)
    path = tmp_path / "mean.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10), path)
    assert main(["compile", str(path), "-o", str(tmp_path / "bundle"), "--backend", "numpy"]) == 0
    capsys.readouterr()
    for words in (["verify", str(path), "--backend", "numpy"], ["verify", str(tmp_path / "bundle")]):
        assert main(words) == 0
        assert main([*words, "--tolerance", "0"]) == 5
        told = capsys.readouterr().out
        assert "the_mean" in told
        assert "inf " not in told
