"""Tiles: the slices of a whole tensor that one place of a mesh holds.

In: a type with axes and blocks, a mesh, a place in it. Out: a TensorTile: for every dimension, the ranges of the
whole tensor with their places in the local array. The local array has the shape of `TensorType.local`; what no range
covers is padding, which is zero.

    f32[10/tp] at the last of 4 places: 9..10 lies at 0, the local array has 3 elements, two of them are padding
    f32[2*4/tp] at the first of 2 places: 0..2 lies at 0, 4..6 at 2
    f32[-2*4/tp] at the first of 2 places: 0..2 lies at 0, 6..8 at 2

A dimension has several ranges where it has blocks. Ranges that follow each other in both arrays are one. So tiles with
the same elements at the same places are equal, and each tile is named by its ranges alone (`ranges`).

Feeds, first weights, checkpoints and exports cut and join tensors by this file. Arrays may be NumPy's, torch's, or
anything that is sliced like them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.graph import Mesh, Module
from penstock.ir.types import TensorType, numpy_dtype, place_in_block

# For every dimension, the ranges of the whole tensor: from the first element to the one after the last.
Ranges = tuple[tuple[tuple[int, int], ...], ...]


class Piece(NamedTuple):
    """A range of one dimension: elements `first` to `end` of the whole tensor lie at `at` in the local array."""

    first: int
    end: int
    at: int


class TensorTile(NamedTuple):
    """The slices of a tensor that one place holds, by dimension, and the shape of the array they lie in."""

    shape: tuple[int, ...]
    dims: tuple[tuple[Piece, ...], ...]

    @property
    def size(self) -> int:
        """The elements of the whole tensor that it holds."""
        return prod(sum(piece.end - piece.first for piece in pieces) for pieces in self.dims)

    @property
    def is_padded(self) -> bool:
        """Return whether elements of the local array are padding."""
        return self.size < prod(self.shape)

    @property
    def ranges(self) -> Ranges:
        """The ranges of the whole tensor, by dimension."""
        return tuple(tuple((piece.first, piece.end) for piece in pieces) for pieces in self.dims)

    @property
    def packed(self) -> TensorTile:
        """The same elements without padding, as files hold them."""
        return packed_tile(self.ranges)


class SharedSlices(NamedTuple):
    """Elements that two tiles share: their slices in the local array of the one and of the other."""

    one: tuple[slice, ...]
    other: tuple[slice, ...]


# ------------------------------------------------------------------------------------------------ which slices


@lru_cache(maxsize=65536)
def tile_of(type: TensorType, mesh: Mesh, place: int) -> TensorTile:
    """Return the tile of a tensor that a place of a mesh holds."""
    sizes, here = mesh.sizes, mesh.coordinates(place)
    dims = []
    for i, n in enumerate(type.dims):
        parts, index = 1, 0
        for axis in type.axes_of(i):
            size = sizes.get(axis, 1)
            parts, index = parts * size, index * size + here.get(axis, 0)
        dims.append(_pieces(n, parts, index, type.blocks_of(i)))
    return TensorTile(type.local(sizes).dims, tuple(dims))


def _pieces(n: int, parts: int, index: int, blocks: int) -> tuple[Piece, ...]:
    each = n // abs(blocks)
    size = -(-each // parts)
    pieces = []
    for block in range(abs(blocks)):
        here = place_in_block(block, index, parts, blocks)
        first, end = min(here * size, each), min((here + 1) * size, each)
        pieces.append(Piece(block * each + first, block * each + end, block * size))
    return _joined(pieces)


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return pieces without empty ones, those in one that follow each other in both arrays."""
    result: list[Piece] = []
    for piece in pieces:
        if result and result[-1].end == piece.first and result[-1].at + piece.first - result[-1].first == piece.at:
            result[-1] = result[-1]._replace(end=piece.end)
        elif piece.end > piece.first:
            result.append(piece)
    return tuple(result)


def whole_tile(type: TensorType) -> TensorTile:
    """Return the tile that is the whole tensor."""
    return packed_tile(tuple(((0, n),) for n in type.dims))


