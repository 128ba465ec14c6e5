"""The rows of the table of schedules, and the runs of actions that several of them are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.ir.schedule import Action, Program


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """The place of a rank in the pipeline: its stage, by how many microbatches its forwards should be ahead of its
    backwards, and how many backwards later its weight gradients may come: w and s with one rank per stage
    (dealing.py)."""

    stage: int
    ahead: int
    behind: int


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A schedule: `order(place, microbatches)` gives the program of one rank for all microbatches of its stage; `delay`
    says how many updates the weights of a microbatch are behind (W(t+1) = W(t) - lr * g(W(t - delay))). A schedule with
    a delay never drains, one without drains after every batch. With `splits` weight gradients run apart, as W, after
    split-backward. Forwards run `eagerness` times as far ahead as the stages behind need. With `bounded` the warm-up
    limits what is in flight; without, a rank holds all its microbatches of a batch, and no message is waited for. The
    methods are the formulas of the planner: `warm` is a warm-up, `share` the microbatches of a batch that a replica
    runs, `earlier` the devices of the stages in front of it.
    """

    order: Callable[[PipelinePlace, int], Program]
    delay: int
    doc: str
    trains: bool = True
    splits: bool = False
    eagerness: int = 1
    bounded: bool = True

    @property
    def versions(self) -> int:
        """The versions of the weights that are alive at once."""
        return self.delay + 1

    @property
    def recomputes(self) -> bool:
        """Return whether the planner counts on forwards that are computed again: weight gradients that are apart hold
        the results until they run, and without backwards there is nothing to compute again."""
        return self.trains and not self.splits

    @property
    def fills_whole(self) -> bool:
        """Return whether a batch goes through the whole model, forward and backward, before the pipeline is full."""
        return not self.delay and not self.splits

    def gradient_copies(self, replicas: int) -> int:
        """Count the buffers of a gradient: those of a batch wait for other replicas while the next one adds up."""
        return self.versions if replicas > 1 else 1

    def warm_up(self, ahead: int) -> int:
        """Count the forwards of a replica before its first backward."""
        return ahead * self.eagerness

    def in_flight(self, share: int, warm: int, earlier: int, replicas: int) -> int:
        """Count the microbatches whose activations a replica holds at once."""
        if not self.bounded:
            return share
        if self.splits:
            return min(share, warm + 1 - (-earlier // replicas))
        return warm + 1 if self.delay else min(share, warm + 1)

    def waiting(self, count: int) -> int:
        """Count the microbatches whose data come together: those of a batch, or where nothing is trained each."""
        return count if self.trains else 1

    def least_share(self, warm: int) -> int:
        """Count the fewest microbatches of a batch that a replica may have: below that the schedule is illegal."""
        return warm + 1 if self.splits else max(1, warm if self.delay else 1)


def forwards(stage: int, first: int, count: int) -> Iterator[Action]:
    return (Action("F", stage, mb) for mb in range(first, first + count))


def backwards(stage: int, first: int, count: int) -> Iterator[Action]:
    return (Action("B", stage, mb) for mb in range(first, first + count))


def pairs(stage: int, forward: int, backward: int, count: int) -> Iterator[Action]:
    """Yield one forward and one backward, `count` times."""
    for i in range(count):
        yield Action("F", stage, forward + i)
        yield Action("B", stage, backward + i)


@dataclass(frozen=True, slots=True)
class PackPlace:
    """The place of a rank whose ranks run several stages each: its number, that of all ranks, and its stages."""

    rank: int
    ranks: int
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackKind:
    """A schedule of ranks that run several stages each. `order(place, microbatches)` gives the program of one rank.
    `each` are the numbers of stages on a rank that the planner tries. With `splits` weight gradients run apart, as W.
    `folded`: stages are dealt to the ranks down and up again (0 3 / 1 2), else round (0 2 / 1 3). `delay` as of a
    schedule of one stage on a rank: with one it never drains. `refused` says why there is no order of so many
    microbatches on so many ranks, "" where there is one. `least` are the fewest that versions of weights allow."""

    order: Callable[[PackPlace, int], Program]
    doc: str
    each: tuple[int, ...]
    splits: bool = False
    folded: bool = False
    delay: int = 0
    refused: Callable[[int, int], str] = lambda ranks, m: ""
    least: Callable[[int], int] = lambda ranks: 1

    def is_legal(self, ranks: int, m: int) -> bool:
        """Return whether a pipeline of so many ranks can run so many microbatches of a batch."""
        return m >= self.least(ranks) and not self.refused(ranks, m)

    def packs(self, ranks: int, each: int) -> tuple[tuple[int, ...], ...]:
        """Return the stages of every rank."""
        if self.folded:
            rows = [range(i * ranks, (i + 1) * ranks)[:: -1 if i % 2 else 1] for i in range(each)]
            return tuple(zip(*rows, strict=True))
        return tuple(tuple(range(rank, ranks * each, ranks)) for rank in range(ranks))
