"""One rank of a run that torchrun (or srun) started: the same Worker, with the commands of `penstock run` given by itself.

Every rank goes through the same list: run so many batches, save, run, ... The rank that computes the loss sends it and the norm of the gradient
to rank 0, which writes the metrics, shows progress and indexes checkpoints. An error ends this rank with the exit code of its kind; the launcher
ends the others, and their own deadlines do where it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ..backends.bundle import Bundle, open_bundle
from ..ir.errors import PeerLost, PenstockError, UsageError
from ..ir.graph import Module
from .choosing import choose_together
from .clocks import measure_offset
from .control import Arrays, DataSpec, Done, Evaluate, Evaluated, Message, Record, Run, Setup, Step, Stop, Trace
from .data import check_data
from .evaluation import Evaluation, count_evaluation, mean_loss
from .hosts import Place, Present, check_hosts, choose_interface, describe_hosts, place_of, same_host
from .meet import join_place
from .metrics import Metrics
from .options import RunOptions
from .program import fed_inputs, microbatch_size
from .resuming import start_from
from .status import Status
from .steps import Steps
from .tables import Tables, learning_rate
from .trace import Event, Held, write_trace
from .transport import Group, time_span
from .worker import Worker, describe_failure

# Below the tags of the pipeline's channels.
_REPORT_TAG = 1
# In place of the norm of a step that has none; no norm is negative.
_NO_NORM = -1.0
# A step may take any time; a lost rank shows elsewhere first.
_STEP_TIMEOUT = timedelta(days=7)


class Reports:
    """Steps on their way from the ranks of the loss to rank 0."""

    def __init__(self, worker_rank: int, module: Module, tables: Tables, metrics: Metrics | None) -> None:
        self._rank, self._steps, self._tables, self._metrics = worker_rank, Steps(module), tables, metrics
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

    def flush(self, timeout: float) -> None:
        for work, _ in self._sent:
            work.wait(time_span(timeout))
        self._sent.clear()

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
                    self._add(source, Step(int(step), loss, tuple(losses), rate, at, None if norm == _NO_NORM else norm))
        except (RuntimeError, PenstockError) as error:
            # The pipeline meets the same lost connection, and says more about it; this is for the end of the chunk.
            self.failure = error


def run_rank(options: RunOptions) -> None:
    """Join the group, run all steps, leave."""
    seat = place_of()
    rank, world = seat.rank, seat.world
    bundle = open_bundle(options.bundle, rank)
    module = bundle.module
    assert module.schedule is not None
    # The files of other inputs may lie on other hosts.
    stage = bundle.rank(rank).stage
    fed = fed_inputs(module, stage)
    count = check_data(module, options.data, bundle.renamed, fed) if fed else None
    to_evaluate = None
    if options.evaluation is not None:
        found = count_evaluation(module, options.evaluation, bundle.renamed, fed)
        to_evaluate = found if fed else None
    interface = choose_interface(seat, _planned_interface(bundle, seat))
    group = Group(join_place(seat, interface, options.timeout), rank, world, options.timeout)
    own = Present(seat.host, interface.address, interface.name, os.getpid())
    present = [msgspec.json.decode(part, type=Present) for part in group.gather("present", msgspec.json.encode(own))]
    chosen = None if options.resume is None else choose_together(group, options.resume)
    start = start_from(bundle, options.data, chosen, options.lr, options.rate)
    first, tables = start.step, start.tables
    warnings = [*start.warnings, *check_hosts(bundle, present)]
    metrics = None
    events: list[Event] = []
    held: list[Held] = []
    losses: dict[int, float] = {}
    if rank == 0:
        print(f"{describe_hosts(present)} (interface chosen {interface.why})", file=sys.stderr, flush=True)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        samples = microbatch_size(module) * module.schedule.microbatches
        end = first + options.steps
        metrics = Metrics(options.metrics, samples, first, end, progress=options.progress, append=start.place is not None, log=options.log)

    def reply(message: Record, arrays: Mapping[str, np.ndarray]) -> None:
        if isinstance(message, Step):
            reports.take(message)
        elif isinstance(message, Evaluated):
            losses.update(message.losses)
        elif isinstance(message, Done) and metrics is not None:
            metrics.tell_wait(message.waited)
        elif isinstance(message, Trace):
            events.extend(message.events)
            held.extend(message.held)

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
    worker = Worker(bundle, rank, group, setup, reply, receive, Status(None, rank))
    reports = Reports(rank, module, tables, metrics)
    _agree_on_samples(group, "samples", count)
    evaluation = _agree_on_samples(group, "samples to evaluate on", to_evaluate)
    group.agree("step to start from", str(first))
    group.agree("learning rate", str(tables))
    if metrics is not None:
        metrics.start()
    done = first
    for count in options.chunks(first, first + options.steps):
        listener = reports.expect(count)
        worker.obey(Run(done, count))
        reports.flush(options.timeout)
        if listener is not None:
            listener.join(options.timeout)
            if isinstance(reports.failure, PenstockError):
                raise reports.failure
            if listener.is_alive() or reports.failure is not None:
                what = f"not all ranks reported their losses within {options.timeout:g} s"
                raise PeerLost(what, where=f"rank {rank}") from reports.failure
        done += count
        if evaluation is not None and options.evaluates_after(done, first + options.steps):
            worker.obey(Evaluate(evaluation))
            parts = group.gather(f"evaluation/{done}", json.dumps(losses).encode())
            losses.clear()
            if metrics is not None:
                together = {int(i): loss for part in parts for i, loss in json.loads(part).items()}
                metrics.evaluated(done, Evaluation(mean_loss(evaluation, microbatch_size(module), together), evaluation))
        if options.checkpoint is not None and options.saves_after(done, first + options.steps):
            worker.obey(options.save_after(done, first + options.steps))
    if options.trace is not None:
        ahead = measure_offset(group).seconds
        moved = [(action, start + ahead, end + ahead) for action, start, end in events], [(at + ahead, *rest) for at, *rest in held]
        traces = [json.loads(part) for part in group.gather("trace", json.dumps(moved).encode())]
        if rank == 0:
            write_trace(Path(options.trace), [trace[0] for trace in traces], module=module, held=[trace[1] for trace in traces])
    if metrics is not None:
        metrics.close()
    # The store may live in rank 0 or in the launcher: nobody leaves before all are done.
    group.gather("end", b"")
    worker.obey(Stop())


def _planned_interface(bundle: Bundle, place: Place) -> str:
    """What the cluster file of the bundle says of the host that a rank is planned for, if this is it."""
    cluster, name = bundle.module.cluster, bundle.rank(place.rank).host
    own = [host.interface for host in cluster.hosts if host.name == name] if cluster is not None else []
    return own[0] if own and same_host(name, place.host) else ""


def _agree_on_samples(group: Group, what: str, count: int | None) -> int | None:
    """How many there are; files of different lengths are refused. Ranks that read none have no say."""
    found = {rank: int(text) for rank, text in enumerate(group.gather(what, str(count or "").encode())) if text}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"rank {rank} has {number}" for rank, number in found.items())
        raise UsageError(f"numbers of {what} differ: {listed}", where=f"rank {group.rank}")
    return next(iter(found.values()), None)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="penstock.runtime.join", description="One rank under torchrun; started by penstock run.")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--options", required=True)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    try:
        run_rank(msgspec.json.decode(arguments.options, type=RunOptions))
    except BaseException as error:
        failed = describe_failure(error)
        where = failed.where or f"rank {os.environ.get('RANK', '?')}"
        print(f"error: {where}: {failed.what}" + (f"\n  hint: {failed.hint}" if failed.hint else ""), file=sys.stderr, flush=True)
        # Threads may be stuck in gloo: do not wait for them.
        os._exit(error.exit_code if isinstance(error, PenstockError) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])


__all__ = ["DataSpec", "main", "run_rank"]
