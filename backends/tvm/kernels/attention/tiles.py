"""Building blocks of the attention kernels: register tiles of sums, packing of operands per head, and the choice of
tiles.

In: accessors into q, k, v and gradients, which read through any layout operation. Out: statements.

A tile is `rows` rows by up to `vectors` vectors: sum over k of a(row, k) * line(k), where a line is a row of a packed
operand. Scores are computed in panels of `width` keys, from keys that were turned so that a line runs along keys. A
tile of rows needs all of a panel (every row sees every key), some vectors of it (every key is tested), or nothing.
Behind the diagonal of a causal attention nothing is computed but the end of a vector.

Scores are kept in units of log 2, so that shares are powers of two; the factor is part of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from tvm import tirx

from penstock.backends.tvm.kernels.product.gemm import contiguous
from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, bound_index, broadcast_index, number, zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, VECTOR, Buffer, Expr, ceil_div, compute_dtype, literal
from penstock.backends.tvm.kernels.tools.transpose import transpose_block
from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs
from penstock.ir.types import ITEM_BYTES

LOG2E = math.log2(math.e)
# Steps of a sum in one turn of its loop.
_UNROLLED = 4


def lowest(dtype: str) -> float:
    """Return the lowest finite number, the score of a key that a mask hides."""
    return -float.fromhex("0x1.fffffep127") if dtype == "f32" else -float.fromhex("0x1.fffffffffffffp1023")


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of one attention and of its tiles. `depth` is that of q and k, `value_depth` that of v; padded sizes
    fill vectors."""

    batch: tuple[int, ...]
    queries: int
    keys: int
    depth: int
    value_depth: int
    causal: bool
    lanes: int
    rows: int
    vectors: int

    @property
    def width(self) -> int:
        return self.vectors * self.lanes

    @property
    def panels(self) -> int:
        return ceil_div(self.keys, self.width)

    @property
    def tiles(self) -> int:
        return ceil_div(self.queries, self.rows)

    def padded(self, size: int) -> int:
        return ceil_div(size, self.lanes) * self.lanes


