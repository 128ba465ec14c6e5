"""What a committed benchmark writes when it is run small, by itself, as a user would run it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def run_benchmark(
    name: str, words: Sequence[str], folder: Path, timeout: float = 300
) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """The report of benchmarks/NAME.py as it reads from its JSON file, and how the process ended."""
    report = folder / "report.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), *words, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text()), done
