"""What every rank is doing, in memory that the launcher shares with its workers: one line of text per rank, written without a system call.

The file has no name and is inherited as a descriptor, so nothing is left behind. A line may be read while it is written: it serves messages.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from ..ir.schedule import RECEIVES, Action

_LINE = 128
_WORDS = {
    "F": "forward of microbatch",
    "B": "backward of microbatch",
    "W": "weight gradient of microbatch",
    "P": "parts of gradients of batch",
    "N": "norm of the gradients of batch",
    "U": "update after batch",
    "AR": "reduction of the gradients of batch",
    "D": "drop of microbatch",
    "SF": "send of microbatch",
    "SP": "send of parts of gradients of batch",
    "RP": "receive of parts of gradients of batch",
    "SN": "send of the norm of the gradients of batch",
    "RN": "receive of the norm of the gradients of batch",
    "SB": "send of the gradient of microbatch",
    "RF": "receive of microbatch",
    "RB": "receive of the gradient of microbatch",
}


def describe(action: Action) -> str:
    """An action in words, for messages."""
    peer = "" if action.peer is None else f" {'from' if action.kind in RECEIVES else 'to'} rank {action.peer}"
    return f"{action} ({_WORDS[action.kind]} {action.mb}{peer})"


def describe_line(text: str) -> str:
    """A line of the board in words."""
    try:
        return describe(Action.parse(text))
    except ValueError:
        return text or "starting"


class Status:
    """One rank's line. `show` takes an action, a phase such as `starting`, or None for idle."""

    def __init__(self, descriptor: int | None, rank: int) -> None:
        self._memory = None if descriptor is None else mmap.mmap(descriptor, 0)
        self._start = rank * _LINE
        self.text = ""

    def show(self, doing: Action | str | None) -> None:
        self.text = "idle" if doing is None else str(doing)
        if self._memory is not None:
            self._memory[self._start : self._start + _LINE] = self.text.encode()[:_LINE].ljust(_LINE)


class StatusBoard:
    """All lines, on the launcher's side."""

    def __init__(self, ranks: int) -> None:
        self._file = tempfile.TemporaryFile(prefix="penstock-status-")  # noqa: SIM115 closed by close()
        os.truncate(self._file.fileno(), ranks * _LINE)
        self._memory = mmap.mmap(self._file.fileno(), ranks * _LINE)

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def read(self, rank: int) -> str:
        return self._memory[rank * _LINE : (rank + 1) * _LINE].strip(b" \0").decode("ascii", "replace")

    def close(self) -> None:
        self._memory.close()
        self._file.close()
