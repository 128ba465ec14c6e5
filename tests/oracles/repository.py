"""Where the repository and its folders are, for tests that read files of it; and environments of Python with a few of its requirements."""

from __future__ import annotations

import re
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def needed(requirements: Sequence[str]) -> set[str]:
    """The distributions of these requirements, and those that they need."""
    waiting, names = list(requirements), set()
    while waiting:
        match = re.match(r"[\w.-]+", waiting.pop())
        assert match is not None
        name = re.sub(r"[-_.]+", "-", match[0]).lower()
        if name not in names:
            names.add(name)
            waiting += [line for line in metadata.requires(name) or [] if ";" not in line]
    return names


def bare_python(folder: Path, requirements: Sequence[str]) -> Path:
    """Make an environment with these distributions, what they need, and nothing else; return its interpreter."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in needed(requirements):
        installed = metadata.distribution(name)
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(installed.locate_file(top))).absolute())
    return folder / "bin" / "python"
