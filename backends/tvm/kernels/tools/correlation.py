"""Correlations, the common form of convolutions and of the gradients for their inputs.

In: a Correlation, made by conv/conv.py of an operation. Out: `BorderedSource`, which reads the source with a border of
zeros around it, and the cut of positions into strips and tiles. conv/register_tiles.py has output channels in
lanes, conv/lines.py positions of a row.

A phase is a regular subset of output positions that use the same taps: the gradient for the input of a convolution with
stride s has s of them per dimension, a convolution one. Limits: two spatial dimensions (one is two of which the first
has size 1), floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from penstock.ir.graph import Op, Value
from penstock.ir.types import ITEM_BYTES

from .body import Body
from .elements import Index
from .emit import SERIAL, VECTOR, Buffer, Emitter, Expr, ceil_div, compute_dtype, literal, load
from .transpose import pieces, separate_pairs

Pair = tuple[int, int]
# Positions of a strip: with two vectors of channels its sums take a third of a first-level cache.
_STRIP = 128
_LINE_BYTES = 64


@dataclass(frozen=True)
class Phase:
    """A phase of a correlation: output positions first, first + step, ... (counts of them); `shift` is where the first
    window starts in the source with its border. `tap(r, s)` is the index of the weight's element."""

    first: Pair
    counts: Pair
    shift: Pair
    taps: Pair
    tap: Callable[[Expr, Expr], tuple[Expr, Expr]]


@dataclass(frozen=True)
class Correlation:
    """A correlation of a source with a weight, in groups.

    out[n, g, o, first + step * p] =
        sum over c, r, s of  source[n, g, c, p * stride + (r, s) * dilation + shift - low] * weight[g, o, c, tap]
    """

    out: Value
    images: int
    groups: int
    filters: int
    channels: int
    sizes: Pair
    low: Pair
    padded: Pair
    strides: Pair
    dilations: Pair
    step: Pair
    spatial: Pair
    phases: tuple[Phase, ...]
    source: Callable[[Expr, Expr, Expr, Expr], Expr]
    weight: Callable[[Expr, Expr, Expr, Expr, Expr], Expr]
    place: Callable[[Expr, Expr, Expr, Expr], Index]
    # The flat buffer of the source, if it is read from memory as it is.
    plain: Buffer | None
    # The flat buffer of the weight, if it is read from memory as it is, and whether output channels come first in it.
    # Taps come last in any case.
    stored: Buffer | None
    filters_first: bool
    kernel: Pair
    op: Op
    # True where taps outside the source are products with zero, which shows where weights are infinite. Otherwise they
    # are absent.
    counts_border: bool

    @property
    def dtype(self) -> str:
        return compute_dtype(self.out.type.dtype)

    @property
    def needs_border(self) -> bool:
        return (
            self.plain is None or self.low != (0, 0) or any(p > s for p, s in zip(self.padded, self.sizes, strict=True))
        )


