"""2bw, PipeDream-2BW (ICML 2021): w forwards at the very start only, then (F, B) pairs without end; U after the m-th backward.

m(tf+tb) per batch, at most d-s microbatches in flight on stage s. The last w forwards of a batch already belong to the next one, so it is
legal iff m >= d-1.
"""

from __future__ import annotations

from ...ir.schedule import Action, Program
from .kind import Kind, forwards, pairs


def ahead(stage: int, m: int, w: int) -> Program:
    """(F, B) pairs in which forwards are w microbatches ahead of backwards for ever."""
    return Program(tuple(forwards(stage, m, w)), (*pairs(stage, m + w, m, m), Action("U", stage, 1)))


def order(stage: int, stages: int, m: int) -> Program:
    return ahead(stage, m, stages - 1 - stage)


KIND = Kind(order, 1, "PipeDream-2BW: never drained, two weight versions, gradients one update late, at most d in flight")
