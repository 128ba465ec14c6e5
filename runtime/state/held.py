"""Weights that keep their values while a stage runs: packed once for all graphs, and let go where nothing else reads
them.

In: a program, the store of its rank, and the graphs of its stage. Out: the store with stand-ins in place of variables
that only packed operands are made of. So inference holds each of these weights once.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.backends.interface import StageProgram
from penstock.ir.graph import Graph, signature
from penstock.ir.liveness import changed_vars

from .store import Store


def hold_weights(program: StageProgram, store: Store, graphs: Iterable[Graph]) -> None:
    """Pack the weights of all graphs that keep theirs, and let go of what no graph reads any more."""
    readers: dict[str, int] = {}
    unread: dict[str, list[tuple[str, int]]] = {}
    for graph in graphs:
        slots = signature(graph).slots
        for slot in slots:
            readers[slot.var] = readers.get(slot.var, 0) + 1
        if not changed_vars([graph]):
            for place in program.hold(graph.name, [store.buffer(slot, None) for slot in slots]):
                unread.setdefault(slots[place].var, []).append((graph.name, place))
    for name, places in unread.items():
        if len(places) == readers[name]:
            store.let_go(name, program.stand_in(*places[0]))
