"""The inference part of a job: one request, many in order, or futures for callers that have several threads.

    outputs = job.infer(inputs)                    one request, waited for
    for outputs in job.stream(requests): ...       many, in order, several in flight
    future = job.submit(inputs)                    from any thread; future.result(timeout) waits

The run of requests (runtime/job/dispatcher.py) begins with the first of them. It ends when the job has to do something
else: it is drained then, and begins anew with the next request.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from penstock.backends.bundle.format import Bundle
from penstock.runtime.launch.local import Workers
from penstock.runtime.messages.control import Arrays
from penstock.support.errors import UsageError

from .dispatcher import Drained, Note, Serving
from .requests import Request, SampleLayout

if TYPE_CHECKING:
    from .own_process import OwnProcess

# A dict, or arrays in the order of the inputs, as in runtime/data/batches.py.
Inputs = Mapping[str, Any] | Sequence[Any]
_NO_MORE: Inputs = {}


class Inference:
    """Requests to the workers of one bundle. Any thread may `submit`."""

    def __init__(
        self,
        workers: Workers | OwnProcess,
        bundle: Bundle,
        fed: Sequence[Collection[str]],
        mode: str,
        queue: int,
        note: Note,
    ) -> None:
        assert bundle.module.schedule is not None
        self.layout = SampleLayout(bundle.module, bundle.renamed)
        self.queue = queue
        self._workers, self._fed, self._mode, self._note = workers, fed, mode, note
        self._per_batch, self._batch = bundle.module.schedule.microbatches, 0
        self._serving: Serving | None = None
        self._closed = False
        self._lock = threading.RLock()
        # Random draws are made from the numbers of microbatches, which the run of requests counts.
        self._model = None if bundle.module.draws or isinstance(workers, Workers) else workers.model

    def infer(self, inputs: Inputs) -> Arrays:
        if self._model is not None:
            if self._closed:
                raise UsageError("the job is closed")
            return self._model(inputs)
        return self.send([self.layout.request(inputs, "inputs")])[0].result()

    def submit(self, inputs: Inputs, timeout: float | None, where: str = "request") -> Future[Arrays]:
        return self.send([self.layout.request(inputs, where, copy=True)], timeout)[0]

    def send(self, requests: Sequence[Request], timeout: float | None = None) -> list[Future[Arrays]]:
        """Queue requests that were checked and will not change, as `submit` does. They belong together."""
        while True:
            serving = self._open()
            # If another command came in between, the request begins with the run after it.
            with contextlib.suppress(Drained):
                return serving.submit(requests, timeout)

    def stream(self, requests: Iterable[Inputs]) -> Generator[Arrays, None, None]:
        """Yield the outputs of each request, in order."""
        iterator, number, open_ = _iterator_of(requests), 0, True
        window: deque[Future[Arrays]] = deque()
        try:
            while True:
                while open_ and len(window) < self.queue and not (window and window[0].done()):
                    try:
                        inputs = next(iterator, _NO_MORE)
                        if inputs is _NO_MORE:
                            open_ = False
                        else:
                            window.append(self.submit(inputs, None, f"request {number}"))
                            number += 1
                    # The error of one request, or of the caller's iterable. Requests before it are answered first.
                    except Exception as error:
                        failed: Future[Arrays] = Future()
                        failed.set_exception(error)
                        window.append(failed)
                        open_ = False
                if not window:
                    return
                yield window.popleft().result()
        finally:
            for future in window:
                future.cancel()

    # -------------------------------------------------------------------------------------------- the run

    def _open(self) -> Serving:
        with self._lock:
            if self._closed:
                raise UsageError("the job is closed")
            if self._serving is None:
                args = (
                    self._workers,
                    self._fed,
                    self._batch,
                    self._per_batch,
                    self._mode,
                    self.queue,
                    self._note,
                )
                self._serving = Serving(*args)
            return self._serving

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Answer all accepted requests and keep the pipeline empty until the block is left."""
        with self._lock:
            serving, self._serving = self._serving, None
            if serving is not None:
                self._batch = serving.finish()
            yield

    def close(self) -> None:
        """Answer all accepted requests, and accept no more. Raise the error that ended the run."""
        with self._lock:
            self._closed = True
            with self.paused():
                pass

    def abort(self) -> None:
        """Fail all requests that are not answered."""
        self._closed = True
        serving = self._serving
        if serving is not None:
            serving.abort()


def _iterator_of(requests: Iterable[Inputs]) -> Iterator[Inputs]:
    try:
        if isinstance(requests, Mapping):
            raise TypeError("one request")
        return iter(requests)
    except TypeError as problem:
        hint = "`stream` takes a list or an iterator of dicts of arrays; `infer` takes one dict"
        raise UsageError(f"expected requests, got {type(requests).__name__}", hint=hint) from problem
