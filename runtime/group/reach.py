"""The GPUs of a host that may write to each other's memory.

In: the device of every rank. Out: the channels whose sender's GPU writes into the memory of the receiver's
(transport/ipc_wire.py). That takes two GPUs of one host, or one GPU, and a driver that lets the one reach the other.

`PENSTOCK_IPC=0`, on one of the two ranks, leaves it out: NCCL carries the messages then, and between two ranks of one
GPU memory of the host does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from penstock.support.errors import UsageError

from .neighbours import identity


class GpuReach(NamedTuple):
    """The GPU of a rank, its host, and the GPUs that it can write to, by UUID; nothing for a rank without."""

    host: str = ""
    gpu: str = ""
    reached: tuple[str, ...] = ()

    def text(self) -> str:
        """Return it as text, for other ranks."""
        return json.dumps(self)

    def writes_to(self, other: GpuReach) -> bool:
        """Return whether this GPU can write to the memory of another rank's."""
        return bool(self.host) and self.host == other.host and other.gpu in self.reached


def reach_of(device: torch.device, environment: Mapping[str, str] = os.environ) -> GpuReach:
    """Return what the GPU of this rank can write to."""
    wanted = environment.get("PENSTOCK_IPC", "1")
    if wanted not in ("0", "1"):
        raise UsageError(f"PENSTOCK_IPC must be 0 or 1, got {wanted!r}")
    if device.type != "cuda" or wanted == "0" or not torch.cuda.is_available():
        return GpuReach()
    reached = [
        index
        for index in range(torch.cuda.device_count())
        if index == device.index or torch.cuda.can_device_access_peer(device, index)
    ]
    return GpuReach(identity(environment), _uuid_of(device.index), tuple(map(_uuid_of, reached)))


def reach_from(text: str) -> GpuReach:
    """Return what another rank said."""
    host, gpu, reached = json.loads(text)
    return GpuReach(host, gpu, tuple(reached))


def _uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
