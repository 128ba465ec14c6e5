"""Checker of saved sets that move between memory spaces: what forwards saved, until their backward.

In: a module with a schedule. It follows every microbatch in concrete runs (runs.py):

    saved      CO stands behind F, which saves the set, and before what takes it, and copies it once
    home       L lets go of no only copy: CO stands before it
    resident   a computation that takes a value of the set stands before L, or behind CI
    back       CI brings what is away, and what is away comes back before the microbatch is dropped
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.ir.action_kinds import COPY_IN, COPY_OUT, DROP, FORWARD, LET_GO, SAVED_ITEM
from penstock.ir.graph import Module
from penstock.ir.memory.saved_sets import SavedSet, moves_saved, saved_set
from penstock.ir.schedule import Action

from .problems import Problem
from .runs import ConcreteRun, FirstOfEach

# The states of a set: on the device alone, on the device and at home, at home alone, brought back, taken.
_HERE, _COPIED, _AWAY, _BACK, _TAKEN = "here", "copied", "away", "back", "taken"


def check_saved_sets(module: Module, run: ConcreteRun) -> Iterator[Problem]:
    """Check every move of what forwards saved in a run."""
    sets = {stage.index: saved_set(module, stage.index) for stage in module.stages}
    for rank, actions in run.programs.items():
        yield from _SetMoves(module, run, rank, sets).check(actions)


class _SetMoves:
    """The checker of one rank in one run. A microbatch on a stage has a state as soon as its forward is done."""

    def __init__(self, module: Module, run: ConcreteRun, rank: int, sets: dict[int, SavedSet | None]) -> None:
        self._module, self._sets, self._problem = module, sets, FirstOfEach(run, rank)
        self._states: dict[tuple[int, int], str] = {}

    def check(self, actions: list[Action]) -> Iterator[Problem]:
        for step, a in enumerate(actions):
            saved = self._sets.get(a.stage)
            if moves_saved(a) and a.kind in MOVES_OF_SETS:
                if saved is None:
                    yield from self._problem("nothing", step, f"stage {a.stage} has no {a.item} with a home")
                    continue
                yield from MOVES_OF_SETS[a.kind](self, step, a)
            elif saved is not None and a.kind == FORWARD:
                self._states[a.stage, a.mb] = _HERE
            elif saved is not None and a.kind == DROP:
                yield from self._drop(step, a)
            elif saved is not None and a.kind in saved.users and self._state(a) == _AWAY:
                what = (
                    f"takes %{self._first_taken(saved, a)} of microbatch {a.mb}, which is at home in {saved.space} "
                    f"(no {a.stage}{COPY_IN}{a.mb}:{SAVED_ITEM} before)"
                )
                yield from self._problem("away", step, what)
            elif saved is not None and a.kind in saved.users and self._state(a) in (_HERE, _BACK):
                self._states[a.stage, a.mb] = _TAKEN

    def _state(self, a: Action) -> str:
        return self._states.get((a.stage, a.mb), "")

    def _first_taken(self, saved: SavedSet, a: Action) -> str:
        """Name a value of a set that a computation takes, the first by name."""
        graph = self._module.stage_graph(a.stage, a.kind)
        assert graph is not None
        return min(value.name for value in graph.ins if value.name in saved.values)

    def store(self, step: int, a: Action) -> Iterator[Problem]:
        state = self._state(a)
        if not state:
            what = f"copies what microbatch {a.mb} has not saved (comes before {a.stage}{FORWARD}{a.mb})"
            yield from self._problem("before", step, what)
        elif state == _TAKEN:
            yield from self._problem("late", step, f"copies what a computation of microbatch {a.mb} has taken")
        elif state != _HERE:
            yield from self._problem("same", step, f"copies what is at home already of microbatch {a.mb}")
        self._states[a.stage, a.mb] = _COPIED

    def let_go(self, step: int, a: Action) -> Iterator[Problem]:
        state = self._state(a)
        if state != _COPIED:
            what = (
                f"lets go of the only copy of what {a.stage}{FORWARD}{a.mb} saved "
                f"(no {a.stage}{COPY_OUT}{a.mb}:{SAVED_ITEM} before)"
                if state == _HERE
                else f"lets go of what is not on the device of microbatch {a.mb}, or is taken next"
            )
            yield from self._problem("only", step, what)
        self._states[a.stage, a.mb] = _AWAY

    def bring(self, step: int, a: Action) -> Iterator[Problem]:
        if self._state(a) != _AWAY:
            yield from self._problem("here", step, f"brings what is on the device of microbatch {a.mb}")
        self._states[a.stage, a.mb] = _BACK

    def _drop(self, step: int, a: Action) -> Iterator[Problem]:
        state = self._state(a)
        if state in (_COPIED, _AWAY):
            what = f"drops microbatch {a.mb}, whose saved values were copied out and never {_missed(state)}"
            yield from self._problem("back", step, what)


def _missed(state: str) -> str:
    return "brought back" if state == _AWAY else "let go of"


# The check of every action that moves a saved set.
MOVES_OF_SETS: dict[str, Callable[[_SetMoves, int, Action], Iterator[Problem]]] = {
    COPY_OUT: _SetMoves.store,
    LET_GO: _SetMoves.let_go,
    COPY_IN: _SetMoves.bring,
}
