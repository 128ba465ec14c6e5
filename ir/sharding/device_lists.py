"""Layouts as lists of devices: how many shards a dimension has, and which devices hold each shard.

In: a type on a mesh, or such a layout and the axes of a mesh. Out: the other of the two. Formats that know no axes of
meshes, as ONNX, write layouts so.

    f32[64,3*256/tp] on (dp=2, tp=2)     dimension 1 has 3 blocks, each of them in 2 shards;
                                         devices 0 and 2 hold the first shards, 1 and 3 the second ones

Shards of a tensor are counted with its last split dimension the fastest. Places are numbered as in a Mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from penstock.ir.graph import Mesh
from penstock.ir.types import TensorType

from .splits import UNSPLIT, Split


class DimensionShards(NamedTuple):
    """The shards of one dimension; of each of its blocks, where it has several."""

    dim: int
    parts: int
    blocks: int = 1


@dataclass(frozen=True)
class DeviceShards:
    """The split dimensions of a tensor, and for each shard the devices that hold it."""

    shards: tuple[DimensionShards, ...]
    holders: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices, as often as they are listed."""
        return tuple(sorted(device for group in self.holders for device in group))

    def renumbered(self, number: Mapping[int, int]) -> DeviceShards:
        """Return the layout with other numbers for devices."""
        return DeviceShards(self.shards, tuple(tuple(number[x] for x in group) for group in self.holders))


def device_layout(t: TensorType, mesh: Mesh) -> DeviceShards:
    """Return the layout of a tensor on a mesh."""
    sizes = mesh.sizes
    counts = [prod(sizes.get(axis, 1) for axis in t.axes_of(i)) for i in range(t.rank)]
    split = [i for i, count in enumerate(counts) if count > 1]
    holders: dict[tuple[int, ...], list[int]] = {shard: [] for shard in product(*(range(counts[i]) for i in split))}
    for place in range(len(mesh.devices)):
        here = mesh.coordinates(place)
        holders[tuple(_index(t.axes_of(i), here, sizes) for i in split)].append(place)
    shards = tuple(DimensionShards(i, counts[i], t.blocks_of(i)) for i in split)
    return DeviceShards(shards, tuple(map(tuple, holders.values())))


def _index(axes: Sequence[str], here: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    index = 0
    for axis in axes:
        index = index * sizes.get(axis, 1) + here.get(axis, 0)
    return index


def splits_on(layout: DeviceShards, axes: Sequence[tuple[str, int]], rank: int) -> tuple[Split, ...] | None:
    """Return the split of every dimension over the axes of a mesh; None where no axes give these devices."""
    mesh = Mesh("", tuple(axes), ())
    places = prod(size for _, size in axes)
    if layout.devices != tuple(range(places)):
        return None
    shard_of = {place: shard for shard, group in zip(_every(layout), layout.holders, strict=True) for place in group}
    here = [mesh.coordinates(place) for place in range(places)]
    splits = [UNSPLIT] * rank
    for position, (dim, count, blocks) in enumerate(layout.shards):
        steps = {axis: shard_of[_neighbour(axes, axis)][position] for axis, size in axes if size > 1}
        major_first = tuple(sorted((axis for axis in steps if steps[axis]), key=lambda axis: -steps[axis]))
        places_by_axes = [_index(major_first, at, mesh.sizes) for at in here]
        if places_by_axes != [shard_of[place][position] for place in range(places)] or max(places_by_axes) + 1 != count:
            return None
        splits[dim] = Split(major_first, blocks)
    return tuple(splits)


def _every(layout: DeviceShards) -> list[tuple[int, ...]]:
    return list(product(*(range(shards.parts) for shards in layout.shards)))


def _neighbour(axes: Sequence[tuple[str, int]], along: str) -> int:
    """Return the place next to the first one along an axis."""
    names = [axis for axis, _ in axes]
    return prod(size for _, size in axes[names.index(along) + 1 :])


def fitting_sizes(layouts: Sequence[DeviceShards], places: int) -> tuple[int, ...] | None:
    """Return the sizes of the axes of a mesh on which all these layouts can be said, as few as can be; None where there
    is none."""
    for sizes in sorted(_factors(places), key=lambda sizes: (len(sizes), sizes)):
        axes = [(str(i), size) for i, size in enumerate(sizes)]
        if all(splits_on(layout, axes, _rank(layout)) is not None for layout in layouts):
            return sizes
    return None


def _rank(layout: DeviceShards) -> int:
    return 1 + max((shards.dim for shards in layout.shards), default=-1)


def _factors(n: int) -> Iterator[tuple[int, ...]]:
    """Yield the products that make n, of factors of 2 and more, in every order."""
    if n == 1:
        yield ()
    for first in range(2, n + 1):
        if n % first == 0:
            yield from ((first, *others) for others in _factors(n // first))
