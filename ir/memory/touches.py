"""The memory that each action of a rank reads or writes.

In: a scheduled module, a stage, the actions of one of its ranks. Out: per action whose values it works with and their
names, and buffers of variables: the tensors that the runtime gives to the compiled graph, or to the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from penstock.ir.action_kinds import DROP, LET_GO, SUM, UPDATE
from penstock.ir.graph import GRAD, Graph, Module, signature, summed_vars
from penstock.ir.schedule import COMPUTE, COPIES, MESSAGES, SENDS, Action

from .items import stage_images
from .saved_sets import moves_saved, saved_set
from .update_parts import computation_of, update_parts


class Access(NamedTuple):
    """The memory that an action touches: values by name, of the microbatch or batch `owner`; variables by name and
    number of the buffer."""

    owner: int
    values: frozenset[str]
    buffers: frozenset[tuple[str, int]]


class Accesses:
    """The memory that the actions of a stage touch. `newest` is the version of parameters before the first of them."""

    def __init__(self, module: Module, stage: int, newest: int = 0) -> None:
        assert module.schedule is not None
        self._module, self._newest, self._per_batch, self._homes = (
            module,
            newest,
            module.schedule.microbatches,
            module.rank_stages(),
        )
        self._graphs: Mapping[str, Graph] = {
            kind: graph for kind in COMPUTE if (graph := module.stage_graph(stage, kind)) is not None
        }
        self._values = {
            kind: frozenset(v.name for v in (*graph.ins, *graph.results)) for kind, graph in self._graphs.items()
        }
        parts = {computation_of(part): part for part in update_parts(module, stage).values()}
        self._slots = {name: signature(graph).slots for name, graph in {**self._graphs, **parts}.items()}
        self._summed = summed_vars(module, stage)
        self._moved = {(e.phase, e.src, e.dst): frozenset(v.name for v in e.values) for e in module.edges}

    def follow(self, actions: Iterable[Action]) -> Iterator[Access]:
        """Yield one access for each action, in order."""
        for action in actions:
            values, buffers = TOUCHED[action.kind]
            yield Access(action.holder, values(self, action), frozenset(buffers(self, action)))
            if action.kind == UPDATE and not action.item:
                self._newest = self._made_by(action)

    def _computed_values(self, action: Action) -> frozenset[str]:
        return self._values.get(action.kind, frozenset())

    def _moved_values(self, action: Action) -> frozenset[str]:
        assert action.peer is not None
        ends = (action.stage, action.other(self._homes))
        return self._moved[(action.phase, *(ends if action.kind in SENDS else ends[::-1]))]

    def _no_values(self, action: Action) -> frozenset[str]:
        return frozenset()

    def _saved_values(self, action: Action) -> frozenset[str]:
        saved = saved_set(self._module, action.stage) if moves_saved(action) else None
        return frozenset() if saved is None else frozenset(saved.values)

    def _no_buffers(self, action: Action) -> Iterable[tuple[str, int]]:
        return ()

    def _summed_buffers(self, action: Action) -> Iterator[tuple[str, int]]:
        for name in self._summed:
            yield name, action.mb % self._module.vars[name].versions

    def _item_buffers(self, action: Action) -> Iterator[tuple[str, int]]:
        image = stage_images(self._module, action.stage).get(action.item)
        if image is not None:
            copy = (action.version or 0) % image.versions
            yield from ((name, copy) for name in image.variables)

    def _computed_buffers(self, action: Action) -> Iterator[tuple[str, int]]:
        for slot in self._slots.get(action.computation, ()):
            var = self._module.vars[slot.var]
            if var.role == GRAD:
                yield slot.var, action.batch(self._per_batch) % var.versions
            elif slot.slot == "mb" and action.version is not None:
                yield slot.var, action.version % var.versions
            else:
                yield slot.var, (self._made_by(action) if slot.slot == "next" else self._newest) % var.versions

    def _made_by(self, action: Action) -> int:
        return self._newest + 1 if action.version is None else action.version


class _Touched(NamedTuple):
    """The values and the buffers that actions of a kind touch."""

    values: Callable[[Accesses, Action], frozenset[str]]
    buffers: Callable[[Accesses, Action], Iterable[tuple[str, int]]]


TOUCHED: dict[str, _Touched] = {
    **dict.fromkeys(COMPUTE, _Touched(Accesses._computed_values, Accesses._computed_buffers)),
    **dict.fromkeys(MESSAGES, _Touched(Accesses._moved_values, Accesses._no_buffers)),
    SUM: _Touched(Accesses._no_values, Accesses._summed_buffers),
    **dict.fromkeys(COPIES, _Touched(Accesses._saved_values, Accesses._item_buffers)),
    **dict.fromkeys((LET_GO, DROP), _Touched(Accesses._no_values, Accesses._no_buffers)),
}
