"""Rows for lookups: elements found by the values of an index tensor."""

from __future__ import annotations

from penstock.ir.types import INTS, TensorType

from .table import Required, Types, Values, axis_of, ints, need, need_numbers, per_element, row


def _gather(x: Types, a: Values) -> tuple[TensorType, ...]:
    axis = axis_of(a["axis"], x[0].rank)
    need(x[1].dtype in INTS, f"indices must be integers, got {x[1]}")
    need(x[0].shape[axis] != 0 or 0 in x[1].shape, f"there are no entries along axis {axis} of {x[0]}")
    return (x[0].with_shape((*x[0].shape[:axis], *x[1].shape, *x[0].shape[axis + 1 :])),)


def _gather_grad(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_numbers(x[:1])
    out = x[0].with_shape(ints(a["shape"]))
    (expected,) = _gather((out, x[1]), a)
    need(expected == x[0], f"gathering {x[1]} from {out} gives {expected}, but the gradient is {x[0]}")
    return (out,)


def _scatter(x: Types, a: Values) -> tuple[TensorType, ...]:
    data, indices, updates = x
    (expected,) = _gather((data, indices), a)
    need(
        expected == updates, f"{indices} of {data} along axis {a['axis']} are {expected}, but the updates are {updates}"
    )
    if a["add"]:
        need_numbers((data,))
    return (data,)


ROWS = (
    row(
        "gather",
        "gather",
        2,
        _gather,
        "entries of x along `axis` at integer indices; negative ones count from the end",
        axis=0,
        dims="a... r*+@axis z..., i... -> a... i... z... | 0",
    ),
    row(
        "gather_grad",
        "gather",
        2,
        _gather_grad,
        "sum of dy into zeros of `shape` at the indices, from (dy, indices)",
        axis=0,
        shape=Required(tuple),
        flops=per_element(1),
        dims="a... i...+ z..., i...+ -> a... r*@axis z... | 0",
    ),
    row(
        "scatter",
        "gather",
        3,
        _scatter,
        "x with its entries along `axis` at integer indices replaced, or with `add` added to, from "
        "(x, indices, updates); of replacements of one entry the last stays",
        axis=0,
        add=False,
        flops=per_element(1),
        dims="a... r*@axis z..., i...^, a... i...^ z... -> a... r* z...",
    ),
)
