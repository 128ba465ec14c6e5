"""The largest or smallest elements of a row, in order (top-k).

In: topk along any axis. Out: one loop over rows, shared by threads. Elements become integer keys in the order of the
result: nan above all, both zeros equal, reversed for the smallest. Ties go to the first element.

Short rows: the rank of an element is the number of elements before it. Each key is compared with all keys of the row,
in vectors, and its rank is its place.

Longer rows, a tournament: a row is cut in blocks of about the square root of its size, and the largest key of each
block is kept. Then k times: find the largest of the blocks, the first block that has it, and its first place there;
take the element out, and find the next of its block. All four are passes of vectors over a block, so k elements of n
cost n + 4 k sqrt(n) steps.

Most of a row: keys are sorted by their digits of 8 bits, lowest first, each pass counting places
beforehand and keeping the order of equal digits.

The key of a float is its bits as an integer, with the lower bits inverted where the sign is set. f16 and bf16 have the
key of the f32 they widen to. In a tournament, an element that is out has the lowest key, and a mark tells it from
elements with that key.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt, prod

from tvm import tirx

from penstock.backends.tvm.kernels.tools.body import Body, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, axis_of, bound_index, zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, cast, ceil_div, dtype_name, literal
from penstock.ir.graph import Op
from penstock.ir.ops import complete_attrs

from .sums import LOWEST, fold


def order_key(body: Body, x: Expr, largest: bool) -> Expr:
    """Return an integer whose order is that of the elements, the wanted ones on top."""
    name = dtype_name(x)
    if name.startswith("float"):
        wide = name == "float64"
        dtype, bits = ("i64", 63) if wide else ("i32", 31)
        zero_of = tirx.FloatImm(name, 0.0)
        raw = body.emit.bind(tirx.reinterpret(f"int{bits + 1}", tirx.Select(tirx.EQ(x, zero_of), zero_of, x)))
        top = literal((1 << bits) - 1, dtype)
        key = raw ^ ((raw >> literal(bits, dtype)) & top)
        key = tirx.Select(tirx.isnan(x), top, key)
    else:
        key = cast(x, "i64" if name == "int64" else "i32")
    return key if largest else tirx.bitwise_not(key)


# Up to this size of a row every two keys may be compared.
_SHORT = 128


class _ShortRow:
    """Keys of a row, and the rank of each: the number of elements before it."""

    def __init__(self, body: Body, size: int, dtype: str) -> None:
        self.body, self.emit, self.lanes, self.size = body, body.emit, body.lanes, size
        self.key_dtype = "i64" if dtype in ("f64", "i64") else "i32"
        whole = ceil_div(size, self.lanes) * self.lanes
        self.keys = self.emit.alloc(whole, self.key_dtype, "keys")
        self.ranks = self.emit.alloc(whole, "i32", "ranks")

    def fill(self, key: Callable[[Expr], Expr]) -> None:
        emit, lanes, size = self.emit, self.lanes, self.size
        for c, _ in emit.spans(size, lanes):
            with self.body.point():
                emit.store(self.keys, key(c), c)
        for begin in range(0, size, lanes):
            count = emit.alloc(lanes, "i32", "count")
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(count, literal(0, "i32"), lane)
            # Equal keys come in the order of their places.
            self._add(count, begin, 0, begin, lambda other, mine, at, lane: other >= mine)
            self._add(count, begin, begin, min(lanes, size - begin), self._before_within)
            self._add(count, begin, begin + lanes, size - begin - lanes, lambda other, mine, at, lane: other > mine)
            with emit.loop(lanes, VECTOR, "l") as lane:
                emit.store(self.ranks, tirx.BufferLoad(count, [lane]), lane + begin)

    @staticmethod
    def _before_within(other: Expr, mine: Expr, at: Expr, lane: Expr) -> Expr:
        return tirx.Or(other > mine, tirx.And(tirx.EQ(other, mine), at < lane))

    def _add(
        self, count: Buffer, begin: int, first: int, extent: int, before: Callable[[Expr, Expr, Expr, Expr], Expr]
    ) -> None:
        """Count those of `extent` keys from `first` on that come before each of a vector."""
        emit = self.emit
        if extent <= 0:
            return
        with emit.loop(extent, SERIAL, "j") as j:
            other = tirx.BufferLoad(self.keys, [j + first])
            with emit.loop(self.lanes, VECTOR, "l") as lane:
                hit = before(other, tirx.BufferLoad(self.keys, [lane + begin]), j, lane)
                emit.store(
                    count, tirx.BufferLoad(count, [lane]) + tirx.Select(hit, literal(1, "i32"), literal(0, "i32")), lane
                )


_DIGIT = 8
_DIGITS = 1 << _DIGIT


def _emit_sorted(
    body: Body, size: int, dtype: str, key: Callable[[Expr], Expr], wanted: Callable[[Expr, Expr], None]
) -> None:
    """Sort a whole row: `wanted` gets the place of an element in the row, and in the order."""
    emit, lanes = body.emit, body.lanes
    key_dtype, bits = ("i64", 64) if dtype in ("f64", "i64") else ("i32", 32)
    passes = bits // _DIGIT
    keys = [emit.alloc(size, key_dtype, "keys") for _ in range(2)]
    places = [emit.alloc(size, "i32", "places") for _ in range(2)]
    counts = emit.alloc(passes * _DIGITS, "i32", "counts")
    turned = literal((1 << (bits - 1)) - 1, key_dtype)
    for c, _ in emit.spans(size, lanes):
        with body.point():
            # The largest first: the complement of the key above its lowest, as an unsigned number.
            emit.store(keys[0], key(c) ^ turned, c)
    for c, _ in emit.spans(passes * _DIGITS, lanes):
        emit.store(counts, literal(0, "i32"), c)

    def digit(value: Expr, number: int) -> Expr:
        part = (value >> literal(number * _DIGIT, key_dtype)) & literal(_DIGITS - 1, key_dtype)
        return emit.bind(cast(part, "i32") + number * _DIGITS, "digit")

    with emit.loop(size, SERIAL, "i") as i:
        value = emit.bind(tirx.BufferLoad(keys[0], [i]), "key")
        for number in range(passes):
            at = digit(value, number)
            emit.store(counts, tirx.BufferLoad(counts, [at]) + 1, at)
    with emit.loop(passes, SERIAL, "p") as p:
        total = emit.alloc(1, "i32", "total")
        emit.store(total, literal(0, "i32"), zero())
        with emit.loop(_DIGITS, SERIAL, "d") as d:
            count = emit.bind(tirx.BufferLoad(counts, [p * _DIGITS + d]), "count")
            emit.store(counts, tirx.BufferLoad(total, [zero()]), p * _DIGITS + d)
            emit.store(total, tirx.BufferLoad(total, [zero()]) + count, zero())
    for number in range(passes):
        source, target = number % 2, 1 - number % 2
        with emit.loop(size, SERIAL, "i") as i, body.point():
            value = emit.bind(tirx.BufferLoad(keys[source], [i]), "key")
            place = emit.bind(tirx.BufferLoad(places[source], [i]), "place") if number else i
            at = digit(value, number)
            to = emit.bind(tirx.BufferLoad(counts, [at]), "to")
            emit.store(counts, to + 1, at)
            if number == passes - 1:
                wanted(place, to)
            else:
                emit.store(keys[target], value, to)
                emit.store(places[target], place, to)


class _TournamentRow:
    """Keys and marks of one row in a tournament, and the largest key of each block."""

    def __init__(self, body: Body, size: int, dtype: str) -> None:
        self.body, self.emit, self.lanes, self.size = body, body.emit, body.lanes, size
        self.key_dtype = "i64" if dtype in ("f64", "i64") else "i32"
        self.lowest = LOWEST[self.key_dtype]
        whole = ceil_div(size, self.lanes) * self.lanes
        self.block = whole if size <= 8 * self.lanes else ceil_div(isqrt(size), self.lanes) * self.lanes
        self.blocks = ceil_div(size, self.block)
        self.tops_size = ceil_div(self.blocks, self.lanes) * self.lanes
        self.keys = self.emit.alloc(self.blocks * self.block, self.key_dtype, "keys")
        self.alive = self.emit.alloc(self.blocks * self.block, "i32", "alive")
        self.tops = self.emit.alloc(self.tops_size, self.key_dtype, "tops")
        self.left = self.emit.alloc(self.tops_size, "i32", "left")

    def fill(self, key: Callable[[Expr], Expr]) -> None:
        emit, size = self.emit, self.size
        for c, _ in emit.spans(size, self.lanes):
            with self.body.point():
                emit.store(self.keys, key(c), c)
                emit.store(self.alive, literal(1, "i32"), c)
        for c, _ in emit.spans(self.blocks * self.block - size, self.lanes):
            emit.store(self.keys, literal(self.lowest, self.key_dtype), c + size)
            emit.store(self.alive, literal(0, "i32"), c + size)
        with emit.loop(self.tops_size // self.lanes, SERIAL, "b") as b, emit.loop(self.lanes, VECTOR, "l") as lane:
            emit.store(self.tops, literal(self.lowest, self.key_dtype), b * self.lanes + lane)
            left = literal(size, "i32") - (b * self.lanes + lane) * self.block
            emit.store(self.left, tirx.max(tirx.min(left, self.block), 0), b * self.lanes + lane)
        with emit.loop(self.blocks, SERIAL, "b") as b:
            self.look(b)

    def look(self, b: Expr) -> None:
        """Find the largest key of a block."""
        self.emit.store(self.tops, self._largest(self.keys, b * self.block, self.block), b)

    def take(self) -> Expr:
        """Remove the largest element, and return its place."""
        emit = self.emit
        top = self._largest(self.tops, zero(), self.tops_size)
        b = self._first(self.tops, self.left, top, zero(), self.tops_size)
        begin = emit.bind(b * self.block, "begin")
        place = emit.bind(begin + self._first(self.keys, self.alive, top, begin, self.block), "place")
        emit.store(self.keys, literal(self.lowest, self.key_dtype), place)
        emit.store(self.alive, literal(0, "i32"), place)
        emit.store(self.left, tirx.BufferLoad(self.left, [b]) - 1, b)
        self.look(b)
        return place

    def _largest(self, source: Buffer, begin: Expr, count: int) -> Expr:
        return self._over(count, self.key_dtype, self.lowest, tirx.max, lambda c: tirx.BufferLoad(source, [begin + c]))

    def _first(self, source: Buffer, marks: Buffer, wanted: Expr, begin: Expr, count: int) -> Expr:
        def candidate(c: Expr) -> Expr:
            hit = tirx.And(
                tirx.EQ(tirx.BufferLoad(source, [begin + c]), wanted), tirx.BufferLoad(marks, [begin + c]) > 0
            )
            return tirx.Select(hit, c, literal(count, "i32"))

        return self._over(count, "i32", count, tirx.min, candidate)

    def _over(
        self, count: int, dtype: str, start: int, combine: Callable[[Expr, Expr], Expr], element: Callable[[Expr], Expr]
    ) -> Expr:
        """Reduce over whole vectors."""
        emit, lanes = self.emit, self.lanes
        best = emit.alloc(lanes, dtype, "best")
        with emit.loop(lanes, VECTOR, "l") as lane:
            emit.store(best, literal(start, dtype), lane)
        with emit.loop(count // lanes, SERIAL, "c") as c, emit.loop(lanes, VECTOR, "l") as lane:
            emit.store(best, combine(tirx.BufferLoad(best, [lane]), element(c * lanes + lane)), lane)
        return emit.bind(fold(emit, dtype, lanes, combine, [best]), "best")


def emit_topk(body: Body, op: Op) -> None:
    x, (values, indices) = op.ins[0], op.outs
    a, axis, dims = complete_attrs(op), axis_of(op, x), x.type.dims
    count, largest = a["k"], bool(a["largest"])
    assert isinstance(count, int)
    outer, inner, emit = dims[:axis], dims[axis + 1 :], body.emit
    with emit.loop(prod(outer) * prod(inner), parallel_if(body.machine, x.type.size), "row") as r, body.point():
        lines = bound_index(emit, r, outer + inner, "r")

        def at(position: Expr) -> Index:
            return (*lines[: len(outer)], position, *lines[len(outer) :])

        if dims[axis] <= _SHORT and 8 * count >= dims[axis]:
            short = _ShortRow(body, dims[axis], x.type.dtype)
            short.fill(lambda c: order_key(body, body.at(x, at(c)), largest))
            with emit.loop(dims[axis], SERIAL, "i") as i, body.point():
                rank = emit.bind(tirx.BufferLoad(short.ranks, [i]), "rank")
                with emit.when(rank < count):
                    index = at(rank)
                    body.finish({values: (body.at(x, at(i)), index), indices: (cast(i, "i64"), index)})
            return
        if 3 * count >= dims[axis]:

            def wanted(place: Expr, rank: Expr) -> None:
                with emit.when(rank < count):
                    index = at(rank)
                    body.finish({values: (body.at(x, at(place)), index), indices: (cast(place, "i64"), index)})

            _emit_sorted(body, dims[axis], x.type.dtype, lambda c: order_key(body, body.at(x, at(c)), largest), wanted)
            return
        row = _TournamentRow(body, dims[axis], x.type.dtype)
        row.fill(lambda c: order_key(body, body.at(x, at(c)), largest))
        with emit.loop(count, SERIAL, "k") as k, body.point():
            place = row.take()
            index = at(k)
            body.finish({values: (body.at(x, at(place)), index), indices: (cast(place, "i64"), index)})
