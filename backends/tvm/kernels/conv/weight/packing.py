"""Operands of a convolution's gradient for its weight, packed into words of pairs for tile registers.

In: x and dy in memory, and a LineLayout (lines.py). Out: words of a block of pairs of units,

    dy  for 32 filters [steps, 2 row tiles, parts, 16 filters, 16 lines]
    x   for 16 channels [parts, lines, 16 channels], so that 16 lines from any one on are a tile, for any tap

dy keeps its order: its rows are copied to lines with zeros between them. x is turned in registers, 16 positions of 16
channels at a time; a table says to which line each position goes. The border is zero from the start, rows of it that
lie inside for other units are made so again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx

from penstock.backends.tvm.kernels.tiles.registers import (
    LEFT_PLACES,
    PARTS,
    RIGHT_PLACES,
    SIDE,
    WORDS,
    Magnitudes,
    noted,
    pair_words,
)
from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.correlation import cover
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, i32, literal, load
from penstock.backends.tvm.kernels.tools.transpose import pieces, transpose_block

from .direct import WeightGradient
from .lines import LineLayout

# Filters that are packed together, so that words are written in longer runs.
_ROWS = 16


class WeightPacking:
    """The emitter of the packing of both operands."""

    def __init__(self, body: Body, w: WeightGradient, layout: LineLayout) -> None:
        self.body, self.w, self.layout, self.emit = body, w, layout, body.emit
        self.parts = PARTS[w.out.type.dtype]
        # Words of 16 channels.
        self.x_part = (layout.lines + layout.spare) * SIDE
        self.x_words = self.parts * self.x_part
        self.dy_words = layout.segments * layout.steps * 2 * self.parts * WORDS
        self.plane = w.sizes[0] * w.sizes[1]

    def prepare(self) -> None:
        """Fill the tables of where the lines of a tap begin, and of the line of each position of x."""
        emit, layout, w = self.emit, self.layout, self.w
        rows, columns = layout.rows, layout.columns
        self.taps = emit.alloc(w.kernel[0] * w.kernel[1], "i32", "taps")
        for r in range(rows.kernel):
            for s in range(columns.kernel):
                phase = rows.residues.index(r * rows.dilation % rows.stride) * len(columns.residues)
                phase += columns.residues.index(s * columns.dilation % columns.stride)
                line = phase * layout.phase + rows.shift(r) * layout.pitch + columns.shift(s)
                emit.store(self.taps, i32(line), i32(r * columns.kernel + s))
        self.row_lines = emit.alloc(layout.source_rows, "i32", "rows")
        column_lines = emit.alloc(columns.size, "i32", "columns")
        for buffer, count in ((self.row_lines, layout.source_rows), (column_lines, columns.size)):
            with emit.loop(count, SERIAL, "t") as t:
                emit.store(buffer, i32(-1), t)
        for number, residue in enumerate(rows.residues):
            with emit.loop(layout.height + rows.reach(residue), SERIAL, "y") as y:
                line = y * layout.pitch + number * len(columns.residues) * layout.phase
                emit.store(self.row_lines, line, y * rows.stride + residue)
        for number, residue in enumerate(columns.residues):
            first, last = columns.inside(residue, columns.out + columns.reach(residue))
            with emit.loop(max(last - first, 0), SERIAL, "v") as v:
                if last > first:
                    place = (v + first) * columns.stride + (residue - columns.low)
                    emit.store(column_lines, v + (first + number * layout.phase), place)
        self.places = emit.alloc(layout.source_rows * columns.size, "i32", "places")
        with emit.loop(layout.source_rows, SERIAL, "y") as y, emit.loop(columns.size, SERIAL, "v") as v:
            row, column = tirx.BufferLoad(self.row_lines, [y]), tirx.BufferLoad(column_lines, [v])
            line = tirx.Select(tirx.all(row >= 0, column >= 0), row + column, i32(layout.lines))
            emit.store(self.places, line * SIDE, y * columns.size + v)

    # ------------------------------------------------------------------------------ units

    def _unit(self, pair: Expr, member: int) -> tuple[Expr, Expr, Expr | None]:
        """Return the image of a unit, its first row of dy, and whether it exists (None: always)."""
        layout, emit = self.layout, self.emit
        if layout.twins:
            image = emit.bind(tirx.floordiv(pair, layout.bands) * 2 + member, "n")
            return image, emit.bind(tirx.floormod(pair, layout.bands) * layout.height, "y"), None
        number = emit.bind(pair * 2 + member, "u")
        exists = number < layout.units if member and layout.units % 2 else None
        image = emit.bind(tirx.min(tirx.floordiv(number, layout.bands), layout.images - 1), "n")
        return image, emit.bind(tirx.floormod(number, layout.bands) * layout.height, "y"), exists

    # ------------------------------------------------------------------------------ dy

    def dy(self, words: Buffer, start: Expr, group: Expr, first: Expr, height: int, block: Expr) -> Expr | None:
        """Pack filters first .. first + height, from word `start` on. Return 1 if a number is too large for tiles, else
        0; None where that cannot be."""
        emit, layout, w = self.emit, self.layout, self.w
        steps = layout.segments * layout.steps
        large = Magnitudes(emit) if self.parts > 1 else None
        size = steps * SIDE
        lines = [emit.alloc(_ROWS * size, "f32", "line") for _ in range(2)]
        for line in lines:
            for i, _ in emit.spans(_ROWS * size, SIDE):
                emit.store(line, literal(0, "f32"), i)
        for at, count in cover(emit, height, _ROWS, "o"):
            with emit.loop(count, SERIAL, "r") as r, emit.loop(layout.together, SERIAL, "j") as j, self.body.point():
                channel = emit.bind(group * w.filters + first + at + r, "channel")
                for member, line in enumerate(lines):
                    self._copy_unit(line, r * size + j * layout.dy_pitch, channel, block * layout.together + j, member)
            place = emit.bind(
                start + tirx.floordiv(at, SIDE) * (self.parts * WORDS) + tirx.floormod(at, SIDE) * SIDE, "at"
            )
            with (
                emit.loop(steps, SERIAL, "s") as s,
                emit.loop(count, SERIAL, "r") as r,
                emit.loop(SIDE, VECTOR, "l") as lane,
            ):
                pair = [tirx.BufferLoad(line, [r * size + s * SIDE + lane]) for line in lines]
                self._store(
                    words,
                    place + s * (2 * self.parts * WORDS) + r * SIDE,
                    WORDS,
                    LEFT_PLACES[self.parts],
                    lane,
                    pair,
                    large,
                )
        return emit.bind(large.too_large(), "large") if large is not None else None

    def _copy_unit(self, line: Buffer, at: Expr, channel: Expr, pair: Expr, member: int) -> None:
        emit, layout, w = self.emit, self.layout, self.w
        height, width = w.spatial
        image, first, exists = self._unit(pair, member)
        source = emit.bind(((image * (w.groups * w.filters) + channel) * height + first) * width, "source")
        with self._where(exists):
            if layout.pitch == width and height % layout.height == 0:
                for i, _ in pieces(emit, layout.height * width, SIDE):
                    emit.store(line, load(w.dy, source + i), at + i)
                return
            with (
                emit.loop(layout.height, SERIAL, "y") as y,
                self._where(first + y < height if height % layout.height else None),
            ):
                for i, _ in pieces(emit, width, SIDE):
                    emit.store(line, load(w.dy, source + y * width + i), at + y * layout.pitch + i)

    @contextmanager
    def _where(self, condition: Expr | None) -> Iterator[None]:
        if condition is None:
            yield
            return
        with self.emit.when(condition):
            yield

    def _store(
        self,
        words: Buffer,
        at: Expr,
        apart: int,
        places: Sequence[int],
        lane: Expr,
        pair: list[Expr],
        large: Magnitudes | None,
        upper: bool = False,
    ) -> None:
        """Store the words of a pair, in a vector loop, with parts `apart` words from each other. With `upper`, those of
        its second number are added to words of the first."""
        pair = [self.emit.bind(value, "x") for value in pair]
        for value in pair:
            noted(value, large)
        packed = pair_words(self.emit, [literal(0, "f32"), *pair] if upper else pair, self.parts)
        for place, word in zip(places, packed, strict=True):
            index = at + (lane + place * apart)
            self.emit.store(words, tirx.BufferLoad(words, [index]) | word if upper else word, index)

    # ------------------------------------------------------------------------------ x

    def x(self, words: Buffer, start: Expr, group: Expr, tile: Expr, block: Expr) -> Expr | None:
        """Pack the channels of tile number `tile`, from word `start` on. Return a flag that a number is too large for
        tiles, as `dy` does."""
        emit, layout = self.emit, self.layout
        large = Magnitudes(emit) if self.parts > 1 else None
        channels = self._channels(group, tile)
        with emit.loop(layout.together, SERIAL, "j") as j, self.body.point():
            at = emit.bind(start + j * (layout.x_pitch * SIDE), "at")
            units = [self._unit(emit.bind(block * layout.together + j, "pair"), member) for member in range(2)]
            # Twins are packed at once, other units one after the other into the halves of words.
            for members in ((0, 1),) if layout.twins else ((0,), (1,)):
                _, row, exists = units[members[0]]
                images = [units[m][0] for m in members]
                with self._where(exists), self.body.point():
                    first = emit.bind(row * layout.rows.stride - layout.rows.low, "first")
                    self._band(words, at, first, _PackedPlanes(channels, images, upper=members == (1,)), large)
        return emit.bind(large.too_large(), "large") if large is not None else None

    def _channels(self, group: Expr, tile: Expr) -> list[Expr]:
        """Return where the planes of the channels of a tile begin in the first image. The last channel stands in for
        missing ones."""
        w, starts = self.w, []
        for i in range(SIDE):
            channel = tile * SIDE + i
            if w.channels % SIDE:
                channel = tirx.min(channel, w.channels - 1)
            starts.append(self.emit.bind((group * w.channels + channel) * self.plane, "c"))
        return starts

    def _band(self, words: Buffer, at: Expr, first: Expr, source: _PackedPlanes, large: Magnitudes | None) -> None:
        """Pack the rows of a unit; `first` is the row of x that its table begins with, the border has numbers below
        0."""
        emit, layout = self.emit, self.layout
        size, width = layout.rows.size, layout.columns.size
        with emit.loop(layout.source_rows, SERIAL, "y") as y, self.body.point():
            line = emit.bind(tirx.BufferLoad(self.row_lines, [y]), "line")
            inside = tirx.all(first + y >= 0, first + y < size)
            if not source.upper:
                with emit.when(tirx.all(line >= 0, tirx.Not(inside))):
                    self._clear(words, at + line * SIDE)
            if layout.by_rows:
                with emit.when(tirx.all(line >= 0, inside)):
                    self._run(words, at, emit.bind((first + y) * width, "from"), y * width, width, source, large)
        if not layout.by_rows:
            begin = emit.bind(tirx.max(first, 0), "begin")
            count = emit.bind((tirx.min(first + layout.source_rows, size) - begin) * width, "count")
            self._run(words, at, begin * width, emit.bind((begin - first) * width, "place"), count, source, large)

    def _clear(self, words: Buffer, at: Expr) -> None:
        """Zero one row of lines."""
        layout = self.layout
        for phase in range(len(layout.columns.residues)):
            for part in range(self.parts):
                for i, _ in self.emit.spans(layout.pitch * SIDE, SIDE):
                    self.emit.store(words, i32(0), at + (phase * layout.phase * SIDE + part * self.x_part) + i)

    def _run(
        self,
        words: Buffer,
        at: Expr,
        start: Expr,
        place: Expr,
        count: Expr | int,
        source: _PackedPlanes,
        large: Magnitudes | None,
    ) -> None:
        """Pack `count` neighbours from `start` on, 16 at once; the last 16 may overlap. Their table begins with
        `place`."""
        emit = self.emit
        blocks = ceil_div(count, SIDE) if isinstance(count, int) else tirx.floordiv(count + (SIDE - 1), SIDE)
        with emit.loop(blocks, SERIAL, "p") as p, self.body.point():
            done = emit.bind(tirx.min(p * SIDE, count - SIDE), "done")
            turned = []
            for image in source.images:
                base = emit.bind(image * (self.w.groups * self.w.channels * self.plane) + start + done, "base")
                halves = [emit.alloc(WORDS // 2, "f32", "turned") for _ in range(2)]
                vectors = transpose_block(emit, "f32", SIDE, SIDE, self.w.x, [base + c for c in source.channels])
                for i, vector in enumerate(vectors):
                    emit.add(tirx.BufferStore(halves[i // 8], vector, [tirx.Ramp(i % 8 * SIDE, 1, SIDE)]))
                turned.append(halves)
            for i in range(SIDE):
                line = emit.bind(at + tirx.BufferLoad(self.places, [place + done + i]), "to")
                with emit.loop(SIDE, VECTOR, "l") as lane:
                    pair = [tirx.BufferLoad(halves[i // 8], [lane + i % 8 * SIDE]) for halves in turned]
                    self._store(words, line, self.x_part, RIGHT_PLACES[self.parts], lane, pair, large, source.upper)


@dataclass(frozen=True)
class _PackedPlanes:
    """Planes of one or two images that are packed into the lower, the upper, or both halves of words."""

    channels: list[Expr]
    images: list[Expr]
    upper: bool
