"""Gradient rules of lookups and replacements; indices have no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs

from .emitter import Grad, GradientEmitter, Rule, own_attrs


def _gather(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, indices = op.ins
    return lambda: b.emit("gather_grad", dy, indices, shape=x.type.dims, **own_attrs(op)), None


def _scatter(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    """Differentiate a replacement: replaced entries get no gradient; of several replacements of one entry each gets it,
    as if all had stayed."""
    (_, indices, updates), a = op.ins, complete_attrs(op)
    none = updates.type.dims

    def of_operand() -> Value:
        if a["add"]:
            return dy
        zeros = b.emit("broadcast", b.scalar(0.0, dy), shape=none)
        return b.emit("scatter", dy, indices, zeros, axis=a["axis"])

    return of_operand, None, lambda: b.emit("gather", dy, indices, axis=a["axis"])


RULES: dict[str, Rule] = {
    "gather": _gather,
    "scatter": _scatter,
}
