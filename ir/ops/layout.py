"""Rows for layout operations: the same elements in another arrangement."""

from __future__ import annotations

from math import prod

from penstock.ir.types import TensorType, broadcast_shapes

from .table import ANY, Required, Types, Values, axis_of, ints, need, row

# Each element of the result is one of the operand: memory may be read as if it had the result's shape.
VIEWS = ("reshape", "transpose", "broadcast", "slice")


def _reshape(x: Types, a: Values) -> tuple[TensorType, ...]:
    shape = ints(a["shape"])
    need(prod(shape) == x[0].size, f"{x[0]} has {x[0].size} elements, shape {list(shape)} has {prod(shape)}")
    return (x[0].with_shape(shape),)


def _transpose(x: Types, a: Values) -> tuple[TensorType, ...]:
    perm = ints(a["perm"])
    need(
        sorted(perm) == list(range(x[0].rank)),
        f"perm {list(perm)} is not a permutation of the {x[0].rank} dimensions of {x[0]}",
    )
    return (x[0].with_shape(tuple(x[0].shape[p] for p in perm)),)


def _broadcast_to(x: Types, a: Values) -> tuple[TensorType, ...]:
    shape = ints(a["shape"])
    need(broadcast_shapes(x[0].shape, shape) == shape, f"{x[0]} does not broadcast to {list(shape)}")
    return (x[0].with_shape(shape),)


def _slice(x: Types, a: Values) -> tuple[TensorType, ...]:
    start, stop, step = ints(a["start"]), ints(a["stop"]), ints(a["step"])
    need(len(start) == len(stop) == len(step) == x[0].rank, f"start, stop and step need {x[0].rank} entries for {x[0]}")
    for i, (b, e, s, n) in enumerate(zip(start, stop, step, x[0].dims, strict=True)):
        need(
            0 <= b <= e <= n and s >= 1,
            f"slice {b}:{e}:{s} does not lie in dimension {i} of {x[0]} (0 <= start <= stop <= size, step >= 1)",
        )
    return (x[0].with_shape(tuple(-(-(e - b) // s) for b, e, s in zip(start, stop, step, strict=True))),)


def _pad(x: Types, a: Values) -> tuple[TensorType, ...]:
    low, high, inner = ints(a["low"]), ints(a["high"]), ints(a["inner"]) or (0,) * x[0].rank
    need(len(low) == len(high) == len(inner) == x[0].rank, f"low, high and inner need {x[0].rank} entries for {x[0]}")
    need(min((*low, *high, *inner), default=0) >= 0, "padding must not be negative; slice instead")
    sizes = zip(x[0].dims, low, high, inner, strict=True)
    return (x[0].with_shape(tuple(n + p + q + i * max(n - 1, 0) for n, p, q, i in sizes)),)


def _concat(x: Types, a: Values) -> tuple[TensorType, ...]:
    axis = axis_of(a["axis"], x[0].rank)
    rests = {(t.dtype, t.shape[:axis] + t.shape[axis + 1 :]) for t in x}
    need(len(rests) == 1, f"operands differ outside axis {axis}: {' and '.join(map(str, x))}")
    total = sum(t.dims[axis] for t in x)
    return (x[0].with_shape((*x[0].shape[:axis], total, *x[0].shape[axis + 1 :])),)


ROWS = (
    row(
        "reshape",
        "layout",
        1,
        _reshape,
        "same elements in row-major order, new shape",
        shape=Required(tuple),
        dims="b (h e) -> b h e | 0",
    ),
    row(
        "transpose",
        "layout",
        1,
        _transpose,
        "dimension i of the result is dimension perm[i] of the operand",
        perm=Required(tuple),
        dims="a b c -> a c b | 0",
    ),
    row(
        "broadcast",
        "layout",
        1,
        _broadcast_to,
        "repeat along dimensions of size 1 or missing in front",
        shape=Required(tuple),
        dims="| 0",
    ),
    row(
        "slice",
        "layout",
        1,
        _slice,
        "start:stop:step in each dimension",
        start=Required(tuple),
        stop=Required(tuple),
        step=Required(tuple),
        dims="a (b^ e) -> a e | 0",
    ),
    row(
        "pad",
        "layout",
        1,
        _pad,
        "`value` before (low), after (high) and between (inner) the elements of each dimension",
        low=Required(tuple),
        high=Required(tuple),
        inner=(),
        value=0.0,
        dims="a e -> a (b^ e)",
    ),
    row(
        "concat",
        "layout",
        (1, ANY),
        _concat,
        "one after the other along `axis`",
        axis=Required(int),
        dims="a e@axis, ... -> a (b^ e) | all",
    ),
)
