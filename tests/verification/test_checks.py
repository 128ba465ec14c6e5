"""`penstock verify`: outputs that are not rows of samples, and trainings in which roundings grow."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.commands.parser import main
from penstock.models import write_mlp
from penstock.support import terminal
from penstock.verification import checks
from penstock.verification.verdicts import Judge

from .families import write_family


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
        told, said = capsys.readouterr()
        assert "the mean" in told
        assert ": the mean" in said or said.rstrip().endswith("the mean")
        assert "the_mean" not in told + said, "no name of the IR"
        assert "inf " not in told


def test_what_takes_seconds_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations that take longer than people wait are counted. Control: where people wait longer, nothing is said."""
    write_mlp(tmp_path / "m.onnx", [6, 8, 3], 4, seed=2)
    words = ["verify", str(tmp_path / "m.onnx"), "--backend", "numpy"]
    said = []
    for patience in (0.0, 60.0):
        monkeypatch.setattr(checks, "PATIENCE", patience)
        monkeypatch.setattr(terminal, "PLAIN_EVERY", 0.0)
        assert main(words) == 0
        said.append(re.findall(r"verify \d+/\d+ operations in float64", capsys.readouterr().err))
    assert said[0]
    assert not said[1]


def test_losses_may_be_off_by_what_roundings_grow_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held to less than float32 can do, losses pass by what rounding moves them by. Control: gradients that are an update late do not."""
    write_mlp(tmp_path / "m.onnx", [6, 8, 3], 4, seed=2)
    words = [
        "compile",
        str(tmp_path / "m.onnx"),
        "--loss",
        "cross_entropy",
        "--lr",
        "0.1",
        "--microbatches",
        "2",
    ]
    assert main([*words, "-o", str(tmp_path / "b")]) == 0
    monkeypatch.setattr(checks, "TOLERANCE", 1e-12)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "b"), "--steps", "3"]) == 0
    told = capsys.readouterr()
    assert "in 8 runs of the interpreter in float64" in told.err
    assert re.search(r"step 2 microbatch 1 loss \S+ +\S+e-0[789] +\S+e-0[67] +ok", told.out)
    # What one asks for counts as it is.
    assert main(["verify", str(tmp_path / "b"), "--steps", "3", "--tolerance", "1e-12"]) == 5
    assert "8 runs" not in capsys.readouterr().err
    monkeypatch.setattr(checks, "delay_of", lambda module: 1)
    assert main(["verify", str(tmp_path / "b"), "--steps", "3"]) == 5
    told = capsys.readouterr()
    assert "step 0 microbatch 1" not in told.err
    assert "off by more than is allowed: step 1 microbatch 0" in told.err
    assert "hint: --bisect looks for" in told.err


def test_a_training_in_which_roundings_grow_does_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses that rounding changes by more than 1% are right as far as anybody can tell. The control is a recurrence that is a step late."""
    path, _ = write_family("iterated", 1, tmp_path)
    words = ["--loss", "mse", "--optimizer", "adamw", "--lr", "1e-2", "--microbatches", "2", "--backend", "numpy"]
    assert main(["compile", str(path), *words, "-o", str(tmp_path / "b")]) == 0
    monkeypatch.setattr(Judge, "rounded", {i: np.array(np.inf) for i in range(12)})
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "b"), "--steps", "6", "--seed", "1"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"step 2 microbatch 0 loss \S+ +\S+ +\S+ +ok", told)
    assert re.search(r"step 5 microbatch 1 loss \S+ +\S+e-02 +\S+ +cannot tell", told)
    assert "cannot tell on these inputs" in told
    monkeypatch.setattr(checks, "delay_of", lambda module: 1)
    assert main(["verify", str(tmp_path / "b"), "--steps", "6", "--seed", "1"]) == 5
