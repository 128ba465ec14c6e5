"""The comparison of compiled kernels with the interpreter, stage by stage.

It finds the first kernel whose result differs.

In: the program of all stages, its code, weights and batches. Every stage's graphs are called once as they are, with the
values of an interpreted run, rounded to their types: so an error of one graph does not reach the next. Where results of
a graph are off, each of its kernels is compiled alone and called with the interpreter's values at that point. Out: the
first such kernel, its operations, its tensor and error.

Expected results are float64 on the same rounded operands. A result may be as far off as roundings of its type explain
(penstock.verification.tolerance). Accumulated gradients start from drawn values, so that a sum that was overwritten
shows.

Where tensors are split, every rank of a stage's first team is judged by itself: its collectives have the interpreter's
results, which all of the team together have (`PlayedExchange`).

Limits: the first microbatch and the first batch; stages on GPUs that this host lacks are skipped, and reported as such.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.interface import StageProgram, stage_graphs
from penstock.backends.numpy_backend import SlotStore, array_of, tensor_of
from penstock.backends.registry import backend_of
from penstock.ir.collective_calls import CollectiveCall
from penstock.ir.graph import COORDINATE, MICROBATCH, Graph, Module, Op, Slot, Value, graph_stage, signature, slot_of
from penstock.ir.interpreter.graphs import Noise, run_member
from penstock.ir.interpreter.ops import F64, TYPED, Array, array_dtype
from penstock.ir.interpreter.recurrence import microbatches_of
from penstock.ir.interpreter.schedules import run_schedule, watch_ranks
from penstock.ir.interpreter.store import as_value
from penstock.ir.ops import EXCHANGES
from penstock.ir.sharding.tiles import cut
from penstock.ir.types import FLOATS, TensorType, numpy_dtype
from penstock.passes.kernels.divide import kernels_of
from penstock.support.errors import UsageError
from penstock.support.terminal import say
from penstock.verification.roundings import RoundingEffect, distance, relative_error
from penstock.verification.tolerance import as_typed, asked
from penstock.verification.verdicts import widened

from .steps import CompiledGraphs, CompiledStages
from .values import Errors, Spot

if TYPE_CHECKING:
    import torch

_CHANGING = ("write", "accum", "put")


@dataclass(frozen=True)
class GraphCall:
    """A graph and the arrays it is called with, of the declared types."""

    graph: Graph
    ins: Mapping[str, Array]
    slots: Mapping[Slot, Array]
    # Results of collectives, by name.
    answers: Mapping[str, Array] = field(default_factory=dict)
    unit: str = ""


class PlayedExchange:
    """The exchange of a rank without its team: collectives have the results that the interpreter has."""

    def __init__(self) -> None:
        self.answers: Mapping[str, Array] = {}

    def begin(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the result of a collective."""
        value = call.op.outs[0]
        out.copy_(tensor_of(_typed(self.answers[value.name], value.type)))

    def wait(self, call: CollectiveCall) -> None:
        """Wait for nothing."""


@dataclass(frozen=True)
class KernelVerdict:
    """The verdict on a stage: how many graphs were called, the errors of their results, and the first that is off."""

    stage: int
    graphs: int
    errors: Errors
    first: Spot | None
    # The call of the kernel that differs when it is compiled alone; None where no kernel does.
    alone: GraphCall | None = None
    passed_over: str = ""


def first_kernel(
    module: Module,
    program: CompiledStages,
    weights: Mapping[str, Array],
    batches: Sequence[Mapping[str, Array]],
    tolerance: float | None,
) -> list[KernelVerdict]:
    """Return one verdict per stage, up to the first with a kernel that is off."""
    calls = recorded_calls(module, weights, batches[0])
    verdicts: list[KernelVerdict] = []
    for stage in module.stages:
        exchange = PlayedExchange()
        try:
            loaded = program.load(stage.index, exchange)
        except UsageError as error:
            verdicts.append(KernelVerdict(stage.index, 0, Errors(), None, passed_over=error.what))
            continue
        verdict = _judge_stage(module, stage.index, loaded, program.backend, calls, tolerance, exchange)
        verdicts.append(verdict)
        if verdict.first is not None:
            break
    return verdicts


