"""The status of every rank, in memory that the launcher shares with its workers.

A rank has a line of text, the time of its last heartbeat, the steps it has finished, and the progress of a
checkpoint. All are written without a system call.

The file has no name and is inherited as a descriptor, so nothing is left behind. A line may be read while it is
written: it serves messages. The heart is a thread: it beats while kernels compute, however long, and stops with its
process. So silence means that a process is stopped, dead or starved, and never that it is slow. Times are those of the
host's monotonic clock.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.ir.action_kinds import LET_GO
from penstock.ir.schedule import RECEIVES, Action

# Text, then doubles: the time of the last heartbeat, the number of finished steps, where a save is, and the seconds
# that were computed.
_LINE = 128
# It is cut off, or filled up with zeros.
_LINE_TEXT = struct.Struct(f"{_LINE}s")
_SLOT = 192
_BEAT, _STEPS, _SAVE, _BUSY = range(_LINE // 8, _LINE // 8 + 4)
# When a run has failed, its launcher waits for a checkpoint while its bytes grow, and for so many seconds in all.
_SAVE_QUIET_SECONDS, _SAVE_SECONDS = 4.0, 30.0
# Seconds between two heartbeats.
BEAT_SECONDS = 0.25
# The longest time between two looks at a deadline.
LOOK_SECONDS = 1.0
WORDS = {
    "F": "forward of microbatch",
    "R": "forward again of microbatch",
    "B": "backward of microbatch",
    "W": "weight gradient of microbatch",
    "P": "parts of gradients of batch",
    "N": "norm of the gradients of batch",
    "U": "update after batch",
    "AR": "reduction of the gradients of batch",
    "CI": "copying in for batch",
    "CO": "copying out of batch",
    "L": "letting go of what is computed again of microbatch",
    "D": "drop of microbatch",
    "SF": "send of microbatch",
    "SP": "send of parts of gradients of batch",
    "RP": "receive of parts of gradients of batch",
    "SN": "send of the norm of the gradients of batch",
    "RN": "receive of the norm of the gradients of batch",
    "SU": "send of new weights after batch",
    "RU": "receive of new weights after batch",
    "SB": "send of the gradient of microbatch",
    "RF": "receive of microbatch",
    "RB": "receive of the gradient of microbatch",
    "HF": "handing on of microbatch",
    "HB": "handing on of the gradient of microbatch",
    "HP": "handing on of parts of gradients of batch",
    "HN": "handing on of the norm of the gradients of batch",
}


def describe(action: Action) -> str:
    """Describe an action in words, for messages."""
    peer = "" if action.peer is None else f" {'from' if action.kind in RECEIVES else 'to'} rank {action.peer}"
    if action.kind == LET_GO and action.item:
        return f"{action} (letting go of what is at home of {'batch' if action.once else 'microbatch'} {action.mb})"
    words = WORDS[action.kind] if action.once or not action.item else f"{WORDS[action.kind][:-5]}microbatch"
    return f"{action} ({words} {action.mb}{peer})"


def describe_line(text: str) -> str:
    """Describe a line of the board in words."""
    try:
        return describe(Action.parse(text))
    except ValueError:
        return text or "starting"


class Status:
    """One rank's line. `show` takes an action, a phase such as `starting`, or None for idle."""

    def __init__(self, descriptor: int | None, rank: int) -> None:
        self._memory = None if descriptor is None else mmap.mmap(descriptor, 0)
        self._start = rank * _SLOT
        # Numbers are aligned and written at once.
        self._numbers = (
            None if self._memory is None else memoryview(self._memory)[self._start : self._start + _SLOT].cast("d")
        )
        self.text = ""

    def show(self, doing: Action | str | None) -> None:
        self.text = "idle" if doing is None else str(doing)
        if self._memory is not None:
            _LINE_TEXT.pack_into(self._memory, self._start, self.text.encode())

    def finish(self, step: int) -> None:
        """Record that a step is finished; they count from 0."""
        if self._numbers is not None:
            self._numbers[_STEPS] = step + 1.0

    def spend(self, seconds: float) -> None:
        """Add seconds of computation."""
        if self._numbers is not None:
            self._numbers[_BUSY] += seconds

    def save(self, written: int, done: bool = False) -> None:
        """Record that so many bytes of a checkpoint are written. `done`: this rank's part of it is written and
        reported, so that the other ranks can finish it alone."""
        if self._numbers is not None:
            self._numbers[_SAVE] = -1.0 - written if done else 1.0 + written

    def end_save(self) -> None:
        """Record that no checkpoint is being written."""
        if self._numbers is not None:
            self._numbers[_SAVE] = 0.0

    def beat(self) -> None:
        if self._numbers is not None:
            self._numbers[_BEAT] = time.monotonic()

    def start_heart(self) -> None:
        """Start to send signs of life."""
        threading.Thread(target=self._live, name="heart", daemon=True).start()

    def _live(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_SECONDS)


