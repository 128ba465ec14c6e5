"""The loops of GPU kernels: a thread per element, blocks that reduce in shared memory, tiles of a matrix product.

In: the loops that the generators of kernels/ request through `Body.loops`: elements of a shape, a reduction, a product.
Out: launches.

  nest      one thread per element; for large tensors a thread per 4 or 8 neighbours, which it loads and stores as one
            (chunks.py), or four elements, so that several loads are under way at once
  reduce    a block for 1 or 32 results: threads add up every G-th element, then halve their number, in shared memory
            or, for one result, by registers that the threads of a warp exchange; when there are too few results to
            fill a device, the reduced elements are cut into segments with partial results in memory, which a second
            launch reduces
  product   a block per tile of 64 x 64 (16 x 16 for small matrices): panels of 16 steps along k in shared memory,
            4 x 4 sums per thread; with 16-bit floats on tensor cores (tensor_cores.py)

Sums are taken in an order that depends on sizes only. Limit: sizes and positions are 32-bit numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.elementwise.elementwise import run_index
from penstock.backends.tvm.kernels.rows.reduce import Sweep
from penstock.backends.tvm.kernels.rows.rows import Rows
from penstock.backends.tvm.kernels.rows.sums import add
from penstock.backends.tvm.kernels.tools.body import Body
from penstock.backends.tvm.kernels.tools.elements import Index, unravel, zero
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.ir.graph import Value
from penstock.ir.types import ITEM_BYTES

from . import tensor_cores
from .blocks import FULL, PANEL, THREADS, Panel, bind_index, guarded, load_panel
from .body import DeviceBody
from .chunks import chunk_of
from .folds import Steps, fold_threads
from .threads import ThreadEmitter

# Elements from which a thread takes four.
_MANY = 1 << 20
_ITEMS = 4
# Columns of a block that reduces over anything but the last dimension: a warp reads neighbours.
_COLUMNS = 32
# Steps of one thread before another segment is worth it.
_STEPS = 16
# Reductions over so few elements are left to one thread.
_SHORT = 32


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def _device(body: Body) -> DeviceBody:
    assert isinstance(body, DeviceBody)
    return body


class DeviceLoops:
    """The loops of GPU kernels, as `Body.loops`."""

    def nest(self, body: Body, shape: tuple[int, ...], merged: int, point: Callable[[Index], None]) -> None:
        """Emit a thread per element, four for large tensors."""
        emit = _device(body).emit
        total, run, outer = prod(shape), prod(shape[merged:]), shape[:merged]
        if total == 0:
            return
        values = [v for op in body.group.ops for v in (*op.ins, *op.outs)]
        size = chunk_of(values, total, run)
        if size > 1:
            _emit_chunks(_device(body), shape, merged, size, point)
            return
        items = _ITEMS if total >= _MANY else 1
        with emit.launch(ceil_div(total, items * THREADS), THREADS) as (block, thread), emit.loop(items) as item:
            position = emit.bind((block * items + item) * THREADS + thread, "i")
            with emit.when(position < total):
                if prod(outer) == 1:
                    lead: Index = (zero(),) * merged
                    point((*lead, *run_index(shape[merged:], position)))
                    return
                lead = bind_index(body, unravel(position // run if run > 1 else position, outer))
                point((*lead, *run_index(shape[merged:], emit.bind(position % run, "j") if run > 1 else zero())))

    def reduce(self, sweep: Sweep) -> None:
        """Emit a reduction by blocks."""
        kept, axes = sweep.kept, sweep.axes
        wide = [d for d in range(len(sweep.shape)) if sweep.shape[d] > 1]
        columns = bool(kept and wide) and wide[-1] in kept

        def at(o: Expr, r: Expr) -> Sequence[Expr]:
            return sweep.element(
                sweep.place((kept, unravel(o, sweep.dims(kept))), (axes, unravel(r, sweep.dims(axes))))
            )

        def finish(o: Expr, totals: Sequence[Expr]) -> None:
            sweep.result(sweep.bound(o, kept), totals)

        reduce_lines(sweep.body, sweep.size(kept), sweep.size(axes), columns, sweep.dtype, sweep.steps, at, finish)

    def product(self, body: Body, product: Product) -> None:
        """Emit a matrix product by tiles."""
        device = _device(body)
        if tensor_cores.suits(device, product):
            tensor_cores.emit_tiles(device, product)
        else:
            emit_tiles(device, product)

    def rows(self, body: Body, shape: tuple[int, ...], first: int, last: int, values: Sequence[Value]) -> Rows:
        """Return the row operations of a shape."""
        return DeviceRows(_device(body), shape, first, last, values)


def _emit_chunks(
    body: DeviceBody, shape: tuple[int, ...], merged: int, size: int, point: Callable[[Index], None]
) -> None:
    """Emit a nest whose threads take chunks of neighbours."""
    emit, total, run, outer = body.emit, prod(shape), prod(shape[merged:]), shape[:merged]
    chunks = total // size
    with emit.launch(ceil_div(chunks, THREADS), THREADS) as (block, thread):
        number = emit.bind(block * THREADS + thread, "n")
        with guarded(body, [number < chunks] if chunks % THREADS else []):
            if prod(outer) == 1:
                lead: Index = (zero(),) * merged
                start = emit.bind(number * size, "start")
            else:
                each = run // size
                lead = bind_index(body, unravel(number // each if each > 1 else number, outer))
                start = emit.bind(number % each * size, "start") if each > 1 else zero()
            with body.chunked(shape, merged, size, lead, start) as column:
                point((*lead, *run_index(shape[merged:], column)))


# ---------------------------------------------------------------------------------------- reductions


def reduce_lines(
    body: Body,
    count: int,
    length: int,
    columns: bool,
    dtype: str,
    steps: Steps,
    element: Callable[[Expr, Expr], Sequence[Expr]],
    result: Callable[[Expr, Sequence[Expr]], None],
) -> None:
    """Emit `count` reductions of `length` elements(line, position) each. `columns`: neighbouring lines are neighbours
    in memory."""
    emit = _device(body).emit
    if count == 0:
        return
    width = min(_COLUMNS, power_of_two(count)) if columns else 1
    groups = min(max(power_of_two(length), 1), THREADS // width)
    if length <= _SHORT and count > 1:
        width, groups = min(THREADS, power_of_two(count)), 1
    blocks = ceil_div(count, width)
    segments = min(max(FULL // blocks, 1), ceil_div(length, groups * _STEPS)) if blocks < FULL // 4 else 1
    if segments > 1:
        partial = [emit.workspace(segments * count, dtype, "partial") for _ in steps]

        def keep(o: Expr, segment: Expr, totals: Sequence[Expr]) -> None:
            for buffer, total in zip(partial, totals, strict=True):
                emit.store(buffer, total, segment * count + o)

        _fold(body, _Grid(count, length, segments, width, groups), dtype, steps, element, keep)
        _fold(
            body,
            _Grid(count, segments, 1, width, min(power_of_two(segments), THREADS // width)),
            dtype,
            steps,
            lambda o, s: [emit.load(buffer, s * count + o) for buffer in partial],
            lambda o, _, totals: result(o, totals),
        )
    else:
        whole = _Grid(count, length, 1, width, groups)
        _fold(body, whole, dtype, steps, element, lambda o, _, totals: result(o, totals))


@dataclass(frozen=True)
class _Grid:
    """The division of `count` lines of `length` elements: blocks of `width` lines by `groups` threads, for each of
    `segments` of the lines."""

    count: int
    length: int
    segments: int
    width: int
    groups: int


def _fold(
    body: Body,
    grid: _Grid,
    dtype: str,
    steps: Steps,
    element: Callable[[Expr, Expr], Sequence[Expr]],
    result: Callable[[Expr, Expr, Sequence[Expr]], None],
) -> None:
    """Emit one launch: every block folds one segment of each of its lines."""
    emit = _device(body).emit
    count, length, segments, width, groups = grid.count, grid.length, grid.segments, grid.width, grid.groups
    blocks, chunk = ceil_div(count, width), ceil_div(length, segments)
    with emit.launch(blocks * segments, width * groups) as (block, thread):
        line = emit.bind(
            (block % blocks if segments > 1 else block) * width + (thread % width if width > 1 else 0), "line"
        )
        segment = emit.bind(block // blocks, "segment") if segments > 1 else zero()
        group = emit.bind(thread // width, "group") if groups > 1 else zero()
        totals = [emit.alloc(1, dtype, "total") for _ in steps]
        for total, (start, _) in zip(totals, steps, strict=True):
            emit.store(total, literal(start, dtype), zero())
        with emit.loop(ceil_div(chunk, groups)) as turn:
            inside = emit.bind(turn * groups + group, "c")
            position = emit.bind(segment * chunk + inside, "r") if segments > 1 else inside
            conditions = [line < count] if count % width else []
            if chunk % groups:
                conditions.append(inside < chunk)
            if segments * chunk != length:
                conditions.append(position < length)
            with guarded(body, conditions):
                for total, (_, combine), x in zip(totals, steps, element(line, position), strict=True):
                    emit.store(total, combine(emit.load(total, zero()), x), zero())
        folded = fold_threads(_device(body), totals, dtype, steps, thread, width, groups) if groups > 1 else totals
        at = thread if groups > 1 and width > 1 else zero()
        conditions = ([thread < width] if groups > 1 else []) + ([line < count] if count % width else [])
        with guarded(body, conditions):
            result(line, segment, [emit.bind(emit.load(buffer, at)) for buffer in folded])


# ---------------------------------------------------------------------------------------- rows

# A row that is computed in one pass and used in the next is kept in shared memory up to this size.
_SCRATCH_BYTES = 32 << 10


class DeviceRows(Rows):
    """Row operations: a block per row along the last dimensions, which its threads share; or a thread per row when rows
    lie side by side."""

    body: DeviceBody
    emit: ThreadEmitter
    in_one_pass = True

    def __init__(
        self, body: DeviceBody, shape: tuple[int, ...], first: int, last: int, values: Sequence[Value]
    ) -> None:
        super().__init__(body, shape, first, last, values)
        self.threads = min(max(power_of_two(self.length), 32), THREADS)
        self._thread: Expr = zero()

    def each(self, one_row: Callable[[], None]) -> None:
        """Emit the work on every row."""
        emit, across = self.emit, prod(self.inner)
        count = prod(self.outer) * across
        if count == 0:
            return
        if not self.across:
            with emit.launch(count, self.threads) as (block, self._thread):
                self.row = bind_index(self.body, unravel(block, self.outer))
                self.tail = tuple(zero() for _ in self.inner)
                self.body.alone = self._thread < 1
                with self.body.point():
                    one_row()
                self.body.alone = None
            return
        with emit.launch(ceil_div(count, THREADS), THREADS) as (block, thread):
            number = emit.bind(block * THREADS + thread, "row")
            with emit.when(number < count), self.body.point():
                self.row = bind_index(self.body, unravel(number // across, self.outer))
                self.tail = bind_index(self.body, unravel(number % across, self.inner))
                one_row()

    def scratch(self, dtype: str) -> Callable[[Expr], tuple[Buffer, Expr]] | None:
        """Return memory for a row, if it fits into that of a block."""
        if self.across or self.length * max(ITEM_BYTES[dtype], 4) > _SCRATCH_BYTES:
            return None
        # Every thread reads back what it wrote itself.
        buffer = self.emit.shared(self.length, dtype, "row")
        return lambda c: (buffer, c)

    @contextmanager
    def _positions(self) -> Iterator[Expr]:
        """Open a loop over every position of the row, in turns of all threads."""
        if self.across:
            with self.emit.loop(self.length, name="c") as c, self.body.point():
                yield c
            return
        with self.emit.loop(ceil_div(self.length, self.threads), name="c") as turn:
            c = self.emit.bind(turn * self.threads + self._thread, "c")
            with guarded(self.body, [c < self.length] if self.length % self.threads else []):
                yield c

    def reduce(self, dtype: str, steps: Steps, element: Callable[[Expr], Sequence[Expr]]) -> list[Expr]:
        """Emit reductions of the elements of a row."""
        emit = self.emit
        totals = [emit.alloc(1, dtype, "total") for _ in steps]
        for total, (start, _) in zip(totals, steps, strict=True):
            emit.store(total, literal(start, dtype), zero())
        with self._positions() as c:
            for total, (_, combine), x in zip(totals, steps, element(c), strict=True):
                emit.store(total, combine(emit.load(total, zero()), x), zero())
        if self.across:
            return [emit.bind(emit.load(total, zero())) for total in totals]
        return self._fold_all(totals, dtype, steps)

    def top_and_total(self, dtype: str, element: Callable[[Expr], Expr]) -> tuple[Expr, Expr]:
        """Emit both in one pass: whatever is added up is scaled down when a larger element comes."""
        emit, functions, one = self.emit, self.body.functions, literal(1, dtype)
        top, total = emit.alloc(1, dtype, "top"), emit.alloc(1, dtype, "total")
        emit.store(top, literal(-math.inf, dtype), zero())
        emit.store(total, literal(0, dtype), zero())

        def scale(lower: Expr, upper: Expr) -> Expr:
            """Return e^(lower - upper), 1 for equal infinities."""
            distance = tirx.Select(tirx.EQ(lower, upper), literal(0, dtype), lower - upper)
            return functions.exp_down(emit.bind(distance))

        with self._positions() as c:
            x, before = emit.bind(element(c), "x"), emit.bind(emit.load(top, zero()), "before")
            rises = emit.bind(x > before, "rises")
            step = scale(tirx.Select(rises, before, x), tirx.Select(rises, x, before))
            sum_before = emit.bind(emit.load(total, zero()))
            emit.store(total, tirx.Select(rises, sum_before * step + one, sum_before + step), zero())
            emit.store(top, functions.peak(before, x), zero())
        if not self.across:
            mine = emit.bind(emit.load(top, zero()), "mine")
            (tops,) = self._fold_all([top], dtype, [(-math.inf, functions.peak)])
            emit.store(total, emit.load(total, zero()) * scale(mine, tops), zero())
            emit.store(top, tops, zero())
            (sums,) = self._fold_all([total], dtype, [(0, add)])
            emit.store(total, sums, zero())
        largest = emit.bind(emit.load(top, zero()), "top")
        # An infinite largest element has no distance from itself.
        infinite = tirx.Or(tirx.EQ(largest, literal(math.inf, dtype)), tirx.EQ(largest, literal(-math.inf, dtype)))
        return largest, emit.bind(tirx.Select(infinite, literal(math.nan, dtype), emit.load(total, zero())))

    def _fold_all(self, totals: Sequence[Buffer], dtype: str, steps: Steps) -> list[Expr]:
        """Emit the combination of what all threads have; every thread gets it."""
        shared = fold_threads(self.body, totals, dtype, steps, self._thread, 1, self.threads)
        folded = [self.emit.bind(self.emit.load(buffer, zero())) for buffer in shared]
        # No thread writes to the shared buffers again before all have read.
        self.emit.barrier()
        return folded

    def store(self, element: Callable[[Expr, Index], dict[Value, Expr]]) -> None:
        """Emit the stores of the elements of a row."""
        alone, self.body.alone = self.body.alone, None
        with self._positions() as c:
            index = self.index(c)
            self.body.finish({v: (x, index) for v, x in element(c, index).items()})
        self.body.alone = alone


# ---------------------------------------------------------------------------------------- matrix products


def emit_tiles(body: DeviceBody, p: Product) -> None:
    """Emit one product: a block per tile of the result."""
    emit, dtype = body.emit, p.out.type.dtype
    batch = prod(p.batch)
    if batch * p.m * p.n == 0:
        return
    each = 4 if p.m > 32 and p.n > 32 else 1
    tile = 16 * each
    rows, columns = ceil_div(p.m, tile), ceil_div(p.n, tile)
    with emit.launch(batch * rows * columns, THREADS) as (block, thread):
        lead = bind_index(body, unravel(block // (rows * columns) if rows * columns > 1 else block, p.batch))
        top = emit.bind(block // columns % rows * tile, "top") if rows > 1 else zero()
        left = emit.bind(block % columns * tile, "left") if columns > 1 else zero()
        row, column = emit.bind(thread // 16, "row"), emit.bind(thread % 16, "column")
        # One element more per line, so that lines start in different banks.
        line = tile + 1
        a_buffer, b_buffer = (emit.shared(PANEL * line, dtype, name) for name in ("a", "b"))
        panels = (
            Panel(a_buffer, p.m, p.k, top, tile, line, PANEL, p.a_along_k, lambda i, k: p.a(lead, i, k)),
            Panel(b_buffer, p.n, p.k, left, tile, line, PANEL, not p.b_along_j, lambda j, k: p.b(lead, k, j)),
        )
        sums = emit.alloc(each * each, dtype, "sums")
        with emit.loop(each * each) as c:
            emit.store(sums, literal(0, dtype), c)
        with emit.loop(ceil_div(p.k, PANEL)) as turn:
            start = emit.bind(turn * PANEL, "k0")
            for panel in panels:
                load_panel(body, panel, start, thread)
            emit.barrier()
            with emit.loop(PANEL) as k:
                a, b = emit.alloc(each, dtype, "x"), emit.alloc(each, dtype, "y")
                with emit.loop(each) as c:
                    emit.store(a, emit.load(a_buffer, k * line + row * each + c), c)
                    emit.store(b, emit.load(b_buffer, k * line + column + c * 16), c)
                with emit.loop(each) as i, emit.loop(each) as j:
                    emit.store(sums, emit.load(sums, i * each + j) + emit.load(a, i) * emit.load(b, j), i * each + j)
            emit.barrier()
        with emit.loop(each) as i, emit.loop(each) as j:
            down = emit.bind(top + row * each + i, "i")
            across = emit.bind(left + column + j * 16, "j")
            conditions = [down < p.m] * bool(p.m % tile) + [across < p.n] * bool(p.n % tile)
            with guarded(body, conditions):
                body.finish({p.out: (emit.load(sums, i * each + j), bind_index(body, p.place(lead, down, across)))})
