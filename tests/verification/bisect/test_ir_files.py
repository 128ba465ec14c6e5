"""Tests of `penstock verify FILE.ir -p PASSES` on every module of a dump. Right passes pass, wrong ones fail, and
undecidable cases are reported as such."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.commands.parser import main
from penstock.ir.files import read_module
from penstock.ir.graph import Module, Note
from penstock.ir.verify.verifier import verify
from penstock.models import write_mlp

from .breaking import in_graph, passed_by
from .seeded_bugs import in_pass

TRAINING = ["--loss", "cross_entropy", "--optimizer", "momentum", "--microbatches", "4", "--schedule", "2bw"]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """training/ and inference/, four microbatches each."""
    folder = tmp_path_factory.mktemp("dumps")
    model = write_mlp(folder / "mlp.onnx", [6, 8, 8, 4], batch=8)
    for name, words in (("training", TRAINING), ("inference", [])):
        command = [
            "compile",
            str(model),
            "-o",
            str(folder / f"{name}.bundle"),
            "--backend",
            "numpy",
            "--devices",
            "2",
            *words,
        ]
        assert main([*command, "--dump-ir", str(folder / name)]) == 0
    return folder


def rewritten(module: Module) -> Module:
    """Another object with the same operations: passes that change nothing are not even run."""
    return module.but(
        notes=(*module.notes, Note("test", "written anew")),
        graphs={name: replace(g) for name, g in module.graphs.items()},
    )


def broken(module: Module) -> Module:
    """One value of the first backward graph, or else of the first graph of all, is left out: whoever reads it reads its operand."""
    for name in ("B", "s0.B", "main", "s0.F"):
        if name in module.graphs:
            ops = [
                op
                for op in module.graphs[name].ops
                if op.ins and op.outs and op.ins[0].type == op.outs[0].type and op.kind != "reduce_sum"
            ]
            return in_graph(name, passed_by(ops[0].outs[0].name))(module)
    return module


@pytest.mark.parametrize("kind", ["training", "inference"])
@pytest.mark.parametrize(
    ("change", "code", "said"), [(rewritten, 0, "stay what they were"), (broken, 5, "changes what mlp computes")]
)
def test_passes_of_dumps(
    kind: str,
    change: Callable[[Module], Module],
    code: int,
    said: str,
    dumps: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = sorted((dumps / kind).glob("[01]*.ir"))
    assert len(files) > 6
    in_pass("simplify", change)(monkeypatch)
    for file in files:
        capsys.readouterr()
        if file.stem.endswith("_schedule") and kind == "training":
            assert main(["verify", str(file), "-p", "simplify"]) == 2
            assert "its weights have no versions yet" in capsys.readouterr().err
            continue
        verify(change(read_module(file)))
        assert main(["verify", str(file), "-p", "simplify"]) == code, file
        told = capsys.readouterr()
        assert said in told.out + told.err, file


def test_what_a_pass_may_make_of_a_dump(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = "schedule{kind=2bw, microbatches=4}"
    whole, cut = (next((dumps / "training").glob(f"*_{name}.ir")) for name in ("partition", "split"))
    for file, passes, code, said in (
        (whole, f"split,{late},weight-versions", 0, "stay what they were"),
        (whole, "autodiff", 2, "no graph main to differentiate"),
        (whole, f"split,{late}", 2, "weights have no versions yet"),
        (cut, f"{late},weight-versions", 2, "makes updates later"),
        (cut, "schedule{kind=gpipe, microbatches=4}", 0, "stay what they were"),
        (cut, "simplify", 0, "nothing to change"),
    ):
        found = main(["verify", str(file), "-p", passes])
        told = capsys.readouterr()
        assert (found, said in told.out + told.err) == (code, True), (passes, told)
