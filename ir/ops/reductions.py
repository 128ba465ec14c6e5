"""Rows for reductions: dimensions are summed up, or one element of them is found."""

from __future__ import annotations

from penstock.ir.types import FLOATS, TensorType

from .table import Required, Types, Values, axis_of, ints, need, need_numbers, per_element, reduced_axes, row


def _reduce(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_numbers(x)
    axes = reduced_axes(x[0], a["axes"])
    if a["keep"]:
        return (x[0].with_shape(tuple(1 if i in axes else n for i, n in enumerate(x[0].shape))),)
    return (x[0].with_shape(tuple(n for i, n in enumerate(x[0].shape) if i not in axes)),)


def _mean(x: Types, a: Values) -> tuple[TensorType, ...]:
    result = _reduce(x, a)
    need(
        x[0].dtype in FLOATS or not _is_empty(x[0], reduced_axes(x[0], a["axes"])),
        f"there is no mean of the integers of {x[0]}",
    )
    return result


def _max(x: Types, a: Values) -> tuple[TensorType, ...]:
    result = _reduce(x, a)
    need(
        not _is_empty(x[0], reduced_axes(x[0], a["axes"])),
        f"there is no largest element along axes {list(ints(a['axes']))} of {x[0]}",
    )
    return result


def _is_empty(t: TensorType, axes: tuple[int, ...]) -> bool:
    return any(t.shape[i] == 0 for i in axes)


def _argmax(x: Types, a: Values) -> tuple[TensorType, ...]:
    need_numbers(x)
    axis = axis_of(a["axis"], x[0].rank)
    need(not _is_empty(x[0], (axis,)), f"there is no largest element along axis {axis} of {x[0]}")
    return (TensorType("i64", x[0].shape[:axis] + x[0].shape[axis + 1 :]),)


ROWS = (
    row(
        "sum",
        "reduce",
        1,
        _reduce,
        "sum over `axes`",
        axes=Required(tuple),
        keep=False,
        flops=per_element(1),
        dims="d... n...+@axes -> d... | 0",
    ),
    row(
        "mean",
        "reduce",
        1,
        _mean,
        "mean over `axes`",
        axes=Required(tuple),
        keep=False,
        flops=per_element(1),
        dims="d... n...*+@axes -> d... | 0",
    ),
    row(
        "max",
        "reduce",
        1,
        _max,
        "largest over `axes`",
        axes=Required(tuple),
        keep=False,
        flops=per_element(1),
        dims="d... n...*@axes -> d...",
    ),
    row(
        "argmax",
        "reduce",
        1,
        _argmax,
        "index of the first largest along `axis`",
        axis=Required(int),
        flops=per_element(1),
        dims="a... n*@axis z... -> a... z...",
    ),
)
