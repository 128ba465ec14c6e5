"""Weights of correlations in the order of tile registers.

In: a Correlation and the bands of its source. Out: words of pairs, and behind them, for each block of filters,
whether a number of it is too large for tiles,

    [group][block of filters][phase][step of 32 channels][tap][part][tile of 16 filters][16 filters, 16 pairs]

with 32 filters in a block, or 16, so that the sums of a block read them from first to last, which is as fast as memory gives them.
Channels are paired as in tile_bands.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from penstock.backends.tvm.kernels.tiles.registers import LEFT_PLACES, SIDE, STEP, WORDS, Magnitudes, pair_words
from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.correlation import Phase
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.transpose import pieces

from .tile_bands import Bands


@dataclass(frozen=True)
class Filters:
    """`count` filters from `first` on, a block of a group; their words begin `at`, and `flag` is
    where it stands whether one is too large."""

    first: Expr
    count: int
    at: Expr
    flag: Expr

    @property
    def tiles(self) -> int:
        return ceil_div(self.count, SIDE)


class FilterPacking:
    def __init__(self, body: Body, bands: Bands, tiles: int) -> None:
        """`tiles` of 16 filters in a block."""
        self.body, self.emit, self.bands, self.c = body, body.emit, bands, bands.c
        self.height = tiles * SIDE
        # Words of a tile with all its parts.
        self.words = bands.parts * WORDS
        self.taps = [prod(p.taps) for p in self.c.phases]
        self.blocks, self.rest = divmod(self.c.filters, self.height)
        self.all_blocks = self.blocks + (1 if self.rest else 0)
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
        """All of them."""
        emit, c = self.emit, self.c
        with emit.loop(c.groups, kind, "g") as g, self.body.point():
            if self.blocks:
                with emit.loop(self.blocks, kind if c.groups == 1 else SERIAL, "jo") as jo, self.body.point():
                    self._block(packed, g, self.block(g, jo, self.height))
            if self.rest:
                with emit.loop(1), self.body.point():
                    self._block(packed, g, self.block(g, literal(self.blocks, "i32"), self.rest))

    def _block(self, packed: Buffer, group: Expr, filters: Filters) -> None:
        emit = self.emit
        large = Magnitudes(emit) if self.bands.parts > 1 else None
        whole, rest = divmod(self.c.channels, STEP)
        for number, phase in enumerate(self.c.phases):
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
                            self._step(packed, at, number, phase, filters.tiles, group, row, s, STEP, large)
                    if rest:
                        with self.body.point():
                            self._step(
                                packed, at, number, phase, filters.tiles, group, row, literal(whole, "i32"), rest, large
                            )
        if large is not None:
            emit.store(packed, large.too_large(), filters.flag)

    def _step(
        self,
        packed: Buffer,
        start: Expr,
        number: int,
        phase: Phase,
        tiles: int,
        group: Expr,
        row: Expr,
        s: Expr,
        count: int,
        large: Magnitudes | None,
    ) -> None:
        """One filter's weights for the channels of a step, tap by tap."""
        emit, bands = self.emit, self.bands
        both, one = max(count - SIDE, 0), min(count, SIDE)
        rows, columns = phase.taps
        with emit.loop(rows, SERIAL, "i") as i, emit.loop(columns, SERIAL, "j") as j, self.body.point():
            at = emit.bind(start + (s * self.taps[number] + i * columns + j) * (tiles * self.words), "at")
            for first, last, exist in ((0, both, 2), (both, one, 1), (one, SIDE, 0)):
                for q, _ in pieces(emit, last - first, SIDE):
                    with self.body.point():
                        place = q + first if first else q
                        pair = [
                            self.c.weight(group, row, s * STEP + place + SIDE * other, *phase.tap(i, j))
                            for other in range(exist)
                        ]
                        if large is not None:
                            for value in pair:
                                large.note(value)
                        for part, word in zip(
                            LEFT_PLACES[bands.parts], pair_words(emit, pair, bands.parts), strict=True
                        ):
                            emit.store(packed, word, at + place + part * (tiles * WORDS) if part else at + place)