def _judge_stage(
    module: Module,
    stage: int,
    program: CompiledGraphs,
    backend: str,
    calls: Mapping[str, Sequence[GraphCall]],
    tolerance: float | None,
    exchange: PlayedExchange,
) -> KernelVerdict:
    errors = Errors()
    calls_of_stage = [call for graph in stage_graphs(module, stage) for call in calls.get(graph.name, ())]
    for count, call in enumerate(calls_of_stage, 1):
        exchange.answers = call.answers
        call_errors, spot = compare(program, call, tolerance)
        errors += call_errors
        if spot is not None:
            here = f" of {call.unit}" if call.unit else ""
            say(f"stage {stage}: {spot.tensor} of @{call.graph.name}{here} is off; comparing its kernels one by one")
            alone = first_alone(module, stage, call, backend, tolerance)
            return KernelVerdict(
                stage, count, errors, spot if alone is None else alone[0], None if alone is None else alone[1]
            )
    return KernelVerdict(stage, len(calls_of_stage), errors, None)


# ------------------------------------------------------------------------------------------------ arguments of graphs


def recorded_calls(
    module: Module, weights: Mapping[str, Array], batch: Mapping[str, Array]
) -> dict[str, list[GraphCall]]:
    """Return the first calls of every stage graph in an interpreted run of one batch: one, or where tensors are split
    one for every rank of the stage's first team."""
    if not module.is_local:
        alone = _Recorder(module, batch)
        run_schedule(module, weights, [batch], watch=alone.watch)
        return {call.graph.name: [call] for call in alone.calls()}
    assert module.schedule is not None
    teams = [teams[0] for teams in module.schedule.teams().values()]
    # Values travel between ranks of one place, which lie alike.
    recorders = [_Recorder(module, batch, place) for place in range(len(teams[0]))]
    places = {rank: recorders[place] for team in teams for place, rank in enumerate(team)}

    def watch(rank: int, name: str, number: int, op: Op, results: tuple[Array, ...]) -> None:
        if rank in places:
            places[rank].watch(name, number, op, results)

    watch_ranks(module, weights, [batch], watch)
    recorded: dict[str, list[GraphCall]] = {}
    for call in [call for recorder in recorders for call in recorder.calls()]:
        recorded.setdefault(call.graph.name, []).append(call)
    return recorded


class _Recorder:
    """The values of an interpreted run, and the first call of every graph: of all ranks, or of those of one place in a
    team."""

    def __init__(self, module: Module, batch: Mapping[str, Array], place: int | None = None) -> None:
        self.module, self.place = module, place
        self.values: dict[tuple[str, int], Array] = {}
        self.reads: dict[str, dict[Slot, Array]] = {}
        self.numbers: dict[str, int] = {}
        self.parts = list(microbatches_of(module, batch))

    def watch(self, name: str, number: int, op: Op, results: tuple[Array, ...]) -> None:
        """Keep the results of an operation."""
        slot = slot_of(op)
        # A cache is drawn, so that what `put` leaves as it was shows, and `attend` reads more than zeros.
        is_read = slot is not None and bool(results) and op.kind != "put"
        if self.numbers.setdefault(name, number) == number and slot is not None and is_read:
            self.reads.setdefault(name, {}).setdefault(slot, np.array(results[0]))
        for value, array in zip(op.outs, results, strict=True):
            self.values.setdefault((value.name, number), np.array(array))

    def calls(self) -> Iterator[GraphCall]:
        """Yield the calls of all graphs that ran."""
        for name, graph in self.module.graphs.items():
            if (number := self.numbers.get(name)) is None:
                continue
            values = {v.name: self.values[v.name, number] for v in self._made(graph, number)} | self._fed(graph, number)
            ins = {v.name: _typed(values[v.name], v.type) for v in graph.ins}
            answers = {v.name: values[v.name] for op in graph.ops if op.kind in EXCHANGES for v in op.outs}
            slots = recorded_slots(self.module, graph, self.reads.get(name, {}))
            yield GraphCall(graph, ins, slots, answers, "" if self.place is None else f"place {self.place} of the mesh")

    def _made(self, graph: Graph, number: int) -> Iterator[Value]:
        """Yield the values of a graph that operations made."""
        every = (*graph.ins, *(v for op in graph.ops for v in op.outs))
        yield from (v for v in every if (v.name, number) in self.values)

    def _fed(self, graph: Graph, number: int) -> dict[str, Array]:
        """Return what a graph takes from outside."""
        fed: dict[str, Array] = {MICROBATCH: np.array(number)}
        if number < len(self.parts):
            fed |= {name: np.asarray(array) for name, array in self.parts[number].items()}
        stage = graph_stage(graph.name)
        if self.place is None or stage is None:
            return fed
        mesh, types = self.module.mesh_of(stage), {v.name: v.type for v in self.module.inputs}
        parts = {name: cut(array, types[name], mesh, self.place) for name, array in fed.items() if name in types}
        at = {f"{COORDINATE}{axis}": np.array(i) for axis, i in mesh.coordinates(self.place).items()}
        return fed | parts | at


