"""A register tile of a matrix product: rows of accumulators, to which products of a factor and a vector are added.

In: the factors of a step, and its vectors. Out: statements that keep sums in registers through a loop.
"""

from __future__ import annotations

from tvm import tirx

from .emit import VECTOR, Buffer, Emitter, Expr, literal


class RegisterTile:
    """The emitter of a tile of `rows` rows of `width` accumulators, whole vectors of `lanes`."""

    def __init__(self, emit: Emitter, dtype: str, rows: int, width: int, lanes: int, *, lane: str = "l") -> None:
        self.emit, self.dtype, self.width, self.lanes, self._lane = emit, dtype, width, lanes, lane
        # One array per row: TVM keeps arrays below 1024 bytes on the stack, and only those become registers.
        self.accumulators = [emit.alloc(width, dtype, "acc") for _ in range(rows)]
        for acc in self.accumulators:
            for v in range(0, width, lanes):
                with emit.loop(lanes, VECTOR, lane) as j:
                    emit.store(acc, literal(0, dtype), j + v)

    def line(self, source: Buffer, start: Expr) -> Buffer:
        """Load the vectors of a step, which lie in a buffer from `start` on."""
        line = self.emit.alloc(self.width, self.dtype, "b")
        for v in range(0, self.width, self.lanes):
            with self.emit.loop(self.lanes, VECTOR, self._lane) as j:
                self.emit.store(line, tirx.BufferLoad(source, [start + (j + v)]), j + v)
        return line

    def add(self, row: int, factor: Expr, line: Buffer) -> None:
        """Add a factor times the vectors of a step to one row."""
        acc, factor = self.accumulators[row], self.emit.bind(factor, "a")
        for v in range(0, self.width, self.lanes):
            with self.emit.loop(self.lanes, VECTOR, self._lane) as j:
                column = j + v
                total = tirx.BufferLoad(acc, [column]) + factor * tirx.BufferLoad(line, [column])
                self.emit.store(acc, total, column)

    def store(self, row: int, target: Buffer, start: Expr) -> None:
        """Store the accumulators of one row in a buffer, from `start` on."""
        for v in range(0, self.width, self.lanes):
            with self.emit.loop(self.lanes, VECTOR, self._lane) as j:
                self.emit.store(target, tirx.BufferLoad(self.accumulators[row], [j + v]), start + (j + v))