class StatusBoard:
    """All lines, on the launcher's side."""

    def __init__(self, ranks: int) -> None:
        self._file = tempfile.TemporaryFile(prefix="penstock-status-")  # noqa: SIM115 closed by close()
        os.truncate(self._file.fileno(), ranks * _SLOT)
        self._memory = mmap.mmap(self._file.fileno(), ranks * _SLOT)
        self._numbers = memoryview(self._memory).cast("d")

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def read(self, rank: int) -> str:
        return self._memory[rank * _SLOT : rank * _SLOT + _LINE].strip(b" \0").decode("ascii", "replace")

    def last_beat(self, rank: int) -> float:
        """Return the time of a rank's last sign of life; 0 before the first."""
        return self._numbers[rank * _SLOT // 8 + _BEAT]

    def beat(self, rank: int) -> None:
        """Record a sign of life of a rank that has just been started."""
        self._numbers[rank * _SLOT // 8 + _BEAT] = time.monotonic()

    def busy(self, rank: int) -> float:
        """Return the seconds that a rank has computed."""
        return self._numbers[rank * _SLOT // 8 + _BUSY]

    def save_of(self, rank: int) -> float:
        """Return how far the save of a rank is: 0 when there is none, less than 0 when its own part is done. Another
        number means that it got on."""
        return self._numbers[rank * _SLOT // 8 + _SAVE]

    def last_step(self) -> int | None:
        """Return the newest step that a rank has finished in this run."""
        newest = max(int(self._numbers[start // 8 + _STEPS]) for start in range(0, len(self._memory), _SLOT))
        return newest - 1 if newest else None

    def close(self) -> None:
        self._numbers.release()
        self._memory.close()
        self._file.close()


class Patience:
    """A watch over ranks that are silent for too long. Time in which the watcher itself did not look does not count: it
    slept, its caller was busy, or the machine stood still. No limit (0) is endless patience."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._since = self._looked = time.monotonic()

    def look(self) -> None:
        """Record the time of this check. The caller checks several times per second, and before every `over`."""
        now = time.monotonic()
        if now - self._looked > self.limit / 3:
            self._since = now
        self._looked = now

    def over(self, heard: float) -> bool:
        """Return whether a rank that was last heard at a time has been silent for too long."""
        return 0 < self.limit < self._looked - max(heard, self._since)


class Deadline:
    """A span of seconds in which the process that waits runs itself. Time in which it did not look counts for little:
    it was stopped, or the machine stood still, and so did what it waits for."""

    def __init__(self, seconds: float) -> None:
        self._left, self._looked = seconds, time.monotonic()

    def left(self) -> float:
        """Return the seconds that are left. The caller asks at least every LOOK_SECONDS."""
        now = time.monotonic()
        self._left -= min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        return self._left

    def is_over(self) -> bool:
        return self.left() <= 0


def await_saves(look: Callable[[], Sequence[float]]) -> None:
    """Wait for a checkpoint that is being written though the run has come to its end. `look` returns how far the saves
    are of the ranks that can still finish it."""
    whole, quiet = Deadline(_SAVE_SECONDS), Deadline(_SAVE_QUIET_SECONDS)
    seen: list[float] = []
    while any(progress := list(look())):
        if progress != seen:
            seen, quiet = progress, Deadline(_SAVE_QUIET_SECONDS)
        if quiet.is_over() or whole.is_over():
            return
        time.sleep(0.02)


def is_stopped(pid: int) -> bool:
    """Return whether a process is there and does not run, because of a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
