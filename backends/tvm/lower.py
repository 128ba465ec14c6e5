"""From a graph to kernels and one Relax function that calls them.

In: a stage graph with `kernel` annotations: operations with the same value become one kernel, `inline` means that a layout operation is
computed where it is read, operations without annotation get a kernel of their own. Out: an IRModule with one Relax function per graph, whose
parameters follow `penstock.ir.graph.signature`, and the list of kernels for people to look at.

Variables are parameters. `read` is the parameter itself; `accum` and `write` update it in place from inside the kernel that makes the value;
`take` reads it and leaves zeros behind, in the same kernel where it can. Because an in-place update destroys what was there:
  * kernels that read a variable run before the kernel that writes it (edges added to the order of kernels);
  * a value that is read from a variable and needed later than the write, or handed back as a result, is copied first.

A group that the generators refuse is split into one kernel per operation: slower, never wrong. Equal kernels are stored once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from penstock.ir.graph import Graph, Op, Slot, Value, signature, slot_of
from penstock.ir.types import TensorType, numpy_dtype

from .kernels import Group, Kernel, NotOneKernel, generate, generate_effect
from .kernels.body import EFFECTS
from .kernels.emit import TVM_DTYPES
from .load import function_name
from .target import Machine

# Kernel names with this prefix: the value is computed where it is read.
INLINE = "inline"
# Never worth memory: computed where they are read, annotated or not.
ALWAYS_INLINE = ("const", "iota")


@dataclass(frozen=True)
class Step:
    """One call of the lowered graph."""

    group: Group
    kernel: Kernel
    name: str


@dataclass(frozen=True)
class Lowered:
    """A graph as calls of kernels, in order."""

    graph: Graph
    steps: tuple[Step, ...]


def is_inline(op: Op) -> bool:
    return str(op.attrs.get("kernel", "")).startswith(INLINE)


def is_table(op: Op) -> bool:
    """A constant that needs memory: a list of values."""
    return op.kind == "const" and isinstance(op.attrs["value"], tuple)


# ---------------------------------------------------------------------------------------- state


def _snapshot_reads(graph: Graph) -> Graph:
    """Copy what is read from a variable where the variable may change before the last use, or where it is a result."""
    reads = {op.outs[0]: op for op in graph.ops if op.kind in ("read", "take")}
    results = set(graph.results)
    last_use = _last_uses(graph)
    table: dict[Value, Value] = {}
    ops: list[Op] = []
    for i, op in enumerate(graph.ops):
        op = replace_ins(op, table)
        ops.append(op)
        if op.kind not in ("read", "take"):
            continue
        value = op.outs[0]
        changes = [j for j, o in enumerate(graph.ops) if j > i and o.kind in ("write", "accum", "take") and o.var == op.var]
        late = bool(changes) and last_use.get(value, i) > changes[0]
        if value in results or late:
            copy = Value(f"{value.name}.copy", value.type)
            ops.append(Op("reshape", (value,), (copy,), {"shape": value.type.shape}, op.loc))
            table[value] = copy
    if not table:
        return graph
    outs = tuple(table.get(v, v) for v in graph.outs)
    saved = tuple(table.get(v, v) for v in graph.saved)
    assert set(reads) >= set(table)
    return Graph(graph.name, graph.ins, outs, tuple(ops), saved)


def _last_uses(graph: Graph) -> dict[Value, int]:
    """The position of the last operation that needs a value, be it through operations that are computed where they are read."""
    last: dict[Value, int] = {}
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        at = max([i, *(last.get(v, i) for v in op.outs)]) if is_inline(op) else i
        for v in op.ins:
            last[v] = max(last.get(v, at), at)
    return last


def replace_ins(op: Op, table: Mapping[Value, Value]) -> Op:
    if not any(v in table for v in op.ins):
        return op
    return Op(op.kind, tuple(table.get(v, v) for v in op.ins), op.outs, op.attrs, op.loc)


# ---------------------------------------------------------------------------------------- groups


def _groups(graph: Graph) -> list[Group]:
    """Groups by annotation, each with what it has to store."""
    results = set(graph.results)
    homes = {op.outs[0]: op.var for op in graph.ops if op.kind in ("read", "take")}
    inline = {
        op.outs[0]: op for op in graph.ops if (is_inline(op) or op.kind in ALWAYS_INLINE) and not is_table(op) and op.outs[0] not in results
    }
    members: dict[str, list[Op]] = {}
    for i, op in enumerate(graph.ops):
        if op.kind == "read" or is_table(op) or (op.outs and op.outs[0] in inline):
            continue
        kernel = op.attrs.get("kernel")
        members.setdefault(f"k:{kernel}" if kernel is not None and not is_inline(op) else f"op:{i}", []).append(op)
    users = _users(graph, inline)
    groups = []
    for ops in members.values():
        inside = set(map(id, ops))
        wanted = []
        for op in ops:
            if op.kind == "take":
                continue
            for v in op.outs:
                outside = any(id(user) not in inside for user in users.get(v, ()))
                if v in results or outside:
                    wanted.append(v)
        groups.append(Group(tuple(ops), tuple(wanted), inline, homes))
    return groups


def _users(graph: Graph, inline: Mapping[Value, Op]) -> dict[Value, list[Op]]:
    """Who reads a value, looking through operations that are computed where they are read."""
    users: dict[Value, list[Op]] = {}
    through: dict[int, list[Op]] = {}
    for op in reversed(graph.ops):
        if op.outs and op.outs[0] in inline:
            readers = list({id(o): o for v in op.outs for o in users.get(v, ())}.values())
        else:
            readers = [op]
        through[id(op)] = readers
        for v in op.ins:
            users.setdefault(v, []).extend(readers)
    return users


def _reads_of(group: Group) -> list[Value]:
    """All values a group reads from memory or from other groups."""
    own = {v for op in group.ops for v in op.outs}
    found: dict[Value, None] = {}
    stack = [v for op in reversed(group.ops) for v in reversed(op.ins)]
    seen: set[Value] = set()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in own:
            continue
        if v in group.inline:
            stack.extend(reversed(group.inline[v].ins))
        else:
            found[v] = None
    return list(found)


def _split(group: Group, graph_users: Mapping[Value, Sequence[Op]], results: set[Value]) -> list[Group]:
    """One group per operation. An effect stays with the operation that makes its value where that is the only one there is."""
    parts = []
    for op in group.ops:
        outs = tuple(v for v in op.outs if op.kind != "take" and (v in results or graph_users.get(v)))
        parts.append(Group((op,), outs, group.inline, group.homes))
    return parts


def _kernels(graph: Graph, machine: Machine) -> list[tuple[Group, Kernel]]:
    """Generate all kernels, splitting groups that are refused."""
    found: list[tuple[Group, Kernel]] = []
    results = set(graph.results)
    first = _groups(graph)
    users = _users(graph, first[0].inline if first else {})
    for group in first:
        try:
            found.append((group, generate(group, machine)))
        except NotOneKernel:
            for part in _split(group, users, results):
                try:
                    found.append((part, generate(part, machine)))
                except NotOneKernel as error:
                    if len(part.ops) == 1 and part.ops[0].kind in ("take", "accum", "write"):
                        found.append((part, generate_effect(part, machine)))
                        continue
                    raise AssertionError(f"no kernel for {part.ops[0].kind} {part.ops[0].ins} -> {part.ops[0].outs}: {error}") from error
    return found


# ---------------------------------------------------------------------------------------- order


def _ordered(graph: Graph, kernels: Sequence[tuple[Group, Kernel]]) -> list[tuple[Group, Kernel]]:
    """An order in which values are made before they are read and effects on a variable stay in the graph's order."""
    position = {id(op): i for i, op in enumerate(graph.ops)}
    maker = {v: k for k, (group, _) in enumerate(kernels) for op in group.ops if op.kind != "take" for v in op.outs}
    last_use = _last_uses(graph)
    after: list[set[int]] = [set() for _ in kernels]
    touches: dict[str, list[tuple[int, int, bool]]] = {}
    for k, (group, _) in enumerate(kernels):
        for op in group.ops:
            if op.kind == "take":
                # Zeros are left behind when everybody has read the value.
                touches.setdefault(op.var, []).append((max(position[id(op)], last_use.get(op.outs[0], 0)), k, True))
            elif op.kind in EFFECTS:
                touches.setdefault(op.var, []).append((position[id(op)], k, True))
        for v in _reads_of(group):
            if v in maker:
                after[k].add(maker[v])
            elif v in group.homes:
                first = min(position[id(op)] for op in group.ops)
                last = max((position[id(op)] for op in group.ops if v in op.ins), default=first)
                touches.setdefault(group.homes[v], []).append((last, k, False))
    for uses in touches.values():
        # At one position, reading comes before changing.
        uses.sort(key=lambda use: (use[0], use[2], use[1]))
        for i, (_, k, changes) in enumerate(uses):
            for _, earlier, changed in uses[:i]:
                if (changes or changed) and earlier != k:
                    after[k].add(earlier)
    first_op = [min(position[id(op)] for op in group.ops) for group, _ in kernels]
    last_op = [max(position[id(op)] for op in group.ops) for group, _ in kernels]
    waiting = [len(a) for a in after]
    before: list[list[int]] = [[] for _ in kernels]
    for k, needed in enumerate(after):
        for e in needed:
            before[e].append(k)
    ready = [(last_op[k], first_op[k], k) for k, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    order: list[tuple[Group, Kernel]] = []
    while ready:
        _, _, k = heapq.heappop(ready)
        order.append(kernels[k])
        for later in before[k]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, (last_op[later], first_op[later], later))
    if len(order) != len(kernels):
        raise NotOneKernel("the kernels of this graph wait for each other")
    return order


