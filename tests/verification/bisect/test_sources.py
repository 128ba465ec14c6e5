"""Tests of bisecting sources other than a model: a bundle, with its code and weights, and a dump folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backends.tvm.compile import pool
from penstock.commands.parser import main

from .seeded_bugs import BUGS, Bug
from .small_models import ARGUMENTS, write_models

MADE_NOW = "compiled now by itself, is right"


def bug_named(name: str) -> Bug:
    return next(bug for bug in BUGS if bug.name == name)


def compiled(model: Path, folder: Path, *more: str) -> Path:
    assert (
        main(
            [
                "compile",
                str(model),
                "-o",
                str(folder / "bundle"),
                *ARGUMENTS[model.stem],
                "--dump-ir",
                str(folder / "dumps"),
                *more,
            ]
        )
        == 0
    )
    return folder / "bundle"


def bisected(path: Path, *more: str) -> int:
    return main(["verify", str(path), "--bisect", "--repro", "none", *more])


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "usable_cores", lambda: 1)


def test_code_in_a_bundle_that_is_older_than_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_models(tmp_path)["mlp"]
    with monkeypatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(tmp_path / "wrong"))
        bug_named("a kernel with a bad epilogue").patch(patch)
        bundle = compiled(model, tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "right"))
    capsys.readouterr()
    assert bisected(bundle) == 5
    told = capsys.readouterr().out
    assert "first wrong: the graph @s0.F" in told
    assert MADE_NOW in told
    assert "values as in onnxruntime" not in told, "the end was not reached"
    # The control: the same bundle, compiled by the right compiler.
    (tmp_path / "again").mkdir()
    assert bisected(compiled(model, tmp_path / "again")) == 0
    told = capsys.readouterr().out
    assert "values as in onnxruntime" in told
    assert "graphs of 2 stages compiled by tvm" in told


def test_passes_of_a_bundle_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bug = bug_named("operands the wrong way round")
    model = write_models(tmp_path)[bug.model]
    with monkeypatch.context() as patch:
        bug.patch(patch)
        bundle = compiled(model, tmp_path, "--backend", "numpy")
        capsys.readouterr()
        assert bisected(bundle) == 5
        told = capsys.readouterr()
        assert "first wrong after: split" in told.out
        assert bug.tensor in told.out
    # By passes that are right today only the program in the bundle is wrong.
    assert bisected(bundle) == 5
    told = capsys.readouterr()
    assert "make another program today" in told.err
    assert "first wrong after: the program of the bundle" in told.out
    assert bug.tensor in told.out


def test_a_dump_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bug = bug_named("a wrong mask")
    model = write_models(tmp_path)[bug.model]
    with monkeypatch.context() as patch:
        bug.patch(patch)
        compiled(model, tmp_path, "--backend", "numpy")
    capsys.readouterr()
    assert bisected(tmp_path / "dumps", "--backend", "numpy") == 5
    told = capsys.readouterr().out
    assert "first wrong after: decompose" in told
    assert bug.tensor in told
    compiled(model, tmp_path, "--backend", "numpy")
    assert bisected(tmp_path / "dumps", "--backend", "numpy") == 0, "the control"
    assert "modules" in capsys.readouterr().out
    # One file that was edited is named, also where it is the next one that does not follow from it.
    files = sorted((tmp_path / "dumps").glob("*.ir"))
    optimizer = next(file for file in files if file.name.endswith("_optimizer.ir"))
    for file, old, new, blamed in (
        (files[0], "eps=1e-05", "eps=0.1", f"{files[0].name}, or all after it, was edited"),
        (optimizer, "value=0.999", "value=0.99", f": {optimizer.name} was edited"),
        (files[-1], "value=0.999", "value=0.99", f": {files[-1].name} was edited"),
    ):
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")
        assert bisected(tmp_path / "dumps", "--backend", "numpy") == 5
        told = capsys.readouterr()
        assert blamed in told.err
        assert file is files[0] or "= const(value=0.99" in told.out, "a wrong constant of the optimiser is named"
        file.write_text(text, encoding="utf-8")
    files[-1].rename(tmp_path / "last")
    assert bisected(tmp_path / "dumps", "--backend", "numpy") == 2
    assert f"lists what is not there: {files[-1].name}" in capsys.readouterr().err
    (tmp_path / "last").rename(files[-1])
    edited = files[2:]
    for file in edited:
        file.write_text(file.read_text(encoding="utf-8").replace("eps=1e-05", "eps=0.1"), encoding="utf-8")
    assert bisected(tmp_path / "dumps", "--backend", "numpy") == 5
    assert f": {edited[0].name} was edited" in capsys.readouterr().err, "a pass is not to blame for what somebody wrote"
    assert main(["compile", str(model), "-o", str(tmp_path / "other"), *ARGUMENTS["gpt"], "--backend", "numpy", "--dump-ir", str(tmp_path / "c"), "--dump-ir-changed"]) == 0  # fmt: skip
    assert bisected(tmp_path / "c") == 2
    assert "without --dump-ir-changed" in capsys.readouterr().err
    assert main(["compile", str(model), "-o", str(tmp_path / "part"), *ARGUMENTS["gpt"], "--backend", "numpy", "--dump-ir", str(tmp_path / "d"), "--dump-ir-filter", "= matmul"]) == 0  # fmt: skip
    assert main(["verify", str(tmp_path / "d"), "--bisect"]) == 2
    assert "without --dump-ir-filter" in capsys.readouterr().err
