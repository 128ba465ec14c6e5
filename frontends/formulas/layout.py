"""Elements moved, repeated and cut: what rules of every frontend need. All shapes are numbers."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.frontends.writer import Writer
from penstock.ir.graph import Value


def axis_of(w: Writer, axis: int, rank: int) -> int:
    w.require(-rank <= axis < rank or rank == 0, f"axis {axis} is outside a tensor of rank {rank}")
    return axis % rank if rank else 0


def reshape(w: Writer, x: Value, shape: Sequence[int]) -> Value:
    """x in another shape; x itself when it has that shape already."""
    return x if x.type.shape == tuple(shape) else w.emit("reshape", x, shape=tuple(shape))


def transpose(w: Writer, x: Value, perm: Sequence[int]) -> Value:
    return x if list(perm) == list(range(x.type.rank)) else w.emit("transpose", x, perm=tuple(perm))


def cut(w: Writer, x: Value, axis: int, start: int, stop: int) -> Value:
    """x[..., start:stop, ...] along one axis."""
    dims = x.type.dims
    if (start, stop) == (0, dims[axis]):
        return x
    starts = tuple(start if i == axis else 0 for i in range(len(dims)))
    stops = tuple(stop if i == axis else size for i, size in enumerate(dims))
    return w.emit("slice", x, start=starts, stop=stops, step=(1,) * len(dims))


def expand(w: Writer, x: Value, shape: Sequence[int]) -> Value:
    return x if x.type.shape == tuple(shape) else w.emit("broadcast", x, shape=tuple(shape))


def tile(w: Writer, x: Value, repeats: Sequence[int]) -> Value:
    """x that many times after itself in each dimension."""
    dims = x.type.dims
    w.require(len(repeats) == len(dims), f"{len(repeats)} repeats do not fit {x.type}")
    if all(r == 1 for r in repeats):
        return x
    spread = reshape(w, x, [part for size in dims for part in (1, size)])
    tiled = expand(w, spread, [part for r, size in zip(repeats, dims, strict=True) for part in (r, size)])
    return reshape(w, tiled, [r * size for r, size in zip(repeats, dims, strict=True)])


def triangle(w: Writer, rows: int, columns: int, diagonal: Value | int = 0) -> Value:
    """bool[rows,columns], true where column <= row + diagonal."""
    dtype = diagonal.type.dtype if isinstance(diagonal, Value) else "i32"
    row = w.emit("iota", dtype=dtype, shape=(rows, 1), axis=0)
    column = w.emit("iota", dtype=dtype, shape=(1, columns), axis=1)
    return w.emit("less_equal", column, row if diagonal == 0 else w.emit("add", row, diagonal))
