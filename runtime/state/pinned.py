"""Pinned memory of the host, which a GPU copies from and to by itself, and homes of items there.

In: memory that is there, or a number of bytes. Out: memory that CUDA has pinned, or a `HostHome` in such memory.

Torch's allocator of pinned memory rounds each block up to a power of two. So homes are memory of their own that is
registered with CUDA, to the page. All of it is taken when a run begins, and refused where the host has less that is
free.
"""

from __future__ import annotations

import weakref

import torch

from penstock.ir.cluster.spaces import Space
from penstock.support.errors import DoesNotFit
from penstock.support.hardware import free_memory
from penstock.support.words import shown_bytes

from .home_files import memory_for
from .homes import Moved, Parts, unheard


def pin(address: int, nbytes: int, device: torch.device, what: str, hint: str) -> None:
    """Pin memory, and say `what` it is and what helps where CUDA refuses."""
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    if code:
        raise DoesNotFit(f"CUDA pinned no {shown_bytes(nbytes)} {what}: error {code}", hint=hint)


def unpin(address: int, device: torch.device) -> None:
    """Let go of pinned memory."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class HostHome:
    """A home in pinned memory of the host. Reads and writes are copies in the current stream of the device. The host
    may read the contents once the device has done them."""

    def __init__(self, space: Space, nbytes: int, device: torch.device) -> None:
        hint, free = "a larger host, `ulimit -l`, or --offload none", free_memory()
        if free is not None and nbytes > free:
            what = f"no {shown_bytes(nbytes)} of memory space {space.name}, of this host {shown_bytes(free)} are free"
            raise DoesNotFit(what, hint=hint)
        try:
            memory = memory_for(nbytes)
        except OSError as error:
            what = f"no {shown_bytes(nbytes)} of memory space {space.name}: {error.strerror}"
            raise DoesNotFit(what, hint=hint) from error
        self._memory, address = memory[:nbytes], memory.data_ptr()
        pin(address, memory.numel(), device, f"of memory space {space.name}", hint)
        # At the end of the process the device may still copy, and the system takes all of it back.
        weakref.finalize(self, unpin, address, device).atexit = False

    def read(self, memory: torch.Tensor, moved: Moved = unheard) -> None:
        memory.copy_(self._memory, non_blocking=True)
        moved(memory.numel())

    def write(self, memory: torch.Tensor, moved: Moved = unheard) -> None:
        self._memory.copy_(memory, non_blocking=True)
        moved(memory.numel())

    def write_parts(self, parts: Parts, pieces: torch.Tensor, moved: Moved = unheard) -> None:
        """Write values that lie apart, each to its place: no `pieces` are needed."""
        for place, part in parts:
            self._memory[place : place + part.numel()].copy_(part, non_blocking=True)
        moved(self._memory.numel())

    def contents(self) -> torch.Tensor:
        return self._memory

    def copied(self) -> torch.Tensor:
        return self._memory.clone()