def plan_kernels(graph: Graph, machine: Machine) -> Lowered:
    """The kernels of a graph in the order they run. A grouping that leaves no order is given up: then every operation has its own kernel."""
    graph = _snapshot_reads(graph)
    kernels = _kernels(graph, machine)
    try:
        order = _ordered(graph, kernels)
    except NotOneKernel:
        bare = replace(graph, ops=tuple(op.with_attrs(kernel=None) if not is_inline(op) else op for op in graph.ops))
        kernels = _kernels(bare, machine)
        graph, order = bare, _ordered(bare, kernels)
    steps = tuple(Step(group, kernel, _name_of(group)) for group, kernel in order)
    return Lowered(graph, steps)


def _name_of(group: Group) -> str:
    """A name people recognise in profiles and dumps."""
    kinds = [op.kind for op in group.ops]
    return "_".join(kinds[:4]) + (f"_and_{len(kinds) - 4}" if len(kinds) > 4 else "")


# ---------------------------------------------------------------------------------------- Relax


def relax_type(t: TensorType) -> Any:
    return relax.TensorType(t.dims, TVM_DTYPES[t.dtype])


def _table(op: Op) -> Any:
    t = op.outs[0].type
    values = np.array(op.attrs["value"], numpy_dtype(t.dtype)).reshape(t.dims)
    return relax.const(values, TVM_DTYPES[t.dtype])


