"""One clock for all ranks of a group.

In: the group's meeting point. Out: the seconds to add to this rank's monotonic clock to get that of rank 0, and the
error of that.

Ranks on the host of rank 0 have its clock. Every other one asks rank 0 for its time a few times, one rank after the
other. An answer was given between question and arrival, so the middle of the two is off by at most half the time
between them. The quickest answer counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .group import RankGroup

_ROUNDS = 8


class Offset(NamedTuple):
    """The difference to the clock of rank 0: seconds to add, and the largest error."""

    seconds: float
    error: float


def measure_offset(group: RankGroup, clock: Callable[[], float] = time.monotonic, host: str | None = None) -> Offset:
    """Measure the offset; all ranks call this together."""
    hosts = group.gather("clock/host", (host or _host_of_clock()).encode())
    others = [rank for rank in range(group.world) if hosts[rank] != hosts[0]]
    offset = Offset(0.0, 0.0)
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
                if number == 0 or (after - before) / 2 < offset.error:
                    offset = Offset(answer - (before + after) / 2, (after - before) / 2)
    return offset


def _host_of_clock() -> str:
    """Return the id of the system's start: monotonic clocks count from it, so the same start is the same clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import socket

        return socket.gethostname()
