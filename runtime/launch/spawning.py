"""Starts of other programs that no stopped child holds up.

In: a command, as subprocess.Popen takes it. Out: the process. A child that is stopped before it has become the program
is killed after some seconds, and an error says so.

The system lets a parent wait until its child has become another program: in vfork the whole process, in fork the thread
that reads of the child's success. Here it is fork, and another thread looks at the child meanwhile. Limit: fork copies
the page tables, some milliseconds in a large program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock.runtime.messages.status import Deadline, is_stopped
from penstock.support.errors import PeerLost

_TICK_SECONDS = 0.05


def spawn(command: Sequence[str], what: str, patience: float, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a program; PeerLost about `what` where its process is stopped for `patience` seconds before it begins."""
    # It has its number as soon as it is forked, before `__init__` comes back.
    process: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)
    begun, killed = threading.Event(), threading.Event()

    def watch() -> None:
        stopped = Deadline(patience)
        while not begun.wait(_TICK_SECONDS):
            pid = getattr(process, "pid", None)
            if pid is None or not is_stopped(pid):
                stopped = Deadline(patience)
            elif stopped.is_over():
                killed.set()
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, name="start", daemon=True)
    watcher.start()
    try:
        # Popen uses vfork unless it is to set the user.
        process.__init__(command, user=os.geteuid(), **settings)  # type: ignore[misc]
    finally:
        begun.set()
        watcher.join()
    if killed.is_set():
        process.wait()
        raise PeerLost(f"{what} was stopped for {patience:g} s before it began", where="launch")
    return process
