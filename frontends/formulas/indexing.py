"""Elements looked up and replaced by the values of an index tensor.

The IR looks up and replaces whole entries along one axis. Lookups of single elements, and over several dimensions at
once, become lookups in a flat tensor: the indices become row-major positions for `gather` and `scatter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value

from .elementwise import limits_of
from .layout import cut, reshape, transpose
from .scans import flipped


def from_the_front(w: Writer, indices: Value, size: int) -> Value:
    """Add the size to negative indices, which count from the end."""
    return w.emit("where", w.emit("less", indices, 0), w.emit("add", indices, size), indices)


def positions(w: Writer, indices: Value, axis: int, dims: Sequence[int]) -> Value:
    """Compute row-major positions of elements in a tensor of `dims`.

    `indices` are the coordinates along `axis`. The other coordinates are those of each index in its tensor.
    """
    w.require(indices.type.rank == len(dims), f"indices {indices.type} must have {len(dims)} dimensions")
    sizes = indices.type.dims
    w.require(
        all(size <= limit for i, (size, limit) in enumerate(zip(sizes, dims, strict=True)) if i != axis),
        f"indices {indices.type} are larger than {list(dims)}",
    )
    w.require_inside(indices, dims[axis])
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    wide = w.cast(indices, "i64")
    total = from_the_front(w, wide, dims[axis])
    total = w.emit("mul", total, strides[axis]) if strides[axis] != 1 else total
    for i, size in enumerate(sizes):
        if i != axis and size > 1:
            line = w.emit("iota", dtype="i64", shape=(size, *(1,) * (len(sizes) - 1 - i)), axis=0)
            total = w.emit("add", total, w.emit("mul", line, strides[i]) if strides[i] != 1 else line)
    return total


def entries(w: Writer, x: Value, indices: Value) -> tuple[Value, Value]:
    """Merge the dimensions of x that the index vectors cover. Return the result and the vectors as positions in it."""
    dims, depth = x.type.dims, indices.type.dims[-1]
    w.require(1 <= depth <= len(dims), f"indices {indices.type} are too deep for {x.type}")
    flat: Value | None = None
    last = indices.type.rank - 1
    for i in range(depth):
        part = reshape(w, cut(w, indices, last, i, i + 1), indices.type.dims[:-1])
        if depth > 1:  # negative entries count from the end of their own dimension
            w.require_inside(part, dims[i])
            part = from_the_front(w, part, dims[i])
        flat = part if flat is None else w.emit("add", w.emit("mul", flat, dims[i]), part)
    assert flat is not None
    return reshape(w, x, (prod(dims[:depth]), *dims[depth:])), flat


def scatter_extreme(
    w: Writer, x: Value, axis: int, indices: Value, src: Value, *, largest: bool, include_self: bool
) -> Value:
    """Replace entries of x along one axis by the largest (or smallest) of those put there.

    With `include_self` the entry itself is among them. Every index is compared with every place: the cost is the
    product of both counts.
    """
    rank, size, count = x.type.rank, x.type.dims[axis], indices.type.dims[axis]
    dims = x.type.dims
    if not largest:
        return flipped(
            w,
            scatter_extreme(w, flipped(w, x), axis, indices, flipped(w, src), largest=True, include_self=include_self),
        )
    others = [size for i, size in enumerate(indices.type.dims) if i != axis]
    w.require(
        others == [size for i, size in enumerate(dims) if i != axis],
        f"indices {indices.type} must cover {x.type} but for axis {axis}",
    )
    w.require(count > 0, "there is nothing to put")
    w.require_inside(indices, size)
    perm = [*(i for i in range(rank) if i != axis), axis]
    wide = w.cast(indices, "i64")
    at, what = (reshape(w, transpose(w, v, perm), (*others, 1, count)) for v in (from_the_front(w, wide, size), src))
    here = w.emit("equal", at, w.emit("iota", dtype="i64", shape=(size, 1), axis=0))
    lowest = w.literal(limits_of(x.type.dtype)[0], x.type.dtype)
    offered, mine = w.emit("where", here, what, lowest), transpose(w, x, perm)
    if include_self:  # one more candidate, so that all equal ones have the same share of the gradient
        joined = w.emit(
            "max",
            w.emit("concat", offered, reshape(w, mine, (*mine.type.dims, 1)), axis=rank),
            axes=(rank,),
            keep=False,
        )
    else:
        any_here = w.emit("less", 0, w.emit("sum", w.emit("cast", here, dtype="i32"), axes=(rank,), keep=False))
        joined = w.emit("where", any_here, w.emit("max", offered, axes=(rank,), keep=False), mine)
    return transpose(w, joined, [perm.index(i) for i in range(rank)])
