"""The sizes of convolutions of bytes: planes of words, and tiles of positions.

In: a window and the sizes of images. Out: how words of channels lie in memory, where each tap finds its words, and how
many positions a tile has. A tap reads its plane from another place on, so a tile may have positions of several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from penstock.backends.tvm.kernels.tools.emit import ceil_div
from penstock.ir.ops import Window

# More phases than this, or fewer channels, gather windows.
_MOST_PHASES, _LEAST_CHANNELS = 4, 3
# Vectors of a tile by lanes.
_VECTORS = {16: 4, 8: 2, 4: 2}


@dataclass(frozen=True)
class BytePlanes:
    """The planes of words that a convolution reads: phases of each dimension, and where each tap finds its words."""

    # Channels of a group, and words of them; gathered windows count a channel for each tap.
    channels: int
    words: int
    phases: tuple[tuple[int, ...], ...]
    extents: tuple[int, ...]
    # Of each tap: words from the beginning of an image's planes.
    offsets: tuple[int, ...]
    gathers: bool

    @property
    def size(self) -> int:
        """The words of a plane."""
        return prod(self.extents)

    @property
    def steps(self) -> int:
        return self.words * len(self.offsets)


def planes_of(window: Window, outs: Sequence[int], channels: int, depth: int) -> BytePlanes:
    """Choose the planes of a convolution."""
    along = list(zip(window.kernel, window.strides, window.dilations, outs, strict=True))
    phases = tuple(tuple(sorted({k * d % s for k in range(kernel)})) for kernel, s, d, _ in along)
    if prod(map(len, phases)) > _MOST_PHASES or (channels < _LEAST_CHANNELS and prod(window.kernel) > 1):
        terms = channels * prod(window.kernel)
        return BytePlanes(terms, ceil_div(terms, depth), tuple((0,) for _ in outs), tuple(outs), (0,), True)
    extents = tuple(out + (kernel - 1) * d // s for kernel, s, d, out in along)
    words, size = ceil_div(channels, depth), prod(extents)
    offsets = []
    for tap in product(*map(range, window.kernel)):
        phase = shift = 0
        for k, (_, s, d, _), known, extent in zip(tap, along, phases, extents, strict=True):
            phase = phase * len(known) + known.index(k * d % s)
            shift = shift * extent + k * d // s
        offsets.append(phase * words * size + shift)
    return BytePlanes(channels, words, phases, extents, tuple(offsets), False)


@dataclass(frozen=True)
class PositionTiles:
    """Tiles of `rows` rows by `columns` columns, in so many vectors. `whole` of them are along the dimension that is
    divided, then one of `rest` rows or columns, if any."""

    rows: int
    columns: int
    vectors: int
    whole: int
    rest: int
    by_rows: bool


def tiles_of(height: int, width: int, pitch: int, lanes: int) -> PositionTiles:
    """Choose the tiles of an image: rows beside each other where that fills vectors, else parts of a row."""
    most = _VECTORS[lanes]
    best = (0.0, 1)
    for rows in range(1, height + 1):
        vectors = ceil_div((rows - 1) * pitch + width, lanes)
        if vectors > most:
            break
        best = max(best, (rows * width / (vectors * lanes), rows))
    rows = best[1]
    if rows > 1:
        return PositionTiles(rows, width, ceil_div((rows - 1) * pitch + width, lanes), *divmod(height, rows), True)
    total = ceil_div(width, lanes)
    vectors = ceil_div(total, ceil_div(total, most))
    return PositionTiles(1, vectors * lanes, vectors, *divmod(width, vectors * lanes), False)
