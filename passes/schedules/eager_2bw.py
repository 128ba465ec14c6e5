"""The schedule `eager-2bw`: 2bw with twice as many forwards ahead, 2(d-1-s). A message may take as long as a forward,
and no rank waits for it.

m(tf+tb) per batch also where a link takes up to tf, which costs plain 2bw 1.5 times that and more; at most 2(d-s)-1
microbatches in flight on stage s. Legal with two versions iff m >= 2d-2.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.ir.schedule import Program

from . import delayed_2bw
from .kind import PipelinePlace, ScheduleKind


def order(place: PipelinePlace, m: int) -> Program:
    return delayed_2bw.order(replace(place, ahead=KIND.warm_up(place.ahead)), m)


KIND = ScheduleKind(
    order,
    1,
    "2bw with twice the warm-up: hides the time of messages, needs 2d-2 microbatches per batch, at most 2d-1 in flight",
    eagerness=2,
)
