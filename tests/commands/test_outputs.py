"""Places that commands write to: what is wrong with one is said before the work, and nothing is said about reading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.commands.parser import main
from penstock.models import write_mlp

# What is said of files that are read.
READING = re.compile(r"no such file|give the path|give a (file|directory|folder) that|expected an? |writes? (such|one)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    write_mlp(folder / "m.onnx", [4, 4, 2], batch=2)
    common = ["compile", str(folder / "m.onnx"), "--backend", "numpy", "-o"]
    assert main([*common, str(folder / "i")]) == 0
    assert main([*common, str(folder / "b"), "--loss", "mse", "--lr", "0.1"]) == 0
    (folder / "file").write_text("a file")
    return folder


COMMANDS = {
    "compile -o": "compile {f}/m.onnx --backend numpy -o {out}",
    "plan --dump-ir": "plan {f}/m.onnx --dump-ir {out}",
    "run --metrics": "run {f}/b --steps 1 --metrics {out}",
    "run --trace": "run {f}/b --steps 1 --trace {out}",
    "run --checkpoint": "run {f}/b --steps 1 --checkpoint {out}",
    "infer --output": "infer {f}/i --data synthetic --output {out}",
    "simulate --gantt": "simulate {f}/b --gantt {out}",
    "simulate --trace": "simulate {f}/b --trace {out}",
    "opt -o": "opt {f}/b/reference.ir -p decompose -o {out}",
    "inspect --html": "inspect {f}/b --html {out}",
    "inspect --export": "inspect {f}/b --export {out}.dot",
    "export --safetensors": "export {f}/b --safetensors {out}",
    "doctor --cluster-out": "doctor --cluster-out {out}",
    "demo -o": "demo -o {out}",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=list(COMMANDS))
def test_a_place_below_a_file_is_named_without_hints_about_reading(
    command: str, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"{built}/file/x"
    code = main(command.format(f=built, out=out).split())
    printed = capsys.readouterr()
    assert code == 2
    message = printed.err[printed.err.index("penstock: error:") :]
    assert f"{built}/file" in message
    assert not READING.search(message)
    assert "Errno" not in message
    assert not printed.out, "nothing was worked out before"


@pytest.mark.parametrize(
    "words", [["simulate", "{f}/b", "--gantt"], ["simulate", "{f}/b", "--trace"], ["opt", "{f}/b/reference.ir", "-p", "decompose", "-o"]]
)  # fmt: skip
def test_folders_of_results_are_made(words: list[str], built: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "result"
    assert main([word.format(f=built) for word in words] + [str(out)]) == 0
    assert out.stat().st_size


def test_what_is_read_has_hints_about_reading(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control: the words that are looked for are those of files that are read."""
    for command in ("compile {f}/none.onnx -o {f}/c", "opt {f}/none.ir -p fuse", "run {f}/b --resume {f}/none"):
        assert main(command.format(f=built).split()) == 2
        assert READING.search(capsys.readouterr().err)
