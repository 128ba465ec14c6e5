"""The choice of a word for each row of logits.

In: logits, and how to choose from each row. Out: a loop over rows, shared by threads:

    copy the row, nan as the lowest; the largest, and the first place that has it
    where the temperature is above 0:
      weights in whole numbers                           (ir/ops/caches.py says how)
      the limit of the top_k largest, of the top_p share
      one draw below the sum of the weights that are left, and the first place where their sum goes past it

A limit is found digit by digit of the order of logits, 11 bits at once. Weights are added up in a list of 2048 sums,
and the sums are walked from the top until they reach what is wanted. Whole numbers add up to the same in any order. So
the choice is that of the interpreter on every machine, and by any number of threads.
"""

from __future__ import annotations

import math

from tvm import tirx

from penstock.backends.tvm.kernels.rows.select import order_key
from penstock.backends.tvm.kernels.rows.sums import fold
from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.draws import philox
from penstock.backends.tvm.kernels.tools.elements import zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, cast, literal
from penstock.ir.graph import Op
from penstock.ir.ops.caches import LOWEST_EXPONENT, STEP_BITS, TOP_BITS, WEIGHT_POLYNOMIAL

# Shifts and widths of the digits of an order key, the highest first.
_DIGITS = ((21, 11), (10, 11), (0, 10))
_BINS = 2048


def emit_pick(body: Body, op: Op) -> None:
    """Emit the loop over rows."""
    if body.loops is not None:
        raise NotOneKernel(f"{op.kind} has loops for CPUs only")
    logits = op.ins[0]
    # A row is work even where its result is one number.
    with body.emit.loop(logits.type.dims[0], parallel_if(body.machine, 4 * logits.type.size), "s") as s, body.point():
        _Choice(body, op, s).run()


def weight_of(body: Body, x: Expr, largest: Expr, rate: Expr) -> Expr:
    """Return the weight of a logit as a whole number."""
    bind = body.emit.bind
    most = literal(LOWEST_EXPONENT, "f32")
    down = bind((largest - x) * rate)
    down = bind(tirx.Select(tirx.EQ(x, largest), literal(0, "f32"), tirx.Select(down < most, down, most)))
    steps = bind(cast(down * literal(1 << STEP_BITS, "f32"), "i32"))
    part = bind(cast(steps & literal((1 << STEP_BITS) - 1, "i32"), "i64"))
    weight = literal(WEIGHT_POLYNOMIAL[0], "i64")
    for coefficient in WEIGHT_POLYNOMIAL[1:]:
        weight = bind(((weight * part) >> literal(STEP_BITS, "i64")) + literal(coefficient, "i64"))
    exponent = cast(steps >> literal(STEP_BITS, "i32"), "i64")
    weight = bind((weight << literal(TOP_BITS - 30, "i64")) >> exponent)
    return tirx.Select(down >= most, literal(0, "i64"), weight)


def share_of(body: Body, total: Expr, share: Expr, bits: int) -> Expr:
    """Return total * share / 2^bits, rounded down, where the product is beyond 64 bits."""
    shift, low = literal(bits, "i64"), literal((1 << bits) - 1, "i64")
    total, share = body.emit.bind(total, "total"), body.emit.bind(share, "share")
    return body.emit.bind((total >> shift) * share + (((total & low) * share) >> shift), "share")


def word_of(body: Body, seed: Expr, position: Expr) -> Expr:
    """Return the random word of a position under a seed, by Philox."""
    bind = body.emit.bind
    high = bind(tirx.Cast("uint32", tirx.shift_right(seed, tirx.IntImm("uint64", 32))), "high")
    first, _ = philox(
        body.functions, bind(tirx.Cast("uint32", position), "low"), high, bind(tirx.Cast("uint32", seed), "key")
    )
    return bind(tirx.Cast("int64", first), "word")


