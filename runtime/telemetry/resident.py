"""The resident memory of this process: now, at most so far, and what of it belongs to other ranks. Linux; 0 elsewhere.

Ranks of a host read blocks of collectives where they lie, in memory of the rank that made them
(runtime/transport/shared_board.py). The system counts such pages for every process that has touched them. Here they
count for their owner alone, who has them mapped for writing.
"""

from __future__ import annotations

from pathlib import Path

# The name of memory that ranks of a host read, as the system shows it.
BOARD = "penstock-board"
READ, WRITTEN = "r--s", "rw-s"


def peak_bytes() -> int:
    """Return the largest resident size of this process; 0 where the system does not say. getrusage would count the
    parent's before exec."""
    return _status_bytes("VmHWM")


def resident_bytes() -> int:
    """Return the resident size of this process; 0 where the system does not say."""
    return _status_bytes("VmRSS")


def borrowed_bytes(process: int | str = "self") -> int:
    """Return how much of the resident size of a process is memory of other ranks."""
    return board_bytes(process, READ)


def board_bytes(process: int | str, mapped: str) -> int:
    """Return the resident bytes of memory that ranks of a host read, which a process has mapped in one way: its own to
    be WRITTEN, that of others to be READ."""
    total, counts = 0, False
    for line in _lines(process, "smaps"):
        words = line.split()
        if len(words) > 4 and "-" in words[0]:
            counts = words[1] == mapped and words[5:6] == [f"/memfd:{BOARD}"]
        elif counts and words[0] == "Rss:":
            total += int(words[1]) * 1024
    return total


def _status_bytes(name: str) -> int:
    lines = _lines("self", "status")
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _lines(process: int | str, file: str) -> list[str]:
    try:
        return Path(f"/proc/{process}/{file}").read_text().splitlines()
    except OSError:
        return []
