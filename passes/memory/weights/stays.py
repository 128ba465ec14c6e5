"""The weights that stay on a device from one visit of their stage to the next.

In: the stages of a device in the order of its visits in a batch, the bytes of their weights, and for how many there is
room at once. All batches are alike. Out: the visits behind which weights stay.

The weights of visit i come while visit i-1 computes, and are wanted until visit i+1 does. Between these moments, the
*slots*, a device has those of two stages. More of them may stay where there is room: from slot i+2 up to the visit of
the same stage that comes next. Batches follow each other, so the slots are a ring, where no rule of what goes is always
best. An integer programme chooses those that stay, so that as little as possible comes. Of choices that are equal it
has one whose weights wait for the fewest slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.passes.placement.programme import Programme

# A device has the weights that it computes with, and those that come next.
FEWEST = 2


def kept_until_next(stages: Sequence[int], sizes: Mapping[int, int], room: int) -> set[int]:
    """Return the visits behind which the weights of their stage stay until its next visit."""
    spans = [_span(stages, visit) for visit in range(len(stages))]
    free = {visit for visit, span in enumerate(spans) if not span}
    waiting = [visit for visit, span in enumerate(spans) if span]
    if room <= FEWEST or not waiting:
        return free
    programme, count = Programme(), len(stages)
    # What comes, but for a constant; all that weights wait for is less than the least of them.
    moved = programme.variable(lower=-float(count * max(sizes.values())))
    stays = {visit: programme.variable(upper=1.0, whole=True) for visit in waiting}
    least = min(sizes[stages[visit]] for visit in waiting) / (2 * count * count)
    saved = [(x, sizes[stages[visit]] - least * len(spans[visit])) for visit, x in stays.items()]
    programme.row([(moved, 1.0), *saved], least=0.0)
    for slot in range(count):
        here = [(x, 1.0) for visit, x in stays.items() if (slot - spans[visit].start) % count < len(spans[visit])]
        programme.row(here, most=float(room - FEWEST))
    values = programme.minimise().values
    return free | {visit for visit, x in stays.items() if values[x] > 0.5}


def _span(stages: Sequence[int], visit: int) -> range:
    """Return the slots through which weights wait for their next visit, which may be in the next batch."""
    count = len(stages)
    return range(visit + 2, next(k for k in range(visit + 1, visit + count + 1) if stages[k % count] == stages[visit]))
