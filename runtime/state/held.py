"""Weights that keep their values while a stage runs: packed once for all graphs, and let go where nothing else reads
them.

In: a program, the store of its rank, and the graphs of its stage. Out: the store with stand-ins in place of variables
that only packed operands are made of. So inference holds each of these weights once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from penstock.backends.interface import StageProgram
from penstock.ir.graph import Graph, signature
from penstock.ir.liveness import changed_vars

from .store import Store


def hold_weights(program: StageProgram, store: Store, graphs: Iterable[Graph]) -> None:
    """Pack the weights of all graphs that keep theirs, and let go of what no graph reads any more, one after the
    other."""
    graphs = list(graphs)
    slots = {slot.var: slot for graph in graphs for slot in signature(graph).slots}
    names = _slots_held(graphs)
    places = {name: (graph, i) for graph, listed in names.items() for i, name in enumerate(listed)}
    spare = unread_weights(program, graphs)

    def tensor(name: str) -> torch.Tensor:
        store.fill_late(name)
        return store.buffer(slots[name], None)

    for name in program.hold_all(names, tensor):
        if name in spare:
            store.let_go(name, program.stand_in(*places[name]))
            store.late.discard(name)
    assert not store.late, f"variables were never filled: {store.late}"


def unread_weights(program: StageProgram, graphs: Sequence[Graph]) -> set[str]:
    """Return the variables that no graph reads once its weights are held."""
    names = _slots_held(graphs)
    others = {slot.var for graph in graphs if graph.name not in names for slot in signature(graph).slots}
    return program.unread(names) - others


def _slots_held(graphs: Iterable[Graph]) -> dict[str, list[str]]:
    return {graph.name: [slot.var for slot in signature(graph).slots] for graph in graphs if not changed_vars([graph])}
