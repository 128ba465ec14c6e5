"""Products by weights of 8 and 4 bits, which stream the packed weight from memory.

In: a `matmul_q`. Out: loops

    act=i8:  for row, group:  largest value, rounded numbers, their sum          (a small part of the work)
    for panels of columns:
        for row tile:         sums [rows, columns] = 0
            for group:        whole numbers = -zero * sum of the row's group;  += bytes * numbers, two or four each
                              sums += whole numbers * scale of the weight * step of the row
            `Body.finish` for each vector

One instruction adds up four products of bytes with AVX-512 VNNI. Else elements are widened to 16 bits, so that sums of
two products stay exact. The order of the packed weight is that of quantised_packing.py.

Limits of the speed: one row reads each byte once, from memory. Up to six rows share a tile; more rows read a panel
again from the second cache. Order of sums: by groups along k, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.arithmetic import absolute, unfolded
from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, unravel
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, i32, literal
from penstock.backends.tvm.target import TargetMachine
from penstock.ir.graph import Op
from penstock.ir.interpreter.ops.quantised import LEAST
from penstock.ir.ops import complete_attrs, integer
from penstock.ir.types import ITEM_BYTES

from .quantised_packing import QuantisedPacking, QuantisedSizes

# Rows of a tile, and panels beside each other, by the registers there are.
_ROWS, _PANELS = {16: 6, 8: 3, 4: 3}, {16: 2, 8: 1, 4: 1}
# Steps of a group that are written out.
_UNROLLED = 8


def _ramp(start: Expr | int, lanes: int) -> Expr:
    start = i32(start) if isinstance(start, int) else start
    return tirx.Ramp(start, 1, lanes) if lanes > 1 else start


def _spread(value: Expr, lanes: int) -> Expr:
    return tirx.Broadcast(value, lanes)


def emit_matmul_q(body: Body, op: Op) -> None:
    """Emit a product by a weight of 8 or 4 bits."""
    attrs = complete_attrs(op)
    if attrs["act"] == "i8" and not rounds_rows(body.machine):
        raise NotOneKernel("the processor multiplies no vectors of 16-bit numbers")
    QuantisedProduct(body, op, sizes_of(body.machine, op)).run(str(attrs["act"]))


def rounds_rows(machine: TargetMachine) -> bool:
    """Return whether rows can be rounded to 8 bits, and multiplied as whole numbers."""
    return machine.lanes < 16 or machine.has_byte_products or machine.has_words


def sizes_of(machine: TargetMachine, op: Op) -> QuantisedSizes:
    """Return the sizes of a product by a weight in groups, and of the packed weight."""
    attrs, x, scales = complete_attrs(op), op.ins[0].type, op.ins[2].type
    # Without AVX2 there is no instruction that widens halves.
    scale_bytes = ITEM_BYTES[scales.dtype] if machine.lanes > 4 else 4
    return QuantisedSizes(
        rows=prod(x.dims[:-1]),
        n=op.ins[1].type.dims[0],
        k=x.dims[-1],
        bits=integer(attrs["bits"]),
        group=integer(attrs["group"]),
        lanes=machine.lanes,
        depth=4 if machine.has_byte_products else 2,
        scale_bytes=scale_bytes,
        has_zeros=len(op.ins) > 3,
    )


@dataclass(frozen=True)
class RoundedRows:
    """The rows of x as kernels read them: numbers, and for each group the step and the sum of numbers. With floats
    there are numbers alone."""

    numbers: Buffer
    steps: Buffer | None = None
    sums: Buffer | None = None


class QuantisedProduct:
    """The emitter of the loops of one product."""

    def __init__(self, body: Body, op: Op, sizes: QuantisedSizes) -> None:
        self.body, self.op, self.s, self.emit = body, op, sizes, body.emit
        self.lead = op.ins[0].type.dims[:-1]

    def run(self, act: str) -> None:
        s, body = self.s, self.body
        packing = self._packing()
        packed = body.packed_ahead(self.op, s.size, "i32", packing.fill)
        if packed is None:
            packed = self.emit.alloc(s.size, "i32", "packed")
            packing.fill(packed)
        rows = self._rounded() if act == "i8" else self._copied()
        height = ceil_div(s.rows, ceil_div(s.rows, _ROWS[s.lanes]))
        wide = 1 if height == 1 else _PANELS[s.lanes]
        count, odd = divmod(s.panels, wide)
        kind = parallel_if(body.machine, s.rows * s.n * s.k // 8)
        with self.emit.loop(count, kind, "jo") as jo, body.point():
            last = s.n % s.lanes if not odd else 0
            self._panels(QuantisedTile(packed, rows, jo * wide, wide, height), last if count == 1 else None)
        if odd:
            with body.point():
                self._panels(QuantisedTile(packed, rows, i32(count * wide), odd, height), s.n % s.lanes)

    def _packing(self) -> QuantisedPacking:
        return QuantisedPacking(self.body, self.op, self.s)

    # ------------------------------------------------------------------------------ rows of x

    def _place(self, i: Expr) -> Index:
        return unravel(i, self.lead) if self.lead else ()

    def _copied(self) -> RoundedRows:
        """Copy x, so that all tiles read plain numbers."""
        s, emit, x = self.s, self.emit, self.op.ins[0]
        numbers = emit.alloc(s.rows * s.k, "f32", "x")
        with emit.loop(s.rows, parallel_if(self.body.machine, s.rows * s.k), "i") as i, self.body.point():
            for c, _ in emit.spans(s.k, s.lanes, name="k"):
                with self.body.point():
                    emit.store(numbers, self.body.at(x, (*self._place(i), c)), i * s.k + c)
        return RoundedRows(numbers)

    def _rounded(self) -> RoundedRows:
        """Round the groups of all rows of x."""
        s, emit = self.s, self.emit
        numbers = emit.scratch(s.rows * s.k, "int8" if s.depth == 4 else "int16", "xq")
        steps = emit.alloc(s.rows * s.groups, "f32", "steps")
        sums = emit.alloc(s.rows * s.groups, "i32", "sums")
        rounded = RoundedRows(numbers, steps, sums)
        kind = parallel_if(self.body.machine, s.rows * s.k)
        with emit.loop(s.rows, kind, "i") as i, emit.loop(s.groups, SERIAL, "g") as g, self.body.point():
            self._round(rounded, i, g)
        return rounded

    def _round(self, rounded: RoundedRows, i: Expr, g: Expr) -> None:
        s, emit, lanes = self.s, self.emit, self.s.lanes
        values = emit.alloc(s.group, "f32", "x")
        top, spoilt = emit.alloc(lanes, "f32", "top"), emit.alloc(lanes, "f32", "spoilt")
        total = emit.alloc(lanes, "i32", "total")
        nothing = emit.bind(unfolded(literal(0, "f32")), "nothing")
        for buffer, zero in ((top, literal(0, "f32")), (spoilt, literal(0, "f32")), (total, i32(0))):
            emit.store(buffer, _spread(zero, lanes), _ramp(0, lanes))
        for first in range(0, s.group, lanes):
            with emit.loop(lanes, VECTOR, "l") as lane, self.body.point():
                value = self.body.at(self.op.ins[0], (*self._place(i), g * s.group + (lane + first)))
                emit.store(values, value, lane + first)
                size, before = emit.bind(absolute(value)), tirx.BufferLoad(top, [lane])
                emit.store(top, tirx.Select(size > before, size, before), lane)
                # 0 * x is nan where x is not finite.
                emit.store(spoilt, tirx.BufferLoad(spoilt, [lane]) + value * nothing, lane)
        largest = emit.bind(self._folded(top, larger=True), "largest")
        spoil = emit.bind(self._folded(spoilt), "spoil")
        counts = largest >= literal(LEAST, "f32")
        factor = emit.bind(tirx.Select(counts, literal(127, "f32") / largest, literal(0, "f32")), "factor")
        at = i * s.groups + g
        assert rounded.steps is not None
        assert rounded.sums is not None
        emit.store(rounded.steps, largest / literal(127, "f32") + spoil, at)
        kind = str(rounded.numbers.dtype)
        for first in range(0, s.group, lanes):
            with emit.loop(lanes, VECTOR, "l") as lane:
                scaled = tirx.BufferLoad(values, [lane + first]) * factor
                number = emit.bind(tirx.Cast("int32", tirx.nearbyint(scaled)))
                place = i * s.k + g * s.group + (lane + first)
                emit.store(rounded.numbers, tirx.Cast(kind, number), place)
                emit.store(total, tirx.BufferLoad(total, [lane]) + number, lane)
        emit.store(rounded.sums, self._folded(total), at)

    def _folded(self, buffer: Buffer, *, larger: bool = False) -> Expr:
        """Fold a vector to its sum, or its largest element."""
        half = self.s.lanes
        while half > 1:
            half //= 2
            with self.emit.loop(half, VECTOR if half > 1 else SERIAL, "l") as lane:
                a, b = tirx.BufferLoad(buffer, [lane]), tirx.BufferLoad(buffer, [lane + half])
                self.emit.store(buffer, tirx.Select(a > b, a, b) if larger else a + b, lane)
        return tirx.BufferLoad(buffer, [i32(0)])

    # ------------------------------------------------------------------------------ tiles

    def _panels(self, tile: QuantisedTile, last: int | None) -> None:
        """Emit all rows of some panels. `last` are the columns of the last of them, 0 for a whole vector; None if that
        has to be looked at."""
        count, odd = divmod(self.s.rows, tile.height)
        with self.emit.loop(count, SERIAL, "io") as io, self.body.point():
            self._tile(tile, io * tile.height, tile.height, last)
        if odd:
            with self.body.point():
                self._tile(tile, i32(count * tile.height), odd, last)

    def _tile(self, tile: QuantisedTile, start: Expr, height: int, last: int | None) -> None:
        s, emit, lanes = self.s, self.emit, self.s.lanes
        sums = [[emit.alloc(lanes, "f32", "acc") for _ in range(tile.wide)] for _ in range(height)]
        for row in sums:
            for acc in row:
                emit.store(acc, _spread(literal(0, "f32"), lanes), _ramp(0, lanes))
        with emit.loop(s.groups, SERIAL, "g") as g, self.body.point():
            if tile.rows.steps is None:
                self._float_group(tile, start, g, sums)
            else:
                self._whole_group(tile, start, g, sums)
        done = emit.alloc(height * tile.wide * lanes, "f32", "tile")
        for r, row in enumerate(sums):
            for v, acc in enumerate(row):
                at = (r * tile.wide + v) * lanes
                emit.store(done, tirx.BufferLoad(acc, [_ramp(0, lanes)]), _ramp(at, lanes))
        self._finish(tile, start, height, done, last)

    def _finish(self, tile: QuantisedTile, start: Expr, height: int, done: Buffer, last: int | None) -> None:
        s, emit, width = self.s, self.emit, tile.wide * self.s.lanes
        out = self.op.outs[0]

        def finish(columns: int) -> None:
            with emit.loop(height, SERIAL, "r") as row:
                for c, _ in emit.spans(columns, s.lanes):
                    with self.body.point():
                        place = (*self._place(start + row), tile.first * s.lanes + c)
                        value = self._finished(tile, start + row, place[-1], tirx.BufferLoad(done, [row * width + c]))
                        self.body.finish({out: (value, place)})

        if last is not None or s.n % s.lanes == 0 or s.panels % tile.wide:
            finish(width - s.lanes + last if last else width)
            return
        # The last turn of the loop over panels has fewer columns.
        at_end = tirx.EQ(tile.first + tile.wide, s.panels)
        with emit.when(tirx.Not(at_end)):
            finish(width)
        with emit.when(at_end):
            finish(width - s.lanes + s.n % s.lanes)

    def _finished(self, tile: QuantisedTile, row: Expr, column: Expr, value: Expr) -> Expr:
        """Return an element of the product, from what was added up for it."""
        return value

    def _whole_group(self, tile: QuantisedTile, start: Expr, g: Expr, sums: list[list[Buffer]]) -> None:
        """Add up one group in whole numbers, then add it to the sums."""
        s, emit, lanes, rows = self.s, self.emit, self.s.lanes, tile.rows
        assert rows.steps is not None
        assert rows.sums is not None
        places = [emit.bind((start + r) * s.groups + g, "at") for r in range(len(sums))]
        totals = [[emit.alloc(lanes, "i32", "n") for _ in range(tile.wide)] for _ in sums]
        for v in range(tile.wide):
            zeros = self._zeros(tile, v, g)
            for total, at in zip(totals, places, strict=True):
                sum_of_row = _spread(tirx.BufferLoad(rows.sums, [at]), lanes)
                emit.store(total[v], _spread(i32(0), lanes) - zeros * sum_of_row, _ramp(0, lanes))

        self._add_products(tile, start, g, totals)
        for v in range(tile.wide):
            scale = _kept(self.body, self._scales(tile, v, g), "s")
            for r, at in enumerate(places):
                whole = tirx.Cast(_f32(lanes), tirx.BufferLoad(totals[r][v], [_ramp(0, lanes)]))
                factor = scale * _spread(tirx.BufferLoad(rows.steps, [at]), lanes)
                acc = sums[r][v]
                emit.store(acc, tirx.BufferLoad(acc, [_ramp(0, lanes)]) + whole * factor, _ramp(0, lanes))

    def _add_products(self, tile: QuantisedTile, start: Expr, g: Expr, totals: list[list[Buffer]]) -> None:
        """Add the products of the elements of a group to whole numbers."""
        s, emit, lanes, rows = self.s, self.emit, self.s.lanes, tile.rows

        def step(k: Expr) -> None:
            """Add the products of the elements from `k` on of the group."""
            words = [self._bytes(tile, v, g * s.group + k) for v in range(tile.wide)]
            for part in range(8 // s.bits):
                held = [_kept(self.body, self._wide(parts[part]), "b") for parts in words]
                for r, total in enumerate(totals):
                    first = (start + r) * s.k + g * s.group + k + part * s.depth
                    factor = self._spread_numbers(rows.numbers, first)
                    for v, b in enumerate(held):
                        emit.store(total[v], self._dot(total[v], b, factor), _ramp(0, lanes))

        self._steps(step)

    def _float_group(self, tile: QuantisedTile, start: Expr, g: Expr, sums: list[list[Buffer]]) -> None:
        """Add up the products of x and the weight less its zero, then add them to the sums, times the scale."""
        s, emit, lanes = self.s, self.emit, self.s.lanes
        totals = [[emit.alloc(lanes, "f32", "n") for _ in range(tile.wide)] for _ in sums]
        for total in totals:
            for acc in total:
                emit.store(acc, _spread(literal(0, "f32"), lanes), _ramp(0, lanes))
        zeros = [_kept(self.body, tirx.Cast(_f32(lanes), self._zeros(tile, v, g)), "z") for v in range(tile.wide)]

        def step(k: Expr) -> None:
            words = [self._bytes(tile, v, g * s.group + k) for v in range(tile.wide)]
            for part in range(8 // s.bits):
                for d in range(s.depth):
                    for v in range(tile.wide):
                        number = tirx.bitwise_and(self._lanes_of(words[v][part], d), _spread(i32(255), lanes))
                        element = _kept(self.body, tirx.Cast(_f32(lanes), number) - zeros[v], "b")
                        for r, total in enumerate(totals):
                            at = (start + r) * s.k + g * s.group + k + (part * s.depth + d)
                            factor = _spread(tirx.BufferLoad(tile.rows.numbers, [at]), lanes)
                            value = tirx.BufferLoad(total[v], [_ramp(0, lanes)]) + factor * element
                            emit.store(total[v], value, _ramp(0, lanes))

        self._steps(step)
        for v in range(tile.wide):
            scale = _kept(self.body, self._scales(tile, v, g), "s")
            for r, total in enumerate(totals):
                value = tirx.BufferLoad(total[v], [_ramp(0, lanes)]) * scale
                acc = sums[r][v]
                emit.store(acc, tirx.BufferLoad(acc, [_ramp(0, lanes)]) + value, _ramp(0, lanes))

    def _steps(self, step: Callable[[Expr], None]) -> None:
        """Emit the steps of a group, some written out in each turn."""
        s = self.s
        steps = s.group // s.step
        written = max(d for d in range(1, _UNROLLED + 1) if steps % d == 0)
        with self.emit.loop(steps // written, SERIAL, "k") as turn:
            for u in range(written):
                with self.body.point():
                    step(turn * (written * s.step) + u * s.step)

    # ------------------------------------------------------------------------------ vectors

    def _bytes(self, tile: QuantisedTile, v: int, k: Expr) -> list[Expr]:
        """Load the packed elements from `k` on of a panel, as words: one vector, or one of low and one of high
        halves."""
        s = self.s
        at = (tile.first + v) * s.panel_words + tirx.floordiv(k, s.step) * s.words
        words = _kept(self.body, tirx.BufferLoad(tile.packed, [_ramp(at, s.words)]), "w")
        if s.bits == 8:
            return [words]
        mask = _spread(i32(0x0F0F0F0F), s.words)
        return [tirx.bitwise_and(words, mask), tirx.bitwise_and(words >> _spread(i32(4), s.words), mask)]

    def _wide(self, words: Expr) -> Expr:
        """Return words as the numbers that are multiplied: bytes, or 16-bit numbers."""
        s = self.s
        count = s.lanes * s.depth
        numbers = tirx.reinterpret(f"uint8x{count}", words)
        return numbers if s.depth == 4 else tirx.Cast(f"int16x{count}", numbers)

    def _spread_numbers(self, numbers: Buffer, first: Expr) -> Expr:
        """Return `depth` numbers of a row over and over."""
        s = self.s
        few = tirx.reinterpret("int32", tirx.BufferLoad(numbers, [_ramp(first, s.depth)]))
        kind = "int8" if s.depth == 4 else "int16"
        return tirx.reinterpret(f"{kind}x{s.lanes * s.depth}", _spread(few, s.lanes))

    def _dot(self, total: Buffer, elements: Expr, numbers: Expr) -> Expr:
        """Return sums of whole numbers with the products of `depth` neighbours added to each."""
        s, before = self.s, tirx.BufferLoad(total, [_ramp(0, self.s.lanes)])
        kind = f"int32x{s.lanes}"
        if s.depth == 4:
            return tirx.call_llvm_pure_intrin(kind, "llvm.x86.avx512.vpdpbusd.512", before, elements, numbers)
        name = {16: "avx512.pmaddw.d.512", 8: "avx2.pmadd.wd", 4: "sse2.pmadd.wd"}[s.lanes]
        return before + tirx.call_llvm_pure_intrin(kind, f"llvm.x86.{name}", elements, numbers)

    def _lanes_of(self, words: Expr, d: int) -> Expr:
        """Return element `d` of each column in the lowest byte of its lane."""
        s = self.s
        if s.depth == 4:
            lanes = words
        else:
            lanes = tirx.Cast(f"int32x{s.lanes}", tirx.reinterpret(f"uint16x{s.lanes}", words))
        return lanes >> _spread(i32(8 * d), s.lanes) if d else lanes

    def _scales(self, tile: QuantisedTile, v: int, g: Expr) -> Expr:
        s = self.s
        at = s.scales_at + ((tile.first + v) * s.groups + g) * s.scale_words
        words = tirx.BufferLoad(tile.packed, [_ramp(at, s.scale_words)])
        if s.scale_bytes == 4:
            return tirx.reinterpret(_f32(s.lanes), words)
        return tirx.Cast(_f32(s.lanes), tirx.reinterpret(f"float16x{s.lanes}", words))

    def _zeros(self, tile: QuantisedTile, v: int, g: Expr) -> Expr:
        """Return the zeros of a group of packed elements."""
        s = self.s
        if not s.has_zeros:
            return _spread(i32(s.zero), s.lanes)
        at = s.zeros_at + ((tile.first + v) * s.groups + g) * s.zero_words
        words = tirx.BufferLoad(tile.packed, [_ramp(at, s.zero_words)])
        numbers = tirx.Cast(f"int32x{s.lanes}", tirx.reinterpret(f"uint8x{s.lanes}", words))
        return _kept(self.body, numbers + _spread(i32(s.shift), s.lanes), "z")


@dataclass(frozen=True)
class QuantisedTile:
    """Some panels beside each other, from number `first` on, and the rows in tiles of `height`."""

    packed: Buffer
    rows: RoundedRows
    first: Expr
    wide: int
    height: int


def _f32(lanes: int) -> str:
    return f"float32x{lanes}"


def _kept(body: Body, value: Expr, name: str) -> Expr:
    """Name a vector, so that it is computed once."""
    kind, _, lanes = str(value.ty.dtype if hasattr(value.ty, "dtype") else value.dtype).partition("x")
    buffer = body.emit.scratch(int(lanes), kind, name)
    place = _ramp(0, int(lanes))
    body.emit.add(tirx.BufferStore(buffer, value, [place]))
    return tirx.BufferLoad(buffer, [place])
