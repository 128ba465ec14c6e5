"""The schedule `gpipe`: m forwards, then m backwards, then U. (m+d-1)(tf+tb) per batch, m microbatches in flight."""

from __future__ import annotations

from penstock.ir.schedule import Action, Program

from .kind import PipelinePlace, ScheduleKind, backwards, forwards


def order(place: PipelinePlace, m: int) -> Program:
    return Program((), (*forwards(place.stage, m, m), *backwards(place.stage, m, m), Action("U", place.stage, 1)))


KIND = ScheduleKind(
    order, 0, "all forwards, then all backwards: drained every batch, one weight version, m in flight", bounded=False
)
