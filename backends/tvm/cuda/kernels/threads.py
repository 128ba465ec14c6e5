"""The builder of TIR statements for GPUs: launches of blocks of threads, memory of a thread, of a block, and between
launches.

In: the calls of kernels.emit.Emitter, plus `launch`, `barrier`, `shared` and `workspace`. Out: one TIR statement with a
grid per launch. The launches of one kernel run one after the other, so that the second reads what the first wrote.

Rules: a barrier or an exchange of registers is reached by all threads of a block or by none. So it is in no `when` that
differs between threads, and loops around one have the same number of turns in every thread. Every value named with
`bind` belongs to one thread. There are no atomic operations and nothing that depends on the order in which blocks run:
results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import tirx

from penstock.backends.tvm.kernels.tools.elements import zero
from penstock.backends.tvm.kernels.tools.emit import SERIAL, TVM_DTYPES, Buffer, Emitter, Expr, dtype_name, i32
from penstock.backends.tvm.kernels.tools.functions import Functions

# These are f32 in registers: they are widened when loaded and rounded when stored.
NARROW = ("f16", "bf16")
_NARROW_NAMES = tuple(TVM_DTYPES[dtype] for dtype in NARROW)
# The threads of a warp, which exchange registers.
WARP = 32


def widen(value: Expr) -> Expr:
    """Return the expression in the type it is computed in."""
    return tirx.Cast("float32", value) if dtype_name(value) in _NARROW_NAMES else value


class ThreadEmitter(Emitter):
    """An emitter whose loops run inside threads. Vector and parallel loops of generators written for CPUs become plain
    loops."""

    _scope = "local"

    @contextmanager
    def loop(self, extent: int, kind: Any = SERIAL, name: str = "i") -> Iterator[Expr]:
        """Open a plain loop."""
        with super().loop(extent, SERIAL, name) as index:
            yield index

    @contextmanager
    def launch(self, blocks: int, threads: int) -> Iterator[tuple[Expr, Expr]]:
        """Open a grid of `blocks` blocks of `threads` threads; gives the numbers of the block and of the thread in
        it."""
        assert len(self._blocks) == 1, "launches do not nest"
        assert blocks < 2**31, "the grid is too large"
        pairs = [(blocks, "blockIdx.x", "block"), (threads, "threadIdx.x", "thread")]
        variables = [tirx.Var(self.fresh(name), "int32") for _, _, name in pairs]
        self._blocks.append([])
        yield variables[0], variables[1]
        body = self._close()
        for variable, (extent, tag, _) in reversed(list(zip(variables, pairs, strict=True))):
            axis = tirx.IterVar(tvm.ir.Range(0, extent), variable, tirx.IterVar.ThreadIndex, tag)
            body = tirx.AttrStmt(axis, "thread_extent", extent, body)
        self.add(body)

    @contextmanager
    def repeat(self, condition: Expr) -> Iterator[None]:
        """Open a loop that runs while a condition on memory of the thread holds."""
        self._blocks.append([])
        yield
        self.add(tirx.While(condition, self._close()))

    def block(self) -> list[Any]:
        """Return the statements of the open block."""
        return self._blocks[-1]

    def barrier(self) -> None:
        """Make all threads of the block wait for each other, and see what the other threads wrote to shared memory."""
        self.add(tirx.Evaluate(tirx.call_intrin("void", "tirx.tvm_storage_sync", "shared")))

    def exchange(self, target: Buffer, source: Buffer, distance: int) -> None:
        """Store in `target` what the thread `distance` away (by exclusive or of the numbers) in the warp has in
        `source`. Both are of one element, in registers. All threads of the block get here, whole warps of them."""
        kind = str(source.dtype)
        value = tirx.BufferLoad(source, [zero()])
        every = tirx.IntImm("uint32", 0xFFFFFFFF)
        other = tirx.call_intrin(kind, "tirx.tvm_warp_shuffle_xor", every, value, i32(distance), i32(WARP), i32(WARP))
        self.add(tirx.BufferStore(target, other, [zero()]))

    def _allocate(self, size: int, dtype: str, name: str, scope: str) -> Buffer:
        stored = "f32" if dtype in NARROW else dtype
        buffer = tirx.decl_buffer((size,), TVM_DTYPES[stored], name=self.fresh(name), scope=scope)
        self.add(tirx.AllocBuffer(buffer))
        return buffer

    def alloc(self, size: int, dtype: str, name: str) -> Buffer:
        """Allocate memory of one thread: registers, if it is indexed with constants after unrolling."""
        assert len(self._blocks) > 1, "memory of threads is allocated in launches"
        return self._allocate(size, dtype, name, self._scope)

    def local(self, name_of_type: str, name: str) -> Buffer:
        """Allocate one element in a register, of one of TVM's types."""
        buffer = tirx.decl_buffer((1,), name_of_type, name=self.fresh(name), scope=self._scope)
        self.add(tirx.AllocBuffer(buffer))
        return buffer

    def scoped(self, size: int, name_of_type: str, name: str, scope: str) -> Buffer:
        """Allocate elements of one of TVM's types in one of its scopes, 16-bit floats in 16 bits."""
        buffer = tirx.decl_buffer((size,), name_of_type, name=self.fresh(name), scope=scope)
        self.add(tirx.AllocBuffer(buffer))
        return buffer

    def shared(self, size: int, dtype: str, name: str) -> Buffer:
        """Allocate memory of one block."""
        return self._allocate(size, dtype, name, "shared")

    def workspace(self, size: int, dtype: str, name: str) -> Buffer:
        """Allocate device memory for the time of this kernel, for one launch to pass results to the next."""
        assert len(self._blocks) == 1, "workspaces are allocated between launches"
        return self._allocate(size, dtype, name, "global")

    def bind(self, value: Expr, name: str = "t") -> Expr:
        return super().bind(widen(value), name)

    def keep(self, value: Expr, name: str = "t") -> Expr:
        """Bind a value that the simplifier never puts back into expressions: a division that is guarded by its divisor
        keeps its guard."""
        if isinstance(value, tirx.IntImm | tirx.FloatImm | tirx.Var) or dtype_name(value).startswith("bool"):
            return self.bind(value, name)
        return self._in_array(widen(value), name)

    def store(self, buffer: Buffer, value: Expr, index: Expr) -> None:
        """Store, rounding to the element type of the buffer."""
        if dtype_name(value) != str(buffer.dtype):
            value = tirx.Cast(str(buffer.dtype), value)
        super().store(buffer, value, index)

    def rounded(self, value: Expr, dtype: str) -> Expr:
        return self.bind(tirx.Cast("float32", tirx.Cast(TVM_DTYPES[dtype], value))) if dtype in NARROW else value

    def load(self, buffer: Buffer, index: Expr) -> Expr:
        return widen(tirx.BufferLoad(buffer, [index]))

    def prefetch(self, buffer: Buffer, index: Expr, written: bool = True, *, near: bool = True) -> None:
        """Skip the prefetch: threads hide latency themselves."""


