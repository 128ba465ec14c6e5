"""The set of what a forward saved, where it may be in another memory space until the backward: the item `a0`.

In: a module. A stage with a `home` has a saved set: the values that its own operations make, that F saves, and that
nothing but later computations of the stage takes. What came from other stages or from data stays on the device, and so
does what goes to other stages. A set lies at home as it comes back: one value behind the other.

CO begins to copy the set of a microbatch to its home, and L lets go of its values. CI takes memory for the whole set,
which goes with the last value that is dropped. Each set that is away has a home of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from penstock.ir.action_kinds import AGAIN, COPY_IN, COPY_OUT, DROP, FORWARD, LET_GO, SAVED_ITEM
from penstock.ir.graph import Module, Value
from penstock.ir.memo import Derived
from penstock.ir.schedule import READERS, Action

# Every value of a set starts at a multiple of so many bytes, for vector loads.
ALIGNMENT = 64
# What is written goes through memory of so many bytes, as values lie apart.
GATHERED = 4 << 20


@dataclass(frozen=True, slots=True)
class SavedSet:
    """The bytes of a saved set: its values with the types that a rank has of them, and where each begins. `users` are
    the computations that take some of it."""

    space: str
    values: Mapping[str, Value]
    places: Mapping[str, int]
    nbytes: int
    users: frozenset[str]

    @property
    def gathered(self) -> int:
        """The bytes of memory that what is written goes through."""
        return min(self.nbytes, GATHERED)


_SETS = Derived[dict[int, "SavedSet | None"]](__name__, "sets")


def saved_set(module: Module, stage: int) -> SavedSet | None:
    """Return the saved set of a stage, if it has a home."""
    home = next((one.home for one in module.stages if one.index == stage), "")
    if not home:
        return None
    sets = module.kept.once(_SETS, dict)
    if stage not in sets:
        sets[stage] = _set_of(module, stage, home)
    return sets[stage]


def _set_of(module: Module, stage: int, home: str) -> SavedSet | None:
    forward, again = module.stage_graph(stage, FORWARD), module.stage_graph(stage, AGAIN)
    if forward is None:
        return None
    kept = {*forward.ins, *forward.outs, *(() if again is None else again.saved)}
    values = {v.name: v for v in forward.saved if v not in kept and v.type.nbytes}
    if not values:
        return None
    places, total = {}, 0
    for name, value in values.items():
        places[name] = total
        total += -(-value.type.nbytes // ALIGNMENT) * ALIGNMENT
    users = frozenset(
        kind
        for kind in READERS
        if (graph := module.stage_graph(stage, kind)) is not None
        and not values.keys().isdisjoint(v.name for v in graph.ins)
    )
    return SavedSet(home, values, places, total, users)


def moves_saved(action: Action) -> bool:
    """Return whether an action moves a saved set."""
    return action.item == SAVED_ITEM


def most_sets_at_home(actions: Iterable[Action], stage: int, users: Container[str]) -> int:
    """Return the most sets of a stage that have a home at once in the program of a rank: each from its CO to the first
    of its `users`."""
    return _most(actions, stage, COPY_OUT, users)


def most_sets_back(actions: Iterable[Action], stage: int) -> int:
    """Return the most sets of a stage that came back and are on the device at once."""
    return _most(actions, stage, COPY_IN, (DROP,))


def most_sets_here(actions: Iterable[Action], stage: int) -> int:
    """Return the most sets of a stage that are on the device at once: from F to L, or from CI to the drop."""
    most, here = 0, set[int]()
    for action in actions:
        if action.stage != stage:
            continue
        if action.kind == FORWARD or (action.kind == COPY_IN and moves_saved(action)):
            here.add(action.mb)
            most = max(most, len(here))
        elif action.kind == DROP or (action.kind == LET_GO and moves_saved(action)):
            here.discard(action.mb)
    return most


def _most(actions: Iterable[Action], stage: int, begin: str, ends: Container[str]) -> int:
    most, open_ones = 0, set[int]()
    for action in actions:
        if action.stage == stage and action.kind == begin and moves_saved(action):
            open_ones.add(action.mb)
            most = max(most, len(open_ones))
        elif action.stage == stage and action.kind in ends:
            open_ones.discard(action.mb)
    return most
