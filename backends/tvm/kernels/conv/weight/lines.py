"""Positions of a convolution as lines of numbers along a sum, for gradients of its weight on tile registers.

In: the sizes of a gradient, two spatial dimensions. Out: a LineLayout, which gives each position of dy and of x a
place in a line, so that

    dw[o, c, tap] = sum over lines l of  dy[o, l] * x[c, l + shift(tap)]

and the lines are cut into blocks that stay in the second cache.

A unit is a band of rows of one image. Two units make a pair, whose numbers stand in the two halves of words: those of
two images where their number is even. Rows of a unit follow each other at a distance `pitch`, in dy with zeros between
them, in x with the border of zeros. One column of the border serves the end of one row and the begin of the next. So
all taps read x as it is packed once. With a stride, columns and rows of x are kept apart by their remainder modulo the
stride (`residues` are those that some tap reads). Taps are shifts again. Units whose taps read only their own positions
follow each other without a gap; other units begin with a whole step of dy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from penstock.backends.tvm.kernels.tiles.registers import SIDE, STEP
from penstock.backends.tvm.kernels.tools.correlation import Pair
from penstock.backends.tvm.kernels.tools.emit import ceil_div

# Bytes of the second cache that packed operands and sums may take, and the most bytes of dy that stay there until the
# next round.
_CACHE, _NEAR = 3 << 19, 1 << 20
# Cycles: a product of two tiles, sums of one more block added, a number of x and of dy packed, a channel of a unit
# begun.
_MULTIPLY, _SUMS, _X, _DY, _RUN = 21.0, 60.0, 1.8, 1.6, 60.0
# Bytes from the third cache per cycle, of sums and of what is read in order, and multiply-adds of vectors.
_BYTES, _STREAM, _VECTORS = 4.0, 12.0, 26.0


@dataclass(frozen=True)
class Axis:
    """One spatial dimension of the convolution whose gradient is computed."""

    size: int
    out: int
    kernel: int
    stride: int
    dilation: int
    low: int

    @property
    def residues(self) -> tuple[int, ...]:
        return tuple(sorted({s * self.dilation % self.stride for s in range(self.kernel)}))

    def shift(self, tap: int) -> int:
        return tap * self.dilation // self.stride

    def reach(self, residue: int) -> int:
        """Return the largest shift of a tap with that residue."""
        return max(self.shift(s) for s in range(self.kernel) if s * self.dilation % self.stride == residue)

    def inside(self, residue: int, count: int) -> tuple[int, int]:
        """Return the first and the last + 1 of the places 0 .. count, which windows read, that lie in x."""
        first = max(ceil_div(self.low - residue, self.stride), 0)
        return first, min(count, (self.size - 1 + self.low - residue) // self.stride + 1)

    @property
    def extent(self) -> int:
        """The largest shift of all."""
        return max(self.reach(r) for r in self.residues)

    def pitch(self) -> int:
        """Return the distance from one row to the next: the border behind a row is the one in front of the next."""
        pitch = self.out
        for residue in self.residues:
            count = self.out + self.reach(residue)
            first, last = self.inside(residue, count)
            pitch = max(pitch, last, count - first)
        return pitch


@dataclass(frozen=True)
class LineLayout:
    """The division of images into units of rows. `height` rows of dy make a unit; `together` pairs of units a block."""

    rows: Axis
    columns: Axis
    images: int
    height: int
    together: int

    @property
    def bands(self) -> int:
        return ceil_div(self.rows.out, self.height)

    @property
    def twins(self) -> bool:
        """Return whether both units of a pair are the same rows of two images."""
        return self.images % 2 == 0

    @property
    def units(self) -> int:
        return self.images * self.bands

    @property
    def pairs(self) -> int:
        return ceil_div(self.units, 2)

    @property
    def blocks(self) -> int:
        return self.pairs // self.together

    @property
    def pitch(self) -> int:
        return self.columns.pitch()

    @property
    def joined(self) -> bool:
        """Return whether units follow each other without a gap."""
        return self.rows.extent == self.columns.extent == 0

    @property
    def segments(self) -> int:
        return 1 if self.joined else self.together

    @property
    def steps(self) -> int:
        """Steps of a segment."""
        lines = self.height * self.pitch
        return ceil_div(lines * self.together if self.joined else lines, SIDE)

    @property
    def dy_pitch(self) -> int:
        """The distance from one unit to the next, in dy."""
        return self.height * self.pitch if self.joined else self.steps * SIDE

    @property
    def x_pitch(self) -> int:
        """The distance from one unit to the next, in x."""
        if self.joined:
            return self.dy_pitch
        behind = max(self.columns.out + self.columns.extent - self.pitch, 0)
        return (self.height + self.rows.extent) * self.pitch + behind

    @property
    def phase(self) -> int:
        """Lines of x for one remainder of rows and columns."""
        farthest = self.rows.extent * self.pitch + self.columns.extent
        return max(self.together * self.x_pitch, (self.segments - 1) * self.x_pitch + self.steps * SIDE + farthest)

    @property
    def lines(self) -> int:
        """Lines of x, with all remainders."""
        return len(self.rows.residues) * len(self.columns.residues) * self.phase

    @property
    def source_rows(self) -> int:
        """Rows of x that a unit reads, the border counted, and those between them."""
        return max((self.height - 1 + self.rows.reach(r)) * self.rows.stride + r + 1 for r in self.rows.residues)

    @property
    def spare(self) -> int:
        """Lines at the end for positions of x that no tap reads, unit after unit."""
        read = all(
            len(
                {t for r in axis.residues for t in range(r, axis.stride * (count + axis.reach(r)), axis.stride)}
                & set(range(low, high))
            )
            == high - low
            for axis, count, low, high in (
                (self.rows, self.height, 0, self.source_rows),
                (self.columns, self.columns.out, self.columns.low, self.columns.low + self.columns.size),
            )
        )
        return 0 if read else (self.together - 1) * self.x_pitch + 1

    @property
    def by_rows(self) -> bool:
        """Return whether rows of x that no tap reads are left out in packing."""
        return len(self.rows.residues) < self.rows.stride and self.columns.size >= SIDE

    @property
    def packed_rows(self) -> int:
        """Rows of x that packing goes through for a unit."""
        return sum(self.height + self.rows.reach(r) for r in self.rows.residues) if self.by_rows else self.source_rows

    def is_possible(self) -> bool:
        """Return whether packing, which takes 16 numbers at once, can fill the lines."""
        if self.pairs % self.together:
            return False
        if self.by_rows:
            return True
        rows = self.rows
        for band in range(self.bands):
            first = band * self.height * rows.stride - rows.low
            if (min(first + self.source_rows, rows.size) - max(first, 0)) * self.columns.size < SIDE:
                return False
        return True


@dataclass(frozen=True)
class PackingPlan:
    """A layout with the cycles that it takes. `strips` strips of 32 channels are packed together."""

    layout: LineLayout
    strips: int
    cycles: float


def vector_cycles(sizes: Pair, spatial: Pair, images: int, taps: int) -> float:
    return prod(sizes) * prod(spatial) * images * taps / _VECTORS


def find_plan(rows: Axis, columns: Axis, images: int, filters: int, channels: int, parts: int) -> PackingPlan | None:
    """Choose the blocks that are cheapest by an estimate of products, packing, and traffic to the third cache and
    back."""
    best: PackingPlan | None = None
    strips = ceil_div(channels, STEP)
    for layout in _layouts(rows, columns, images):
        for together in sorted({ceil_div(strips, n) for n in range(1, strips + 1)}):
            cycles = _estimate(layout, together, filters, channels, parts)
            if best is None or cycles < best.cycles:
                best = PackingPlan(layout, together, cycles)
    return best


def _layouts(rows: Axis, columns: Axis, images: int) -> Iterator[LineLayout]:
    heights = sorted({ceil_div(rows.out, bands) for bands in range(1, rows.out + 1)})
    for height in heights:
        pairs = LineLayout(rows, columns, images, height, 1).pairs
        for together in range(1, pairs + 1):
            layout = LineLayout(rows, columns, images, height, together)
            if pairs % together == 0 and layout.is_possible():
                yield layout


def _estimate(layout: LineLayout, strips: int, filters: int, channels: int, parts: int) -> float:
    row_tiles, column_tiles = ceil_div(filters, SIDE), ceil_div(channels, SIDE)
    row_strips, passes = ceil_div(filters, STEP), ceil_div(ceil_div(channels, STEP), strips)
    taps = layout.rows.kernel * layout.columns.kernel
    steps = layout.segments * layout.steps
    products = {1: 1, 3: 6}[parts]
    words = 4 * parts
    near = words * SIDE * 2 * strips * layout.lines
    strip = words * STEP * SIDE * steps
    everything = row_strips * strip
    sums = 4 * row_tiles * column_tiles * SIDE * SIDE * taps
    if near + strip > _CACHE:
        return float("inf")
    cycles = layout.blocks * steps * row_tiles * column_tiles * taps * products * _MULTIPLY
    units = 2 * layout.together * layout.blocks
    cycles += units * (_X * channels * layout.packed_rows * layout.columns.size + _DY * filters * layout.dy_pitch)
    cycles += _RUN * units * (channels + filters)
    if near + everything > _NEAR:
        cycles += layout.blocks * (passes - 1) * everything / _STREAM
    if layout.blocks > 1:
        cycles += layout.blocks * row_tiles * column_tiles * taps * _SUMS
        if near + min(everything, strip) + sums > _CACHE:
            cycles += 2 * (layout.blocks - 1) * sums / _BYTES
    return cycles