def most_rows(body: Body, vectors: int) -> int:
    """Return the rows of a tile whose sums fit the registers, beside a row of vectors and one factor."""
    registers = 32 if body.machine.rows >= 12 else 16
    return min((registers - 1 - vectors) // vectors, 14)


def strip_rows(spatial: Pair, step: int, lanes: int) -> int:
    """Return the rows of a strip: a whole number of steps, with as few positions as possible behind the last whole
    vector."""
    rows, columns = spatial
    best, best_score = step, (2.0, 0)
    for count in range(step, max(rows, step) + step, step):
        positions = min(count, rows) * columns
        if count > step and positions > 2 * _STRIP:
            break
        whole, tail = divmod(rows, count)
        cost = (whole * ceil_div(count * columns, lanes) + ceil_div(tail * columns, lanes)) * lanes / (rows * columns)
        score = (round(cost, 2), -count)
        if score < best_score:
            best, best_score = count, score
    return min(best, rows)


class BorderedSource:
    """The source with its border, read from a copy or in place."""

    def __init__(self, body: Body, c: Correlation, in_place: bool = False) -> None:
        self.body, self.c, self.emit = body, c, body.emit
        self.buffer: Buffer | None = None
        self.whole_batch = False
        self.split = 1
        self.height, self.width = c.padded if c.needs_border and not in_place else c.sizes

    def split_columns(self, extra: int) -> None:
        """Keep columns apart by their remainder modulo the stride, with some more behind the end for whole vectors."""
        self.split = self.c.strides[1]
        self.height, self.width = self.c.padded[0], ceil_div(self.c.padded[1], self.split) + extra

    @property
    def parts(self) -> list[int]:
        """The place of each remainder's first column in a row."""
        return [remainder * self.width for remainder in range(self.split)]

    @property
    def plane(self) -> int:
        return self.height * self.width * self.split

    def alloc(self, whole_batch: bool) -> None:
        self.whole_batch = whole_batch
        c = self.c
        self.buffer = self.emit.alloc(
            (c.images if whole_batch else 1) * c.groups * c.channels * self.plane, c.dtype, "xp"
        )

    def hold_rows(self, rows: int) -> None:
        """Hold only so many rows of an image, the border counted."""
        self.height = rows

    def copy_rows(self, image: Expr, top: Expr) -> None:
        """Copy the rows of an image from `top` on, the border counted; those outside of the image are zero."""
        emit, c = self.emit, self.c
        lanes, pitch = lanes_of(self.body, c), self.width * self.split
        with emit.loop(c.groups * c.channels, SERIAL, "c") as channel, emit.loop(self.height, SERIAL, "q") as q:
            h = emit.bind(top + q - c.low[0], "h")
            line = emit.bind(channel * self.plane + q * pitch, "line")
            inside = tirx.all(h >= 0, h < c.sizes[0])
            with emit.when(inside), self.body.point():
                for begin, count in self._empty_columns():
                    for i, _ in pieces(emit, count, lanes):
                        emit.store(self.buffer, literal(0, c.dtype), line + begin + i)
                copy_line(self.body, c, (image, channel, h), self.buffer, line, self.parts)
            with emit.when(tirx.Not(inside)):
                for i, _ in emit.spans(pitch, lanes):
                    emit.store(self.buffer, literal(0, c.dtype), line + i)

    def _empty_columns(self) -> list[Pair]:
        """Return the first place and the number of each run in a row of the copy that no column of the source goes
        to."""
        c, runs = self.c, list[Pair]()
        columns = range(max(-c.low[1], 0), min(c.sizes[1], c.padded[1] - c.low[1]))
        filled = {(w + c.low[1]) % self.split * self.width + (w + c.low[1]) // self.split for w in columns}
        for place in range(self.width * self.split):
            if place not in filled:
                begin, count = runs.pop() if runs and sum(runs[-1]) == place else (place, 0)
                runs.append((begin, count + 1))
        return runs

    def copy(self, image: Expr, kind: Any = SERIAL) -> None:
        """Copy an image with its border; `kind` is that of the loop over its channels."""
        emit, c, body = self.emit, self.c, self.body
        lanes = lanes_of(body, c)
        rows = min(c.sizes[0], c.padded[0] - c.low[0])
        # With a negative border the source starts later.
        first = max(-c.low[0], 0), max(-c.low[1], 0)
        columns = min(c.sizes[1], c.padded[1] - c.low[1])
        with emit.loop(c.groups * c.channels, kind, "c") as channel:
            start = emit.bind(
                ((image * (c.groups * c.channels) if self.whole_batch else 0) + channel) * self.plane, "at"
            )
            for i, _ in emit.spans(self.plane, lanes):
                emit.store(self.buffer, literal(0, c.dtype), start + i)
            if rows <= first[0] or columns <= first[1]:
                return
            with emit.loop(rows - first[0], SERIAL, "h") as h:
                h = h + first[0] if first[0] else h
                line = emit.bind(start + (h + c.low[0]) * (self.width * self.split), "line")
                copy_line(body, c, (image, channel, h), self.buffer, line, self.parts)

    def position(self, image: Expr, channel: Expr, h: Expr, w: Expr, remainder: Expr = 0) -> Expr:
        """Return the position of element (h, w), the border counted; `w` counts columns with that remainder."""
        if self.whole_batch or self.buffer is None:
            channel = image * (self.c.groups * self.c.channels) + channel
        return channel * self.plane + h * (self.width * self.split) + remainder * self.width + w

    def load(self, position: Expr) -> Expr:
        return load(self.c.plain if self.buffer is None else self.buffer, position)


def lanes_of(body: Body, c: Correlation) -> int:
    """Return the elements of a vector of the type that is computed in."""
    return max(body.lanes * 4 // ITEM_BYTES[c.dtype], 1)


def aligned_parts(c: Correlation, split: int, width: int, lanes: int) -> tuple[list[int], int]:
    """Return where each remainder's first column lies in a row of a copy, and how long a row is. Each remainder has
    room for `width` columns.

    What is copied of the source begins at a multiple of a vector, because stores that cross lines are slow. Short rows
    lie close together."""
    while lanes > 1 and ceil_div(c.sizes[1], split) < lanes:
        lanes //= 2
    parts, end, first = [], 0, max(-c.low[1], 0) + c.low[1]
    for remainder in range(split):
        end += -(end + ceil_div(first - remainder, split)) % lanes
        parts.append(end)
        end += width
    return parts, ceil_div(end, lanes) * lanes


def copy_line(
    body: Body, c: Correlation, place: tuple[Expr, Expr, Expr], target: Buffer, line: Expr, parts: Sequence[int]
) -> None:
    """Copy a row of the source, at `place` (image, channel, row), behind its border to `target` from `line` on.
    Columns lie apart by their remainder modulo the number of `parts`, each from its place in the row on."""
    emit, lanes = body.emit, lanes_of(body, c)
    split = len(parts)
    low, first, last = c.low[1], max(-c.low[1], 0), min(c.sizes[1], c.padded[1] - c.low[1])
    if last <= first:
        return
    if split == 2 and first == 0 and c.plain is not None and c.out.type.dtype == c.dtype:
        image, channel, h = place
        start = emit.bind(((image * (c.groups * c.channels) + channel) * c.sizes[0] + h) * c.sizes[1], "row")
        while lanes > 1:
            targets = [(target, line + (parts[(b + low) % 2] + (first + b + low) // 2)) for b in (0, 1)]
            with emit.loop((last - first) // (2 * lanes), SERIAL, "v") as v:
                places = [(buffer, at + v * lanes) for buffer, at in targets]
                separate_pairs(emit, lanes, (c.plain, start + (v * (2 * lanes) + first)), places)
            first += (last - first) // (2 * lanes) * (2 * lanes)
            lanes //= 2
    for remainder in range(split):
        # Columns w with (w + low) % split == remainder.
        begin = first + (remainder - first - low) % split
        count = ceil_div(last - begin, split)
        if count <= 0:
            continue
        at = line + (parts[remainder] + (begin + low) // split)
        for w in _overlapping(emit, count, lanes):
            with body.point():
                emit.store(target, c.source(*place, w * split + begin), at + w)


def _overlapping(emit: Emitter, extent: int, lanes: int) -> Iterator[Expr]:
    """Cover 0 .. extent-1 in vectors: the last ones end where the extent does, and go over some elements twice."""
    while lanes > extent:
        lanes //= 2
    whole, tail = divmod(extent, lanes)
    with emit.loop(whole, SERIAL, "p") as outer, emit.loop(lanes, VECTOR, "l") as lane:
        yield outer * lanes + lane
    if tail:
        while lanes // 2 >= tail:
            lanes //= 2
        with emit.loop(lanes, VECTOR, "l") as lane:
            yield lane + (extent - lanes)


def ask_for_results(body: Body, out: Value, start: Expr, count: int) -> None:
    """Ask for the lines of memory that `count` results from element `start` on will be stored to.

    Threads take them from each other: results lie where others, which all threads have read, lay before. A store that
    waits for its line holds up those behind it, but a line that is asked for comes while sums are computed.
    """
    for value in body.group.outs:
        if value.type == out.type:
            for i in range(0, count, _LINE_BYTES // ITEM_BYTES[out.type.dtype]):
                body.emit.prefetch(body.result(value), start + i)


def cover(emit: Emitter, extent: int, size: int, name: str) -> Iterator[tuple[Expr, int]]:
    """Cover an extent in parts of one size and a smaller last one: yields the first element and the size."""
    whole, tail = divmod(extent, size)
    if whole:
        with emit.loop(whole, SERIAL, name) as i:
            yield (i * size if whole > 1 else literal(0, "i32")), size
    if tail:
        yield literal(whole * size, "i32"), tail
