"""The division of a graph into kernels, each as a graph by itself, with the arithmetic and the memory traffic of each.

In: a graph with `kernel` annotations (`fuse`). Out: every operation exactly once: in a kernel, computed where it is
read, or a read of a variable. Each kernel has a body that any back end can compile and run. Values of other kernels
that it reads are inputs, values that other kernels read are results, and variables stay variables.

    operations of a graph = operations in kernels + operations computed where they are read (or constant tables)
                            + reads of variables
    bytes of a kernel     = what it reads from memory, seen through layout changes, + what it stores; nothing in between

Limit: this is the choice in the IR; a back end may split a kernel that it cannot make in one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.ir.attrs import Attr
from penstock.ir.graph import ANNOTATIONS, Graph, Op, Value, slot_of
from penstock.ir.memo import Derived
from penstock.ir.memory.workspace import INLINE, is_table
from penstock.ir.ops import VIEWS
from penstock.ir.types import ITEM_BYTES


@dataclass(frozen=True)
class Division:
    """The operations of one graph: those of each kernel, those computed where they are read, and the reads of
    variables."""

    kernels: Mapping[str, tuple[Op, ...]]
    inline: tuple[Op, ...]
    reads: tuple[Op, ...]


@dataclass(frozen=True)
class Kernel:
    """A group of operations that run as one, and the same as a graph. `body` also holds what is computed where they
    read it."""

    name: str
    ops: tuple[Op, ...]
    body: Graph

    @cached_property
    def touches(self) -> list[Touch]:
        """The reads and writes of the kernel."""
        return touches(self.body, self.ops)

    @cached_property
    def moved(self) -> float:
        """The bytes to and from memory."""
        return sum(touch.bytes for touch in self.touches)

    @cached_property
    def shape(self) -> object:
        """The structure of the kernel: equal for kernels that differ only in names of values, variables and places in
        the source."""
        return shape_of(self.body)

    @cached_property
    def key(self) -> str:
        """A hash of the kernel's structure: the same for kernels that differ in names only."""
        return hashlib.sha256(repr(self.shape).encode()).hexdigest()


def divide(graph: Graph) -> Division:
    """Divide a graph, every operation exactly once. Operations without annotation are kernels by themselves, named by
    their position."""
    kernels: dict[str, list[Op]] = {}
    inline, reads = [], []
    for i, op in enumerate(graph.ops):
        name = str(op.attrs.get("kernel", f"op{i}"))
        if op.kind == "read":
            reads.append(op)
        elif name.startswith(INLINE) or is_table(op):
            inline.append(op)
        else:
            kernels.setdefault(name, []).append(op)
    return Division({name: tuple(ops) for name, ops in kernels.items()}, tuple(inline), tuple(reads))


_KERNELS = Derived[tuple[Kernel, ...]](__name__, "kernels")


def kernels_of(graph: Graph) -> tuple[Kernel, ...]:
    """Return all kernels of a graph, in the order of their first operation."""
    return graph.keep(_KERNELS, _kernels_of)


def _kernels_of(graph: Graph) -> tuple[Kernel, ...]:
    division = divide(graph)
    bodies = KernelCutter(graph, division)
    return tuple(Kernel(name, ops, bodies.body(name)) for name, ops in division.kernels.items())


class KernelCutter:
    """A cutter of kernels out of a graph."""

    def __init__(self, graph: Graph, division: Division) -> None:
        self.graph, self.division = graph, division
        self.position = {id(op): i for i, op in enumerate(graph.ops)}
        self.copied = {v: op for op in (*division.inline, *division.reads) for v in op.outs}
        unit = {id(op): name for name, ops in division.kernels.items() for op in ops}
        # The kernels that read a value, be it through operations that are computed where they are read; "" is the
        # outside.
        self.readers: dict[Value, set[str]] = {v: {""} for v in graph.results}
        for op in reversed(graph.ops):
            if id(op) in unit:
                through = {unit[id(op)]}
            else:
                through = {name for v in op.outs for name in self.readers.get(v, ())}
            for v in op.ins:
                self.readers.setdefault(v, set()).update(through)

    def body(self, name: str) -> Graph:
        ops = self.division.kernels[name]
        defined = {v for op in ops for v in op.outs}
        included = {id(op): op for op in ops}
        ins: dict[Value, None] = {}
        stack = [v for op in reversed(ops) for v in reversed(op.ins)]
        while stack:
            v = stack.pop()
            if v in defined:
                continue
            maker = self.copied.get(v)
            if maker is None:
                ins[v] = None
            elif id(maker) not in included:
                included[id(maker)] = maker
                stack += reversed(maker.ins)
        # What `take` and `put` give is the variable itself.
        stored = [v for op in ops if op.kind not in ("take", "put") for v in op.outs]
        outs = tuple(v for v in stored if self.readers.get(v, set()) - {name})
        ordered = tuple(sorted(included.values(), key=lambda op: self.position[id(op)]))
        return Graph(f"{self.graph.name}/{name}", tuple(ins), outs, ordered)


