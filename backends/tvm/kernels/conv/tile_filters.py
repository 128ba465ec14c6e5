"""Weights of correlations in the order of tile registers.

In: a Correlation and the bands of its source. Out: words of pairs, and behind them, for each block of filters,
whether a number of it is too large for tiles,

    [group][block of filters][phase][step of 32 channels][tap][part][tile of 16 filters][16 filters, 16 pairs]

A block has 32 filters or 16. The sums of a block read them from first to last, which is as fast as memory allows.
Channels are paired as in tile_bands.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from penstock.backends.tvm.kernels.tiles.registers import (
    LEFT_PLACES,
    SIDE,
    STEP,
    WORDS,
    Magnitudes,
    noted,
    pair_ranges,
    pair_words,
)
from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.transpose import pieces

from .tile_bands import Bands


@dataclass(frozen=True)
class Filters:
    """A block of `count` filters from `first` on, within a group. Their words begin `at`, and `flag` is the place of a
    flag that a number is too large."""

    first: Expr
    count: int
    at: Expr
    flag: Expr

    @property
    def tiles(self) -> int:
        return ceil_div(self.count, SIDE)


@dataclass(frozen=True)
class _FilterBlock:
    """A block of filters of a group while it is packed, with the largest magnitude so far where numbers have parts."""

    packed: Buffer
    group: Expr
    filters: Filters
    large: Magnitudes | None


class FilterPacking:
    """The emitter of the packing of weights, in blocks of `tiles` times 16 filters."""

    def __init__(self, body: Body, bands: Bands, tiles: int) -> None:
        self.body, self.emit, self.bands, self.c = body, body.emit, bands, bands.c
        self.height = tiles * SIDE
        # Words of a tile with all its parts.
        self.words = bands.parts * WORDS
        self.taps = [prod(p.taps) for p in self.c.phases]
        self.blocks, self.last_block = divmod(self.c.filters, self.height)
        self.all_blocks = self.blocks + (1 if self.last_block else 0)
        self.steps_taps = bands.steps * sum(self.taps)
        self.tiles = ceil_div(self.c.filters, SIDE)

    @property
    def size(self) -> int:
        flags = self.c.groups * self.all_blocks if self.bands.parts > 1 else 0
        return self._group_words * self.c.groups + flags

    @property
    def _group_words(self) -> int:
        return self.tiles * self.steps_taps * self.words

    @property
    def block_words(self) -> int:
        return self.height // SIDE * self.steps_taps * self.words

    def block(self, group: Expr, number: Expr, count: int) -> Filters:
        at = group * self._group_words + number * self.block_words
        flag = group * self.all_blocks + number + self.c.groups * self._group_words
        return Filters(number * self.height, count, self.emit.bind(at, "a"), self.emit.bind(flag, "flag"))

    def phase_at(self, filters: Filters, phase: int) -> Expr:
        return filters.at + filters.tiles * self.bands.steps * sum(self.taps[:phase]) * self.words

    def fill(self, packed: Buffer, kind: object) -> None:
        """Pack all filters."""
        emit, c = self.emit, self.c
        with emit.loop(c.groups, kind, "g") as g, self.body.point():
            if self.blocks:
                with emit.loop(self.blocks, kind if c.groups == 1 else SERIAL, "jo") as jo, self.body.point():
                    self._block(packed, g, self.block(g, jo, self.height))
            if self.last_block:
                with emit.loop(1), self.body.point():
                    self._block(packed, g, self.block(g, literal(self.blocks, "i32"), self.last_block))

    def _block(self, packed: Buffer, group: Expr, filters: Filters) -> None:
        emit = self.emit
        block = _FilterBlock(packed, group, filters, Magnitudes(emit) if self.bands.parts > 1 else None)
        whole, tail = divmod(self.c.channels, STEP)
        for number in range(len(self.c.phases)):
            if not self.taps[number]:
                continue
            base = emit.bind(self.phase_at(filters, number), "at")
            for tile in range(filters.tiles):
                rows = min(filters.count - tile * SIDE, SIDE)
                with emit.loop(rows, SERIAL, "r") as r, self.body.point():
                    row = emit.bind(filters.first + tile * SIDE + r, "o")
                    at = emit.bind(base + tile * WORDS + r * SIDE, "at")
                    with emit.loop(whole, SERIAL, "s") as s, self.body.point():
                        if whole:
                            self._step(block, number, at, row, s, STEP)
                    if tail:
                        with self.body.point():
                            self._step(block, number, at, row, literal(whole, "i32"), tail)
        if block.large is not None:
            emit.store(packed, block.large.too_large(), filters.flag)

    def _step(self, block: _FilterBlock, number: int, start: Expr, row: Expr, s: Expr, count: int) -> None:
        """Pack one filter's weights for the channels of a step of phase `number`, tap by tap."""
        emit, parts, tiles, phase = self.emit, self.bands.parts, block.filters.tiles, self.c.phases[number]
        rows, columns = phase.taps
        with emit.loop(rows, SERIAL, "i") as i, emit.loop(columns, SERIAL, "j") as j, self.body.point():
            at = emit.bind(start + (s * self.taps[number] + i * columns + j) * (tiles * self.words), "at")
            for first, last, exist in pair_ranges(count):
                for q, _ in pieces(emit, last - first, SIDE):
                    with self.body.point():
                        place = q + first if first else q
                        channels = [s * STEP + place + SIDE * other for other in range(exist)]
                        pair = [self.c.weight(block.group, row, channel, *phase.tap(i, j)) for channel in channels]
                        for value in pair:
                            noted(value, block.large)
                        for part, word in zip(LEFT_PLACES[parts], pair_words(emit, pair, parts), strict=True):
                            target = at + place + part * (tiles * WORDS) if part else at + place
                            emit.store(block.packed, word, target)
