"""Feeds: the inputs of a run on their way to the executor.

In: samples, and the batches of a run. Out: a program.Feed. An input that is split over the devices of a stage is cut
for the rank (`InputCuts`); every rank of a team gets the same microbatches.

`Prefetch` reads in a thread of its own, a few microbatches ahead of the last one that was asked for. It reads only
those that the rank runs, in that order. An error there is raised where the microbatch is asked for; the microbatches
before it are still handed over. The thread ends with `close`, or once it has read everything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.ir.graph import Module
from penstock.ir.sharding.tiles import cut, seat_of
from penstock.runtime.data.samples import Samples
from penstock.runtime.messages.defaults import AHEAD
from penstock.support.errors import VerifyError

# A read of a file may take long, but not for ever.
_CLOSE_SECONDS = 30.0


class InputCuts:
    """The slices of inputs that a rank takes."""

    def __init__(self, module: Module, rank: int) -> None:
        self._mesh, self._place = seat_of(module, rank)
        self._split = {value.name: value.type for value in module.inputs if not value.type.is_plain}

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return what the rank takes of a whole input."""
        if name not in self._split:
            return array
        local: np.ndarray = cut(array, self._split[name], self._mesh, self._place)
        return local


class LocalSamples:
    """Samples of files or made up ones, cut for a rank."""

    def __init__(self, samples: Samples, cuts: InputCuts) -> None:
        self._samples, self._cuts = samples, cuts

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        return self._cuts(name, self._samples.microbatch(mb, name))


class DataFeed:
    """A known number of batches from samples."""

    def __init__(self, samples: Samples, first: int, batches: int) -> None:
        self._samples, self._end = samples, first + batches

    def exists(self, batch: int) -> bool:
        return batch < self._end

    def wait(self, batch: int) -> None:
        raise AssertionError("all batches are known")

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        return self._samples.microbatch(mb, name)

    def finish(self, batch: int) -> None:
        pass

    def close(self) -> None:
        pass


class Prefetch(DataFeed):
    """The same, read ahead. `share` are the microbatches of a batch that this rank runs, of `microbatches` that it
    has."""

    def __init__(
        self,
        samples: Samples,
        first: int,
        batches: int,
        *,
        names: Sequence[str],
        share: Sequence[int],
        microbatches: int,
        ahead: int = AHEAD,
    ) -> None:
        super().__init__(samples, first, batches)
        self._names, self._ahead, self._microbatches = tuple(names), ahead, microbatches
        self._share = sorted(share)
        self._number = {index: i for i, index in enumerate(self._share)}
        self._first, self._batches = first, batches
        # The number of microbatches that may be read, in the order of this rank.
        self._until, self._stopped = ahead, False
        # The number of microbatches that were read, and the error of the next one.
        self._read_until = 0
        self._failure: Exception | None = None
        self._ready: dict[int, dict[str, np.ndarray]] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="data", daemon=True)
        self._thread.start()

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        batch, index = divmod(mb, self._microbatches)
        place = (batch - self._first) * len(self._share) + self._number[index]
        with self._changed:
            # A requested microbatch may always be read, so no executor waits for one that the bound forbids.
            if place + self._ahead > self._until:
                self._until = place + self._ahead
                self._changed.notify_all()
            self._changed.wait_for(lambda: place < self._read_until or self._failure is not None)
            if place >= self._read_until and self._failure is not None:
                raise self._failure
            arrays = self._ready.get(mb, {})
            array = arrays.pop(name, None)
            if not arrays:
                self._ready.pop(mb, None)
        # The feed keeps nothing for a second request.
        return self._samples.microbatch(mb, name) if array is None else array

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    def _numbers(self) -> Iterator[int]:
        for batch in range(self._first, self._first + self._batches):
            yield from (batch * self._microbatches + index for index in self._share)

    def _read(self) -> None:
        for place, mb in enumerate(self._numbers()):
            with self._changed:
                while not self._stopped and place >= self._until:
                    self._changed.wait()
                if self._stopped:
                    return
            try:
                # A copy, so that mapped memory is read here and not in the computation.
                arrays = {name: np.array(self._samples.microbatch(mb, name)) for name in self._names}
            except Exception as error:  # raised again in the thread that asks for it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready[mb], self._read_until = arrays, place + 1
                self._changed.notify_all()


def number_of(mb: int, ahead: int, key: int) -> np.ndarray:
    """Return the number that random draws of a microbatch are made from. It is the place in the data, `ahead` of what
    was counted here, and in the upper word the difference of the seed to the module's."""
    return np.array((mb + ahead) ^ key << 32, np.uint64).view(np.int64)


class NoSamples:
    """The samples of a rank that feeds nothing."""

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        raise VerifyError(f"input {name} of microbatch {mb} was asked for, but no data was given")
