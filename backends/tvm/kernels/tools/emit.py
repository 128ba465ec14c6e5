"""A builder of TIR statements: loops, vectors with remainders, local storage.

In: Python calls in program order. Out: one TIR statement.

Kernels are emitted loop by loop instead of being scheduled from a default nest: the code generator sees the statements
as they are written here, and no schedule primitive can refuse a ragged size or a second output. Every buffer is
one-dimensional; addresses are computed by the callers.

Element types of 16 bits are for storage: `load` widens to f32, and `Emitter.store` rounds to the nearest, ties to even.
Everything between is f32, sums and scratch memory included (`literal` and `alloc` take f32 for f16 and bf16). bf16
memory is read and written as 16-bit integers: a bf16 is the upper half of an f32, so the conversions are shifts on
every machine, and inf, nan and denormals come out right.

Invariant: a variable bound or a buffer allocated inside a block is used only inside that block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir.expr import TensorLoad

from penstock.ir.types import FLOATS, LONG_NAMES, numpy_dtype

# TIR nodes have no static types of their own.
Expr = Any
Buffer = Any

SERIAL, PARALLEL, VECTOR = tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED

TVM_DTYPES = LONG_NAMES
HALVES = ("f16", "bf16")
_NATIVE_HALVES = tuple(TVM_DTYPES[dtype] for dtype in HALVES)


def compute_dtype(dtype: str) -> str:
    """Return the element type that kernels compute in."""
    return "f32" if dtype in HALVES else dtype


def _unsigned(value: int) -> Expr:
    return tirx.IntImm("uint32", value)


def load(buffer: Buffer, index: Expr) -> Expr:
    """Load an element of a buffer, or a vector, from memory of 16-bit floats as f32."""
    value = tirx.BufferLoad(buffer, [index])
    if str(buffer.dtype) not in _NATIVE_HALVES:
        return value
    lanes = index.lanes if isinstance(index, tirx.Ramp) else 1
    return tirx.Cast(f"float32x{lanes}" if lanes != 1 else "float32", value)


def literal(value: bool | int | float, dtype: str) -> Expr:
    """Return a constant of one of our element types. Python floats are rounded to f32 by TVM where needed; inf and nan
    are allowed."""
    name = TVM_DTYPES[compute_dtype(dtype)]
    if dtype in FLOATS:
        return tirx.FloatImm(name, float(value))
    return tirx.IntImm(name, int(value))


def i32(value: int) -> Expr:
    """Return a constant index or size."""
    return tirx.IntImm("int32", value)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def rounded_literal(value: bool | int | float, dtype: str) -> Expr:
    """Return a constant as memory of that element type would hold it."""
    return literal(float(np.array(value, numpy_dtype(dtype))) if dtype in HALVES else value, dtype)


def cast(value: Expr, dtype: str) -> Expr:
    """Change the element type, unless it is that type already. For 16-bit floats: f32 that is not rounded yet."""
    name = TVM_DTYPES[compute_dtype(dtype)]
    return value if dtype_name(value) == name else tirx.Cast(name, value)


def dtype_name(value: Expr) -> str:
    return str(value.ty.dtype) if hasattr(value.ty, "dtype") else str(value.dtype)


class Emitter:
    """A collector of statements in nested blocks."""

    # TVM's name for the memory that bound values are in.
    _scope = "global"

    def __init__(self) -> None:
        self._blocks: list[list[Any]] = [[]]
        self._count = 0
        # Inside a vector loop: its variable, its width, and the names its body needs, which are allocated in front of
        # it.
        self._lane: Expr | None = None
        self._width = 1
        self._depth = 0
        self._hoisted: list[Any] = []
        # Hints that come behind the vector loop.
        self._hints: list[Any] = []
        self._names: set[Any] = set()
        # Those of them that are bound in front of all loops.
        self._outside: set[Any] = set()
        # True if any scratch storage is of bools, which TVM has to turn into bytes.
        self.holds_bools = False

    def fresh(self, name: str) -> str:
        self._count += 1
        return f"{name}{self._count}"

    def add(self, statement: Any) -> None:
        self._blocks[-1].append(statement)

    def _close(self) -> Any:
        block = self._blocks.pop()
        if not block:
            return tirx.Evaluate(tirx.IntImm("int32", 0))
        return block[0] if len(block) == 1 else tirx.SeqStmt(block)

    def build(self) -> Any:
        assert len(self._blocks) == 1, "a block was left open"
        return self._close()

    @contextmanager
    def loop(self, extent: int | Expr, kind: Any = SERIAL, name: str = "i") -> Iterator[Expr]:
        """Open a loop over 0 .. extent-1 and yield its variable. Loops of one turn are not emitted."""
        if isinstance(extent, int) and extent == 1:
            yield tirx.IntImm("int32", 0)
            return
        variable = tirx.Var(self.fresh(name), "int32")
        outer = (self._lane, self._width)
        if kind == VECTOR:
            assert self._lane is None, "vectors do not nest"
            self._lane, self._width, self._depth = variable, extent, len(self._blocks)
        self._blocks.append([])
        yield variable
        body = self._close()
        self._lane, self._width = outer
        if kind == VECTOR:
            self._blocks[-1] += self._hoisted
            self._hoisted = []
        self.add(tirx.For(variable, 0, extent, kind, body))
        if kind == VECTOR:
            self._blocks[-1] += self._hints
            self._hints = []

    def may_pause(self) -> bool:
        """Return whether `paused` works here: directly in a vector loop, or outside of them."""
        return self._lane is None or len(self._blocks) == self._depth + 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Interrupt a vector loop for statements about all lanes at once; names of both parts are the same arrays."""
        if self._lane is None:
            yield
            return
        assert self.may_pause(), "the vector loop cannot be cut inside another block"
        lane, width = self._lane, self._width
        body = self._close()
        self._blocks[-1] += [*self._hoisted, tirx.For(lane, 0, width, VECTOR, body)]
        self._hoisted = []
        self._lane, self._width = None, 1
        yield
        self._lane, self._width = lane, width
        self._blocks.append([])

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        self._blocks.append([])
        yield
        self.add(tirx.IfThenElse(condition, self._close(), None))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let threads begin here: parallel loops inside, which may lie in serial ones, share one launch. Each thread
        takes the same part of each, and waits for no other in between."""
        self._blocks.append([])
        yield
        zero = tirx.IntImm("int32", 0)
        self.add(tirx.AttrStmt(zero, "pragma_parallel_launch_point", zero, self._close()))

    def spans(self, extent: int, lanes: int, kind: Any = SERIAL, name: str = "v") -> Iterator[tuple[Expr, Expr]]:
        """Cover 0 .. extent-1 in vectors: yields (index, lane), first inside vector loops of `lanes`, then inside the
        loop of the rest.

        Use it in a for statement: the body is run once per emitted loop, at most twice.
        """
        whole, tail = divmod(extent, lanes)
        if whole:
            with self.loop(whole, kind, name) as outer, self.loop(lanes, VECTOR, name) as inner:
                yield outer * lanes + inner, inner
        if tail:
            with self.loop(tail, SERIAL, name) as inner:
                yield whole * lanes + inner, tirx.IntImm("int32", 0)

    def bind(self, value: Expr, name: str = "t") -> Expr:
        """Name an expression, so that it is computed once.

        The name is an element of a local array, which LLVM keeps in a register: TIR's own bindings are put back into
        the expressions by its simplifier, which takes exponential time for polynomials. Index arithmetic outside
        vectors does use bindings, so that addresses stay visible. Bools are kept as integers, in arrays: a chain of
        them put back into one another keeps the simplifier busy for minutes.
        """
        if isinstance(value, tirx.IntImm | tirx.FloatImm | tirx.Var):
            return value
        dtype = dtype_name(value)
        if dtype.startswith("bool"):
            flag = self._in_array(tirx.Select(value, tirx.IntImm("int32", 1), tirx.IntImm("int32", 0)), name)
            return tirx.NE(flag, tirx.IntImm("int32", 0))
        if isinstance(value, TensorLoad) and value.source in self._names:
            return value
        if self._lane is None and dtype.startswith("int"):
            variable = tirx.Var(self.fresh(name), dtype)
            self.add(tirx.Bind(variable, value))
            return variable
        return self._in_array(value, name)

    def bind_outside(self, value: Expr, parts: Sequence[Expr]) -> Expr:
        """Name an expression of some names, in front of all loops if these names are bound there, too."""
        if not all(isinstance(part, TensorLoad) and part.source in self._outside for part in parts):
            return self.bind(value)
        dtype = dtype_name(value)
        buffer = tirx.decl_buffer((1,), dtype, name=self.fresh("t"), scope=self._scope)
        first = tirx.IntImm("int32", 0)
        # A loop is added to its block when it ends.
        self._blocks[0] += [tirx.AllocBuffer(buffer), tirx.BufferStore(buffer, value, [first])]
        self._names.add(buffer)
        self._outside.add(buffer)
        return tirx.BufferLoad(buffer, [first])

    def _in_array(self, value: Expr, name: str) -> Expr:
        buffer = self.name_lanes(dtype_name(value), name)
        self.add(tirx.BufferStore(buffer, value, [self.lane()]))
        return tirx.BufferLoad(buffer, [self.lane()])

    def name_lanes(self, dtype: str, name: str = "t") -> Buffer:
        """Allocate the array behind a new name: an element for each lane, of one of TVM's types."""
        buffer = tirx.decl_buffer((self._width,), dtype, name=self.fresh(name), scope=self._scope)
        (self._hoisted if self._lane is not None else self._blocks[-1]).append(tirx.AllocBuffer(buffer))
        self._names.add(buffer)
        if len(self._blocks) == 1:
            self._outside.add(buffer)
        return buffer

    def lane(self) -> Expr:
        """Return the index into local storage for the element being worked on: the vector's variable, or 0 outside
        vectors."""
        return self._lane if self._lane is not None else tirx.IntImm("int32", 0)

    def width(self) -> int:
        """Return the number of elements worked on at once here."""
        return self._width

    def store(self, buffer: Buffer, value: Expr, index: Expr) -> None:
        """Store an element; into memory of 16-bit floats rounded."""
        dtype = str(buffer.dtype)
        if dtype == "bfloat16" and dtype_name(value) != dtype:
            value = tirx.reinterpret("bfloat16", tirx.Cast("uint16", self._upper_half(value)))
        elif dtype in _NATIVE_HALVES and dtype_name(value) != dtype:
            value = tirx.Cast(dtype, value)
        self.add(tirx.BufferStore(buffer, value, [index]))

    def _upper_half(self, value: Expr) -> Expr:
        """Return the bits of the bf16 nearest to an f32, ties to even. A nan keeps its sign and leading bits and
        becomes a quiet one: rounding its bits could carry into the sign."""
        bits = self.bind(tirx.reinterpret("uint32", value))
        upper = self.bind(bits >> _unsigned(16))
        nearest = (bits + (upper & _unsigned(1)) + _unsigned(0x7FFF)) >> _unsigned(16)
        # Tested on the bits, because TVM's isnan would go lane by lane.
        is_nan = (bits & _unsigned(0x7FFFFFFF)) > _unsigned(0x7F800000)
        return tirx.Select(is_nan, upper | _unsigned(0x40), nearest)

    def rounded(self, value: Expr, dtype: str) -> Expr:
        """Round an f32 to an element type, and return it as f32."""
        if dtype == "bf16":
            return self.bind(tirx.reinterpret("float32", self._upper_half(value) << _unsigned(16)))
        return self.bind(tirx.Cast("float32", self.bind(tirx.Cast("float16", value)))) if dtype == "f16" else value

    def prefetch(self, buffer: Buffer, index: Expr, written: bool = True, *, near: bool = True) -> None:
        """Hint that a cache line will soon be read, and written unless `written` is false. Addresses outside the
        buffer are allowed. Without `near` the line is wanted in the second cache alone."""
        self.add(_hint(buffer, index, written, near))

    def prefetch_ahead(self, buffer: Buffer, index: Expr, distance: int, written: bool, *, near: bool = True) -> None:
        """Hint, in a vector loop that runs along memory, at the elements `distance` further on. Does nothing
        elsewhere."""
        if self._lane is None:
            return
        here, next_one = (_evaluated(index, self._lane, i) for i in (0, 1))
        if here is not None and next_one is not None and next_one[1] - here[1] == 1:
            self._hints.append(_hint(buffer, here[0] + distance, written, near))

    def alloc(self, size: int, dtype: str, name: str) -> Buffer:
        """Allocate scratch storage of this block: below 1024 bytes on the stack, from where LLVM moves it into
        registers if it can, else from the thread's workspace. (In TVM's scope "local", everything would
        come from the workspace.)"""
        self.holds_bools |= dtype == "bool"
        return self.scratch(size, TVM_DTYPES[compute_dtype(dtype)], name)

    def scratch(self, size: int, name_of_type: str, name: str) -> Buffer:
        """Allocate scratch storage for elements of one of TVM's types."""
        buffer = tirx.decl_buffer((size,), name_of_type, name=self.fresh(name))
        (self._hoisted if self._lane is not None else self._blocks[-1]).append(tirx.AllocBuffer(buffer))
        return buffer


def _hint(buffer: Buffer, index: Expr, written: bool, near: bool = True) -> Any:
    address = tirx.address_of(tirx.BufferLoad(buffer, [index]))
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, int(written), 3 if near else 2, 1))


_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
}


def _evaluated(index: Expr, lane: Expr, value: int) -> tuple[Expr, int] | None:
    """Return an index with the lane at `value`, as an expression and, with all other variables 0, as a
    number. None if it is not plain arithmetic."""
    if isinstance(index, tirx.IntImm):
        return index, int(index.value)
    if isinstance(index, tirx.Var):
        return (tirx.IntImm("int32", value), value) if index.same_as(lane) else (index, 0)
    step = _ARITHMETIC.get(type(index))
    if step is None:
        return None
    a, b = _evaluated(index.a, lane, value), _evaluated(index.b, lane, value)
    if a is None or b is None:
        return None
    return type(index)(a[0], b[0]), step(a[1], b[1])
