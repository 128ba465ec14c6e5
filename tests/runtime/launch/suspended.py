"""A machine that stands still: all processes of a run are stopped, and go on later in any order."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def tree(pids: Iterable[int]) -> list[int]:
    """Return processes with all that they started."""
    seen = list(pids)
    for pid in seen:
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{pid}/task").iterdir()
            seen += [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return seen


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def suspend(pids: Iterable[int], seconds: float, chance: random.Random, besides: Iterable[int] = ()) -> list[int]:
    """Stop the processes of a run for so long; return them. Those `besides` do not come back."""
    stopped: list[int] = []
    # What a process starts until it is stopped itself has to be stopped, too.
    while left := [pid for pid in tree(pids) if pid not in stopped]:
        chance.shuffle(left)
        for pid in left:
            send(pid, signal.SIGSTOP)
        stopped += left
    time.sleep(seconds)
    order = [pid for pid in stopped if pid not in set(besides)]
    chance.shuffle(order)
    for pid in order:
        send(pid, signal.SIGCONT)
        time.sleep(chance.uniform(0, 0.1))
    return stopped


def end(pids: Iterable[int]) -> None:
    """Kill what is left of a run, stopped or not."""
    for pid in pids:
        send(pid, signal.SIGKILL)
