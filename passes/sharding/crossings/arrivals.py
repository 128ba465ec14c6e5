"""The layouts in which a value leaves a stage and arrives at one with another mesh.

In: the type of a value, two meshes, a cluster. Out: how it leaves and how it arrives, and whether it travels in tiles.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import REPLICAS, Mesh
from penstock.ir.sharding.between_meshes import moved_axes
from penstock.ir.sharding.paths import COLLECTIVE
from penstock.ir.sharding.tile_messages import parcels_of
from penstock.ir.sharding.tiles import Ranges, tile_of
from penstock.ir.types import TensorType

# A chain of fewer parcels is hardly done sooner than one host after the other.
FEWEST_PARCELS = 4


class Landing(NamedTuple):
    """The layout in which a value arrives on a mesh. If not in tiles, each rank takes the part of the rank at its
    place."""

    type: TensorType
    in_tiles: bool


def leaving(t: TensorType, mesh: Mesh) -> TensorType:
    """Return how a value leaves a mesh: sums of parts are added up, each rank a part where a dimension divides."""
    if not t.partial:
        return t
    for dim in range(t.rank):
        axes = (*t.axes_of(dim), *t.partial)
        if t.blocks_of(dim) == 1 and _divides(t, dim, axes, mesh):
            return _laid(t, dim, axes)
    return t.laid(t.axes, (), t.blocks)


def arrival(left: TensorType, wanted: TensorType, meshes: tuple[Mesh, Mesh], cluster: Cluster | None) -> Landing:
    """Return how a value arrives on the second of two meshes, where graphs want it in a layout."""
    source, target = meshes
    if left.partial:
        return Landing(left, False)
    bare = wanted.laid(wanted.axes, (), wanted.blocks)
    share = _scattered(bare, source, target, cluster)
    if share is not None:
        return Landing(share, True)
    if moved_axes(source, target).isdisjoint((*left.every_axis, *bare.every_axis)):
        chained = left == bare and _is_worth_a_chain(bare, source, target, cluster)
        return Landing(left, chained)
    hosts = set(target.devices) if cluster is None else {cluster.device(name).host for name in target.devices}
    at_places = _at_places(left, source, target) if len(hosts) == 1 else None
    return Landing(bare, True) if at_places is None else Landing(at_places, False)


def _at_places(t: TensorType, source: Mesh, target: Mesh) -> TensorType | None:
    """Return the layout in which the ranks of another mesh have the parts of a tensor that ranks at the same places
    have; None where there is none, or ranks have parts in common."""
    here, there = (
        tuple(axis for axis, size in mesh.axes if axis != REPLICAS and size > 1) for mesh in (source, target)
    )
    split = [tuple(axis for axis in t.axes_of(i) if source.sizes.get(axis, 1) > 1) for i in range(t.rank)]
    sizes = [prod(mesh.sizes[axis] for axis in axes) for mesh, axes in ((source, here), (target, there))]
    dims = [i for i, axes in enumerate(split) if axes]
    if sizes[0] != sizes[1] or [split[i] for i in dims] != [here] or t.blocks_of(dims[0]) != 1:
        return None
    return t.plain.laid(tuple(there if i in dims else () for i in range(t.rank)))


def _is_worth_a_chain(t: TensorType, source: Mesh, target: Mesh, cluster: Cluster | None) -> bool:
    """Return whether more hosts take a part than have it at the source, so that hosts may hand it on in parcels
    (passes/communicate/senders.py)."""
    if cluster is None or parcels_of(t.local(target.sizes).nbytes) < FEWEST_PARCELS:
        return False
    takers, senders = (_hosts_of_parts(t, mesh, cluster) for mesh in (source, target)[::-1])
    known = {cluster.device(name).host for name in source.devices}
    return any(len(hosts - known) > len(senders.get(part, ())) for part, hosts in takers.items())


def _hosts_of_parts(t: TensorType, mesh: Mesh, cluster: Cluster) -> dict[Ranges, set[str]]:
    """Return the hosts that have each part of a tensor, of one team."""
    hosts: dict[Ranges, set[str]] = {}
    for place in mesh.teams()[0]:
        hosts.setdefault(tile_of(t, mesh, place).ranges, set()).add(cluster.device(mesh.devices[place]).host)
    return hosts


def _scattered(t: TensorType, source: Mesh, target: Mesh, cluster: Cluster | None) -> TensorType | None:
    """Return a layout in which ranks of one host have a share each of what all of them want; None where they share
    memory with ranks that send, nothing divides, or the bytes are fewer than a collective costs."""
    if cluster is None:
        return None
    hosts = [cluster.device(name).host for name in target.devices]
    senders = {cluster.device(name).host for name in source.devices}
    free = [
        axis
        for axis, size in target.axes
        if size > 1
        and axis not in (REPLICAS, *t.every_axis)
        and not senders & set(hosts)
        and _is_near(target, axis, hosts)
    ]
    for count in range(len(free), 0, -1):
        over = tuple(free[:count])
        parts = prod(target.sizes[axis] for axis in over)
        if t.local(target.sizes).nbytes * (parts - 1) // parts <= COLLECTIVE:
            continue
        for dim in range(t.rank):
            axes = (*t.axes_of(dim), *over)
            if t.blocks_of(dim) == 1 and _divides(t, dim, axes, target):
                return _laid(t, dim, axes)
    return None


def _is_near(mesh: Mesh, axis: str, hosts: list[str]) -> bool:
    """Return whether ranks that differ along an axis alone are on one host."""
    return all(len({hosts[other] for other in mesh.group(place, (axis,))}) == 1 for place in range(len(hosts)))


def _divides(t: TensorType, dim: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    parts = prod(mesh.sizes.get(axis, 1) for axis in axes)
    return t.dims[dim] > 0 and t.dims[dim] % parts == 0


def _laid(t: TensorType, dim: int, axes: tuple[str, ...]) -> TensorType:
    """Return the type with other axes on one dimension, and no sum of parts."""
    return t.laid([axes if i == dim else t.axes_of(i) for i in range(t.rank)], (), t.blocks)
