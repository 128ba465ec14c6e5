"""The shrinker: the smallest case that still fails, by delta debugging.

In: a case, edits to try (edits.py), and a test that says whether a case still shows the fault. Out: a case that still
shows it, is no larger by `Case.size`, and passes the verifier. Every family of edits has atoms (operations, parameters,
batches, sizes of dimensions). All of them are tried at once, then in halves, quarters, ... down to one by one, and
edits that work are kept. Families take turns until none of them finds anything more, or the budget is spent.

    cases tried, where nothing works:    about 2n per family of n atoms
    without a limit, at the end:         no single edit is left that could be made (1-minimal)

Limit: a fault in unread operations stays with them, as edits drop unread operations.

Deterministic, but for the clock. The test defines the fault: a test that accepts any failure may end with another fault
than it began with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.ir.verify.verifier import verify
from penstock.support.errors import PenstockError

from .case import Case
from .edits import FAMILIES, Family, tidied

Fails = Callable[[Case], bool]


@dataclass
class Budget:
    """The number of cases that may be tried, and the time for them."""

    seconds: float = 60.0
    tries: int = 2000
    spent: int = 0
    began: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Spend one try; return whether there was one left."""
        if self.spent >= self.tries or time.monotonic() - self.began >= self.seconds:
            return False
        self.spent += 1
        return True


def shrink(case: Case, fails: Fails, budget: Budget | None = None, families: Sequence[Family] = FAMILIES) -> Case:
    """Return the smallest case that fails. `case` must fail."""
    search = _CaseSearch(case, fails, budget or Budget())
    search.attempt(tidied(case))
    progress = True
    while progress:
        progress = False
        for family in families:
            progress |= search.exhaust(family)
    return search.best


class _CaseSearch:
    """The search for a smaller case."""

    def __init__(self, case: Case, fails: Fails, budget: Budget) -> None:
        self.best, self.fails, self.budget = case, fails, budget

    def exhaust(self, family: Family) -> bool:
        """Apply as many atoms of a family as possible; return whether there were any."""
        progress = False
        atoms = list(family.atoms(self.best))
        size = len(atoms) if family.together else 1
        while size and atoms:
            kept: list[object] = []
            for chunk in _chunks(atoms, size):
                if self.attempt(family.apply(self.best, chunk)):
                    progress = True
                else:
                    kept += chunk
            atoms, size = kept, size // 2
        return progress

    def attempt(self, candidate: Case | None) -> bool:
        """Accept a candidate if it is smaller, legal and still fails. Return whether it was accepted."""
        if candidate is None or candidate.size >= self.best.size or not _is_legal(candidate):
            return False
        if not self.budget.take() or not self.fails(candidate):
            return False
        self.best = candidate
        return True


def _chunks(atoms: list[object], size: int) -> Iterator[list[object]]:
    # From the end: operations after the fault go first.
    for stop in range(len(atoms), 0, -size):
        yield atoms[max(0, stop - size) : stop]


def _is_legal(case: Case) -> bool:
    try:
        verify(case.module)
    except PenstockError:
        return False
    return True
