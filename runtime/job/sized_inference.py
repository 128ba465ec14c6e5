"""Requests of any size to the ranks of a bundle with bounded dimensions: the inference part of such a job.

In: requests, as `Inference` takes them. Out: the same futures, with outputs of each request's own size.

A job in its own process takes the rungs that `penstock.load` takes (rungs.py), one request at a time, in order. A job
with worker processes runs the largest rung: requests are filled up to it, and the ranks get the size beside the inputs.

Limit: several ranks compute every request at the largest size.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.ir.types import TensorType
from penstock.runtime.launch.local import Workers
from penstock.runtime.messages.control import Arrays
from penstock.support.errors import QueueFull, UsageError

from .dispatcher import Note
from .inference import Inference, Inputs
from .requests import Request
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
        self.sized = SizedRequests(bundle)
        # The sizes of requests are inputs without samples: requests of several sizes share no microbatch.
        self.layout.inputs |= {bound.input: TensorType("i64", ()) for bound in bundle.module.bounds}
        self._largest = bundle.ladder.largest
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
        """Send a request in parts of the largest size, and return the future of all of them."""
        rows = self.sized.rows
        left, start, parts = sizes.get(rows or "", 1), 0, list[dict[str, int]]()
        while left > 0:
            part = {**sizes, rows: min(left, self._largest.sizes[rows])} if rows is not None else dict(sizes)
            parts.append(part)
            left -= part[rows] if rows is not None else 1
        futures = []
        for part in parts:
            padded = self.sized.padded(arrays, self._largest, start, part)
            request = self.layout.request(padded, "request")
            live = {bound.input: np.array(part[bound.name]) for bound in self.sized.bounds}
            futures.append(self.send(Request({**request.inputs, **live}, request.samples), timeout))
            start += part[rows] if rows is not None else 0
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
        self, whole: Future[Arrays], futures: Sequence[Future[Arrays]], parts: Sequence[dict[str, int]]
    ) -> None:
        """Give a request its outputs, or the error of one of its parts."""
        error: Any = next((e for future in futures if (e := future.exception()) is not None), None)
        if error is not None:
            whole.set_exception(error)
            return
        cut = [self.sized.cut(f.result(), self._largest, part) for f, part in zip(futures, parts, strict=True)]
        whole.set_result(self.sized.joined(cut))
