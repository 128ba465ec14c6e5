"""A bundle for inference that runs in the calling process: no worker, no message, no copy that is not needed.

    model = penstock.load("bundle/")
    outputs = model({"x": x})            a dict of arrays by the model's names, or arrays in the order of the inputs

In: a bundle of one rank, arrays of NumPy or torch. Out: NumPy arrays by the model's output names. The meaning of a
request is that of `Job.infer` (requests.py): any number of samples, cut into microbatches, the last one filled up.

A request of exactly one microbatch whose arrays fit takes the short way: kernels read the caller's memory. Element type
and shape must be those of the module, and the memory on the CPU, contiguous, aligned and writable (torch takes no
other). An array that is not contiguous, aligned or writable is copied once. Everything else takes the long way, whose
checks are those of a job, and so are its errors.

Outputs are the caller's: each call allocates them anew. One that the kernels place in the memory of an input, of a
variable or of another output is copied. Which outputs these are is a property of the compiled graph, found out in the
first call.

Any thread may call; one call computes at a time. The interpreter lock is released meanwhile. Threads of torch, OpenMP
and BLAS stay as the caller has set them. TVM has one number of threads per process, that of the first bundle, which
is left in the environment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from penstock.backends.bundle.format import Bundle
from penstock.backends.interface import all_rungs, graph_on_rung, stage_graphs
from penstock.backends.numpy_backend import tensor_of
from penstock.backends.registry import backend_of
from penstock.ir.action_kinds import FORWARD
from penstock.ir.batch_shares import microbatch_size
from penstock.ir.graph import COORDINATE, MICROBATCH, Module, Value, signature
from penstock.ir.ladder.ladder import Rung
from penstock.ir.names import shown
from penstock.ir.types import numpy_dtype
from penstock.runtime.checkpoint.resuming import Start
from penstock.runtime.data.ranges import Range, integer_range
from penstock.runtime.generation.generator import TextGenerator
from penstock.runtime.messages.control import Arrays
from penstock.runtime.state.held import hold_weights, unread_weights
from penstock.runtime.state.tensors import TORCH_DTYPES, as_array
from penstock.runtime.telemetry.resident import resident_bytes
from penstock.runtime.transport.collectives import RankExchange
from penstock.runtime.worker.feeds import number_of
from penstock.runtime.worker.loading import StateSource, load_store
from penstock.runtime.worker.worker import describe_failure
from penstock.support.errors import DoesNotFit

from .requests import RequestPart, SampleLayout, Ticket
from .texts import GeneratesText, generator_of

_T = TypeVar("_T")


class _Input(NamedTuple):
    """An input as callers name it, and what its arrays must be."""

    name: str
    outside: str
    dims: tuple[int, ...]
    dtype: np.dtype[Any]
    like: torch.dtype
    bounds: Range | None
    # Makes a tensor over the memory of an array.
    over: Callable[[np.ndarray], torch.Tensor]

    def array(self, given: Any) -> np.ndarray | None:
        """Return an array that a caller gives, or a copy in C order. None where it does not fit."""
        if type(given) is not np.ndarray or given.dtype != self.dtype or given.shape != self.dims:
            return None
        array = given if given.flags.carray else given.copy(order="C")
        return array if self.bounds is None or self._in_range(array) else None

    def tensor(self, given: Any) -> torch.Tensor | None:
        """Return what a caller gives as a tensor, over its own memory where that can be. None where it does not fit."""
        if isinstance(given, np.ndarray):
            array = self.array(given.view(np.ndarray))
            return None if array is None else self.over(array)
        if isinstance(given, torch.Tensor):
            if not given.is_cpu or given.dtype != self.like or given.shape != self.dims:
                return None
            if given.layout is not torch.strided or given.is_neg():
                return None
            tensor = given.detach().contiguous()
            return tensor if self.bounds is None or self._in_range(as_array(tensor)) else None
        return None

    def _in_range(self, array: np.ndarray) -> bool:
        if self.bounds is None or not array.size:
            return True
        return bool(self.bounds[0] <= array.min() and array.max() < self.bounds[1])


class LoadedStage:
    """The only stage of a bundle in this process: its code, and its variables, which all sizes of the model share."""

    def __init__(self, bundle: Bundle, start: Start) -> None:
        module, entry = bundle.module, bundle.rank(0)
        whole = all_rungs(bundle.ladder) if module.bounds else module
        self.bundle, self.start = bundle, start
        self.program = backend_of(bundle.manifest.backend).load_stage(
            whole,
            entry.stage,
            bundle.stage_files(entry.stage),
            entry.threads,
            entry.device,
            # Groups of a mesh of one device have this rank alone as their member.
            exchange=RankExchange(whole, 0, 0.0),
        )
        # The size of the process before it had any variable of the model.
        self.base_bytes = resident_bytes()
        graphs = stage_graphs(whole, entry.stage)
        self.store = load_store(
            StateSource(bundle, 0, entry.stage, start.tables, start.place),
            self.program.device,
            # What is only packed is read one by one, and is never there as a whole.
            late=unread_weights(self.program, graphs),
        )
        hold_weights(self.program, self.store, graphs)
        self.microbatch = 0
        self.lock = threading.Lock()


class LoadedModel(GeneratesText):
    """A bundle of one rank at one size, ready to compute in this process. Any thread may call it."""

    def __init__(
        self, bundle: Bundle, start: Start, stage: LoadedStage | None = None, rung: Rung[Module] | None = None
    ) -> None:
        module = bundle.module if rung is None else rung.held
        graph = module.stage_graph(bundle.rank(0).stage, FORWARD)
        assert graph is not None
        self.bundle, self.warnings = bundle, start.warnings
        self.layout = SampleLayout(module, bundle.renamed)
        self._stage = stage or LoadedStage(bundle, start)
        self._lock = self._stage.lock
        self.base_bytes, self.store = self._stage.base_bytes, self._stage.store
        program = self._stage.program
        self._device = program.device
        called = signature(graph)
        self._slots = [self.store.buffer(slot, None) for slot in called.slots]
        name = graph.name if rung is None else graph_on_rung(bundle.ladder, rung, graph.name)
        self._call = program.bind(name, self._slots)
        outside = shown([value.name for value in module.data_inputs], bundle.renamed)
        self._inputs = [
            _input(value, outside[value.name], integer_range(module, value.name)) for value in module.data_inputs
        ]
        # For each input of the graph its place among the model's inputs; None for the number of the microbatch.
        # Behind the inputs come the coordinate on every axis of the mesh, the origin, and the bounded sizes.
        places = {one.name: i for i, one in enumerate(self._inputs)}
        origin = {value.name: len(places) for value in called.ins if value.name.startswith(COORDINATE)}
        sizes = {bound.input: len(places) + 1 + i for i, bound in enumerate(module.bounds)}
        self._order = [None if v.name == MICROBATCH else (places | origin | sizes)[v.name] for v in called.ins]
        # Inputs that are the graph's as they are: a call of a small model takes as long as a few lines.
        self._plain = self._device.type == "cpu" and self._order == list(range(len(self._inputs)))
        # Then arrays need not become tensors on their way to the graph, unless the number of the microbatch does.
        fits = self._plain and all(value.type.size for value in module.data_inputs)
        self._call_arrays = program.bind_arrays(name, self._slots) if fits else None
        self._origin = torch.tensor(0, dtype=torch.int64)
        self._full = tuple(torch.tensor(bound.size, dtype=torch.int64) for bound in module.bounds)
        results = [value.name for value in called.results]
        outputs = shown(self.layout.outputs, bundle.renamed)
        # Our name, the name outside, the place among the results.
        self._outputs = [(name, outputs[name], results.index(name)) for name in self.layout.outputs]
        # What gives a result as an array. Results of compiled code on the CPU need no more than that.
        plain = self._device.type == "cpu"
        self._arrays = [
            torch.Tensor.numpy if plain and self.layout.outputs[name].dtype != "bf16" else as_array
            for name, _, _ in self._outputs
        ]
        self._scalars = {name for name, type in self.layout.outputs.items() if not type.rank}
        self._ahead, self._key = start.offset // microbatch_size(module), start.key
        self._shared: frozenset[int] | None = None

    def __repr__(self) -> str:
        inputs = ", ".join(f"{one.outside}: {self.layout.inputs[one.name]}" for one in self._inputs)
        outputs = ", ".join(f"{outside}: {self.layout.outputs[name]}" for name, outside, _ in self._outputs)
        return f"<penstock model {self.bundle.manifest.name}: {inputs} -> {outputs}>"

    def __call__(self, *inputs: Any) -> Arrays:
        """Return all outputs by the model's names. Inputs are a dict by name, or arrays in the order of the inputs, of
        any number of samples. Arrays are read before this returns; outputs are the caller's."""
        return self.answer(inputs[0] if len(inputs) == 1 else inputs, self._full)

    def answer(self, request: Any, live: Sequence[torch.Tensor]) -> Arrays:
        """Return all outputs for inputs that are padded: of each bounded dimension so much is the request's."""
        values = self._given(request)
        if values is None:
            return self._answer(request, live)
        # Which results share memory is known behind the first call.
        takes_arrays = self._call_arrays is not None and self._shared is not None
        arrays = self._fitting(values, _Input.array) if takes_arrays else None
        if arrays is not None:
            results = self._run_arrays(arrays)
        elif (tensors := self._fitting(values, _Input.tensor)) is not None:
            results = self._run(tensors, None, live)
        else:
            return self._answer(request, live)
        return {
            outside: results[name][None] if name in self._scalars else results[name]
            for name, outside, _ in self._outputs
        }

    def compute(self, inputs: Mapping[str, np.ndarray], mb: int | None = None) -> Arrays:
        """Return the outputs of one microbatch, all by our names. Its inputs were checked; those that the graph does
        not read may be missing. `mb` is the number for its random draws, by default the next one."""
        return self._computed(inputs, mb, self._full)

    def _computed(self, inputs: Mapping[str, np.ndarray], mb: int | None, live: Sequence[torch.Tensor]) -> Arrays:
        tensors = [
            tensor_of(np.require(inputs[one.name], one.dtype, ["C", "A", "W"])) if one.name in inputs else None
            for one in self._inputs
        ]
        return self._run(tensors, mb, live)

    @cached_property
    def generator(self) -> TextGenerator:
        """The generator of the bundle, with the rates of what it computed."""
        return generator_of(self.bundle, lambda rung, inputs: self.compute(inputs))

    def _given(self, request: Any) -> Sequence[Any] | None:
        """Return what a request has for each input, in order; None if there are more or fewer."""
        if isinstance(request, Mapping):
            values: Sequence[Any] = [request.get(one.outside) for one in self._inputs]
        else:
            values = request if isinstance(request, list | tuple) else (request,)
        count = len(request) if isinstance(request, Mapping) else len(values)
        return values if count == len(self._inputs) else None

    def _fitting(self, values: Sequence[Any], fit: Callable[[_Input, Any], _T | None]) -> list[_T] | None:
        """Return the values of one microbatch as arrays or as tensors; None if any does not fit as it is."""
        fitting = []
        for one, value in zip(self._inputs, values, strict=True):
            fitted = fit(one, value)
            if fitted is None:
                return None
            fitting.append(fitted)
        return fitting

    def _answer(self, given: Any, live: Sequence[torch.Tensor]) -> Arrays:
        """Answer a request in microbatches, or say all that does not fit."""
        ticket = Ticket(self.layout.request(given, "inputs"))
        while ticket.left:
            part = RequestPart(ticket, ticket.sent, 0, min(self.layout.samples, ticket.left))
            ticket.sent += part.samples
            ticket.take(part, self._computed(self.layout.microbatch([part]), None, live))
        return ticket.results()

    def _run_arrays(self, arrays: Sequence[np.ndarray]) -> Arrays:
        """Run the graph on arrays that are its inputs, one by one."""
        assert self._call_arrays is not None
        assert self._shared is not None
        shared = self._shared
        try:
            with self._lock:
                self._stage.microbatch += 1
                results = self._call_arrays(arrays)
            return {
                name: results[place].copy() if place in shared else results[place] for name, _, place in self._outputs
            }
        except (RuntimeError, MemoryError) as error:
            _tell_if_it_does_not_fit(error)
            raise

    def _run(self, tensors: Sequence[torch.Tensor | None], mb: int | None, live: Sequence[torch.Tensor]) -> Arrays:
        try:
            with self._lock:
                number = self._stage.microbatch if mb is None else mb
                self._stage.microbatch = number + 1
                ins = self._graph_inputs(tensors, number, live)
                results = self._call(ins)
                if self._shared is None:
                    self._shared = _sharing(results, [*ins, *self._slots])
            shared = self._shared
            return {
                name: array(results[place].clone() if place in shared else results[place])
                for (name, _, place), array in zip(self._outputs, self._arrays, strict=True)
            }
        except (RuntimeError, MemoryError) as error:
            _tell_if_it_does_not_fit(error)
            raise

    def _graph_inputs(
        self, tensors: Sequence[torch.Tensor | None], number: int, live: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return what the graph takes, in its order, on its device."""
        if not self._plain:
            fed = (*tensors, self._origin, *live)
            tensors = [self._drawn(number) if place is None else fed[place] for place in self._order]
        ins = [x for x in tensors if x is not None]
        return ins if self._device.type == "cpu" else [x.to(self._device) for x in ins]

    def _drawn(self, number: int) -> torch.Tensor:
        return tensor_of(number_of(number, self._ahead, self._key))


def _tell_if_it_does_not_fit(error: Exception) -> None:
    """Raise our own error in place of a library's for want of memory."""
    failure = describe_failure(error)
    if failure.error == DoesNotFit.__name__:
        raise DoesNotFit(failure.what, hint=failure.hint) from error


def _input(value: Value, outside: str, bounds: Range | None) -> _Input:
    type = value.type
    over = tensor_of if type.dtype == "bf16" else torch.from_numpy
    return _Input(value.name, outside, type.dims, numpy_dtype(type.dtype), TORCH_DTYPES[type.dtype], bounds, over)


def _sharing(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> frozenset[int]:
    """Return the places of results whose memory is also that of another tensor, or of a result before it."""
    spans = [_span(x) for x in others if x.numel()]
    shared = set()
    for place, result in enumerate(results):
        begin, end = _span(result)
        if any(begin < last and first < end for first, last in spans):
            shared.add(place)
        spans.append((begin, end))
    return frozenset(shared)


def _span(x: torch.Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + x.nbytes
