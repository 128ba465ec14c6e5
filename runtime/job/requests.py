"""Requests of an inference: their samples become microbatches, and outputs of microbatches become the rows of each of
them.

In: a module and dicts of arrays by input name. Out: microbatches of b samples, and for every request all module
outputs by the model's names. b and the places of samples are those of ir/batch_shares.py.

A request has any number of samples, at least one. Microbatches are filled in the order of the requests. One that no
request has more samples for is filled up by repeating its last one. Requests share a microbatch only where their scalar
inputs, which are given whole, are equal, and where the module lets them. Then every output has rows of its samples, and
no random numbers are drawn by the number of the microbatch. A module that looks at other samples of its microbatch (a
batch norm without stored statistics) does so here, too. Its results depend on the requests that share it.

An output belongs to whole microbatches where the module says so, or its first dimension is no multiple of b. Those of a
request's microbatches are put one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from penstock.ir.batch_shares import SampleRows, microbatch_size, sample_rows
from penstock.ir.graph import MICROBATCH, Module
from penstock.ir.names import shown
from penstock.ir.types import TensorType, numpy_dtype
from penstock.runtime.data.batches import check_batch, counts_differ, take_batch
from penstock.runtime.data.ranges import integer_range
from penstock.runtime.messages.control import Arrays
from penstock.support.errors import UsageError
from penstock.support.words import itemised

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """Checked inputs by our names. One that `follows` is a piece of the same request of a caller as the one before."""

    inputs: Arrays
    samples: int
    layout: SampleLayout
    follows: bool = False


class SampleLayout:
    """The places of samples in the inputs and outputs of a module. `rung` is the name of its size, where a model has
    several."""

    def __init__(self, module: Module, renamed: Mapping[str, str], rung: str = "") -> None:
        self._module, self._renamed, self.rung = module, renamed, rung
        self.samples = microbatch_size(module)
        self.inputs = {value.name: value.type for value in module.data_inputs}
        # Where samples lie; scalars have none.
        self.rows = sample_rows(module)
        self._ranges = {name: integer_range(module, name) for name in self.inputs}
        self.outputs = _output_types(module)
        self.output_rows = {name: _output_rows(module, name, type) for name, type in self.outputs.items()}
        # The dimension of outputs, by the model's names, that results of several requests are joined along.
        axes = {name: 0 if place is None else place.axis for name, place in self.output_rows.items()}
        self.output_axes = self.outside(axes)
        draws = any(value.name == MICROBATCH for value in module.inputs)
        self.packs = None not in self.output_rows.values() and not draws

    def request(self, inputs: Any, where: str, *, copy: bool = False) -> Request:
        """Check a caller's inputs; all that does not fit is one error. `copy`: the caller may change the arrays before
        they are read."""
        arrays = take_batch(self._module, inputs, where, self._renamed)
        problems, counts = [], {}
        for name, place in self.rows.items():
            array = arrays.get(name)
            if array is None or array.ndim != self.inputs[name].rank:
                continue  # check_batch says what is wrong
            rows = place.count(array)
            counts[name] = rows // place.rows
            if rows % place.rows or not rows:
                along = f" along dimension {place.axis}" if place.axis else ""
                problems.append(f"{name}: {rows} rows{along}, expected a multiple of {place.rows} and at least one")
        if len(set(counts.values())) > 1:
            problems.append(counts_differ(counts, self.rows))
        if problems:
            raise UsageError("does not fit the model:" + itemised(problems), where=where)
        samples = next(iter(counts.values()), self.samples)
        check_batch(self._module, arrays, where, self._renamed, samples=samples, ranges=self._ranges)
        return Request({name: array.copy() for name, array in arrays.items()} if copy else arrays, samples, self)

    def cut(self, request: Request, size: int) -> Iterator[Request]:
        """Yield requests of up to `size` samples each, in order; they share the arrays."""
        for start in range(0, request.samples, size):
            stop = min(start + size, request.samples)
            yield Request(
                {name: self._slice(name, array, start, stop) for name, array in request.inputs.items()},
                stop - start,
                self,
            )

    def microbatch(self, parts: Sequence[RequestPart]) -> Arrays:
        """Return the inputs of one microbatch."""
        inputs: Arrays = {}
        for name, place in self.rows.items():
            pieces = [self._slice(name, p.ticket.request.inputs[name], p.start, p.start + p.samples) for p in parts]
            missing = self.samples - sum(p.samples for p in parts)
            last = place.count(pieces[-1]) // place.rows
            pieces += [place.part(pieces[-1], last - 1, last)] * missing
            inputs[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, place.axis)
        return inputs | {name: array for name, array in parts[0].ticket.request.inputs.items() if name not in self.rows}

    def alike(self, a: Request, b: Request) -> bool:
        """Return whether two requests may share a microbatch."""
        return (
            a.layout is b.layout
            and self.packs
            and all(np.array_equal(a.inputs[name], b.inputs[name]) for name in self.inputs.keys() - self.rows.keys())
        )

    def outside(self, results: Mapping[str, T]) -> dict[str, T]:
        """Return results by the model's names."""
        names = shown(results, self._renamed)
        return {names[name]: result for name, result in results.items()}

    def _slice(self, name: str, array: np.ndarray, start: int, stop: int) -> np.ndarray:
        place = self.rows.get(name)
        return array if place is None else place.part(array, start, stop)


