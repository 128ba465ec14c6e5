"""The meaning of collectives in NumPy: what the ranks of one group have together becomes the result of each.

In: the operands of all members, in the order of the group. Out: their results in the same order. Sums are added in
that order, in the element type of the operands (half precision in float32), so that a run on real ranks can be equal
bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from penstock.ir.attrs import Attrs
from penstock.ir.ops import integer
from penstock.ir.types import part_size

from .ops import Array

Combine = Callable[[Sequence[Array], Attrs], list[Array]]


def _reduced(xs: Sequence[Array], by: object) -> Array:
    add = np.add if by == "sum" else np.maximum
    wide = [x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x for x in xs]
    total: Array = reduce(add, wide)
    return total.astype(xs[0].dtype, copy=False)


def cut(x: Array, axis: int, parts: int, index: int, blocks: int = 1) -> Array:
    """Return one of `parts` of a tensor along an axis, of each block; zeros beyond the tensor."""
    each = x.shape[axis] // blocks
    size = part_size(each, parts)
    pieces = []
    for block in range(blocks):
        first, last = (min(index * size + end, each) for end in (0, size))
        piece = np.take(x, range(block * each + first, block * each + last), axis)
        padding = [(0, size - (last - first)) if i == axis else (0, 0) for i in range(x.ndim)]
        pieces.append(np.pad(piece, padding))
    return np.concatenate(pieces, axis)


def joined(xs: Sequence[Array], axis: int, size: int, blocks: int = 1) -> Array:
    """Return the tensor whose parts along an axis, of each block, these are. It has `size` elements there."""
    each, local = size // blocks, xs[0].shape[axis] // blocks
    pieces = []
    for block in range(blocks):
        whole = np.concatenate([np.take(x, range(block * local, (block + 1) * local), axis) for x in xs], axis)
        pieces.append(np.take(whole, range(each), axis))
    return np.concatenate(pieces, axis)


def _all_reduce(xs: Sequence[Array], a: Attrs) -> list[Array]:
    total = _reduced(xs, a["by"])
    return [total] * len(xs)


def _all_gather(xs: Sequence[Array], a: Attrs) -> list[Array]:
    whole = joined(xs, integer(a["axis"]) % xs[0].ndim, integer(a["size"]), integer(a["blocks"]))
    return [whole] * len(xs)


def _reduce_scatter(xs: Sequence[Array], a: Attrs) -> list[Array]:
    total, axis = _reduced(xs, "sum"), integer(a["axis"]) % xs[0].ndim
    return [cut(total, axis, len(xs), i, integer(a["blocks"])) for i in range(len(xs))]


def _all_to_all(xs: Sequence[Array], a: Attrs) -> list[Array]:
    split, join = integer(a["split"]) % xs[0].ndim, integer(a["join"]) % xs[0].ndim
    size = integer(a["size"])
    return [joined([cut(x, split, len(xs), i) for x in xs], join, size) for i in range(len(xs))]


def _shift(xs: Sequence[Array], a: Attrs) -> list[Array]:
    return [xs[(i - integer(a["by"])) % len(xs)] for i in range(len(xs))]


COLLECTIVES: dict[str, Combine] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "shift": _shift,
}
