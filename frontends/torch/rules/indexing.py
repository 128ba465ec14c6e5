"""ATen operations that look up elements by index tensors, put elements there, or sort them.

Several index tensors at once become one: their row-major positions among the indexed dimensions, which are moved to the
front for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from penstock.frontends.formulas.indexing import from_the_front, positions, scatter_extreme
from penstock.frontends.formulas.layout import axis_of, cut, expand, reshape, transpose
from penstock.frontends.torch.node import KnownElements, Result, Rule, TorchNode
from penstock.ir.graph import Value
from penstock.ir.types import FLOATS


def _index_select(n: TorchNode) -> Result:
    x = n.value()
    indices = n.value("index")
    if x.type.rank == 0:
        return x
    axis = axis_of(n, n.arg("dim"), x.type.rank)
    return n.emit("gather", x, reshape(n, indices, (indices.type.size,)), axis=axis)


def _embedding(n: TorchNode) -> Result:
    """Look up rows by index. The row of padding gets no gradient, as in torch."""
    n.require(not n.arg("scale_grad_by_freq"), "scale_grad_by_freq is not supported")
    indices, pad = n.value("indices"), int(n.arg("padding_idx", -1))
    rows = n.emit("gather", n.value("weight"), indices, axis=0)
    if pad < 0 or not n.is_trained("weight"):
        return rows
    is_pad = reshape(n, n.emit("equal", indices, pad), (*indices.type.dims, 1))
    row = n.weight("weight")
    # Nothing trains a row of zeros, nor does weight decay change it: it stays zero.
    instead = 0.0 if row is not None and not bool(row[pad].any()) else n.emit("detach", rows)
    return n.emit("where", is_pad, instead, rows)


# ---------------------------------------------------------------------------------------- several index tensors at once


def _masks_out(n: TorchNode, index_tensors: Sequence[object], dims: Sequence[int]) -> list[object]:
    """Replace known masks among the index tensors by the indices that they stand for."""
    indices: list[object] = []
    for index in index_tensors:
        if isinstance(index, KnownElements) and index.tensor.dtype in (torch.bool, torch.uint8):
            indices += [KnownElements(n.fresh("places"), places) for places in index.tensor.nonzero(as_tuple=True)]
        elif isinstance(index, Value) and index.type.dtype in ("bool", "u8"):
            n.require(False, "a mask that is computed at run time makes a result whose size is not known")
        else:
            indices.append(index)
    return indices + [None] * (len(dims) - len(indices))


def _flat_places(n: TorchNode, indices: Sequence[object], dims: Sequence[int]) -> tuple[list[int], Value]:
    """Return the indexed axes, and the row-major positions among them."""
    axes = [i for i, index in enumerate(indices) if index is not None]
    tensors = [indices[i] for i in axes]
    if all(isinstance(t, KnownElements) for t in tensors):
        total: torch.Tensor | int = 0
        for axis, t in zip(axes, tensors, strict=True):
            assert isinstance(t, KnownElements)
            n.require(
                t.tensor.numel() == 0 or (-dims[axis] <= int(t.tensor.min()) and int(t.tensor.max()) < dims[axis]),
                f"an index is outside dimension {axis} of size {dims[axis]}",
            )
            total = total * dims[axis] + torch.where(t.tensor < 0, t.tensor + dims[axis], t.tensor).long()
        assert isinstance(total, torch.Tensor)
        return axes, n.tensor_value(KnownElements(n.fresh("places"), total))
    flat: Value | None = None
    for axis, t in zip(axes, tensors, strict=True):
        part = n.tensor_value(t)
        n.require_inside(part, dims[axis])
        if len(axes) > 1:  # negative entries count from the end of their own dimension
            part = from_the_front(n, n.cast(part, "i64"), dims[axis])
        flat = part if flat is None else n.emit("add", n.emit("mul", flat, dims[axis]), part)
    assert flat is not None
    return axes, flat


def _in_front(n: TorchNode, x: Value, axes: Sequence[int]) -> tuple[Value, list[int]]:
    """Move these axes to the front and merge them. Return the result and the permutation."""
    perm = [*axes, *(i for i in range(x.type.rank) if i not in axes)]
    turned = transpose(n, x, perm)
    return reshape(n, turned, (prod(x.type.dims[a] for a in axes), *turned.type.dims[len(axes) :])), perm


def _index(n: TorchNode) -> Result:
    x = n.value()
    dims = x.type.dims
    indices = _masks_out(n, n.arg("indices"), dims)
    axes, flat = _flat_places(n, indices, dims)
    if len(axes) == 1:
        return n.emit("gather", x, flat, axis=axes[0])
    whole, _ = _in_front(n, x, axes)
    entries = n.emit("gather", whole, flat, axis=0)
    if axes != list(range(axes[0], axes[0] + len(axes))) or axes[0] == 0:
        return entries  # the dimensions of the indices come first
    r, before = flat.type.rank, axes[0]
    return transpose(n, entries, [*range(r, r + before), *range(r), *range(r + before, entries.type.rank)])


def _index_put(n: TorchNode) -> Result:
    x = n.value()
    dims, dtype = x.type.dims, x.type.dtype
    indices, add = n.arg("indices"), bool(n.arg("accumulate"))
    values = n.value("values", dtype)
    mask = indices[0] if len(indices) == 1 else None
    if isinstance(mask, Value | KnownElements) and n.dtype_of(mask) == "bool" and values.type.size == 1:
        keep = n.tensor_value(mask)
        keep = reshape(n, keep, (*keep.type.dims, *(1,) * (len(dims) - keep.type.rank)))
        scalar = reshape(n, values, ())
        return n.emit("where", keep, n.emit("add", x, scalar) if add else scalar, x)
    axes, flat = _flat_places(n, _masks_out(n, indices, dims), dims)
    whole, perm = _in_front(n, x, axes)
    inner = whole.type.dims[1:]
    r = flat.type.rank
    if (
        axes == list(range(axes[0], axes[0] + len(axes))) and axes[0] > 0
    ):  # the values have the dimensions before the indices first
        before = axes[0]
        values = expand(n, values, (*dims[:before], *flat.type.dims, *inner[before:]))
        values = transpose(
            n, values, [*range(before, before + r), *range(before), *range(before + r, values.type.rank)]
        )
    else:
        values = expand(n, values, (*flat.type.dims, *inner))
    put = n.emit("scatter", whole, flat, values, axis=0, add=add)
    back = [perm.index(i) for i in range(len(dims))]
    return transpose(n, reshape(n, put, [dims[p] for p in perm]), back)


# ---------------------------------------------------------------------------------------- element by element


def _scalar(n: TorchNode, x: Value) -> Value:
    return reshape(n, x, (1,)) if x.type.rank == 0 else x


def _gather(n: TorchNode) -> Result:
    n.ignore("sparse_grad")
    x, indices = n.value(), n.value("index")
    shape = indices.type.dims
    x, indices = _scalar(n, x), _scalar(n, indices)
    axis = axis_of(n, n.arg("dim"), x.type.rank)
    entries = n.emit("gather", reshape(n, x, (x.type.size,)), positions(n, indices, axis, x.type.dims), axis=0)
    return reshape(n, entries, shape)


def _source(n: TorchNode, dtype: str, indices: Value) -> Value:
    """Return the elements to put at the indices, as many along each dimension as there are indices."""
    if not n.has("src"):
        return expand(n, n.literal(n.arg("value"), dtype), indices.type.dims)
    src = _scalar(n, n.value("src", dtype))
    for axis, size in enumerate(indices.type.dims):
        src = cut(n, src, axis, 0, size)
    return src


def _put(n: TorchNode, x: Value, axis: int, indices: Value, src: Value, add: bool) -> Value:
    """Replace elements of x along one axis, or add to them, one by one."""
    places = reshape(n, positions(n, indices, axis, x.type.dims), (indices.type.size,))
    flat = n.emit("scatter", reshape(n, x, (x.type.size,)), places, reshape(n, src, (src.type.size,)), axis=0, add=add)
    return reshape(n, flat, x.type.dims)


def scatter(reduce: str | None = "") -> Rule:
    """Make a rule that puts values at indices. With `reduce` None, the call says how they are combined."""

    def rule(n: TorchNode) -> Result:
        x = n.value()
        dims = x.type.dims
        x, indices = _scalar(n, x), _scalar(n, n.value("index"))
        axis = axis_of(n, n.arg("dim"), x.type.rank)
        src = _source(n, x.type.dtype, indices)
        how = n.arg("reduce") if reduce is None else reduce
        include_self = bool(n.arg("include_self", True))
        return reshape(n, _reduced(n, x, axis, indices, src, how, include_self), dims)

    return rule


def _reduced(n: TorchNode, x: Value, axis: int, indices: Value, src: Value, how: str, include_self: bool) -> Value:
    match how:
        case "":
            return _put(n, x, axis, indices, src, False)
        case "add" | "sum" | "mean":
            start = x if include_self else _put(n, x, axis, indices, n.emit("mul", src, 0), False)
            total = _put(n, start, axis, indices, src, True)
            if how != "mean":
                return total
            n.require(x.type.dtype in FLOATS, "means of integers are not supported")
            ones = n.emit("const", value=1.0, dtype=x.type.dtype, shape=indices.type.dims)
            none = n.emit("const", value=float(include_self), dtype=x.type.dtype, shape=x.type.dims)
            return n.emit("div", total, n.emit("maximum", _put(n, none, axis, indices, ones, True), 1.0))
        case "amax" | "amin":
            return scatter_extreme(n, x, axis, indices, src, largest=how == "amax", include_self=include_self)
    n.require(False, f"reduce={how} is not supported")
    raise AssertionError


# ---------------------------------------------------------------------------------------- order


def _topk(n: TorchNode) -> Result:
    n.ignore("sorted")  # if the order does not matter, sorted is as good as any
    x = n.value()
    if x.type.rank == 0:
        return x, torch.zeros((), dtype=torch.int64)
    axis = axis_of(n, n.arg("dim"), x.type.rank)
    return n.emit_all("topk", 2, x, k=int(n.arg("k")), axis=axis, largest=bool(n.arg("largest")))


def _sort(n: TorchNode) -> Result:
    n.ignore("stable")  # the order here is stable
    x = n.value()
    if x.type.rank == 0:
        return x, torch.zeros((), dtype=torch.int64)
    axis = axis_of(n, n.arg("dim"), x.type.rank)
    return n.emit_all("topk", 2, x, k=x.type.dims[axis], axis=axis, largest=bool(n.arg("descending")))


def found_among(boundaries: str, values: str) -> Rule:
    """Make a rule that counts the sorted boundaries before each value, and with `right` also those equal to it.

    A nan is behind all boundaries.
    """

    def rule(n: TorchNode) -> Result:
        n.ignore("out_int32")
        side, dtype = n.arg("side"), n.common(boundaries, values)
        n.require(side in (None, "left", "right") and not n.has("sorter"), "a sorter is not supported")
        right = bool(n.arg("right")) or side == "right"
        limits, x = n.value(boundaries, dtype), n.value(values, dtype)
        lead = limits.type.dims[:-1]
        edges = reshape(n, limits, (*lead, *(1,) * (x.type.rank - len(lead)), limits.type.dims[-1]))
        x = reshape(n, x, (*x.type.dims, 1))
        behind = n.emit("less", x, edges) if right else n.emit("less_equal", x, edges)
        return n.emit("sum", n.emit("cast", n.emit("not", behind), dtype=n.dtype), axes=(x.type.rank - 1,))

    return rule


RULES: dict[str, Rule] = {
    "embedding": _embedding,
    "index_select": _index_select,
    "index.Tensor": _index,
    "index_put": _index_put,
    "gather": _gather,
    "scatter.src": scatter(),
    "scatter.value": scatter(),
    "scatter_add": scatter("add"),
    "scatter.reduce": scatter(None),
    "scatter_reduce.two": scatter(None),
    "topk": _topk,
    "sort": _sort,
    "sort.stable": _sort,
    "bucketize.Tensor": found_among("boundaries", "self"),
    "searchsorted.Tensor": found_among("sorted_sequence", "self"),
}
