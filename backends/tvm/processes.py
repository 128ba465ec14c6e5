"""The environment variables of processes that make code."""

from __future__ import annotations

import os

from .fingerprint import package_folder


def environment() -> dict[str, str]:
    """Return the environment for such a process, which finds the package where this process has found it."""
    paths = [str(package_folder().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
