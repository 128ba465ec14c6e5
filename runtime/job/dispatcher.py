"""Requests in flight through the stages of an inference bundle: any thread hands them over, one thread of ours moves
them.

In: checked requests. Out: a future for each, which gets all outputs of its own samples, or the error that ended the
job.

    submit ─► queue (bounded) ─► microbatches ─► Piece to the ranks ─► stage 0 ─► ... ─► Output ─► rows ─► futures

throughput  Requests share microbatches (runtime/job/requests.py says when), and up to 2 · ranks + 2 microbatches are
            under way, so that every rank has one to work on and one to follow. A microbatch that is not full goes
            only while fewer are under way than there are stages: when the pipeline has nothing better to do. So
            there is nothing to set: requests that wait under load fill microbatches up by themselves.
latency     One request at a time: its microbatches follow each other through the stages, and the next request
            begins when it is answered.

The queue holds requests that have samples in no microbatch yet; `submit` waits for room in it. `finish` answers
everything that was accepted and empties the pipeline. After an error of a worker every request that is not answered has
that error.

Limit: a callback of a future runs on our thread; it must not wait for another request.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from penstock.ir.batch_shares import share_of
from penstock.runtime.launch.local import Workers
from penstock.runtime.messages.control import Arrays, Done, End, Message, Output, RequestBatch, Serve, TraceRecord
from penstock.runtime.messages.defaults import LATENCY
from penstock.support.errors import PenstockError, QueueFull

from .requests import Flying, Packer, Request, RequestPart, Ticket

if TYPE_CHECKING:
    from .own_process import OwnProcess

# Seconds to wait for our thread when the job is ended: it may be in the middle of a send.
_ABORT_SECONDS = 2.0
# Takes messages for the job itself: memory at the end of a run, and traces.
Note = Callable[[int, Done | TraceRecord], None]


class Drained(Exception):
    """The sign that the pipeline was emptied for another command; a caller that has a request begins anew."""


class Serving:
    """One run of requests, from an empty pipeline to an empty pipeline. `fed` are the inputs of each rank, `batch` the
    number of the first batch and `per_batch` how many microbatches it has."""

    def __init__(
        self,
        workers: Workers | OwnProcess,
        fed: Sequence[Collection[str]],
        batch: int,
        per_batch: int,
        mode: str,
        queue: int,
        note: Note,
    ) -> None:
        self._workers, self._fed, self._note = workers, fed, note
        self._shares = [share_of(workers.bundle.module, rank) for rank in range(workers.count)]
        self._batch, self._per_batch = batch, per_batch
        self._next = batch * per_batch
        self._one_by_one = mode == LATENCY
        self._packer = Packer(shares=not self._one_by_one)
        self._most = workers.most_in_flight
        self._hungry = len(workers.bundle.module.stages)
        self._flying: dict[int, Flying] = {}
        # Shared between threads, under the condition.
        self._changed = threading.Condition()
        self._incoming: deque[Ticket] = deque()
        self._room = queue
        self._closing = self._ended = self._aborted = False
        # Nothing can be sent before an output arrives, and so no thread has to be woken up; some future was cancelled.
        self._full = self._cancelled = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------- any thread

    def submit(self, requests: Sequence[Request], timeout: float | None = None) -> list[Future[Arrays]]:
        """Accept requests that belong together, as soon as the queue has room for one; QueueFull after `timeout`
        seconds without."""
        tickets = [Ticket(request) for request in requests]
        for ticket in tickets:
            ticket.future.add_done_callback(self._done)
        if threading.current_thread() is self._thread:
            timeout = 0.0  # no other thread would make room
        with self._changed:
            free = self._changed.wait_for(
                lambda: (self._room > 0 and not self._closing) or self._ended or self._error is not None, timeout
            )
            if self._error is not None:
                raise self._error
            if self._ended:
                raise Drained
            if not free:
                raise QueueFull(
                    f"the queue of requests had no room within {timeout:g} s",
                    where="submit",
                    hint="wait longer, or send fewer at once",
                )
            self._room -= len(tickets)
            self._incoming.extend(tickets)
            sleeps = not self._full
        if sleeps:
            self._workers.wake()
        return [ticket.future for ticket in tickets]

    def _done(self, future: Future[Arrays]) -> None:
        if future.cancelled():
            # Its place in the queue is free, whether or not anything else happens.
            self._cancelled = True
            self._workers.wake()

    def finish(self) -> int:
        """Answer all accepted requests, empty the pipeline, and return the number of the batch after it. Raises the
        error that ended the job."""
        with self._changed:
            self._closing = True
        self._workers.wake()
        self._thread.join()  # bounded: every wait of the thread is
        if self._error is not None:
            raise self._error
        return -(-self._next // self._per_batch)

    def abort(self) -> None:
        """Abort: requests that are not answered get an error. The workers may be in the middle of a batch then."""
        self._aborted = True
        self._workers.wake()
        self._thread.join(_ABORT_SECONDS)
        self._fail(PenstockError("the job was ended before the request was answered"))

    # -------------------------------------------------------------------------------------------- our thread

    def _run(self) -> None:
        try:
            self._workers.send_all(Serve(self._batch))
            while not self._aborted:
                self._admit()
                self._dispatch()
                self._full = len(self._flying) >= self._most
                if self._is_over():
                    break
                received = self._workers.receive() if self._flying else self._workers.poll()
                if received is not None:
                    self._take(*received[1:])
            else:
                return
            self._workers.send_all(End())
            waiting = set(range(self._workers.count))
            while waiting:
                rank, message, _ = self._workers.receive()
                if isinstance(message, Done | TraceRecord):
                    self._note(rank, message)
                if isinstance(message, Done):
                    waiting.discard(rank)
        except BaseException as error:
            self._fail(error)

    def _admit(self) -> None:
        with self._changed:
            self._packer.waiting.extend(self._incoming)
            self._incoming.clear()
            self._full = False
        if not self._cancelled:
            return
        self._cancelled = False
        before = len(self._packer.waiting)
        self._packer.purge()
        self._make_room(before - len(self._packer.waiting))

    def _is_over(self) -> bool:
        with self._changed:
            self._ended = self._closing and not (self._flying or self._packer.waiting or self._incoming)
            if self._ended:
                self._changed.notify_all()
            return self._ended

    def _dispatch(self) -> None:
        waiting = self._packer.waiting
        while waiting and len(self._flying) < self._most:
            ticket = waiting[0]
            if self._one_by_one and self._flying and not ticket.sent and not ticket.request.follows:
                return
            if not self._packer.full() and len(self._flying) >= self._hungry:
                return
            before = len(waiting)
            if parts := self._packer.take():
                self._send(parts)
            self._make_room(before - len(waiting))

    def _make_room(self, freed: int) -> None:
        if freed:
            with self._changed:
                self._room += freed
                self._changed.notify_all()

    def _send(self, parts: list[RequestPart]) -> None:
        mb, layout = self._next, parts[0].ticket.layout
        arrays, batch = layout.microbatch(parts), RequestBatch(mb, layout.rung)
        self._next += 1
        self._flying[mb] = Flying(parts, len(layout.outputs))
        for rank, names in enumerate(self._fed):
            # Every rank counts microbatches, also those that another one of its stage runs.
            mine = mb % self._per_batch in self._shares[rank]
            self._workers.send(rank, batch, {name: arrays[name] for name in names} if mine else {})

    def _take(self, message: Message, arrays: Arrays) -> None:
        if not isinstance(message, Output):
            return  # we were woken up
        flying = self._flying[message.mb]
        for part in flying.parts:
            if part.ticket.take(part, arrays):
                part.ticket.future.set_result(part.ticket.results())
        flying.missing -= len(arrays)
        if not flying.missing:
            del self._flying[message.mb]

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            tickets = {id(part.ticket): part.ticket for flying in self._flying.values() for part in flying.parts}
            tickets |= {id(ticket): ticket for ticket in (*self._packer.waiting, *self._incoming)}
            self._changed.notify_all()
        for ticket in tickets.values():
            future = ticket.future
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(error)
