"""gpipe: m forwards, then m backwards, U. (m+d-1)(tf+tb) per batch, m microbatches in flight."""

from __future__ import annotations

from ...ir.schedule import Action, Program
from .kind import Kind, backwards, forwards


def order(stage: int, stages: int, m: int) -> Program:
    return Program((), (*forwards(stage, m, m), *backwards(stage, m, m), Action("U", stage, 1)))


KIND = Kind(order, 0, "all forwards, then all backwards: drained every batch, one weight version, m in flight")
