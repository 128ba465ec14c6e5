"""Tables of indices that depend on a size, as expressions of it.

Exporters compute positions of a length beforehand, 0, 1, 2, ... up to the length. A reader keeps the results as
variables, small ones as constants. In: a module, the elements of such variables. Out: the module without them. A
look-up of all rows in order is the table itself, in another shape. Other numbers that grow evenly along each dimension
become `iota`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.ir.graph import Graph, Module, Namer, Op, Value, substitute
from penstock.ir.interpreter.ops import Array, apply_op
from penstock.ir.liveness import drop_dead
from penstock.ir.ops import OPS, complete_attrs, integer, make
from penstock.ir.types import INTS

# Elements of an intermediate table that are worth evaluating.
_MOST = 1 << 22


def settle(module: Module, tables: Mapping[str, Array]) -> Module:
    """Write variables of whole numbers as expressions, where they grow evenly; `tables` are their elements."""
    wanted = {name for name, array in tables.items() if module.vars[name].type.dtype in INTS and array.size <= _MOST}
    if not wanted and not any(_is_table(op) for op in module.graphs["main"].ops):
        return module
    graph = drop_dead(_Settler(module.graphs["main"], {name: tables[name] for name in wanted}).run())
    read = {op.var for op in graph.ops if "var" in op.attrs}
    kept = {name: var for name, var in module.vars.items() if name in read or name not in wanted}
    return module.but(vars=kept).with_graph(graph)


def _is_table(op: Op) -> bool:
    """Return whether an operation lists whole numbers: readers write small tables so."""
    return op.kind == "const" and isinstance(op.attrs["value"], tuple) and op.outs[0].type.dtype in INTS


class _Settler:
    """One walk over a graph: values that follow from the tables are known, and others take them as expressions."""

    def __init__(self, graph: Graph, tables: Mapping[str, Array]) -> None:
        self.graph, self.tables = graph, tables
        self.namer = Namer.of(graph)
        self.ops: list[Op] = []
        self.known: dict[str, Array] = {}
        # Values that follow from a table, and what stands for them.
        self.derived: set[str] = set()
        self.written: dict[str, Value] = {}
        self.table: dict[Value, Value] = {}

    def run(self) -> Graph:
        for op in self.graph.ops:
            op = op.with_ins(substitute(op.ins, self.table))
            if self._learn(op):
                self.ops.append(op)
                continue
            if op.kind == "gather" and self._whole(op):
                self.ops.append(make("reshape", op.ins[:1], [op.outs[0].name], op.loc, shape=op.outs[0].type.dims))
                continue
            self.ops.append(op.with_ins(tuple(self._expressed(x, op.loc) for x in op.ins)))
        outs = tuple(self._expressed(x, "") for x in self.graph.outs)
        return Graph(self.graph.name, self.graph.ins, outs, tuple(self.ops), self.graph.saved)

    def _learn(self, op: Op) -> bool:
        """Return whether the elements of an operation's results are known."""
        if op.kind == "read":
            if op.var not in self.tables:
                return False
            self.known[op.outs[0].name] = np.asarray(self.tables[op.var])
            self.derived.add(op.outs[0].name)
            return True
        if _is_table(op):
            self.derived.add(op.outs[0].name)
        if OPS[op.kind].effect or len(op.outs) != 1 or op.outs[0].type.size > _MOST:
            return False
        if not all(x.name in self.known for x in op.ins):
            return False
        if op.ins and not any(x.name in self.derived for x in op.ins):
            # Constants are no concern of this, but tables may meet them.
            if op.outs[0].type.size > 1:
                return False
        elif op.ins:
            self.derived.add(op.outs[0].name)
        (self.known[op.outs[0].name],) = apply_op(op, [self.known[x.name] for x in op.ins])
        return True

    def _whole(self, op: Op) -> bool:
        """Return whether a look-up takes all rows in order."""
        indices = self.known.get(op.ins[1].name)
        if indices is None or op.ins[1].name not in self.derived:
            return False
        axis = integer(complete_attrs(op)["axis"]) % op.ins[0].type.rank
        rows = op.ins[0].type.dims[axis]
        return indices.size == rows and bool(np.array_equal(indices.reshape(-1), np.arange(rows)))

    def _expressed(self, x: Value, loc: str) -> Value:
        """Return a value that does not come from a table, if its elements grow evenly; else the value itself."""
        if x.name not in self.derived:
            return x
        if x.name not in self.written:
            self.written[x.name] = self._written(x, loc) or x
        return self.written[x.name]

    def _written(self, x: Value, loc: str) -> Value | None:
        array = self.known[x.name]
        if x.type.dtype not in INTS or not array.size:
            return None
        first = array.reshape(-1)[0]
        steps = [
            int(array[tuple(1 if i == dim else 0 for i in range(array.ndim))] - first) if n > 1 else 0
            for dim, n in enumerate(array.shape)
        ]
        places = np.indices(array.shape)
        if not np.array_equal(array, first + sum(s * p for s, p in zip(steps, places, strict=True))):
            return None
        total: Value | None = None
        for dim, step in enumerate(steps):
            if step:
                part = self._emit("iota", loc, x, dtype=x.type.dtype, shape=x.type.dims, axis=dim)
                if step != 1:
                    part = self._emit("mul", loc, x, part, self._number(step, x, loc))
                total = part if total is None else self._emit("add", loc, x, total, part)
        if total is None:
            return self._emit("const", loc, x, value=int(first), dtype=x.type.dtype, shape=x.type.dims)
        return self._emit("add", loc, x, total, self._number(int(first), x, loc)) if first else total

    def _number(self, number: int, x: Value, loc: str) -> Value:
        return self._emit("const", loc, x, value=number, dtype=x.type.dtype)

    def _emit(self, kind: str, loc: str, like: Value, *ins: Value, **attrs: object) -> Value:
        op = make(kind, ins, [self.namer.fresh(f"{like.name}.{kind}")], loc, **attrs)  # type: ignore[arg-type]
        self.ops.append(op)
        return op.outs[0]