def recorded_slots(module: Module, graph: Graph, reads: Mapping[Slot, Array]) -> dict[Slot, Array]:
    """Return the buffers of a call. A variable with one version has one buffer, which is read and written."""
    buffers: dict[Slot, Array] = {}
    shared: dict[str, Array] = {}
    for slot in signature(graph).slots:
        var, stage = module.vars[slot.var], graph_stage(graph.name)
        kind = var.type if stage is None else module.local_type(var.type, stage)
        array = reads[slot] if slot in reads else _noise(kind, slot.var)
        if slot.slot and var.versions == 1:
            read = next((reads[s] for s in reads if s.var == slot.var and s.slot), array)
            array = shared.setdefault(slot.var, _typed(read, kind))
        buffers[slot] = array if slot.slot and var.versions == 1 else _typed(array, kind)
    return buffers


def _noise(kind: TensorType, name: str) -> Array:
    source = np.random.default_rng(len(name))
    return source.standard_normal(kind.dims) if kind.dtype in FLOATS else np.zeros(kind.dims, numpy_dtype(kind.dtype))


def _typed(array: Array, kind: TensorType) -> Array:
    return np.array(array, dtype=numpy_dtype(kind.dtype)).reshape(kind.dims)


# ------------------------------------------------------------------------------------------------ one call


def compare(program: CompiledGraphs, call: GraphCall, tolerance: float | None) -> tuple[Errors, Spot | None]:
    """Call a graph, and return the errors of its results and the first result that is off, in the order of operations:
    a token that was chosen comes after the cache rows that it was chosen from."""
    graph, sig = call.graph, signature(call.graph)
    exact, rounded = _interpreted(call, F64), _interpreted(call, TYPED)
    computed = _called(program, call)
    effect = RoundingEffect(lambda noise: _interpreted(call, F64, noise), exact)
    makers = graph.producers()
    named: list[tuple[str | Slot, str, Op | None]] = [(v.name, f"%{v.name}", makers.get(v)) for v in sig.results]
    named += [(slot, f"@{slot.var}", next(op for op in graph.ops if slot_of(op) == slot)) for slot in _changed(graph)]
    order = {id(op): number for number, op in enumerate(graph.ops)}
    named.sort(key=lambda row: order.get(id(row[2]), -1))
    errors, first = Errors(), None
    for key, tensor, op in named:
        error = relative_error(computed[key], exact[key])
        allowed = (
            asked(tolerance) if tolerance is not None else as_typed(graph, op, relative_error(rounded[key], exact[key]))
        )
        if tolerance is None and not error <= allowed.error:
            references = (exact[key], rounded[key])
            allowed = widened(effect, key, allowed, [distance(computed[key], array) for array in references])
            error = min(relative_error(computed[key], array) for array in references)
        errors += Errors.of(error, allowed)
        if first is None and not error <= allowed.error:
            first = Spot(graph.name, op, tensor, call.unit, error, allowed)
    return errors, first


def _changed(graph: Graph) -> list[Slot]:
    return list(dict.fromkeys(slot for op in graph.ops if op.kind in _CHANGING and (slot := slot_of(op)) is not None))


def _interpreted(call: GraphCall, precision: str, noise: Noise | None = None) -> dict[str | Slot, Array]:
    """Return results by name, and slots after the call."""
    # Slots that share a buffer share its copy.
    copies: dict[int, Array] = {}
    slots = {slot: copies.setdefault(id(array), _held(array, precision)) for slot, array in call.slots.items()}
    store = SlotStore(slots)
    results = _run(call, store, precision, noise=noise)
    store.finish()
    return {v.name: array for v, array in zip(call.graph.results, results, strict=True)} | slots


