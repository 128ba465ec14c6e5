"""A case of malformed input: the good files it is made from, and the command that must refuse it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DEEP = 100_000
# What nobody wrote may look as if we had: a name with a colour, a bell, the title of a window, a return, a turn of direction, and a line of its own.
FORGED = "penstock: error: forged"
HOSTILE = f"a\x1b[31mb\x1b]0;c\x07\r\x9b\u202e\n{FORGED}"


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


def obeyed(said: str) -> str:
    """The first thing in a message that a terminal would obey, or a line that nobody of ours wrote; empty where there is none."""
    control = next((repr(c) for c in said if c != "\n" and not c.isprintable()), "")
    return control or next((line for line in said.split("\n") if line.startswith(FORGED)), "")


def copy_of(source: Path, folder: Path) -> Path:
    target = folder / source.name
    shutil.copytree(source, target)
    return target
