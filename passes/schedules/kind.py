"""What a schedule is to the table, and the runs of actions that several of them are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...ir.schedule import Action, Program


@dataclass(frozen=True, slots=True)
class Kind:
    """A schedule: `order(stage, stages, microbatches)` gives one rank's program; `delay` says how many updates the weights of a
    microbatch are behind (W(t+1) = W(t) - lr * g(W(t - delay))). With `splits` weight gradients run apart, as W, after split-backward."""

    order: Callable[[int, int, int], Program]
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