def _run(
    call: GraphCall,
    store: SlotStore,
    precision: str,
    watch: Callable[[Op, tuple[Array, ...]], None] | None = None,
    noise: Noise | None = None,
) -> list[Array]:
    def meet(op: Op, operand: Array) -> Array:
        return as_value(_typed(call.answers[op.outs[0].name], op.outs[0].type), op.outs[0], precision)

    return run_member(call.graph, call.ins, store, meet, precision, watch, noise)


def _held(array: Array, precision: str) -> Array:
    floating = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    return np.array(array, dtype=array_dtype("f64", precision) if floating and precision == F64 else array.dtype)


def _called(program: CompiledGraphs, call: GraphCall) -> dict[str | Slot, Array]:
    tensors: dict[int, torch.Tensor] = {}
    sig = signature(call.graph)
    ins = [tensor_of(np.array(call.ins[v.name], order="C")).to(program.device) for v in sig.ins]
    slots = [
        tensors.setdefault(id(call.slots[s]), tensor_of(np.array(call.slots[s], order="C")).to(program.device))
        for s in sig.slots
    ]
    results = program.call(call.graph.name, [*ins, *slots])
    results_by_name: dict[str | Slot, Array] = {
        v.name: array_of(x.cpu()) for v, x in zip(sig.results, results, strict=True)
    }
    return results_by_name | {slot: array_of(x.cpu()) for slot, x in zip(sig.slots, slots, strict=True)}


# ------------------------------------------------------------------------------------------------ single kernels


def first_alone(
    module: Module, stage: int, call: GraphCall, backend: str, tolerance: float | None
) -> tuple[Spot, GraphCall] | None:
    """Return the first kernel of a graph that is off when it is compiled alone, and its call.

    None means that the fault needs several kernels together.
    """
    parts = dict(kernel_calls(call))
    calls = [replace(part, graph=replace(part.graph, name=f"s{stage}.{i}")) for i, part in enumerate(parts.values())]
    with compiled(module, stage, [part.graph for part in calls], backend) as program:
        for (name, whole), part in zip(parts.items(), calls, strict=True):
            spot = compare(program, part, tolerance)[1]
            if spot is not None:
                kinds = ", ".join(op.kind for op in part.graph.ops if op.kind != "read")
                return replace(spot, graph=call.graph.name, kernel=f"{call.graph.name}/{name} ({kinds})"), whole
    return None


def kernel_calls(call: GraphCall) -> Iterator[tuple[str, GraphCall]]:
    """Yield each kernel as a graph, with the interpreter's values at that point."""
    values: dict[str, Array] = dict(call.ins)

    def keep(op: Op, results: tuple[Array, ...]) -> None:
        values.update((v.name, array) for v, array in zip(op.outs, results, strict=True))

    _run(call, SlotStore({slot: _held(array, F64) for slot, array in call.slots.items()}), F64, keep)
    for kernel in kernels_of(call.graph):
        if any(op.kind in EXCHANGES for op in kernel.ops):
            continue
        ins = {v.name: _typed(values[v.name], v.type) for v in kernel.body.ins}
        yield (
            kernel.name,
            GraphCall(
                kernel.body, ins, {slot: call.slots[slot] for slot in signature(kernel.body).slots}, unit=call.unit
            ),
        )


@contextmanager
def compiled(module: Module, stage: int, graphs: Sequence[Graph], backend: str) -> Iterator[StageProgram]:
    """Compile graphs of a stage for its device, under their own names."""
    apart = module.but(graphs={graph.name: graph for graph in graphs})
    maker = backend_of(backend)
    # As many as the code of a bundle has, of which a process may have loaded some: they are counted once in it.
    named = [module.cluster.device(name) for name in module.rank_devices()] if module.cluster else []
    threads = min((device.threads for device in named), default=1)
    with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as folder:
        names = maker.compile_stages(apart, [stage], Path(folder))[stage]
        yield maker.load_stage(apart, stage, [Path(folder) / name for name in names], threads)
