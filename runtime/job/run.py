"""Training with a bundle from the command line: `penstock run`.

In: options. Out: metrics, checkpoints, a summary.

    run_bundle("bundle/", data="train.npz", steps=1000, checkpoint="ckpt/")

starts local workers. Where a launcher such as torchrun started this process as one of several, it becomes its rank
instead. With `max_restarts` local workers are started again after a failure that may pass, from the newest checkpoint
of this run, else from where it began. Steps after that are run again, with the same numbers, and stand in the metrics
once.
"""

from __future__ import annotations

import os
import shlex
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.batch_shares import microbatch_size
from penstock.ir.training.rates import Rate
from penstock.runtime.checkpoint.format import saved_step, step_name
from penstock.runtime.checkpoint.lock import Claims
from penstock.runtime.data.samples import data_spec
from penstock.runtime.group.hosts import in_group
from penstock.runtime.launch.elastic import replan
from penstock.runtime.launch.failures import is_passing
from penstock.runtime.launch.keeper import become_rank
from penstock.runtime.launch.logs import DEFAULT, chosen_ranks
from penstock.runtime.launch.options import JobOptions, RunOptions, keywords
from penstock.runtime.launch.preflight import check_run, evaluation_data, save_after, training_data
from penstock.runtime.launch.restarts import MOST_SAVES, finished_saves, identity
from penstock.runtime.messages.defaults import HEARTBEAT, SYNTHETIC, TIMEOUT, WARN, WRAP
from penstock.runtime.telemetry.collective_times import collective_totals
from penstock.runtime.telemetry.metrics import Metrics
from penstock.runtime.telemetry.overlap import overlap_of
from penstock.runtime.telemetry.trace import write_trace
from penstock.runtime.telemetry.utilisation import Utilisation
from penstock.support.errors import PenstockError, UsageError
from penstock.support.terminal import say_as_is
from penstock.support.words import counted

if TYPE_CHECKING:
    from .job import Job


@dataclass(frozen=True)
class RunSummary:
    """The result of a run. `losses` are those of its steps; `peak_bytes` the largest resident size of each rank;
    `restarts` how often it began again."""

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
    data: str | os.PathLike[str] = SYNTHETIC,
    steps: int = 10,
    shuffle: bool = False,
    seed: int = 0,
    last: str = WRAP,
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
    nan: str = WARN,
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
    """Train for `steps` steps. A process that torchrun or srun started becomes its rank and does not come back."""
    return train(RunOptions(
        bundle=os.path.abspath(path), data=data_spec(data, shuffle, seed, last).source, steps=steps, shuffle=shuffle,
        seed=seed, last=last, metrics=_absolute(metrics), checkpoint=_absolute(checkpoint),
        checkpoint_every=checkpoint_every, resume=_absolute(resume), timeout=timeout, trace=_absolute(trace),
        progress=progress, lr=lr, rate=None if rate is None else str(rate), heartbeat=heartbeat, nan=nan,
        max_restarts=max_restarts, eval_data=None if eval_data is None else data_spec(eval_data, False, 0).source,
        eval_every=eval_every, log=tuple(log), keep_last=keep_last, checkpoint_wait=checkpoint_wait,
        log_ranks=log_ranks, secret=_absolute(secret), tls=_absolute(tls), elastic=elastic,
    ))  # fmt: skip


def train(options: RunOptions) -> RunSummary:
    """Train as the options say, whose paths are absolute."""
    check_run(options)
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
        end.add_note(run.state_at_end())
        raise
    finally:
        run.claims.close()


