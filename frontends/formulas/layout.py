"""Moving, repeating and cutting of elements for the rules of every frontend. All shapes are numbers."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value


def axis_of(w: Writer, axis: int, rank: int) -> int:
    w.require(-rank <= axis < rank or rank == 0, f"axis {axis} is outside a tensor of rank {rank}")
    return axis % rank if rank else 0


def reshape(w: Writer, x: Value, shape: Sequence[int]) -> Value:
    """Reshape x. Return x itself if it has that shape."""
    return x if x.type.shape == tuple(shape) else w.emit("reshape", x, shape=tuple(shape))


def transpose(w: Writer, x: Value, perm: Sequence[int]) -> Value:
    return x if list(perm) == list(range(x.type.rank)) else w.emit("transpose", x, perm=tuple(perm))


def cut(w: Writer, x: Value, axis: int, start: int, stop: int) -> Value:
    """Return x[..., start:stop, ...] along one axis."""
    dims = x.type.dims
    if (start, stop) == (0, dims[axis]):
        return x
    starts = tuple(start if i == axis else 0 for i in range(len(dims)))
    stops = tuple(stop if i == axis else size for i, size in enumerate(dims))
    return w.emit("slice", x, start=starts, stop=stops, step=(1,) * len(dims))


def entry(w: Writer, x: Value, axis: int, at: int) -> Value:
    """Return x[..., at, ...] along one axis, without that dimension. A negative `at` counts from the end."""
    dims = x.type.dims
    w.require(-dims[axis] <= at < dims[axis], f"index {at} is outside dimension {axis} of {x.type}")
    at %= dims[axis]
    return reshape(w, cut(w, x, axis, at, at + 1), dims[:axis] + dims[axis + 1 :])


def cut_negative(w: Writer, x: Value, low: Sequence[int], high: Sequence[int]) -> tuple[Value, list[int], list[int]]:
    """Cut x where the padding before (`low`) or after (`high`) a dimension is negative. Return the rest, too."""
    for axis, size in enumerate(x.type.dims):
        x = cut(w, x, axis, max(0, -low[axis]), size - max(0, -high[axis]))
    return x, [max(0, p) for p in low], [max(0, p) for p in high]


def concat(w: Writer, parts: Sequence[Value], axis: int) -> Value:
    """Join one or more tensors along one axis."""
    return parts[0] if len(parts) == 1 else w.emit("concat", *parts, axis=axis)


def stack(w: Writer, parts: Sequence[Value], axis: int) -> Value:
    """Join tensors of one type along a new axis."""
    dims = parts[0].type.dims
    return concat(w, [reshape(w, x, (*dims[:axis], 1, *dims[axis:])) for x in parts], axis)


def expand(w: Writer, x: Value, shape: Sequence[int]) -> Value:
    return x if x.type.shape == tuple(shape) else w.emit("broadcast", x, shape=tuple(shape))


def tile(w: Writer, x: Value, repeats: Sequence[int]) -> Value:
    """Repeat x that many times in each dimension."""
    dims = x.type.dims
    w.require(len(repeats) == len(dims), f"{len(repeats)} repeats do not fit {x.type}")
    if all(r == 1 for r in repeats):
        return x
    spread = reshape(w, x, [part for size in dims for part in (1, size)])
    tiled = expand(w, spread, [part for r, size in zip(repeats, dims, strict=True) for part in (r, size)])
    return reshape(w, tiled, [r * size for r, size in zip(repeats, dims, strict=True)])


def triangle(w: Writer, rows: int, columns: int, diagonal: Value | int = 0) -> Value:
    """Make bool[rows,columns] that is true where column <= row + diagonal."""
    dtype = diagonal.type.dtype if isinstance(diagonal, Value) else "i32"
    row = w.emit("iota", dtype=dtype, shape=(rows, 1), axis=0)
    column = w.emit("iota", dtype=dtype, shape=(1, columns), axis=1)
    return w.emit("less_equal", column, row if diagonal == 0 else w.emit("add", row, diagonal))