def packed_tile(ranges: Ranges) -> TensorTile:
    """Return the tile of these ranges, one behind the other."""
    dims = []
    for line in ranges:
        starts = accumulate((end - first for first, end in line), initial=0)
        dims.append(_joined(Piece(first, end, at) for (first, end), at in zip(line, starts, strict=False)))
    shape = tuple(sum(end - first for first, end in line) for line in ranges)
    return TensorTile(shape, tuple(dims))


def owners(type: TensorType, mesh: Mesh) -> dict[Ranges, int]:
    """Return the first place of each distinct tile of a tensor, by its ranges. Tiles without elements have none."""
    first: dict[Ranges, int] = {}
    for place in range(len(mesh.devices)):
        tile = tile_of(type, mesh, place)
        if tile.size or not type.size:
            first.setdefault(tile.ranges, place)
    return first


def owns(type: TensorType, mesh: Mesh, place: int) -> bool:
    """Return whether a place is the first one that holds its tile of a tensor."""
    return owners(type, mesh).get(tile_of(type, mesh, place).ranges) == place


def overlaps(one: TensorTile, other: TensorTile) -> list[SharedSlices]:
    """Return the elements that two tiles of a tensor share, as pairs of slices of their local arrays."""
    shared = [
        [
            (
                slice(a.at + first - a.first, a.at + end - a.first),
                slice(b.at + first - b.first, b.at + end - b.first),
            )
            for a in pieces
            for b in others
            if (first := max(a.first, b.first)) < (end := min(a.end, b.end))
        ]
        for pieces, others in zip(one.dims, other.dims, strict=True)
    ]
    return [SharedSlices(tuple(a for a, _ in pairs), tuple(b for _, b in pairs)) for pairs in product(*shared)]


def missing_element(shape: Sequence[int], tiles: Sequence[Ranges]) -> tuple[int, ...] | None:
    """Return the first element of a tensor that none of some tiles holds; None when they hold all."""
    cuts = [
        sorted({0, n, *(edge for ranges in tiles for pair in ranges[i] for edge in pair)}) for i, n in enumerate(shape)
    ]
    held = np.zeros([len(line) - 1 for line in cuts], bool)
    for ranges in tiles:
        lines = [
            [at for at, edge in enumerate(edges[:-1]) if any(first <= edge < end for first, end in line)]
            for edges, line in zip(cuts, ranges, strict=True)
        ]
        held[np.ix_(*lines)] = True
    left = np.argwhere(~held)
    return None if not len(left) else tuple(edges[at] for edges, at in zip(cuts, left[0].tolist(), strict=True))


# ------------------------------------------------------------------------------------------------ cut and join


def copy(source: Any, held: TensorTile, target: Any, wanted: TensorTile) -> None:
    """Copy the elements that two tiles share from the array of the one into the array of the other."""
    for overlap in overlaps(held, wanted):
        target[overlap.other] = source[overlap.one]


def cut(array: Any, type: TensorType, mesh: Mesh, place: int) -> Any:
    """Return the local array of a place, of a whole array; padding is zero. It may share memory with the array."""
    tile, whole = tile_of(type, mesh, place), whole_tile(type)
    if tile == whole:
        return array
    if not tile.is_padded and all(len(pieces) == 1 for pieces in tile.dims):
        return array[tuple(slice(piece.first, piece.end) for (piece,) in tile.dims)]
    # Torch makes arrays on the device and of the element type of another one.
    local = array.new_zeros(tile.shape) if hasattr(array, "new_zeros") else np.zeros(tile.shape, array.dtype)
    copy(array, whole, local, tile)
    return local


def fill(whole: Any, local: Any, type: TensorType, mesh: Mesh, place: int) -> None:
    """Write the local array of a place into its slices of a whole array. Padding is left out."""
    copy(local, tile_of(type, mesh, place), whole, whole_tile(type))


def join(locals: Sequence[Any], type: TensorType, mesh: Mesh) -> np.ndarray[Any, Any]:
    """Return the whole array whose local arrays these are, one for each place of a mesh."""
    whole = np.empty(type.dims, numpy_dtype(type.dtype))
    for place in owners(type, mesh).values():
        fill(whole, locals[place], type, mesh, place)
    return whole


def seat_of(module: Module, rank: int) -> tuple[Mesh, int]:
    """Return the mesh that a rank of a module lies on, and its place there."""
    stage = module.rank_stages()[rank]
    return module.mesh_of(stage), module.ranks_of(stage).index(rank)
