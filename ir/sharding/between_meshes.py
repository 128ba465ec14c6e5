"""Axes that two meshes have in common when one sends to the other.

Each rank of a team takes from the rank at its own place of the other team; places are taken in turn where that is
smaller (`Routes`, ir/schedule.py). A part arrives right where both lie at the same coordinates of all axes that the
value is split over.
"""

from __future__ import annotations

from penstock.ir.graph import Mesh


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
