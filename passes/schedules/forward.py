"""The schedule `forward`, for inference: forwards only."""

from __future__ import annotations

from penstock.ir.schedule import Program

from .kind import PipelinePlace, ScheduleKind, forwards


def order(place: PipelinePlace, m: int) -> Program:
    return Program((), tuple(forwards(place.stage, m, m)))


KIND = ScheduleKind(order, 0, "inference: forwards only", trains=False, bounded=False)
