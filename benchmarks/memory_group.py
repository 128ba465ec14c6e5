"""Memory cgroups of Linux, version 1: the kernel ends processes that take more than their group may have.

In: a limit. Out: a group that processes enter by themselves. It needs the rights of root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup/memory")


class MemoryGroup:
    """A group of processes, with a limit of bytes if there is one. Files that the system keeps for them count, too, but
    make room before a process is ended."""

    def __init__(self, name: str, limit: int = 0) -> None:
        self.path = CGROUPS / f"penstock-{os.getpid()}-{name}"
        self.path.mkdir()
        if limit:
            (self.path / "memory.limit_in_bytes").write_text(str(limit))

    @property
    def kills(self) -> int:
        """The processes that the kernel has ended."""
        rows = dict(line.split() for line in (self.path / "memory.oom_control").read_text().splitlines())
        return int(rows.get("oom_kill", 0))

    @property
    def resident(self) -> int:
        """The bytes that its processes hold."""
        return held_in(self.path)

    def end(self) -> None:
        """Kill the processes that are left."""
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:  # processes that were ended are still leaving
                time.sleep(0.1)


def held_in(group: str | Path) -> int:
    """Return the bytes that processes of a group hold, with those of the kernel for them, as the limit counts these,
    too. What the system keeps of files makes room, and is none of it."""
    stat = dict(line.split() for line in (Path(group) / "memory.stat").read_text().splitlines())
    kernel = int((Path(group) / "memory.kmem.usage_in_bytes").read_text())
    return int(stat["rss"]) + int(stat["mapped_file"]) + kernel


def enter(group: str | Path) -> None:
    """Put this process into a group."""
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
