"""Products of 16-bit floats on tensor cores.

In: a Product of a matmul. Out: its launch. A block of eight warps has a tile of 128 x 64 results, or of 64 x 64 where
the large one would not fill the device. It holds panels of 32 steps along k of both operands in shared memory, in 16
bits. A warp multiplies pieces of 16 x 16 x 16 with sums in float32 (TVM's intrinsics, `nvcuda::wmma` in the source).
The sums go through shared memory, and from there to whatever follows the product.

The lines of a panel are what lies side by side in memory: steps along k, or rows and columns of the operands. A thread
moves 16 bytes where the operand is in memory and all of its lines begin on boundaries of 16 bytes, else one element.
Operands are rounded to their own type when they are stored in a panel. That changes those alone that another operation
of the kernel computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from tvm import tirx
from tvm.ir import Range
from tvm.sym.analyzer import Analyzer

from penstock.backends.tvm.kernels.tools.elements import Index, unravel
from penstock.backends.tvm.kernels.tools.emit import TVM_DTYPES, Buffer, Expr, ceil_div, dtype_name, i32
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.ir.graph import Value

from .blocks import FULL, THREADS, bind_index, guarded
from .body import DeviceBody
from .threads import NARROW, WARP

# The sizes of one multiplication, and steps along k of a panel.
_PIECE, _DEPTH = 16, 32
# Columns of a tile, and its rows for each piece that a warp has below another one: four warps by two.
_COLUMNS, _ROWS = 64, 64
# Lines of panels and sums are longer by this: they start in different banks, and pieces on boundaries of 32 bytes.
_BESIDE, _BESIDE_SUMS = 8, 4
# The elements that a thread moves at once: 16 bytes.
_SPAN = 8
# The first architecture whose tensor cores multiply a type.
_FIRST = {"f16": 70, "bf16": 80}

Access = Callable[[Expr, Expr], Expr]
Place = Callable[[Expr, Expr], tuple[Value, Expr] | None]


def suits(body: DeviceBody, p: Product) -> bool:
    """Return whether a product runs on tensor cores: a matmul of 16-bit floats that fills a tile."""
    dtype = _dtype(body, p)
    if dtype is None or min(p.m, p.n) < _COLUMNS or p.k < _PIECE or not prod(p.batch):
        return False
    digits = re.search(r"\d+", body.machine.name)
    assert digits is not None, body.machine.name
    return int(digits[0]) >= _FIRST[dtype]


def _dtype(body: DeviceBody, p: Product) -> str | None:
    """Return the element type that both operands have in memory, if tensor cores have it."""
    types = {body.own(value).type.dtype for value in p.op.ins} if p.op is not None and p.op.kind == "matmul" else set()
    return types.pop() if len(types) == 1 and types <= set(NARROW) else None


def emit_tiles(body: DeviceBody, p: Product) -> None:
    """Emit one product: a block per tile of the result."""
    batch, across = prod(p.batch), ceil_div(p.n, _COLUMNS)
    high = 2 if batch * ceil_div(p.m, 2 * _ROWS) * across >= FULL else 1
    down = ceil_div(p.m, high * _ROWS)
    emit = body.emit
    with emit.launch(batch * down * across, THREADS) as (block, thread):
        lead = bind_index(body, unravel(block // (down * across) if down * across > 1 else block, p.batch))
        top = emit.bind(block // across % down * (high * _ROWS), "top")
        left = emit.bind(block % across * _COLUMNS, "left")
        _Tile(body, p, high, lead, top, left, thread).emit_all()


@dataclass(frozen=True)
class _Panel:
    """An operand and the shared memory for its part: `tile` places across k from `origin` on, 32 steps along k.
    `access` and `address` take the place across k and the step, whose numbers are `extent` and `steps`."""

    buffer: Buffer
    origin: Expr
    tile: int
    extent: int
    steps: int
    along_k: bool
    span: int
    access: Access
    address: Place

    @property
    def line(self) -> int:
        return (_DEPTH if self.along_k else self.tile) + _BESIDE

    def place(self, across: Expr, step: Expr) -> Expr:
        """Return where the shared memory has an element."""
        return across * self.line + step if self.along_k else step * self.line + across

    def load(self, body: DeviceBody, start: Expr, thread: Expr) -> None:
        """Fill the panel from step `start` on, zeros outside of the operand."""
        emit, width = body.emit, _DEPTH if self.along_k else self.tile
        with emit.loop(_DEPTH * self.tile // (self.span * THREADS)) as part, body.point():
            number = emit.bind(part * THREADS + thread, "e")
            beside = emit.bind(number % (width // self.span) * self.span, "beside")
            line = emit.bind(number // (width // self.span), "line")
            across, step = (line, beside) if self.along_k else (beside, line)
            at, k = emit.bind(self.origin + across, "at"), emit.bind(start + step, "k")
            inside = [at < self.extent] * bool(self.extent % self.tile) + [k < self.steps] * bool(self.steps % _DEPTH)
            if self.span == 1:
                self._move_one(body, self.place(across, step), at, k, inside)
            else:
                self._move_span(body, self.place(across, step), at, k, inside)

    def _move_one(self, body: DeviceBody, place: Expr, at: Expr, k: Expr, inside: list[Expr]) -> None:
        emit = body.emit
        if inside:
            at = emit.bind(tirx.min(at, self.extent - 1), "at")
            k = emit.bind(tirx.min(k, self.steps - 1), "k")
        value = self.access(at, k)
        if inside:
            value = tirx.Select(tirx.all(*inside), value, tirx.const(0, dtype_name(value)))
        emit.store(self.buffer, value, place)

    def _move_span(self, body: DeviceBody, place: Expr, at: Expr, k: Expr, inside: list[Expr]) -> None:
        """Move neighbours as one. Lines are whole numbers of them, so all are inside or none."""
        emit, every = body.emit, tirx.all(*inside) if inside else None
        with guarded(body, inside):
            address = self.address(at, k)
            assert address is not None
            memory, position = body.memory(address)
            vector = tirx.BufferLoad(memory, [_span(position)])
            emit.add(tirx.BufferStore(self.buffer, vector, [_span(place)]))
        if every is not None:
            with guarded(body, [tirx.Not(every)]), emit.loop(self.span) as i:
                emit.store(self.buffer, tirx.FloatImm("float32", 0.0), place + i)


def _span(first: Expr) -> Expr:
    return tirx.Ramp(first, i32(1), _SPAN)


def _span_of(dtype: str, address: Place, along_k: bool, length: int) -> int:
    """Return how many elements of lines of some length a thread moves at once: those on 16 bytes, where they are
    neighbours in memory, begin on a boundary wherever they lie, and lines are whole numbers of them."""
    group, other, lane = (tirx.Var(name, "int32") for name in ("group", "other", "lane"))

    def at(beside: Expr) -> Any:
        return address(other, beside) if along_k else address(beside, other)

    first = at(group * _SPAN)
    if length % _SPAN or first is None or first[0].type.dtype != dtype:
        return 1
    analyzer = Analyzer()
    analyzer.bind(lane, Range(0, _SPAN))
    apart = analyzer.simplify(at(group * _SPAN + lane)[1] - first[1] - lane)
    known = analyzer.modular_set(first[1])
    begins = known.coeff % _SPAN == 0 and known.base % _SPAN == 0
    return _SPAN if begins and isinstance(apart, tirx.IntImm) and apart.value == 0 else 1


class _Tile:
    """The tile of one block."""

    def __init__(
        self, body: DeviceBody, p: Product, high: int, lead: Index, top: Expr, left: Expr, thread: Expr
    ) -> None:
        self.body, self.emit, self.p, self.high, self.lead, self.thread = body, body.emit, p, high, lead, thread
        self.top, self.left = top, left
        dtype = _dtype(body, p)
        assert dtype is not None
        self.dtype, self.kind = dtype, TVM_DTYPES[dtype]
        warp = self.emit.bind(thread // WARP, "warp")
        # The first row and the first column of the tile that are this warp's.
        self.row = self.emit.bind(warp // 2 * (_PIECE * high), "row")
        self.column = self.emit.bind(warp % 2 * (2 * _PIECE), "column")

    def emit_all(self) -> None:
        """Emit panels, multiplications, and what is done with the sums."""
        emit, high, area = self.emit, self.high, _PIECE * _PIECE
        left, right = self._panels()
        a = emit.scoped(area * high, self.kind, "x", "wmma.matrix_a")
        b = emit.scoped(area * 2, self.kind, "y", "wmma.matrix_b")
        sums = emit.scoped(area * high * 2, "float32", "sums", "wmma.accumulator")
        for number in range(2 * high):
            self._call("tvm_fill_fragment", sums, number, tirx.FloatImm("float32", 0.0))
        with emit.loop(ceil_div(self.p.k, _DEPTH)) as turn:
            start = emit.bind(turn * _DEPTH, "k0")
            left.load(self.body, start, self.thread)
            right.load(self.body, start, self.thread)
            emit.barrier()
            for k in range(0, _DEPTH, _PIECE):
                for i in range(high):
                    self._load(a, i, left, self.row + i * _PIECE, k, "row_major" if left.along_k else "col_major")
                for j in range(2):
                    self._load(b, j, right, self.column + j * _PIECE, k, "col_major" if right.along_k else "row_major")
                for i, j in self._pieces():
                    self._multiply(sums, 2 * i + j, a, i, b, j)
            emit.barrier()
        self._finish(sums)

    def _panels(self) -> tuple[_Panel, _Panel]:
        """Return the panels of both operands."""
        p, lead = self.p, self.lead

        def panel(
            name: str, origin: Expr, sizes: tuple[int, int], along_k: bool, access: Access, place: Place
        ) -> _Panel:
            tile, extent = sizes
            lines, line = (tile, _DEPTH) if along_k else (_DEPTH, tile)
            buffer = self.emit.scoped(lines * (line + _BESIDE), self.kind, name, "shared")
            span = _span_of(self.dtype, place, along_k, p.k if along_k else extent)
            return _Panel(buffer, origin, tile, extent, p.k, along_k, span, access, place)

        assert p.a_address is not None
        assert p.b_address is not None
        a, b = partial(p.a_address, lead), partial(p.b_address, lead)
        rows, columns = (self.high * _ROWS, p.m), (_COLUMNS, p.n)
        return (
            panel("a", self.top, rows, p.a_along_k, lambda i, k: p.a(lead, i, k), a),
            panel("b", self.left, columns, not p.b_along_j, lambda j, k: p.b(lead, k, j), lambda j, k: b(k, j)),
        )

    def _pieces(self) -> Iterator[tuple[int, int]]:
        return ((i, j) for i in range(self.high) for j in range(2))

    def _load(self, fragment: Buffer, number: int, panel: _Panel, across: Expr, step: int, layout: str) -> None:
        """Load a piece of a panel."""
        place = panel.buffer.access_ptr("r", offset=panel.place(across, i32(step)))
        self._call("tvm_load_matrix_sync", fragment, number, place, i32(panel.line), layout)

    def _multiply(self, sums: Buffer, at: int, a: Buffer, i: int, b: Buffer, j: int) -> None:
        """Add the product of two pieces."""
        data, place = tirx.buffer_data(sums), i32(at)
        parts = data, place, tirx.buffer_data(a), i32(i), tirx.buffer_data(b), i32(j), data, place
        self.emit.add(tirx.Evaluate(tirx.call_intrin("handle", "tirx.tvm_mma_sync", *parts)))

    def _finish(self, sums: Buffer) -> None:
        """Emit the way of the sums to shared memory, 64 rows at a time, and the operations behind the product."""
        emit, line = self.emit, _COLUMNS + _BESIDE_SUMS
        tile = emit.scoped(_ROWS * line, "float32", "tile", "shared")
        warp_row = emit.bind(self.row // self.high, "row")
        for i in range(self.high):
            if i:
                emit.barrier()
            for j in range(2):
                place = tile.access_ptr("w", offset=warp_row * line + self.column + j * _PIECE)
                self._call("tvm_store_matrix_sync", sums, 2 * i + j, place, i32(line), "row_major")
            emit.barrier()
            with emit.loop(_ROWS * _COLUMNS // THREADS) as part, self.body.point():
                number = emit.bind(part * THREADS + self.thread, "e")
                row, column = emit.bind(number // _COLUMNS, "i"), emit.bind(number % _COLUMNS, "j")
                below = row // _PIECE * (_PIECE * self.high) + i * _PIECE + row % _PIECE if self.high > 1 else row
                self._store(emit.load(tile, row * line + column), self.top + below, self.left + column)

    def _store(self, total: Expr, row: Expr, column: Expr) -> None:
        """Emit the operations behind the product for one sum."""
        p, emit = self.p, self.emit
        down, across = emit.bind(row, "i"), emit.bind(column, "j")
        conditions = [down < p.m] * bool(p.m % (self.high * _ROWS)) + [across < p.n] * bool(p.n % _COLUMNS)
        with guarded(self.body, conditions):
            self.body.finish(
                {p.out: (emit.bind(total, "sum"), bind_index(self.body, p.place(self.lead, down, across)))}
            )

    def _call(self, name: str, fragment: Buffer, number: int, *further: Any) -> None:
        """Emit an intrinsic of one piece."""
        parts = (tirx.buffer_data(fragment), *(i32(_PIECE),) * 3, i32(number), *further)
        self.emit.add(tirx.Evaluate(tirx.call_intrin("handle", f"tirx.{name}", *parts)))
