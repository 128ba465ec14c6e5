"""Differences of quantised results, counted in steps.

In: a graph, and the values of an interpreted run. A result is in steps where it was an integer of 8 or 16 bits, as
itself or times a scale: (q - zero point) * scale, perhaps moved about by layout changes. Out: the size of its steps,
and one line that says how many of them two results are apart, and where.

Two right programs may differ by a step where a number lies half-way between two, as sums in another order fall to
either side of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.ir.graph import Graph, Op, Value
from penstock.ir.interpreter.ops import Array
from penstock.ir.ops import definition
from penstock.ir.types import FLOATS
from penstock.support.words import counted

_SHORT = ("i8", "u8", "i16", "u16")
# A difference counts as whole steps up to this share of one.
_NEAR = 0.02


def step_values(graph: Graph) -> dict[str, Value | None]:
    """Return, by result, the scale that its steps have; None where they are whole numbers. Others are left out."""
    makers = graph.producers()
    scales: dict[str, Value | None] = {}
    for value in graph.outs:
        end = _behind_layout(value, makers)
        if end.type.dtype in _SHORT:
            scales[value.name] = None
        elif (op := makers.get(end)) is not None and op.kind == "mul":
            for q, scale in (op.ins, op.ins[::-1]):
                if _is_short(q, makers) and scale.type.dtype in FLOATS:
                    scales[value.name] = scale
    return scales


def _behind_layout(value: Value, makers: Mapping[Value, Op]) -> Value:
    while (op := makers.get(value)) is not None and (
        definition(op.kind).family == "layout" or (op.kind == "cast" and value.type.dtype in FLOATS)
    ):
        if len(op.ins) != 1:
            break
        value = op.ins[0]
    return value


def _is_short(value: Value, makers: Mapping[Value, Op]) -> bool:
    """Return whether a value is a short integer, or one less its zero point, whatever its type is now."""
    while value.type.dtype not in _SHORT:
        op = makers.get(value)
        if op is None or not (op.kind in ("cast", "sub") or definition(op.kind).family == "layout"):
            return False
        value = op.ins[0]
    return True


def step_share(step: Array, result: Array) -> float:
    """Return the size of the largest step over the largest magnitude of a result; 0 where it has none."""
    magnitude = float(np.abs(result).max(initial=0.0)) if result.dtype != bool else 0.0
    return float(np.abs(step).max()) / magnitude if magnitude else 0.0


def is_constant(result: Array) -> bool:
    """Say whether all elements of a result are one number: where a step limits them, that tells nothing."""
    return result.size < 2 or bool((result == result.flat[0]).all())


def told_steps(a: Array, b: Array, step: Array) -> str:
    """Describe the difference of two results in steps of quantisation; nothing where they are not whole steps apart."""
    x, y, size = (np.asarray(array, dtype=np.float64) for array in (a, b, step))
    if not size.all():
        return ""
    try:
        steps = np.abs(x - y) / np.broadcast_to(np.abs(size), x.shape)
    except ValueError:  # another shape, or a scale per channel whose axis was moved since
        return ""
    if not np.isfinite(steps).all() or (np.abs(steps - np.rint(steps)) > _NEAR).any():
        return ""
    many, most = int(np.count_nonzero(np.rint(steps))), int(np.rint(steps).max(initial=0))
    if not many:
        return ""
    which = "by one step of quantisation" if most == 1 else f"by up to {most} steps of quantisation"
    return f"differs {which}, {float(np.abs(size).max()):.2g}, in {many} of {counted(steps.size, 'element')}"
