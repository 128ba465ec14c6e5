"""The body of a kernel for GPUs: the body of kernels/tools/body.py with memory of narrow floats, and the thread's
emitter.

Operations on f16 and bf16 are computed in f32. Operands are widened when they are loaded, results rounded when they are
stored; values that are fused in between are not rounded. Generators get operations whose values have the wide type;
`own` leads back to the values of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from penstock.backends.tvm.kernels.tools.body import Body, Fusion
from penstock.backends.tvm.kernels.tools.elements import Index
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr
from penstock.backends.tvm.target import TargetMachine
from penstock.ir.graph import Op, Slot, Value

from .chunks import Chunk
from .threads import NARROW, DeviceFunctions, ThreadEmitter


class DeviceBody(Body):
    """One GPU kernel while it is being emitted."""

    emit: ThreadEmitter

    def __init__(self, group: Fusion, machine: TargetMachine) -> None:
        # First, because the base class looks values up.
        self._narrow: dict[Value, Value] = {}
        super().__init__(group, machine)
        self.emit = ThreadEmitter()
        self.functions = DeviceFunctions(self.emit)
        # Set where all threads of a block compute the same: the condition under which one of them stores it.
        self.alone: Expr | None = None
        # Set in the loop over the elements of a chunk.
        self.chunk: Chunk | None = None

    def widened(self, op: Op) -> Op:
        """Return the operation on values of the types it is computed in; every call of this object takes them for those
        of the graph."""
        wide = replace(op, ins=tuple(map(self._wide, op.ins)), outs=tuple(map(self._wide, op.outs)))
        self._narrow |= dict(zip((*wide.ins, *wide.outs), (*op.ins, *op.outs), strict=True))
        return wide

    def _wide(self, value: Value) -> Value:
        return replace(value, type=value.type.with_dtype("f32")) if value.type.dtype in NARROW else value

    def computed(self, op: Op) -> Op:
        if op.kind == "bitcast":  # reads the bits of the types in memory
            return op
        return replace(op, ins=tuple(map(self._wide, op.ins)), outs=tuple(map(self._wide, op.outs)))

    def own(self, value: Value) -> Value:
        """Return the value of the graph for one of the wide type."""
        return self._narrow.get(value, value)

    # ------------------------------------------------------------------------------ the same for values of either type

    def operand(self, value: Value) -> Buffer:
        return super().operand(self.own(value))

    def result(self, value: Value) -> Buffer:
        return super().result(self.own(value))

    def slot(self, slot: Slot, value: Value) -> Buffer:
        return super().slot(slot, self.own(value))

    def is_stored(self, value: Value) -> bool:
        return super().is_stored(self.own(value))

    def know(self, value: Value, index: Index, expr: Expr) -> None:
        super().know(self.own(value), index, expr)

    def at(self, value: Value, index: Index) -> Expr:
        return super().at(self.own(value), index)

    def finish(self, known: Mapping[Value, tuple[Expr, Index]]) -> None:
        with self.one_thread():
            super().finish({self.own(value): pair for value, pair in known.items()})

    def store_apart(self, value: Value, expr: Expr, index: Index) -> None:
        with self.one_thread():
            super().store_apart(self.own(value), expr, index)

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Emit the statements inside for one thread, where all threads of a block compute the same."""
        if self.alone is None:
            yield
        else:
            with self.emit.when(self.alone), self.point():
                yield

    def read(self, buffer: Buffer, value: Value, index: Index) -> Expr:
        expr = self.chunk.load(buffer, value, index) if self.chunk is not None else None
        return super().read(buffer, value, index) if expr is None else expr

    def put(self, buffer: Buffer, expr: Expr, value: Value, index: Index) -> None:
        if self.chunk is None or not self.chunk.store(buffer, expr, value, index):
            super().put(buffer, expr, value, index)

    @contextmanager
    def chunked(self, shape: tuple[int, ...], merged: int, size: int, lead: Index, start: Expr) -> Iterator[Expr]:
        """Open the loop over the elements of a chunk that begins at `start` of its run; gives the element's place in
        the run."""
        before = self.emit.block()
        with self.emit.loop(size, name="lane") as lane:
            column = self.emit.bind(start + lane, "column")
            self.chunk = Chunk(self.emit, shape, merged, size, lead, start, column, lane, before)
            yield column
            chunk, self.chunk = self.chunk, None
        chunk.close()

    def address(self, value: Value, index: Index) -> tuple[Value, Expr] | None:
        return super().address(self.own(value), index)
