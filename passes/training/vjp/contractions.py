"""Gradient rules of contractions: products, convolutions, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs

from .emitter import Grad, GradientEmitter, Rule, own_attrs, scaled


def _matmul(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    (x, w), a = op.ins, complete_attrs(op)
    ta, tb = bool(a["ta"]), bool(a["tb"])

    def of_left() -> Value:
        return b.emit("matmul", w, dy, ta=tb, tb=True) if ta else b.emit("matmul", dy, w, tb=not tb)

    def of_right() -> Value:
        left, grad = x, dy
        if (
            w.type.rank == 2 and not ta and dy.type.rank > 2
        ):  # one product over all rows, not one per batch entry and a sum
            rows = math.prod(x.type.dims[:-1])
            left = b.emit("reshape", x, shape=(rows, x.type.dims[-1]))
            grad = b.emit("reshape", dy, shape=(rows, dy.type.dims[-1]))
        return b.emit("matmul", grad, left, ta=True, tb=ta) if tb else b.emit("matmul", left, grad, ta=not ta)

    return of_left, of_right


def _conv(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    (x, w), a = op.ins, own_attrs(op)
    return (
        lambda: b.emit("conv_grad_input", dy, w, shape=x.type.dims, **a),
        lambda: b.emit("conv_grad_weight", x, dy, shape=w.type.dims, **a),
    )


def _conv_grad_input(b: GradientEmitter, op: Op, dx: Value) -> Sequence[Grad]:
    """Differentiate a transposed convolution, which is linear in both operands."""
    (g, w), a = op.ins, {k: v for k, v in own_attrs(op).items() if k != "shape"}
    return (
        lambda: b.emit("conv", dx, w, **a),
        lambda: b.emit("conv_grad_weight", dx, g, shape=w.type.dims, **a),
    )


def _attention(
    b: GradientEmitter, op: Op, dy: Value | None, dtop: Value | None, dtotal: Value | None
) -> Sequence[Grad]:
    y, top, total = op.outs
    assert dy is not None, "the other results have no gradient, which autodiff sees to"
    assert dtop is None
    assert dtotal is None
    q, k, v, *mask = op.ins
    emitted: list[tuple[Value, ...]] = []

    def of(which: int) -> Grad:
        def grad() -> Value:
            if not emitted:
                emitted.append(b.emit_all("attention_grad", dy, q, k, v, y, top, total, *mask, **own_attrs(op)))
            return emitted[0][which]

        return grad

    return of(0), of(1), of(2), *(lambda: _attention_mask(b, op, dy) for _ in mask)


def _attention_mask(b: GradientEmitter, op: Op, dy: Value) -> Value:
    """Emit the gradient of an added mask: share * (dy v^T - sum(dy * y)), with all scores at once."""
    q, k, v, mask = op.ins
    y, top, total = op.outs
    a = complete_attrs(op)

    def column(value: Value) -> Value:
        return b.emit("reshape", value, shape=(*value.type.dims, 1))

    scores = b.emit(
        "add",
        scaled(b, float(a["scale"]), b.emit("matmul", q, k, tb=True)),  # type: ignore[arg-type]
        mask,
    )
    share = b.emit("div", b.emit("exp", b.emit("sub", scores, column(top))), column(total))
    dot = b.emit("sum", b.emit("mul", dy, y), axes=(3,), keep=True)
    slope = b.emit("mul", share, b.emit("sub", b.emit("matmul", dy, v, tb=True), dot))
    if a["causal"]:
        row = b.emit("iota", dtype="i32", shape=(q.type.dims[2], 1), axis=0)
        column_number = b.emit("iota", dtype="i32", shape=(1, k.type.dims[2]), axis=1)
        slope = b.emit("where", b.emit("less", row, column_number), b.scalar(0.0, slope), slope)
    return slope


RULES: dict[str, Rule] = {
    "matmul": _matmul,
    "conv": _conv,
    "conv_grad_input": _conv_grad_input,
    "attention": _attention,
}
