"""Tests of layouts as lists of devices: the devices that hold a shard are those whose tiles are equal, and the axes of
a mesh are found again from the lists alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import prod

import pytest

from penstock.ir.graph import Mesh
from penstock.ir.sharding.device_lists import DeviceShards, DimensionShards, device_layout, fitting_sizes, splits_on
from penstock.ir.sharding.splits import Split
from penstock.ir.sharding.tiles import tile_of
from penstock.ir.types import parse_type

TYPES = (
    "f32[24,48]",
    "f32[24/a,48]",
    "f32[24,48/b]",
    "f32[24/b,48/a]",
    "f32[24/a/b,48]",
    "f32[24,48/b/a]",
    "f32[3*8/b,48/a]",
)
MESHES = ((("a", 2), ("b", 2)), (("a", 2), ("b", 4)), (("b", 4), ("a", 2)), (("a", 4), ("c", 2), ("b", 2)))


def mesh_of(axes: tuple[tuple[str, int], ...]) -> Mesh:
    return Mesh("m", axes, tuple(f"cpu:{i}" for i in range(prod(n for _, n in axes))))


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("text", TYPES)
def test_holders_of_a_shard_have_one_tile_and_axes_are_found_again(text, axes):
    t, mesh = parse_type(text), mesh_of(axes)
    layout = device_layout(t, mesh)
    tiles: dict[object, list[int]] = {}
    for place in range(len(mesh.devices)):
        tiles.setdefault(tile_of(t, mesh, place).ranges, []).append(place)
    assert sorted(layout.holders) == sorted(map(tuple, tiles.values()))
    # In order: the last split dimension is the fastest.
    firsts = [tuple(r[0][0] for r in tile_of(t, mesh, group[0]).ranges) for group in layout.holders]
    assert firsts == sorted(firsts)
    assert splits_on(layout, axes, 2) == tuple(Split(t.axes_of(i), t.blocks_of(i)) for i in range(2))


def test_control_other_devices_are_along_no_axis():
    axes = (("a", 2), ("b", 2))
    layout = device_layout(parse_type("f32[8/a,8]"), mesh_of(axes))
    assert layout.holders == ((0, 1), (2, 3))
    said = {
        holders: splits_on(replace(layout, holders=holders), axes, 2)
        for holders in (((a, b), (c, d)) for a, b, c, d in permutations(range(4)) if a < b and c < d)
    }
    assert {holders: splits[0].axes for holders, splits in said.items() if splits} == {
        ((0, 1), (2, 3)): ("a",),
        ((0, 2), (1, 3)): ("b",),
    }
    assert splits_on(replace(layout, holders=((0, 1), (2, 2))), axes, 2) is None
    assert splits_on(replace(layout, holders=((0,), (1,))), axes, 2) is None


def test_the_fewest_axes_that_fit_are_found():
    rows = DeviceShards((DimensionShards(0, 2),), ((0, 1), (2, 3)))
    columns = DeviceShards((DimensionShards(1, 2),), ((0, 2), (1, 3)))
    both = DeviceShards((DimensionShards(0, 4),), ((0,), (1,), (2,), (3,)))
    assert fitting_sizes([both], 4) == (4,)
    assert fitting_sizes([both, rows], 4) == fitting_sizes([columns], 4) == (2, 2)
    uneven = DeviceShards((DimensionShards(0, 2),), ((0, 1, 2), (3, 4, 5)))
    assert fitting_sizes([uneven], 6) == (2, 3)
    assert fitting_sizes([DeviceShards((DimensionShards(0, 2),), ((0, 3), (1, 2)))], 4) is None
