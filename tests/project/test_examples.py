"""The examples, run as a user would: as programs, from another folder. Each checks itself what it shows; the controls make what it shows untrue, and it must notice."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from oracles.repository import ROOT

from penstock.models import write_bert

EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
CANNOT_RUN = 77

# A form of each that takes seconds, in which it still holds: interpreted, since compiling takes longest.
SMALL = {
    "bert": ["--steps", "100", "--lr", "0.01", "--layers", "1", "--width", "32", "--backend", "numpy"],
    "cpu_and_gpu": ["--steps", "20", "--layers", "1", "--width", "32", "--backend", "numpy"],
    "gpt": [
        *[
            "--steps",
            "160",
            "--lr",
            "0.003",
            "--layers",
            "1",
            "--width",
            "32",
            "--positions",
            "16",
            "--backend",
            "numpy",
            "--text",
        ],
        str(ROOT / "docs" / "limits.md"),
    ],
    "generate": ["--backend", "numpy"],
    "hosts": ["--steps", "4", "--backend", "numpy"],
    "hugging_face": ["--steps", "160", "--backend", "numpy"],
    "long_sequence": ["--positions", "256", "--ranks", "2", "--limit", "0", "--backend", "numpy"],
    "passes": ["--every", "9"],
    "resnet": ["--steps", "60", "--lr", "0.02", "--width", "8", "--backend", "numpy"],
    "resume": ["--steps", "8", "--width", "32", "--plans", "the same plan", "three stages", "--backend", "numpy"],
    "run_all": ["passes"],
    "serve": ["--requests", "40", "--layers", "1", "--width", "32", "--backend", "numpy"],
    "skips_and_ties": ["--steps", "20", "--models", "unet", "--backend", "numpy"],
}
# Of these, those that `make test` has time for.
QUICK = ("passes", "resume", "serve", "skips_and_ties")


def run(
    name: str, arguments: list[str], folder: Path, seconds: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def held(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """It ran, showed what it says, and left nothing behind."""
    if done.returncode == CANNOT_RUN:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert not list(folder.iterdir())


def outside_of_the_api(source: str) -> list[str]:
    """What a program imports of penstock that is neither `import penstock as ps` nor a small model to play with, as in the README."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.startswith("penstock") and name not in ("penstock", "penstock.models")]
    return found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_the_smallest_form_holds(name: str, tmp_path: Path) -> None:
    held(run(name, SMALL[name], tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "run_all"])
def test_the_whole_form_holds(name: str, tmp_path: Path) -> None:
    held(run(name, [], tmp_path, seconds=600), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_examples_say_what_they_are_and_use_the_public_api_alone(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert name in SMALL
    assert "description=__doc__" in source
    assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert outside_of_the_api(source) == []


def test_all_are_run_where_none_is_named(tmp_path: Path) -> None:
    """As `make examples` does it. The control: one that fails."""
    shutil.copy(EXAMPLES / "run_all.py", tmp_path)
    (tmp_path / "fine.py").write_text("print(1)\n")
    (tmp_path / "elsewhere.py").write_text(
        f"import sys\nprint('no such device', file=sys.stderr)\nsys.exit({CANNOT_RUN})\n"
    )

    def run_all(*names: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "run_all.py", *names],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = run_all()
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\| (\w+) \| \d+ \| (.*) \|$", done.stdout, re.MULTILINE) == [
        ("elsewhere", "not here: no such device"),
        ("fine", "ok"),
    ]
    (tmp_path / "wrong.py").write_text("raise SystemExit('losses differ')\n")
    assert run_all().returncode == run_all("fine", "wrong").returncode == 1
    assert run_all("fine").returncode == 0
    assert "unknown: nothing; there are elsewhere, fine, wrong" in run_all("fine", "nothing").stderr


def test_imports_beside_the_public_api_are_noticed() -> None:
    source = "import penstock as ps\nfrom penstock.ir import graph\nimport penstock.api\nimport numpy"
    assert outside_of_the_api(source) == ["penstock.ir", "penstock.api"]


def test_the_resumed_run_is_told_from_one_of_another_checkpoint(tmp_path: Path) -> None:
    """The control: the checkpoint before the one that the losses are compared from."""
    early = ["--plans", "the same plan", "--out", "out", "--checkpoint", "out/checkpoints/step-000002"]
    done = run("resume", [*SMALL["resume"], *early], tmp_path)
    assert done.returncode == 1
    assert "losses are not those of the run that was not interrupted: the same plan" in done.stderr


def test_answers_of_another_model_are_noticed(tmp_path: Path) -> None:
    path = write_bert(tmp_path / "other.onnx", layers=1, width=32, heads=4, vocab=1000, positions=64, classes=8, seed=1)
    done = run("serve", [*SMALL["serve"], "--model", str(path)], tmp_path)
    assert done.returncode == 1
    assert "answers are not onnxruntime's: stream, threads, latency" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "bert",
            ["--steps", "4", "--layers", "1", "--width", "32"],
            "pre-training learned no more than how frequent each word is; fewer than 90 % are right",
        ),
        ("cpu_and_gpu", ["--steps", "2", "--layers", "1", "--width", "32"], "the loss did not fall"),
        (
            "gpt",
            ["--steps", "4", "--layers", "1", "--width", "32", "--positions", "32"],
            "no more than how frequent each byte is",
        ),
        ("gpt", ["--lr", "0.2", "--steps", "20", "--layers", "1", "--width", "64", "--positions", "32"], "2bw ended"),
        ("long_sequence", ["--positions", "512", "--ranks", "2", "--limit", "400"], "was not stopped by 400 MiB"),
        ("resnet", ["--steps", "2", "--width", "8"], "fewer than 90 % are right"),
        ("skips_and_ties", ["--steps", "5", "--models", "unet"], "unet: losses fell too little"),
    ],
)
def test_what_does_not_hold_is_noticed(name: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run(name, arguments, tmp_path)
    assert done.returncode == 1, done.stdout
    assert said in done.stderr


def test_what_cannot_run_here_says_so(tmp_path: Path) -> None:
    """Without the programs that make namespaces."""
    done = run("hosts", [], tmp_path, PATH=str(tmp_path))
    assert done.returncode == CANNOT_RUN
    assert "cannot make network namespaces here, which needs" in done.stderr


def test_a_pass_that_did_not_run_is_named(tmp_path: Path) -> None:
    done = run("passes", ["no-such-pass"], tmp_path)
    assert done.returncode == 1
    assert "no pass 'no-such-pass' ran, there are autodiff, " in done.stderr
