"""Helper processes that end by themselves: the caller waits for all of them, with a timeout, and leaves none behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

Processes = Sequence[subprocess.Popen[bytes]]


def start(
    command: Sequence[str], environment: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a process whose `outputs` are read at its end. It reads nothing; with a pipe, its input ends when they are
    waited for. It leads a group of its own, so that processes that it started can be ended with it."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )


def outputs(running: Processes, timeout: float) -> list[tuple[bytes, bytes]] | None:
    """Return the stdout and stderr of each process; None if one took too long. None of them runs afterwards."""
    try:
        return [process.communicate(timeout=timeout) for process in running]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for process in running:
            if process.poll() is None:
                end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure(ended: Processes, streams: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the stderr of the first process that failed."""
    return next(
        (
            text.decode(errors="replace").strip()
            for process, (_, text) in zip(ended, streams, strict=True)
            if process.returncode
        ),
        None,
    )
