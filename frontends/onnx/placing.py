"""ONNX operators that put entries where an index tensor says, in every way of combining them, and orders of entries that depend on lengths."""

from __future__ import annotations

import math
from math import prod

import numpy as np

from penstock.ir.graph import Value
from penstock.ir.types import FLOATS

from ..formulas.indexing import entries, lowest_of, positions
from ..formulas.layout import axis_of, cut, reshape, transpose
from ..formulas.scans import cumulative_product, flipped, product_over
from .node import Node, Result, Rule

# Comparisons of every place with every index.
MOST_COMPARED = 1 << 26


def _combined(n: Node, x: Value, at: Value, updates: Value, reduction: str) -> Value:
    """x [places, ...] with the entries at `at` [count] replaced by the updates [count, ...], or combined with all that are put there."""
    if reduction in ("none", "add"):
        return n.emit("scatter", x, at, updates, axis=0, add=reduction == "add")
    n.require(reduction in ("mul", "max", "min"), f"reduction={reduction} is not known")
    if reduction == "min":
        return flipped(n, _combined(n, flipped(n, x), at, flipped(n, updates), "max"))
    size, count, inner = x.type.dims[0], at.type.dims[0], prod(x.type.dims[1:])
    n.require(size * count * inner <= MOST_COMPARED, f"reduction={reduction} with {count} updates of {x.type} is too large")
    if not count:
        return x
    n.require_inside(at, size)
    wide = at if at.type.dtype == "i64" else n.emit("cast", at, dtype="i64")
    wide = n.emit("where", n.emit("less", wide, 0), n.emit("add", wide, size), wide)
    here = n.emit("equal", n.emit("iota", dtype="i64", shape=(size, 1, 1), axis=0), reshape(n, wide, (1, count, 1)))
    what = reshape(n, updates, (1, count, inner))
    mine = reshape(n, x, (size, inner))
    dtype = x.type.dtype
    neutral = n.literal(1 if reduction == "mul" else lowest_of(dtype), dtype)
    seen = n.emit("where", here, what, neutral)
    if reduction == "mul":
        y = n.emit("mul", mine, reshape(n, product_over(n, seen, 1), (size, inner)))
    else:
        y = n.emit("maximum", mine, n.emit("max", seen, axes=(1,)))
    return reshape(n, y, x.type.dims)


def _scatter_elements(n: Node) -> Result:
    x, indices, updates = n.values()
    axis = axis_of(n, n.int_attr("axis"), x.type.rank)
    count = indices.type.size
    places = reshape(n, positions(n, indices, axis, x.type.dims), (count,))
    flat = reshape(n, x, (x.type.size,))
    return reshape(n, _combined(n, flat, places, reshape(n, updates, (count,)), n.text_attr("reduction", "none")), x.type.dims)


def _scatter_nd(n: Node) -> Result:
    x, indices, updates = n.values()
    whole, flat = entries(n, x, indices)
    count = flat.type.size
    rows = reshape(n, updates, (count, *whole.type.dims[1:]))
    return reshape(n, _combined(n, whole, reshape(n, flat, (count,)), rows, n.text_attr("reduction", "none")), x.type.dims)


def _tensor_scatter(n: Node) -> Result:
    """Each batch entry's updates stand in a row from its own index on, round the end with mode=circular."""
    cache, updates, mode = n.value(0), n.value(1), n.text_attr("mode", "linear")
    n.require(mode in ("linear", "circular"), f"mode={mode} is not known")
    rank = cache.type.rank
    axis = axis_of(n, n.int_attr("axis", -2), rank)
    n.require(axis > 0, "axis 0 is that of the batch")
    perm = [0, axis, *(i for i in range(1, rank) if i != axis)]
    dims = [cache.type.dims[i] for i in perm]
    batch, size, count = dims[0], dims[1], updates.type.dims[axis]
    rows = reshape(n, transpose(n, cache, perm), (batch * size, *dims[2:]))
    line = n.emit("iota", dtype="i64", shape=(1, count), axis=1)
    at = n.emit("add", line, reshape(n, n.value(2), (batch, 1))) if n.has(2) else line
    if mode == "linear" and n.has(2):
        n.require_inside(n.value(2), size - count + 1)
    if mode == "circular":
        at = n.emit("sub", at, n.emit("mul", n.emit("div", at, size), size))
    at = n.emit("add", at, n.emit("mul", n.emit("iota", dtype="i64", shape=(batch, 1), axis=0), size))
    new = reshape(n, transpose(n, updates, perm), (batch * count, *dims[2:]))
    y = reshape(n, n.emit("scatter", rows, reshape(n, at, (batch * count,)), new, axis=0), dims)
    return transpose(n, y, [perm.index(i) for i in range(rank)])


