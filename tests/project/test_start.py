"""Help is there before any heavy library is: torch, TVM and ONNX are imported by commands that need them, when they do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from penstock.commands.parser import command_line
from penstock.models import write_mlp

HEAVY = ("torch", "tvm", "onnx", "onnxruntime", "numpy", "networkx", "highspy")
# Of Python's own library what takes a third as long as all that the list of commands needs.
SLOW = ("dataclasses", "inspect", "tempfile", "pathlib", "hashlib", "secrets")
CODE = """
import contextlib, io, json, sys
from penstock.commands.parser import main
for words in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(words)
print(json.dumps([name for name in json.loads(sys.argv[2]) if name in sys.modules]))
"""

# What the environment loads for itself, before the first line of a program, is not counted: python -S loads none of it.
PATH = f"import sys; sys.path[:] = {sys.path!r}"

# Without looking for garbage, and without taking apart what was imported, which would take as long again.
BEGIN = "import gc, json, os, sys\ngc.disable()"
END = f"print(json.dumps([n for n in {HEAVY!r} if n in sys.modules]), flush=True)\nos._exit(0)"


def loaded_by(*commands: list[str], among: tuple[str, ...] = HEAVY) -> set[str]:
    """The libraries among these that a process has after these commands."""
    words = [sys.executable, "-S", "-c", PATH + CODE, json.dumps(commands), json.dumps(among)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_loads_nothing_heavy() -> None:
    names = next(action for action in command_line()._actions if action.dest == "command").choices
    assert names is not None
    assert len(list(names)) > 10
    assert loaded_by(["--help"], ["--version"], *([name, "--help"] for name in names)) == set()


def test_the_list_of_commands_loads_nothing_slow() -> None:
    assert loaded_by(["--help"], among=SLOW) == set()
    # The control: arguments of a command are settings, which are dataclasses.
    assert "dataclasses" in loaded_by(["run", "--help"], among=SLOW)


def test_what_a_command_needs_is_seen() -> None:
    """The control: a model that is read, or would be, takes the reader of ONNX files, and still neither torch nor TVM."""
    found = loaded_by(["plan", "no-such-model.onnx", "--devices", "2"])
    assert "onnx" in found
    assert not {"torch", "tvm", "onnxruntime"} & found


def test_planning_loads_neither_torch_nor_tvm(tmp_path: Path) -> None:
    """The control: measuring the way to a disk takes torch."""
    model = str(write_mlp(tmp_path / "mlp.onnx", [4, 8, 8, 4], batch=4))
    words = ["plan", model, "--loss", "mse", "--batch", "8", "--schedule", "1f1b"]
    assert "onnx" in (found := loaded_by([*words, "--devices", "2"]))
    assert not {"torch", "tvm", "onnxruntime"} & found
    assert "torch" in loaded_by([*words, "--offload", "state", "--devices", "2"])


def test_launchers_load_neither_torch_nor_tvm_and_ranks_load_torch_alone() -> None:
    """What opens a job starts at once, and what forks its ranks does not wait for TVM's Python. The control: compiling takes TVM."""

    def after(code: str) -> set[str]:
        words = [sys.executable, "-c", f"{BEGIN}\n{code}\n{END}"]
        return set(json.loads(subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout))

    assert after("import penstock.runtime.job.job, penstock.runtime.job.run") == {"numpy"}
    ranks = "import penstock.runtime.worker.worker\nfrom penstock.backends.registry import backend_of\nbackend_of('tvm').prepare()"
    assert after(ranks) == {"numpy", "torch"}
    assert "tvm" in after("import penstock.backends.tvm.lower.lower")
