"""The schedule `2bw`, PipeDream-2BW (ICML 2021): w forwards at the very start only, then (F, B) pairs without end; U
after the m-th backward.

m(tf+tb) per batch, at most d-s microbatches in flight on stage s. The last w forwards of a batch already belong to the
next one, so it is legal iff m >= d-1.
"""

from __future__ import annotations

from penstock.ir.schedule import Action, Program

from .kind import PipelinePlace, ScheduleKind, forwards, pairs


def order(place: PipelinePlace, m: int) -> Program:
    """(F, B) pairs in which forwards are so many microbatches ahead of backwards for ever."""
    stage, ahead = place.stage, place.ahead
    return Program(tuple(forwards(stage, m, ahead)), (*pairs(stage, m + ahead, m, m), Action("U", stage, 1)))


KIND = ScheduleKind(
    order, 1, "PipeDream-2BW: never drained, two weight versions, gradients one update late, at most d in flight"
)
