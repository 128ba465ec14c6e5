"""The meaning of one graph, in NumPy.

`run_graph` executes one graph against a store of variables, and returns its results. With `precision="f64"` every
float is computed in float64: that is the oracle; "typed" follows the declared element types. `noise` changes operands
and results of operations on their way, as roundings would.

`run_team` executes the local form of a graph on the devices of a mesh, operation by operation on all of them: at a
collective each group has the operands of its members.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from penstock.ir.graph import COORDINATE, Graph, Mesh, Op, Slot, slot_of
from penstock.ir.memo import Derived
from penstock.ir.ops import axes_over, complete_attrs
from penstock.support.errors import VerifyError

from .collectives import COLLECTIVES
from .ops import PRECISIONS, TYPED, Array, Prepared, apply_op, prepare_op
from .ops.caches import with_rows
from .store import DictStore, Variables, as_value


class Noise(Protocol):
    """Changes to the numbers of pure operations: before one is computed, and after."""

    def operands(self, op: Op, ins: list[Array]) -> list[Array]: ...

    def results(self, op: Op, results: tuple[Array, ...]) -> tuple[Array, ...]: ...


def run_graph(
    graph: Graph,
    ins: Sequence[object] | Mapping[str, object],
    store: Variables | None = None,
    precision: str = TYPED,
    watch: Callable[[Op, tuple[Array, ...]], None] | None = None,
    noise: Noise | None = None,
) -> list[Array]:
    """Compute the results of one graph, in the order of `graph.results`. `ins` follow `graph.ins`, or are given by
    name."""
    walk = _walk(graph, ins, store, precision, watch, noise)
    try:
        call = next(walk)
    except StopIteration as end:
        results: list[Array] = end.value
        return results
    raise VerifyError(
        "is done by the ranks of a group together; a graph on one device has no group",
        where=f"@{graph.name}: {call.op.kind} %{call.op.outs[0].name}",
    )


def run_member(
    graph: Graph,
    ins: Sequence[object] | Mapping[str, object],
    store: Variables,
    meet: Callable[[Op, Array], Array],
    precision: str = TYPED,
    watch: Callable[[Op, tuple[Array, ...]], None] | None = None,
    noise: Noise | None = None,
) -> list[Array]:
    """Compute the results of a graph on one of several devices. `meet` does its collectives with the others."""
    walk = _walk(graph, ins, store, precision, watch, noise)
    answer: Array | None = None
    while True:
        try:
            call = next(walk) if answer is None else walk.send(answer)
        except StopIteration as end:
            results: list[Array] = end.value
            return results
        answer = meet(call.op, call.operand)


def run_team(
    graph: Graph,
    ins: Sequence[Mapping[str, object]],
    mesh: Mesh,
    stores: Sequence[Variables | None] | None = None,
    precision: str = TYPED,
    watch: Callable[[int, Op, tuple[Array, ...]], None] | None = None,
    places: Sequence[int] | None = None,
) -> list[list[Array]]:
    """Compute the results of a graph on devices of a mesh in lockstep: those at `places`, by default all of them. They
    hold all groups of the graph's collectives. `ins` has the inputs of each; coordinates are known."""
    places = range(len(mesh.devices)) if places is None else places
    walks = []
    for i, place in enumerate(places):
        coordinates = {f"{COORDINATE}{axis}": np.array(at, np.int64) for axis, at in mesh.coordinates(place).items()}
        seen = None if watch is None else partial(watch, place)
        walks.append(_walk(graph, {**coordinates, **ins[i]}, stores[i] if stores else None, precision, seen))
    results: dict[int, list[Array]] = {}
    answers: list[Array | None] = [None] * len(walks)
    while not results:
        calls: list[TeamCall] = []
        for i, walk in enumerate(walks):
            try:
                calls.append(next(walk) if (answer := answers[i]) is None else walk.send(answer))
            except StopIteration as end:
                results[i] = end.value
        if calls:
            answers = list(_meet(graph, calls, mesh, places))
    return [results[i] for i in range(len(walks))]


def _meet(graph: Graph, calls: Sequence[TeamCall], mesh: Mesh, places: Sequence[int]) -> Iterator[Array]:
    """Yield what each place gets of a collective that all of them have reached."""
    op, number = calls[0].op, {place: i for i, place in enumerate(places)}
    attrs = complete_attrs(op)
    known: dict[tuple[int, ...], list[Array]] = {}
    for place in places:
        group = mesh.group(place, axes_over(attrs["over"]))
        if not number.keys() >= set(group):
            raise VerifyError(
                f"the group of place {place} is {', '.join(map(str, group))}, not all of which run the graph",
                where=f"@{graph.name}: {op.kind} %{op.outs[0].name}",
            )
        if group not in known:
            known[group] = COLLECTIVES[op.kind]([calls[number[other]].operand for other in group], attrs)
        yield known[group][group.index(place)]