class DeviceFunctions(Functions):
    """Elementary functions of the device's library, which needs no vectoriser: within 2 ulp in f32, and right for nan
    and infinities."""

    emit: ThreadEmitter

    def __init__(self, emit: ThreadEmitter) -> None:
        super().__init__(emit)
        self.bind = emit.keep

    def row_in_force(
        self, dims: tuple[int, ...], read: Callable[[Expr, Expr], Expr], begun: Callable[[Expr], Expr]
    ) -> Sequence[Expr]:
        """Choose a row by a loop: a table in registers would leave few of them for what follows."""
        emit, (rows, columns) = self.emit, dims
        first = [read(zero(), i32(c)) for c in range(columns)]
        chosen = [emit.local(dtype_name(value), "chosen") for value in first]
        for place, value in zip(chosen, first, strict=True):
            emit.store(place, value, zero())
        if rows > 1:
            with emit.loop(rows - 1) as r, emit.when(emit.bind(begun(read(r + 1, zero())))):
                for c, place in enumerate(chosen):
                    emit.store(place, read(r + 1, i32(c)), zero())
        return [emit.bind(emit.load(place, zero())) for place in chosen]

    def exp(self, x: Expr) -> Expr:
        return self.bind(tirx.exp(x))

    def exp_within(self, c: Expr) -> Expr:
        return self.exp(c)

    def exp_down(self, x: Expr) -> Expr:
        return self.exp(x)

    def log(self, x: Expr) -> Expr:
        return self.bind(tirx.log(x))

    def tanh(self, x: Expr) -> Expr:
        return self.bind(tirx.tanh(x))

    def erf(self, x: Expr) -> Expr:
        return self.bind(tirx.erf(x))

    def sin(self, x: Expr) -> Expr:
        return self.bind(tirx.sin(x))

    def cos(self, x: Expr) -> Expr:
        return self.bind(tirx.cos(x))

    def pow(self, x: Expr, y: Expr) -> Expr:
        return self.bind(tirx.power(x, y))