class _Choice:
    """The emitter of one row."""

    def __init__(self, body: Body, op: Op, row: Expr) -> None:
        self.body, self.op, self.emit, self.row = body, op, body.emit, row
        self.size = op.ins[0].type.dims[1]
        self.values = self.emit.alloc(self.size, "f32", "values")
        self.picked = self._number("i32", 0, "picked")

    def _number(self, dtype: str, value: int, name: str) -> Buffer:
        place = self.emit.alloc(1, dtype, name)
        self.emit.store(place, literal(value, dtype), zero())
        return place

    def _of(self, place: Buffer) -> Expr:
        return tirx.BufferLoad(place, [zero()])

    def _set(self, place: Buffer, value: Expr) -> None:
        self.emit.store(place, value, zero())

    def run(self) -> None:
        emit, body = self.emit, self.body
        temperature = emit.bind(body.at(self.op.ins[2], (self.row,)), "heat")
        largest = self._copy()
        self._first_of(largest)
        with emit.when(temperature > literal(0, "f32")), body.point():
            self._draw(largest, temperature)
        body.finish({self.op.outs[0]: (cast(self._of(self.picked), "i64"), (self.row,))})

    def _copy(self) -> Expr:
        """Copy the row, and return the largest."""
        emit, lanes = self.emit, self.body.lanes
        best = emit.alloc(lanes, "f32", "best")
        lowest = literal(-math.inf, "f32")
        with emit.loop(lanes, VECTOR, "l") as lane:
            emit.store(best, lowest, lane)
        for c, lane in emit.spans(self.size, lanes):
            with self.body.point():
                x = emit.bind(self.body.at(self.op.ins[0], (self.row, c)))
                # Of nan no comparison holds.
                x = emit.bind(tirx.Select(x >= lowest, x, lowest))
                emit.store(self.values, x, c)
                old = tirx.BufferLoad(best, [lane])
                emit.store(best, tirx.Select(x > old, x, old), lane)
        return fold(emit, "f32", lanes, lambda a, b: tirx.Select(a > b, a, b), [best])

    def _first_of(self, wanted: Expr) -> None:
        """Set the choice to the first place that has a value."""
        emit, lanes, size = self.emit, self.body.lanes, self.size
        first = emit.alloc(lanes, "i32", "first")
        with emit.loop(lanes, VECTOR, "l") as lane:
            emit.store(first, literal(size, "i32"), lane)
        for c, lane in emit.spans(size, lanes):
            hit = tirx.EQ(tirx.BufferLoad(self.values, [c]), wanted)
            place = tirx.Select(hit, c, literal(size, "i32"))
            emit.store(first, tirx.min(tirx.BufferLoad(first, [lane]), place), lane)
        self._set(self.picked, fold(emit, "i32", lanes, tirx.min, [first]))

    # ------------------------------------------------------------------------------ a draw

    def _draw(self, largest: Expr, temperature: Expr) -> None:
        emit, body = self.emit, self.body
        self.weights = emit.alloc(self.size, "i64", "weights")
        self.keys = emit.alloc(self.size, "i32", "keys")
        self.bins = emit.alloc(_BINS, "i64", "bins")
        rate = emit.bind(literal(math.log2(math.e), "f32") / temperature, "rate")
        for c, _ in emit.spans(self.size, body.lanes):
            with body.point():
                x = emit.bind(tirx.BufferLoad(self.values, [c]))
                emit.store(self.keys, order_key(body, x, True), c)
                emit.store(self.weights, weight_of(body, x, largest, rate), c)
        self.limit = self._number("i32", -(2**31), "limit")
        count = emit.bind(body.at(self.op.ins[3], (self.row,)), "k")
        with emit.when(tirx.And(count > 0, count < self.size)), body.point():
            self._raise_limit(cast(count, "i64"), counting=True)
        share = emit.bind(body.at(self.op.ins[4], (self.row,)), "p")
        total = self._number("i64", 0, "total")
        with emit.when(share < literal(1, "f32")), body.point():
            self._total(total)
            part = cast(
                tirx.Select(share > literal(0, "f32"), share, literal(0, "f32")) * literal(1 << 24, "f32"), "i64"
            )
            wanted = share_of(body, self._of(total), emit.bind(part, "part"), 24)
            self._raise_limit(tirx.max(wanted, literal(1, "i64")), counting=False)
        self._total(total)
        draws = self.op.ins[1]
        seed, position = (emit.bind(body.at(draws, (self.row, literal(i, "i32"))), "draw") for i in (0, 1))
        drawn = emit.bind(share_of(body, self._of(total), word_of(body, seed, position), 32), "drawn")
        self._walk(drawn)

    def _kept(self, c: Expr) -> Expr:
        """Return the weight of a place, 0 below the limit."""
        above = tirx.BufferLoad(self.keys, [c]) >= self._of(self.limit)
        return tirx.Select(above, tirx.BufferLoad(self.weights, [c]), literal(0, "i64"))

    def _total(self, total: Buffer) -> None:
        """Add up the weights that are kept."""
        emit, lanes = self.emit, self.body.lanes
        sums = emit.alloc(lanes, "i64", "sums")
        with emit.loop(lanes, VECTOR, "l") as lane:
            emit.store(sums, literal(0, "i64"), lane)
        for c, lane in emit.spans(self.size, lanes):
            emit.store(sums, tirx.BufferLoad(sums, [lane]) + self._kept(c), lane)
        self._set(total, fold(emit, "i64", lanes, lambda a, b: a + b, [sums]))

    def _raise_limit(self, wanted: Expr, *, counting: bool) -> None:
        """Raise the limit to the largest key that, with all above it, reaches a sum of weights, or a count."""
        emit, old = self.emit, self._number("i32", 0, "old")
        self._set(old, self._of(self.limit))
        left = emit.alloc(1, "i64", "left")
        self._set(left, wanted)
        prefix = self._number("i32", 0, "prefix")
        for number, (shift, width) in enumerate(_DIGITS):
            for c, _ in emit.spans(1 << width, self.body.lanes):
                emit.store(self.bins, literal(0, "i64"), c)
            with emit.loop(self.size, SERIAL, "c") as c, self.body.point():
                key = emit.bind(tirx.BufferLoad(self.keys, [c]), "key")
                digit = key >> literal(shift, "i32")
                inside = key >= self._of(old)
                if number:
                    upper = key >> literal(shift + width, "i32")
                    inside = tirx.And(inside, tirx.EQ(upper, self._of(prefix)))
                    digit = digit & literal((1 << width) - 1, "i32")
                else:
                    # The sign: places of negative keys come first.
                    digit = digit + literal(1 << (width - 1), "i32")
                with emit.when(inside):
                    at = emit.bind(digit, "digit")
                    one = literal(1, "i64") if counting else tirx.BufferLoad(self.weights, [c])
                    emit.store(self.bins, tirx.BufferLoad(self.bins, [at]) + one, at)
            self._walk_bins(1 << width, left, prefix, first=number == 0)
        self._set(self.limit, self._of(prefix))

    def _walk_bins(self, count: int, left: Buffer, prefix: Buffer, *, first: bool) -> None:
        """Find the digit, from the top, with which the sums reach what is left, and append it to the prefix."""
        emit = self.emit
        chosen = self._number("i32", 0, "chosen")
        done = self._number("i32", 0, "done")
        with emit.loop(count, SERIAL, "d") as d, emit.when(tirx.EQ(self._of(done), 0)), self.body.point():
            digit = emit.bind(count - 1 - d, "digit")
            here = emit.bind(tirx.BufferLoad(self.bins, [digit]), "here")
            with emit.when(here >= self._of(left)):
                self._set(chosen, digit)
                self._set(done, literal(1, "i32"))
            with emit.when(here < self._of(left)):
                self._set(left, self._of(left) - here)
        if first:
            self._set(prefix, self._of(chosen) - count // 2)
        else:
            self._set(prefix, self._of(prefix) * count + self._of(chosen))

    def _walk(self, drawn: Expr) -> None:
        """Set the choice to the first place where the sum of the weights goes past what was drawn."""
        emit = self.emit
        done, total = self._number("i32", 0, "done"), self._number("i64", 0, "sum")
        with emit.loop(self.size, SERIAL, "c") as c, emit.when(tirx.EQ(self._of(done), 0)), self.body.point():
            self._set(total, self._of(total) + self._kept(c))
            with emit.when(self._of(total) > drawn):
                self._set(self.picked, c)
                self._set(done, literal(1, "i32"))
