"""Warnings of libraries during a command: one line, and each of them with -v."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.commands import parser
from penstock.commands.compiling import compile
from penstock.commands.inspecting import passes


def _warned_about(path: Path) -> Path:
    """Write a model whose weights stand among its inputs, which onnxruntime warns about one by one."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy")
    names = ["a", "b", "c"]
    weights = [numpy_helper.from_array(np.ones((2, 3), np.float32), name) for name in names]
    listed = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in names]
    nodes = [
        helper.make_node("Add", [before, name], [after])
        for before, name, after in zip("xpq", names, "pqy", strict=True)
    ]
    graph = helper.make_graph(nodes, "g", [x, *listed], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_verify_counts_the_warnings_of_onnxruntime(tmp_path: Path) -> None:
    path = _warned_about(tmp_path / "m.onnx")
    words = [sys.executable, "-m", "penstock", "verify", str(path), "--backend", "numpy"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    (line,) = [line for line in done.stderr.splitlines() if " warned 3 times; first: " in line]
    assert line.startswith("onnxruntime warned 3 times; first: Initializer ")
    assert "[W:onnxruntime" not in done.stderr
    assert "ok" in done.stdout
    # Control: without collecting they stand on stderr line by line.
    program = f"import onnxruntime; onnxruntime.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])"
    bare = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert bare.stderr.count("appears in graph inputs") == 3


def test_python_warnings_of_a_command_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(arguments: object) -> None:
        for number in range(3):
            warnings.warn(f"old axis {number}", stacklevel=1)

    words = ["compile", "m.onnx", "-o", "b"]
    for command in (compile, passes):
        monkeypatch.setattr(command, "run", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert parser.main(words) == 0
        assert capsys.readouterr().err == "Python warned 3 times; first: UserWarning: old axis 0\n"
        with pytest.warns(UserWarning, match="old axis") as shown:  # -v leaves them as they are
            assert parser.main([*words, "-v"]) == 0
        assert len(shown) == 3
        with pytest.warns(UserWarning, match="old axis") as shown:  # and other commands do
            assert parser.main(["passes"]) == 0
        assert len(shown) == 3
