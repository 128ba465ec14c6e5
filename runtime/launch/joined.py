"""One rank of a run that torchrun (or srun) started: the same Worker, with the commands of `penstock run` given by
itself.

Every rank goes through the same list: run so many batches, save, run, ... The rank that computes the loss sends it
and the norm of the gradient to rank 0. Rank 0 writes the metrics, shows progress and indexes checkpoints. The process
is the child of its keeper (keeper.py), which watches it and talks to the keepers of the other ranks. An error is
reported there, and ends this rank with the exit code of its kind. Rank 0 says where the run begins: at its newest
checkpoint if it was started before (restarts.py).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.batch_shares import fed_to_rank, microbatch_size
from penstock.ir.graph import Module
from penstock.runtime.checkpoint.finding import decide_together
from penstock.runtime.checkpoint.lock import Claims, Held
from penstock.runtime.checkpoint.resuming import start_from
from penstock.runtime.data.samples import check_data
from penstock.runtime.group.group import RankGroup
from penstock.runtime.group.hosts import Interface, Present, check_hosts, describe_hosts, place_of
from penstock.runtime.group.meet import join_place
from penstock.runtime.group.trust import open_trust
from penstock.runtime.messages.control import (
    Alive,
    Arrays,
    Channel,
    Done,
    Evaluate,
    Evaluation,
    Gathered,
    Message,
    Planned,
    RunCommand,
    Setup,
    Stop,
)
from penstock.runtime.messages.status import BEAT_SECONDS, Patience, Status
from penstock.runtime.telemetry.collective_times import collective_totals
from penstock.runtime.telemetry.metrics import Metrics
from penstock.runtime.telemetry.overlap import overlap_of
from penstock.runtime.telemetry.trace import write_trace
from penstock.runtime.telemetry.utilisation import Utilisation
from penstock.runtime.worker.evaluation import count_evaluation, mean_loss
from penstock.runtime.worker.worker import Worker, describe_failure
from penstock.support.entry_points import ENTRY_POINTS
from penstock.support.errors import PenstockError, UsageError
from penstock.support.terminal import say_as_is

from . import restarts
from .elastic import Replanned, devices_on, lost_devices, replan
from .local import thread_environment
from .options import RunOptions
from .preflight import evaluation_data, save_after, training_data
from .reports import Answers, Reports

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def run_rank(
    options: RunOptions,
    interface: Interface,
    status: Status,
    channel: Channel,
    watch: int,
    failing: list[Callable[[], None]],
    busy: Callable[[], Sequence[float]],
) -> None:
    """Join the group, run all steps, leave. `watch` is the port of the keeper, which knows how many seconds all ranks
    were `busy`. `failing` gets the actions that come before the report of a failure."""
    seat = place_of()
    bundle = open_bundle(options.bundle, seat.rank)
    fewer = seat.world != bundle.world_size
    counts = None if fewer else _count_samples(bundle, seat.rank, options)
    status.show("joining")
    group = RankGroup(
        join_place(seat, interface, options.timeout, open_trust(options.secret, options.tls)),
        seat.rank,
        seat.world,
        options.timeout,
    )

    def end_with(error: PenstockError) -> None:
        channel.send(describe_failure(error))
        os._exit(error.exit_code)

    group.lost = end_with
    present = _gather_keepers(group, Present(seat.host, interface.address, interface.name, os.getpid(), watch), channel)
    run = _GroupRun(options, group, bundle)
    run.claim()
    if fewer:
        status.show("planning")
        run.plan_anew(present, channel)
    warnings = check_hosts(run.bundle, present)
    counts = counts or _count_samples(run.bundle, seat.rank, options)
    run.find_start()
    if group.rank == 0:
        run.announce(f"{describe_hosts(present)} (interface chosen {interface.why})", warnings)
        run.open_records(busy)
    worker = run.load(status)
    failing.append(worker.saver.settle)
    run.train(worker, *run.agree(counts))
    run.write_trace()
    run.finish()
    # The store may live in rank 0 or in the launcher: no rank leaves before all are done.
    group.gather("end", b"")
    worker.obey(Stop())


class _GroupRun:
    """The part of one rank in a run of a group that has met. All ranks call the same methods in the same order; rank 0
    alone, which writes, announces and opens the records."""

    def __init__(self, options: RunOptions, group: RankGroup, bundle: Bundle) -> None:
        self.options, self.group, self.bundle = options, group, bundle
        self.claims = Claims(restarts.run_name())
        self.metrics: Metrics | None = None
        self._record: restarts.UnfinishedRun | None = None
        self._claimed: list[str] = []
        self._planned: list[str] = []

    @property
    def module(self) -> Module:
        return self.bundle.module

    def claim(self) -> None:
        """Claim the directory of checkpoints: by rank 0, which alone puts directories and pointers in their places."""
        if self.options.checkpoint is not None:
            directory = self.options.checkpoint
            self._claimed = decide_together(
                self.group, "claim", lambda: Held(self.claims.hold(directory)), Held
            ).warnings

    def plan_anew(self, present: Sequence[Present], channel: Channel) -> None:
        """Compile a bundle for the ranks that are there, and continue with it."""
        self.bundle, plan = _plan_together(self.group, self.bundle, self.options, present, channel)
        self._planned.append(plan)

    def find_start(self) -> None:
        """Find where the run starts and ends, the same on all ranks."""
        options = self.options
        self._beginning = restarts.begin_together(self.group, options)
        self.start = start_from(self.bundle, training_data(options), self._beginning.chosen, options.lr, options.rate)
        self.first = self.start.step
        self.end = self.first + options.steps if self._beginning.end is None else self._beginning.end

    def announce(self, hosts: str, warnings: Sequence[str]) -> None:
        """Print on stderr where the ranks are, where the run begins, and what to know of it."""
        start, beginning = self.start, self._beginning
        lines = [hosts]
        if beginning.again:
            place = f"checkpoint {start.place}" if start.place is not None else "where it began"
            lines.append(f"penstock: the run goes on from {place}")
        lines += [f"penstock: {text}" for text in self._planned]
        lines += [
            f"warning: {text}"
            for text in [*self._claimed, *(beginning.words if beginning.again else [*start.warnings, *warnings])]
        ]
        say_as_is("\n".join(lines))

    def open_records(self, busy: Callable[[], Sequence[float]]) -> None:
        """Open the metrics, and note that the run is under way."""
        options, module = self.options, self.module
        assert module.schedule is not None
        self.metrics = Metrics(
            options.metrics,
            microbatch_size(module) * module.schedule.microbatches,
            self.first,
            self.end,
            progress=options.progress,
            append=self.start.place is not None or self._beginning.again,
            log=options.log,
            busy=Utilisation(module.rank_stages(), busy),
        )
        self._record = restarts.begin(options, self.first)

    def load(self, status: Status) -> Worker:
        """Load the stage and its state."""
        options, start = self.options, self.start
        setup = Setup(
            str(self.bundle.path),
            options.timeout,
            training_data(options),
            None if start.place is None else str(start.place),
            trace=options.trace is not None,
            tables=start.tables,
            offset=start.offset,
            key=start.key,
            nan=options.nan,
            evaluation=evaluation_data(options),
        )
        self._reports = Reports(self.group.rank, self.module, start.tables, self.metrics)
        self._answers = Answers(self._reports, self.metrics)
        return Worker(self.bundle, self.group.rank, self.group, setup, self._answers.take, _receive, status)

    def agree(self, counts: tuple[int | None, int | None]) -> tuple[int, int | None]:
        """Compare samples, step and rates with all ranks. Return the first step, and the samples to evaluate on."""
        samples, to_evaluate = counts
        _agree_on_samples(self.group, "samples", samples)
        evaluation = _agree_on_samples(self.group, "samples to evaluate on", to_evaluate)
        self.group.agree("step to start from", str(self.first))
        self.group.agree("learning rate", str(self.start.tables))
        return self.first, evaluation

    def train(self, worker: Worker, done: int, evaluation: int | None) -> None:
        """Run all steps, with evaluations and saves in between."""
        options, end = self.options, self.end
        if self.metrics is not None:
            self.metrics.start()
        for count in options.chunks(done, end):
            listener = self._reports.expect(count)
            worker.obey(RunCommand(done, count))
            self._reports.finish(listener, options.timeout)
            done += count
            if evaluation is not None and options.evaluates_after(done, end):
                self._evaluate(worker, done, evaluation)
            if options.saves_after(done, end):
                self._save(worker, done)

    def _evaluate(self, worker: Worker, done: int, samples: int) -> None:
        worker.obey(Evaluate(samples))
        losses = self._answers.losses_of_all(self.group, done)
        if self.metrics is not None:
            mean = mean_loss(samples, microbatch_size(self.module), losses)
            self.metrics.evaluated(done, Evaluation(mean, samples))

    def _save(self, worker: Worker, done: int) -> None:
        assert self.options.checkpoint is not None
        if self._record is not None:
            self.claims.hold(self.options.checkpoint)
            self._record = restarts.note_save(self.options, self._record, done)
        worker.obey(save_after(self.options, done, self.end))

    def write_trace(self) -> None:
        """Gather the traces of all ranks; rank 0 writes them."""
        if self.options.trace is None:
            return
        traces = self._answers.traces_of_all(self.group)
        if self.metrics is not None:
            actions = [events for events, _, _ in traces]
            exchanges = [done for _, _, done in traces]
            write_trace(
                Path(self.options.trace),
                actions,
                module=self.module,
                held=[held for _, held, _ in traces],
                collectives=exchanges,
            )
            self.metrics.overlapped(self.end, overlap_of(actions, self.module))
            self.metrics.exchanged(self.end, collective_totals(exchanges, self.module))

    def finish(self) -> None:
        """Close what rank 0 writes: the run is complete."""
        if self.metrics is not None:
            self.metrics.close()
            restarts.finish(self.options)
            self.claims.close()


def _receive(wait: bool) -> tuple[Message, Arrays] | None:
    raise AssertionError("all batches come from the data")


def _count_samples(bundle: Bundle, rank: int, options: RunOptions) -> tuple[int | None, int | None]:
    """Count the samples to train and to evaluate on, where this rank reads any: the files of other inputs may lie on
    other hosts."""
    fed = fed_to_rank(bundle.module, rank)
    count = check_data(bundle.module, training_data(options), bundle.renamed, fed) if fed else None
    evaluation = evaluation_data(options)
    if evaluation is None:
        return count, None
    samples = count_evaluation(bundle.module, evaluation, bundle.renamed, fed)
    return count, samples if fed else None


def _plan_together(
    group: RankGroup, bundle: Bundle, options: RunOptions, present: Sequence[Present], channel: Channel
) -> tuple[Bundle, str]:
    """Return the bundle for the ranks that are there, fewer than a bundle has, and its description. Rank 0 plans, and
    the other ranks wait."""
    assert options.checkpoint is not None
    devices = devices_on(bundle, [member.host for member in present])
    replanned = decide_together(
        group, "plan", lambda: replan(bundle, devices, Path(options.checkpoint or "")), Replanned
    )
    fewer = open_bundle(replanned.bundle, group.rank)
    channel.send(Planned(replanned.bundle))
    threads = fewer.rank(group.rank).threads
    os.environ |= thread_environment(threads)
    torch.set_num_threads(threads)
    lost = lost_devices(bundle, devices)
    return (
        fewer,
        f"{group.world} of {bundle.world_size} ranks are there; planned anew without {lost}: {replanned.summary}",
    )


def _gather_keepers(group: RankGroup, own_presence: Present, channel: Channel) -> list[Present]:
    """Gather where all ranks are, and tell the keeper, so that it can speak with the other keepers."""
    present = [
        msgspec.json.decode(part, type=Present) for part in group.gather("present", msgspec.json.encode(own_presence))
    ]
    if group.rank == 0:
        group.put("token", secrets.token_hex(16).encode())
    token = group.get("token", "the token of rank 0").decode()
    hosts, addresses = tuple(member.host for member in present), tuple(member.address for member in present)
    channel.send(
        Gathered(
            hosts,
            addresses,
            tuple(member.watch for member in present),
            tuple(member.process for member in present),
            token,
        )
    )
    return present


def _agree_on_samples(group: RankGroup, what: str, count: int | None) -> int | None:
    """Return how many there are; files of different lengths are refused. Ranks that read none have no say."""
    counts = {rank: int(text) for rank, text in enumerate(group.gather(what, str(count or "").encode())) if text}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"rank {rank} has {number}" for rank, number in counts.items())
        raise UsageError(f"numbers of {what} differ: {listed}", where=f"rank {group.rank}")
    return next(iter(counts.values()), None)


class _Ties:
    """The connection of a worker to its keeper: the worker ends when its keeper ends, is killed or is silent."""

    def __init__(self, channel: Channel, parent: int, heartbeat: float) -> None:
        self._channel, self._parent, self._patience = channel, parent, Patience(heartbeat)
        self._heard = time.monotonic()
        self._answered = threading.Event()
        self.busy: tuple[float, ...] = ()
        # The system kills this process when its parent dies, even while it is stopped.
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        threading.Thread(target=self._read, name="control", daemon=True).start()
        threading.Thread(target=self._watch, name="keeper", daemon=True).start()

    def part(self) -> None:
        """End in good order, and wait for the keeper's answer: a stopped keeper would stay behind otherwise."""
        self._answered.clear()
        self._channel.send(Done())
        self._answered.wait(self._patience.limit + 5)

    def _read(self) -> None:
        while (received := self._channel.receive()) is not None:
            self._heard = time.monotonic()
            if isinstance(received[0], Alive):
                self.busy = received[0].busy
            self._answered.set()
        os._exit(1)

    def _watch(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._patience.look()
            if self._patience.over(self._heard):
                # The worker is stopped, and would stay behind.
                os.kill(self._parent, signal.SIGKILL)
                os._exit(1)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{ENTRY_POINTS['begin']} join", description="One rank of a group; started by penstock run."
    )
    for name in ("threads", "control", "status", "parent", "watch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("interface", "options"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args(argv)
    # A terminal sends the signal to all its processes. The keeper handles it, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(arguments.threads)
    options = msgspec.json.decode(arguments.options, type=RunOptions)
    channel = Channel(socket.socket(fileno=arguments.control))
    ties = _Ties(channel, arguments.parent, options.heartbeat)
    status = Status(arguments.status, 0)
    status.show("starting")
    status.start_heart()
    failing: list[Callable[[], None]] = []
    try:
        interface = msgspec.json.decode(arguments.interface, type=Interface)
        run_rank(options, interface, status, channel, arguments.watch, failing, lambda: ties.busy)
        ties.part()
    except BaseException as error:
        try:
            for action in failing:
                action()
            channel.send(describe_failure(error))
        finally:
            # Threads may be stuck in gloo: do not wait for them.
            os._exit(error.exit_code if isinstance(error, PenstockError) else 1)