class Ticket:
    """A request on its way. `sent` samples of it are in microbatches, `missing` rows of results have not arrived."""

    def __init__(self, request: Request) -> None:
        self.request, self.layout = request, request.layout
        self.future: Future[Arrays] = Future()
        self.sent = 0
        self._missing = request.samples * len(self.layout.outputs)
        self._whole: Arrays = {}
        self._pieces: dict[str, dict[int, np.ndarray]] = {
            name: {} for name, place in self.layout.output_rows.items() if place is None
        }

    @property
    def left(self) -> int:
        """The samples that are in no microbatch yet."""
        return self.request.samples - self.sent

    def take(self, part: RequestPart, outputs: Arrays) -> bool:
        """Accept the results of a microbatch that the request has a part in. Return whether they were the last ones."""
        for name, array in outputs.items():
            place = self.layout.output_rows[name]
            self._missing -= part.samples
            if place is None:
                self._pieces[name][part.start] = array
                continue
            mine = place.part(array, part.place, part.place + part.samples)
            if part.samples == self.request.samples:
                self._whole[name] = mine
                continue
            if name not in self._whole:
                type = self.layout.outputs[name]
                self._whole[name] = np.empty(place.shape(type.dims, self.request.samples), numpy_dtype(type.dtype))
            place.part(self._whole[name], part.start, part.start + part.samples)[...] = mine
        return self._missing == 0

    def results(self) -> Arrays:
        results: Arrays = {}
        for name in self.layout.outputs:
            if name in self._whole:
                results[name] = self._whole[name]
                continue
            pieces = [array for _, array in sorted(self._pieces[name].items(), key=lambda item: item[0])]
            results[name] = np.concatenate(pieces) if pieces[0].ndim else np.stack(pieces)
        return self.layout.outside(results)


@dataclass(frozen=True, slots=True)
class RequestPart:
    """Samples of one request in one microbatch: from `start` on in the request, from `place` on in the microbatch."""

    ticket: Ticket
    start: int
    place: int
    samples: int


@dataclass(slots=True)
class Flying:
    """A microbatch of requests under way, and the number of outputs that have not arrived."""

    parts: list[RequestPart]
    missing: int = field(default=0)


class Packer:
    """Requests that wait for their microbatches, first come, first served."""

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares
        self.waiting: deque[Ticket] = deque()

    def purge(self) -> None:
        """Forget requests that were cancelled before their turn."""
        self.waiting = deque(ticket for ticket in self.waiting if not ticket.future.cancelled())

    def full(self) -> bool:
        """Return whether the next microbatch has no room for a request that has not arrived yet."""
        samples, first = 0, self.waiting[0]
        for ticket in self.waiting:
            if ticket is not first and not self._joins(ticket, first):
                return True
            samples += ticket.left
            if samples >= first.layout.samples:
                return True
        return not self._shares or not first.layout.packs

    def take(self) -> list[RequestPart]:
        """Return the parts of the next microbatch; none if all requests were cancelled. From here on they cannot be
        cancelled."""
        parts: list[RequestPart] = []
        most = room = self.waiting[0].layout.samples
        while room and self.waiting:
            ticket = self.waiting[0]
            if parts and not self._joins(ticket, parts[0].ticket):
                break
            if not ticket.sent and not ticket.future.set_running_or_notify_cancel():
                self.waiting.popleft()
                if self.waiting and not parts:
                    most = room = self.waiting[0].layout.samples
                continue
            count = min(room, ticket.left)
            parts.append(RequestPart(ticket, ticket.sent, most - room, count))
            ticket.sent += count
            room -= count
            if not ticket.left:
                self.waiting.popleft()
        return parts

    def _joins(self, ticket: Ticket, first: Ticket) -> bool:
        return self._shares and first.layout.alike(ticket.request, first.request)


def _output_types(module: Module) -> dict[str, TensorType]:
    types: dict[str, TensorType] = {}
    for stage in module.stages:
        graph = module.stage_graph(stage.index, "F")
        types |= {value.name: value.type for value in graph.outs} if graph is not None else {}
    return {name: types[name] for name in module.outputs}


def _output_rows(module: Module, name: str, type: TensorType) -> SampleRows | None:
    """Return where samples lie in an output; None for one of whole microbatches."""
    axis, samples = module.batch.get(name, 0), microbatch_size(module)
    if axis is None or not type.rank or type.dims[axis] % samples:
        return None
    return SampleRows(axis, type.dims[axis] // samples)
