"""The body of a kernel: the values it can read, the results it stores, and the prologue and epilogue fused to its main
operation.

In: a Group, the operations that shall become one kernel. Out: a Kernel, a TIR function with the values and slots that
are its parameters. Generators (gemm, rows, reduce, ...) emit the loops of the group's main operation and call `finish`
where its result stands in registers. `finish` computes the epilogue at that point and stores it. Operations of the
prologue are computed where they are read.

Invariant: at one point, everything is loaded before anything is stored. So a buffer may be both operand and result if
all its accesses are at the same element. NotOneKernel is raised when a group does not have this property or does not
fit the main operation: the caller splits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from tvm import tirx

from penstock.backends.tvm.group import (
    EFFECTS,
    PACKED,
    Fusion,
    GeneratedKernel,
    NotOneKernel,
    PackedWeight,
    packed_value,
    rules_of,
)
from penstock.backends.tvm.pipeline import HOLDS_BOOLS
from penstock.backends.tvm.target import TargetMachine
from penstock.ir.graph import Op, Slot, Value, slot_of
from penstock.ir.ops import VIEWS
from penstock.ir.types import ITEM_BYTES

from .elements import INDEXED, POINTWISE, Index, axis_of, element, forward_index, has_element_rule, linear
from .emit import TVM_DTYPES, Buffer, Emitter, Expr, literal, load
from .functions import Functions
from .loops import Loops

BIJECTIONS = ("reshape", "transpose")
# Loops along memory prefetch so many elements ahead, in values that are not small: the processor's own prediction stops
# at the end of a page.
_AHEAD, _NOT_SMALL = 1024, 65536


# A buffer, what is stored, the value that has the buffer's type, and its index.
_Store = tuple[Buffer, Expr, Value, Index]


class PackingEmitted(Exception):
    """The sign that the function that packs an operand is complete; the rest of the kernel is not wanted."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function


