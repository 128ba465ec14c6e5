"""Two processes that speak with each other: how a test starts them, and what became of them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..waiting import wait_until

FORKS = multiprocessing.get_context("forkserver")
# Per rank the exit code and what it said, and the time it took after the start.
Outcome = tuple[list[int | None], list[str], float]


def pair_of(peers: ModuleType, folder: Path) -> Callable[..., Outcome]:
    """Return run(scenario), which lets two processes `speak` as a module says; the first one writes its port first."""
    logs = [folder / "rank0", folder / "rank1"]

    def port_of() -> int | None:
        text = logs[0].read_text() if logs[0].exists() else ""
        return int(text.splitlines()[0]) if "\n" in text else None

    def run(scenario: str, seconds: float = 40) -> Outcome:
        processes = [FORKS.Process(target=peers.speak, args=(scenario, 0, 0, logs[0]))]
        processes[0].start()
        try:
            assert wait_until(port_of, seconds)
            processes.append(FORKS.Process(target=peers.speak, args=(scenario, 1, port_of(), logs[1])))
            processes[1].start()
            started = time.monotonic()
            for process in processes:
                process.join(seconds)
            took = time.monotonic() - started
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [process.exitcode for process in processes], [log.read_text() for log in logs], took

    return run
