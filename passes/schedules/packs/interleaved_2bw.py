"""The schedule `interleaved-2bw`: interleaved that is never drained, with two versions of the weights, as in 2bw.

The first forwards of interleaved run at the very start only. Then there are (F, B) pairs without end, in which forwards
are so many turns ahead. U of a stage stands behind its last backward of a batch: where nothing else has to agree on it,
the stages of a rank update one after the other, while the others compute.

m·t per batch, where t is the time of a forward and a backward of all stages of a rank: as long as 2bw takes where all
stages are alike, and less where more stages share the work out better. In flight are as many microbatches as in
interleaved. Before its update the first stage of rank r has run max(g, 2(d-1-r)) forwards behind its batch, where g
microbatches make a group, and other stages less. They must belong to the next batch, and g <= m: so it is legal iff m
>= 2d-2. With less than d-1 forwards of a rank would stand in front of a backward that they need.
"""

from __future__ import annotations

from penstock.ir.action_kinds import UPDATE
from penstock.ir.schedule import Action, Program
from penstock.passes.schedules.kind import PackKind, PackPlace
from penstock.support.words import counted

from .interleaved import Turns, groups, unequal


def too_few(ranks: int, m: int) -> str:
    """Say why there is no order of so few microbatches on so many ranks; "" where there is one."""
    return f"on {ranks} ranks would wait for ever with {counted(m, 'microbatch')}" if m < ranks - 1 else ""


def least(ranks: int) -> int:
    """Return the fewest microbatches with which forwards ahead of an update belong to the next batch."""
    return 2 * ranks - 2


def order(place: PackPlace, m: int) -> Program:
    return in_groups(place, m, m // groups(place.ranks, m))


def in_groups(place: PackPlace, m: int, group: int) -> Program:
    """Return the program of a rank whose stages have turns of so many microbatches."""
    turns, count = Turns(place, m, group), len(place.stages) * m
    batch: list[Action] = []
    for turn in range(count):
        backward = turns.backward(turn)
        batch += [turns.forward(turns.ahead + turn), backward]
        if backward.mb == 2 * m - 1:
            batch.append(Action(UPDATE, backward.stage, 1))
    return Program(tuple(turns.forward(turn) for turn in range(turns.ahead)), tuple(batch))


KIND = PackKind(
    order,
    "interleaved, never drained: two weight versions, gradients one update late, as 2bw with several stages on a rank",
    each=(2, 3, 4),
    delay=1,
    refused=lambda ranks, m: too_few(ranks, m) or unequal(ranks, m),
    least=least,
)
