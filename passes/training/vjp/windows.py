"""Gradient rules of sliding windows."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir.graph import Op, Value

from .emitter import Grad, GradientEmitter, Rule, own_attrs


def _max_pool(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("max_pool_grad", op.ins[0], op.outs[0], dy, **own_attrs(op)),)


def _avg_pool(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("avg_pool_grad", dy, shape=op.ins[0].type.dims, **own_attrs(op)),)


RULES: dict[str, Rule] = {
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
}
