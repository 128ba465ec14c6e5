"""The libraries of straw, built once; without g++ or TVM's CUDA runtime, tests are skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from . import libraries

Program = Callable[..., dict[str, Any]]


def _missing() -> str:
    if shutil.which("g++") is None:
        return "g++ is not on the PATH"
    package = find_spec("tvm")
    folder = None if package is None or package.origin is None else Path(package.origin).parent / "lib"
    if folder is None or not (folder / "libtvm_runtime_cuda.so").exists():
        return "TVM's libtvm_runtime_cuda.so is not installed"
    return ""


@pytest.fixture(scope="session")
def straw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the libraries."""
    if reason := _missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("straw")
    libraries.build(folder)
    return folder


def program_of(straw: Path, cache: Path) -> Program:
    """Return a function that runs a program, `gpu.straw.training` among them, and returns what it says."""

    def run(name: str, *arguments: object, devices: int = 1, timeout: float = 500, **variables: str) -> dict[str, Any]:
        environment = {**libraries.environment(straw, devices), "PENSTOCK_CACHE": str(cache), **variables}
        environment.pop("PYTEST_CURRENT_TEST", None)
        command = [sys.executable, "-m", name, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said

    assert os.path.isabs(straw)
    return run


@pytest.fixture
def program(straw: Path, tmp_path: Path) -> Program:
    """A function that runs programs with a cache of this test's own."""
    return program_of(straw, tmp_path / "cache")
