"""The processes that the back end starts with `python -m`: their modules in one table, and how they are started."""

from __future__ import annotations

import os
import sys

from .fingerprint import package_folder

WORKER = "penstock.backends.tvm.compile.worker"
CUDA_COMPILER = "penstock.backends.tvm.cuda.compiler"
ENTRY_POINTS = (WORKER, CUDA_COMPILER)


def command_of(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that starts an entry point; the folder it is started in is no place to import from."""
    return sys.executable, "-P", "-m", module, *arguments


def environment() -> dict[str, str]:
    """Return the environment for such a process, which finds the package where this process has found it."""
    paths = [str(package_folder().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
