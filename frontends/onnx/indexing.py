"""ONNX operators that find elements by the values of an index tensor, or put them there, or in an order."""

from __future__ import annotations

from collections.abc import Sequence

from ..formulas.indexing import entries, from_the_front, positions
from ..formulas.layout import axis_of, cut, reshape
from .node import Node, Result, Rule


def _gather(n: Node) -> Result:
    axis = axis_of(n, n.int_attr("axis"), n.type().rank)
    x, indices = n.value(), n.known(1)
    if indices is None or indices.ndim:
        return n.emit("gather", x, n.value(1), axis=axis)
    # One known entry is a slice: its gradient is padding, not a scatter.
    size = x.type.dims[axis]
    at = int(indices)
    n.require(-size <= at < size, f"index {at} is outside dimension {axis} of {x.type}")
    return reshape(n, cut(n, x, axis, at % size, at % size + 1), x.type.dims[:axis] + x.type.dims[axis + 1 :])


def _gather_elements(n: Node) -> Result:
    x, indices = n.value(0), n.value(1)
    axis = axis_of(n, n.int_attr("axis"), x.type.rank)
    return n.emit("gather", reshape(n, x, (x.type.size,)), positions(n, indices, axis, x.type.dims), axis=0)


def _gather_nd(n: Node) -> Result:
    n.require(n.int_attr("batch_dims") == 0, "batch_dims is not supported")
    return n.emit("gather", *entries(n, n.value(0), n.value(1)), axis=0)


def _adds(n: Node) -> bool:
    reduction = n.text_attr("reduction", "none")
    n.require(reduction in ("none", "add"), f"reduction={reduction} is not supported, only none and add")
    return reduction == "add"


def _scatter_elements(n: Node) -> Result:
    x, indices, updates = n.values()
    axis = axis_of(n, n.int_attr("axis"), x.type.rank)
    count = indices.type.size
    places = reshape(n, positions(n, indices, axis, x.type.dims), (count,))
    y = n.emit("scatter", reshape(n, x, (x.type.size,)), places, reshape(n, updates, (count,)), axis=0, add=_adds(n))
    return reshape(n, y, x.type.dims)


def _scatter_nd(n: Node) -> Result:
    x, indices, updates = n.values()
    whole, flat = entries(n, x, indices)
    return reshape(n, n.emit("scatter", whole, flat, updates, axis=0, add=_adds(n)), x.type.dims)


def _one_hot(n: Node) -> Result:
    depth = n.ints(1, "the depth")[0]
    off, on = n.constant(2, "the pair of values").tolist()
    indices, dtype = n.value(0), n.type(2).dtype
    rank = indices.type.rank
    axis = axis_of(n, n.int_attr("axis", -1), rank + 1)
    wide = indices if indices.type.dtype == "i64" else n.emit("cast", indices, dtype="i64")
    column = reshape(n, from_the_front(n, wide, depth), (*indices.type.dims[:axis], 1, *indices.type.dims[axis:]))
    line = n.emit("iota", dtype="i64", shape=(depth, *(1,) * (rank - axis)), axis=0)
    return n.emit("where", n.emit("equal", column, line), n.literal(on, dtype), n.literal(off, dtype))


def _topk(n: Node) -> Sequence[Result]:
    x = n.value()
    n.ignore("sorted")  # sorted is one of the orders that may come when it does not matter
    axis = axis_of(n, n.int_attr("axis", -1), x.type.rank)
    return n.emit_all("topk", 2, x, k=n.ints(1, "k")[0], axis=axis, largest=bool(n.int_attr("largest", 1)))


def _cumsum(n: Node) -> Result:
    x = n.value()
    axis = axis_of(n, n.ints(1, "the axis")[0], x.type.rank)
    return n.emit("cumsum", x, axis=axis, exclusive=bool(n.int_attr("exclusive")), reverse=bool(n.int_attr("reverse")))


RULES: dict[str, Rule] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "OneHot": _one_hot,
    "TopK": _topk,
    "CumSum": _cumsum,
}
