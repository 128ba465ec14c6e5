"""The weights that stay on a device from one visit of their stage to the next.

In: the stages of a device in the order of its visits in a batch, which all batches have, and for how many there is room
at once. Out: the visits behind which weights stay.

The weights of visit i come while visit i-1 computes, and are wanted until visit i+1 does. Between these moments, the
*slots*, a device has those of two stages. More of them may stay where there is room: from slot i+2 up to the visit of
the same stage that comes next. All count as one size. As many stay as there can, so that as few as possible come. Of
those that are there in one slot the one that is used furthest ahead goes. For a run that has an end that rule leaves
most; but batches follow each other, and the slots are a ring. So all choices of those that stay over one slot are
looked at, that with the fewest of them, and the rule has the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

# A device has the weights that it computes with, and those that come next.
FEWEST = 2


def kept_until_next(stages: Sequence[int], room: int) -> set[int]:
    """Return the visits behind which the weights of their stage stay until its next visit."""
    count, spans = len(stages), [_span(stages, visit) for visit in range(len(stages))]
    free = {visit for visit, span in enumerate(spans) if not span}
    waiting = {visit: span for visit, span in enumerate(spans) if span}
    if not waiting:
        return free
    seam = min(range(count), key=lambda slot: sum(_is_over(span, slot, count) for span in waiting.values()))
    crossing = [visit for visit, span in waiting.items() if _is_over(span, seam, count)]
    best: set[int] = set()
    for few in range(min(room - FEWEST, len(crossing)) + 1):
        for stay in combinations(crossing, few):
            kept = _furthest_go(
                {v: waiting[v] for v in waiting if v in stay or v not in crossing}, stay, seam, count, room
            )
            if kept is not None and len(kept) > len(best):
                best = kept
    return free | best


def _span(stages: Sequence[int], visit: int) -> range:
    """Return the slots through which weights wait for their next visit, which may be in the next batch."""
    count = len(stages)
    return range(visit + 2, next(k for k in range(visit + 1, visit + count + 1) if stages[k % count] == stages[visit]))


def _is_over(span: range, slot: int, count: int) -> bool:
    return (slot - span.start) % count < len(span)


def _furthest_go(
    waiting: Mapping[int, range], stay: Collection[int], seam: int, count: int, room: int
) -> set[int] | None:
    """Return the visits whose weights wait, `stay` among them. None where these have no room."""
    kept = set(waiting)
    for slot in range(seam, seam + count):
        here = [visit for visit in kept if _is_over(waiting[visit], slot, count)]
        # None of these is over the seam: they end where they begin, and so much later.
        ends = {v: (waiting[v].start - seam) % count + len(waiting[v]) for v in here if v not in stay}
        able = sorted(ends, key=lambda visit: (ends[visit], visit))
        for _ in range(len(here) - (room - FEWEST)):
            if not able:
                return None
            kept.remove(able.pop())
    return kept
