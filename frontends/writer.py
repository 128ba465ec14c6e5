"""The graph that a frontend writes: the program under construction, and the writer of one source node's operations.

In: the calls of a rule. Out: IR operations in order, the variables they read, and the elements of these. A rule that
cannot import its node raises `Refused`. `abandon` then removes what it wrote, so that one error can list every refused
node.

Formulas (formulas/) and the rules of all frontends write through `Writer` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.graph import BUFFER, CACHE, MICROBATCH, Graph, Module, Op, Value, Var
from penstock.ir.liveness import live_ops
from penstock.ir.ops import make
from penstock.ir.types import FLOATS, INTS, TensorType, dtype_of, numpy_dtype

from .names import Names, legal

# Constants up to this size are written into the program as `const`; larger ones become buffers beside the weights.
INLINE = 16

# Results above this many elements are not folded: a mask repeated over a batch is cheaper to broadcast than to store.
LARGEST = 1 << 22

Operand = Value | np.ndarray | bool | int | float


class Refused(Exception):
    """An exception that says why a node cannot be imported."""


@dataclass(frozen=True)
class Lost:
    """The result of a node that could not be imported. `type` is the type that the source gives it, if any."""

    type: TensorType | None


def _is_triangle(array: np.ndarray) -> bool:
    """Return whether a matrix holds one number on and below the diagonal and another above it, as causal masks do."""
    if array.ndim < 2 or array.size != array.shape[-2] * array.shape[-1] or min(array.shape[-2:]) < 2:
        return False
    rows, columns = array.shape[-2:]
    matrix = array.reshape(rows, columns)
    return np.array_equal(matrix, np.where(np.tri(rows, columns, dtype=bool), matrix[0, 0], matrix[0, 1]))


@dataclass
class GraphWriter:
    """The graph under construction: operations in order, variables in order of first use, and their elements."""

    names: Names
    ops: list[Op] = field(default_factory=list)
    vars: dict[str, Var] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    # The input that random numbers depend on (None before the first use), and the number of uses.
    counter: Value | None = None
    drawn: int = 0
    # Known elements of integer values: constants, also reshaped, cut or cast. Indices among them must lie inside.
    indices: dict[Value, np.ndarray] = field(default_factory=dict)
    # Variables that every microbatch changes, and their new values.
    moved: dict[str, Value] = field(default_factory=dict)

    def type_of(self, array: np.ndarray) -> TensorType:
        try:
            return TensorType(dtype_of(array.dtype), array.shape)
        except ValueError as error:
            raise Refused(str(error)) from error

    def constant(self, name: str, array: np.ndarray, loc: str) -> Value:
        """Write a constant: as an op if it is small or has one value throughout, else as a buffer."""
        value = self._constant(name, array, loc)
        if array.dtype.kind in "iu":
            self.indices[value] = array
        return value

    def follow(self, op: Op) -> None:
        """Record the elements of an op's result where those of its operand are known."""
        known = self.indices.get(op.ins[0]) if op.kind in ("reshape", "cast", "slice") else None
        if known is None:
            return
        out = op.outs[0]
        if op.kind == "slice":
            start, stop, step = (np.atleast_1d(op.attrs[name]).tolist() for name in ("start", "stop", "step"))
            known = known[tuple(map(slice, start, stop, step))]
        if out.type.dtype in INTS:
            self.indices[out] = known.astype(numpy_dtype(out.type.dtype), copy=False).reshape(out.type.dims)

    def _constant(self, name: str, array: np.ndarray, loc: str) -> Value:
        kind = self.type_of(array)
        value: Attr
        first = array.reshape(-1)[:1]
        if array.ndim == 0 or (array.size and bool((array == first).all())):
            value = first.item()
        elif array.size <= INLINE:
            value = tuple(array.reshape(-1).tolist())
        elif _is_triangle(array):
            return self._triangle(name, array, legal(loc), kind.dtype)
        else:
            return self.variable(name, kind, BUFFER, array)
        self.ops.append(make("const", (), (name,), legal(loc), value=value, dtype=kind.dtype, shape=array.shape))
        return self.ops[-1].outs[0]

    def _triangle(self, name: str, array: np.ndarray, loc: str, dtype: str) -> Value:
        """Write a causal mask as a comparison of positions. It takes no memory, and passes can recognise it."""
        lead, (rows, columns) = (1,) * (array.ndim - 2), array.shape[-2:]

        def emit(kind: str, *ins: Value, **attrs: Attr) -> Value:
            self.ops.append(make(kind, ins, (self.names.fresh(f"{name}.{kind}"),), loc, **attrs))
            return self.ops[-1].outs[0]

        row = emit("iota", dtype="i32", shape=(*lead, rows, 1), axis=array.ndim - 2)
        column = emit("iota", dtype="i32", shape=(*lead, 1, columns), axis=array.ndim - 1)
        below, above = (x.item() for x in (array[..., 0, 0].reshape(-1)[0], array[..., 0, 1].reshape(-1)[0]))
        if dtype != "bool":
            values = [emit("const", value=x, dtype=dtype) for x in (below, above)]
            self.ops.append(make("where", (emit("less_equal", column, row), *values), (name,), loc))
        else:
            kind, ins = ("less_equal", (column, row)) if below else ("less", (row, column))
            self.ops.append(make(kind, ins, (name,), loc))
        return self.ops[-1].outs[0]

    def variable(self, name: str, kind: TensorType, role: str, array: np.ndarray) -> Value:
        """Add a variable of that name and return the value that reads it."""
        self.vars[name] = Var(name, kind, role)
        self.weights[name] = array
        value = Value(name, kind)
        self.ops.append(Op("read", (), (value,), {"var": name}, name))
        return value

    def cache(self, name: str, kind: TensorType) -> None:
        """Add a cache of that name, which is empty when a run begins."""
        self.vars[name] = Var(name, kind, CACHE, init="zeros")

    def module(self, name: str, inputs: Sequence[Value], outputs: Iterable[tuple[str, Value]]) -> Module:
        """Build a module of one graph `main` without dead operations.

        Each pair in `outputs` is the name of an output and its value.
        """
        self.ops = _with_writes(self.ops, self.moved)
        outs = self._bind(inputs, outputs)
        ops = live_ops(self.ops, outs)
        used = {op.var: self.vars[op.var] for op in ops if op.kind in ("read", "write", "put")}
        if self.counter is not None and any(self.counter in op.ins for op in ops):
            inputs = (*inputs, self.counter)
        main = Graph("main", tuple(inputs), tuple(outs), tuple(ops))
        return Module(legal(name), tuple(inputs), tuple(v.name for v in outs), vars=used, graphs={"main": main})

    def microbatch(self) -> Value:
        """Return the number of the microbatch, an input that the runtime fills."""
        if self.counter is None:
            name = self.names.fresh(MICROBATCH)
            if name != MICROBATCH:
                raise Refused(f"random numbers need the name {MICROBATCH}, which the model has given to a tensor")
            self.counter = Value(name, TensorType("i64", ()))
        return self.counter

    def _bind(self, inputs: Sequence[Value], outputs: Iterable[tuple[str, Value]]) -> list[Value]:
        """Bind the outputs to their names, also where one is an input, a variable or another output passed through."""
        fixed = {v.name for v in inputs} | set(self.vars)
        renamed: dict[Value, Value] = {}
        passed: list[Op] = []
        outs: list[Value] = []
        for name, source in outputs:
            value = renamed.get(source, source)
            if value.name != name and (value.name in fixed or value in outs):
                passed.append(make("reshape", (value,), (name,), name, shape=value.type.shape))
                value = passed[-1].outs[0]
            elif value.name != name:
                value = renamed[source] = Value(name, value.type)
            outs.append(value)
        ops = [op.renamed(renamed) for op in self.ops]
        self.ops = [*ops, *passed]
        return outs