class Body:
    """One kernel while it is being emitted."""

    # None: the loops for CPUs that stand beside the generators.
    loops: Loops[Body] | None = None

    def __init__(self, group: Fusion, machine: TargetMachine, *, only_packing: bool = False) -> None:
        self.group, self.machine, self.emit = group, machine, Emitter()
        self.only_packing = only_packing
        self.packing: PackedWeight | None = None
        self.lanes = machine.lanes
        self.functions = Functions(self.emit, machine.lanes)
        self._producers = {v: op for op in group.ops for v in op.outs if op.kind != "take"}
        self._ins: dict[Value, Buffer] = {}
        self._slots: dict[Slot, Buffer] = {}
        self._outs: dict[tuple[str, Value], Buffer] = {}
        self._views: dict[Any, Buffer] = {}
        self._frame: dict[tuple[Value, tuple[int, ...]], tuple[Expr, Index]] = {}
        self._loads: dict[str, list[Index]] = {}
        self._loaded: set[str] = set()
        self._elsewhere: set[Value] = set()
        # Values that the kernel itself keeps in memory of its own.
        self._given: Mapping[Value, Callable[[Index], Expr]] = {}
        # The current pass over memory prefetches its values, but for those that an earlier pass has read.
        self._streams = False
        self._near: set[Value] = set()
        self._passed: set[Value] = set()
        self._taken = {op.outs[0]: op for op in group.ops if op.kind == "take"}
        # A value without elements is a parameter that no loop reaches.
        for value in group.outs:
            if value.type.size == 0:
                self.result(value)
                self._elsewhere.add(value)
        for op in group.ops:
            slot = slot_of(op) if op.kind in EFFECTS else None
            if slot is not None and (op.outs or op.ins)[0].type.size == 0:
                self.slot(slot, (op.outs or op.ins)[0])
        # Column sums computed along with the main operation, and operations that `finish` leaves for later.
        self.sums: tuple[Op, ...] = ()
        self._waiting: set[int] = set()

    # ------------------------------------------------------------------------------ parameters

    def _view(self, key: Value | Slot | tuple[str, Value], value: Value, table: dict[Any, Buffer]) -> Buffer:
        if key not in self._views:
            shape, number = value.type.dims, len(self._views)
            # No vector is promised to lie on a boundary: on one that does, moves for any place are as fast.
            anywhere = {"data_alignment": ITEM_BYTES[value.type.dtype]}
            table[key] = tirx.decl_buffer(shape, TVM_DTYPES[value.type.dtype], name=f"b{number}", **anywhere)
            data = tirx.buffer_data(table[key])
            size = max(value.type.size, 1)
            self._views[key] = tirx.decl_buffer(
                (size,), TVM_DTYPES[value.type.dtype], name=f"f{number}", data=data, **anywhere
            )
        return self._views[key]

    def operand(self, value: Value) -> Buffer:
        """Return the flat buffer of a value that another kernel computes."""
        if value in self._taken:
            return self._view(Slot(self._taken[value].var, ""), value, self._slots)
        return self._view(value, value, self._ins)

    def result(self, value: Value) -> Buffer:
        return self._view(("out", value), value, self._outs)

    def slot(self, slot: Slot, value: Value) -> Buffer:
        """Return the flat buffer of a slot that is updated in place; `value` has its type."""
        return self._view(slot, value, self._slots)

    def is_stored(self, value: Value) -> bool:
        """Return whether the value has memory of its own, outside this kernel."""
        return value not in self._producers and value not in self.group.inline

    # ------------------------------------------------------------------------------ reading

    @contextmanager
    def point(self) -> Iterator[None]:
        """Open a block in which values are computed once per index. Names bound inside are forgotten at its end."""
        kept, self._frame = self._frame, dict(self._frame)
        try:
            yield
        finally:
            self._frame = kept

    @contextmanager
    def stream(self, again: bool = False) -> Iterator[None]:
        """Open a pass over memory in order, with prefetches of its reads and writes. With `again`, it follows a pass
        over the same part, whose operands are in cache."""
        if not again:
            self._near = set()
        self._streams, self._passed = True, set()
        try:
            yield
        finally:
            self._streams = False
            self._near |= self._passed

    @contextmanager
    def giving(self, given: Mapping[Value, Callable[[Index], Expr]]) -> Iterator[None]:
        """Read some values by functions of their own, in place of their operations."""
        kept, self._given = self._given, {**self._given, **given}
        yield
        self._given = kept

    def _prefetch_ahead(self, value: Value, buffer: Buffer, position: Expr, written: bool) -> None:
        if not self._streams or value.type.size < _NOT_SMALL:
            return
        self._passed.add(value)
        if value not in self._near:
            self.emit.prefetch_ahead(buffer, position, _AHEAD, written)

    def know(self, value: Value, index: Index, expr: Expr) -> None:
        """Record the expression of a value at an index, for this block."""
        self._frame[value, tuple(map(id, index))] = (expr, index)

    def at(self, value: Value, index: Index) -> Expr:
        """Return a value at an index: recorded before, loaded, or computed from its operands."""
        key = (value, tuple(map(id, index)))
        if key in self._frame:
            return self._frame[key][0]
        if value in self._given:
            expr = self.emit.bind(self._given[value](index), "x")
            self._frame[key] = (expr, index)
            return expr
        if self.is_stored(value):
            home = self.group.homes.get(value)
            if home is not None:
                self._loads.setdefault(home, []).append(index)
                self._loaded.add(home)
            position = linear(index, value.type.dims)
            self._prefetch_ahead(value, self.operand(value), position, home is not None)
            expr = self.emit.bind(self.read(self.operand(value), value, index), "x")
            self._frame[key] = (expr, index)
            return expr
        op = self._producers.get(value) or self.group.inline[value]
        if not has_element_rule(op.kind):
            raise NotOneKernel(f"there is no rule for one element of {op.kind}")
        with rules_of([op]):
            results = element(self.functions, self.computed(op), lambda k, i: self.at(op.ins[k], i), index)
            for out, expr in zip(op.outs, results, strict=True):
                self._frame[out, key[1]] = (expr if op.kind in ("const", "iota") else self.emit.bind(expr), index)
        return self._frame[key][0]

    def read(self, buffer: Buffer, value: Value, index: Index) -> Expr:
        """Return an element of memory that has the type of a value."""
        return load(buffer, linear(index, value.type.dims))

    def put(self, buffer: Buffer, expr: Expr, value: Value, index: Index) -> None:
        """Store an element into memory that has the type of a value."""
        self.emit.store(buffer, expr, linear(index, value.type.dims))

    def computed(self, op: Op) -> Op:
        """Return the operation with the element types it is computed in."""
        return op

    # ------------------------------------------------------------------------------ what depends on what

    def behind(self, ops: Sequence[Op]) -> list[Op]:
        """Return the operations of the group that need results of `ops`."""
        reached = {v for op in ops for v in op.outs}
        behind = []
        for op in self.group.ops:
            if op not in ops and any(
                v in reached or (v in self.group.inline and self._needs(v, reached)) for v in op.ins
            ):
                reached |= set(op.outs)
                behind.append(op)
        return behind

    def _needs(self, value: Value, reached: set[Value]) -> bool:
        op = self.group.inline.get(value)
        return value in reached or (op is not None and any(self._needs(v, reached) for v in op.ins))

    @contextmanager
    def without(self, ops: Sequence[Op]) -> Iterator[None]:
        """Make `finish` leave these operations, and the column sums, for later."""
        self._waiting = {*map(id, ops), *map(id, self.sums)}
        yield
        self._waiting = set()

    @contextmanager
    def only(self, ops: Sequence[Op]) -> Iterator[None]:
        """Make `finish` do only these operations and the column sums; all other operations are done already."""
        left = {*map(id, ops), *map(id, self.sums)}
        self._waiting = {id(op) for op in self.group.ops if id(op) not in left}
        yield
        self._waiting = set()

    def merged_from(self, shape: tuple[int, ...], ops: Sequence[Op], readers: Sequence[Op] = ()) -> int:
        """Return the first dimension of the trailing run that may be treated as one: every operand and result of `ops`,
        and every operand of `readers`, has all of it, or none of it."""
        rank = len(shape)
        first = 0
        for op in ops:
            if op.kind in EFFECTS:
                continue
            if op.kind == "batch_norm":
                first = max(first, 2)
            elif op.kind not in POINTWISE:
                return max(rank - 1, 0)
            per_channel = op.ins[1:] if op.kind == "batch_norm" else ()
            first = max([first, *(self._run_from(v, shape) for v in (*op.ins, *op.outs) if v not in per_channel)])
        first = max([first, *(self._run_from(v, shape) for op in readers for v in op.ins if len(v.type.dims) == rank)])
        return min(first, max(rank - 1, 0))

    def _run_from(self, value: Value, shape: tuple[int, ...]) -> int:
        dims, rank = value.type.dims, len(shape)
        producer = self.group.inline.get(value)
        if prod(dims) == 1 or (producer is not None and producer.kind == "const"):
            return 0
        padded = (1,) * (rank - len(dims)) + dims
        run = ones = rank
        while run > 0 and padded[run - 1] == shape[run - 1]:
            run -= 1
        while ones > 0 and padded[ones - 1] == 1:
            ones -= 1
        # Values that are computed where they are read may need the coordinates one by one.
        return ones if producer is not None else min(run, ones)

    # ------------------------------------------------------------------------------ storing

    def finish(self, known: Mapping[Value, tuple[Expr, Index]]) -> None:
        """Compute the epilogue of `known` at this point, then store every result of the group that can be reached from
        here."""
        where: dict[Value, Index] = {}
        for value, (expr, index) in known.items():
            self.know(value, index, self.emit.bind(expr))
            where[value] = index
        roots = {v.type.shape: i for v, (_, i) in known.items()}
        ops = [op for op in self.group.ops if id(op) not in self._waiting]
        self._compute(ops, where, roots)
        stores = self._effect_stores(ops, where, roots) + self._result_stores(where, roots)
        for buffer, expr, value, index in stores:
            self.put(buffer, expr, value, index)

    def _compute(self, ops: Sequence[Op], where: dict[Value, Index], roots: Mapping[Any, Index]) -> None:
        """Compute every operation that can be done at this point, and note in `where` the index of its results."""
        for op in ops:
            if all(v in where for v in op.outs) and op.kind not in EFFECTS:
                continue
            if op.kind in BIJECTIONS and op.ins[0] in where:
                where[op.outs[0]] = index = forward_index(op, where[op.ins[0]])
                self.know(op.outs[0], index, self.at(op.ins[0], where[op.ins[0]]))
            elif op.kind in POINTWISE or op.kind == "batch_norm":
                shape = op.outs[0].type.shape
                here = next((where[v] for v in op.ins if v in where and v.type.shape == shape), roots.get(shape))
                if here is not None:
                    self.at(op.outs[0], here)
                    where |= dict.fromkeys(op.outs, here)
            elif op.kind in INDEXED and op.kind not in ("const", "iota") and op.outs[0] in self.group.outs:
                here = roots.get(op.outs[0].type.shape)
                if here is not None:
                    self.at(op.outs[0], here)
                    where[op.outs[0]] = here

    def _effect_stores(self, ops: Sequence[Op], where: dict[Value, Index], roots: Mapping[Any, Index]) -> list[_Store]:
        """Return the stores that update variables at this point."""
        stores: list[_Store] = []
        for op in ops:
            if op.kind in EFFECTS and (op.outs or op.ins)[0].type.size == 0:
                continue
            if op.kind in ("accum", "write"):
                value = op.ins[0]
                if value not in where:
                    where[value] = self._root_for(value, roots)
                slot, place = slot_of(op), where[value]
                assert slot is not None
                self._check_alias(op.var, place)
                position = linear(place, value.type.dims)
                buffer = self.slot(slot, value)
                expr = self.at(value, place)
                if op.var not in self._loaded:
                    self._prefetch_ahead(value, buffer, position, True)
                if op.kind == "accum":
                    expr = self.emit.bind(self.read(buffer, value, place) + expr)
                stores.append((buffer, expr, value, place))
            elif op.kind == "take":
                value = op.outs[0]
                place = roots.get(value.type.shape, ())
                if (value, tuple(map(id, place))) not in self._frame:
                    raise NotOneKernel(f"@{op.var} is not taken element by element")
                self._check_alias(op.var, place)
                stores.append((self.operand(value), literal(0, value.type.dtype), value, place))
        return stores

    def _result_stores(self, where: dict[Value, Index], roots: Mapping[Any, Index]) -> list[_Store]:
        """Return the stores of the group's results at this point."""
        stores: list[_Store] = []
        for value in self.group.outs:
            if value in self._elsewhere or id(self._producers[value]) in self._waiting:
                continue
            if value not in where:
                where[value] = self._root_for(value, roots)
            position = linear(where[value], value.type.dims)
            self._prefetch_ahead(value, self.result(value), position, True)
            stores.append((self.result(value), self.at(value, where[value]), value, where[value]))
        return stores

    def _root_for(self, value: Value, roots: Mapping[Any, Index]) -> Index:
        place = roots.get(value.type.shape)
        if place is None:
            raise NotOneKernel(f"%{value.name} cannot be stored element by element with the rest")
        return place

    def _check_alias(self, var: str, place: Index) -> None:
        for index in self._loads.get(var, ()):
            if tuple(map(id, index)) != tuple(map(id, place)):
                raise NotOneKernel(f"@{var} is overwritten at one element while others are still read")
        self._loads.pop(var, None)

    def store_apart(self, value: Value, expr: Expr, index: Index) -> None:
        """Store a second result of the main operation where it is computed, if it is used; `finish` leaves it alone."""
        self._elsewhere.add(value)
        if value in self.group.outs:
            position = linear(index, value.type.dims)
            self._prefetch_ahead(value, self.result(value), position, True)
            self.emit.store(self.result(value), expr, position)

    def part_place(self, value: Value, index: Index) -> tuple[Buffer, Expr] | None:
        """Return where an element is stored of a main operation that computes its results at different points.

        The place is behind the layout changes that follow and, where it is concatenated, in its part of the whole. None
        if the value is not used."""
        while value not in self.group.outs:
            behind = [op for op in self.group.ops if value in op.ins]
            if not behind:
                return None
            op = behind[0]
            if len(behind) > 1 or op.ins.count(value) > 1 or op.kind not in (*BIJECTIONS, "concat"):
                raise NotOneKernel(f"{op.kind} cannot be done where %{value.name} is stored")
            if op.kind == "concat":
                axis = axis_of(op, op.outs[0])
                before = sum(v.type.dims[axis] for v in op.ins[: op.ins.index(value)])
                index = tuple(x + before if i == axis and before else x for i, x in enumerate(index))
            else:
                index = forward_index(op, index)
            value = op.outs[0]
        if any(value in op.ins for op in self.group.ops):
            raise NotOneKernel(f"%{value.name} is stored and worked on")
        return self.result(value), linear(index, value.type.dims)

    def finish_part(self, value: Value, expr: Expr, index: Index) -> None:
        """Store an element of a result that `part_place` has a place for."""
        place = self.part_place(value, index)
        if place is not None:
            self.emit.store(place[0], expr, place[1])

    def address(self, value: Value, index: Index) -> tuple[Value, Expr] | None:
        """Return the stored value, and the position in it, that `value` at `index` is read from; None if it is
        computed."""
        if self.is_stored(value):
            return value, linear(index, value.type.dims)
        op = self._producers.get(value) or self.group.inline[value]
        if op.kind not in VIEWS:
            return None
        address: tuple[Value, Expr] | None = INDEXED[op.kind](
            self.functions, op, lambda k, i: self.address(op.ins[k], i), index
        )
        return address

    def memory(self, address: tuple[Value, Expr]) -> tuple[Buffer, Expr]:
        """Return the buffer and position of an address, for reading vectors. The kernel refuses to update a variable
        read this way, because a vector is not one element."""
        value, position = address
        home = self.group.homes.get(value)
        if home is not None:
            self._loads.setdefault(home, []).append((position,))
            self._loaded.add(home)
        return self.operand(value), position

    # ------------------------------------------------------------------------------ packing ahead

    def takes_packed(self, op: Op) -> bool:
        """Return whether the weight of `op` is made of variables that never change, so that `packed_ahead` gives it.
        The weight is operand 1, or all behind the first where scales follow it."""
        return bool(op.attrs.get(PACKED)) and all(v in self.group.homes for v in self.sources(op))

    def sources(self, op: Op) -> tuple[Value, ...]:
        """Return the stored values that the weight of an operation is made of."""
        sources: dict[Value, None] = {}
        stack = list(op.ins[1:2] if op.kind in ("matmul_bytes", "conv_bytes") else op.ins[1:])[::-1]
        while stack:
            value = stack.pop()
            maker = self.group.inline.get(value)
            stack += maker.ins[::-1] if maker is not None else ()
            sources |= {value: None} if maker is None else {}
        return tuple(sources)

    def packed_ahead(self, op: Op, size: int, dtype: str, fill: Callable[[Buffer], None]) -> Buffer | None:
        """Return the weight of `op` packed ahead of the kernel, `size` elements that `fill` writes from its operands
        alone. None if the kernel has to pack it. Generators call this once in a kernel, before they open a loop."""
        if not self.takes_packed(op) or size == 0:
            return None
        sources = self.sources(op)
        assert self.packing is None, "one packed operand is enough"
        value = packed_value(sources[0], dtype, size)
        self.packing = PackedWeight(None, value, sources)
        if not self.only_packing:
            return self.operand(value)
        fill(self.result(value))
        for source in sources:
            self.operand(source)
        params = [*(self._ins[source] for source in sources), self._outs["out", value]]
        function = self._function(params, [*sources, ("out", value)])
        raise PackingEmitted(function.with_attr("tirx.noalias", True))

    # ------------------------------------------------------------------------------ the function

    def kernel(self) -> GeneratedKernel:
        missing = [v for v in self.group.outs if ("out", v) not in self._outs]
        if missing:
            raise NotOneKernel(f"%{missing[0].name} is not reached by the kernel of its group")
        slots = {slot_of(op) for op in self.group.ops if op.kind in EFFECTS}
        assert slots <= set(self._slots), "an effect of the group was not emitted"
        params = [*self._ins.values(), *self._slots.values(), *self._outs.values()]
        function = self._function(params, [*self._ins, *self._slots, *self._outs])
        if self.emit.holds_bools or any(
            v.type.dtype == "bool" for v in (*self._ins, *(value for _, value in self._outs))
        ):
            function = function.with_attr(HOLDS_BOOLS, True)
        touched = {op.var for op in self.group.ops if op.kind in EFFECTS}
        # `latest` and `next` of a variable may be one buffer.
        if not (touched & self._loaded) and not any(op.kind == "write" for op in self.group.ops):
            function = function.with_attr("tirx.noalias", True)
        outs = tuple(value for _, value in self._outs)
        return GeneratedKernel(function, tuple(self._ins), tuple(self._slots), outs, self.packing)

    def _function(self, params: Sequence[Buffer], keys: Sequence[Any]) -> Any:
        views = [tirx.DeclBuffer(self._views[k], data=tirx.buffer_data(p)) for k, p in zip(keys, params, strict=True)]
        function = tirx.PrimFunc(params, tirx.SeqStmt([*views, self.emit.build()]))
        return function.with_attr("s_tir", True).with_attr("tirx.is_scheduled", True).with_attr("op_pattern", 8)


def parallel_if(machine: TargetMachine, work: int) -> Any:
    """Return the loop kind of an outermost loop over this much work."""
    return tirx.ForKind.PARALLEL if work >= machine.serial_below else tirx.ForKind.SERIAL


__all__ = ["BIJECTIONS", "EFFECTS", "Body", "Fusion", "GeneratedKernel", "NotOneKernel", "parallel_if"]
