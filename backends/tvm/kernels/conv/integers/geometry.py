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
# With outputs in lanes: the most positions of a tile by lanes, and about so many whose sums are kept together.
_POSITIONS, _KEPT = {16: 14, 8: 6, 4: 6}, 256
# Turning a vector of sums takes as long as so many steps.
_TURNING = 5


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
    # Elements of an image between neighbouring words of a plane, and words between those of neighbouring outputs.
    strides: tuple[int, ...]
    walks: tuple[int, ...]
    gathers: bool = False

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
        ones = (1,) * len(outs)
        return BytePlanes(terms, ceil_div(terms, depth), ((0,),) * len(outs), tuple(outs), (0,), ones, ones, True)
    extents = tuple(out + (kernel - 1) * d // s for kernel, s, d, out in along)
    words, size = ceil_div(channels, depth), prod(extents)
    offsets = []
    for tap in product(*map(range, window.kernel)):
        phase = shift = 0
        for k, (_, s, d, _), known, extent in zip(tap, along, phases, extents, strict=True):
            phase = phase * len(known) + known.index(k * d % s)
            shift = shift * extent + k * d // s
        offsets.append(phase * words * size + shift)
    return BytePlanes(channels, words, phases, extents, tuple(offsets), window.strides, (1,) * len(extents))


def whole_planes_of(window: Window, outs: Sequence[int], channels: int, depth: int) -> BytePlanes:
    """Return planes without phases: outputs walk over them in strides, but for windows of one element."""
    along = list(zip(window.kernel, window.strides, window.dilations, outs, strict=True))
    strides = tuple(s if kernel == 1 else 1 for kernel, s, _, _ in along)
    walks = tuple(1 if kernel == 1 else s for kernel, s, _, _ in along)
    extents = tuple(
        (out - 1) * walk + (kernel - 1) * d + 1 for walk, (kernel, _, d, out) in zip(walks, along, strict=True)
    )
    offsets = []
    for tap in product(*map(range, window.kernel)):
        shift = 0
        for k, (_, _, d, _), extent in zip(tap, along, extents, strict=True):
            shift = shift * extent + k * d
        offsets.append(shift)
    return BytePlanes(channels, ceil_div(channels, depth), ((0,),) * len(outs), extents, tuple(offsets), strides, walks)


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


@dataclass(frozen=True)
class PositionChunks:
    """Tiles of `tile` rows and columns in chunks of `shape`. `whole` chunks are along the divided dimension, then
    one of `rest` rows or columns, if any."""

    tile: tuple[int, int]
    shape: tuple[int, int]
    whole: int
    rest: int
    by_rows: bool

    @property
    def count(self) -> int:
        return self.whole + (1 if self.rest else 0)

    @property
    def last(self) -> tuple[int, int]:
        """The rows and columns of the last chunk, if it is smaller."""
        return (self.rest, self.shape[1]) if self.by_rows else (self.shape[0], self.rest)


def chunks_of(height: int, width: int, lanes: int) -> PositionChunks:
    """Choose the tiles of an image of so many rows, and how many of their sums are kept together."""
    most = _POSITIONS[lanes]
    columns = ceil_div(width, ceil_div(width, most))
    if height == 1:
        size = min(ceil_div(ceil_div(width, ceil_div(width, _KEPT)), columns) * columns, width)
        return PositionChunks((1, columns), (1, size), *divmod(width, size), False)
    rows = min(max(most // columns, 1), height) if columns == width else 1
    size = ceil_div(height, ceil_div(height, max(_KEPT // width, 1)))
    size = min(ceil_div(size, rows) * rows, height)
    return PositionChunks((rows, columns), (size, width), *divmod(height, size), True)


def turns_outputs(window: Window, outs: Sequence[int], filters: int, channels: int, machine: tuple[int, int]) -> bool:
    """Return whether outputs in lanes take fewer steps than positions in lanes do. `machine` are lanes and depth."""
    lanes, depth = machine
    planes = planes_of(window, outs, channels, depth)
    if planes.gathers:
        return False
    dense = planes.extents == tuple(outs)
    width, height = (prod(outs), 1) if dense else (outs[-1], prod(outs[-2:-1]))
    tiles = tiles_of(height, width, planes.extents[-1], lanes)
    shape = (tiles.rest if tiles.by_rows else 1, tiles.columns if tiles.by_rows else tiles.rest)
    left = ceil_div((shape[0] - 1) * planes.extents[-1] + shape[1], lanes) if tiles.rest else 0
    rows = 1 if dense or tiles.by_rows else height
    images = 1 if dense else prod(outs[:-2])
    positions = images * rows * (tiles.whole * tiles.vectors + left) * filters * planes.steps
    turned = prod(outs) * ceil_div(filters, lanes) * (planes.steps + _TURNING)
    return turned < positions
