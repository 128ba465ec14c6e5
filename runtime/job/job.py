"""The Python interface to a running bundle.

    with open("bundle/") as job:
        loss = job.step(batch)
        job.save("ckpt/")

A Job holds the local workers of one bundle, or computes itself (own_process.py). A batch is a dict of arrays by input
name (the model's or ours), a whole global batch (m microbatches one after the other). `step` runs one batch and empties
the pipeline. `run` keeps the pipeline full over an iterable and gives each loss as it is known. Both compute the same
numbers. The global step counts on over all calls, and from a checkpoint on after `resume`.

An inference bundle answers requests (`infer`, `stream`, `submit`; runtime/job/inference.py).

Limit: one thread uses a Job, and one iterator of `run` at a time; `submit` is for any thread.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.batch_shares import fed_to_rank, loss_stage, microbatch_size, share_of
from penstock.ir.graph import Module
from penstock.ir.memory.predict import BATCHES_AHEAD
from penstock.ir.training.rates import Rate
from penstock.runtime.checkpoint.finding import choose
from penstock.runtime.checkpoint.format import step_name
from penstock.runtime.checkpoint.lock import Claims
from penstock.runtime.checkpoint.resuming import Start, start_from
from penstock.runtime.data.batches import BatchCuts, check_batch, take_batch
from penstock.runtime.data.samples import check_data
from penstock.runtime.generation.facts import generates
from penstock.runtime.launch.options import JobOptions, OpenOptions, keywords
from penstock.runtime.launch.preflight import check_job, check_names, job_options
from penstock.runtime.messages.control import (
    Arrays,
    Audit,
    Batch,
    DataSpec,
    Done,
    End,
    Evaluate,
    Evaluated,
    Evaluation,
    FetchAudit,
    FetchParameters,
    Message,
    Record,
    RunCommand,
    SaveCommand,
    Setup,
    Step,
    Stop,
    TraceRecord,
)
from penstock.runtime.messages.defaults import AHEAD, HEARTBEAT, QUEUE, THROUGHPUT, TIMEOUT, WARN, WRAP
from penstock.runtime.messages.ledger import CopyTimes, LedgerEntry
from penstock.runtime.state.home_folders import home_warnings
from penstock.runtime.telemetry.steps import StepsUnderWay
from penstock.runtime.telemetry.trace import CollectiveTimes, Event
from penstock.runtime.worker.evaluation import count_evaluation, mean_loss
from penstock.support.errors import UsageError
from penstock.support.terminal import say

from .inference import Inference, Inputs
from .ranks import start_ranks, whole_parameters
from .sized_inference import SizedInference
from .texts import JobText

_NO_MORE: Any = object()

# A dict of arrays by input name, or arrays in the order of the inputs: data/batches.py.
TrainingBatch = Mapping[str, Any] | Sequence[Any]


class Job(JobText):
    """The ranks of one bundle, for training or inference."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        timeout: float = TIMEOUT,
        heartbeat: float = HEARTBEAT,
        data: DataSpec | None = None,
        resume: str | os.PathLike[str] | None = None,
        audit: bool = False,
        retire: bool = True,
        trace: bool = False,
        pace: Mapping[str, float] | None = None,
        latency: float = 0.0,
        lr: float | None = None,
        rate: Rate | str | None = None,
        prefetch: int = AHEAD,
        evaluation: DataSpec | None = None,
        nan: str = WARN,
        mode: str = THROUGHPUT,
        queue: int = QUEUE,
        log_ranks: Collection[int] = (),
    ) -> None:
        options = JobOptions(
            timeout=timeout, heartbeat=heartbeat, data=data, resume=resume, audit=audit, retire=retire, trace=trace,
            pace=pace, latency=latency, lr=lr, rate=rate, prefetch=prefetch, evaluation=evaluation, nan=nan, mode=mode,
            queue=queue, log_ranks=log_ranks,
        )  # fmt: skip
        check_job(options, bundle)
        self.bundle = bundle
        self.module: Module = bundle.module
        for warning in home_warnings(self.module):
            say(f"warning: {warning}")
        assert self.module.schedule is not None
        self.microbatches = self.module.schedule.microbatches
        self.trains = loss_stage(self.module) is not None
        self.parts = StepsUnderWay(self.module)
        types = {value.name: value.type for value in self.module.inputs}
        self._fed = [
            {name: types[name] for name in fed_to_rank(self.module, rank)} for rank in range(bundle.world_size)
        ]
        self._shares = [share_of(self.module, rank) for rank in range(bundle.world_size)]
        self._busy = self._closed = False
        # The directories that it saves into.
        self.claims = Claims()
        self._begin_records()
        start = self._find_start(options)
        self.workers = start_ranks(bundle, self._setup(options, start), start, options)
        kind = SizedInference if self.module.bounds else Inference
        self.inference = None if self.trains else kind(self.workers, bundle, self._fed, mode, queue, self._note)

    def _begin_records(self) -> None:
        """Begin the lists, by rank, of what the workers report of themselves."""
        world = self.bundle.world_size
        self.peak_bytes, self.base_bytes, self.device_bytes, self.captured_bytes = ([0] * world for _ in range(4))
        # The longest that a save had to wait for the one before, in seconds.
        self.save_waited = 0.0
        self.traces: list[list[Event]] = [[] for _ in range(world)]
        self.held: list[list[LedgerEntry]] = [[] for _ in range(world)]
        self.collectives: list[list[CollectiveTimes]] = [[] for _ in range(world)]
        self.copies: list[list[CopyTimes]] = [[] for _ in range(world)]

    def _find_start(self, options: JobOptions) -> Start:
        """Find where the job starts, and check its samples."""
        bundle, data = self.bundle, options.data
        self.warnings: list[str] = []
        hosts = sorted({entry.host for entry in bundle.manifest.ranks})
        if len(hosts) > 1:
            self.warnings.append(
                f"the bundle was compiled for hosts {', '.join(hosts)}; all ranks run on this one (start it "
                "with torchrun on each)"
            )
        chosen = None if options.resume is None else choose(options.resume)
        start = start_from(bundle, data, chosen, options.lr, options.rate)
        self.steps_done = start.step
        self.warnings += start.warnings
        if data is not None:
            check_data(self.module, data, bundle.renamed)
        evaluation = options.evaluation
        self._to_evaluate = None if evaluation is None else count_evaluation(self.module, evaluation, bundle.renamed)
        return start

    def _setup(self, options: JobOptions, start: Start) -> Setup:
        return Setup(
            str(self.bundle.path),
            options.timeout,
            data=options.data,
            resume=None if start.place is None else str(start.place),
            audit=options.audit,
            retire=options.retire,
            trace=options.trace,
            pace=dict(options.pace or {}),
            latency=options.latency,
            tables=start.tables,
            prefetch=options.prefetch,
            offset=start.offset,
            key=start.key,
            nan=options.nan,
            evaluation=options.evaluation,
        )

    # -------------------------------------------------------------------------------------------- training

    def step(self, batch: TrainingBatch) -> float:
        """Train on one global batch, wait for it, and return its loss."""
        return next(iter(list(self.steps([batch])))).loss

    def run(self, batches: Iterable[TrainingBatch]) -> Iterator[float]:
        """Train on batches without emptying the pipeline in between; yield the loss of each."""
        for step in self.steps(batches):
            yield step.loss

    def steps(self, batches: Iterable[TrainingBatch]) -> Generator[Step, None, None]:
        """Train as `run` does, and yield all that is known of each step. Batches that were handed over are finished."""
        self._check_trains()
        yield from self._stream(batches)

    def _check_trains(self) -> None:
        if not self.trains:
            command = "generate" if generates(self.bundle.path) else "infer"
            hint = f"`penstock {command}` asks it; to train, compile it with a loss and an optimiser"
            raise UsageError("the bundle is for inference", where=str(self.bundle.path), hint=hint)

    def steps_from_data(self, count: int) -> Iterator[Step]:
        """Train on the next `count` batches of the job's own data, read by the workers themselves."""
        self._check_trains()
        self._begin()
        try:
            self.workers.send_all(RunCommand(self.steps_done, count))
            for rank, message, _ in self._until_done():
                step = self.parts.take(rank, message) if isinstance(message, Step) else None
                if step is not None:
                    self.steps_done += 1
                    yield step
        except GeneratorExit:
            self._leave()
            raise
        finally:
            self._busy = False

    # -------------------------------------------------------------------------------------------- inference

    def infer(self, inputs: Inputs) -> Arrays:
        """Return all module outputs, by the model's names, for any number of samples. A microbatch that is not full is
        filled up by repeating the last sample."""
        return self._requests().infer(inputs)

    def stream(self, requests: Iterable[Inputs]) -> Iterator[Arrays]:
        """Yield the outputs of each request, in order, with as many in flight as the queue holds. A request that does
        not fit is an error when its turn comes."""
        return self._requests().stream(requests)

    def submit(self, inputs: Inputs, timeout: float | None = None) -> Future[Arrays]:
        """Queue a request and return at once; any thread may call it. The future gets its outputs. Inputs that do not
        fit are an error at once; QueueFull where the queue of `open` has no room for `timeout` seconds."""
        return self._requests().submit(inputs, timeout)

    def _requests(self) -> Inference:
        if self.inference is None:
            raise UsageError(
                "the bundle is for training",
                where=str(self.bundle.path),
                hint="compile the model without a loss for inference",
            )
        return self.inference

    # -------------------------------------------------------------------------------------------- state

    def evaluate(self) -> Evaluation:
        """Return the mean loss over the samples that the job was opened to evaluate on, with the newest weights;
        nothing of the training changes."""
        if self._to_evaluate is None:
            raise UsageError("the job has no samples to evaluate on", hint="open it with eval_data=FILE")
        losses: dict[int, float] = {}
        self._begin()
        try:
            self.workers.send_all(Evaluate(self._to_evaluate))
            for _, message, _ in self._until_done():
                if isinstance(message, Evaluated):
                    losses |= message.losses
        finally:
            self._busy = False
        return Evaluation(mean_loss(self._to_evaluate, microbatch_size(self.module), losses), self._to_evaluate)

    def save(
        self, directory: str | os.PathLike[str], *, background: bool = False, keep_last: int | None = None
    ) -> Path:
        """Write a checkpoint of the step reached, and return its path. In the `background` a copy of the state is
        written while training goes on. The checkpoint is there when the next save begins or the job is closed.
        `keep_last` removes older ones, but for so many in all. From the first save on the directory is the job's until
        that is closed: no other may save there."""
        if keep_last is not None and keep_last < 1:
            raise UsageError(f"keep_last must be 1 or more, got {keep_last}")
        check_names(directory)
        place = Path(os.path.abspath(directory))
        with self._paused():
            self._begin()
            try:
                self.warnings += self.claims.hold(place)
                self.workers.send_all(SaveCommand(str(place), self.steps_done, background, keep_last))
                for _ in self._until_done():
                    pass
            finally:
                self._busy = False
        self.workers.checkpoints = str(place)
        return place / step_name(self.steps_done)

    def parameters(self) -> Arrays:
        """Return the newest parameters of all stages by name."""
        return whole_parameters(self.module, [arrays for _, arrays in self._ask(FetchParameters())])

    def audit(self) -> list[Audit]:
        """Return the counts of each rank's store; with `audit=True` also which version was used by what."""
        return [message for message, _ in self._ask(FetchAudit()) if isinstance(message, Audit)]

    def close(self) -> None:
        """Stop the workers in good order."""
        if self._closed:
            return
        self._closed = True
        if self.workers.ended:  # by a failure that the caller has seen
            self.claims.close()
            return
        try:
            if self.inference is not None:
                self.inference.close()
            self.workers.expect_end()
            self.workers.send_all(Stop())
            for _ in self._until_done():
                pass
            self.workers.close()
            self.claims.close()
        except BaseException:
            self._leave()
            raise

    def abort(self) -> None:
        """End the workers at once."""
        self._closed = True
        if self.inference is not None:
            self.inference.abort()
        self.workers.end()
        self.claims.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the pipeline may be full: nothing can be stopped in good order. Workers that reported one have
        # been ended.
        if kind is None or (not self._busy and not self.workers.ended and issubclass(kind, UsageError)):
            self.close()
            return
        self._leave()

    def _leave(self) -> None:
        """End the workers. A checkpoint that is being written is waited for, as long as it gets on and no user
        interrupts that."""
        try:
            if self.workers.saves():
                say("penstock: waits for the checkpoint that is being written; another interrupt ends that")
            self.workers.await_saves()
        finally:
            self.abort()

    # -------------------------------------------------------------------------------------------- talking to the
    # workers

    def _note(self, rank: int, message: Done | TraceRecord) -> None:
        if isinstance(message, TraceRecord):
            self.traces[rank] += message.events
            self.held[rank] += message.held
            self.collectives[rank] += message.collectives
            self.copies[rank] += message.copies
        else:
            self.peak_bytes[rank] = max(self.peak_bytes[rank], message.peak_bytes)
            self.base_bytes[rank], self.captured_bytes[rank] = message.base_bytes, message.captured_bytes
            self.device_bytes[rank] = max(self.device_bytes[rank], message.device_bytes)
            self.save_waited = max(self.save_waited, message.waited)

    def _paused(self) -> AbstractContextManager[None]:
        """Exclude requests until the block is left."""
        return nullcontext() if self.inference is None else self.inference.paused()

    def _begin(self) -> None:
        if self._closed:
            raise UsageError("the job is closed")
        if self._busy:
            raise UsageError("the job is still running", hint="finish or close the iterator of `run` first")
        self._busy = True

    def _ask(self, question: Record) -> list[tuple[Message, Arrays]]:
        """Return one answer of every rank, in the order of ranks."""
        with self._paused():
            return self._ask_now(question)

    def _ask_now(self, question: Record) -> list[tuple[Message, Arrays]]:
        self._begin()
        try:
            self.workers.send_all(question)
            answers: dict[int, tuple[Message, Arrays]] = {}
            while len(answers) < self.bundle.world_size:
                rank, message, arrays = self.workers.receive()
                answers[rank] = (message, arrays)
            return [answers[rank] for rank in sorted(answers)]
        finally:
            self._busy = False

    def _until_done(self) -> Iterator[tuple[int, Message, Arrays]]:
        """Yield messages until every worker is done with its command."""
        waiting = set(range(self.bundle.world_size))
        while waiting:
            rank, message, arrays = self.workers.receive()
            if isinstance(message, Done):
                waiting.discard(rank)
            if isinstance(message, Done | TraceRecord):
                self._note(rank, message)
            else:
                yield rank, message, arrays

    def _stream(self, batches: Iterable[TrainingBatch]) -> Generator[Step, None, None]:
        """Feed batches to the workers, a few ahead, and yield the steps that they report."""
        try:
            iterator = iter(batches)
        except TypeError as problem:
            hint = "`run` takes a list or an iterator of batches, such as a DataLoader"
            raise UsageError(f"expected batches, got {type(batches).__name__}", hint=hint) from problem
        self._begin()
        open_, error, cuts = True, None, BatchCuts(self.module)
        sent = self.steps_done
        waiting = set(range(self.bundle.world_size))
        self.workers.send_all(RunCommand(sent))
        try:
            while waiting:
                while open_ and sent - self.steps_done < BATCHES_AHEAD:
                    try:
                        value = next(iterator, _NO_MORE)
                        batch: Any = None
                        if value is not _NO_MORE:
                            batch = take_batch(self.module, value, f"batch {sent}", self.bundle.renamed)
                            check_batch(self.module, batch, f"batch {sent}", self.bundle.renamed)
                    except Exception as problem:  # of the caller's iterable: earlier batches are finished first
                        batch, error = None, problem
                    if batch is None:
                        open_ = False
                        self.workers.send_all(End())
                        break
                    for rank, types in enumerate(self._fed):
                        parts = {n: cuts.share(n, batch[n], self._shares[rank], self.microbatches) for n in types}
                        self.workers.send(rank, Batch(sent), parts)
                    sent += 1
                step = self._take(waiting)
                if step is not None:
                    yield step
        except GeneratorExit:
            if open_:
                self.workers.send_all(End())
            while waiting:
                self._take(waiting)
            raise
        finally:
            self._busy = False
        if error is not None:
            raise error

    def _take(self, waiting: set[int]) -> Step | None:
        """Handle one message of a run, and return the step that it completes."""
        rank, message, _ = self.workers.receive()
        if isinstance(message, Done | TraceRecord):
            self._note(rank, message)
        if isinstance(message, Done):
            waiting.discard(rank)
        step = self.parts.take(rank, message) if isinstance(message, Step) else None
        if step is not None:
            self.steps_done += 1
        return step


