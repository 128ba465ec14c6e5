"""The meaning of one graph, in NumPy.

`run_graph` executes one graph against a store of variables, and returns its results. With `precision="f64"` every
float is computed in float64: that is the oracle; "typed" follows the declared element types. `noise` changes operands
and results of operations on their way, as roundings would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.ir.graph import Graph, Op, Slot, slot_of
from penstock.ir.memo import Derived
from penstock.support.errors import VerifyError

from .ops import PRECISIONS, TYPED, Array, Prepared, apply_op, prepare_op
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
    assert precision in PRECISIONS, precision
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
    store = DictStore({}) if store is None else store
    values = {v.name: as_value(x, v, precision) for v, x in zip(graph.ins, arrays, strict=True)}
    entries = graph.keep(_PREPARED_OPS[precision], _prepared_ops)
    for entry in entries:
        op = entry.op
        try:
            unknown = [f"%{v.name}" for v in op.ins if v.name not in values]
            if unknown:
                raise VerifyError(f"{', '.join(unknown)} has no value yet")
            operands = [values[v.name] for v in op.ins]
            if noise is None or entry.slot is not None:
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
    return ()
