"""Groups of operations that become one kernel, and their text: the same text means the same machine code.

In: a group with the names of its graph. Out: a graph of its own in which values are called v0, v1, ... and variables w0, w1, ... in the
order of their first use, without annotations and places, so that equal kernels of different layers, stages and models read the same;
`Renamed` leads back. `parse_group(text)` is the group again, under the new names. In the text, `read` says in which variable an operand
lives, and `kernel=inline` that a value is computed where it is read.

Nothing here needs TVM: what was compiled before is found without loading it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.ir.graph import ANNOTATIONS, Attr, Graph, Module, Op, Slot, Value
from penstock.ir.text import parse_module, print_graph

EFFECTS = ("accum", "write", "take")
# Kernel names with this prefix: the value is computed where it is read.
INLINE = "inline"
_NAME = "k"


class NotOneKernel(Exception):
    """These operations cannot be computed by one kernel of ours."""


@dataclass(frozen=True)
class Group:
    """What shall become one kernel. `inline` are producers whose results are not stored anywhere but computed where they are read;
    `homes` says in which variable a value lives that was read from one."""

    ops: tuple[Op, ...]
    outs: tuple[Value, ...]
    inline: Mapping[Value, Op] = field(default_factory=dict)
    homes: Mapping[Value, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """A function and its parameters in order: operands, then slots updated in place, then results. The function is TIR where there is one
    in this process."""

    function: Any
    ins: tuple[Value, ...]
    slots: tuple[Slot, ...]
    outs: tuple[Value, ...]


def name_of(group: Group) -> str:
    """A name people recognise in profiles and dumps."""
    kinds = [op.kind for op in group.ops]
    return "_".join(kinds[:4]) + (f"_and_{len(kinds) - 4}" if len(kinds) > 4 else "")


def is_inline(op: Op) -> bool:
    return str(op.attrs.get("kernel", "")).startswith(INLINE)


@dataclass(frozen=True)
class Renamed:
    """A group as text, and what its names stand for."""

    text: str
    values: Mapping[str, Value]
    vars: Mapping[str, str]

    def kernel(self, ins: Sequence[str], slots: Sequence[tuple[str, str]], outs: Sequence[str]) -> Kernel:
        """The parameters of a compiled kernel under the names of the group's own graph."""
        return Kernel(
            None,
            tuple(self.values[name] for name in ins),
            tuple(Slot(self.vars[var], slot) for var, slot in slots),
            tuple(self.values[name] for name in outs),
        )


def rename(group: Group) -> Renamed:
    writer = _Writer(group)
    for op in group.ops:
        writer.own(op)
    outs = tuple(writer.value(v) for v in group.outs)
    graph = Graph(_NAME, tuple(writer.ins), outs, tuple(writer.ops))
    back = {new.name: old for old, new in writer.values.items()}
    return Renamed(module_text([graph]), back, {new: old for old, new in writer.vars.items()})


class _Writer:
    """Lists a group's operations with what they need in front of them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.values: dict[Value, Value] = {}
        self.vars: dict[str, str] = {}
        self.ins: list[Value] = []
        self.ops: list[Op] = []

    def own(self, op: Op) -> None:
        self._add(op, {})

    def value(self, old: Value) -> Value:
        """The new name of an operand; what it takes to compute or to read it is listed when it is first met."""
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


def parse_group(text: str) -> Group:
    (graph,) = parse_graphs(text)
    inline = {v: op for op in graph.ops if is_inline(op) for v in op.outs}
    homes = {op.outs[0]: op.var for op in graph.ops if op.kind in ("read", "take")}
    ops = tuple(op for op in graph.ops if op.kind != "read" and not is_inline(op))
    return Group(ops, graph.outs, inline, homes)


def module_text(graphs: Sequence[Graph]) -> str:
    """Graphs as text, without anything around them."""
    return "\n".join(["module @m {", *(line for graph in graphs for line in print_graph(graph)), "}"])


def parse_graphs(text: str) -> tuple[Graph, ...]:
    module: Module = parse_module(text, "<kernel>")
    return tuple(module.graphs.values())
