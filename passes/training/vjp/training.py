"""Gradient rules of losses."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir.graph import Op, Value

from .emitter import Grad, GradientEmitter, Rule, scaled


def _cross_entropy(b: GradientEmitter, op: Op, dloss: Value | None, dlse: Value | None) -> Sequence[Grad]:
    (logits, labels), lse = op.ins, op.outs[1]

    def grad() -> Value:
        parts = []
        if dloss is not None:
            parts.append(b.emit("cross_entropy_grad", logits, labels, lse, dloss))
        if dlse is not None:
            column = (*lse.type.dims, 1)
            chance = b.emit("exp", b.emit("sub", logits, b.emit("reshape", lse, shape=column)))
            parts.append(b.emit("mul", chance, b.emit("reshape", dlse, shape=column)))
        return parts[0] if len(parts) == 1 else b.emit("add", *parts)

    return grad, None


def _mse(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, y = op.ins

    def grad(first: Value, second: Value) -> Grad:
        return lambda: b.emit("mul", b.emit("sub", first, second), scaled(b, 2 / max(x.type.size, 1), dy))

    return grad(x, y), grad(y, x)


RULES: dict[str, Rule] = {
    "cross_entropy": _cross_entropy,
    "mse": _mse,
}
