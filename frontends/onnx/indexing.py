"""ONNX operators that find elements by the values of an index tensor, or put them there, or in an order.

The IR looks up and replaces whole entries along one axis. Element by element and over several dimensions at once that is the same on a tensor of
one dimension: indices become row-major positions, and `gather` and `scatter` compute these where they read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penstock.ir.graph import Value

from .layout import axis_of, cut, reshape
from .node import Node, Result, Rule


def _from_the_front(n: Node, indices: Value, size: int) -> Value:
    """Negative indices count from the end: add the size to them."""
    return n.emit("where", n.emit("less", indices, 0), n.emit("add", indices, size), indices)


def _positions(n: Node, indices: Value, axis: int, dims: Sequence[int]) -> Value:
    """Row-major positions in a tensor of `dims` of the elements with these indices along `axis`, and their own along the others."""
    n.require(indices.type.rank == len(dims), f"indices {indices.type} must have {len(dims)} dimensions")
    sizes = indices.type.dims
    n.require(
        all(size <= limit for i, (size, limit) in enumerate(zip(sizes, dims, strict=True)) if i != axis),
        f"indices {indices.type} are larger than {list(dims)}",
    )
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    wide = indices if indices.type.dtype == "i64" else n.emit("cast", indices, dtype="i64")
    total = _from_the_front(n, wide, dims[axis])
    total = n.emit("mul", total, strides[axis]) if strides[axis] != 1 else total
    for i, size in enumerate(sizes):
        if i != axis and size > 1:
            line = n.emit("iota", dtype="i64", shape=(size, *(1,) * (len(sizes) - 1 - i)), axis=0)
            total = n.emit("add", total, n.emit("mul", line, strides[i]) if strides[i] != 1 else line)
    return total


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
    return n.emit("gather", reshape(n, x, (x.type.size,)), _positions(n, indices, axis, x.type.dims), axis=0)


def _entries(n: Node, x: Value, indices: Value) -> tuple[Value, Value]:
    """x with the dimensions that index vectors reach into as one, and the vectors as positions in it."""
    dims, depth = x.type.dims, indices.type.dims[-1]
    n.require(1 <= depth <= len(dims), f"indices {indices.type} are too deep for {x.type}")
    flat: Value | None = None
    last = indices.type.rank - 1
    for i in range(depth):
        part = reshape(n, cut(n, indices, last, i, i + 1), indices.type.dims[:-1])
        if depth > 1:  # negative entries count from the end of their own dimension
            part = _from_the_front(n, part, dims[i])
        flat = part if flat is None else n.emit("add", n.emit("mul", flat, dims[i]), part)
    assert flat is not None
    return reshape(n, x, (prod(dims[:depth]), *dims[depth:])), flat


def _gather_nd(n: Node) -> Result:
    n.require(n.int_attr("batch_dims") == 0, "batch_dims is not supported")
    return n.emit("gather", *_entries(n, n.value(0), n.value(1)), axis=0)


def _adds(n: Node) -> bool:
    reduction = n.text_attr("reduction", "none")
    n.require(reduction in ("none", "add"), f"reduction={reduction} is not supported, only none and add")
    return reduction == "add"


def _scatter_elements(n: Node) -> Result:
    x, indices, updates = n.values()
    axis = axis_of(n, n.int_attr("axis"), x.type.rank)
    count = indices.type.size
    positions = reshape(n, _positions(n, indices, axis, x.type.dims), (count,))
    y = n.emit("scatter", reshape(n, x, (x.type.size,)), positions, reshape(n, updates, (count,)), axis=0, add=_adds(n))
    return reshape(n, y, x.type.dims)


def _scatter_nd(n: Node) -> Result:
    x, indices, updates = n.values()
    entries, flat = _entries(n, x, indices)
    return reshape(n, n.emit("scatter", entries, flat, updates, axis=0, add=_adds(n)), x.type.dims)


def _one_hot(n: Node) -> Result:
    depth = n.ints(1, "the depth")[0]
    off, on = n.constant(2, "the pair of values").tolist()
    indices, dtype = n.value(0), n.type(2).dtype
    rank = indices.type.rank
    axis = axis_of(n, n.int_attr("axis", -1), rank + 1)
    wide = indices if indices.type.dtype == "i64" else n.emit("cast", indices, dtype="i64")
    column = reshape(n, _from_the_front(n, wide, depth), (*indices.type.dims[:axis], 1, *indices.type.dims[axis:]))
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