def _with_writes(ops: Sequence[Op], moved: Mapping[str, Value]) -> list[Op]:
    """Add the writes of variables that change.

    Each is read as late and written as early as possible, so that few stage boundaries can fall in between. The read
    comes before the write.
    """
    waiting = {op.outs[0]: op for op in ops if op.kind == "read" and op.var in moved}
    old = {op.var: value for value, op in waiting.items()}
    becomes: dict[Value, list[str]] = {}
    for name, value in moved.items():
        becomes.setdefault(value, []).append(name)
    done: list[Op] = []

    def place(op: Op) -> None:
        for value in op.ins:
            if value in waiting:
                place(waiting.pop(value))
        done.append(op)
        for value in op.outs:
            write(value, op.loc)

    def write(value: Value, loc: str) -> None:
        for name in becomes.pop(value, ()):
            if name in old and old[name] in waiting:
                place(waiting.pop(old[name]))
            done.append(Op("write", (value,), (), {"var": name}, loc))

    results = {value for op in ops for value in op.outs}
    for value in [value for value in becomes if value not in results]:
        write(value, "")
    for op in ops:
        if op.kind != "read" or op.var not in moved:
            place(op)
    while waiting:
        place(waiting.pop(next(iter(waiting))))
    return done


class Writer:
    """A writer of the operations that stand for one node of the source. They carry its name as `loc`."""

    def __init__(self, program: GraphWriter, loc: str) -> None:
        self._program = program
        self._first = len(program.ops)
        self.loc = loc

    @property
    def base(self) -> str:
        """The beginning of the names of new values."""
        return self.loc

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            raise Refused(reason)

    def emit(self, kind: str, *operands: Operand, **attrs: Attr) -> Value:
        """Write an operation with one result.

        Numbers among the operands get the element type of the tensors beside them.
        """
        return self.emit_all(kind, 1, *operands, **attrs)[0]

    def emit_all(self, kind: str, results: int, *operands: Operand, **attrs: Attr) -> tuple[Value, ...]:
        dtype = next((v.type.dtype for v in reversed(operands) if isinstance(v, Value)), "f32")
        ins = [v if isinstance(v, Value) else self.literal(v, dtype) for v in operands]
        names = [self._program.names.fresh(f"{self.base}.{kind}") for _ in range(results)]
        op = make(kind, ins, names, self.loc, **attrs)
        if kind in ("gather", "scatter"):
            axis = op.attrs["axis"]
            assert isinstance(axis, int), "the op table sees to that"
            self.require_inside(ins[1], ins[0].type.dims[axis])
        self._program.follow(op)
        self._program.ops.append(op)
        return op.outs

    def cast(self, x: Value, dtype: str) -> Value:
        """Convert x to an element type. Return x itself if it has that type."""
        return x if x.type.dtype == dtype else self.emit("cast", x, dtype=dtype)

    def random_key(self) -> Value:
        """Write the key of one more use of random numbers."""
        self._program.drawn += 1
        return self.emit("random_key", self._program.microbatch(), number=self._program.drawn - 1)

    def put(self, rows: Value, places: Value, cache: str) -> Value:
        """Write the operation that stores rows in a cache. Return the cache as it is then, for `attend`."""
        value = Value(self._program.names.fresh(f"{self.base}.put"), self._program.vars[cache].type)
        self._program.ops.append(Op("put", (rows, places), (value,), {"var": cache}, self.loc))
        return value

    def move(self, variable: str, value: Value) -> None:
        """Record the value that a variable has after every microbatch."""
        self._program.moved[variable] = value

    def require_inside(self, indices: Value, size: int) -> None:
        """Refuse indices outside a dimension of that size, where they are known, because kernels do not check.

        Negative indices count from the end.
        """
        known = self._program.indices.get(indices)
        outside = [] if known is None else known[(known < -size) | (known >= size)].tolist()
        self.require(not outside, f"index {str(outside[:1])[1:-1]} is outside of a dimension of {size}")

    def literal(self, value: np.ndarray | bool | int | float, dtype: str) -> Value:
        """Write a constant that the source does not hold: a number of element type `dtype`, or an array as it is."""
        name = self._program.names.fresh(f"{self.base}.const")
        if isinstance(value, np.ndarray):
            return self._program.constant(name, value, self.loc)
        number: Attr = float(value) if dtype in FLOATS else bool(value) if dtype == "bool" else int(value)
        op = make("const", (), (name,), self.loc, value=number, dtype=dtype)
        self._program.ops.append(op)
        return op.outs[0]

    def written(self) -> list[Op]:
        """Return the operations written for this node so far."""
        return self._program.ops[self._first :]

    def abandon(self) -> set[Value]:
        """Remove the operations written for this node, and the variables first read here.

        Return the values that are gone.
        """
        gone = self.written()
        for op in gone:
            if op.kind == "read":
                self._program.vars.pop(op.var, None)
                self._program.weights.pop(op.var, None)
            for value in op.outs:
                self._program.indices.pop(value, None)
        self._program.moved = {
            name: value for name, value in self._program.moved.items() if not any(value in op.outs for op in gone)
        }
        del self._program.ops[self._first :]
        return {op.outs[0] for op in gone}

    def rename(self, table: Mapping[Value, Value]) -> None:
        """Rename values that were written for this node."""
        if table:
            self._program.moved = {name: table.get(value, value) for name, value in self._program.moved.items()}
            self._program.ops[self._first :] = [op.renamed(table) for op in self.written()]
