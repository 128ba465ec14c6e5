"""The blocks of memory that one call of a compiled graph takes for its temporaries and results.

In: a graph, fused or not. Out: their sizes in bytes, and the order in which they come and go.

Values live from the kernel that makes them to the last one that reads them. The operand of a collective lives until it
is waited for: just before the first kernel that reads the result, or else at the end. Inside a kernel, and for
operations computed where they are read, nothing is stored. Kernels run in the order the back end runs them in: as early
as the last of their operations allows. Variables and inputs have memory elsewhere, and each result has a block of its
own. A block of temporaries is used again for a later value of the same element type: the smallest free one that is
large enough and at most FAR times too large, else the largest smaller one, which grows. That is what TVM's planner does
(StaticPlanBlockMemory). A block is given back behind the last kernel that reads a value in it, and a result of the same
call may have it then. But what comes from a kernel with several outputs stays until the call ends: TVM lets go of
values, not of the tuple that they are in. Known limit: copies that the back end makes of variables, which a graph
changes before it last needs what it read, are not counted.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.ir.graph import Graph, Op, Value
from penstock.ir.memo import Derived
from penstock.ir.ops import EXCHANGES

FAR = 16
# How names of kernels begin that are computed where they are read.
INLINE = "inline"


def is_inline(op: Op) -> bool:
    """Return whether the result of an operation is computed where it is read, and never stored."""
    return str(op.attrs.get("kernel", "")).startswith(INLINE)


def is_table(op: Op) -> bool:
    """Say whether an operation is a constant that needs memory: a list of values."""
    return op.kind == "const" and isinstance(op.attrs["value"], tuple)


def exchanged_values(graph: Graph) -> set[Value]:
    """Return the operands of collectives: they lie in memory, whatever makes them."""
    return {v for op in graph.ops if op.kind in EXCHANGES for v in op.ins}


class KernelRun(NamedTuple):
    """A kernel at its place in the order in which kernels run, and what it loads from memory, by name."""

    ops: Sequence[Op]
    reads: Mapping[str, None]


def kernels_in_order(graph: Graph) -> list[KernelRun]:
    """Return the kernels of a graph in the order in which they run."""
    kernels, makers = _kernels(graph)
    reads = [_reads(kernel, makers) for kernel in kernels]
    return [KernelRun(kernels[k], reads[k]) for k in _order(graph, kernels, reads)]


class Change(NamedTuple):
    """A block that a call takes, or gives back (bytes below 0): a result by its name, or one of temporaries."""

    bytes: int
    result: str


@dataclass(slots=True, eq=False)
class _PlannedBlock:
    """A block, and the kernels that take it and give it back, by their places in order. It `stays` until the call ends
    where a tuple has it."""

    bytes: int
    taken: int
    given: int = 0
    stays: bool = False


class _PlannedCall(NamedTuple):
    blocks: list[int]
    changes: tuple[Change, ...]


_CALL = Derived[_PlannedCall](__name__, "call")


def planned_blocks(graph: Graph) -> list[int]:
    """Return the bytes of every block of temporaries. Values go by their names, which are single in a graph. A graph is
    planned once for the verifier, the plan and reports."""
    return list(graph.keep(_CALL, _planned).blocks)


def planned_changes(graph: Graph) -> tuple[Change, ...]:
    """Return how blocks come and go during a call. Results stay, and only those that kernels make are among them."""
    return graph.keep(_CALL, _planned).changes


def _planned(graph: Graph) -> _PlannedCall:
    kernels, makers = _kernels(graph)
    buffers = {v.name for op in graph.ops if op.kind in ("read", "take", "put") for v in op.outs}
    results = {v.name for v in graph.results} - buffers
    outside = {v.name for v in graph.ins} | results | buffers
    reads = [_reads(kernel, makers) for kernel in kernels]
    order = _order(graph, kernels, reads)
    waits = _waits(kernels, order, reads)
    last = {name: i for i, k in enumerate(order) for name in (*waits[i], *reads[k])}
    last |= dict.fromkeys(waits[-1], len(order))
    free: dict[str, list[_PlannedBlock]] = {}
    home: dict[str, tuple[_PlannedBlock, str]] = {}
    blocks: list[_PlannedBlock] = []
    changes: list[list[Change]] = [[] for _ in range(len(order) + 1)]

    def release(names: Iterable[str], at: int, behind: int) -> None:
        for name in names:
            if name in home and last[name] == at:
                block, dtype = home.pop(name)
                block.given = len(order) if block.stays else behind
                spare = free[dtype]
                spare.insert(bisect_left(spare, block.bytes, key=lambda b: b.bytes), block)

    for i, k in enumerate(order):
        release((name for name in waits[i] if name not in reads[k]), i, i - 1)
        stored = [
            value
            for op in kernels[k]
            for value in op.outs
            if value.name in results or (value.name not in outside and last.get(value.name, -1) > i)
        ]
        in_tuple = len(stored) + _changed_variables(kernels[k]) > 1
        for value in stored:
            dtype, size = value.type.dtype, value.type.nbytes
            if value.name in results:
                changes[i].append(Change(size, value.name))
                continue
            block = _reused(free.setdefault(dtype, []), size) or _added(blocks, size, i)
            block.given, block.stays = len(order), block.stays or in_tuple
            home[value.name] = block, dtype
        release(reads[k], i, i)
    for block in blocks:
        changes[block.taken].append(Change(block.bytes, ""))
    for block in blocks:
        changes[block.given].append(Change(-block.bytes, ""))
    listed = tuple(change for place in changes for change in place if change.bytes)
    return _PlannedCall([block.bytes for block in blocks], listed)


def _changed_variables(kernel: Sequence[Op]) -> int:
    return len({op.attrs["var"] for op in kernel if "var" in op.attrs and op.kind != "read"})


def _added(blocks: list[_PlannedBlock], size: int, at: int) -> _PlannedBlock:
    blocks.append(_PlannedBlock(size, at))
    return blocks[-1]


def _reused(spare: list[_PlannedBlock], size: int) -> _PlannedBlock | None:
    at = bisect_left(spare, size, key=lambda b: b.bytes)
    if at < len(spare) and spare[at].bytes <= size * FAR:
        return spare.pop(at)
    if at and spare[at - 1].bytes >= size // FAR:
        block = spare.pop(at - 1)
        block.bytes = size
        return block
    return None


def _kernels(graph: Graph) -> tuple[list[list[Op]], dict[str, Op]]:
    """Return the operations by kernel, and the makers of values that are computed where they are read."""
    results = {v.name for v in (*graph.results, *exchanged_values(graph))}
    inline: dict[str, Op] = {}
    members: dict[object, list[Op]] = {}
    for i, op in enumerate(graph.ops):
        if op.kind == "read":
            continue
        kernel = op.attrs.get("kernel")
        scalar = op.kind == "const" and not is_table(op)
        apart = scalar or op.kind == "iota" or is_inline(op)
        if apart and op.outs and op.outs[0].name not in results:
            inline[op.outs[0].name] = op
        elif op.kind != "const":
            members.setdefault(kernel if kernel is not None else i, []).append(op)
    return list(members.values()), inline


def _reads(kernel: Sequence[Op], inline: dict[str, Op]) -> dict[str, None]:
    """List what a kernel loads from memory, looking through what is computed where it is read."""
    inner = {v.name for op in kernel for v in op.outs}
    loaded: dict[str, None] = {}
    seen: set[str] = set()
    waiting = [v.name for op in kernel for v in op.ins]
    while waiting:
        name = waiting.pop()
        if name in seen or name in inner:
            continue
        seen.add(name)
        if name in inline:
            waiting += [v.name for v in inline[name].ins]
        else:
            loaded[name] = None
    return loaded


def _waits(
    kernels: Sequence[Sequence[Op]], order: Sequence[int], reads: Sequence[Mapping[str, None]]
) -> list[list[str]]:
    """Return the operands of the collectives that are waited for before each kernel in order, and last those that are
    at the end."""
    waiting = {k[0].outs[0].name: k[0].ins[0].name for k in kernels if k[0].kind in EXCHANGES}
    before = [[waiting.pop(name) for name in reads[k] if name in waiting] for k in order]
    return [*before, [*waiting.values()]]


def _order(graph: Graph, kernels: Sequence[Sequence[Op]], reads: Sequence[Mapping[str, None]]) -> list[int]:
    """Return the kernels in the order they run."""
    position = {id(op): i for i, op in enumerate(graph.ops)}
    maker = {v.name: k for k, kernel in enumerate(kernels) for op in kernel for v in op.outs}
    needs = [{maker[name] for name in read if name in maker} - {k} for k, read in enumerate(reads)]
    users: list[list[int]] = [[] for _ in kernels]
    for k, sources in enumerate(needs):
        for source in sources:
            users[source].append(k)
    return list(_ready(needs, users, [(position[id(kernel[-1])], position[id(kernel[0])]) for kernel in kernels]))


def _ready(needs: Sequence[set[int]], users: Sequence[Sequence[int]], keys: Sequence[tuple[int, int]]) -> Iterator[int]:
    waiting = [len(sources) for sources in needs]
    ready = [(keys[k], k) for k, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    while ready:
        _, k = heapq.heappop(ready)
        yield k
        for user in users[k]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (keys[user], user))
