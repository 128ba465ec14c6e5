"""One rank of a run that torchrun (or srun) started: the same Worker, with the commands of `penstock run` given by itself.

Every rank goes through the same list: run so many batches, save, run, ... The rank that computes the loss sends it and the norm of the
gradient to rank 0, which writes the metrics, shows progress and indexes checkpoints. The process is the child of its keeper (keeper.py),
which watches it and talks to the keepers of the other ranks; an error is reported there, and ends this rank with the exit code of its kind.
Rank 0 says where the run begins: at its newest checkpoint if it was started before (restarts.py).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.graph import Module
from penstock.runtime.checkpoint.finding import decide_together
from penstock.runtime.checkpoint.lock import Claims, Held
from penstock.runtime.checkpoint.resuming import start_from
from penstock.runtime.data.samples import check_data
from penstock.runtime.group.clocks import measure_offset
from penstock.runtime.group.group import RankGroup, time_span
from penstock.runtime.group.hosts import Interface, Present, check_hosts, describe_hosts, place_of
from penstock.runtime.group.meet import join_place
from penstock.runtime.group.trust import open_trust
from penstock.runtime.messages.control import (
    Alive,
    Arrays,
    Channel,
    Done,
    Evaluate,
    Evaluated,
    Gathered,
    Message,
    Planned,
    Record,
    RunCommand,
    Setup,
    Step,
    Stop,
    TraceRecord,
)
from penstock.runtime.messages.ledger import LedgerEntry
from penstock.runtime.messages.status import BEAT_SECONDS, Patience, Status
from penstock.runtime.state.settings import Tables, learning_rate
from penstock.runtime.telemetry.metrics import Metrics
from penstock.runtime.telemetry.overlap import overlap_of
from penstock.runtime.telemetry.steps import StepsUnderWay
from penstock.runtime.telemetry.trace import Event, write_trace
from penstock.runtime.telemetry.utilisation import Utilisation
from penstock.runtime.worker.actions import fed_inputs, microbatch_size
from penstock.runtime.worker.evaluation import Evaluation, count_evaluation, mean_loss
from penstock.runtime.worker.worker import Worker, describe_failure
from penstock.support.errors import PeerLost, PenstockError, UsageError

from . import restarts
from .elastic import Replanned, devices_on, lost_devices, replan
from .local import thread_environment
from .options import RunOptions

# Below the tags of the pipeline's channels.
_REPORT_TAG = 1
# In place of the norm of a step that has none; no norm is negative.
_NO_NORM = -1.0
# A step may take any time; a lost rank shows elsewhere first.
_STEP_TIMEOUT = timedelta(days=7)
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class Reports:
    """Steps on their way from the ranks of the loss to rank 0."""

    def __init__(self, worker_rank: int, module: Module, tables: Tables, metrics: Metrics | None) -> None:
        self._rank, self._steps, self._tables, self._metrics = worker_rank, StepsUnderWay(module), tables, metrics
        self.failure: Exception | None = None
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def take(self, step: Step) -> None:
        """A step finished on this rank."""
        if self._metrics is not None:
            self._add(self._rank, step)
            return
        norm = _NO_NORM if step.grad_norm is None else step.grad_norm
        message = torch.tensor([step.step, step.loss, norm, *step.losses], dtype=torch.float64)
        work = dist.isend(message, 0, tag=_REPORT_TAG)
        assert work is not None
        self._sent.append((work, message))

    def expect(self, count: int) -> threading.Thread | None:
        """On rank 0: take `count` steps in the background, as far as losses are computed elsewhere."""
        if self._metrics is None or self._steps.shares.keys() == {self._rank}:
            return None
        thread = threading.Thread(target=self._listen, args=(count,), name="reports", daemon=True)
        thread.start()
        return thread

    def finish(self, listener: threading.Thread | None, timeout: float) -> None:
        """Wait until the steps are at rank 0; `listener` is what `expect` gave."""
        for work, _ in self._sent:
            work.wait(time_span(timeout))
        self._sent.clear()
        if listener is None:
            return
        listener.join(timeout)
        if isinstance(self.failure, PenstockError):
            raise self.failure
        if listener.is_alive() or self.failure is not None:
            what = f"not all ranks reported their losses within {timeout:g} s"
            raise PeerLost(what, where=f"rank {self._rank}") from self.failure

    def _add(self, rank: int, part: Step) -> None:
        assert self._metrics is not None
        step = self._steps.take(rank, part)
        if step is not None:
            self._metrics.add(step)

    def _listen(self, count: int) -> None:
        assert self._metrics is not None
        try:
            for _ in range(count):
                for source in self._steps.shares.keys() - {self._rank}:
                    message = torch.empty(3 + len(self._steps.shares[source]), dtype=torch.float64)
                    work = dist.irecv(message, source, tag=_REPORT_TAG)
                    assert work is not None
                    work.wait(_STEP_TIMEOUT)
                    step, loss, norm, *losses = message.tolist()
                    rate = learning_rate(self._tables, int(step))
                    at = time.monotonic()
                    self._add(
                        source, Step(int(step), loss, tuple(losses), rate, at, None if norm == _NO_NORM else norm)
                    )
        except (RuntimeError, PenstockError) as error:
            # The pipeline meets the same lost connection, and says more about it; this is for the end of the chunk.
            self.failure = error


class _Answers:
    """What the worker of this rank says: steps go to rank 0 at once, the rest is kept until all ranks put theirs together."""

    def __init__(self, reports: Reports, metrics: Metrics | None) -> None:
        self._reports, self._metrics = reports, metrics
        self._losses: dict[int, float] = {}
        self._events: list[Event] = []
        self._held: list[LedgerEntry] = []

    def take(self, message: Record, arrays: Mapping[str, np.ndarray]) -> None:
        if isinstance(message, Step):
            self._reports.take(message)
        elif isinstance(message, Evaluated):
            self._losses.update(message.losses)
        elif isinstance(message, Done) and self._metrics is not None:
            self._metrics.tell_wait(message.waited)
        elif isinstance(message, TraceRecord):
            self._events.extend(message.events)
            self._held.extend(message.held)

    def losses_of_all(self, group: RankGroup, step: int) -> dict[int, float]:
        """What all ranks computed in the evaluation after a step, by microbatch."""
        parts = group.gather(f"evaluation/{step}", json.dumps(self._losses).encode())
        self._losses.clear()
        return {int(i): loss for part in parts for i, loss in json.loads(part).items()}

    def traces_of_all(self, group: RankGroup) -> list[tuple[list[Event], list[LedgerEntry]]]:
        """Actions and memory of every rank, by the clock of rank 0."""
        ahead = measure_offset(group).seconds
        own = (
            [(action, start + ahead, end + ahead) for action, start, end in self._events],
            [entry._replace(at=entry.at + ahead) for entry in self._held],
        )
        traces = [json.loads(part) for part in group.gather("trace", json.dumps(own).encode())]
        return [(events, [LedgerEntry(*entry) for entry in held]) for events, held in traces]


def run_rank(
    options: RunOptions,
    interface: Interface,
    status: Status,
    channel: Channel,
    watch: int,
    failing: list[Callable[[], None]],
    busy: Callable[[], Sequence[float]],
) -> None:
    """Join the group, run all steps, leave. `watch` is the port of the keeper, which knows how many seconds all ranks were `busy`;
    `failing` gets what is to be done before a failure is reported."""
    seat = place_of()
    rank, world = seat.rank, seat.world
    bundle = open_bundle(options.bundle, rank)
    fewer = world != bundle.world_size
    own = None if fewer else _count_samples(bundle, rank, options)
    status.show("joining")
    group = RankGroup(
        join_place(seat, interface, options.timeout, open_trust(options.secret, options.tls)),
        rank,
        world,
        options.timeout,
    )
    present = _gather_keepers(group, Present(seat.host, interface.address, interface.name, os.getpid(), watch), channel)
    told = []
    claims = Claims(restarts.run_name())
    if options.checkpoint is not None:
        # By rank 0, which alone puts directories and pointers in their places.
        directory = options.checkpoint
        told = decide_together(group, "claim", lambda: Held(claims.hold(directory)), Held).warnings
    planned = []
    if fewer:
        status.show("planning")
        bundle, plan = _plan_together(group, bundle, options, present, channel)
        planned.append(plan)
    warnings = check_hosts(bundle, present)
    module = bundle.module
    assert module.schedule is not None
    count, to_evaluate = own or _count_samples(bundle, rank, options)
    beginning = restarts.begin_together(group, options)
    start = start_from(bundle, options.data, beginning.chosen, options.lr, options.rate)
    first, tables = start.step, start.tables
    end = first + options.steps if beginning.end is None else beginning.end
    metrics, record = None, None
    if rank == 0:
        lines = [f"{describe_hosts(present)} (interface chosen {interface.why})"]
        if beginning.again:
            place = f"checkpoint {start.place}" if start.place is not None else "where it began"
            lines.append(f"penstock: the run goes on from {place}")
        lines += [f"penstock: {text}" for text in planned]
        lines += [
            f"warning: {text}"
            for text in [*told, *(beginning.words if beginning.again else [*start.warnings, *warnings])]
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)
        samples = microbatch_size(module) * module.schedule.microbatches
        append = start.place is not None or beginning.again
        metrics = Metrics(
            options.metrics,
            samples,
            first,
            end,
            progress=options.progress,
            append=append,
            log=options.log,
            busy=Utilisation(module.rank_stages(), busy),
        )
        record = restarts.begin(options, first)

    def receive(wait: bool) -> tuple[Message, Arrays] | None:
        raise AssertionError("all batches come from the data")

    resumed = None if start.place is None else str(start.place)
    setup = Setup(
        str(bundle.path),
        options.timeout,
        options.data,
        resumed,
        trace=options.trace is not None,
        tables=tables,
        offset=start.offset,
        key=start.key,
        nan=options.nan,
        evaluation=options.evaluation,
    )
    reports = Reports(rank, module, tables, metrics)
    answers = _Answers(reports, metrics)
    worker = Worker(bundle, rank, group, setup, answers.take, receive, status)
    failing.append(worker.saver.settle)
    _agree_on_samples(group, "samples", count)
    evaluation = _agree_on_samples(group, "samples to evaluate on", to_evaluate)
    group.agree("step to start from", str(first))
    group.agree("learning rate", str(tables))
    if metrics is not None:
        metrics.start()
    done = first
    for count in options.chunks(first, end):
        listener = reports.expect(count)
        worker.obey(RunCommand(done, count))
        reports.finish(listener, options.timeout)
        done += count
        if evaluation is not None and options.evaluates_after(done, end):
            worker.obey(Evaluate(evaluation))
            together = answers.losses_of_all(group, done)
            if metrics is not None:
                metrics.evaluated(
                    done, Evaluation(mean_loss(evaluation, microbatch_size(module), together), evaluation)
                )
        if options.checkpoint is not None and options.saves_after(done, end):
            if record is not None:
                claims.hold(options.checkpoint)
                record = restarts.note_save(options, record, done)
            worker.obey(options.save_after(done, end))
    if options.trace is not None:
        traces = answers.traces_of_all(group)
        if metrics is not None:
            actions = [events for events, _ in traces]
            write_trace(Path(options.trace), actions, module=module, held=[held for _, held in traces])
            metrics.overlapped(done, overlap_of(actions, module))
    if metrics is not None:
        metrics.close()
        restarts.finish(options)
        claims.close()
    # The store may live in rank 0 or in the launcher: nobody leaves before all are done.
    group.gather("end", b"")
    worker.obey(Stop())


def _count_samples(bundle: Bundle, rank: int, options: RunOptions) -> tuple[int | None, int | None]:
    """How many samples there are to train and to evaluate on, where this rank reads any: the files
    of other inputs may lie on other hosts."""
    fed = fed_inputs(bundle.module, bundle.rank(rank).stage)
    count = check_data(bundle.module, options.data, bundle.renamed, fed) if fed else None
    if options.evaluation is None:
        return count, None
    found = count_evaluation(bundle.module, options.evaluation, bundle.renamed, fed)
    return count, found if fed else None


def _plan_together(
    group: RankGroup, bundle: Bundle, options: RunOptions, present: Sequence[Present], channel: Channel
) -> tuple[Bundle, str]:
    """The bundle for the ranks that are there, fewer than a bundle has; what is said of it. Rank 0 plans, and the others wait."""
    assert options.checkpoint is not None
    devices = devices_on(bundle, [one.host for one in present])
    made = decide_together(group, "plan", lambda: replan(bundle, devices, Path(options.checkpoint or "")), Replanned)
    found = open_bundle(made.bundle, group.rank)
    channel.send(Planned(made.bundle))
    threads = found.rank(group.rank).threads
    os.environ |= thread_environment(threads)
    torch.set_num_threads(threads)
    lost = lost_devices(bundle, devices)
    return found, f"{group.world} of {bundle.world_size} ranks are there; planned anew without {lost}: {made.told}"


def _gather_keepers(group: RankGroup, own: Present, channel: Channel) -> list[Present]:
    """Where everybody is; the keeper is told, so that it can speak with the others."""
    present = [msgspec.json.decode(part, type=Present) for part in group.gather("present", msgspec.json.encode(own))]
    if group.rank == 0:
        group.put("token", secrets.token_hex(16).encode())
    token = group.get("token", "the token of rank 0").decode()
    hosts, addresses = tuple(one.host for one in present), tuple(one.address for one in present)
    channel.send(
        Gathered(hosts, addresses, tuple(one.watch for one in present), tuple(one.process for one in present), token)
    )
    return present


def _agree_on_samples(group: RankGroup, what: str, count: int | None) -> int | None:
    """How many there are; files of different lengths are refused. Ranks that read none have no say."""
    found = {rank: int(text) for rank, text in enumerate(group.gather(what, str(count or "").encode())) if text}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"rank {rank} has {number}" for rank, number in found.items())
        raise UsageError(f"numbers of {what} differ: {listed}", where=f"rank {group.rank}")
    return next(iter(found.values()), None)


class _Ties:
    """To the keeper: the worker ends when its keeper ends, is killed or is silent."""

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
        """Leave in good order: a keeper that is stopped would be left behind, so its answer is waited for."""
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
                # It is stopped, and would be left behind.
                os.kill(self._parent, signal.SIGKILL)
                os._exit(1)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="penstock.support.processes join", description="One rank of a group; started by penstock run."
    )
    for name in ("threads", "control", "status", "parent", "watch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("interface", "options"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args(argv)
    # Sent to all processes of a terminal: the keeper heeds it, and ends this one.
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
