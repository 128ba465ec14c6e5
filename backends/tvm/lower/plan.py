"""The plan of a graph: its kernels in the order they run.

In: stage graphs with `kernel` annotations, and `make`, which gives the kernels of groups. Operations with the same
annotation become one kernel; those without one get a kernel of their own. `inline` means that a layout operation is
computed where it is read. Out: for each graph its kernels in order.

Variables are parameters. `read` is the parameter itself. `accum` and `write` update it in place from inside the kernel
that makes the value. `take` reads it and leaves zeros behind, in the same kernel where it can. Because an in-place
update destroys the old value:
  * kernels that read a variable run before the kernel that writes it (edges added to the order of kernels);
  * a value that is read from a variable and needed later than the write, or handed back as a result, is copied first.

A group that `make` refuses is split into one kernel per operation: slower, never wrong. `make` gets all groups of all
graphs in one call, so that it can share the work out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.backends.tvm.group import EFFECTS, IN_PLACE, Fusion, GeneratedKernel, NotOneKernel
from penstock.ir.graph import Graph, Op, Value, substitute
from penstock.ir.liveness import drop_dead
from penstock.ir.memory.workspace import exchanged_values, is_inline, is_table
from penstock.ir.ops import OPS
from penstock.support.errors import UnsupportedModel
from penstock.support.words import itemised

# Operations that are never worth memory: computed where they are read, annotated or not.
ALWAYS_INLINE = ("const", "iota")

# Loops of kernels count the elements of what they read and store in 32 bits.
MOST_ELEMENTS = 2**31 - 1

# A maker of kernels: gives each with its name, or the reason that there is none.
Make = Callable[[Sequence[Fusion]], Sequence["tuple[str, GeneratedKernel] | NotOneKernel"]]


@dataclass(frozen=True)
class KernelCallStep:
    """One call of the lowered graph."""

    group: Fusion
    kernel: GeneratedKernel
    name: str


@dataclass(frozen=True)
class Lowered:
    """A graph as calls of kernels, in order."""

    graph: Graph
    steps: tuple[KernelCallStep, ...]


# ---------------------------------------------------------------------------------------- state


def _snapshot_reads(graph: Graph) -> Graph:
    """Copy values of variables that may change before the last use of the value, and those that are results. So are
    constants that kernels read from memory: a caller may write into a result."""
    changes: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        if op.kind in EFFECTS:
            changes.setdefault(op.var, []).append(i)
    results = set(graph.results)
    last_use = _last_uses(graph)
    table: dict[Value, Value] = {}
    ops: list[Op] = []
    for i, op in enumerate(graph.ops):
        op = replace_ins(op, table)
        ops.append(op)
        if is_table(op):
            copied = op.outs[0] in graph.outs
        elif op.kind in ("read", "take"):
            changed = next((j for j in changes.get(op.var, ()) if j > i), None)
            late = changed is not None and last_use.get(op.outs[0], i) > changed
            copied = op.outs[0] in results or late
        else:
            continue
        if copied:
            value = op.outs[0]
            copy = Value(f"{value.name}.copy", value.type)
            ops.append(Op("reshape", (value,), (copy,), {"shape": value.type.shape}, op.loc))
            table[value] = copy
    if not table:
        return graph
    outs = substitute(graph.outs, table)
    saved = substitute(graph.saved, table)
    return Graph(graph.name, graph.ins, outs, tuple(ops), saved)


def _last_uses(graph: Graph) -> dict[Value, int]:
    """Return the position of the last operation that needs a value, be it through operations that are computed where
    they are read."""
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
    return op.with_ins(substitute(op.ins, table))


# ---------------------------------------------------------------------------------------- groups


def _groups(graph: Graph) -> list[Fusion]:
    """Group operations by annotation, each group with the values that it has to store."""
    # Ranks exchange what lies in memory.
    results = {*graph.results, *exchanged_values(graph)}
    homes = {op.outs[0]: op.var for op in graph.ops if op.kind in ("read", "take")}
    inline = {
        op.outs[0]: op
        for op in graph.ops
        if (is_inline(op) or op.kind in ALWAYS_INLINE) and not is_table(op) and op.outs[0] not in results
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
        stored = []
        for op in ops:
            if op.kind in IN_PLACE:
                continue
            for v in op.outs:
                outside = any(id(user) not in inside for user in users.get(v, ()))
                if v in results or outside:
                    stored.append(v)
        groups.append(Fusion(tuple(ops), tuple(stored), inline, homes))
    return groups


def _users(graph: Graph, inline: Mapping[Value, Op]) -> dict[Value, list[Op]]:
    """Return the readers of every value, looking through operations that are computed where they are read."""
    users: dict[Value, list[Op]] = {}
    for op in reversed(graph.ops):
        if op.outs and op.outs[0] in inline:
            readers = list({id(o): o for v in op.outs for o in users.get(v, ())}.values())
        else:
            readers = [op]
        for v in op.ins:
            users.setdefault(v, []).extend(readers)
    return users


def _reads_of(group: Fusion) -> list[Value]:
    """Return all values a group reads from memory or from other groups."""
    computed = {v for op in group.ops for v in op.outs}
    reads: dict[Value, None] = {}
    stack = [v for op in reversed(group.ops) for v in reversed(op.ins)]
    seen: set[Value] = set()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in computed:
            continue
        if v in group.inline:
            stack.extend(reversed(group.inline[v].ins))
        else:
            reads[v] = None
    return list(reads)


def _split(group: Fusion, graph_users: Mapping[Value, Sequence[Op]], results: set[Value]) -> list[Fusion]:
    """Split a group into one per operation."""
    parts = []
    for op in group.ops:
        outs = tuple(v for v in op.outs if op.kind not in IN_PLACE and (v in results or graph_users.get(v)))
        parts.append(Fusion((op,), outs, group.inline, group.homes))
    return parts


def _parted(group: Fusion, users: Mapping[Value, Sequence[Op]], results: set[Value]) -> list[Fusion]:
    """Split a group into one per operation with loops of its own, each with the operations that follow it. Those in
    front of all of them are another group."""
    label: dict[Value, int] = {}
    members: dict[int, list[Op]] = {}
    for op in group.ops:
        number = len(label) + 1 if _has_loops(op) else max((label.get(v, 0) for v in op.ins), default=0)
        label |= dict.fromkeys(op.outs, number)
        members.setdefault(number, []).append(op)
    if len(members) < 2:
        return _split(group, users, results)
    parts = []
    for ops in members.values():
        inside = set(map(id, ops))
        values = [v for op in ops if op.kind not in IN_PLACE for v in op.outs]
        outs = tuple(v for v in values if v in results or any(id(user) not in inside for user in users.get(v, ())))
        parts.append(Fusion(tuple(ops), outs, group.inline, group.homes))
    return parts


def _has_loops(op: Op) -> bool:
    return OPS[op.kind].family not in ("elementwise", "optimizer", "state", "layout", "source")


def plan_graphs(graphs: Sequence[Graph], make: Make) -> tuple[Lowered, ...]:
    """Return the kernels of every graph in the order they run. A grouping that leaves no order is given up: then every
    operation has its own kernel."""
    ready = [_snapshot_reads(drop_dead(graph)) for graph in graphs]
    kernels = _make_kernels(ready, make)
    orders: list[list[KernelCallStep]] = [[] for _ in ready]
    without: list[int] = []
    for i, graph in enumerate(ready):
        try:
            orders[i] = _ordered(graph, kernels[i])
        except NotOneKernel:
            without.append(i)
            ready[i] = replace(
                graph, ops=tuple(op if is_inline(op) else op.with_attrs(kernel=None) for op in graph.ops)
            )
    for i, steps in zip(without, _make_kernels([ready[i] for i in without], make), strict=True):
        orders[i] = _ordered(ready[i], steps)
    return tuple(Lowered(graph, tuple(steps)) for graph, steps in zip(ready, orders, strict=True))


def _make_kernels(graphs: Sequence[Graph], make: Make) -> list[list[KernelCallStep]]:
    """Return the kernels of every graph in no order. Refused groups are parted by loops; refused parts are split into
    single operations."""
    waiting = [(i, group) for i, graph in enumerate(graphs) for group in _groups(graph)]
    users = [
        _users(graph, next((group.inline for k, group in waiting if k == i), {})) for i, graph in enumerate(graphs)
    ]
    steps: list[list[KernelCallStep]] = [[] for _ in graphs]
    for cut in (_parted, _split, None):
        _check_sizes([group for _, group in waiting])
        refused: list[tuple[int, Fusion]] = []
        for (i, group), outcome in zip(waiting, make([group for _, group in waiting]), strict=True):
            if isinstance(outcome, NotOneKernel) and cut is not None:
                stored = {*graphs[i].results, *exchanged_values(graphs[i])}
                refused += [(i, part) for part in cut(group, users[i], stored)]
            else:
                steps[i].append(_step_alone(group, outcome))
        waiting = refused
    return steps


def _check_sizes(groups: Sequence[Fusion]) -> None:
    """Refuse tensors that kernels cannot go through. What stays inside of a kernel has no memory, and may be larger."""
    stored = {value: None for group in groups for value in (*_reads_of(group), *group.outs)}
    large = [f"{value.name} : {value.type}" for value in stored if value.type.size > MOST_ELEMENTS]
    if large:
        raise UnsupportedModel(
            f"tensors of more than {MOST_ELEMENTS} elements:{itemised(large)}",
            hint="smaller microbatches make smaller tensors; `--backend numpy` has no such limit",
        )


def _step_alone(group: Fusion, outcome: tuple[str, GeneratedKernel] | NotOneKernel) -> KernelCallStep:
    if isinstance(outcome, NotOneKernel):
        op = group.ops[0]
        types = [", ".join(str(v.type) for v in values) for values in (op.ins, op.outs)]
        what = (
            f"there is no kernel for {op.kind} of {types[0] or 'nothing'} that gives {types[1] or 'nothing'}: {outcome}"
        )
        hint = f"`penstock ops {op.kind}` shows what there is for it; `--backend numpy` needs no kernels"
        raise UnsupportedModel(what, where=op.loc, hint=hint)
    name, kernel = outcome
    return KernelCallStep(group, kernel, name)


# ---------------------------------------------------------------------------------------- order


def _ordered(graph: Graph, kernels: Sequence[KernelCallStep]) -> list[KernelCallStep]:
    """Return an order in which values are made before they are read and effects on a variable stay in the graph's
    order."""
    position = {id(op): i for i, op in enumerate(graph.ops)}
    groups = [step.group for step in kernels]
    maker = {v: k for k, group in enumerate(groups) for op in group.ops if op.kind != "take" for v in op.outs}
    last_use = _last_uses(graph)
    after: list[set[int]] = [set() for _ in kernels]
    touches: dict[str, list[tuple[int, int, bool]]] = {}
    for k, group in enumerate(groups):
        for op in group.ops:
            if op.kind == "take":
                # Zeros are left behind when all readers have the value.
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
    first_op = [min(position[id(op)] for op in group.ops) for group in groups]
    last_op = [max(position[id(op)] for op in group.ops) for group in groups]
    waiting = [len(a) for a in after]
    before: list[list[int]] = [[] for _ in kernels]
    for k, needed in enumerate(after):
        for e in needed:
            before[e].append(k)
    ready = [(last_op[k], first_op[k], k) for k, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    order: list[KernelCallStep] = []
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