def _gather_nd(n: Node) -> Result:
    x, indices, shared = n.value(0), n.value(1), n.int_attr("batch_dims")
    n.require(0 <= shared < min(x.type.rank, indices.type.rank), f"batch_dims={shared} does not fit {x.type} and {indices.type}")
    if not shared:
        return n.emit("gather", *entries(n, x, indices), axis=0)
    n.require(x.type.dims[:shared] == indices.type.dims[:shared], f"{x.type} and {indices.type} differ in the first {shared} dimensions")
    lead = x.type.dims[:shared]
    batch, places, depth = prod(lead), indices.type.dims[shared:-1], indices.type.dims[-1]
    wide = indices if indices.type.dtype == "i64" else n.emit("cast", indices, dtype="i64")
    flat = reshape(n, wide, (batch, prod(places), depth))
    n.require(1 <= depth <= x.type.rank - shared, f"indices {indices.type} are too deep for {x.type}")
    for i in range(depth):
        n.require_inside(cut(n, flat, 2, i, i + 1), x.type.dims[shared + i])
    own = n.emit("broadcast", n.emit("iota", dtype="i64", shape=(batch, 1, 1), axis=0), shape=(batch, prod(places), 1))
    table = reshape(n, x, (batch, *x.type.dims[shared:]))
    y = n.emit("gather", *entries(n, table, n.emit("concat", own, flat, axis=2)), axis=0)
    return reshape(n, y, (*lead, *places, *x.type.dims[shared + depth :]))


def _reverse_sequence(n: Node) -> Result:
    """The first entries of each sequence, as many as its length, in the other order."""
    x, batch, time = n.value(), n.int_attr("batch_axis", 1), n.int_attr("time_axis")
    n.require({batch, time} == {0, 1}, f"batch_axis={batch} and time_axis={time} must be 0 and 1")
    sizes = x.type.dims[:2]
    lengths = n.value(1) if n.type(1).dtype == "i64" else n.emit("cast", n.value(1), dtype="i64")
    lengths = reshape(n, lengths, (1, sizes[1]) if time == 0 else (sizes[0], 1))
    line = n.emit("iota", dtype="i64", shape=(sizes[0], 1) if time == 0 else (1, sizes[1]), axis=time)
    turned = n.emit("where", n.emit("less", line, lengths), n.emit("sub", n.emit("sub", lengths, 1), line), line)
    other = n.emit("iota", dtype="i64", shape=(1, sizes[1]) if time == 0 else (sizes[0], 1), axis=batch)
    row, column = (turned, other) if time == 0 else (other, turned)
    at = n.emit("add", n.emit("mul", row, sizes[1]), column)
    return n.emit("gather", reshape(n, x, (prod(sizes), *x.type.dims[2:])), at, axis=0)


def _hardmax(n: Node) -> Result:
    x = n.value()
    dims, axis = x.type.dims, n.int_attr("axis", -1 if n.opset >= 13 else 1)
    axis = axis_of(n, axis, x.type.rank)
    if n.opset < 13:  # all behind the axis is one row
        x, axis = reshape(n, x, (prod(dims[:axis]), prod(dims[axis:]))), 1
    top = n.emit("argmax", x, axis=axis)
    top = reshape(n, top, (*x.type.dims[:axis], 1, *x.type.dims[axis + 1 :]))
    line = n.emit("iota", dtype="i64", shape=(x.type.dims[axis], *(1,) * (x.type.rank - 1 - axis)), axis=0)
    return reshape(n, n.emit("cast", n.emit("equal", top, line), dtype=x.type.dtype), dims)


def _compress(n: Node) -> Result:
    keep = n.constant(1, "the condition").reshape(-1)
    x = n.value()
    if not n.given("axis"):
        x, axis = reshape(n, x, (x.type.size,)), 0
    else:
        axis = axis_of(n, n.int_attr("axis"), x.type.rank)
    n.require(len(keep) <= x.type.dims[axis], f"a condition of {len(keep)} entries is longer than dimension {axis} of {x.type}")
    places = np.flatnonzero(keep)
    if not len(places):
        return cut(n, x, axis, 0, 0)
    return n.emit("gather", x, places.astype(np.int64), axis=axis)


def _cumulative_product(n: Node) -> Result:
    x = n.value()
    axis = axis_of(n, n.ints(1, "the axis")[0], x.type.rank)
    return cumulative_product(n, x, axis, exclusive=bool(n.int_attr("exclusive")), reverse=bool(n.int_attr("reverse")))


def _infinite(n: Node) -> Result:
    x = n.value()
    n.require(x.type.dtype in FLOATS, f"needs a floating-point operand, got {x.type}")
    negative, positive = n.int_attr("detect_negative", 1), n.int_attr("detect_positive", 1)
    if negative and positive:
        return n.emit("equal", n.emit("abs", x), math.inf)
    if not negative and not positive:
        return n.emit("const", value=False, dtype="bool", shape=x.type.dims)
    return n.emit("equal", x, math.inf if positive else -math.inf)


RULES: dict[str, Rule] = {
    "GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
    "ReverseSequence": _reverse_sequence,
    "Hardmax": _hardmax,
    "Compress": _compress,
    "CumProd": _cumulative_product,
    "IsInf": _infinite,
}
