"""Processes that end by themselves: wait for all of them, bounded, and leave none behind."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

Processes = Sequence[subprocess.Popen[bytes]]


def outputs(running: Processes, timeout: float) -> list[tuple[bytes, bytes]] | None:
    """Return the output of each, to stdout and to stderr; None if one took too long. None of them runs afterwards."""
    try:
        return [process.communicate(timeout=timeout) for process in running]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def failure(ended: Processes, written: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the error output of the first one that failed."""
    return next(
        (
            text.decode(errors="replace").strip()
            for process, (_, text) in zip(ended, written, strict=True)
            if process.returncode
        ),
        None,
    )
