"""ONNX operators that put entries at the places in an index tensor, and combine them with the entries there."""

from __future__ import annotations

from math import prod

from penstock.frontends.formulas.elementwise import limits_of
from penstock.frontends.formulas.indexing import entries, from_the_front, positions
from penstock.frontends.formulas.layout import axis_of, reshape, transpose
from penstock.frontends.formulas.scans import flipped, product_over
from penstock.frontends.onnx.node import OnnxNode, Result, Rule
from penstock.ir.graph import Value

# The most comparisons of every place with every index.
MOST_COMPARED = 1 << 26


def _combined(n: OnnxNode, x: Value, at: Value, updates: Value, reduction: str) -> Value:
    """Replace the entries of x [places, ...] at `at` [count] by the updates [count, ...], or combine all of them."""
    if reduction in ("none", "add"):
        return n.emit("scatter", x, at, updates, axis=0, add=reduction == "add")
    n.require(reduction in ("mul", "max", "min"), f"reduction={reduction} is not known")
    if reduction == "min":
        return flipped(n, _combined(n, flipped(n, x), at, flipped(n, updates), "max"))
    size, count, inner = x.type.dims[0], at.type.dims[0], prod(x.type.dims[1:])
    n.require(
        size * count * inner <= MOST_COMPARED, f"reduction={reduction} with {count} updates of {x.type} is too large"
    )
    if not count:
        return x
    n.require_inside(at, size)
    wide = from_the_front(n, n.cast(at, "i64"), size)
    here = n.emit("equal", n.emit("iota", dtype="i64", shape=(size, 1, 1), axis=0), reshape(n, wide, (1, count, 1)))
    what = reshape(n, updates, (1, count, inner))
    mine = reshape(n, x, (size, inner))
    dtype = x.type.dtype
    neutral = n.literal(1 if reduction == "mul" else limits_of(dtype)[0], dtype)
    seen = n.emit("where", here, what, neutral)
    if reduction == "mul":
        y = n.emit("mul", mine, reshape(n, product_over(n, seen, 1), (size, inner)))
    else:
        y = n.emit("maximum", mine, n.emit("max", seen, axes=(1,)))
    return reshape(n, y, x.type.dims)


def _scatter_elements(n: OnnxNode) -> Result:
    x, indices, updates = n.values()
    axis = axis_of(n, n.int_attr("axis"), x.type.rank)
    count = indices.type.size
    places = reshape(n, positions(n, indices, axis, x.type.dims), (count,))
    flat = reshape(n, x, (x.type.size,))
    return reshape(
        n, _combined(n, flat, places, reshape(n, updates, (count,)), n.text_attr("reduction", "none")), x.type.dims
    )


def _scatter_nd(n: OnnxNode) -> Result:
    x, indices, updates = n.values()
    whole, flat = entries(n, x, indices)
    count = flat.type.size
    rows = reshape(n, updates, (count, *whole.type.dims[1:]))
    return reshape(
        n, _combined(n, whole, reshape(n, flat, (count,)), rows, n.text_attr("reduction", "none")), x.type.dims
    )


def _tensor_scatter(n: OnnxNode) -> Result:
    """Write each batch entry's updates in a row from its own index on, with mode=circular past the end to the start."""
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


RULES: dict[str, Rule] = {
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
}
