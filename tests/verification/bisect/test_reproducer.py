"""Reproducers show the fault that they were made of, with their own command and nothing else; without the bug they show none."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.bundle.tensor_file import write_tensors
from penstock.backends.tvm.compile import pool
from penstock.commands.parser import main
from penstock.ir.text import parse_module
from penstock.models import write_mlp
from penstock.verification.bisect import reproducer
from penstock.verification.bisect.case import Case

from .seeded_bugs import BUGS
from .small_models import ARGUMENTS, write_models

# How many operations may be left of each; none of an import, which is an ONNX file.
LEFT = {
    "a missing residual": 2,
    "a lost factor 1/m": 3,
    "a gradient that is not added up": 16,
    "operands the wrong way round": 40,
    "a kernel with a bad epilogue": 1,
    "an attribute that the import reads wrongly": 0,
}


def command_of(folder: Path) -> list[str]:
    model = folder / "repro.onnx"
    if model.exists():
        return ["verify", "repro.onnx", "--data", "inputs.safetensors", "--backend", "numpy"]
    first = (folder / "repro.ir").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("// penstock ")
    return shlex.split(first)[2:]


@pytest.mark.parametrize("name", LEFT)
def test_a_reproducer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    model = write_models(tmp_path)[bug.model]
    place = tmp_path / "it is here"
    words = [
        "verify",
        str(model),
        "--bisect",
        *ARGUMENTS[bug.model],
        "--repro",
        str(place),
        "--shrink",
        "20",
        *bug.more,
    ]
    words += [] if bug.compiles else ["--backend", "numpy"]
    monkeypatch.setattr(pool, "usable_cores", lambda: 1)
    with monkeypatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path / "wrong"))
        bug.patch(patch)
        assert main(words) == 5
        told, hints = capsys.readouterr()
        assert f"reproducer in {place}" in told
        for shell in [line.strip().removeprefix("hint: ") for line in (told + hints).splitlines() if " && " in line]:
            assert shlex.split(shell)[:3] == ["cd", str(place), "&&"], "what is told can be typed"
        assert ("hint: cd " in hints) or name != "a missing residual"
        patch.chdir(place)
        command = command_of(place)
        assert f"penstock {shlex.join(command)}" in told
        assert main(command) == 5
    if LEFT[name]:
        module = parse_module((place / "repro.ir").read_text(encoding="utf-8"))
        made = [op for graph in module.graphs.values() for op in graph.ops if op.kind not in ("read", "const")]
        assert len(made) <= LEFT[name]
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "right"))
    monkeypatch.chdir(place)
    capsys.readouterr()
    assert main(command) == 0, "the control: without the bug there is no fault"


def test_places_that_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_mlp(tmp_path / "mlp.onnx", [2, 2], batch=1)
    (tmp_path / "mlp.onnx.repro").mkdir()
    (tmp_path / "mlp.onnx.repro" / "thesis.tex").write_text("years of work")
    assert main(["verify", str(model), "--bisect"]) == 2
    assert "something else than a reproducer" in capsys.readouterr().err


def test_flags_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_mlp(tmp_path / "mlp.onnx", [2, 2], batch=1))
    (tmp_path / "m.ir").write_text("module @m {\n}\n")
    for words, said in (
        ([model, "--schedule", "2bw", "--lr", "0"], "--lr, --schedule without --bisect of a model"),
        (
            [model, "--packs", "2", "--zero", "0", "--mesh", "a=2", "--objective", "latency", "--hints", "ignore"],
            "--packs, --mesh, --objective, --hints without --bisect of a model",
        ),
        ([model, "--repro", "x"], "--repro without --bisect"),
        ([model, "-p", "fuse"], "--passes without FILE.ir"),
        ([model, "--bisect", "--data", "x"], "cannot read the data"),
        ([model, "--bisect", "--shrink", "-1"], "--shrink -1"),
        ([str(tmp_path / "m.ir"), "--bisect"], "are for models"),
        ([str(tmp_path), "--bisect", "--loss", "mse"], "are for models; a folder has them built in"),
        ([str(tmp_path), "--bisect"], "there is no 00_input.ir"),
        ([str(tmp_path / "m.ir"), "--data", str(tmp_path / "none")], "cannot read"),
    ):
        assert main(["verify", *words]) == 2, words
        assert said in capsys.readouterr().err


TWO = """module @two {
  input %x : f32[2,3]
  output %z
  var @a : f32[3,3] param
  var @b : f32[3,3] param
  graph @main(%x : f32[2,3]) {
    %a : f32[3,3] = read(@a)
    %b : f32[3,3] = read(@b)
    %y : f32[2,3] = matmul(%x, %a)
    %z : f32[2,3] = matmul(%y, %b)
    return %z
  }
}
"""


@pytest.mark.parametrize("words", [["-p", "simplify"], ["--backend", "numpy"]])
def test_data_that_do_not_fit_are_nobodys_fault(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two.ir").write_text(TWO)
    fit = {"%x": np.ones((1, 2, 3), np.float32), "@a": np.eye(3, dtype=np.float32), "@b": np.ones((3, 3), np.float32)}
    command = ["verify", str(tmp_path / "two.ir"), *words, "--data", str(tmp_path / "d.safetensors")]
    for change, said in (
        ({"@a": np.ones((3, 4), np.float32)}, "@a"),
        ({"%x": np.ones((1, 2, 4), np.float32)}, "x has "),
        ({"%x": np.float32(1)}, "without an axis of batches"),
        ({"%x": np.zeros((0, 2), np.float32)}, "inputs have no batch"),
        ({"%x": None, "%other": np.ones((1, 2), np.float32)}, "x is missing"),
    ):
        arrays = {name: np.asarray(array) for name, array in {**fit, **change}.items() if array is not None}
        write_tensors(tmp_path / "d.safetensors", arrays)
        assert main(command) == 2, change
        told = capsys.readouterr().err
        assert said in told
        assert "changes what" not in told
    # Control.
    write_tensors(tmp_path / "d.safetensors", fit)
    assert main(command) == 0


def test_drawn_variables_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.ir").write_text(TWO)
    seen: list[Case] = []
    monkeypatch.setattr(reproducer, "_graph_spot", lambda case, *_: seen.append(case))
    for seed in ("0", "0", "1"):
        assert main(["verify", str(tmp_path / "two.ir"), "--backend", "numpy", "--seed", seed]) == 0
    one, again, other = (case.weights for case in seen)
    assert not np.array_equal(one["a"], one["b"])
    assert np.array_equal(one["b"], again["b"])
    assert not np.array_equal(one["b"], other["b"])
