"""Tiles against an oracle that knows no ranges: index masks, made by asking for every element which part it lies in.

Layouts are drawn: several axes on one dimension, blocks, sizes smaller than the mesh, axes that the mesh lacks.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.graph import Mesh
from penstock.ir.interpreter import collectives
from penstock.ir.sharding.tiles import (
    TensorTile,
    copy,
    cut,
    fill,
    join,
    missing_element,
    overlaps,
    owners,
    owns,
    packed_tile,
    tile_of,
    whole_tile,
)
from penstock.ir.types import TensorType, parse_type

AXES = ("dp", "tp", "sp")


def mesh_of(*axes: tuple[str, int]) -> Mesh:
    """Return a mesh on made-up devices."""
    return Mesh("m", axes, tuple(f"cpu:{i}" for i in range(math.prod(n for _, n in axes))))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Draw a mesh of up to three axes, in any order."""
    names = draw(st.permutations(AXES))[: draw(st.integers(0, 3))]
    return mesh_of(*((name, draw(st.integers(1, 4))) for name in names))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> TensorType:
    """Draw a type, of a given shape if there is one, with axes and blocks."""
    rank = draw(st.integers(0, 3)) if shape is None else len(shape)
    free = draw(st.permutations(AXES))[: draw(st.integers(0, 3))]
    homes = [draw(st.integers(0, max(rank - 1, 0))) for _ in free]
    axes = [tuple(axis for axis, home in zip(free, homes, strict=True) if home == i) for i in range(rank)]
    if shape is None:
        blocks = [draw(st.sampled_from((1, 1, 2, 3, -2, -4))) for _ in range(rank)]
        shape = tuple(draw(st.integers(0, 7)) * abs(b) for b in blocks)
    else:
        blocks = [draw(st.sampled_from([b for b in (1, 2, 3, -2) if n % b == 0])) for n in shape]
    return TensorType("i64", shape).laid(axes, (), blocks)


def numbered(type: TensorType) -> np.ndarray:
    """Return an array whose elements are all different, and none is zero."""
    return np.arange(1, type.size + 1).reshape(type.dims)


