"""Chunks of elements that a thread loads and stores as one, in 16 bytes at a time where their type allows.

In: a nest of loops over elements, and the values that its body reads and writes. Out: for values whose elements of a
chunk are neighbours in memory, one access for 16 bytes in front of the elements' loop, or behind it; in between they
are in registers. All other values are read and written one by one.

A chunk never crosses the end of the run along which elements are neighbours, and begins on a boundary: the run is a
multiple of the chunk, tensors begin on boundaries of 16 bytes and more. A value takes part only where its index is that
of the nest itself, so no element is touched that the nest does not touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from penstock.backends.tvm.kernels.tools.elements import Index, linear
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, ceil_div
from penstock.ir.graph import Value
from penstock.ir.types import ITEM_BYTES

from .threads import NARROW, ThreadEmitter

_BYTES = 16
# TVM has no vectors of bools, and those of bytes are no gain.
_TYPES = ("f16", "bf16", "f32", "f64", "i32", "i64")
# A chunk is worth it where so many threads are left: a large device has room for this many.
_THREADS = 1 << 15


def chunk_of(values: Sequence[Value], total: int, run: int) -> int:
    """Return the elements of a chunk for a nest of `total` elements: 8 with 16-bit floats, else 4; 1 where chunks do
    not fit into a run, or leave too few threads."""
    items = {value.type.dtype for value in values if value.type.size == total}
    size = 8 if items & set(NARROW) else 4
    while size > 1 and (run % size or total < size * _THREADS):
        size //= 2
    return size if items & set(_TYPES) else 1


@dataclass
class Chunk:
    """A chunk while its elements' loop is being emitted: `shape` of the nest, dimensions from `merged` on are the run;
    `before` is the block in front of the loop."""

    emit: ThreadEmitter
    shape: tuple[int, ...]
    merged: int
    size: int
    lead: Index
    start: Expr
    column: Expr
    lane: Expr
    before: list[Any]
    _loaded: dict[Any, Buffer] = field(default_factory=dict)
    _stored: list[tuple[Buffer, Buffer, Expr, Value]] = field(default_factory=list)

    def _first(self, value: Value, index: Index) -> Expr | None:
        """Return the position of the chunk's first element, if an index is that of the nest and elements are
        neighbours."""
        dims, run = value.type.dims, self.shape[self.merged :]
        if value.type.dtype not in _TYPES or dims[len(dims) - len(run) :] != run or len(index) != len(dims):
            return None
        expected = (*self.lead, *([None] * len(run)))[len(self.shape) - len(dims) :]
        for i, n, outer in zip(index[: -len(run)], dims, expected, strict=False):
            if n != 1 and i is not outer:
                return None
        if sum(i is self.column for i in index[-len(run) :]) != 1:
            return None
        if any(n != m for n, m in zip(dims[::-1], self.shape[::-1], strict=False) if n != 1):
            return None
        return linear(tuple(self.start if i is self.column else i for i in index), dims)

    def _parts(self, value: Value) -> tuple[int, int]:
        """Return the elements of one access, and the number of accesses."""
        width = min(self.size, _BYTES // ITEM_BYTES[value.type.dtype])
        return width, ceil_div(self.size, width)

    def load(self, buffer: Buffer, value: Value, index: Index) -> Expr | None:
        """Return an element of a value that is loaded with its chunk; None for all others."""
        key = (buffer, tuple(map(id, index)))
        if key not in self._loaded:
            first = self._first(value, index)
            if first is None:
                return None
            local = self._local(buffer, "chunk")
            width, count = self._parts(value)
            for part in range(count):
                vector = tirx.BufferLoad(buffer, [_span(first + part * width, width)])
                self.before.append(tirx.BufferStore(local, vector, [_span(part * width, width)]))
            self._loaded[key] = local
        return self.emit.load(self._loaded[key], self.lane)

    def store(self, buffer: Buffer, expr: Expr, value: Value, index: Index) -> bool:
        """Store an element with its chunk; return False where that cannot be."""
        first = self._first(value, index)
        if first is None:
            return False
        local = self._local(buffer, "kept")
        self.emit.store(local, expr, self.lane)
        self._stored.append((buffer, local, first, value))
        return True

    def close(self) -> None:
        """Emit the stores, behind the elements' loop."""
        for buffer, local, first, value in self._stored:
            width, count = self._parts(value)
            for part in range(count):
                vector = tirx.BufferLoad(local, [_span(part * width, width)])
                self.emit.add(tirx.BufferStore(buffer, vector, [_span(first + part * width, width)]))

    def _local(self, buffer: Buffer, name: str) -> Buffer:
        local = tirx.decl_buffer((self.size,), str(buffer.dtype), name=self.emit.fresh(name), scope="local")
        self.before.append(tirx.AllocBuffer(local))
        return local


def _span(first: Expr | int, width: int) -> Expr:
    begin = tirx.IntImm("int32", first) if isinstance(first, int) else first
    return tirx.Ramp(begin, tirx.IntImm("int32", 1), width) if width > 1 else begin