def sizes_of(body: Body, op: Op, q: Value, k: Value, v: Value) -> AttentionSizes:
    lanes = max(body.lanes * 4 // ITEM_BYTES[compute_dtype(q.type.dtype)], 1)
    machine = body.machine
    batch, queries, depth = q.type.dims[:2], q.type.dims[2], q.type.dims[3]
    causal = bool(complete_attrs(op)["causal"])
    # Behind the last query no key is visible.
    keys = min(k.type.dims[2], queries) if causal else k.type.dims[2]
    return AttentionSizes(
        batch, queries, keys, depth, v.type.dims[3], causal, lanes, machine.product_rows, machine.product_vectors
    )


def over_heads(
    body: Body, op: Op, operands: Sequence[Value], ease: int, head: Callable[[AttentionSizes, Index], None]
) -> None:
    """Call `head` for every head of every batch entry, shared out among threads; `operands` are q, k and v. A
    multiplication and an addition take 1 / `ease` of what loops count as work."""
    if body.loops is not None:
        raise NotOneKernel(f"{op.kind} has loops for CPUs only")
    q, k, v = operands
    if 0 in q.type.dims[:2]:
        return
    sizes = sizes_of(body, op, q, k, v)
    work = math.prod(sizes.batch) * sizes.queries * sizes.keys * (sizes.depth + sizes.value_depth)
    with body.emit.loop(math.prod(sizes.batch), parallel_if(body.machine, work // ease), "b") as b, body.point():
        head(sizes, bound_index(body.emit, b, sizes.batch, "b"))


def scale_of(op: Op) -> float:
    return number(complete_attrs(op)["scale"])


def smaller(a: Expr, b: Expr | int) -> Expr:
    return tirx.min(a, b)


class Tile(Protocol):
    """A tile of rows times a panel of keys: `whole` where every row sees every key, else `part` for some vectors, then
    `after`, which tests every key."""

    def whole(self) -> None: ...
    def part(self, vectors: int) -> None: ...
    def after(self, vectors: int | Expr) -> None: ...


class Tiles:
    """The emitter of tiles, packing and masks of attention. Lengths and starts are numbers or index expressions;
    buffers are flat."""

    def __init__(self, body: Body, sizes: AttentionSizes, dtype: str) -> None:
        self.body, self.emit, self.s, self.dtype = body, body.emit, sizes, dtype
        self.functions = body.functions

    # ------------------------------------------------------------------------------ vectors

    def load(self, buffer: Buffer, at: Expr) -> Expr:
        return tirx.BufferLoad(buffer, [tirx.Ramp(at, 1, self.s.lanes)])

    def store(self, buffer: Buffer, at: Expr, value: Expr) -> None:
        self.emit.add(tirx.BufferStore(buffer, value, [tirx.Ramp(at, 1, self.s.lanes)]))

    def spread(self, value: Expr) -> Expr:
        return tirx.Broadcast(value, self.s.lanes)

    def constant(self, value: float) -> Expr:
        return literal(value, self.dtype)

    @contextmanager
    def vector(self) -> Iterator[Expr]:
        """Open a vector loop, in which expressions are written for one lane."""
        with self.emit.loop(self.s.lanes, VECTOR, "l") as lane, self.body.point():
            yield lane

    def fill(self, buffer: Buffer, start: Expr, count: int | Expr, value: float) -> None:
        """Store a number in `count` elements, whole vectors."""
        lanes = self.s.lanes
        with self.emit.loop(count // lanes, SERIAL, "z") as z:
            self.store(buffer, start + z * lanes, self.spread(self.constant(value)))

    def total(self, accumulator: Buffer, combine: Callable[[Expr, Expr], Expr]) -> Expr:
        """Fold a vector to one number."""
        half = self.s.lanes
        while half > 1:
            half //= 2
            with self.emit.loop(half, VECTOR, "l") as lane:
                folded = combine(tirx.BufferLoad(accumulator, [lane]), tirx.BufferLoad(accumulator, [lane + half]))
                self.emit.store(accumulator, folded, lane)
        return self.emit.bind(tirx.BufferLoad(accumulator, [zero()]))

    # ------------------------------------------------------------------------------ sums in registers

    def sums(
        self,
        vectors: int,
        count: int | Expr,
        a: Callable[[int, Expr], Expr],
        line: Callable[[int, Expr], Expr],
        *,
        start: Callable[[int, int], Expr] | None = None,
        unrolled: int = _UNROLLED,
    ) -> list[Buffer]:
        """Sum in registers: accumulators[row][vector] = start(row, vector) + sum over k < count of a(row, k) *
        line(vector, k). A count that is an expression must be a multiple of `unrolled`."""
        emit, lanes = self.emit, self.s.lanes
        accumulators = [emit.alloc(vectors * lanes, self.dtype, "acc") for _ in range(self.s.rows)]
        for r, acc in enumerate(accumulators):
            for v in range(vectors):
                first = self.spread(self.constant(0)) if start is None else start(r, v)
                self.store(acc, literal(v * lanes, "i32"), first)

        def step(k: Expr) -> None:
            # The order matters: a line in registers, then row by row one value, so that few registers are live besides
            # the sums.
            row = emit.alloc(vectors * lanes, self.dtype, "line")
            for v in range(vectors):
                self.store(row, literal(v * lanes, "i32"), line(v, k))
            for r, acc in enumerate(accumulators):
                x = self.spread(emit.bind(a(r, k), "a"))
                for v in range(vectors):
                    at = literal(v * lanes, "i32")
                    self.store(acc, at, self.load(acc, at) + x * self.load(row, at))

        turns, tail = divmod(count, unrolled) if isinstance(count, int) else (tirx.floordiv(count, unrolled), 0)
        with emit.loop(turns, SERIAL, "k") as k:
            for u in range(unrolled):
                with self.body.point():
                    step(k * unrolled + u)
        for u in range(tail):
            with self.body.point():
                step(turns * unrolled + literal(u, "i32"))
        return accumulators

    # ------------------------------------------------------------------------------ packing

    def rows_of(self, value: Value, lead: Index, count: int, rows: int, depth: int, factor: float = 1.0) -> Buffer:
        """Pack an operand by rows, [rows, padded depth]; rows from `count` on and columns from `depth` on are zero."""
        width = self.s.padded(depth)
        packed = self.emit.alloc(rows * width, self.dtype, "rows")
        with self.emit.loop(count, SERIAL, "r") as row:
            for c, _ in self.emit.spans(depth, self.s.lanes):
                with self.body.point():
                    x = self.body.at(value, (*lead, row, c))
                    self.emit.store(packed, x * self.constant(factor) if factor != 1 else x, row * width + c)
            for c in range(depth, width):
                self.emit.store(packed, self.constant(0), row * width + c)
        self.fill(packed, literal(count * width, "i32"), (rows - count) * width, 0)
        return packed

    def turned(self, value: Value, lead: Index, depth: int) -> Buffer:
        """Pack an operand transposed, [panels, depth, width]: the keys of a panel are neighbours; keys that do not
        exist are zero."""
        s, emit, lanes = self.s, self.emit, self.s.lanes
        packed = emit.alloc(s.panels * depth * s.width, self.dtype, "turned")
        groups, odd = divmod(s.keys, lanes)
        where = tirx.Var("w", "int32")
        squares = depth // lanes if contiguous(self.body, value, lambda d: (*lead, where, d), depth) else 0

        def base(group: Expr) -> Expr:
            per = s.vectors
            return tirx.floordiv(group, per) * (depth * s.width) + tirx.floormod(group, per) * lanes

        if squares:
            with emit.loop(groups, SERIAL, "g") as group, emit.loop(squares, SERIAL, "d") as d, self.body.point():
                addresses = [self.body.address(value, (*lead, group * lanes + r, d * lanes)) for r in range(lanes)]
                places = [self.body.memory(address) for address in addresses if address is not None]
                columns = transpose_block(emit, self.dtype, lanes, lanes, places[0][0], [at for _, at in places])
                for r, column in enumerate(columns):
                    self.store(packed, base(group) + (d * lanes + r) * s.width, column)
        if squares * lanes < depth:
            with (
                emit.loop(groups, SERIAL, "g") as group,
                emit.loop(depth - squares * lanes, SERIAL, "d") as d,
                self.vector() as lane,
            ):
                x = self.body.at(value, (*lead, group * lanes + lane, d + squares * lanes))
                emit.store(packed, x, base(group) + (d + squares * lanes) * s.width + lane)
        if odd:
            group = literal(groups, "i32")
            with emit.loop(depth, SERIAL, "d") as d:
                with emit.loop(odd, SERIAL, "r") as r, self.body.point():
                    emit.store(
                        packed, self.body.at(value, (*lead, r + groups * lanes, d)), base(group) + d * s.width + r
                    )
                with emit.loop(lanes - odd, SERIAL, "r") as r:
                    emit.store(packed, self.constant(0), base(group) + d * s.width + r + odd)
        return packed

    # ------------------------------------------------------------------------------ which tiles

    def visible(self, first_row: Expr) -> int | Expr:
        """Count the keys that some row of the tile from `first_row` on sees."""
        return smaller(first_row + self.s.rows, self.s.keys) if self.s.causal else self.s.keys

    def seen_by(self, row: Expr) -> int | Expr:
        """Count the keys that a row sees."""
        return smaller(row + 1, self.s.keys) if self.s.causal else self.s.keys

    def panel(self, first_row: Expr, first_key: Expr, tile: Tile) -> None:
        """Emit the part of a panel that a tile of rows needs, chosen at run time. `first_key` is the panel's."""
        s, emit = self.s, self.emit
        if not s.causal:
            odd = s.keys % s.width
            vectors = ceil_div(odd, s.lanes)
            if s.panels > 1:
                with emit.when(first_key < s.keys - odd) if odd else nullcontext():
                    tile.whole()
            elif not odd:
                tile.whole()
            if odd:
                with emit.when(first_key >= s.keys - odd) if s.panels > 1 else nullcontext():
                    tile.part(vectors)
                    tile.after(vectors)
            return
        all_seen = tirx.all(first_key + s.width <= first_row + 1, first_key + s.width <= s.keys)
        needed = emit.bind(
            smaller(tirx.floordiv(self.visible(first_row) - first_key + (s.lanes - 1), s.lanes), s.vectors), "n"
        )
        with emit.when(all_seen):
            tile.whole()
        with emit.when(tirx.Not(all_seen)):
            for v in range(1, s.vectors + 1):
                with emit.when(tirx.EQ(needed, v)):
                    tile.part(v)
            with emit.when(needed > 0):
                tile.after(needed)

    def only_visible(self, x: Expr, key: Expr, limit: Expr | int, otherwise: float) -> Expr:
        """Return a number, or `otherwise` where the key is not visible."""
        return tirx.Select(key < limit, x, self.constant(otherwise))

    # ------------------------------------------------------------------------------ masks

    def mask(
        self,
        mask: Value,
        lead: Index,
        target: Buffer,
        stride: int,
        first_row: Expr,
        first_key: Expr,
        rows: int | Expr,
        keys: int | Expr,
    ) -> None:
        """Store the numbers that the mask adds to scores, [rows, stride], in units of log 2; hidden keys get the lowest
        number."""
        emit, body, lanes = self.emit, self.body, self.s.lanes
        bottom = self.constant(lowest(self.dtype))

        def value(row: Expr, key: Expr) -> Expr:
            index = (*lead, smaller(first_row + row, self.s.queries - 1), key)
            x = body.at(mask, broadcast_index(index, mask.type.dims))
            if mask.type.dtype == "bool":
                return tirx.Select(x, self.constant(0), bottom)
            grown = emit.bind(x * self.constant(LOG2E))
            return tirx.Select(grown < bottom, bottom, grown)

        whole = keys // lanes if isinstance(keys, int) else tirx.floordiv(keys, lanes)
        with emit.loop(rows, SERIAL, "r") as row:
            with emit.loop(whole, SERIAL, "c") as c, self.vector() as lane:
                emit.store(target, value(row, first_key + c * lanes + lane), row * stride + c * lanes + lane)
            with emit.loop(keys - whole * lanes, SERIAL, "c") as c, body.point():
                emit.store(target, value(row, first_key + (c + whole * lanes)), row * stride + (c + whole * lanes))

    # ------------------------------------------------------------------------------ results

    def each_element(
        self,
        accumulators: Sequence[Buffer],
        first_row: Expr,
        rows: int,
        columns: int,
        finish: Callable[[int, Expr, Expr], None],
    ) -> None:
        """Call finish(row of the tile, element, column) for the elements of a tile that exist: the first `columns`,
        rows below `rows`."""
        emit, lanes = self.emit, self.s.lanes
        for r, acc in enumerate(accumulators):
            with emit.when(first_row + r < rows):
                for v in range(columns // lanes):
                    with self.vector() as lane:
                        finish(r, tirx.BufferLoad(acc, [lane + v * lanes]), lane + v * lanes)
                for c in range(columns // lanes * lanes, columns):
                    with self.body.point():
                        finish(r, tirx.BufferLoad(acc, [literal(c, "i32")]), literal(c, "i32"))
