"""Reshards as collectives: how a tensor comes from one layout over a mesh into another.

In: a local value and its whole type in both layouts. Out: local operations, one for each move of the cheapest way
(`ir/sharding/paths.py`). Axes of one device move nothing.
"""

from __future__ import annotations

from penstock.ir.graph import Value
from penstock.ir.sharding.paths import Move, moves
from penstock.ir.types import TensorType, part_size

from .building import LocalWriter


def resharded(b: LocalWriter, x: Value, before: TensorType, after: TensorType, name: str) -> Value:
    """Write what brings a local value from one layout to another; the result gets the name."""
    at, value = before, x
    for move in moves(before, after, b.sizes):
        value, at = _moved(b, value, at, move), move.after
    return _named(b, value, name)


def _named(b: LocalWriter, value: Value, name: str) -> Value:
    """Return the value under a name: its operation was just written, or it gets a view of its own."""
    if b.ops and b.ops[-1].outs == (value,):
        last = b.ops.pop()
        named = Value(name, value.type)
        b.put(last.renamed({value: named}))
        return named
    return b.emit("reshape", value, name=name, shape=value.type.dims)


def _moved(b: LocalWriter, x: Value, at: TensorType, move: Move) -> Value:
    """Write one move of a tensor that lies as the type says."""
    over = b.present(move.over)
    if not over:
        return x
    dim, parts = move.dim, b.parts(over)
    match move.kind:
        case "all_reduce":
            return b.emit("all_reduce", x, over=_over(over))
        case "reduce_scatter":
            blocks = move.after.blocks_of(dim)
            return b.emit("reduce_scatter", x, axis=dim, over=_over(over), parts=parts, blocks=blocks)
        case "all_to_all":
            size = part_size(at.dims[move.join], b.parts(move.after.axes_of(move.join)))
            return b.emit("all_to_all", x, split=dim, join=move.join, over=_over(over), parts=parts, size=size)
        case "all_gather":
            blocks = at.blocks_of(dim)
            size = part_size(at.dims[dim], b.parts(move.after.axes_of(dim)), blocks)
            return b.emit("all_gather", x, axis=dim, over=_over(over), size=size, blocks=blocks)
        case _:
            return own_part(b, x, dim, over, move.after.blocks_of(dim))


def own_part(b: LocalWriter, x: Value, dim: int, axes: tuple[str, ...], blocks: int = 1) -> Value:
    """Write what takes this rank's part of a tensor along a dimension, of each block: zero where there is nothing."""
    shape, parts = x.type.dims, b.parts(axes)
    each = shape[dim] // blocks
    size = part_size(each, parts)
    if blocks > 1:
        x = b.emit("reshape", x, shape=(*shape[:dim], blocks, each, *shape[dim + 1 :]))
        dim += 1
    lead, behind = x.type.dims[:dim], x.type.dims[dim + 1 :]
    if size * parts != each:
        high = tuple(size * parts - each if i == dim else 0 for i in range(x.type.rank))
        x = b.emit("pad", x, low=(0,) * x.type.rank, high=high)
    apart = b.emit("reshape", x, shape=(*lead, parts, size, *behind))
    mine = b.emit("gather", apart, b.index(axes), axis=dim)
    if blocks > 1:
        mine = b.emit("reshape", mine, shape=(*lead[:-1], blocks * size, *behind))
    return mine


def _over(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes
