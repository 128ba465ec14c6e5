"""Groups of operations that become one kernel, and their text: the same text means the same machine code.

In: a group with the names of its graph. Out: a graph of its own in which values are called v0, v1, ... and variables
w0, w1, ... in the order of their first use, without places and annotations (but `packed`, which changes the kernel). So
equal kernels of different layers, stages and models have one text; `Renamed` leads back. `parse_group(text)` is the
group again, under the new names. In the text, `read` says in which variable an operand lives, and `kernel=inline` that
a value is computed where it is read.

Nothing here needs TVM: compiled code is found in the cache without loading it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.ir.attrs import Attr
from penstock.ir.graph import ANNOTATIONS, Graph, Module, Op, Slot, Value
from penstock.ir.memory.workspace import INLINE, is_inline
from penstock.ir.ops import EXCHANGES
from penstock.ir.text import parse_module, print_graph
from penstock.ir.types import TensorType
from penstock.support.errors import PenstockError
from penstock.support.out_of_memory import is_out_of_memory

from .messages import KernelParameters, PackedOperand

EFFECTS = ("accum", "write", "take", "put")
# Operations with a result that is the variable itself, and not a tensor that the kernel stores.
IN_PLACE = ("take", "put")
# Operations with this mark read a variable that no graph changes: the kernel may take it in the kernel's own order.
PACKED = "packed"
_NAME = "k"
_HOME = "/backends/tvm/"


class NotOneKernel(Exception):
    """The refusal of a generator: no single kernel computes these operations."""


class RuleFailed(Exception):
    """The rule of an operation raised an error, which is the cause, and makes no kernel."""

    def __init__(self, kinds: Sequence[str], error: Exception) -> None:
        lines = str(error).strip().splitlines() or [""]
        last = [frame for frame in traceback.extract_tb(error.__traceback__) if _HOME in frame.filename]
        place = f" (backends/tvm/{last[-1].filename.rpartition(_HOME)[2]}:{last[-1].lineno})" if last else ""
        super().__init__(
            f"no kernel can be made of {', '.join(dict.fromkeys(kinds))}: {type(error).__name__}: {lines[-1]}{place}"
        )


@contextmanager
def rules_of(ops: Sequence[Op]) -> Iterator[None]:
    """Name the operations in an error of their rules; where contexts are nested, the innermost names its own."""
    try:
        yield
    except (NotOneKernel, RuleFailed, PenstockError, OSError):
        raise
    except Exception as error:
        if not ops or is_out_of_memory(error):
            raise
        raise RuleFailed([op.kind for op in ops], error) from error


@dataclass(frozen=True)
class Fusion:
    """Operations that shall become one kernel. `inline` are producers whose results are not stored but computed where
    they are read; `homes` says in which variable a value lives that was read from one."""

    ops: tuple[Op, ...]
    outs: tuple[Value, ...]
    inline: Mapping[Value, Op] = field(default_factory=dict)
    homes: Mapping[Value, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedWeight:
    """An operand in the kernel's own order. It is made once, by `function`, of variables that do not change.
    `value`, one of the kernel's operands, is the packed form, a list of numbers; `sources` are the values that were
    read from variables, several where a weight has scales beside it. Equal keys mean equal functions: what one packs
    serves every kernel of the key."""

    function: Any
    value: Value
    sources: tuple[Value, ...]
    key: str = ""


@dataclass(frozen=True)
class GeneratedKernel:
    """A function and its parameters in order: operands, then slots updated in place, then results. The function is TIR
    where this process has it."""

    function: Any
    ins: tuple[Value, ...]
    slots: tuple[Slot, ...]
    outs: tuple[Value, ...]
    packing: PackedWeight | None = None


@dataclass(frozen=True)
class LibraryCall:
    """The function of a kernel that a function registered at run time computes: its name, and the text it is given."""

    name: str
    text: str


# The functions that begin a collective and wait for it. The text says which one of a stage's.
BEGIN, WAIT = "penstock.collective.begin", "penstock.collective.wait"


def collective_kernel(group: Fusion) -> GeneratedKernel | None:
    """Return the call that begins a collective, if the group is one; NotOneKernel for one among other operations. The
    text is left to the graph's function."""
    if not any(op.kind in EXCHANGES for op in group.ops):
        return None
    if len(group.ops) > 1:
        raise NotOneKernel("a collective is a kernel of its own")
    return GeneratedKernel(LibraryCall(BEGIN, ""), group.ops[0].ins, (), group.ops[0].outs)


def name_of(group: Fusion) -> str:
    """Return a name for a group that readers recognise in profiles and dumps."""
    kinds = [op.kind for op in group.ops]
    return "_".join(kinds[:4]) + (f"_and_{len(kinds) - 4}" if len(kinds) > 4 else "")


def packed_value(source: Value, dtype: str, size: int) -> Value:
    """Return the operand of a kernel that stands for `source` in the kernel's own order."""
    return Value(f"{source.name}.packed", TensorType(dtype, (size,)))


@dataclass(frozen=True)
class Renamed:
    """A group as text, and the values and variables that its names stand for."""

    text: str
    values: Mapping[str, Value]
    vars: Mapping[str, str]

    def kernel(self, parameters: KernelParameters) -> GeneratedKernel:
        """Return a compiled kernel with its parameters under the names of the group's own graph."""
        return kernel_of(parameters, self.values, self.vars)


def kernel_of(
    parameters: KernelParameters, values: Mapping[str, Value], variables: Mapping[str, str] | None = None
) -> GeneratedKernel:
    """Return a compiled kernel, given what the names of its parameters stand for; without `variables`, those go by
    their own names."""
    packing, named = None, dict(values)
    if parameters.packing is not None:
        form = parameters.packing
        sources = tuple(values[name] for name in form.sources)
        packing = PackedWeight(None, packed_value(sources[0], form.dtype, form.size), sources, form.key)
        named[f"{form.sources[0]}.packed"] = packing.value
    slots = tuple(Slot(var if variables is None else variables[var], slot) for var, slot in parameters.slots)
    return GeneratedKernel(
        None,
        tuple(named[name] for name in parameters.ins),
        slots,
        tuple(named[name] for name in parameters.outs),
        packing,
    )


def parameters_of(kernel: GeneratedKernel) -> KernelParameters:
    """Return the parameters of a kernel by name."""
    slots = tuple((slot.var, slot.slot) for slot in kernel.slots)
    packing = None
    if kernel.packing is not None:
        kind = kernel.packing.value.type
        names = tuple(v.name for v in kernel.packing.sources)
        packing = PackedOperand(names, kind.dtype, kind.size, kernel.packing.key)
    return KernelParameters(tuple(v.name for v in kernel.ins), slots, tuple(v.name for v in kernel.outs), packing)


def rename(group: Fusion) -> Renamed:
    """Write a group as text under neutral names."""
    writer = _Writer(group)
    for op in group.ops:
        writer.own(op)
    outs = tuple(writer.value(v) for v in group.outs)
    graph = Graph(_NAME, tuple(writer.ins), outs, tuple(writer.ops))
    back = {new.name: old for old, new in writer.values.items()}
    return Renamed(module_text([graph]), back, {new: old for old, new in writer.vars.items()})


class _Writer:
    """A list of a group's operations, each after those that it needs."""

    def __init__(self, group: Fusion) -> None:
        self.group = group
        self.values: dict[Value, Value] = {}
        self.vars: dict[str, str] = {}
        self.ins: list[Value] = []
        self.ops: list[Op] = []

    def own(self, op: Op) -> None:
        """Add an operation of the group."""
        self._add(op, {PACKED: True} if op.attrs.get(PACKED) else {})

    def value(self, old: Value) -> Value:
        """Return the new name of an operand; the operations that compute or read it are added when it is first met."""
        if old not in self.values:
            if old in self.group.inline:
                self._add(self.group.inline[old], {"kernel": INLINE})
            elif old in self.group.homes:
                self.ops.append(Op("read", (), (self._new(old),), {"var": self._var(self.group.homes[old])}))
            else:
                self.ins.append(self._new(old))
        return self.values[old]

    def _add(self, op: Op, marks: dict[str, Attr]) -> None:
        ins = tuple(self.value(v) for v in op.ins)
        attrs: dict[str, Attr] = {k: v for k, v in sorted(op.attrs.items()) if k not in ANNOTATIONS}
        if "var" in attrs:
            attrs["var"] = self._var(op.var)
        self.ops.append(Op(op.kind, ins, tuple(self._new(v) for v in op.outs), attrs | marks))

    def _new(self, old: Value) -> Value:
        return self.values.setdefault(old, Value(f"v{len(self.values)}", old.type))

    def _var(self, name: str) -> str:
        return self.vars.setdefault(name, f"w{len(self.vars)}")


def parse_group(text: str) -> Fusion:
    """Read the text of a group."""
    (graph,) = parse_graphs(text)
    inline = {v: op for op in graph.ops if is_inline(op) for v in op.outs}
    homes = {op.outs[0]: op.var for op in graph.ops if op.kind in ("read", "take")}
    ops = tuple(op for op in graph.ops if op.kind != "read" and not is_inline(op))
    return Fusion(ops, graph.outs, inline, homes)


def module_text(graphs: Sequence[Graph]) -> str:
    """Print graphs, without anything around them."""
    return "\n".join(["module @m {", *map(print_graph, graphs), "}"])


def parse_graphs(text: str) -> tuple[Graph, ...]:
    """Read the text of graphs."""
    module: Module = parse_module(text, "<kernel>")
    return tuple(module.graphs.values())
