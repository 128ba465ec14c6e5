"""The schedule `zb-1f1b`, ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023): 1f1b with weight gradients (W)
apart, which run where it waits.

w forwards, then (F, B) pairs, then w backwards, as 1f1b. The W of a microbatch comes after the backward of the
microbatch s later. So stage s holds at most min(d, m) microbatches, as many as 1f1b holds on stage 0. The remaining Ws
come at the end, then U. Synchronous, one weight version, gradients summed in the order of 1f1b.

m(tf+tb) + (d-1)(tf+tb-2tw) per batch if m >= d. Here tb counts W, and W takes no longer than a forward nor than the
rest of a backward. With equal times of the three that is a third of the bubble of 1f1b.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.action_kinds import BACKWARD, UPDATE, WEIGHTS
from penstock.ir.schedule import Action, Program

from .flush_1f1b import order as whole_order
from .kind import PipelinePlace, ScheduleKind


def order(place: PipelinePlace, m: int) -> Program:
    return Program((), tuple(_with_weights(place.stage, whole_order(place, m).batch, min(place.behind, m), m)))


def _with_weights(stage: int, actions: tuple[Action, ...], behind: int, m: int) -> Iterator[Action]:
    """Insert W `behind` backwards after its own, the last ones before the update."""
    for action in actions:
        if action.kind == UPDATE:
            yield from (Action(WEIGHTS, stage, mb) for mb in range(2 * m - behind, 2 * m))
        yield action
        if action.kind == BACKWARD and action.mb - behind >= m:
            yield Action(WEIGHTS, stage, action.mb - behind)


KIND = ScheduleKind(
    order,
    0,
    "ZB-H1: 1f1b with weight gradients apart, which fill most of its waiting; at most d in flight on every stage",
    splits=True,
)
