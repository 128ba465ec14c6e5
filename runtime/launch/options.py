"""The settings of `penstock run`, `penstock.run_bundle`, `penstock.open` and `Job`: name, default, check and help of
each, once.

A setting is a field of a frozen dataclass. RunOptions, OpenOptions and JobOptions are put together from one class per
subject. RunOptions travels to the rank of a group as JSON in its argument list; its paths are absolute then. Checks
that look at files or at the group are those of preflight.py.

Nothing heavy is imported here, so that help texts and defaults of the command line can be read from these classes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.ir.training.rates import EXAMPLES
from penstock.runtime.messages.defaults import (
    AHEAD,
    HEARTBEAT,
    LAST,
    MODES,
    NAN_POLICIES,
    QUEUE,
    SYNTHETIC,
    THROUGHPUT,
    TIMEOUT,
    WARN,
    WRAP,
)
from penstock.support.settings import POSITIVE, SEED, WHOLE, setting, shared

from .logs import DEFAULT, log_ranks_problems

if TYPE_CHECKING:
    from penstock.ir.training.rates import Rate
    from penstock.runtime.messages.control import DataSpec

# Milliseconds of a timeout have to fit into 32 bits in some system calls.
LONGEST_TIMEOUT = 1e6
# Steps times microbatches have to fit into 64 bits.
_MOST_STEPS = 10**12
# Seconds that a busy machine may hold a process up.
SHORTEST_HEARTBEAT = 1.0
MOST_RESTARTS = 1000
_MOST_REQUESTS = 10**6


def keywords(options: Any) -> dict[str, Any]:
    """Return the values of options by name, as arguments of a function that takes them one by one."""
    return {item.name: getattr(options, item.name) for item in fields(options)}


# ------------------------------------------------------------------------------------------------ checks of single
# values


def _between(name: str, least: int, most: int) -> Callable[[int], list[str]]:
    def check(value: int) -> list[str]:
        return [] if least <= value <= most else [f"{name} must be {least} to {most}, got {value}"]

    return check


def _timeout_problems(timeout: float) -> list[str]:
    fits = math.isfinite(timeout) and 0 < timeout <= LONGEST_TIMEOUT
    what = f"the timeout must be more than 0 and at most {LONGEST_TIMEOUT:.0f} seconds, got {timeout:g}"
    return [] if fits else [what]


def _heartbeat_problems(heartbeat: float) -> list[str]:
    fits = heartbeat == 0 or (math.isfinite(heartbeat) and SHORTEST_HEARTBEAT <= heartbeat <= LONGEST_TIMEOUT)
    limits = f"{SHORTEST_HEARTBEAT:g} to {LONGEST_TIMEOUT:.0f} seconds"
    return [] if fits else [f"the heartbeat must be {limits}, or 0 for none, got {heartbeat:g}"]


def _seed_problems(seed: int) -> list[str]:
    return [] if 0 <= seed < 2**63 else [f"the seed must be 0 to 2^63-1, got {seed}"]


def _last_problems(last: str) -> list[str]:
    return [] if last in LAST else [f"the last batch can be {', '.join(LAST)}, not {last!r}"]


def _spec_problems(data: DataSpec) -> list[str]:
    return _seed_problems(data.seed) + _last_problems(data.last)


def _nan_problems(policy: str) -> list[str]:
    return [] if policy in NAN_POLICIES else [f"--nan must be {', '.join(NAN_POLICIES)}, got {policy!r}"]


def _mode_problems(mode: str) -> list[str]:
    return [] if mode in MODES else [f"the mode must be one of {', '.join(MODES)}, got {mode!r}"]


def _queue_problems(queue: int) -> list[str]:
    return [] if 1 <= queue <= _MOST_REQUESTS else [f"the queue must hold 1 to {_MOST_REQUESTS} requests, got {queue}"]


# ------------------------------------------------------------------------------------------------ settings by subject


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """The bundle to train with, and how long."""

    bundle: str
    steps: int = setting(
        10,
        "optimiser steps in this run (default: 10)",
        shown="N",
        check=POSITIVE,
        problems=_between("steps", 1, _MOST_STEPS),
    )


@dataclass(frozen=True, kw_only=True)
class DeadlineOptions:
    """The limits of waiting."""

    timeout: float = setting(
        TIMEOUT,
        "give up when a peer that lives keeps a rank waiting this long (default: 600)",
        shown="S",
        read=float,
        problems=_timeout_problems,
    )
    heartbeat: float = setting(
        HEARTBEAT,
        "a rank without a sign of life for so long is lost; 0: never (default: 10)",
        shown="S",
        read=float,
        problems=_heartbeat_problems,
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The samples that are read, and their order."""

    data: str | None = setting(
        None,
        "samples: .npz, .safetensors, .parquet, a folder of .npy, FILE:u16 of tokens, or INPUT=FILE,... "
        "(docs/data.md; default: synthetic)",
        shown="FILE|synthetic",
    )
    shuffle: bool = setting(False, "visit samples in a new order every epoch")
    seed: int = setting(
        0, "for --shuffle and synthetic data (default: 0)", shown="N", check=SEED, problems=_seed_problems, rare=True
    )
    last: str = setting(
        WRAP,
        "where samples are no multiple of a batch: go on with the next epoch, drop the rest, or fill up from the "
        "same epoch (default: wrap)",
        flags=("--last-batch",),
        choices=LAST,
        problems=_last_problems,
        rare=True,
    )
    eval_data: str | None = setting(
        None, "samples to compute the mean loss of, without training on them (docs/data.md)", shown="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """A learning rate, and a schedule of it, that stand in for those the bundle was compiled with."""

    lr: float | None = setting(
        None, "learning rate, in place of the one the bundle was compiled with", shown="X", read=float
    )
    rate: Rate | str | None = setting(
        None,
        f"how the learning rate changes, e.g. {EXAMPLES}, in place of the one the bundle was compiled with",
        shown="R",
        flags=("--lr-schedule",),
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The checkpoints that a run writes, and the one it begins with."""

    checkpoint: str | None = setting(
        None, "write checkpoints here, at the end and every --checkpoint-every steps", shown="DIR"
    )
    checkpoint_every: int | None = setting(
        None,
        "steps between checkpoints",
        shown="N",
        check=POSITIVE,
        needs="checkpoint",
        problems=_between("--checkpoint-every", 1, _MOST_STEPS),
    )
    keep_last: int | None = setting(
        None,
        "remove older checkpoints, but for the newest N (default: keep all)",
        shown="N",
        check=POSITIVE,
        needs="checkpoint",
        problems=_between("--keep-last", 1, _MOST_STEPS),
        rare=True,
    )
    checkpoint_wait: bool = setting(
        False,
        "let training wait while a checkpoint is written, which needs no memory for a copy of the state",
        needs="checkpoint",
        rare=True,
    )
    resume: str | None = setting(
        None, "go on from the newest whole checkpoint in this directory, or from this checkpoint", shown="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """The conduct of a run when losses are not finite, ranks fail or devices are gone."""

    nan: str = setting(
        WARN,
        "a loss or gradient that is not finite: end the run, insist on a bundle that leaves such updates out, or "
        "warn (default: warn)",
        choices=NAN_POLICIES,
        problems=_nan_problems,
        rare=True,
    )
    max_restarts: int = setting(
        0,
        "start the workers again after a failure, from the newest checkpoint, up to N times (default: 0; under "
        "torchrun that is its option)",
        shown="N",
        check=WHOLE,
        problems=_between("--max-restarts", 0, MOST_RESTARTS),
    )
    elastic: bool = setting(
        False,
        "with fewer devices than before plan anew on those that are left, and go on (default: end with an error)",
        needs="checkpoint",
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryOptions:
    """The files and lines in which a run shows itself."""

    metrics: str | None = setting(None, "write one JSON object per step", shown="FILE")
    trace: str | None = setting(None, "write a Chrome trace of every action", shown="FILE")
    progress: bool = True
    log: tuple[str, ...] = setting(
        (),
        "send metrics there, too: tensorboard:DIR, wandb:PROJECT, mlflow:EXPERIMENT, prometheus:[HOST:]PORT or "
        "prometheus:FILE.prom; may be given several times",
        shown="KIND:WHERE",
        many=True,
        rare=True,
    )
    log_ranks: str = setting(
        DEFAULT,
        "whose processes' own output to show, with rank and stage before each line: all, none, or numbers such as "
        "0,2; errors are shown in any case (default: 0)",
        shown="LIST",
        problems=log_ranks_problems,
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """The files that show who belongs to a group."""

    secret: str | None = setting(
        None,
        "in a group: what its ranks have in common and nobody else has, at least 32 bytes (docs/security.md)",
        shown="FILE",
        rare=True,
    )
    tls: str | None = setting(
        None,
        "in a group: let the keepers of the ranks speak over TLS, with cert.pem and key.pem of this directory",
        shown="DIR",
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The way requests to an inference bundle are answered."""

    mode: str = setting(THROUGHPUT, choices=MODES, problems=_mode_problems)
    queue: int = setting(QUEUE, problems=_queue_problems)


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """Settings of measurements: the log of versions, and times that computations and links take at least
    (worker/pace.py)."""

    audit: bool = False
    pace: Mapping[str, float] | None = None
    latency: float = 0.0


# ------------------------------------------------------------------------------------------------ options by verb


# Fields come in the order of the bases, from the last to the first, then those of the class itself; problems come in
# that order, too.
@dataclass(frozen=True, kw_only=True)
class RunOptions(
    GroupOptions,
    TelemetryOptions,
    FailureOptions,
    CheckpointOptions,
    RateOptions,
    SampleOptions,
    DeadlineOptions,
    LengthOptions,
):
    """The settings of `penstock run`."""

    data: str = shared(SampleOptions, "data", SYNTHETIC)
    rate: str | None = shared(RateOptions, "rate", None)
    eval_every: int | None = setting(
        None,
        "steps between evaluations (default: one at the end)",
        shown="N",
        check=POSITIVE,
        needs="eval_data",
        problems=_between("--eval-every", 1, _MOST_STEPS),
        rare=True,
    )

    def chunks(self, first: int, end: int) -> Iterator[int]:
        """Yield numbers of steps between two stops: checkpoints and evaluations fall on multiples of their numbers, and
        on the end."""
        done = first
        while done < end:
            count = min([end - done, *(n - done % n for n in (self.checkpoint_every, self.eval_every) if n)])
            yield count
            done += count

    def saves_after(self, done: int, end: int) -> bool:
        """Return whether there is a checkpoint of so many steps."""
        return self.checkpoint is not None and (
            done == end or bool(self.checkpoint_every and done % self.checkpoint_every == 0)
        )

    def evaluates_after(self, done: int, end: int) -> bool:
        return self.eval_data is not None and (done == end or bool(self.eval_every and done % self.eval_every == 0))


@dataclass(frozen=True, kw_only=True)
class OpenOptions(MeasuringOptions, RequestOptions, RateOptions, SampleOptions, DeadlineOptions):
    """The settings of `penstock.open`."""

    resume: str | os.PathLike[str] | None = None


@dataclass(frozen=True, kw_only=True)
class JobOptions(MeasuringOptions, RequestOptions, RateOptions, DeadlineOptions):
    """The settings of a Job. `retire` is off only in tests that show what retirement is for; `log_ranks` are those
    whose output is shown."""

    data: DataSpec | None = setting(None, problems=_spec_problems)
    evaluation: DataSpec | None = None
    resume: str | os.PathLike[str] | None = None
    nan: str = setting(WARN, problems=_nan_problems)
    retire: bool = True
    trace: bool = False
    prefetch: int = AHEAD
    log_ranks: Collection[int] = ()