def mask(type: TensorType, mesh: Mesh, place: int) -> np.ndarray:
    """Return which elements of a whole tensor a place holds, element by element."""
    here, sizes = mesh.coordinates(place), mesh.sizes
    lines = []
    for i, n in enumerate(type.dims):
        each, folded = n // abs(type.blocks_of(i)), type.blocks_of(i) < 0
        axes = [axis for axis in type.axes_of(i) if axis in sizes]
        parts = list(product(*(range(sizes[axis]) for axis in axes)))
        mine = parts.index(tuple(here[axis] for axis in axes))
        size = math.ceil(each / len(parts))
        # In folded order every second block is dealt out from the last place to the first.
        turn = [len(parts) - 1 - mine if folded and k // each % 2 else mine for k in range(n)]
        lines.append(np.array([size > 0 and (k % each) // size == turn[k] for k in range(n)], bool))
    held = np.ones(type.dims, bool)
    for i, line in enumerate(lines):
        held &= line.reshape([-1 if k == i else 1 for k in range(len(lines))])
    return held


@given(layouts(), meshes())
def test_parts_make_the_whole_again(type: TensorType, mesh: Mesh) -> None:
    whole = numbered(type)
    parts = [cut(whole, type, mesh, place) for place in range(len(mesh.devices))]
    assert all(part.shape == type.local(mesh.sizes).dims for part in parts)
    assert np.array_equal(join(parts, type, mesh), whole)
    for place, part in enumerate(parts):
        held = mask(type, mesh, place)
        # In order, the elements of the mask; what else is there is padding, which is zero.
        assert np.array_equal(part[part != 0], whole[held])
        assert tile_of(type, mesh, place).size == held.sum()
        assert tile_of(type, mesh, place).is_padded == (part == 0).any()


@given(layouts(), meshes())
def test_parts_are_those_of_collectives(type: TensorType, mesh: Mesh) -> None:
    # Collectives know blocks in order.
    type = type.laid(type.axes, (), [abs(type.blocks_of(i)) for i in range(type.rank)])
    whole = numbered(type)
    for place in range(len(mesh.devices)):
        part, here = whole, mesh.coordinates(place)
        for i in range(type.rank):
            parts, index = 1, 0
            for axis in type.axes_of(i):
                parts, index = (
                    parts * mesh.sizes.get(axis, 1),
                    index * mesh.sizes.get(axis, 1) + here.get(axis, 0),
                )
            part = collectives.cut(part, i, parts, index, type.blocks_of(i))
        assert np.array_equal(cut(whole, type, mesh, place), part)


@given(st.data())
def test_overlaps_are_those_of_masks(data: st.DataObject) -> None:
    one = data.draw(layouts())
    other = data.draw(layouts(shape=one.dims))
    meshes_drawn = data.draw(meshes()), data.draw(meshes())
    places = [data.draw(st.integers(0, len(mesh.devices) - 1)) for mesh in meshes_drawn]
    whole = numbered(one)
    held = [cut(whole, type, mesh, place) for type, mesh, place in zip((one, other), meshes_drawn, places, strict=True)]
    a, b = (tile_of(type, mesh, place) for type, mesh, place in zip((one, other), meshes_drawn, places, strict=True))
    pairs = overlaps(a, b)
    both = mask(one, meshes_drawn[0], places[0]) & mask(other, meshes_drawn[1], places[1])
    seen = [element for pair in pairs for element in held[0][pair.one].ravel().tolist()]
    assert sorted(seen) == whole[both].tolist()
    assert all(np.array_equal(held[0][pair.one], held[1][pair.other]) for pair in pairs)
    # So do files, which hold no padding.
    packed = [element for pair in overlaps(a.packed, b) for element in held[1][pair.other].ravel().tolist()]
    assert sorted(packed) == sorted(seen)


@given(layouts(), meshes())
def test_owners_hold_every_element_once(type: TensorType, mesh: Mesh) -> None:
    first = owners(type, mesh)
    count = np.zeros(type.dims, int)
    for place in first.values():
        count += mask(type, mesh, place)
    assert (count == 1).all()
    for place in range(len(mesh.devices)):
        # Tiles of a tensor without elements differ in their ranges alone.
        ranges = [tile_of(type, mesh, p).ranges for p in range(place + 1)]
        same = [
            p
            for p in range(place)
            if np.array_equal(mask(type, mesh, p), mask(type, mesh, place))
            and (type.size or ranges[p] == ranges[place])
        ]
        holds = mask(type, mesh, place).any() or not type.size
        assert owns(type, mesh, place) == (holds and not same)


@given(layouts(), meshes(), st.data())
def test_missing_elements_are_those_of_masks(type: TensorType, mesh: Mesh, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(mesh.devices) - 1)))
    held = np.zeros(type.dims, bool)
    for place in places:
        held |= mask(type, mesh, place)
    missing = missing_element(type.dims, [tile_of(type, mesh, place).ranges for place in places])
    first = np.argwhere(~held)
    assert missing == (tuple(first[0]) if len(first) else None)


@settings(max_examples=30)
@given(layouts(), meshes())
def test_torch_is_cut_alike(type: TensorType, mesh: Mesh) -> None:
    whole = numbered(type)
    again = torch.zeros(type.dims, dtype=torch.int64)
    for place in range(len(mesh.devices)):
        part = cut(torch.from_numpy(whole), type, mesh, place)
        assert np.array_equal(part.numpy(), cut(whole, type, mesh, place))
        fill(again, part, type, mesh, place)
    assert np.array_equal(again.numpy(), whole)


def test_a_fused_weight_on_three_places() -> None:
    mesh = mesh_of(("tp", 3))
    type = parse_type("f32[2,3*4/tp]")
    assert tile_of(type, mesh, 0) == TensorTile((2, 6), (((0, 2, 0),), ((0, 2, 0), (4, 6, 2), (8, 10, 4))))
    # The last part has nothing: each block has four elements, two for each of the others.
    assert tile_of(type, mesh, 2) == TensorTile((2, 6), (((0, 2, 0),), ()))
    assert owners(type, mesh) == {tile_of(type, mesh, place).ranges: place for place in (0, 1)}
    assert tile_of(type, mesh, 1).packed.shape == (2, 6)


def test_what_is_whole_is_not_copied() -> None:
    whole = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    assert cut(whole, parse_type("f32[3,4]"), mesh_of(("tp", 2)), 1) is whole
    assert cut(whole, parse_type("f32[3,4/tp]"), mesh_of(("dp", 2)), 1) is whole
    assert np.shares_memory(cut(whole, parse_type("f32[3,4/tp]"), mesh_of(("tp", 2)), 1), whole)


def test_wrong_tiles_are_noticed() -> None:
    """Controls: the laws above fail for a tile that is moved by one element, and for swapped parts."""
    mesh, type = mesh_of(("tp", 2)), parse_type("i64[6/tp]")
    whole = numbered(type)
    parts = [cut(whole, type, mesh, place) for place in (0, 1)]
    assert not np.array_equal(join(parts[::-1], type, mesh), whole)
    moved = packed_tile((((1, 4),),))
    target = np.zeros(6, int)
    copy(parts[0], moved, target, whole_tile(type))
    assert not np.array_equal(target[mask(type, mesh, 0)], parts[0])
    assert missing_element(type.dims, [moved.ranges, tile_of(type, mesh, 1).ranges]) == (0,)
    with pytest.raises(ValueError, match="broadcast"):
        copy(parts[0][:2], tile_of(type, mesh, 0), target, whole_tile(type))
