"""ONNX operators that reduce dimensions: sums, products, extremes, and the places of extremes.

A reduction over no entries gives its neutral element: 0, 1, or the end of the element type. Bools are reduced as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod

import numpy as np

from penstock.frontends.formulas.elementwise import limits_of, root
from penstock.frontends.formulas.layout import axis_of, reshape
from penstock.frontends.formulas.resizing import pick
from penstock.frontends.formulas.scans import flipped, product_over
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS


def _axes(n: OnnxNode) -> tuple[int, ...] | None:
    """Return the axes to reduce, None for nothing.

    They are an operand or (before opset 18, ReduceSum before 13) an attribute.
    """
    rank = n.type().rank
    axes = n.ints(1, "the list of axes") if n.has(1) else n.ints_attr("axes")
    nothing = n.int_attr("noop_with_empty_axes")
    if not axes:
        return None if nothing else tuple(range(rank))
    return tuple(sorted({axis_of(n, axis, rank) for axis in axes}))


def _reduce(write: str) -> Rule:
    """Make the rule of a sum or mean. `write` names the step before it, the sum itself, and the step after it."""

    def rule(n: OnnxNode) -> Result:
        axes, keep = _axes(n), bool(n.int_attr("keepdims", 1))
        x = n.value()
        if write not in ("sum", "abs-sum", "square-sum"):
            n.require(x.type.dtype in FLOATS, f"needs a floating-point operand, got {x.type}")

        def total(value: Value, kind: str = "sum") -> Value:
            return value if axes is None else n.emit(kind, value, axes=axes, keep=keep)

        match write:
            case "sum" | "mean":
                return n.tensor(0) if axes is None else total(x, write)
            case "abs-sum":
                return total(n.emit("abs", x))
            case "square-sum":
                return total(n.emit("mul", x, x))
            case "square-sum-sqrt":
                return root(n, total(n.emit("mul", x, x)))
        return n.emit("log", total(x))

    return rule


def _of_nothing(n: OnnxNode, axes: tuple[int, ...], keep: bool, value: float | int) -> Value | None:
    """Return the result of a reduction over no entries, or None if there are entries."""
    dims = n.type().dims
    if prod(dims[a] for a in axes):
        return None
    shape = [1 if i in axes else size for i, size in enumerate(dims) if keep or i not in axes]
    return n.emit("const", value=value, dtype=n.type().dtype, shape=tuple(shape))


def _extremum(largest: bool) -> Rule:
    def rule(n: OnnxNode) -> Result:
        axes, keep = _axes(n), bool(n.int_attr("keepdims", 1))
        if axes is None:
            return n.tensor(0)
        dtype = n.type().dtype
        nothing = _of_nothing(n, axes, keep, limits_of(dtype)[0 if largest else 1])
        if nothing is not None:
            return nothing
        x = n.emit("cast", n.value(), dtype="u8") if dtype == "bool" else n.value()
        y = n.emit("max", x if largest else flipped(n, x), axes=axes, keep=keep)
        y = y if largest else flipped(n, y)
        return n.emit("cast", y, dtype=dtype) if dtype == "bool" else y

    return rule


def _log_sum_exp(n: OnnxNode) -> Result:
    """Write ReduceLogSumExp with the largest value subtracted, so that nothing overflows."""
    axes, keep = _axes(n), bool(n.int_attr("keepdims", 1))
    x = n.value()
    n.require(x.type.dtype in FLOATS, f"needs a floating-point operand, got {x.type}")
    if axes is None:
        return n.tensor(0)
    nothing = _of_nothing(n, axes, keep, -math.inf)
    if nothing is not None:
        return nothing
    top = n.emit("max", x, axes=axes, keep=True)
    # An infinite largest value is the result: infinity less infinity is no number.
    finite = n.emit("less", n.emit("abs", top), math.inf)
    top = n.emit("where", finite, top, 0.0)
    remainder = n.emit("log", n.emit("sum", n.emit("exp", n.emit("sub", x, top)), axes=axes, keep=keep))
    return n.emit("add", remainder, reshape(n, top, remainder.type.dims))


def _product(n: OnnxNode) -> Result:
    axes, keep = _axes(n), bool(n.int_attr("keepdims", 1))
    if axes is None:
        return n.tensor(0)
    nothing = _of_nothing(n, axes, keep, 1)
    if nothing is not None:
        return nothing
    x = n.value()
    for axis in axes:
        x = product_over(n, x, axis)
    return x if keep else reshape(n, x, [size for i, size in enumerate(x.type.dims) if i not in axes])


def _arg(order: Callable[[OnnxNode, Value], Value]) -> Rule:
    def rule(n: OnnxNode) -> Result:
        x, last = n.value(), n.int_attr("select_last_index")
        axis, keep = axis_of(n, n.int_attr("axis"), x.type.rank), n.int_attr("keepdims", 1)
        size = x.type.dims[axis]
        x = pick(n, x, axis, np.arange(n.room(size))[::-1]) if last else x
        y = n.emit("argmax", order(n, x), axis=axis)
        y = n.emit("sub", n.literal(size - 1, "i64"), y) if last else y
        return reshape(n, y, (*x.type.dims[:axis], 1, *x.type.dims[axis + 1 :])) if keep else y

    return rule


RULES: dict[str, Rule] = {
    "ReduceSum": _reduce("sum"),
    "ReduceMean": _reduce("mean"),
    "ReduceL1": _reduce("abs-sum"),
    "ReduceL2": _reduce("square-sum-sqrt"),
    "ReduceSumSquare": _reduce("square-sum"),
    "ReduceLogSum": _reduce("sum-log"),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _extremum(True),
    "ReduceMin": _extremum(False),
    "ReduceProd": _product,
    "ArgMax": _arg(lambda n, x: x),
    "ArgMin": _arg(flipped),
}
