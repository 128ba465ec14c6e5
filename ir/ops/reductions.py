"""Rows for reductions: dimensions are summed up, or one element of them is found."""

from __future__ import annotations

from ..types import TensorType
from .table import Needs, Types, Values, axis_of, need, per_element, reduced_axes, row


def _reduce(x: Types, a: Values) -> tuple[TensorType, ...]:
    need(x[0].dtype != "bool", "is not defined for bool; cast first")
    axes = reduced_axes(x[0], a["axes"])
    if a["keep"]:
        return (x[0].with_shape(tuple(1 if i in axes else n for i, n in enumerate(x[0].shape))),)
    return (x[0].with_shape(tuple(n for i, n in enumerate(x[0].shape) if i not in axes)),)


def _argmax(x: Types, a: Values) -> tuple[TensorType, ...]:
    axis = axis_of(a["axis"], x[0].rank)
    return (TensorType("i64", x[0].shape[:axis] + x[0].shape[axis + 1 :]),)


# fmt: off
ROWS = (
    row("sum", "reduce", 1, _reduce, "sum over `axes`", axes=Needs(tuple), keep=False, flops=per_element(1), dims="...+ -> ..."),
    row("mean", "reduce", 1, _reduce, "mean over `axes`", axes=Needs(tuple), keep=False, flops=per_element(1), dims="...^ -> ..."),
    row("max", "reduce", 1, _reduce, "largest over `axes`", axes=Needs(tuple), keep=False, flops=per_element(1), dims="...^ -> ..."),
    row("argmax", "reduce", 1, _argmax, "index of the first largest along `axis`", axis=Needs(int), flops=per_element(1), dims="...^ -> ..."),
)
# fmt: on