def emit_relax(builder: Any, lowered: Lowered, name: str) -> None:
    """Add one Relax function to the module under construction."""
    graph = lowered.graph
    sig = signature(graph)
    slot_types = _slot_types(graph)
    params = [relax.Var(function_name(v.name), relax_type(v.type)) for v in sig.ins]
    slots = {s: relax.Var(function_name(f"{s.var}_{s.slot or 'acc'}"), relax_type(slot_types[s])) for s in sig.slots}
    env: dict[Value, Any] = dict(zip(sig.ins, params, strict=True))
    for op in graph.ops:
        slot = slot_of(op)
        if op.kind in ("read", "take"):
            assert slot is not None
            env[op.outs[0]] = slots[slot]
        elif is_table(op):
            env[op.outs[0]] = _table(op)
    with builder.function(name, [*params, *slots.values()]):
        for step in lowered.steps:
            _emit_call(builder, step, env, slots)
        results = [env[v] for v in sig.results]
        builder.emit_func_output(relax.Tuple(results))


def _emit_call(builder: Any, step: Step, env: dict[Value, Any], slots: Mapping[Slot, Any]) -> None:
    kernel = step.kernel
    function = builder.add_func(kernel.function, step.name)
    args = [env[v] for v in kernel.ins] + [slots[s] for s in kernel.slots]
    types = [relax_type(v.type) for v in kernel.outs]
    if kernel.slots:
        in_place = list(range(len(kernel.ins), len(args)))
        slot_types = [args[i].ty for i in in_place]
        call = relax.op.call_tir_inplace(function, args, in_place + [-1] * len(types), slot_types + types)
    else:
        call = relax.op.call_tir(function, args, types if len(types) > 1 else types[0])
    result = builder.emit(call)
    count = len(kernel.slots) + len(kernel.outs)
    for i, v in enumerate(kernel.outs):
        env[v] = result if count == 1 else builder.emit(relax.TupleGetItem(result, len(kernel.slots) + i))


def _slot_types(graph: Graph) -> dict[Slot, TensorType]:
    types: dict[Slot, TensorType] = {}
    for op in graph.ops:
        slot = slot_of(op)
        if slot is not None:
            types[slot] = (op.outs or op.ins)[0].type
    return types


def lower_graphs(graphs: Iterable[Graph], machine: Machine) -> tuple[Any, tuple[Lowered, ...]]:
    """One IRModule for some graphs, and their kernels. A graph `s0.F` becomes the function `s0_F`."""
    builder = relax.BlockBuilder()
    lowered = []
    for graph in graphs:
        plan = plan_kernels(graph, machine)
        emit_relax(builder, plan, function_name(graph.name))
        lowered.append(plan)
    module = builder.get()
    assert isinstance(module, tvm.IRModule)
    return module, tuple(lowered)
