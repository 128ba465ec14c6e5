"""Rows of a split dimension that a rank needs beyond its own part: strips from its neighbours, cut where it says.

In: a local tensor, one of whose dimensions is split, and for every rank the rows of the whole tensor that it needs. All
ranks take equally many, from a first row of their own. Out: a local tensor of these rows.

    whole           0 1 2 3 4 5 6 7 8      three ranks have 3 rows each
    rank 1 needs        2 3 4 5 6          one row before its part, one behind it
    rank 0 needs  -1 0 1 2 3               row -1 is outside of the tensor: it is filled

A strip is the end of the part before, or the beginning of the part behind: a `shift` brings it. In the ring of a shift
the first rank gets rows of the last one. Those lie outside of the tensor by their number, as padding does, and what is
outside is filled. Where a rank needs more than its neighbour's whole part, all parts are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.ir.graph import Value

from .building import LocalWriter, typed
from .calls import over


@dataclass(frozen=True)
class Needed:
    """The rows that every rank needs: `length` from `firsts[rank]` on, of which those before `ends[rank]` matter. What
    lies outside of the tensor becomes `fill`; without one it may be anything."""

    firsts: tuple[int, ...]
    length: int
    ends: tuple[int, ...]
    fill: float | None = None

    @classmethod
    def alike(cls, firsts: Sequence[int], length: int, fill: float | None = None) -> Needed:
        """Return rows that all matter."""
        return cls(tuple(firsts), length, tuple(first + length for first in firsts), fill)


@dataclass(frozen=True)
class SplitLine:
    """A split dimension of a local tensor: `whole` rows in parts, one for every rank along the axes."""

    dim: int
    axes: tuple[str, ...]
    whole: int
    parts: int
    part: int


def rows(b: LocalWriter, x: Value, line: SplitLine, needed: Needed) -> Value:
    """Return the rows that every rank needs, of a tensor that is split along a dimension."""
    before, behind = _strip_sizes(line, needed)
    if max(before, behind) > line.part:
        x = b.emit("all_gather", x, axis=line.dim, over=over(line.axes), size=line.whole)
        origins = [0] * line.parts
    else:
        x = _with_strips(b, x, line, needed, (before, behind))
        origins = [rank * line.part - before for rank in range(line.parts)]
    offsets = [first - origin for first, origin in zip(needed.firsts, origins, strict=True)]
    low, high = max(0, -min(offsets)), max(0, max(offsets) + needed.length - x.type.dims[line.dim])
    if low or high:
        at = {line.dim: (low, high)}
        lows, highs = (tuple(at.get(i, (0, 0))[side] for i in range(x.type.rank)) for side in range(2))
        x = b.emit("pad", x, low=lows, high=highs, value=typed(needed.fill or 0.0, x.type.dtype))
    return cut_at(b, x, line, [offset + low for offset in offsets], needed.length)


def _strip_sizes(line: SplitLine, needed: Needed) -> tuple[int, int]:
    """Return how many rows of the tensor some rank needs before its part, and behind it."""
    before = behind = 0
    for rank, (first, end) in enumerate(zip(needed.firsts, needed.ends, strict=True)):
        first, end = max(first, 0), min(end, line.whole)
        if first < end:
            before = max(before, rank * line.part - first)
            behind = max(behind, end - (rank + 1) * line.part)
    return before, behind


def _with_strips(b: LocalWriter, x: Value, line: SplitLine, needed: Needed, strips: tuple[int, int]) -> Value:
    """Return the rank's part between strips of its neighbours. What lies outside of the tensor is filled."""
    before, behind = strips
    pieces = [_filled(b, x, line, needed, 0)]
    if before:
        end = cut_at(b, x, line, [line.part - before] * line.parts, before)
        pieces.insert(0, _filled(b, b.emit("shift", end, by=1, over=over(line.axes)), line, needed, -before))
    if behind:
        beginning = cut_at(b, x, line, [0] * line.parts, behind)
        strip = b.emit("shift", beginning, by=-1, over=over(line.axes))
        pieces.append(_filled(b, strip, line, needed, line.part))
    return b.emit("concat", *pieces, axis=line.dim) if len(pieces) > 1 else pieces[0]


def _filled(b: LocalWriter, piece: Value, line: SplitLine, needed: Needed, offset: int) -> Value:
    """Return rows that lie at an offset from the beginning of each rank's part, those outside of the tensor filled."""
    size = piece.type.dims[line.dim]
    matter = [
        (max(rank * line.part + offset, first), min(rank * line.part + offset + size, end))
        for rank, (first, end) in enumerate(zip(needed.firsts, needed.ends, strict=True))
    ]
    if needed.fill is None or not any(first < end and (first < 0 or end > line.whole) for first, end in matter):
        return piece
    inside = b.once(("inside", line, offset, size, piece.type.rank), lambda: _inside(b, line, offset, size, piece))
    return b.emit("where", inside, piece, b.number(typed(needed.fill, piece.type.dtype), piece.type.dtype))


def _inside(b: LocalWriter, line: SplitLine, offset: int, size: int, piece: Value) -> Value:
    """Return which rows at an offset from the beginning of this rank's part are rows of the tensor."""
    numbers = b.emit("iota", name=b.namer.fresh("local.places"), dtype="i64", shape=(size,))
    numbers = b.emit("add", numbers, b.number(offset, "i64")) if offset else numbers
    numbers = b.emit("add", numbers, b.first(line.axes, line.part))
    column = b.emit("reshape", numbers, shape=tuple(size if i == line.dim else 1 for i in range(piece.type.rank)))
    below = b.emit("less", column, b.number(line.whole, "i64"))
    return below if offset >= 0 else b.emit("and", b.emit("less_equal", b.number(0, "i64"), column), below)


def cut_at(b: LocalWriter, x: Value, line: SplitLine, offsets: Sequence[int], length: int) -> Value:
    """Return `length` rows of a local tensor from an offset on that every rank has for itself."""
    first, dims = offsets[0], x.type.dims
    if any(offset != first for offset in offsets):
        start = number_of_rank(b, line.axes, offsets)
        numbers = b.emit("iota", name=b.namer.fresh("local.places"), dtype="i64", shape=(length,))
        return b.emit("gather", x, b.emit("add", numbers, start), axis=line.dim)
    if length == dims[line.dim]:
        return x
    starts = tuple(first if i == line.dim else 0 for i in range(len(dims)))
    stops = tuple(first + length if i == line.dim else n for i, n in enumerate(dims))
    return b.emit("slice", x, start=starts, stop=stops, step=(1,) * len(dims))


def number_of_rank(b: LocalWriter, axes: tuple[str, ...], numbers: Sequence[int]) -> Value:
    """Return the one of some numbers that stands at this rank's place along the axes."""
    table = b.emit(
        "const", name=b.namer.fresh("local.numbers"), dtype="i64", value=tuple(numbers), shape=(len(numbers),)
    )
    return b.emit("gather", table, b.index(axes), axis=0)
