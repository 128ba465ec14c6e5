"""Tests of commands that run out of memory: one line reports it with exit code 4, whichever part noticed, and does not
call it a bug."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.commands.parser import main
from penstock.models import write_mlp
from penstock.support.out_of_memory import ended_out_of_memory, is_out_of_memory

MIB = 1 << 20


def _ended(words: list[str], mib: int) -> tuple[int, str]:
    """Exit code and messages of a command that may have so much address space."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib * MIB, mib * MIB))

    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=limit,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlp(tmp_path_factory.mktemp("memory") / "mlp.onnx", [16, 4096, 4096, 4], batch=16)


def test_whatever_noticed_it() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert is_out_of_memory(ImportError("libx.so: failed to map segment from shared object"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    with pytest.raises(MemoryError) as wanted:
        np.empty(1 << 60, np.uint8)
    wrapped = ValueError("could not be read")
    wrapped.__cause__ = wanted.value
    assert is_out_of_memory(wrapped)
    assert is_out_of_memory(Exception("Error parsing message with type 'onnx.ModelProto': Arena alloc failed"))
    # The controls.
    assert not any(
        map(
            is_out_of_memory,
            (OSError(28, "No space left on device"), RuntimeError("shapes differ"), KeyError("memory")),
        )
    )


def test_what_a_process_wrote_last() -> None:
    assert ended_out_of_memory("Traceback (most recent call last):\n  import x\nMemoryError\n")
    assert ended_out_of_memory(
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\nFatal Python error: Aborted\n\n"
    )
    assert ended_out_of_memory("MemoryError\nsys:1: ResourceWarning: unclosed <socket.socket fd=3>\n")
    assert ended_out_of_memory(
        "MemoryError\n/a/b.py:3: ResourceWarning: subprocess 7 is still running\n  _warn(process)\n"
    )
    assert ended_out_of_memory("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1.00 GiB")
    assert ended_out_of_memory("ImportError: libx.so: failed to map segment from shared object")
    # The controls: it went on after that, or said nothing.
    assert not any(
        map(ended_out_of_memory, ("bad_alloc caught\nImportError: no such torch", "a MemoryError was caught", ""))
    )


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("std::bad_alloc"), KeyError("x")]
)
def test_what_a_command_says(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr("penstock.commands.inspecting.passes.run", fail)
    code, said = main(["passes"]), capsys.readouterr().err
    if isinstance(error, KeyError):  # the control
        assert (code, said.splitlines()[0]) == (1, "penstock: internal error: KeyError: 'x'")
    else:
        assert (code, said.startswith("penstock: error: the system gave no more memory")) == (4, True)


def test_a_command_that_gets_too_little(model: Path) -> None:
    """67 MB of weights do not fit beside the interpreter and the readers of models; with more the same command goes through."""
    words = ["plan", str(model), "--devices", "2", "--loss", "cross_entropy"]
    code, said = _ended(words, 200)
    assert code == 4, said
    assert "penstock: error: the system gave no more memory" in said
    assert "Traceback" not in said
    assert _ended(words, 4000)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["numpy", "tvm"])
def test_compile_and_run_with_any_limit(model: Path, tmp_path: Path, backend: str) -> None:
    """From hardly enough to start up to enough: a success, or one error that says why; and no workers are left waiting."""
    bundle = tmp_path / "bundle"
    compiling = [
        "compile",
        str(model),
        "--devices",
        "2",
        "--loss",
        "cross_entropy",
        "--microbatches",
        "2",
        "--backend",
        backend,
        "-o",
        str(bundle),
    ]
    running = ["run", str(bundle), "--data", "synthetic", "--steps", "2", "--timeout", "60"]
    for words, sizes in (
        (compiling, (150, 250, 400, 600, 900, 1400, 2500, 8000)),
        (running, (150, 300, 500, 800, 1200, 1800, 2500, 8000)),
    ):
        codes = [_wrong(*_ended(words, mib)) for mib in sizes]
        assert set(codes) <= {0, 4}, codes
        assert (codes[0], codes[-1]) == (4, 0), codes


def _wrong(code: int, said: str) -> int | str:
    """The exit code of a run that ended as it should; else what it said. A process of TVM that cannot even start does not
    know why. A library may end the process itself, as torch's does in some phases of its loading, and so may the
    system's loader of libraries."""
    if code == -6 and said.rstrip().endswith("std::bad_alloc"):
        return 4
    if code == 127 and said.rstrip().endswith("cannot allocate memory for thread-local data: ABORT"):
        return 4
    if code == 1 and "as it started\n  hint: was memory short?" in said:
        code = 4
    fair = code == 0 or (code == 4 and "memory" in said)
    return code if fair and "Traceback" not in said and "internal error" not in said else f"{code}: {said[-400:]}"