def shape_of(body: Graph) -> object:
    """Return a structure that is equal for graphs that differ only in names of values, variables and places in the
    source."""
    number: dict[Value, int] = {v: i for i, v in enumerate(body.ins)}
    variables: dict[Attr, int] = {}
    parts: list[object] = [tuple(str(v.type) for v in body.ins)]
    for op in body.ops:
        for v in op.outs:
            number[v] = len(number)
        attrs = {k: v for k, v in op.attrs.items() if k not in ANNOTATIONS and k != "var"}
        slot = slot_of(op)
        home = (variables.setdefault(slot.var, len(variables)), slot.slot) if slot is not None else None
        types = tuple(str(v.type) for v in op.outs)
        parts.append((op.kind, tuple(number[v] for v in op.ins), types, tuple(sorted(attrs.items())), home))
    return tuple(parts), tuple(number[v] for v in body.outs)


# ------------------------------------------------------------------------------------------------ memory traffic


# A place in memory: a value, or a variable by name.
Place = Value | str


class Touch(NamedTuple):
    """The bytes that a kernel reads from a place, or writes to it."""

    place: Place
    bytes: float
    written: bool


def bytes_moved(body: Graph, ops: Iterable[Op]) -> float:
    """Return the bytes that a kernel has to read and to write."""
    return sum(touch.bytes for touch in touches(body, tuple(ops)))


def touches(body: Graph, ops: tuple[Op, ...]) -> list[Touch]:
    """Return the reads and writes of a kernel, reads first. A lookup reads only the rows of its table that it wants,
    and its gradient changes those. Of a cache, `put` changes its rows, and `attend` reads the blocks of its table."""
    makers = body.producers()
    defined = {v for op in ops if op.kind != "take" for v in op.outs}
    wanted: dict[Value, dict[Value, float]] = {}
    result: list[Touch] = []
    for op in ops:
        for i, v in enumerate(op.ins):
            if v in defined:
                continue
            for source, count in _read(v, makers, defined).items():
                if op.kind == "gather" and i == 0:
                    count = min(count, op.outs[0].type.nbytes)
                elif op.kind == "attend" and i in (1, 2):
                    count = min(count, op.ins[5].type.size * v.type.nbytes / v.type.dims[0])
                # Two reads in the same form count once; reads in several forms count at most the whole value.
                wanted.setdefault(source, {})[v] = count
    for source, forms in wanted.items():
        maker = makers.get(source)
        place: Place = maker.var if maker is not None and maker.kind in ("read", "take") else source
        result.append(Touch(place, min(float(source.type.nbytes), sum(forms.values())), False))
    for op in ops:
        if op.kind == "accum":
            maker = makers.get(op.ins[0])
            scattered = maker is not None and maker in ops and maker.kind == "gather_grad"
            count = float(maker.ins[0].type.nbytes if scattered and maker is not None else op.ins[0].type.nbytes)
            result += [Touch(op.var, count, False), Touch(op.var, count, True)]
        elif op.kind == "put":
            result.append(Touch(op.var, float(op.ins[0].type.size * ITEM_BYTES[op.outs[0].type.dtype]), True))
        elif op.kind in ("write", "take"):
            result.append(Touch(op.var, float((op.ins or op.outs)[0].type.nbytes), True))
    return [*result, *(Touch(v, float(v.type.nbytes), True) for v in body.outs)]


def _read(value: Value, makers: Mapping[Value, Op], inside: Set[Value]) -> dict[Value, float]:
    """Return the bytes that one read of a value takes from memory, by the value that has memory. What the kernel makes
    itself, `inside`, takes none."""
    if value in inside:
        return {}
    op = makers.get(value)
    if op is None or op.kind in ("read", "take") or is_table(op):
        return {value: float(value.type.nbytes)}
    counts: dict[Value, float] = {}
    for v in op.ins:
        for source, count in _read(v, makers, inside).items():
            limit = float(value.type.nbytes) if op.kind in VIEWS else count
            counts[source] = counts.get(source, 0.0) + min(count, limit)
    return counts
