"""Rows that are added to a table in the order of a stable sort, for lookups of many indices.

In: a tensor of rows, the indices that name entries of the table, the table in memory. Out: launches that add each row
to its entry. Work grows with the number of indices, however often one of them repeats:

  sort    by 4 bits of the index at a time, the lowest first. Each of up to 1024 threads counts the digits of its own
          part; one block adds the counts up to places; each thread moves its part there. Nothing is exchanged but
          through memory between launches
  add     a block takes the part of a run of equal indices that lies in one chunk of 64. Runs inside of a chunk go to
          the table; pieces of longer ones are kept, and a second launch adds these up, chunk by chunk

Sums are taken in the order of positions, in pieces that depend on the indices alone: equal inputs give equal bits.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.elements import Index, linear, table_row, unravel, zero
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, ceil_div, i32, literal
from penstock.ir.graph import Value

from .blocks import THREADS, bind_index
from .body import DeviceBody

# From this number of indices on they are sorted. Fewer are compared each with each, in one launch.
SORTED_FROM = 1024
# Sorted rows that one block adds up.
CHUNK = 64
_BITS = 4
_DIGITS = 1 << _BITS
# Threads of the one block that makes places of counts.
_AT_ONCE = 1024
# Threads that sort, and the least indices of each.
_MOST_PARTS, _LEAST_IN_PART = 1024, 8


def emit_sorted(body: DeviceBody, indices: Value, size: int) -> tuple[Buffer, Buffer]:
    """Emit a stable sort of indices of a table of `size` entries. Gives the sorted entries, with -1 behind the last of
    them, and the position that each has come from."""
    emit, places = body.emit, indices.type.dims
    count = prod(places)
    rows = [emit.workspace(count + 1, "i32", "row") for _ in range(2)]
    order = [emit.workspace(count, "i32", "order") for _ in range(2)]
    with emit.launch(ceil_div(count + 1, THREADS), THREADS) as (block, thread):
        n = emit.bind(block * THREADS + thread, "n")
        with emit.when(n < count), body.point():
            emit.store(rows[0], table_row(body.at(indices, unravel(n, places)), size), n)
            emit.store(order[0], n, n)
        with emit.when(tirx.EQ(n, i32(count))):
            for row in rows:
                emit.store(row, i32(-1), n)
    passes = ceil_div(max((size - 1).bit_length(), 1), _BITS)
    for number in range(passes):
        source, target = number % 2, (number + 1) % 2
        _emit_pass(body, (rows[source], order[source]), (rows[target], order[target]), count, number * _BITS)
    return rows[passes % 2], order[passes % 2]


def _emit_pass(
    body: DeviceBody, source: tuple[Buffer, Buffer], target: tuple[Buffer, Buffer], count: int, shift: int
) -> None:
    """Emit one pass of the sort, by the digit that begins at bit `shift`."""
    emit = body.emit
    parts = min(_MOST_PARTS, ceil_div(count, _LEAST_IN_PART))
    length = ceil_div(count, parts)
    first = emit.workspace(_DIGITS * parts, "i32", "first")
    for moves in (False, True):
        with emit.launch(ceil_div(parts, THREADS), THREADS) as (block, thread):
            part = emit.bind(block * THREADS + thread, "part")
            # Counts are looked up by digit, which registers cannot be. Each thread has its own.
            counts = emit.shared(_DIGITS * THREADS, "i32", "counts")
            with emit.when(part < parts):
                with emit.loop(_DIGITS) as d:
                    emit.store(counts, emit.load(first, d * parts + part) if moves else i32(0), d * THREADS + thread)
                with emit.loop(length) as step:
                    n = emit.bind(part * length + step, "n")
                    with emit.when(n < count):
                        row = emit.bind(emit.load(source[0], n), "own")
                        digit = emit.bind((row >> shift) & (_DIGITS - 1), "digit")
                        mine = emit.bind(digit * THREADS + thread, "mine")
                        place = emit.keep(emit.load(counts, mine), "place")
                        if moves:
                            emit.store(target[0], row, place)
                            emit.store(target[1], emit.load(source[1], n), place)
                        emit.store(counts, place + 1, mine)
                if not moves:
                    with emit.loop(_DIGITS) as d:
                        emit.store(first, emit.load(counts, d * THREADS + thread), d * parts + part)
        if not moves:
            _emit_places(body, first, _DIGITS * parts)


def _emit_places(body: DeviceBody, counts: Buffer, size: int) -> None:
    """Emit the sums of all earlier counts in place of each, by one block."""
    emit, each = body.emit, ceil_div(size, _AT_ONCE)
    with emit.launch(1, _AT_ONCE) as (_, thread):
        sums = emit.shared(_AT_ONCE, "i32", "sums")
        total = emit.alloc(1, "i32", "total")
        emit.store(total, i32(0), zero())
        with emit.loop(each) as step:
            n = emit.bind(thread * each + step, "n")
            with emit.when(n < size):
                emit.store(total, emit.load(total, zero()) + emit.load(counts, n), zero())
        emit.store(sums, emit.load(total, zero()), thread)
        emit.barrier()
        # Each place gets the sum of twice as many threads in every turn.
        distance = 1
        while distance < _AT_ONCE:
            earlier = emit.keep(emit.load(sums, tirx.max(thread - distance, 0)), "earlier")
            emit.barrier()
            with emit.when(thread >= distance):
                emit.store(sums, emit.load(sums, thread) + earlier, thread)
            emit.barrier()
            distance *= 2
        emit.store(total, emit.load(sums, thread) - emit.load(total, zero()), zero())
        with emit.loop(each) as step:
            n = emit.bind(thread * each + step, "n")
            with emit.when(n < size):
                here = emit.keep(emit.load(counts, n), "here")
                emit.store(counts, emit.load(total, zero()), n)
                emit.store(total, emit.load(total, zero()) + here, zero())


def add_sorted_rows(
    body: DeviceBody, target: Buffer, dy: Value, indices: Value, axis: int, shape: tuple[int, ...]
) -> None:
    """Emit the addition of rows along an axis to the entries that indices name, in the order of a sort."""
    emit, dtype = body.emit, dy.type.dtype
    outer, inner, places = shape[:axis], shape[axis + 1 :], indices.type.dims
    count, run = prod(places), prod(inner)
    chunks, lines = ceil_div(count, CHUNK), ceil_div(run, THREADS)
    row, order = emit_sorted(body, indices, shape[axis])
    pieces = emit.workspace(prod(outer) * chunks * 2 * run, dtype, "pieces")

    def piece(lead: Index, chunk: Expr, which: Expr, column: Expr) -> Expr:
        return ((linear(lead, outer) * chunks + chunk) * 2 + which) * run + column

    def place(lead: Index, entry: Expr, column: Expr) -> Expr:
        return emit.bind(linear((*lead, entry, *bind_index(body, unravel(column, inner))), shape), "p")

    def add(position: Expr, value: Expr) -> None:
        emit.store(target, emit.load(target, position) + value, position)

    with emit.launch(prod(outer) * count * lines, THREADS) as (block, thread):
        lead, n, column = _line(body, block, thread, outer, count, lines)
        entry, before = emit.bind(emit.load(row, n), "own"), emit.load(row, tirx.max(n - 1, 0))
        goes_on = emit.bind(tirx.all(n > 0, tirx.EQ(before, entry)), "from")
        begins = emit.bind(tirx.EQ(n % CHUNK, 0), "begins")
        with emit.when(tirx.all(column < run, tirx.Or(begins, tirx.Not(goes_on)))), body.point():
            tail = bind_index(body, unravel(column, inner))
            end = emit.bind(tirx.min((n // CHUNK + 1) * CHUNK, count), "end")
            total, at = emit.alloc(1, dtype, "total"), emit.alloc(1, "i32", "at")
            emit.store(total, literal(0, dtype), zero())
            emit.store(at, n, zero())
            same = tirx.EQ(emit.load(row, emit.load(at, zero())), entry)
            with emit.repeat(tirx.all(emit.load(at, zero()) < end, same)), body.point():
                source = bind_index(body, unravel(emit.load(order, emit.load(at, zero())), places))
                emit.store(total, emit.load(total, zero()) + body.at(dy, (*lead, *source, *tail)), zero())
                emit.store(at, emit.load(at, zero()) + 1, zero())
            reaches = tirx.EQ(emit.load(at, zero()), end)
            left = emit.bind(tirx.all(reaches, tirx.EQ(emit.load(row, end), entry)), "left")
            whole = emit.bind(tirx.Not(tirx.Or(goes_on, left)), "whole")
            with emit.when(whole):
                add(place(lead, entry, column), emit.load(total, zero()))
            with emit.when(tirx.Not(whole)):
                which = tirx.Select(goes_on, i32(0), i32(1))
                emit.store(pieces, emit.load(total, zero()), piece(lead, n // CHUNK, which, column))
    with emit.launch(prod(outer) * chunks * lines, THREADS) as (block, thread):
        lead, chunk, column = _line(body, block, thread, outer, chunks, lines)
        begin, end = emit.bind(chunk * CHUNK, "begin"), emit.bind(tirx.min((chunk + 1) * CHUNK, count), "end")
        entry, before = emit.bind(emit.load(row, end - 1), "own"), emit.load(row, tirx.max(begin - 1, 0))
        starts = tirx.Or(tirx.EQ(chunk, 0), tirx.NE(before, entry))
        goes_on = tirx.EQ(emit.load(row, end), entry)
        with emit.when(tirx.all(column < run, starts, goes_on)):
            total, at = emit.alloc(1, dtype, "total"), emit.alloc(1, "i32", "at")
            emit.store(total, emit.load(pieces, piece(lead, chunk, i32(1), column)), zero())
            emit.store(at, chunk + 1, zero())
            follows = tirx.EQ(emit.load(row, tirx.min(emit.load(at, zero()) * CHUNK, count)), entry)
            with emit.repeat(tirx.all(emit.load(at, zero()) < chunks, follows)):
                value = emit.load(pieces, piece(lead, emit.load(at, zero()), i32(0), column))
                emit.store(total, emit.load(total, zero()) + value, zero())
                emit.store(at, emit.load(at, zero()) + 1, zero())
            add(place(lead, entry, column), emit.load(total, zero()))


def _line(
    body: DeviceBody, block: Expr, thread: Expr, outer: tuple[int, ...], count: int, lines: int
) -> tuple[Index, Expr, Expr]:
    """Return what a block works on: the coordinates in front of the axis, a number below `count`, and the column of the
    thread."""
    emit = body.emit
    line = emit.bind(block // lines if lines > 1 else block, "line")
    column = emit.bind((block % lines) * THREADS + thread if lines > 1 else thread, "column")
    lead = bind_index(body, unravel(line // count if prod(outer) > 1 else zero(), outer))
    return lead, emit.bind(line % count, "n"), column
