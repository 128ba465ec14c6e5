"""The buffers on a GPU that copies and messages go through.

In: a module with a cluster, a rank on a GPU, and the inputs that it is fed. Out: bytes.

Copies between the GPU and memory of the host take BUFFERS buffers for each size and direction, from BESIDE_BYTES on
(runtime/state/device_copies.py). GPUs of one host write into as many slots of the receiver, for every channel
(runtime/transport/ipc_wire.py). Messages between GPUs of different hosts take none: NCCL's own buffers are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.ir.cluster.cluster import IPC, NCCL
from penstock.ir.graph import Edge, Module, Value
from penstock.ir.messages import parcels
from penstock.ir.sharding.between_meshes import edge_values

BUFFERS = 2
# A copy of fewer bytes takes less time than the events of a stream of its own.
BESIDE_BYTES = 1 << 16
# Where messages begin in a slot.
BOUNDARY = 256


def passage_bytes(module: Module, rank: int, fed: Iterable[Value]) -> int:
    """Return the bytes of the buffers of a rank's GPU."""
    inwards, outwards, slots = {v.type.nbytes for v in fed}, set[int](), 0
    for stage in module.rank_packs()[rank]:
        for edge in module.edges:
            sizes = [parcel.nbytes for parcel in parcels(edge_values(module, edge, stage))]
            carriers = _carriers(module, rank, stage, edge)
            if stage == edge.dst:
                slots += carriers.count(IPC) * sum(-(-nbytes // BOUNDARY) * BOUNDARY for nbytes in sizes)
            if any(carrier not in (IPC, NCCL) for carrier in carriers):
                (inwards if stage == edge.dst else outwards).update(sizes)
    copied = sum(nbytes for sizes in (inwards, outwards) for nbytes in sizes if nbytes >= BESIDE_BYTES)
    return BUFFERS * (copied + slots)


def _carriers(module: Module, rank: int, stage: int, edge: Edge) -> list[str]:
    """Return what carries the messages of an edge between a stage of a rank and each other rank that runs the stage at
    its other end."""
    packs, devices, cluster = module.rank_packs(), module.rank_devices(), module.cluster
    far = edge.src if stage == edge.dst else edge.dst
    # What one stage of a rank hands to another is no message.
    if cluster is None or stage not in (edge.src, edge.dst) or far in packs[rank]:
        return []
    return [cluster.carrier(devices[rank], devices[peer]) for peer, pack in enumerate(packs) if far in pack]
