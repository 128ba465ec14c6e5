"""Counts from /proc of the resources that a process and its children hold, to be compared before and after work that
should leave nothing behind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def below(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        for task in _listed(Path(f"/proc/{parent}/task")):
            found += map(int, _text(Path(f"/proc/{parent}/task/{task}/children")).split())
    return found


def held(pid: int | None = None) -> Counter[str]:
    """What is held now: open descriptors by kind, threads by the name of their process, processes, mapped pieces of memory, files in /dev/shm that are named like penstock or
    like one of the processes; others may come and go meanwhile."""
    found: Counter[str] = Counter()
    pids = below(os.getpid() if pid is None else pid)
    for each in pids:
        folder = Path(f"/proc/{each}")
        found["processes"] += 1
        found[f"threads of {_text(folder / 'comm').strip()}"] += len(_listed(folder / "task"))
        found["maps"] += len(_text(folder / "maps").splitlines())
        for number in _listed(folder / "fd"):
            try:
                kind = os.readlink(folder / "fd" / number)
            except OSError:  # the one that lists the folder
                continue
            found[f"descriptors of {kind.partition(':')[0] if not kind.startswith('/') else 'files'}"] += 1
    names = ["penstock", *map(str, pids)]
    found["files in /dev/shm"] = sum(any(name in file for name in names) for file in _listed(Path("/dev/shm")))
    return found


def private_bytes(pids: Sequence[int]) -> int:
    """Memory of processes that belongs to them alone and is no file."""
    total = 0
    for pid in pids:
        rows = dict(line.split(":", 1) for line in _text(Path(f"/proc/{pid}/status")).splitlines())
        total += int(rows.get("RssAnon", "0 kB").split()[0]) * 1024
    return total


def grown(before: Counter[str], after: Counter[str], maps: int = 0) -> dict[str, int]:
    """What there is more of; allocators may keep so many more maps."""
    return {
        what: after[what] - before[what]
        for what in after
        if after[what] > before[what] + (maps if what == "maps" else 0)
    }


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # the process has ended meanwhile
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
