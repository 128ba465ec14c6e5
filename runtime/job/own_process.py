"""The only rank of a job for inference, in the process of the job: what `Workers` (runtime/launch/local.py) is to a job
whose ranks are processes.

In: commands and microbatches, as a worker gets them. Out: the same answers, in order. Work is done in the thread that
sends it. So the thread of requests (dispatcher.py) computes; a request that is waited for may compute in the caller's
thread (inference.py). Nothing is started, and nothing can be lost or hang apart from the job itself.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.ir.graph import PARAM
from penstock.runtime.checkpoint.resuming import Start
from penstock.runtime.checkpoint.saving import Saver
from penstock.runtime.generation.generator import TextGenerator
from penstock.runtime.group.group import RankGroup, host_store
from penstock.runtime.messages.control import (
    Arrays,
    Done,
    End,
    FetchParameters,
    Message,
    Output,
    Parameters,
    Record,
    RequestBatch,
    SaveCommand,
    Serve,
    Setup,
    Stop,
    Wake,
)
from penstock.runtime.messages.status import Status
from penstock.runtime.state.tensors import as_array
from penstock.runtime.telemetry.resident import peak_bytes
from penstock.support.errors import VerifyError

from .in_process import LoadedModel
from .rungs import load_bundle

_POLL_SECONDS = 0.2


class OwnProcess:
    """The rank of a job that has no other, without a process of its own."""

    count = 1
    # A microbatch is done when it was sent: its outputs come before the next one.
    most_in_flight = 1

    def __init__(self, bundle: Bundle, setup: Setup, start: Start) -> None:
        self.bundle = bundle
        self.model = load_bundle(bundle, start)
        # As of Workers: the directory of checkpoints, for messages.
        self.checkpoints: str | None = None
        self.ended = False
        self._setup = setup
        self._saver: Saver | None = None
        self._messages: queue.SimpleQueue[tuple[int, Message, Arrays]] = queue.SimpleQueue()

    @cached_property
    def generator(self) -> TextGenerator:
        """The generator of text, over the variables of the model."""
        return self.model.generator

    def send(self, rank: int, message: Record, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Do what a message asks for, and keep the answer for `receive`. An error ends the rank."""
        try:
            if self._saver is not None:
                self._saver.check()
            self._obey(message, arrays or {})
        except BaseException:
            self.ended = True
            raise

    def _obey(self, message: Record, arrays: Mapping[str, np.ndarray]) -> None:
        match message:
            case Serve():
                pass  # microbatches come with their numbers
            case RequestBatch(mb):
                # Bundles with bounded dimensions take requests another way (sized_inference.py).
                assert isinstance(self.model, LoadedModel)
                self._answer(Output(mb), self.model.compute(arrays, mb))
            case FetchParameters():
                store = self.model.store
                names = [name for name, var in store.variables.items() if var.role == PARAM]
                self._answer(Parameters(), {name: as_array(store.newest(name)).copy() for name in names})
            case SaveCommand(directory, step, background, keep_last):
                waited = self._saving().save(Path(directory), step, background=background, keep_last=keep_last)
                self._done(waited)
            case Stop():
                if self._saver is not None:
                    self._saver.finish()
                self._done()
            case End():
                self._done()
            case _:
                raise VerifyError(f"command {type(message).__name__} is out of place", where="rank 0")

    def send_all(self, message: Record) -> None:
        """Send to the only rank."""
        self.send(0, message)

    def poll(self) -> tuple[int, Message, Arrays] | None:
        """Return the next message, or None after a short while without one."""
        try:
            return self._messages.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return None

    def receive(self) -> tuple[int, Message, Arrays]:
        """Return the next message. Every answer is there before it is asked for."""
        return self._messages.get()

    def wake(self) -> None:
        """Wake a thread that waits for a message, because another thread has a message for it."""
        self._messages.put((-1, Wake(), {}))

    def expect_end(self) -> None:
        """Expect nothing: there is no process that could end."""

    def close(self) -> None:
        """End the rank."""
        self.ended = True

    def end(self) -> None:
        """End the rank; a computation under way comes to its end."""
        self.ended = True

    def saves(self, silent: Sequence[int] = ()) -> list[float]:
        """Return nothing: a checkpoint that is being written is waited for without an announcement."""
        return []

    def await_saves(self, silent: Sequence[int] = ()) -> None:
        """Wait for a checkpoint that is being written, as long as it gets on."""
        if self._saver is not None:
            self._saver.settle()

    def busy_seconds(self) -> list[float]:
        """Return nothing: the time of computations is the caller's own."""
        return []

    def process_ids(self) -> list[int]:
        """Return the processes that were started: none."""
        return []

    def _saving(self) -> Saver:
        if self._saver is None:
            timeout = self._setup.timeout
            group = RankGroup(host_store(1, timeout), 0, 1, timeout, reports=False)
            self._saver = Saver(self.bundle, 0, group, self._setup, self.model.store, Status(None, 0))
        return self._saver

    def _answer(self, message: Message, arrays: Arrays) -> None:
        self._messages.put((0, message, arrays))

    def _done(self, waited: float = 0.0) -> None:
        self._answer(Done(peak_bytes(), self.model.base_bytes, waited), {})
