"""What `penstock run` was asked to do. The options travel to a rank of a group as JSON in its argument list.

Everything that can be known to fail is refused before training starts, the places to write to among
it: each is tried without leaving a trace.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import msgspec

from penstock.ir.graph import NORM, Module
from penstock.runtime.data.files import absolute_source
from penstock.runtime.data.samples import LAST, SYNTHETIC, WRAP
from penstock.runtime.group.hosts import in_group, place_of
from penstock.runtime.group.trust import trust_problems
from penstock.runtime.messages.control import DataSpec, SaveCommand
from penstock.runtime.telemetry.sinks import sink_problems
from penstock.support.errors import UsageError
from penstock.support.paths import directory_problem, file_problem, is_inside

from .local import HEARTBEAT
from .logs import DEFAULT, log_ranks_problems

# Milliseconds of a timeout have to fit into 32 bits in some system calls.
LONGEST_TIMEOUT = 1e6
# Steps times microbatches have to fit into 64 bits.
_MOST_STEPS = 10**12
# A busy machine may hold a process up for so long.
SHORTEST_HEARTBEAT = 1.0
NAN_POLICIES = ("stop", "skip", "warn")
MOST_RESTARTS = 1000


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
    lr: float | None = None
    rate: str | None = None
    heartbeat: float = HEARTBEAT
    nan: str = "warn"
    max_restarts: int = 0
    evaluation: DataSpec | None = None
    evaluate_every: int | None = None
    log: tuple[str, ...] = ()
    keep_last: int | None = None
    checkpoint_wait: bool = False
    log_ranks: str = DEFAULT
    secret: str | None = None
    tls: str | None = None
    elastic: bool = False

    def check(self) -> None:
        problems = []
        if not 1 <= self.steps <= _MOST_STEPS:
            problems.append(f"steps must be 1 to {_MOST_STEPS}, got {self.steps}")
        problems += timeout_problems(self.timeout, self.heartbeat) + data_problems(self.data)
        if self.checkpoint_every is not None and self.checkpoint is None:
            problems.append("--checkpoint-every needs --checkpoint DIR")
        flags = {
            "--keep-last": self.keep_last is not None,
            "--checkpoint-wait": self.checkpoint_wait,
            "--elastic": self.elastic,
        }
        for flag, given in flags.items():
            if given and self.checkpoint is None:
                problems.append(f"{flag} needs --checkpoint DIR")
        if self.keep_last is not None and not 1 <= self.keep_last <= _MOST_STEPS:
            problems.append(f"--keep-last must be 1 to {_MOST_STEPS}, got {self.keep_last}")
        if self.checkpoint_every is not None and not 1 <= self.checkpoint_every <= _MOST_STEPS:
            problems.append(f"--checkpoint-every must be 1 to {_MOST_STEPS}, got {self.checkpoint_every}")
        if self.evaluate_every is not None and self.evaluation is None:
            problems.append("--eval-every needs --eval-data FILE")
        if self.evaluate_every is not None and not 1 <= self.evaluate_every <= _MOST_STEPS:
            problems.append(f"--eval-every must be 1 to {_MOST_STEPS}, got {self.evaluate_every}")
        if self.nan not in NAN_POLICIES:
            problems.append(f"--nan must be {', '.join(NAN_POLICIES)}, got {self.nan!r}")
        if not 0 <= self.max_restarts <= MOST_RESTARTS:
            problems.append(f"--max-restarts must be 0 to {MOST_RESTARTS}, got {self.max_restarts}")
        if self.max_restarts and in_group():
            problems.append(
                "--max-restarts is for local runs; here the launcher starts again (torchrun --max-restarts)"
            )
        for flag, path in (("--secret", self.secret), ("--tls", self.tls)):
            if path is not None and not in_group():
                problems.append(
                    f"{flag} is for groups that a launcher starts; ranks of a local run are reached over inherited connections"
                )
        problems += log_ranks_problems(self.log_ranks)
        problems += trust_problems(self.secret, self.tls)
        if self.elastic and not self.max_restarts and not in_group():
            problems.append(
                "--elastic needs --max-restarts N: a device is given up when a start after a failure fails on it, too"
            )
        problems += self._path_problems()
        # Rank 0 writes them, and other hosts need no packages for it.
        problems += sink_problems(self.log) if not in_group() or place_of().rank == 0 else []
        if problems:
            raise UsageError("; ".join(problems), where="run")

    def _path_problems(self) -> list[str]:
        problems = []
        # Other ranks of a group may run on hosts where the files of rank 0 have no place.
        files = {"--metrics": self.metrics, "--trace": self.trace} if not in_group() or place_of().rank == 0 else {}
        named = {flag: path for flag, path in (files | {"--checkpoint": self.checkpoint}).items() if path is not None}
        for flag, path in named.items():
            problem = directory_problem(path) if flag == "--checkpoint" else file_problem(path)
            if is_inside(path, self.bundle):
                problem = "lies in the bundle, which holds nothing but what its manifest lists"
            if problem:
                problems.append(f"{flag} {path}: {problem}")
        for flag in files.keys() & named.keys():
            inside = [
                f"{other} {path}" for other, path in named.items() if other != flag and is_inside(path, named[flag])
            ]
            problems += [f"{flag} {named[flag]} cannot be a file and the place of {other}" for other in inside]
        return sorted(problems)

    def save_after(self, step: int, end: int) -> SaveCommand:
        """The save of a step; the last one is waited for."""
        assert self.checkpoint is not None
        return SaveCommand(self.checkpoint, step, step < end and not self.checkpoint_wait, self.keep_last)

    def chunks(self, first: int, end: int) -> Iterator[int]:
        """Numbers of steps between places where something else is done: checkpoints and evaluations fall on
        multiples of their numbers, and on the end."""
        done = first
        while done < end:
            count = min([end - done, *(n - done % n for n in (self.checkpoint_every, self.evaluate_every) if n)])
            yield count
            done += count

    def saves_after(self, done: int, end: int) -> bool:
        """Whether there is a checkpoint of so many steps."""
        return self.checkpoint is not None and (
            done == end or bool(self.checkpoint_every and done % self.checkpoint_every == 0)
        )

    def evaluates_after(self, done: int, end: int) -> bool:
        return self.evaluation is not None and (
            done == end or bool(self.evaluate_every and done % self.evaluate_every == 0)
        )


def data_spec(data: str | os.PathLike[str], shuffle: bool, seed: int, last: str = WRAP) -> DataSpec:
    """Where samples come from, by absolute paths."""
    text = os.fspath(data)
    return DataSpec(text if text == SYNTHETIC else absolute_source(text), shuffle, seed, last)


def timeout_problems(timeout: float, heartbeat: float = HEARTBEAT) -> list[str]:
    problems = []
    if not (math.isfinite(timeout) and 0 < timeout <= LONGEST_TIMEOUT):
        problems.append(f"the timeout must be more than 0 and at most {LONGEST_TIMEOUT:.0f} seconds, got {timeout:g}")
    if heartbeat != 0 and not (math.isfinite(heartbeat) and SHORTEST_HEARTBEAT <= heartbeat <= LONGEST_TIMEOUT):
        limits = f"{SHORTEST_HEARTBEAT:g} to {LONGEST_TIMEOUT:.0f} seconds"
        problems.append(f"the heartbeat must be {limits}, or 0 for none, got {heartbeat:g}")
    return problems


def nan_problems(policy: str, module: Module) -> list[str]:
    """What speaks against a policy for losses and gradients that are not finite."""
    if policy not in NAN_POLICIES:
        return [f"--nan must be {', '.join(NAN_POLICIES)}, got {policy!r}"]
    guarded = any(value.name == NORM for graph in module.graphs.values() for op in graph.ops for value in op.outs)
    what = "--nan skip: the bundle leaves no update out; compile it with --skip-nonfinite, --clip or --precision f16"
    return [] if policy != "skip" or guarded else [what]


def data_problems(data: DataSpec) -> list[str]:
    problems = [] if 0 <= data.seed < 2**63 else [f"the seed must be 0 to 2^63-1, got {data.seed}"]
    return problems + ([] if data.last in LAST else [f"the last batch can be {', '.join(LAST)}, not {data.last!r}"])
