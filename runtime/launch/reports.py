"""The reports of a group's ranks on their way to rank 0: steps at once, losses and traces when all are gathered.

In: the messages of a rank's worker. Out: rows of metrics, and what all ranks reported.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from penstock.ir.graph import Module
from penstock.runtime.group.clocks import measure_offset
from penstock.runtime.group.group import RankGroup, time_span
from penstock.runtime.messages.control import Done, Evaluated, Record, Step, TraceRecord
from penstock.runtime.messages.ledger import LedgerEntry
from penstock.runtime.state.settings import Settings, learning_rate
from penstock.runtime.telemetry.metrics import Metrics
from penstock.runtime.telemetry.steps import StepsUnderWay
from penstock.runtime.telemetry.trace import CollectiveTimes, Event
from penstock.support.errors import PeerLost, PenstockError

# Below the tags of the pipeline's channels.
_REPORT_TAG = 1
# In place of the norm of a step that has none; no norm is negative.
_NO_NORM = -1.0
# Steps that rank 0 may not have taken yet.
_UNTOLD = 256
# A step may take any time; a lost rank shows elsewhere first.
_STEP_TIMEOUT = timedelta(days=7)


class Reports:
    """Steps on their way from the ranks of the loss to rank 0."""

    def __init__(self, worker_rank: int, module: Module, tables: Settings, metrics: Metrics | None) -> None:
        self._rank, self._steps, self._tables, self._metrics = worker_rank, StepsUnderWay(module), tables, metrics
        self.failure: Exception | None = None
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def take(self, step: Step) -> None:
        """Accept a step that finished on this rank."""
        if self._metrics is not None:
            self._add(self._rank, step)
            return
        norm = _NO_NORM if step.grad_norm is None else step.grad_norm
        message = torch.tensor([step.step, step.loss, norm, *step.losses], dtype=torch.float64)
        work = dist.isend(message, 0, tag=_REPORT_TAG)
        assert work is not None
        self._sent.append((work, message))
        if len(self._sent) > _UNTOLD:
            self._sent.popleft()[0].wait(_STEP_TIMEOUT)

    def expect(self, count: int) -> threading.Thread | None:
        """Receive `count` steps in the background, on rank 0, as far as losses are computed elsewhere."""
        if self._metrics is None or self._steps.shares.keys() == {self._rank}:
            return None
        thread = threading.Thread(target=self._listen, args=(count,), name="reports", daemon=True)
        thread.start()
        return thread

    def finish(self, listener: threading.Thread | None, timeout: float) -> None:
        """Wait until the steps are at rank 0; `listener` is the thread of `expect`."""
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


class Answers:
    """The messages of this rank's worker: steps go to rank 0 at once, other answers are kept until all ranks put theirs
    together."""

    def __init__(self, reports: Reports, metrics: Metrics | None) -> None:
        self._reports, self._metrics = reports, metrics
        self._losses: dict[int, float] = {}
        self._evaluated: str | None = None
        self._events: list[Event] = []
        self._held: list[LedgerEntry] = []
        self._collectives: list[CollectiveTimes] = []

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
            self._collectives.extend(message.collectives)

    def losses_of_all(self, group: RankGroup, step: int) -> dict[int, float]:
        """Return the losses of all ranks in the evaluation after a step, by microbatch."""
        key = f"evaluation/{step}"
        parts = group.gather(key, json.dumps(self._losses).encode())
        self._losses.clear()
        # All ranks have put their losses there, so all have read those of the evaluation before.
        if self._evaluated is not None:
            group.forget(self._evaluated)
        self._evaluated = key
        return {int(i): loss for part in parts for i, loss in json.loads(part).items()}

    def traces_of_all(self, group: RankGroup) -> list[tuple[list[Event], list[LedgerEntry], list[CollectiveTimes]]]:
        """Return actions, memory and collectives of every rank, by the clock of rank 0."""
        ahead = measure_offset(group).seconds
        parts = (
            [(action, start + ahead, end + ahead) for action, start, end in self._events],
            [entry._replace(at=entry.at + ahead) for entry in self._held],
            [(text, *(time + ahead for time in times)) for text, *times in self._collectives],
        )
        traces = [json.loads(part) for part in group.gather("trace", json.dumps(parts).encode())]
        return [(events, [LedgerEntry(*entry) for entry in held], done) for events, held, done in traces]
