"""Tensors of a rank's device: made, filled, read as arrays, and memory of them that is used again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from penstock.ir.types import LONG_NAMES, TensorType, numpy_dtype

TORCH_DTYPES: dict[str, torch.dtype] = {ours: getattr(torch, name) for ours, name in LONG_NAMES.items()}
ALIGNMENT = 64
CPU = torch.device("cpu")


def allocate(type: TensorType, device: torch.device = CPU) -> torch.Tensor:
    """Return an uninitialised tensor, aligned for vector loads."""
    tensor = torch.empty(type.dims, dtype=TORCH_DTYPES[type.dtype], device=device)
    assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0, "the allocator does not align to 64 bytes"
    return tensor


@dataclass(slots=True)
class _MemoryBlock:
    """A block of memory and its user, an array of it. That is alive as long as any tensor has its memory, whichever
    tensor was made from which."""

    memory: np.ndarray
    user: Callable[[], np.ndarray | None] = lambda: None


class Recycled:
    """Tensors whose memory is used again, by size, once no tensor holds it. Freed and allocated anew for each
    microbatch, aligned blocks leave holes in glibc's heap (a fifth of a worker's memory). Else the system maps and
    clears them every time. On GPUs torch does this itself. `memory` makes new blocks of so many bytes, if not the
    allocator. Tensors of several sizes take turns in blocks of one size, `room`. Several threads may ask for tensors:
    no other one sees a block between the look at its user and the mark of the new one."""

    def __init__(
        self, device: torch.device = CPU, pinned: bool = False, memory: Callable[[int], np.ndarray] | None = None
    ) -> None:
        self.device, self.pinned = device, pinned
        self._memory = memory or self._allocate
        self._blocks: dict[int, list[_MemoryBlock]] = {}
        self._lock = threading.Lock()
        self._lenders: dict[tuple[TensorType, int], Callable[[], torch.Tensor]] = {}

    def tensor(self, type: TensorType, room: int = 0) -> torch.Tensor:
        """Return an uninitialised tensor."""
        return self.lender(type, room)()

    def lender(self, type: TensorType, room: int = 0) -> Callable[[], torch.Tensor]:
        """Return a function that gives uninitialised tensors of a type, for callers that want many."""
        if (type, room) not in self._lenders:
            self._lenders[type, room] = self._make_lender(type, max(room, type.nbytes))
        return self._lenders[type, room]

    def _make_lender(self, type: TensorType, room: int) -> Callable[[], torch.Tensor]:
        if self.device != CPU or not type.nbytes:
            return lambda: allocate(type, self.device)
        blocks, brain = self._blocks.setdefault(room, []), type.dtype == "bf16"
        # NumPy and torch share no bfloat16.
        like = np.dtype(np.int16) if brain else numpy_dtype(type.dtype)
        # Blocks as arrays of the type, by their place in the list.
        arrays: dict[int, np.ndarray] = {}

        def lend() -> torch.Tensor:
            with self._lock:
                place = 0
                while place < len(blocks) and blocks[place].user() is not None:
                    place += 1
                if place == len(blocks):
                    blocks.append(_MemoryBlock(self._memory(room)))
                if place not in arrays:
                    arrays[place] = blocks[place].memory[: type.nbytes].view(like).reshape(type.dims)
                lent = arrays[place][...]
                blocks[place].user = weakref.ref(lent)
            return torch.from_numpy(lent).view(torch.bfloat16) if brain else torch.from_numpy(lent)

        return lend

    def _allocate(self, nbytes: int) -> np.ndarray:
        memory = allocate(TensorType("u8", (nbytes,)))
        return (memory.pin_memory() if self.pinned else memory).numpy()


def fill(tensor: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    """Copy an array of the same type into a tensor; bf16 goes through its bits, which torch does not share with
    NumPy."""
    if tensor.device != CPU:
        # The array may change once this returns, so the copy is not left to run on.
        tensor.copy_(fill(torch.empty(tensor.shape, dtype=tensor.dtype), array))
    elif tensor.dtype == torch.bfloat16:
        tensor.view(torch.int16).numpy()[...] = array.view(np.int16)
    else:
        tensor.numpy()[...] = array
    return tensor


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's memory as an array; a copy of it if it is on another device."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
