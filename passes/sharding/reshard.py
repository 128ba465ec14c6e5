"""Reshards as collectives: how a tensor comes from one layout over a mesh into another.

In: a local value and its whole type in both layouts. Out: local operations, one for each move of the cheapest way
(`ir/sharding/paths.py`). Axes of one device move nothing. Collectives know blocks in order: those of folded order are
turned before or behind them.
"""

from __future__ import annotations

from penstock.ir.graph import Value
from penstock.ir.sharding.paths import Move, moves
from penstock.ir.types import TensorType, part_size, place_in_block

from .building import LocalWriter, typed


def resharded(
    b: LocalWriter, x: Value, before: TensorType, after: TensorType, name: str, *, alone: bool = True
) -> Value:
    """Write what brings a local value from one layout to another; the result gets the name. `alone`: nothing else reads
    the value, so that it may get the name itself where nothing moves."""
    at, value = before, x
    parts = tuple(axis for axis in after.partial if axis not in before.partial)
    bare = after.laid(after.axes, tuple(axis for axis in after.partial if axis not in parts), after.blocks)
    for move in moves(before, bare, b.sizes):
        value, at = _moved(b, value, at, move), move.after
    if b.present(parts):
        value = _as_sum(b, value, b.present(parts))
    return _named(b, value, name, mine=alone or value != x)


def _named(b: LocalWriter, value: Value, name: str, *, mine: bool) -> Value:
    """Return the value under a name: its operation was just written and is `mine`, or it gets a view of its own."""
    if mine and b.ops and b.ops[-1].outs == (value,):
        last = b.ops.pop()
        named = Value(name, value.type)
        b.put(last.renamed({value: named}))
        return named
    return b.emit("reshape", value, name=name, shape=value.type.dims)


def _as_sum(b: LocalWriter, x: Value, axes: tuple[str, ...]) -> Value:
    """Write a value as a sum over ranks: the first of them has it, the others have zero."""
    first = b.emit("less", b.index(axes), b.number(1, "i64"))
    return b.emit("where", first, x, b.number(typed(0.0, x.type.dtype), x.type.dtype))


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
            x = turned(b, x, dim, parts, blocks)
            return b.emit("reduce_scatter", x, axis=dim, over=_over(over), parts=parts, blocks=abs(blocks))
        case "all_to_all":
            size = part_size(at.dims[move.join], b.parts(move.after.axes_of(move.join)))
            return b.emit("all_to_all", x, split=dim, join=move.join, over=_over(over), parts=parts, size=size)
        case "all_gather":
            blocks = at.blocks_of(dim)
            size = part_size(at.dims[dim], b.parts(move.after.axes_of(dim)), blocks)
            gathered = b.emit("all_gather", x, axis=dim, over=_over(over), size=size, blocks=abs(blocks))
            return turned(b, gathered, dim, parts, blocks)
        case _:
            return own_part(b, x, dim, over, move.after.blocks_of(dim))


def own_part(
    b: LocalWriter, x: Value, dim: int, axes: tuple[str, ...], blocks: int = 1, at: Value | None = None
) -> Value:
    """Write what takes this rank's part of a tensor along a dimension, of each block: zero where there is nothing. With
    `at` it is the part of the rank with that number among those along the axes."""
    shape, parts = x.type.dims, b.parts(axes)
    each = shape[dim] // abs(blocks)
    size = part_size(each, parts)
    if blocks < 0:
        apart = b.emit("reshape", x, shape=(*shape[:dim], -blocks * parts, size, *shape[dim + 1 :]))
        mine = b.emit("gather", apart, part_numbers(b, axes, blocks, at), axis=dim)
        return b.emit("reshape", mine, shape=(*shape[:dim], -blocks * size, *shape[dim + 1 :]))
    if blocks > 1:
        x = b.emit("reshape", x, shape=(*shape[:dim], blocks, each, *shape[dim + 1 :]))
        dim += 1
    lead, behind = x.type.dims[:dim], x.type.dims[dim + 1 :]
    if size * parts != each:
        high = tuple(size * parts - each if i == dim else 0 for i in range(x.type.rank))
        x = b.emit("pad", x, low=(0,) * x.type.rank, high=high)
    apart = b.emit("reshape", x, shape=(*lead, parts, size, *behind))
    mine = b.emit("gather", apart, b.index(axes) if at is None else at, axis=dim)
    if blocks > 1:
        mine = b.emit("reshape", mine, shape=(*lead[:-1], blocks * size, *behind))
    return mine


def part_numbers(b: LocalWriter, axes: tuple[str, ...], blocks: int, at: Value | None = None) -> Value:
    """Return which parts a rank has of a dimension in folded order, one of each block, counted over all blocks. The
    rank is this one, or the one with a number."""
    parts = b.parts(axes)
    numbers = [
        block * parts + place_in_block(block, index, parts, blocks)
        for index in range(parts)
        for block in range(-blocks)
    ]

    def write() -> Value:
        table = b.emit(
            "const", name=b.namer.fresh("local.parts"), dtype="i64", value=tuple(numbers), shape=(parts, -blocks)
        )
        return b.emit("gather", table, b.index(axes) if at is None else at, axis=0)

    return b.once(("parts", b.present(axes), blocks, at), write)


def turned(b: LocalWriter, x: Value, dim: int, parts: int, blocks: int) -> Value:
    """Return a tensor in folded order as one in order, or the other way round: in every second block, the parts stand
    the other way round. Others stay as they are."""
    if blocks > 0:
        return x
    shape = x.type.dims
    numbers = [
        block * parts + place_in_block(block, i, parts, blocks) for block in range(-blocks) for i in range(parts)
    ]
    order = b.emit("const", name=b.namer.fresh("local.order"), dtype="i64", value=tuple(numbers), shape=(len(numbers),))
    size = shape[dim] // len(numbers)
    apart = b.emit("reshape", x, shape=(*shape[:dim], len(numbers), size, *shape[dim + 1 :]))
    return b.emit("reshape", b.emit("gather", apart, order, axis=dim), shape=shape)


def _over(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes
