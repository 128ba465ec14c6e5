"""ONNX operators that look up elements by an index tensor or by lengths, sort them, or accumulate along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from penstock.frontends.formulas.indexing import entries, from_the_front, positions
from penstock.frontends.formulas.layout import axis_of, cut, entry, reshape
from penstock.frontends.formulas.scans import cumulative_product
from penstock.frontends.onnx.node import OnnxNode, Result, Rule


def _gather(n: OnnxNode) -> Result:
    axis = axis_of(n, n.int_attr("axis"), n.type().rank)
    x, indices = n.value(), n.known(1)
    if indices is None or indices.ndim:
        return n.emit("gather", x, n.value(1), axis=axis)
    # One known entry is a slice: its gradient is padding, not a scatter.
    return entry(n, x, axis, int(indices))


def _gather_elements(n: OnnxNode) -> Result:
    x, indices = n.value(0), n.value(1)
    axis = axis_of(n, n.int_attr("axis"), x.type.rank)
    return n.emit("gather", reshape(n, x, (x.type.size,)), positions(n, indices, axis, x.type.dims), axis=0)


def _one_hot(n: OnnxNode) -> Result:
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
    wide = n.cast(indices, "i64")
    column = reshape(n, from_the_front(n, wide, depth), (*indices.type.dims[:axis], 1, *indices.type.dims[axis:]))
    line = n.emit("iota", dtype="i64", shape=(depth, *(1,) * (rank - axis)), axis=0)
    return n.emit("where", n.emit("equal", column, line), on, off)


def _topk(n: OnnxNode) -> Sequence[Result]:
    x = n.value()
    n.ignore("sorted")  # if the order does not matter, sorted is as good as any
    axis = axis_of(n, n.int_attr("axis", -1), x.type.rank)
    return n.emit_all("topk", 2, x, k=n.ints(1, "k")[0], axis=axis, largest=bool(n.int_attr("largest", 1)))


def _cumsum(n: OnnxNode) -> Result:
    x = n.value()
    axis = axis_of(n, n.ints(1, "the axis")[0], x.type.rank)
    return n.emit("cumsum", x, axis=axis, exclusive=bool(n.int_attr("exclusive")), reverse=bool(n.int_attr("reverse")))


def _gather_nd(n: OnnxNode) -> Result:
    x, indices, shared = n.value(0), n.value(1), n.int_attr("batch_dims")
    n.require(
        0 <= shared < min(x.type.rank, indices.type.rank),
        f"batch_dims={shared} does not fit {x.type} and {indices.type}",
    )
    if not shared:
        return n.emit("gather", *entries(n, x, indices), axis=0)
    n.require(
        x.type.dims[:shared] == indices.type.dims[:shared],
        f"{x.type} and {indices.type} differ in the first {shared} dimensions",
    )
    lead = x.type.dims[:shared]
    batch, places, depth = prod(lead), indices.type.dims[shared:-1], indices.type.dims[-1]
    wide = n.cast(indices, "i64")
    flat = reshape(n, wide, (batch, prod(places), depth))
    n.require(1 <= depth <= x.type.rank - shared, f"indices {indices.type} are too deep for {x.type}")
    for i in range(depth):
        n.require_inside(cut(n, flat, 2, i, i + 1), x.type.dims[shared + i])
    batches = n.emit(
        "broadcast", n.emit("iota", dtype="i64", shape=(batch, 1, 1), axis=0), shape=(batch, prod(places), 1)
    )
    table = reshape(n, x, (batch, *x.type.dims[shared:]))
    y = n.emit("gather", *entries(n, table, n.emit("concat", batches, flat, axis=2)), axis=0)
    return reshape(n, y, (*lead, *places, *x.type.dims[shared + depth :]))


def _reverse_sequence(n: OnnxNode) -> Result:
    """Reverse the first entries of each sequence, as many as its length."""
    x, batch, time = n.value(), n.int_attr("batch_axis", 1), n.int_attr("time_axis")
    n.require({batch, time} == {0, 1}, f"batch_axis={batch} and time_axis={time} must be 0 and 1")
    sizes = x.type.dims[:2]
    lengths = n.cast(n.value(1), "i64")
    lengths = reshape(n, lengths, (1, sizes[1]) if time == 0 else (sizes[0], 1))
    line = n.emit("iota", dtype="i64", shape=(sizes[0], 1) if time == 0 else (1, sizes[1]), axis=time)
    turned = n.emit("where", n.emit("less", line, lengths), n.emit("sub", n.emit("sub", lengths, 1), line), line)
    other = n.emit("iota", dtype="i64", shape=(1, sizes[1]) if time == 0 else (sizes[0], 1), axis=batch)
    row, column = (turned, other) if time == 0 else (other, turned)
    at = n.emit("add", n.emit("mul", row, sizes[1]), column)
    return n.emit("gather", reshape(n, x, (prod(sizes), *x.type.dims[2:])), at, axis=0)


def _compress(n: OnnxNode) -> Result:
    keep = n.constant(1, "the condition").reshape(-1)
    x = n.value()
    if not n.given("axis"):
        x, axis = reshape(n, x, (x.type.size,)), 0
    else:
        axis = axis_of(n, n.int_attr("axis"), x.type.rank)
    n.require(
        len(keep) <= x.type.dims[axis],
        f"a condition of {len(keep)} entries is longer than dimension {axis} of {x.type}",
    )
    places = np.flatnonzero(keep)
    if not len(places):
        return cut(n, x, axis, 0, 0)
    return n.emit("gather", x, places.astype(np.int64), axis=axis)


def _cumulative_product(n: OnnxNode) -> Result:
    x = n.value()
    axis = axis_of(n, n.ints(1, "the axis")[0], x.type.rank)
    return cumulative_product(n, x, axis, exclusive=bool(n.int_attr("exclusive")), reverse=bool(n.int_attr("reverse")))


RULES: dict[str, Rule] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Compress": _compress,
    "ReverseSequence": _reverse_sequence,
    "OneHot": _one_hot,
    "TopK": _topk,
    "CumSum": _cumsum,
    "CumProd": _cumulative_product,
}
