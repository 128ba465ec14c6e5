"""Edges between stages with unlike meshes, and the axes that two meshes have in common.

Each rank of a team takes from the rank at its own place of the other team; places are taken in turn where that is
smaller (`Routes`, ir/schedule.py). A part arrives right where both lie at the same coordinates of all axes that the
value is split over. Else the edge says how whole values lie on both meshes, and they travel in tiles
(tile_messages.py):

    edge 0>1 F : %h : f32[32,512/tp] to f32[32/sp,512], %g : f32[32,512/tp]      %g lies alike on both meshes
"""

from __future__ import annotations

from penstock.ir.graph import Edge, Mesh, Module, Value


def travels_in_tiles(edge: Edge) -> bool:
    """Return whether the types of an edge are those of whole values, which travel in tiles."""
    return bool(edge.to) or not all(value.type.is_plain for value in edge.values)


def arriving_values(edge: Edge) -> tuple[Value, ...]:
    """Return the values of an edge as they arrive."""
    if not edge.to:
        return edge.values
    return tuple(Value(value.name, t) for value, t in zip(edge.values, edge.to, strict=True))


def edge_values(module: Module, edge: Edge, stage: int) -> tuple[Value, ...]:
    """Return the values of an edge with their types on one device of one of its two stages."""
    return module.local_values(arriving_values(edge) if stage == edge.dst else edge.values, stage)


def moved_axes(source: Mesh, target: Mesh) -> frozenset[str]:
    """Return the axes that have another size in the target, or along which some rank of it lies elsewhere than the rank
    that it takes from."""
    if source.axes == target.axes:
        return frozenset()
    before, after = source.sizes, target.sizes
    moved = {axis for axis in {*before, *after} if before.get(axis, 1) != after.get(axis, 1)}
    senders, takers = source.teams()[0], target.teams()[0]
    for at, place in enumerate(takers):
        sender, taker = source.coordinates(senders[at % len(senders)]), target.coordinates(place)
        moved |= {axis for axis in sender.keys() & taker.keys() if sender[axis] != taker[axis]}
    return frozenset(moved)