class _LocalRun:
    """A run on this machine, with the state that has to outlive its workers."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.restarts = 0
        self.claims = Claims()
        # The places of the newest checkpoints of this run, and the identity of what stood there before.
        self._places: deque[tuple[Path, int | None]] = deque(maxlen=MOST_SAVES)
        self._first: int | None = None
        self._losses = array("d")
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
        from .job import Job  # lazy: heavy

        options, saved = self.options, self.saved
        self._done = 0
        claimed = self.claims.hold(options.checkpoint) if options.checkpoint is not None else []
        bundle = open_bundle(self._bundle)
        if self._first is None:
            self._shown = chosen_ranks(options.log_ranks, bundle.world_size)
        job = Job(bundle, **keywords(self._job_options(bundle, saved)))
        job.claims = self.claims.lent()
        job.workers.checkpoints = options.checkpoint if saved is not None else None
        with job:
            for warning in [*job.warnings, *claimed] if not self.restarts else ():
                say_as_is(f"warning: {warning}")
            start = job.steps_done
            self._first = start if self._first is None else self._first
            del self._losses[start - self._first :]
            samples = microbatch_size(job.module) * job.microbatches
            record = self._open_metrics(job, samples, self._first + options.steps)
            try:
                record.start()
                self._train(job, record, self._first + options.steps)
                record.on_devices(job.steps_done, job.device_bytes, job.captured_bytes)
                if options.trace is not None:
                    record.overlapped(job.steps_done, overlap_of(job.traces, job.module))
                    record.exchanged(job.steps_done, collective_totals(job.collectives, job.module))
                    record.copied(job.steps_done, [copy for listed in job.copies for copy in listed])
            finally:
                record.close()
                self._done = len(record.losses)
                self._losses += record.losses
                self._seconds += record.seconds
        if options.trace is not None:
            path, copies = Path(options.trace), job.copies
            write_trace(path, job.traces, module=job.module, held=job.held, collectives=job.collectives, copies=copies)
        rate = len(self._losses) * samples / max(self._seconds, 1e-9)
        losses = list(self._losses)
        return RunSummary(self._first, losses, self._seconds, rate, self.saved, job.peak_bytes, self.restarts)

    def _job_options(self, bundle: Bundle, saved: Path | None) -> JobOptions:
        """Return the options of the job that this start runs, from the newest checkpoint or from where the run
        began."""
        options = self.options
        return JobOptions(
            timeout=options.timeout,
            heartbeat=options.heartbeat,
            data=training_data(options),
            evaluation=evaluation_data(options),
            resume=options.resume if saved is None else str(saved),
            trace=options.trace is not None,
            lr=options.lr,
            rate=options.rate,
            nan=options.nan,
            log_ranks=[rank for rank in self._shown if rank < bundle.world_size],
        )

    def _open_metrics(self, job: Job, samples: int, end: int) -> Metrics:
        options = self.options
        return Metrics(
            options.metrics,
            samples,
            job.steps_done,
            end,
            progress=options.progress,
            append=options.resume is not None or self.restarts > 0,
            log=options.log,
            busy=Utilisation(job.module.rank_stages(), job.workers.busy_seconds),
        )

    def _train(self, job: Job, record: Metrics, end: int) -> None:
        """Run all steps before `end`, with evaluations and saves in between."""
        options = self.options
        for count in options.chunks(job.steps_done, end):
            for step in job.steps_from_data(count):
                record.add(step)
            if options.evaluates_after(job.steps_done, end):
                record.evaluated(job.steps_done, job.evaluate())
            if options.saves_after(job.steps_done, end):
                save = save_after(options, job.steps_done, end)
                place = Path(save.directory) / step_name(save.step)
                self._places.append((place, identity(place)))
                job.save(save.directory, background=save.background, keep_last=save.keep_last)
                record.tell_wait(job.save_waited)

    def recover(self, error: PenstockError) -> None:
        """Report a failure and the restart that follows; raise the error where there is none."""
        bundle = open_bundle(self._bundle)
        device = None if error.rank is None else bundle.rank(error.rank).device
        # The device failed twice in a row, the second time before any step was done: it does not come back.
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
            say_as_is(f"penstock: error: {error}")
            replanned = replan(open_bundle(self.options.bundle), left, Path(self.options.checkpoint))
            message = (
                f"penstock: {device} of rank {error.rank} failed again at once and is given up; planned anew: "
                f"{replanned.summary}; from "
                f"{self._from}"
            )
            say_as_is(message)
            self._bundle, self._failed_on = replanned.bundle, None
            return
        if self.restarts == self.options.max_restarts or not is_passing(error):
            if lost and left and not self.options.elastic:
                error.hint = (
                    f"{error.hint}; " * bool(error.hint) + f"--elastic gives {device} up and plans anew on what is left"
                )
            raise error
        self.restarts += 1
        say_as_is(f"penstock: error: {error}")
        say_as_is(f"penstock: restart {self.restarts} of {self.options.max_restarts}, from {self._from}")

    def state_at_end(self) -> str:
        """Describe a run that a signal ended: how far it came, what is saved of it, and how to go on."""
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
        unchanged = f"; what it began from is as it was, {options.resume}" if options.resume is not None else ""
        return f"{done}; nothing was saved yet{torn}{unchanged}{every}"

    @property
    def _from(self) -> str:
        return f"checkpoint {self.saved}" if self.saved is not None else "where the run began"


def _absolute(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.path.abspath(path)