# ------------------------------------------------------------------------------------------------ the way in


def open(
    path: str | os.PathLike[str],
    *,
    timeout: float = TIMEOUT,
    heartbeat: float = HEARTBEAT,
    data: str | os.PathLike[str] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    last: str = WRAP,
    eval_data: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    audit: bool = False,
    pace: Mapping[str, float] | None = None,
    latency: float = 0.0,
    lr: float | None = None,
    rate: Rate | str | None = None,
    mode: str = THROUGHPUT,
    queue: int = QUEUE,
) -> Job:
    """Check a bundle and start its workers on this machine. `timeout` bounds every wait of one rank for another that
    lives, `heartbeat` how long one may give no sign of life (0: for ever). `lr` and `rate` are a learning rate and a
    schedule of it that stand in for those the bundle was compiled with. `mode` (throughput or latency,
    runtime/job/dispatcher.py) and the length of the `queue` are for requests to an inference bundle.

    `pace` and `latency` are for measuring schedules apart from kernels and networks. `pace` are the least seconds of a
    computation of each kind: F, B with W included, W, and U; `2U` is U of stage 2 alone. `latency` are the seconds from
    a send until its message arrives. They do not change what is computed.
    """
    options = OpenOptions(
        timeout=timeout, heartbeat=heartbeat, data=None if data is None else os.fspath(data), shuffle=shuffle,
        seed=seed, last=last, eval_data=None if eval_data is None else os.fspath(eval_data), resume=resume, audit=audit,
        pace=pace, latency=latency, lr=lr, rate=rate, mode=mode, queue=queue,
    )  # fmt: skip
    return Job(open_bundle(path), **keywords(job_options(options)))
