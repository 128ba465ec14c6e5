"""The schedule `interleaved` (Narayanan et al., 2021): a rank runs v stages, and the pipeline goes round all ranks v
times.

Rank r of d has the stages r, r + d, r + 2d and so on. Its forwards take its stages in turn, each with a group of about
d microbatches; its backwards do the same from the last stage on. There are (v-1) groups and 2(d-1-r) more forwards
first, then (F, B) pairs, then the remaining backwards, then U.

m·t + (d-1)·t/v per batch, where t is the time of a forward and a backward of all v stages of a rank: the bubble of 1f1b
divided by v. In exchange a rank holds more: (v-1)d + 2(d-1) + 1 microbatches of single stages on rank 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.ir.action_kinds import BACKWARD, FORWARD, UPDATE
from penstock.ir.schedule import Action
from penstock.support.errors import UsageError

from .kind import PackKind, PackPlace


def order(place: PackPlace, m: int) -> Iterator[Action]:
    """Yield the program of a rank for batch 1."""
    d, v, rank = place.ranks, len(place.stages), place.rank
    rounds = max(1, m // d)
    if m % rounds:
        raise UsageError(
            f"schedule interleaved cannot deal {m} microbatches into {rounds} equal groups for {d} ranks",
            where="schedule",
            hint=f"give a multiple of {d} microbatches, or fewer than {2 * d}",
        )
    group, done = m // rounds, Counter[tuple[str, int]]()
    ahead = min((v - 1) * group + 2 * (d - 1 - rank), v * m)

    def action(kind: str, turn: int) -> Action:
        stage = place.stages[turn // group % v if kind == FORWARD else v - 1 - turn // group % v]
        done[kind, stage] += 1
        return Action(kind, stage, m + done[kind, stage] - 1)

    for turn in range(ahead):
        yield action(FORWARD, turn)
    for turn in range(v * m):
        if ahead + turn < v * m:
            yield action(FORWARD, ahead + turn)
        yield action(BACKWARD, turn)
    for stage in place.stages:
        yield Action(UPDATE, stage, 1)


KIND = PackKind(
    order,
    "several stages on a rank, in turn: the bubble of 1f1b divided by their number, more in flight",
    each=(2, 3, 4),
)
