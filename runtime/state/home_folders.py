"""The folders of memory spaces, and what is to be said of them before a run.

In: a space, or a module. Out: the folder of its files, and warnings.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

from penstock.ir.cluster.spaces import FILE, Space
from penstock.ir.graph import Module

# File systems whose files lie in memory.
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


def folder_of(space: Space) -> str:
    """Return the folder of a space."""
    return space.path or tempfile.gettempdir()


def in_memory(folder: str) -> str:
    """Name the file system of a folder whose files lie in memory; nothing where they do not, or where the system does
    not say."""
    try:
        device = os.stat(folder).st_dev
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            lines = [line.split() for line in mounts]
    except OSError:
        return ""
    place = f"{os.major(device)}:{os.minor(device)}"
    kinds = {line[2]: line[line.index("-") + 1] for line in lines if "-" in line}
    kind = kinds.get(place, "")
    return kind if kind in _IN_MEMORY else ""


def home_warnings(module: Module) -> Iterator[str]:
    """Yield what is wrong with the folders of spaces that a module has homes in, as far as this host can tell."""
    names = {*(var.home for var in module.vars.values()), *(stage.home for stage in module.stages)}
    for space in () if module.cluster is None else module.cluster.spaces:
        folder = folder_of(space)
        if space.name in names and space.kind == FILE and (kind := in_memory(folder)):
            yield (
                f"memory space {space.name} is in {folder}, a {kind}, whose files lie in memory: what is at home there "
                "frees none; --spill or TMPDIR names a folder on a disk"
            )
