"""Ranks of torch for benchmarks: processes that take turns as a contender does."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

SECONDS = 240


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TorchRanks:
    """Processes that run `target(rank, port, *arguments, pipe)`. The pipe gives numbers of steps, each of which is
    answered, and None at the end."""

    def __init__(self, target: Callable[..., None], count: int, *arguments: Any) -> None:
        context, port = multiprocessing.get_context("spawn"), free_port()
        pipes = [context.Pipe() for _ in range(count)]
        self.calls = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=target, args=(rank, port, *arguments, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def ask(self, steps: int) -> list[Any]:
        """Let all ranks take so many steps, and return their answers."""
        for call in self.calls:
            call.send(steps)
        answers = []
        for call in self.calls:
            if not call.poll(SECONDS):
                raise TimeoutError(f"torch did not answer within {SECONDS} s")
            answers.append(call.recv())
        return answers

    def close(self) -> None:
        for call in self.calls:
            call.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
