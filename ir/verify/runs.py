"""The concrete runs of a schedule that the checkers of schedules look at.

A schedule is a period without a fixed length, so each check works on concrete programs. These are runs of 1 to 4
batches, from batch 0 and from batch 2. A batch overlaps at most with the tail of its neighbours, so longer runs repeat
what these show. The shortest run with a problem is reported, with rank, step and action, and the steps around. Per rank
and kind of problem only the first one is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.ir.graph import Module
from penstock.ir.schedule import Action, Schedule
from penstock.support.words import counted

from .problems import Problem, step_window

RUNS = tuple((first, batches) for first in (0, 2) for batches in (1, 2, 3, 4))
# Schedules with more actions than this per batch are checked on these runs only: beginning and end in one, and all
# phases apart.
MANY_ACTIONS, FEW_RUNS = 5000, ((0, 1), (0, 3), (2, 2))


@dataclass(frozen=True, slots=True)
class ConcreteRun:
    """The concrete programs of one run."""

    schedule: Schedule
    first: int
    batches: int
    programs: Mapping[int, list[Action]]

    @property
    def microbatches(self) -> range:
        m = self.schedule.microbatches
        return range(self.first * m, (self.first + self.batches) * m)

    def place(self, rank: int, step: int) -> str:
        return f"rank {rank} step {step} ({self.programs[rank][step]})"

    def problem(self, rank: int, step: int, what: str, hint: str = "") -> Problem:
        return Problem(f"{self._name()}, {self.place(rank, step)}", what, step_window(self.programs[rank], step), hint)

    def missing(self, rank: int, what: str) -> Problem:
        return Problem(f"{self._name()}, rank {rank}", what)

    def _name(self) -> str:
        return f"schedule {self.schedule.name}, run of {counted(self.batches, 'batch')} from batch {self.first}"


class FirstOfEach:
    """Problems of one rank in one run, of each category the first alone: what follows from it says no more."""

    def __init__(self, run: ConcreteRun, rank: int) -> None:
        self._run, self._rank = run, rank
        self.reported: set[str] = set()

    def __call__(self, category: str, step: int, what: str, hint: str = "") -> Iterator[Problem]:
        if category not in self.reported:
            self.reported.add(category)
            yield self._run.problem(self._rank, step, what, hint)


def over_runs(module: Module, checker: Callable[[Module, ConcreteRun], Iterable[Problem]]) -> Iterator[Problem]:
    """Yield the problems of the shortest run that has any."""
    schedule = module.schedule
    if schedule is None:
        yield Problem("schedule", "there is none")
        return
    many = sum(1 for _ in schedule.actions()) > MANY_ACTIONS
    for first, batches in FEW_RUNS if many else RUNS:
        programs = schedule.kept.get((first, batches))
        if programs is None:
            programs = schedule.kept[first, batches] = schedule.expand_all(batches, first)
        problems = list(checker(module, ConcreteRun(schedule, first, batches, programs)))
        if problems:
            yield from problems
            return
