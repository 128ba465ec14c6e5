"""What a case of malformed input is made of: the good files it is made from, and the command that must refuse it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DEEP = 100_000


@dataclass(frozen=True)
class Good:
    """Files that are right: a model, its training bundle for two ranks and one for inference, data, and a checkpoint."""

    model: Path
    bundle: Path
    forward: Path
    data: Path
    checkpoint: Path


@dataclass(frozen=True)
class Case:
    """`make` writes into a folder of its own and gives the words of the command line."""

    name: str
    make: Callable[[Path, Good], list[str]]
    environment: dict[str, str] = field(default_factory=dict)


def copy_of(source: Path, folder: Path) -> Path:
    target = folder / source.name
    shutil.copytree(source, target)
    return target
