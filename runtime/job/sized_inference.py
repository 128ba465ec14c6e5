"""Requests of any size to the ranks of a bundle with bounded dimensions: the inference part of such a job.

In: requests, as `Inference` takes them. Out: the same futures, with outputs of each request's own size.

A job in its own process takes the rungs that `penstock.load` takes (rungs.py), one request at a time, in order. A job
with worker processes sends each part of a request with its rung, and with its size beside the inputs. Parts of any
rungs are on their way through the stages at once.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.ir.graph import Module
from penstock.ir.ladder.ladder import Rung
from penstock.ir.types import TensorType
from penstock.runtime.launch.local import Workers
from penstock.runtime.messages.control import Arrays
from penstock.runtime.worker.stage_graphs import ladder_of_ranks
from penstock.support.errors import QueueFull, UsageError

from .dispatcher import Note
from .inference import Inference, Inputs
from .requests import Request, SampleLayout
from .sized_requests import SizedRequests, elements

if TYPE_CHECKING:
    from .own_process import OwnProcess


class SizedInference(Inference):
    """Requests of any size. Any thread may `submit`."""

    def __init__(
        self,
        workers: Workers | OwnProcess,
        bundle: Bundle,
        fed: Sequence[Collection[str]],
        mode: str,
        queue: int,
        note: Note,
    ) -> None:
        super().__init__(workers, bundle, fed, mode, queue, note)
        self.sized = SizedRequests(bundle, bundle.ladder if self._model is not None else ladder_of_ranks(bundle))
        self._layouts = {rung.name: SampleLayout(rung.held, bundle.renamed, rung.name) for rung in self.sized.ladder}
        for layout in self._layouts.values():
            # The sizes of requests are inputs without samples: requests of several sizes share no microbatch.
            layout.inputs |= {bound.input: TensorType("i64", ()) for bound in bundle.module.bounds}
        self._room = threading.BoundedSemaphore(queue)
        self._thread = ThreadPoolExecutor(1, "sized-requests") if self._model is not None else None

    def infer(self, inputs: Inputs) -> Arrays:
        if self._model is not None:
            return super().infer(inputs)
        return self.submit(inputs, None).result()

    def submit(self, inputs: Inputs, timeout: float | None, where: str = "request") -> Future[Arrays]:
        arrays = {name: np.array(elements(array)) for name, array in self.sized.named(inputs).items()}
        sizes = self._sizes(arrays, inputs, where)
        return self._in_thread(arrays, timeout) if self._thread is not None else self._to_ranks(arrays, sizes, timeout)

    def parts(self, inputs: Inputs, size: int, where: str) -> tuple[int, list[Arrays]]:
        """Return the rows of inputs, and requests of up to `size` rows each; one request where rows see each other."""
        arrays = {name: elements(array) for name, array in self.sized.named(inputs).items()}
        sizes = self._sizes(arrays, inputs, where)
        if self.sized.rows is None:
            return 1, [arrays]
        rows = sizes[self.sized.rows]
        return rows, [self.sized.rows_of(arrays, start, min(start + size, rows)) for start in range(0, rows, size)]

    def _sizes(self, arrays: Arrays, inputs: Inputs, where: str) -> dict[str, int]:
        """Return the sizes of a request that fits the model; else say what is wrong with it."""
        sizes = self.sized.sizes(arrays)
        if sizes is None:
            # The checks of the largest size know the words.
            self.layout.request(inputs, where)
            raise UsageError("does not fit the model", where=where)
        return sizes

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        super().close()

    def abort(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        super().abort()

    def _in_thread(self, arrays: Arrays, timeout: float | None) -> Future[Arrays]:
        """Queue a request behind those before it."""
        assert self._thread is not None
        assert self._model is not None
        if self._closed:
            raise UsageError("the job is closed")
        if not self._room.acquire(timeout=timeout):
            raise QueueFull(
                f"the queue of requests had no room within {timeout:g} s",
                where="submit",
                hint="wait longer, or send fewer at once",
            )
        future = self._thread.submit(self._model, arrays)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def _to_ranks(self, arrays: Arrays, sizes: Mapping[str, int], timeout: float | None) -> Future[Arrays]:
        """Send each part of a request to its rung, and return the future of all of them."""
        requests, start, parts = list[Request](), 0, self.sized.split(sizes)
        for rung, part in parts:
            padded = self.sized.padded(arrays, rung, start, part)
            request = self._layouts[rung.name].request(padded, "request")
            live = {bound.input: np.array(part[bound.name]) for bound in self.sized.bounds}
            requests.append(replace(request, inputs={**request.inputs, **live}, follows=bool(requests)))
            start += part.get(self.sized.rows or "", 0)
        futures = self.send(requests, timeout)
        whole: Future[Arrays] = Future()
        whole.set_running_or_notify_cancel()
        waiting = [len(futures)]
        lock = threading.Lock()

        def arrived(_: Future[Arrays]) -> None:
            with lock:
                waiting[0] -= 1
                if waiting[0]:
                    return
            self._settle(whole, futures, parts)

        for future in futures:
            future.add_done_callback(arrived)
        return whole

    def _settle(
        self,
        whole: Future[Arrays],
        futures: Sequence[Future[Arrays]],
        parts: Sequence[tuple[Rung[Module], dict[str, int]]],
    ) -> None:
        """Give a request its outputs, or the error of one of its parts."""
        error: Any = next((e for future in futures if (e := future.exception()) is not None), None)
        if error is not None:
            whole.set_exception(error)
            return
        cut = [self.sized.cut(f.result(), rung, part) for f, (rung, part) in zip(futures, parts, strict=True)]
        whole.set_result(self.sized.joined(cut))
