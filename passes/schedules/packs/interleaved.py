"""The schedule `interleaved` (Narayanan et al., 2021): a rank runs v stages, and the pipeline goes round all ranks v
times.

Rank r of d has the stages r, r + d, r + 2d and so on. Its forwards take its stages in turn, each with a group of about
d microbatches; its backwards do the same from the last stage on. There are (v-1) groups and 2(d-1-r) more forwards
first, then (F, B) pairs, then the remaining backwards, then U.

m·t + (d-1)·t/v per batch, where t is the time of a forward and a backward of all v stages of a rank: the bubble of 1f1b
divided by v. In exchange a rank holds more: (v-1)d + 2(d-1) + 1 microbatches of single stages on rank 0.
"""

from __future__ import annotations

from penstock.ir.action_kinds import BACKWARD, FORWARD, UPDATE
from penstock.ir.schedule import Action, Program
from penstock.passes.schedules.kind import PackKind, PackPlace


def groups(ranks: int, m: int) -> int:
    """Return into how many groups, of about as many as there are ranks, a pipeline deals its microbatches."""
    return max(1, m // ranks)


def unequal(ranks: int, m: int) -> str:
    """Say why microbatches make no equal groups; "" where they do."""
    count = groups(ranks, m)
    return f"cannot deal {m} microbatches into {count} equal groups for {ranks} ranks" if m % count else ""


class Turns:
    """The forwards and backwards of a rank, each numbered as turns: so many of its stages, one microbatch each. A stage
    has a group of so many microbatches before it is the next one's turn. Turn 0 is the first of batch 1, and later
    batches go on behind it."""

    def __init__(self, place: PackPlace, m: int, group: int) -> None:
        self._stages, self._m, self._group = place.stages, m, group
        # Forwards in front of the first backward: so that no rank waits while the pipeline is full.
        self.ahead = (len(place.stages) - 1) * self._group + 2 * (place.ranks - 1 - place.rank)

    def forward(self, turn: int) -> Action:
        return Action(FORWARD, self._stages[turn // self._group % len(self._stages)], self._number(turn))

    def backward(self, turn: int) -> Action:
        return Action(BACKWARD, self._stages[-1 - turn // self._group % len(self._stages)], self._number(turn))

    def _number(self, turn: int) -> int:
        """Return the microbatch of a turn, counted from the first of all."""
        cycle, place = divmod(turn, self._group * len(self._stages))
        return self._m + cycle * self._group + place % self._group


def order(place: PackPlace, m: int) -> Program:
    return in_groups(place, m, m // groups(place.ranks, m))


def in_groups(place: PackPlace, m: int, group: int) -> Program:
    """Return the program of a rank whose stages have turns of so many microbatches."""
    turns, count = Turns(place, m, group), len(place.stages) * m
    ahead = min(turns.ahead, count)
    batch = [turns.forward(turn) for turn in range(ahead)]
    for turn in range(count):
        batch += [turns.forward(ahead + turn)] if ahead + turn < count else []
        batch.append(turns.backward(turn))
    return Program((), (*batch, *(Action(UPDATE, stage, 1) for stage in place.stages)))


KIND = PackKind(
    order,
    "several stages on a rank, in turn: the bubble of 1f1b divided by their number, more in flight",
    each=(2, 3, 4),
    refused=unequal,
)
