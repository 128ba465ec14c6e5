"""What `penstock run` was asked to do, and the step from the command into a rank of a group that torchrun started.

Under torchrun every process runs the same command; it becomes its rank by replacing itself with the worker, because the number of threads must
stand in the environment before Python imports anything. The options travel as JSON in the argument list.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import msgspec

from ..backends.bundle import open_bundle
from ..ir.errors import UsageError
from .control import DataSpec
from .launch import thread_environment


class RunOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Paths are absolute."""

    bundle: str
    data: DataSpec
    steps: int
    metrics: str | None
    checkpoint: str | None
    resume: str | None
    trace: str | None
    checkpoint_every: int | None
    timeout: float
    progress: bool

    def check(self) -> None:
        problems = []
        if self.steps < 1:
            problems.append(f"steps must be at least 1, got {self.steps}")
        if self.timeout <= 0:
            problems.append(f"the timeout must be positive, got {self.timeout:g}")
        if self.checkpoint_every is not None and self.checkpoint is None:
            problems.append("--checkpoint-every needs --checkpoint DIR")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            problems.append(f"--checkpoint-every must be at least 1, got {self.checkpoint_every}")
        if problems:
            raise UsageError("; ".join(problems), where="run")

    def chunks(self, first: int) -> Iterator[int]:
        """Numbers of steps between checkpoints, which fall on multiples of `checkpoint_every` and on the end."""
        done, end = first, first + self.steps
        every = self.checkpoint_every or self.steps
        while done < end:
            count = min(every - done % every if self.checkpoint_every else every, end - done)
            yield count
            done += count


def in_group() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def become_rank(options: RunOptions) -> None:
    """Replace this process by its rank of the group; does not return."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    bundle = open_bundle(options.bundle, rank if rank < world else None)
    if bundle.world_size != world:
        raise UsageError(
            f"the bundle is for {bundle.world_size} ranks, {world} were started",
            where=options.bundle,
            hint=f"start {bundle.world_size} processes",
        )
    threads = bundle.rank(rank).threads
    text = msgspec.json.encode(options).decode()
    command = [sys.executable, "-P", "-m", "penstock.runtime.join", "--threads", str(threads), "--options", text]
    os.execve(sys.executable, command, os.environ | thread_environment(threads))
