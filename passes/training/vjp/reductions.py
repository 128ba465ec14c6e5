"""Gradient rules of reductions."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ir.graph import Op, Value
from penstock.ir.ops import reduced_axes

from .emitter import Grad, GradientEmitter, Rule, scaled


def _kept(b: GradientEmitter, op: Op, value: Value) -> Value:
    """Return the result of a reduction, or its gradient, with the reduced dimensions as 1."""
    axes = reduced_axes(op.ins[0].type, op.attrs["axes"])
    shape = tuple(1 if i in axes else n for i, n in enumerate(op.ins[0].type.dims))
    return value if value.type.dims == shape else b.emit("reshape", value, shape=shape)


def _sum(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    return (lambda: b.emit("broadcast", _kept(b, op, dy), shape=op.ins[0].type.dims),)


def _mean(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    share = dy.type.size / max(op.ins[0].type.size, 1)
    return (lambda: b.emit("broadcast", _kept(b, op, scaled(b, share, dy)), shape=op.ins[0].type.dims),)


def _max(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, y = op.ins[0], op.outs[0]

    def grad() -> Value:
        hit = b.emit("cast", b.emit("equal", x, _kept(b, op, y)), dtype=x.type.dtype)
        hits = b.emit("sum", hit, axes=op.attrs["axes"], keep=True)
        return b.emit("mul", hit, b.emit("div", _kept(b, op, dy), hits))

    return (grad,)


RULES: dict[str, Rule] = {
    "sum": _sum,
    "mean": _mean,
    "max": _max,
}
