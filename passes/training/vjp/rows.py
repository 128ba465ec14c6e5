"""Gradient rules of row operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs

from .emitter import Grad, GradientEmitter, Rule, own_attrs, scaled


def _from_result(kind: str) -> Rule:
    """Make a rule for gradient ops that take (y, dy) and the same attributes."""
    return lambda b, op, dy: (lambda: b.emit(kind, op.outs[0], dy, **own_attrs(op)),)


def _cumsum(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    a = complete_attrs(op)
    return (lambda: b.emit("cumsum", dy, axis=a["axis"], exclusive=a["exclusive"], reverse=not a["reverse"]),)


def _topk(b: GradientEmitter, op: Op, dy: Value | None, dindices: Value | None) -> Sequence[Grad]:
    x, indices = op.ins[0], op.outs[1]
    axis = int(complete_attrs(op)["axis"]) % x.type.rank  # type: ignore[arg-type]

    def grad() -> Value:
        assert dy is not None
        flat = b.emit("reshape", _positions(b, indices, axis, x.type.dims), shape=(indices.type.size,))
        chosen = b.emit("reshape", dy, shape=(dy.type.size,))
        return b.emit("reshape", b.emit("gather_grad", chosen, flat, shape=(x.type.size,)), shape=x.type.dims)

    return (grad if dy is not None else None,)


def _positions(b: GradientEmitter, indices: Value, axis: int, dims: tuple[int, ...]) -> Value:
    """Emit the row-major positions, in a tensor of `dims`, of elements with these indices along one axis, and their own
    along the others."""
    shape = indices.type.dims
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    total = indices
    if strides[axis] != 1:
        total = b.emit("mul", indices, b.emit("const", value=strides[axis], dtype="i64"))
    for i, n in enumerate(shape):
        if i == axis or n == 1:
            continue
        line = b.emit("iota", dtype="i64", shape=(n, *(1,) * (len(shape) - 1 - i)), axis=0)
        line = b.emit("mul", line, b.emit("const", value=strides[i], dtype="i64")) if strides[i] != 1 else line
        total = b.emit("add", total, line)
    return total


def _layer_norm(
    b: GradientEmitter, op: Op, dy: Value | None, dmean: Value | None, drstd: Value | None
) -> Sequence[Grad]:
    x, scale, _ = op.ins
    _, mean, rstd = op.outs
    a = complete_attrs(op)
    axis = int(a["axis"]) % x.type.rank  # type: ignore[arg-type]
    ones = (1,) * (x.type.rank - axis)
    count = math.prod(x.type.dims[axis:])
    emitted: list[tuple[Value, ...]] = []

    def column(value: Value) -> Value:
        return b.emit("reshape", value, shape=(*value.type.dims, *ones))

    def of_weights(which: int) -> Grad:
        def grad() -> Value:
            assert dy is not None
            if not emitted:
                emitted.append(b.emit_all("layer_norm_grad_weight", dy, x, mean, rstd, axis=a["axis"]))
            return emitted[0][which]

        return grad if dy is not None else None

    def of_operand() -> Value:
        parts = []
        if dy is not None:
            parts.append(b.emit("layer_norm_grad", dy, x, scale, mean, rstd, axis=a["axis"]))
        if dmean is not None:
            parts.append(b.emit("broadcast", column(scaled(b, 1 / count, dmean)), shape=x.type.dims))
        if drstd is not None:
            cube = b.emit("mul", b.emit("mul", rstd, rstd), rstd)
            slope = column(b.emit("mul", scaled(b, -1 / count, drstd), cube))
            parts.append(b.emit("mul", b.emit("sub", x, column(mean)), slope))
        total = parts[0]
        for part in parts[1:]:
            total = b.emit("add", total, part)
        return total

    return of_operand, of_weights(0), of_weights(1)


def _batch_norm(b: GradientEmitter, op: Op, dy: Value) -> Sequence[Grad]:
    x, scale, _, mean, variance = op.ins
    eps = float(complete_attrs(op)["eps"])  # type: ignore[arg-type]
    shape = (x.type.dims[1], *(1,) * (x.type.rank - 2))
    rows = tuple(i for i in range(x.type.rank) if i != 1)

    def column(value: Value) -> Value:
        return b.emit("reshape", value, shape=shape)

    def rstd() -> Value:
        return b.emit("rsqrt", b.emit("add", variance, b.scalar(eps, variance)))

    def total(value: Value) -> Value:
        return b.emit("sum", value, axes=rows)

    def centred() -> Value:
        return total(b.emit("mul", dy, b.emit("sub", x, column(mean))))

    def of_variance() -> Value:
        r = rstd()
        return b.emit("mul", b.emit("mul", centred(), scaled(b, -0.5, scale)), b.emit("mul", b.emit("mul", r, r), r))

    return (
        lambda: b.emit("mul", dy, column(b.emit("mul", scale, rstd()))),
        lambda: b.emit("mul", centred(), rstd()),
        lambda: total(dy),
        lambda: b.emit("neg", b.emit("mul", total(dy), b.emit("mul", scale, rstd()))),
        of_variance,
    )


RULES: dict[str, Rule] = {
    "softmax": _from_result("softmax_grad"),
    "log_softmax": _from_result("log_softmax_grad"),
    "cumsum": _cumsum,
    "topk": _topk,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
}