class TeamCall(NamedTuple):
    """A collective that a rank has reached, and its operand."""

    op: Op
    operand: Array


def _walk(
    graph: Graph,
    ins: Sequence[object] | Mapping[str, object],
    store: Variables | None,
    precision: str,
    watch: Callable[[Op, tuple[Array, ...]], None] | None = None,
    noise: Noise | None = None,
) -> Generator[TeamCall, Array, list[Array]]:
    """Run a graph on one device. It yields at every collective, and is sent the result."""
    assert precision in PRECISIONS, precision
    store = DictStore({}) if store is None else store
    values = {v.name: as_value(x, v, precision) for v, x in zip(graph.ins, _arrays(graph, ins), strict=True)}
    for entry in graph.keep(_PREPARED_OPS[precision], _prepared_ops):
        op = entry.op
        try:
            unknown = [f"%{v.name}" for v in op.ins if v.name not in values]
            if unknown:
                raise VerifyError(f"{', '.join(unknown)} has no value yet")
            operands = [values[v.name] for v in op.ins]
            if op.kind in COLLECTIVES:
                results: tuple[Array, ...] = ((yield TeamCall(op, operands[0])),)
            elif noise is None or entry.slot is not None:
                results = _run_op(entry, operands, store, precision)
            else:
                results = noise.results(op, _run_op(entry, noise.operands(op, operands), store, precision))
        except (VerifyError, ValueError, TypeError) as error:  # errors of NumPy for operands that do not fit
            names = ", ".join(f"%{v.name}" for v in op.outs) or f"@{op.var}"
            raise VerifyError(
                str(error), where=f"@{graph.name}: {op.kind} {names}" + (f" ({op.loc})" if op.loc else "")
            ) from error
        for out, array in zip(op.outs, results, strict=True):
            if array.shape != out.type.shape:
                raise VerifyError(
                    f"%{out.name} is {out.type}, {op.kind} gives shape {list(array.shape)}", where=f"@{graph.name}"
                )
            values[out.name] = array
        if watch is not None:
            watch(op, results)
    return [values[v.name] for v in graph.results]


def _arrays(graph: Graph, ins: Sequence[object] | Mapping[str, object]) -> list[object]:
    """Return the inputs in the order of the graph's."""
    if isinstance(ins, Mapping):
        missing = [v.name for v in graph.ins if v.name not in ins]
        arrays = [ins[v.name] for v in graph.ins if v.name in ins]
    else:
        missing, arrays = [v.name for v in graph.ins[len(ins) :]], list(ins)
    if missing or len(arrays) != len(graph.ins):
        raise VerifyError(
            f"expected {len(graph.ins)} inputs, got {len(arrays)}; missing: {', '.join(missing) or 'none'}",
            where=f"@{graph.name}",
        )
    return arrays


@dataclass(slots=True)
class _PreparedOp:
    """An operation, the buffer it touches, and its preparation once it has run."""

    op: Op
    slot: Slot | None
    prepared: Prepared | None = None


_PREPARED_OPS = {precision: Derived[list[_PreparedOp]](__name__, f"steps in {precision}") for precision in PRECISIONS}


def _prepared_ops(graph: Graph) -> list[_PreparedOp]:
    return [_PreparedOp(op, slot_of(op)) for op in graph.ops]


def _run_op(entry: _PreparedOp, ins: list[Array], store: Variables, precision: str) -> tuple[Array, ...]:
    op, slot = entry.op, entry.slot
    if slot is None:
        if entry.prepared is None:
            entry.prepared = prepare_op(op, precision)
        return apply_op(op, ins, precision, entry.prepared)
    match op.kind:
        case "read":
            return (as_value(store.read(slot.var, slot.slot), op.outs[0], precision),)
        case "take":
            return (as_value(store.take(slot.var), op.outs[0], precision),)
        case "write":
            store.write(slot.var, ins[0])
        case "accum":
            store.accumulate(slot.var, ins[0])
        case "put":
            filled = with_rows(as_value(store.read(slot.var, slot.slot), op.outs[0], precision), ins[0], ins[1])
            store.replace(slot.var, filled)
            return (filled,)
    return ()
