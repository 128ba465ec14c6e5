"""Recurrences: all steps of a recurrent layer but the first, in one loop.

In: a group that is a recurrence (ir/ops/recurrences.py). Out: loops

    pack the matrix              [panel][row][columns in lanes], once, or ahead of the kernel
    for rows of the batch, in a few parts that threads share:
      the states before the loop into scratch memory
      for step:
        product = first state * matrix, in tiles that stay in registers over the whole sum
        for vector of the state: all new states from the product and the old ones; the result into its place

The operations of one step are computed as they stand, for any cell. A state is read and replaced at the same element.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from penstock.backends.tvm.group import Fusion
from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.correlation import cover
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import SERIAL, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.register_tile import RegisterTile
from penstock.backends.tvm.kernels.tools.transpose import pieces
from penstock.ir.graph import Op, Value
from penstock.ir.ops import complete_attrs, ints
from penstock.ir.ops.recurrences import MODEL_STEP, Recurrence, find_recurrence

# Vectors of a tile of one row: as many sums as hide the latency of a multiply-add.
_MOST_VECTORS = 14
# Parts of the batch that threads share.
_PARTS = 4


def is_recurrence(group: Fusion) -> bool:
    """Return whether a group has several products whose results are joined."""
    return sum(op.kind == "matmul" for op in group.ops) > 1 and any(op.kind == "concat" for op in group.ops)


def emit_recurrence(body: Body) -> None:
    """Emit the loop of a recurrence; refuse a group that is none."""
    group = body.group
    ops = [*group.inline.values(), *group.ops]
    makers = {value: op for op in ops for value in op.outs}
    readers: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.ins:
            readers.setdefault(value, []).append(op)
    concat = next(op for op in group.ops if op.kind == "concat")
    recurrence = find_recurrence(concat, group.ops, makers, readers, set(group.outs))
    if recurrence is None or {id(op) for op in recurrence.ops} != {id(op) for op in group.ops}:
        raise NotOneKernel("these products are no recurrence")
    _Steps(body, recurrence).run()


class _Steps:
    """The emitter of the loop of a recurrence."""

    def __init__(self, body: Body, r: Recurrence) -> None:
        self.body, self.r, self.emit, self.lanes = body, r, body.emit, body.lanes
        product = r.products[0]
        self.batch, self.columns = product.outs[0].type.dims
        self.size = product.ins[0].type.dims[1]
        self.turned = bool(complete_attrs(product)["tb"])
        sums = body.machine.product_rows * body.machine.product_vectors
        parts = min(_PARTS, max(self.batch // body.machine.product_rows, 1))
        self.part = ceil_div(self.batch, parts)
        self.rows = min(self.part, body.machine.product_rows)
        whole = ceil_div(self.columns, self.lanes)
        panels = ceil_div(whole, min(sums // self.rows, _MOST_VECTORS))
        self.vectors = ceil_div(whole, panels)
        self.width = whole * self.lanes

    def run(self) -> None:
        emit, size = self.emit, self.size * self.width
        weights = self.body.packed_ahead(self.r.products[0], size, "f32", self._fill)
        if weights is None:
            weights = emit.alloc(size, "f32", "wp")
            self._fill(weights)
        work = len(self.r.products) * self.batch * self.columns * self.size
        whole, tail = divmod(self.batch, self.part)
        with emit.loop(whole, parallel_if(self.body.machine, work // 8), "part") as part, self.body.point():
            self._rows(weights, part * self.part if whole > 1 else literal(0, "i32"), self.part)
        if tail:
            with self.body.point():
                self._rows(weights, literal(whole * self.part, "i32"), tail)

    def _fill(self, packed: Buffer) -> None:
        """Pack the matrix: panel by panel, the columns of a row side by side, with zeros behind the last one."""
        emit, matrix = self.emit, self.r.products[0].ins[1]
        for first, vectors in cover(emit, self.width // self.lanes, self.vectors, "panel"):
            count = vectors * self.lanes
            with emit.loop(self.size, SERIAL, "k") as k, emit.loop(count, SERIAL, "j") as j, self.body.point():
                column = emit.bind(first * self.lanes + j, "column")
                inside = tirx.min(column, self.columns - 1)
                value = self.body.at(matrix, (inside, k) if self.turned else (k, inside))
                if self.width > self.columns:
                    value = tirx.Select(column < self.columns, value, literal(0, "f32"))
                emit.store(packed, value, first * (self.lanes * self.size) + k * count + j)

    def _rows(self, weights: Buffer, first: Expr, rows: int) -> None:
        """Emit all steps of some rows of the batch."""
        emit, r, body = self.emit, self.r, self.body
        first = emit.bind(first, "first")
        states = [emit.alloc(rows * self.size, "f32", "state") for _ in r.states]
        product = emit.alloc(rows * self.width, "f32", "product")
        with emit.loop(rows, SERIAL, "b") as b:
            for j, _ in pieces(emit, self.size, self.lanes):
                with body.point():
                    values = [body.at(state[0], (first + b, j)) for state in r.states]
                    for state, value in zip(states, values, strict=True):
                        emit.store(state, value, b * self.size + j)
                    self._store_result(literal(0, "i32"), first + b, j, values[0])
        with emit.loop(len(r.products), SERIAL, "t") as t, body.point():
            self._product(weights, states[0], product, rows)
            self._step(t, first, rows, states, product)
        left = [*((buffer, state[-1]) for buffer, state in zip(states, r.states, strict=True))]
        for buffer, last in (*left, *((states[0], value) for value in r.last)):
            if last in body.group.outs:
                with emit.loop(rows, SERIAL, "b") as b:
                    for j, _ in pieces(emit, self.size, self.lanes):
                        value = tirx.BufferLoad(buffer, [b * self.size + j])
                        emit.store(body.result(last), value, (first + b) * self.size + j)

    def _store_result(self, step: Expr, row: Expr, j: Expr, value: Expr) -> None:
        """Store an element of the result of a step, counted from the one in front of the loop."""
        place = len(self.r.products) - step if self.r.backward else step
        self.emit.store(self.body.result(self.r.concat.outs[0]), value, (place * self.batch + row) * self.size + j)

    def _product(self, weights: Buffer, state: Buffer, product: Buffer, rows: int) -> None:
        """Multiply the first state with the matrix."""
        emit = self.emit
        for first, vectors in cover(emit, self.width // self.lanes, self.vectors, "panel"):
            width = vectors * self.lanes
            for row, height in cover(emit, rows, self.rows, "row"):
                with self.body.point():
                    tile = RegisterTile(emit, "f32", height, width, self.lanes)
                    with emit.loop(self.size, SERIAL, "k") as k, self.body.point():
                        line = tile.line(weights, first * (self.lanes * self.size) + k * width)
                        for i in range(height):
                            tile.add(i, tirx.BufferLoad(state, [(row + i) * self.size + k]), line)
                    for i in range(height):
                        tile.store(i, product, (row + i) * self.width + first * self.lanes)

    def _step(self, t: Expr, first: Expr, rows: int, states: list[Buffer], product: Buffer) -> None:
        """Compute the new states of a step from its product and the old ones."""
        emit, body, r = self.emit, self.body, self.r
        readers: dict[Value, Callable[[Index], Expr]] = {
            r.products[MODEL_STEP - 1].outs[0]: lambda i: tirx.BufferLoad(product, [(i[0] - first) * self.width + i[1]])
        }
        for buffer, values in zip(states, r.states, strict=True):
            readers[values[MODEL_STEP - 1]] = _reader(buffer, first, self.size)
        readers |= {value: self._moved(value, move, t) for value, move in r.moving.items() if any(move)}
        with body.giving(readers), emit.loop(rows, SERIAL, "b") as b:
            for j, _ in pieces(emit, self.size, self.lanes):
                with body.point():
                    index = (first + b, j)
                    news = [body.at(values[MODEL_STEP], index) for values in r.states]
                    for buffer, value in zip(states, news, strict=True):
                        emit.store(buffer, value, b * self.size + j)
                    self._store_result(t + 1, first + b, j, news[0])

    def _moved(self, value: Value, move: tuple[int, ...], t: Expr) -> Callable[[Index], Expr]:
        """Return the reader of a slice that moves from step to step."""
        op = self.body.group.inline[value]
        start, step = ints(op.attrs["start"]), ints(op.attrs["step"])

        def read(index: Index) -> Expr:
            places = zip(index, start, step, move, strict=True)
            return self.body.at(op.ins[0], tuple(i * s + b + (t + (1 - MODEL_STEP)) * m for i, b, s, m in places))

        return read


def _reader(buffer: Buffer, first: Expr, size: int) -> Callable[[Index], Expr]:
    return lambda index: tirx.BufferLoad(buffer, [(index[0] - first) * size + index[1]])
