"""The memory that a rank keeps for its collectives: copies of what it sends, over sockets of what it gets, and gloo's.

In: a module in local form, a rank. Out: bytes.

Ranks of one host read each other's blocks where they lie (runtime/transport/shared_board.py), so a rank has those that
it sends. Over gloo it has those that it gets, too (runtime/transport/gloo_blocks.py). A block is used again for blocks
of exactly its size, once all members have read it. A block is under way from the kernel that begins its collective to
the one that reads the result. For each group and size, a rank keeps the most blocks that are under way at once in a
graph. It keeps one more, as it may be ahead of the others. Gradients of which ranks keep parts of the sum lie where
others can read them; over gloo they are copied. NCCL's own buffers are not counted.

Gradients that ranks sum up as a whole go through gloo's own ring (gloo/allreduce.cc), also within a host. It cuts an
array into segments of 1 MiB at most, and takes memory for two. It sums up on two threads, and each keeps the memory of
the largest sum. Small arrays have two segments for each rank, so with many ranks they take less than is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from penstock.ir.collective_calls import (
    CollectiveCall,
    JointSum,
    calls_of,
    goes_by_parts,
    group_of,
    kept_sums,
    sent_bytes,
)
from penstock.ir.graph import Graph, Module, graph_stage, summed_vars
from penstock.ir.ops import EXCHANGES

from .workspace import kernels_in_order

# Blocks for several members begin at multiples of so many bytes.
_ALIGNMENT = 64
# The most bytes that gloo keeps for its ring: two threads with two segments of 1 MiB.
RING = 2 * 2 * (1 << 20)


def exchange_bytes(module: Module, rank: int, stages: Collection[int]) -> int:
    """Return the bytes of the blocks that a rank keeps for the collectives of its stages, which take turns in them."""
    if _is_gpu(module, rank):
        return 0
    most: Counter[tuple[tuple[int, ...], int]] = Counter()
    for name, graph in module.graphs.items():
        if graph_stage(name) in stages:
            for at_once in _under_way(graph):
                most |= Counter(key for call in at_once for key in _blocks(module, rank, call))
    summed = [key for stage in stages for call in kept_sums(module, stage) for key in _blocks(module, rank, call)]
    return sum(size * (count + 1) for (_, size), count in most.items()) + sum(size for _, size in summed)


def ring_bytes(module: Module, rank: int, stages: Collection[int]) -> int:
    """Return the bytes that gloo keeps on a rank to sum up whole gradients of its stages."""
    assert module.schedule is not None
    if _is_gpu(module, rank) or len(module.schedule.replicas()[rank]) == 1:
        return 0
    arrays = Counter[tuple[int, str, int]]()
    for stage in stages:
        kept = {name for call in kept_sums(module, stage) for name in call.types}
        for name in (name for name in summed_vars(module, stage) if name not in kept):
            var = module.vars[name]
            nbytes = module.local_type(var.type, stage).nbytes
            arrays[stage, var.type.dtype, var.versions] += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return min(RING, max(arrays.values(), default=0))


def _under_way(graph: Graph) -> Iterator[list[CollectiveCall]]:
    """Yield the collectives under way whenever another one has begun."""
    begun = {call.op.outs[0].name: call for call in calls_of(graph)}
    under_way: dict[str, CollectiveCall] = {}
    for kernel in kernels_in_order(graph) if begun else ():
        for name in kernel.reads:
            under_way.pop(name, None)
        if kernel.ops[0].kind in EXCHANGES:
            name = kernel.ops[0].outs[0].name
            under_way[name] = begun[name]
            yield list(under_way.values())


def _blocks(module: Module, rank: int, call: CollectiveCall) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the blocks of a collective: their group, and their bytes."""
    ranks = group_of(module, rank, call.over)
    members = len(ranks)
    if members == 1:
        return
    near = _share_a_host(module, ranks)
    if isinstance(call, JointSum):
        # Near ranks read gradients where they lie. Elements of a block are those of all parts of a member.
        size = 0 if near else call.sent(members) // (members - 1)
        rounds = [(size, False)] if size else []
    else:
        rounds = _rounds(call, members)
    for size, alike in rounds:
        if near:
            yield ranks, size if alike else (members - 1) * (-(-size // _ALIGNMENT) * _ALIGNMENT)
            continue
        # One that is sent to all or one to each, and one of each of the others.
        yield from [(ranks, size)] * ((1 if alike else members - 1) + members - 1)


def _rounds(call: CollectiveCall, members: int) -> list[tuple[int, bool]]:
    """Return for each round the bytes of one block, and whether all members get the same one."""
    op, sent, peers = call.op, sent_bytes(call.op, members), members - 1
    if goes_by_parts(op, members):
        part = sent // 2 // peers
        return [(part, False), (part, True)]
    if op.kind == "shift":
        return [(sent, True)] if sent else []
    return [(sent // peers, op.kind not in ("reduce_scatter", "all_to_all"))]


def _share_a_host(module: Module, ranks: Sequence[int]) -> bool:
    devices, cluster = module.rank_devices(), module.cluster
    return cluster is None or len({cluster.device(devices[rank]).host for rank in ranks}) == 1


def _is_gpu(module: Module, rank: int) -> bool:
    cluster = module.cluster
    return cluster is not None and cluster.device(module.rank_devices()[rank]).kind == "cuda"
