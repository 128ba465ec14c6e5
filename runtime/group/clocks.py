"""One clock for all ranks of a group. In: the group's meeting point. Out: what to add to this rank's monotonic clock to get
that of rank 0, and how wrong that may be.

Ranks on the host of rank 0 have its clock. Every other one asks rank 0 for its time a few times, one rank after the other: an answer was
given between question and arrival, so the middle of the two is off by at most half the time between them, and the quickest answer counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .group import RankGroup

_ROUNDS = 8


class Offset(NamedTuple):
    """Seconds to add, and the largest error."""

    seconds: float
    error: float


def measure_offset(group: RankGroup, clock: Callable[[], float] = time.monotonic, host: str | None = None) -> Offset:
    """All ranks call this together."""
    hosts = group.gather("clock/host", (host or _host_of_clock()).encode())
    others = [rank for rank in range(group.world) if hosts[rank] != hosts[0]]
    found = Offset(0.0, 0.0)
    for rank in others:
        for number in range(_ROUNDS):
            key = f"clock/{rank}/{number}"
            if group.rank == 0:
                group.get(f"{key}/asked", f"rank {rank} to ask for the time")
                group.put(f"{key}/answer", repr(clock()).encode())
            elif group.rank == rank:
                before = clock()
                group.put(f"{key}/asked", b"")
                answer = float(group.get(f"{key}/answer", "the time of rank 0"))
                after = clock()
                if number == 0 or (after - before) / 2 < found.error:
                    found = Offset(answer - (before + after) / 2, (after - before) / 2)
    return found


def _host_of_clock() -> str:
    """Monotonic clocks count from the start of the system: the same start, the same clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import socket

        return socket.gethostname()
