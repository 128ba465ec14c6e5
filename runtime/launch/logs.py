"""The output of the processes of ranks besides their reports: messages of libraries, mostly.

In: files that they write into. Out: lines on stderr, each with its rank and stage:

    [rank 1, stage 1] UserWarning: ...

`--log-ranks` chooses the ranks: `all`, `none`, or numbers between commas. Of the others, the end is shown when they die
without a report. A process writes into a file of its own, so that no reader holds it up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from penstock.support.errors import UsageError
from penstock.support.terminal import is_terminal, write_to_people

DEFAULT = "0"
_EVERY_SECONDS = 0.2
_CHUNK, _LONGEST_LINE = 1 << 16, 1 << 14
_TAIL_LINES = 12


def stages_in_words(stages: Sequence[int]) -> str:
    """Name the stages of a rank."""
    return f"stage{'s' if len(stages) > 1 else ''} {' '.join(map(str, stages))}"


def log_ranks_problems(text: str) -> list[str]:
    """List the problems of a choice of ranks, whatever their number."""
    known = text in ("all", "none") or all(
        part.isascii() and part.isdecimal() and len(part) < 10 for part in text.split(",")
    )
    return [] if known else [f"--log-ranks must be all, none, or numbers such as 0,2, got {text[:100]!r}"]


def chosen_ranks(text: str, world: int) -> frozenset[int]:
    """Return the ranks of a bundle that are meant."""
    if problems := log_ranks_problems(text):
        raise UsageError(problems[0])
    if text in ("all", "none"):
        return frozenset(range(world) if text == "all" else ())
    ranks = frozenset(map(int, text.split(",")))
    if ranks - {0} and max(ranks) >= world:
        raise UsageError(f"--log-ranks {text}: the bundle has ranks 0 to {world - 1}")
    return ranks


def tail(log: IO[bytes]) -> str:
    """Return the last lines of a file that a process wrote into, to stand under an error."""
    log.seek(0)
    return "\n".join("  | " + line for line in log.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:])


class Follower:
    """A thread that shows what is written into the `files` of chosen `ranks`, each line with its rank and stages, until
    it is closed."""

    def __init__(
        self, files: Mapping[int, IO[bytes]], stages: Mapping[int, Sequence[int]], ranks: Collection[int]
    ) -> None:
        self._files = {
            f"[rank {rank}, {stages_in_words(stages[rank])}] ": file.fileno()
            for rank, file in files.items()
            if rank in ranks
        }
        self._read = dict.fromkeys(self._files, 0)
        self._rest = dict.fromkeys(self._files, b"")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="logs", daemon=True)
        if self._files:
            self._thread.start()

    def close(self) -> None:
        """Show the lines that are left. The files are the caller's to close, after this."""
        if self._files and not self._ended.is_set():
            self._ended.set()
            self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            self._show(False)
        self._show(True)

    def _show(self, last: bool) -> None:
        for prefix, file in self._files.items():
            while data := os.pread(file, _CHUNK, self._read[prefix]):
                self._read[prefix] += len(data)
                *lines, self._rest[prefix] = (self._rest[prefix] + data).split(b"\n")
                if len(self._rest[prefix]) > _LONGEST_LINE:
                    lines.append(self._rest[prefix])
                    self._rest[prefix] = b""
                self._print(prefix, lines)
            if last and self._rest[prefix]:
                self._print(prefix, [self._rest[prefix]])

    def _print(self, prefix: str, lines: Collection[bytes]) -> None:
        # A line of progress may stand there.
        clear = "\r\x1b[K" if is_terminal() else ""
        text = "".join(f"{clear}{prefix}{line.decode('utf-8', 'replace').rstrip()}\n" for line in lines)
        write_to_people(text)
