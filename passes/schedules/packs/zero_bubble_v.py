"""The schedule `zb-v` (Qi et al., 2024): two stages on a rank, which the pipeline goes down and up again like a V, and
weight gradients apart.

Rank r of d has the stages r and 2d-1-r. So the last stage is on the rank of the first, and the turn is inside of rank
d-1. A rank runs forwards of its first stage until a microbatch comes back to its second one. Then it runs F, B, W of
both in turn, and each W right behind its B. At the end Ws fill the time in which it waits. Written for at least 2d-1
microbatches; with fewer, those that do not exist are left out.

With equal times of F, B without W, and W there is no bubble from one batch's first B on; d whole microbatches are in
flight, as many as in 1f1b.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.ir.action_kinds import BACKWARD, FORWARD, UPDATE, WEIGHTS
from penstock.ir.schedule import Action, Program
from penstock.passes.schedules.kind import PackKind, PackPlace
from penstock.support.errors import UsageError


def order(place: PackPlace, m: int) -> Program:
    """Return the program of a rank."""
    if len(place.stages) != 2:
        raise UsageError(f"schedule zb-v needs two stages on each rank, got {len(place.stages)}", where="schedule")
    numbered = _numbered(place, max(2 * place.ranks - 1, m))
    computed = [Action(kind, stage, m + number) for kind, stage, number in numbered if number < m]
    return Program((), (*computed, *(Action(UPDATE, stage, 1) for stage in place.stages)))


def _numbered(place: PackPlace, m: int) -> Iterator[tuple[str, int, int]]:
    """Yield the computations of at least 2d-1 microbatches: kind, stage, and number in the batch."""
    d, rank, (down, up) = place.ranks, place.rank, place.stages
    done = Counter[tuple[str, int]]()

    def run(*kinds: str, stage: int) -> Iterator[tuple[str, int, int]]:
        for kind in kinds:
            yield kind, stage, done[kind, stage]
            done[kind, stage] += 1

    for _ in range(2 * (d - rank) - 1):
        yield from run(FORWARD, stage=down)
    for _ in range(rank):
        yield from run(FORWARD, stage=up)
        yield from run(FORWARD, stage=down)
    for _ in range(d - rank):
        yield from run(FORWARD, BACKWARD, WEIGHTS, stage=up)
    while done[FORWARD, up] < m:
        if done[FORWARD, down] < m:
            yield from run(FORWARD, stage=down)
        yield from run(BACKWARD, WEIGHTS, stage=down)
        yield from run(FORWARD, BACKWARD, WEIGHTS, stage=up)
    for _ in range(rank):
        yield from run(BACKWARD, stage=down)
        yield from run(BACKWARD, stage=up)
    for _ in range(d - rank):
        yield from run(BACKWARD, WEIGHTS, stage=down)
    for stage in (up, down):
        while done[WEIGHTS, stage] < done[BACKWARD, stage]:
            yield from run(WEIGHTS, stage=stage)


KIND = PackKind(
    order,
    "two stages on a rank, down and up again, with weight gradients apart: hardly a bubble, in flight as much as 1f1b",
    each=(2,),
    splits=True,
    folded=True,
)
