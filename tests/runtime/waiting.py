"""Waits for what other processes do. Each is bounded."""

from __future__ import annotations

import time
from pathlib import Path

BOUND = 15.0


def is_running(pid: int) -> bool:
    """Return whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=BOUND):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()
