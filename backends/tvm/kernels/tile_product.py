"""Products of bf16 on tile registers (Intel AMX): 16 rows of 32 numbers times 32 of 16, added up in f32, by one instruction.

In: a Product of bf16, as for product.py, which does the same for everybody else. Out: loops

    for block along k:
      for block of rows:          pack A [row tiles, steps, 16 rows, 16 pairs]
        for 32 columns:           pack B [steps, column tiles, 16 pairs, 16 columns]
          for 32 rows:            4 tiles of sums += for each step 2 tiles of A times 2 of B
                                  store the sums, and `Body.finish` for each vector of them

A pair is two neighbours along k in one 32-bit word. An operand that is contiguous along k has its pairs in memory, one that is contiguous along
rows or columns gets them from two lines; A wants rows, B wants pairs outside, and one that comes the other way is transposed in registers.
Operands are bf16 already, or rounded as they are read, so that the upper half of an f32 is all of it.

Tile registers have a configuration per thread, which other libraries use too: it is put back where it was changed. Processes have to ask
the system for tile registers once (load.py).

Limits: up to 15 rows are left to product.py, for a tile of 16 costs the same; denormals count as zero, as the instruction has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from tvm import tirx

from penstock.ir.graph import slot_of
from penstock.ir.types import ITEM_BYTES

from .body import Body, parallel_if
from .elements import Index, linear, unravel
from .emit import SERIAL, Buffer, Expr, literal
from .transpose import pieces, transpose_block

if TYPE_CHECKING:
    from .product import Product

# A tile is 16 rows of 16 words; a word is a pair of bf16 or an f32.
_SIDE = 16
_WORDS = _SIDE * _SIDE
_STEP = 2 * _SIDE
_LINE = 4 * _SIDE
# Rows and columns of a block of four tiles of sums.
_BLOCK = 2 * _SIDE
_LONGEST_K = 4096
_K_BLOCK = 2048
# A packed block of A stays in a second cache of 2 MiB beside a strip of B.
_A_BYTES = 1 << 20
# Strips of B are packed together, so that rows of B are read as streams of a kilobyte, if all of them stay in that cache.
_STREAM_STRIPS = 16
_B_BYTES = 3 << 18
_A_TILES, _B_TILES = 4, 6


def suits(body: Body, p: Product) -> bool:
    """Whether the product is worth tiles, and the machine has them."""
    return body.machine.has_tiles and p.out.type.dtype == "bf16" and p.m >= _SIDE and p.n >= _SIDE and p.k >= _SIDE


def emit_tile_product(body: Body, p: Product) -> None:
    _TileProduct(body, p).run()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _i32(value: int) -> Expr:
    return literal(value, "i32")


def _bits(value: Expr) -> Expr:
    return tirx.reinterpret("uint32", value)


@dataclass(frozen=True)
class _Part:
    """The sums over k_from .. k_from + k_size. With `add`, they go on top of `partial`; without `last`, they are left there."""

    lead: Index
    k_from: Expr
    k_size: int
    partial: Buffer | None
    add: bool
    last: bool

    @property
    def steps(self) -> int:
        return _ceil(self.k_size, _STEP)


@dataclass(frozen=True)
class _Strips:
    """`count` neighbouring strips of `columns` columns, from column `first` and strip `number` on."""

    first: Expr
    number: Expr
    count: int
    columns: int


class _TileProduct:
    def __init__(self, body: Body, p: Product) -> None:
        self.body, self.p, self.emit = body, p, body.emit
        self.k_blocks = _ceil(p.k, _K_BLOCK) if p.k > _LONGEST_K else 1
        self.k_size = _ceil(_ceil(p.k, self.k_blocks), _STEP) * _STEP if self.k_blocks > 1 else p.k
        self.k_blocks = _ceil(p.k, self.k_size)
        most = _A_BYTES // (2 * _ceil(self.k_size, _STEP) * _STEP) // _BLOCK * _BLOCK
        self.row_block = p.m if p.m <= most else max(most, _BLOCK)
        self.column_tiles = _ceil(p.n, _SIDE)
        self.near = self._neighbours()
        # Otherwise B is contiguous along k, and its pairs lie in memory.
        self.b_by_pairs = p.b_along_j or not p.b_along_k

    def run(self) -> None:
        p, emit = self.p, self.emit
        batches = prod(p.batch)
        kind = parallel_if(self.body.machine, batches * p.m * p.n * p.k // 64)
        if batches == 1:
            self._matrix((_i32(0),) * len(p.batch), kind)
            return
        with emit.loop(batches, kind, "b") as b:
            lead = tuple(emit.bind(x, "b") if not isinstance(x, tirx.IntImm) else x for x in unravel(b, p.batch))
            with self._configured():
                self._matrix(lead, SERIAL)

    # ------------------------------------------------------------------------------ blocks

    def _matrix(self, lead: Index, kind: object) -> None:
        p, emit = self.p, self.emit
        if self.k_blocks == 1:
            self._part(_Part(lead, _i32(0), p.k, None, add=False, last=True), kind)
            return
        partial = emit.alloc(_ceil(p.m, _SIDE) * self.column_tiles * _WORDS, "f32", "partial")
        self._part(_Part(lead, _i32(0), self.k_size, partial, add=False, last=False), kind)
        if self.k_blocks > 2:
            with emit.loop(self.k_blocks - 2, SERIAL, "q") as q, self.body.point():
                self._part(_Part(lead, (q + 1) * self.k_size, self.k_size, partial, add=True, last=False), kind)
        done = (self.k_blocks - 1) * self.k_size
        with self.body.point():
            self._part(_Part(lead, _i32(done), p.k - done, partial, add=True, last=True), kind)

    def _part(self, part: _Part, kind: object) -> None:
        p, emit = self.p, self.emit
        whole, rest = divmod(p.m, self.row_block)
        everything: Buffer | None = None
        if whole + (rest > 0) > 1:
            # Several blocks of rows read B: it is packed once for all of them.
            everything = self._words(part.steps * self.column_tiles * _WORDS, "bp")
            self._each_group(part, kind, lambda g: self._pack_b(part, everything, self._strip_at(part, g.number), g))
        with emit.loop(whole, SERIAL, "im") as im, self.body.point():
            self._rows(part, im * self.row_block if whole > 1 else _i32(0), self.row_block, everything, kind)
        if rest:
            with self.body.point():
                self._rows(part, _i32(whole * self.row_block), rest, everything, kind)

    def _strip_at(self, part: _Part, number: Expr) -> Expr:
        return number * (2 * part.steps * _WORDS)

    def _each_group(self, part: _Part, kind: object, action: Callable[[_Strips], None]) -> None:
        """All columns, some strips of 32 at a time."""
        whole, rest = divmod(self.p.n, _BLOCK)
        together = max(min(_STREAM_STRIPS, _B_BYTES // (2 * part.steps * _WORDS * 4), whole), 1) if self.b_by_pairs else 1
        groups, left = divmod(whole, together)
        if groups:
            with self.emit.loop(groups, kind, "js") as js, self.body.point():
                action(_Strips(js * (together * _BLOCK), js * together, together, _BLOCK))
        if left:
            with self.emit.loop(1), self.body.point():
                action(_Strips(_i32(groups * together * _BLOCK), _i32(groups * together), left, _BLOCK))
        if rest:
            with self.emit.loop(1), self.body.point():
                action(_Strips(_i32(whole * _BLOCK), _i32(whole), 1, rest))

    def _rows(self, part: _Part, start: Expr, rows: int, everything: Buffer | None, kind: object) -> None:
        emit = self.emit
        packed = self._pack_a(part, start, rows)
        whole, rest = divmod(rows, _BLOCK)

        def group(g: _Strips) -> None:
            if everything is None:
                b, at = self._words(g.count * part.steps * _ceil(g.columns, _SIDE) * _WORDS, "bp"), _i32(0)
                self._pack_b(part, b, at, g)
            else:
                b, at = everything, self._strip_at(part, g.number)
            tile = emit.alloc(_BLOCK * _BLOCK, "f32", "tile")
            with ExitStack() as stack:
                if prod(self.p.batch) == 1:
                    stack.enter_context(self._configured())
                n = stack.enter_context(emit.loop(g.count, SERIAL, "n"))
                stack.enter_context(self.body.point())
                place, j = at + self._strip_at(part, n), g.first + n * _BLOCK
                with emit.loop(whole, SERIAL, "io") as io, self.body.point():
                    self._block(part, packed, io * _BLOCK, start, _BLOCK, b, place, j, g.columns, tile)
                if rest:
                    with self.body.point():
                        self._block(part, packed, _i32(whole * _BLOCK), start, rest, b, place, j, g.columns, tile)

        self._each_group(part, kind, group)

    def _block(
        self,
        part: _Part,
        packed: Buffer,
        row: Expr,
        start: Expr,
        rows: int,
        b: Buffer,
        at: Expr,
        j: Expr,
        columns: int,
        tile: Buffer,
    ) -> None:
        """Rows row .. row + rows of the packed block of A, which begins at row `start`, times a strip of B."""
        emit, p = self.emit, self.p
        down, across = _ceil(rows, _SIDE), _ceil(columns, _SIDE)
        sums = [(r, c) for r in range(down) for c in range(across)]
        first = tirx.floordiv(row, _SIDE) * (part.steps * _WORDS)

        def kept(r: int, c: int) -> Expr:
            return tirx.address_of(
                tirx.BufferLoad(
                    part.partial, [((tirx.floordiv(start + row, _SIDE) + r) * self.column_tiles + tirx.floordiv(j, _SIDE) + c) * _WORDS]
                )
            )

        for r, c in sums:
            if part.add:
                self._do("tileloadd64", self._tile(2 * r + c), kept(r, c), tirx.IntImm("int64", _LINE))
            else:
                self._do("tilezero", self._tile(2 * r + c))
        with emit.loop(part.steps, SERIAL, "s") as s:
            if part.last:
                each = _ceil(rows, part.steps)
                for u in range(each):
                    self._ask_for(p.place(part.lead, start + row + tirx.min(s * each + u, rows - 1), j), columns)
            for c in range(across):
                self._load(_B_TILES + c, b, at + (s * across + c) * _WORDS)
            for r in range(down):
                self._load(_A_TILES + r, packed, first + (s + r * part.steps) * _WORDS)
                for c in range(across):
                    self._do("tdpbf16ps", self._tile(2 * r + c), self._tile(_A_TILES + r), self._tile(_B_TILES + c))
        for r, c in sums:
            if part.last:
                place = tirx.address_of(tirx.BufferLoad(tile, [_i32((r * _BLOCK + c) * _SIDE)]))
                self._do("tilestored64", self._tile(2 * r + c), place, tirx.IntImm("int64", 4 * _BLOCK))
            else:
                self._do("tilestored64", self._tile(2 * r + c), kept(r, c), tirx.IntImm("int64", _LINE))
        if not part.last:
            return
        with emit.loop(rows, SERIAL, "r") as r:
            for c, _ in pieces(emit, columns, _SIDE):
                with self.body.point():
                    self.body.finish({p.out: (tirx.BufferLoad(tile, [r * _BLOCK + c]), p.place(part.lead, start + row + r, j + c))})

    def _neighbours(self) -> list[tuple[Buffer, str]]:
        """Memory that is read or written where the product's result is: it lies in short rows far apart."""
        body, out = self.body, self.p.out
        found: dict[Buffer, str] = {}
        for op in body.group.ops:
            slot = slot_of(op) if op.kind == "accum" else None
            for v in op.ins:
                if v.type.shape != out.type.shape:
                    continue
                if slot is not None:
                    found[body.slot(slot, v)] = v.type.dtype
                elif body.is_stored(v):
                    found[body.operand(v)] = v.type.dtype
        found |= {body.result(v): v.type.dtype for v in body.group.outs if v.type.shape == out.type.shape}
        return list(found.items())

    def _ask_for(self, place: Index, columns: int) -> None:
        """A hint, while sums are being added up, for one row of what will be read and written with them."""
        for buffer, dtype in self.near:
            for c in range(0, columns * ITEM_BYTES[dtype], _LINE):
                self.emit.prefetch(buffer, linear(place, self.p.out.type.dims) + c // ITEM_BYTES[dtype])

    # ------------------------------------------------------------------------------ instructions

    @staticmethod
    def _tile(number: int) -> Expr:
        return tirx.IntImm("int8", number)

    def _do(self, name: str, *arguments: Any) -> None:
        self.emit.add(tirx.Evaluate(tirx.call_llvm_intrin("int32", f"llvm.x86.{name}", *arguments)))

    def _load(self, tile: int, buffer: Buffer, at: Expr) -> None:
        self._do("tileloadd64", self._tile(tile), tirx.address_of(tirx.BufferLoad(buffer, [at])), tirx.IntImm("int64", _LINE))

    @contextmanager
    def _configured(self) -> Iterator[None]:
        """Inside, all eight tiles have 16 rows of 64 bytes."""
        before, own = self._words(_SIDE, "before"), self._words(_SIDE, "config")
        # Palette, bytes per row of each tile in 16 bits, rows of each tile in 8.
        words = [1, 0, 0, 0, *[_LINE << 16 | _LINE] * 4, 0, 0, 0, 0, *[_SIDE * 0x01010101] * 2, 0, 0]
        for i, word in enumerate(words):
            self.emit.store(own, _i32(word), _i32(i))
        self._do("sttilecfg", tirx.address_of(tirx.BufferLoad(before, [_i32(0)])))
        self._do("ldtilecfg", tirx.address_of(tirx.BufferLoad(own, [_i32(0)])))
        yield
        self._do("ldtilecfg", tirx.address_of(tirx.BufferLoad(before, [_i32(0)])))

    # ------------------------------------------------------------------------------ packing

    def _words(self, size: int, name: str) -> Buffer:
        return self.emit.alloc(size, "i32", name)

    def _row_of_pairs(self, value: Callable[[Expr], Expr], count: int) -> Expr:
        """16 words: the pairs of `count` values along k, then zeros."""
        emit = self.emit
        line = tirx.decl_buffer((_STEP,), "uint16", name=emit.fresh("line"))
        emit.add(tirx.AllocBuffer(line))
        everywhere = tirx.Ramp(0, 1, _STEP)
        if count < _STEP:
            emit.add(tirx.BufferStore(line, tirx.Broadcast(tirx.IntImm("uint16", 0), _STEP), [everywhere]))
        for k, _ in pieces(emit, count, _STEP):
            with self.body.point():
                upper = tirx.Cast("uint16", _bits(value(k)) >> tirx.IntImm("uint32", 16))
                emit.add(tirx.BufferStore(line, upper, [k]))
        return tirx.reinterpret(f"int32x{_SIDE}", tirx.BufferLoad(line, [everywhere]))

    def _line_of_pairs(self, target: Buffer, at: Expr, lanes: int, count: int, value: Callable[[int, Expr], Expr]) -> None:
        """Words from `at` on for `lanes` rows or columns: the pair value(0, lane), value(1, lane), of which `count` exist."""
        emit = self.emit
        for lane, _ in pieces(emit, lanes, _SIDE):
            with self.body.point():
                if count == 0:
                    emit.store(target, _i32(0), at + lane)
                    continue
                word = _bits(value(0, lane)) >> tirx.IntImm("uint32", 16)
                if count > 1:
                    word = word | (_bits(value(1, lane)) & tirx.IntImm("uint32", 0xFFFF0000))
                emit.store(target, tirx.reinterpret("int32", word), at + lane)

    def _store_row(self, target: Buffer, at: Expr, words: Expr) -> None:
        self.emit.add(tirx.BufferStore(target, words, [tirx.Ramp(at, 1, _SIDE)]))

    def _each_step(self, part: _Part, action: Callable[[Expr, int], None]) -> None:
        """action(number of the step, numbers along k in it)."""
        whole, rest = divmod(part.k_size, _STEP)
        with self.emit.loop(whole, SERIAL, "s") as s, self.body.point():
            if whole:
                action(s, _STEP)
        if rest:
            with self.body.point():
                action(_i32(whole), rest)

    def _pack_a(self, part: _Part, start: Expr, rows: int) -> Buffer:
        emit, p = self.emit, self.p
        packed = self._words(_ceil(rows, _SIDE) * part.steps * _WORDS, "ap")
        turned = p.a_along_i and not p.a_along_k
        scratch = self._words(_WORDS, "turned") if turned else None

        def tile(t: Expr, height: int) -> None:
            def by_rows(s: Expr, count: int) -> None:
                with emit.loop(height, SERIAL, "r") as r, self.body.point():
                    words = self._row_of_pairs(lambda k: p.a(part.lead, start + t * _SIDE + r, part.k_from + s * _STEP + k), count)
                    self._store_row(packed, (t * part.steps + s) * _WORDS + r * _SIDE, words)

            def by_pairs(s: Expr, count: int) -> None:
                def line(q: Expr, exist: int, along: Callable[[int], Expr]) -> None:
                    def value(half: int, i: Expr) -> Expr:
                        return p.a(part.lead, start + t * _SIDE + i, part.k_from + s * _STEP + along(half))

                    self._line_of_pairs(scratch, q * _SIDE, height, exist, value)

                self._pairs(count, line)
                for r, words in enumerate(self._transposed(scratch)):
                    self._store_row(packed, (t * part.steps + s) * _WORDS + r * _SIDE, words)

            self._each_step(part, by_pairs if turned else by_rows)

        whole, rest = divmod(rows, _SIDE)
        with emit.loop(whole, SERIAL, "t") as t, self.body.point():
            if whole:
                tile(t, _SIDE)
        if rest:
            with self.body.point():
                tile(_i32(whole), rest)
        return packed

    def _pairs(self, count: int, line: Callable[[Expr, int, Callable[[int], Expr]], None]) -> None:
        """All pairs of a step of `count` numbers: line(number of the pair, how many of its two exist, their places along k)."""
        whole = count // 2
        with self.emit.loop(whole, SERIAL, "q") as q, self.body.point():
            if whole:
                line(q, 2, lambda half: q * 2 + half)
        for i in range(whole, _SIDE):
            with self.body.point():
                line(_i32(i), max(count - 2 * i, 0), lambda half, i=i: _i32(2 * i + half))  # type: ignore[misc]

    def _transposed(self, scratch: Buffer) -> list[Expr]:
        return transpose_block(self.emit, "i32", _SIDE, _SIDE, scratch, [_i32(q * _SIDE) for q in range(_SIDE)])

    def _pack_b(self, part: _Part, packed: Buffer, at: Expr, g: _Strips) -> None:
        emit, p = self.emit, self.p
        across = _ceil(g.columns, _SIDE)
        widths = [min(g.columns - c * _SIDE, _SIDE) for c in range(across)]

        def by_pairs(s: Expr, count: int) -> None:
            def line(q: Expr, exist: int, along: Callable[[int], Expr]) -> None:
                with emit.loop(g.count, SERIAL, "n") as n, self.body.point():
                    for c, width in enumerate(widths):
                        from_j = g.first + n * _BLOCK + c * _SIDE
                        place = at + self._strip_at(part, n) + (s * across + c) * _WORDS + q * _SIDE
                        self._line_of_pairs(
                            packed,
                            place,
                            width,
                            exist,
                            lambda half, lane, from_j=from_j: p.b(  # type: ignore[misc]
                                part.lead, part.k_from + s * _STEP + along(half), from_j + lane
                            ),
                        )

            self._pairs(count, line)

        if self.b_by_pairs:
            self._each_step(part, by_pairs)
            return
        assert g.count == 1
        scratch = self._words(_WORDS, "turned")

        def by_columns(s: Expr, count: int) -> None:
            for c, width in enumerate(widths):
                with emit.loop(width, SERIAL, "r") as r, self.body.point():
                    column = g.first + c * _SIDE + r
                    words = self._row_of_pairs(lambda k, j=column: p.b(part.lead, part.k_from + s * _STEP + k, j), count)  # type: ignore[misc]
                    self._store_row(scratch, r * _SIDE, words)
                for q, words in enumerate(self._transposed(scratch)):
                    self._store_row(packed, at + (s * across + c) * _WORDS + q * _SIDE, words)

        self._each_step(part, by_columns)
