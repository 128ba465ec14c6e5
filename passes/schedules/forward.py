"""forward: inference, forwards only."""

from __future__ import annotations

from ...ir.schedule import Program
from .kind import Kind, Place, forwards


def order(place: Place, m: int) -> Program:
    return Program((), tuple(forwards(place.stage, m, m)))


KIND = Kind(order, 0, "inference: forwards only", trains=False)
