"""The values of one stage that take memory: what its computations take and make, and what stays behind each.

In: a module, a stage, and the stages of its rank. Out: facts that the walk over the rank's program (walk.py) looks up
for every action. What another stage of the same rank takes is handed to it: both have the same tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from penstock.ir.action_kinds import AGAIN, BACKWARD, FORWARD, LET_GO, NORM_PARTS, PARTS, UPDATE, WEIGHTS
from penstock.ir.graph import Graph, Module, Value
from penstock.ir.schedule import COMPUTE, PHASES, SAVERS

from .saved_sets import saved_set
from .update_parts import computation_of, update_parts
from .workspace import planned_blocks, planned_changes

# A value that has memory: its name, its bytes, and whether it is fed.
StoredValue = tuple[str, int, bool]


class StageValues:
    """The values of a stage. By what is computed, `workspaces` are the blocks of temporaries of a call, and `calls` how
    these and results come and go. `stored` are the values that a graph takes (True) and returns. `kept` stays behind
    each kind of action once all is sent, `needed` until then. `handed` is taken by other stages of the rank, by phase
    and stage."""

    def __init__(self, module: Module, stage: int, pack: Collection[int]) -> None:
        self.graphs: dict[str, Graph] = {kind: g for kind in COMPUTE if (g := module.stage_graph(stage, kind))}
        parts = update_parts(module, stage).values()
        called = {**self.graphs, **{computation_of(part): part for part in parts}}
        self.workspaces = {name: planned_blocks(graph) for name, graph in called.items()}
        self.calls = {name: planned_changes(graph) for name, graph in called.items()}
        leaving = [edge for edge in module.edges if edge.src == stage]
        self.sent = {
            kind: {v.name for e in leaving if e.phase == kind and e.dst not in pack for v in e.values}
            for kind in PHASES
        }
        self.handed = {
            kind: [(e.dst, frozenset(v.name for v in e.values)) for e in leaving if e.phase == kind and e.dst in pack]
            for kind in PHASES
        }
        self.kept = self._kept()
        self.needed = {kind: kept | self.sent.get(kind, set()) for kind, kept in self.kept.items()}
        # W may come before what B made is sent.
        self.needed[WEIGHTS] |= self.sent[BACKWARD]
        # The memory of saved sets that were elsewhere.
        self.saved_set = saved_set(module, stage)
        self.fed = module.given_names(stage)
        self.stored = {
            (kind, takes): [*self.with_memory(graph.ins if takes else graph.results)]
            for kind, graph in self.graphs.items()
            for takes in (True, False)
        }

    def _kept(self) -> dict[str, set[str]]:
        """Return the values that stay after each computation beside those to send: later computations take them."""
        for_weights, for_backward, for_norm, for_update = (
            {v.name for v in self.graphs[kind].ins} if kind in self.graphs else set[str]()
            for kind in (WEIGHTS, BACKWARD, NORM_PARTS, UPDATE)
        )
        saved = {
            kind: {v.name for v in self.graphs[kind].saved} if kind in self.graphs else set[str]()
            for kind in (FORWARD, AGAIN)
        }
        return {
            FORWARD: saved[FORWARD],
            AGAIN: for_backward | for_weights,
            BACKWARD: for_weights,
            WEIGHTS: set(),
            PARTS: for_norm | for_update,
            NORM_PARTS: for_update,
            UPDATE: set(),
            LET_GO: saved[FORWARD] - saved[AGAIN],
        }

    def with_memory(self, values: Iterable[Value]) -> Iterator[StoredValue]:
        """Yield those of some values that take memory."""
        for value in values:
            if size := value.type.nbytes:
                yield value.name, size, value.name in self.fed


def saved_values(module: Module, stage: int) -> frozenset[str]:
    """Return the values that a computation saves for a later one. A block with one of them counts as activations, other
    blocks as boundary."""
    graphs = (module.stage_graph(stage, kind) for kind in SAVERS)
    return frozenset(v.name for graph in graphs if graph is not None for v in graph.saved)
