"""ONNX operators that find elements by the values of an index tensor, or put them there, or in an order."""

from __future__ import annotations

from collections.abc import Sequence

from ..formulas.indexing import from_the_front, positions
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


def _one_hot(n: Node) -> Result:
    depth = int(n.constant(1, "the depth").reshape(-1)[0])
    indices, dtype = n.value(0), n.type(2).dtype
    known = n.known(2)
    pair = n.value(2) if known is None else None
    if pair is not None:
        off, on = (reshape(n, cut(n, pair, 0, i, i + 1), ()) for i in (0, 1))
    else:
        assert known is not None
        off, on = (n.literal(x, dtype) for x in known.tolist())
    rank = indices.type.rank
    axis = axis_of(n, n.int_attr("axis", -1), rank + 1)
    wide = indices if indices.type.dtype == "i64" else n.emit("cast", indices, dtype="i64")
    column = reshape(n, from_the_front(n, wide, depth), (*indices.type.dims[:axis], 1, *indices.type.dims[axis:]))
    line = n.emit("iota", dtype="i64", shape=(depth, *(1,) * (rank - axis)), axis=0)
    return n.emit("where", n.emit("equal", column, line), on, off)


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
    "OneHot": _one_hot,
    "TopK": _topk,
    "CumSum": _cumsum,
}
