"""Parts of tensors on a mesh by the definition, one index at a time: an oracle for layouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from penstock.ir.graph import Mesh
from penstock.ir.types import TensorType


def places_of(t: TensorType, mesh: Mesh, place: int, dim: int) -> list[int | None]:
    """Return the whole index of every local index along a dimension; None is padding."""
    sizes, at = mesh.sizes, mesh.coordinates(place)
    axes, blocks = t.axes_of(dim), t.blocks_of(dim)
    parts = prod(sizes.get(axis, 1) for axis in axes)
    number = 0
    for axis in axes:
        number = number * sizes.get(axis, 1) + at.get(axis, 0)
    each = t.dims[dim] // abs(blocks)
    size = -(-each // parts)
    places: list[int | None] = []
    for block in range(abs(blocks)):
        # In folded order the devices take their parts of every second block from the last to the first.
        turn = range(parts)[::-1] if blocks < 0 and block % 2 == 1 else range(parts)
        places += [
            block * each + i if i < each else None for i in range(turn[number] * size, (turn[number] + 1) * size)
        ]
    return places


def cut_out(whole: np.ndarray, t: TensorType, mesh: Mesh, place: int) -> np.ndarray:
    """Return the part of a place; padding is zero. A partial sum is the whole on the first place of its group."""
    local = np.zeros(t.local(mesh.sizes).dims, whole.dtype)
    if any(mesh.coordinates(place).get(axis, 0) for axis in t.partial):
        return local
    here, there = _inside(t, mesh, place)
    local[here] = whole[there]
    return local


def _inside(t: TensorType, mesh: Mesh, place: int) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return the local indices that are no padding, and the whole indices of the same elements."""
    every = [places_of(t, mesh, place, dim) for dim in range(t.rank)]
    here = [[i for i, at in enumerate(places) if at is not None] for places in every]
    there = [[at for at in places if at is not None] for places in every]
    return np.ix_(*map(_whole_numbers, here)), np.ix_(*map(_whole_numbers, there))


def _whole_numbers(indices: list[int]) -> np.ndarray:
    return np.array(indices, np.int64)


def put_together(parts: Sequence[np.ndarray], t: TensorType, mesh: Mesh) -> np.ndarray:
    """Return the whole tensor of the parts of all places. Parts that should be equal are compared; partial sums are
    added up."""
    whole, seen = np.zeros(t.dims, parts[0].dtype), np.zeros(t.dims, bool)
    totals: dict[tuple[int, ...], np.ndarray] = {}
    for place in range(len(mesh.devices)):
        group = mesh.group(place, t.partial) if t.partial else (place,)
        totals[group] = totals[group] + parts[place] if group in totals else parts[place]
    for group, part in totals.items():
        here, there = _inside(t, mesh, group[0])
        again = seen[there]
        same = np.isclose(part[here], whole[there], rtol=1e-12, atol=1e-13, equal_nan=True)
        assert np.all(same | ~again), f"ranks {group} have another part of {t} than those before"
        whole[there], seen[there] = part[here], True
    assert seen.all()
    return whole
