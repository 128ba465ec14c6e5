"""Train with a bundle from the command line: `penstock run`. In: options. Out: metrics, checkpoints, a summary.

    run_bundle("bundle/", data="train.npz", steps=1000, checkpoint="ckpt/")

starts local workers; where a launcher such as torchrun started this process as one of several, it becomes its rank instead. With
`max_restarts` local workers are started again after a failure that may pass, from the newest checkpoint of this run, else from where it
began: steps after that are run again, with the same numbers, and stand in the metrics once.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.backends.bundle.format import open_bundle
from penstock.ir.training.rates import Rate
from penstock.runtime.checkpoint.format import saved_step, step_name
from penstock.runtime.checkpoint.lock import Claims
from penstock.runtime.group.hosts import in_group
from penstock.runtime.launch.elastic import replan
from penstock.runtime.launch.failures import is_passing
from penstock.runtime.launch.keeper import become_rank
from penstock.runtime.launch.local import HEARTBEAT, TIMEOUT
from penstock.runtime.launch.logs import DEFAULT, chosen_ranks
from penstock.runtime.launch.options import RunOptions, data_spec
from penstock.runtime.launch.restarts import finished_saves, identity
from penstock.runtime.telemetry.trace import write_trace
from penstock.runtime.telemetry.utilisation import Utilisation
from penstock.runtime.worker.actions import microbatch_size
from penstock.support.errors import PenstockError, UsageError
from penstock.support.words import counted


@dataclass(frozen=True)
class RunSummary:
    """What a run did. `losses` are those of its steps; `peak_bytes` the largest resident size of each
    rank; `restarts` how often it began again."""

    first_step: int
    losses: list[float]
    seconds: float
    samples_per_second: float
    checkpoint: Path | None
    peak_bytes: list[int]
    restarts: int = 0


def run_bundle(
    path: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] = "synthetic",
    steps: int = 10,
    shuffle: bool = False,
    seed: int = 0,
    last: str = "wrap",
    metrics: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    timeout: float = TIMEOUT,
    trace: str | os.PathLike[str] | None = None,
    progress: bool = True,
    lr: float | None = None,
    rate: Rate | str | None = None,
    heartbeat: float = HEARTBEAT,
    nan: str = "warn",
    max_restarts: int = 0,
    eval_data: str | os.PathLike[str] | None = None,
    eval_every: int | None = None,
    log: Sequence[str] = (),
    keep_last: int | None = None,
    checkpoint_wait: bool = False,
    log_ranks: str = DEFAULT,
    secret: str | os.PathLike[str] | None = None,
    tls: str | os.PathLike[str] | None = None,
    elastic: bool = False,
) -> RunSummary:
    """Train for `steps` steps. Where torchrun or srun started this process, it becomes its rank and does not come back."""
    options = RunOptions(
        bundle=os.path.abspath(path),
        data=data_spec(data, shuffle, seed, last),
        steps=steps,
        metrics=_absolute(metrics),
        checkpoint=_absolute(checkpoint),
        resume=_absolute(resume),
        trace=_absolute(trace),
        checkpoint_every=checkpoint_every,
        timeout=timeout,
        progress=progress,
        lr=lr,
        rate=None if rate is None else str(rate),
        heartbeat=heartbeat,
        nan=nan,
        max_restarts=max_restarts,
        evaluation=None if eval_data is None else data_spec(eval_data, False, 0),
        evaluate_every=eval_every,
        log=tuple(log),
        keep_last=keep_last,
        checkpoint_wait=checkpoint_wait,
        log_ranks=log_ranks,
        secret=_absolute(secret),
        tls=_absolute(tls),
        elastic=elastic,
    )
    options.check()
    if in_group():
        become_rank(options)
    run = _LocalRun(options)
    try:
        while True:
            try:
                return run.go_on()
            except PenstockError as error:
                run.recover(error)
    except (KeyboardInterrupt, SystemExit) as end:
        end.add_note(run.told())
        raise
    finally:
        run.claims.close()


class _LocalRun:
    """A run on this machine, with what has to outlive its workers."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.restarts = 0
        self.claims = Claims()
        # Where checkpoints of this run come, and what stood there before.
        self._places: list[tuple[Path, int | None]] = []
        self._first: int | None = None
        self._losses: list[float] = []
        self._seconds = 0.0
        self._bundle = options.bundle
        self._shown: Collection[int] = ()
        # The device that the last start failed on, and how many steps that start did.
        self._failed_on: str | None = None
        self._done = 0

    @property
    def saved(self) -> Path | None:
        """The newest checkpoint of this run. One that was still being written when the run ended is not there."""
        return next(iter(finished_saves(self._places)), None)

    def go_on(self) -> RunSummary:
        """Start workers and train to the end."""
        # Here, because they import torch, which a keeper has no use for.
        from penstock.runtime.telemetry.metrics import Metrics
        from penstock.runtime.telemetry.overlap import overlap_of

        from .job import Job

        options, saved = self.options, self.saved
        self._done = 0
        claimed = self.claims.hold(options.checkpoint) if options.checkpoint is not None else []
        resume = options.resume if saved is None else str(saved)
        bundle = open_bundle(self._bundle)
        if self._first is None:
            self._shown = chosen_ranks(options.log_ranks, bundle.world_size)
        job = Job(
            bundle,
            timeout=options.timeout,
            data=options.data,
            evaluation=options.evaluation,
            resume=resume,
            trace=options.trace is not None,
            lr=options.lr,
            rate=options.rate,
            heartbeat=options.heartbeat,
            nan=options.nan,
            log_ranks=[rank for rank in self._shown if rank < bundle.world_size],
        )
        job.claims = self.claims.lent()
        job.workers.checkpoints = options.checkpoint if saved is not None else None
        with job:
            for warning in [*job.warnings, *claimed] if not self.restarts else ():
                print(f"warning: {warning}", file=sys.stderr)
            start = job.steps_done
            self._first = start if self._first is None else self._first
            end = self._first + options.steps
            del self._losses[start - self._first :]
            again = options.resume is not None or self.restarts > 0
            samples = microbatch_size(job.module) * job.microbatches
            busy = Utilisation(job.module.rank_stages(), job.workers.busy_seconds)
            record = Metrics(
                options.metrics,
                samples,
                start,
                end,
                progress=options.progress,
                append=again,
                log=options.log,
                busy=busy,
            )
            try:
                record.start()
                for count in options.chunks(start, end):
                    for step in job.steps_from_data(count):
                        record.add(step)
                    if options.evaluates_after(job.steps_done, end):
                        record.evaluated(job.steps_done, job.evaluate())
                    if options.checkpoint is not None and options.saves_after(job.steps_done, end):
                        save = options.save_after(job.steps_done, end)
                        place = Path(save.directory) / step_name(save.step)
                        self._places.append((place, identity(place)))
                        job.save(save.directory, background=save.background, keep_last=save.keep_last)
                        record.tell_wait(job.save_waited)
                if options.trace is not None:
                    record.overlapped(job.steps_done, overlap_of(job.traces, job.module))
            finally:
                record.close()
                self._done = len(record.losses)
                self._losses += record.losses
                self._seconds += record.seconds
        if options.trace is not None:
            write_trace(Path(options.trace), job.traces, module=job.module, held=job.held)
        rate = len(self._losses) * samples / max(self._seconds, 1e-9)
        return RunSummary(self._first, self._losses, self._seconds, rate, self.saved, job.peak_bytes, self.restarts)

    def recover(self, error: PenstockError) -> None:
        """Say what happened, and what happens next; raise the error where nothing does."""
        bundle = open_bundle(self._bundle)
        device = None if error.rank is None else bundle.rank(error.rank).device
        # Twice in a row, and the second time before anything was done: it does not come back.
        lost = (
            device is not None
            and device == self._failed_on
            and not self._done
            and (is_passing(error) or isinstance(error, UsageError))
        )
        self._failed_on = device
        left = [entry.device for entry in bundle.manifest.ranks if entry.device != device]
        if lost and left and self.options.elastic:
            assert self.options.checkpoint is not None
            print(f"penstock: error: {error}", file=sys.stderr, flush=True)
            made = replan(open_bundle(self.options.bundle), left, Path(self.options.checkpoint))
            told = (
                f"penstock: {device} of rank {error.rank} failed again at once and is given up; planned anew: {made.told}; from "
                f"{self._from}"
            )
            print(told, file=sys.stderr, flush=True)
            self._bundle, self._failed_on = made.bundle, None
            return
        if self.restarts == self.options.max_restarts or not is_passing(error):
            if lost and left and not self.options.elastic:
                error.hint = (
                    f"{error.hint}; " * bool(error.hint) + f"--elastic gives {device} up and plans anew on what is left"
                )
            raise error
        self.restarts += 1
        print(f"penstock: error: {error}", file=sys.stderr)
        print(
            f"penstock: restart {self.restarts} of {self.options.max_restarts}, from {self._from}",
            file=sys.stderr,
            flush=True,
        )

    def told(self) -> str:
        """How far a run came that is ended from outside, what is saved of it, and how to go on."""
        options, saved = self.options, self.saved
        done = (
            f"after {len(self._losses)} of {counted(options.steps, 'step')}"
            if self._first is not None
            else "before the first step"
        )
        if options.checkpoint is None:
            return f"{done}; nothing was saved, because no --checkpoint was given"
        begun = self._places[-1][0] if self._places else None
        torn = f"; {begun.name} was not finished" if begun not in (None, saved) else ""
        if saved is not None and self._first is not None:
            left = self._first + options.steps - saved_step(saved)
            hint = (
                f"--resume {shlex.quote(options.checkpoint)} --steps {left} goes on from there"
                if left
                else "this was the last one"
            )
            return f"{done}; the newest checkpoint is {saved}{torn}\n  hint: {hint}"
        every = (
            ""
            if options.checkpoint_every
            else "\n  hint: without --checkpoint-every there is one checkpoint, at the end"
        )
        kept = f"; what it began from is as it was, {options.resume}" if options.resume is not None else ""
        return f"{done}; nothing was saved yet{torn}{kept}{every}"

    @property
    def _from(self) -> str:
        return f"checkpoint {self.saved}" if self.saved is not None else "where the run began"


def _absolute(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.path.abspath(path)
