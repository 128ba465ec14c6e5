"""What a schedule is to the table, and the runs of actions that several of them are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.ir.schedule import Action, Program


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """Where a rank is in the pipeline: its stage, by how many microbatches its forwards should be ahead of its backwards, and how many
    backwards later its weight gradients may come: w and s with one rank per stage (dealing.py)."""

    stage: int
    ahead: int
    behind: int


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A schedule: `order(place, microbatches)` gives the program of one rank for all microbatches of its stage; `delay` says how
    many updates the weights of a microbatch are behind (W(t+1) = W(t) - lr * g(W(t - delay))). With `splits` weight gradients
    run apart, as W, after split-backward."""

    order: Callable[[PipelinePlace, int], Program]
    delay: int
    doc: str
    trains: bool = True
    splits: bool = False


def forwards(stage: int, first: int, count: int) -> Iterator[Action]:
    return (Action("F", stage, mb) for mb in range(first, first + count))


def backwards(stage: int, first: int, count: int) -> Iterator[Action]:
    return (Action("B", stage, mb) for mb in range(first, first + count))


def pairs(stage: int, forward: int, backward: int, count: int) -> Iterator[Action]:
    """One forward, one backward, `count` times."""
    for i in range(count):
        yield Action("F", stage, forward + i)
        yield Action("B", stage, backward + i)
