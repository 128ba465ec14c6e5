"""Runs of committed benchmarks: small, in a process of their own, as a user would run them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oracles.repository import BENCHMARKS


def run_benchmark(
    name: str, words: Sequence[str], folder: Path, timeout: float = 300
) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """Run benchmarks/NAME.py; return its report as read from its JSON file, and the completed process."""
    report = folder / "report.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text()), done
