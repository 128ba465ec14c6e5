"""The schedule `1f1b`, PipeDream-flush (ICML 2021): w forwards, then (F, B) pairs, then w backwards, U; the pipeline is
empty between batches.

(m+d-1)(tf+tb) per batch, at most min(d-s, m) microbatches in flight on stage s.
"""

from __future__ import annotations

from penstock.ir.schedule import Action, Program

from .kind import PipelinePlace, ScheduleKind, backwards, forwards, pairs


def order(place: PipelinePlace, m: int) -> Program:
    stage, w = place.stage, min(place.ahead, m)
    batch = (
        *forwards(stage, m, w),
        *pairs(stage, m + w, m, m - w),
        *backwards(stage, 2 * m - w, w),
        Action("U", stage, 1),
    )
    return Program((), batch)


KIND = ScheduleKind(
    order, 0, "PipeDream-flush: drained every batch, one weight version, at most d microbatches in flight"
)
