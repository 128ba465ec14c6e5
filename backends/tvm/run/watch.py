"""Measurement of the memory that a call of a compiled graph takes. In: TVM's virtual machine, a call. Out: the results
of the call, and the blocks that it allocated, in order, each with the first and the last kernel that worked in it.

The machine reports every call that it makes, of its own allocations too, which costs Python time for each. So this is
for one call of a graph, as all calls of it allocate the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.backends.interface import Temporary

if TYPE_CHECKING:
    import torch

    from .machine import VirtualMachine

_ALLOCATE, _PLACE, _BUILTIN = "vm.builtin.alloc_storage", "vm.builtin.alloc_tensor", "vm."


class Watch:
    """An observer of the machine during a call."""

    def __init__(self) -> None:
        # Bytes and kernels by block, and the last block at an address: freed memory may be allocated again.
        self._sizes: list[int] = []
        self._users: list[list[str]] = []
        self._at: dict[int, int] = {}

    def __call__(self, function: Any, name: str, before: bool, result: Any, *args: Any) -> int:
        """Record a call, as `VirtualMachine.instrument` reports it; the result 0 lets the machine go on."""
        if name == _ALLOCATE and not before:
            self._sizes.append(int(args[1][0]))
        elif name == _PLACE and not before:
            if len(self._users) < len(self._sizes):
                self._at[result.data_ptr()] = len(self._users)
                self._users.append([])
        elif before and not name.startswith(_BUILTIN):
            for arg in args:
                place = arg.data_ptr() if hasattr(arg, "data_ptr") else None
                if place in self._at:
                    self._users[self._at[place]].append(name)
        return 0

    def blocks(self, results: Sequence[torch.Tensor]) -> list[Temporary]:
        """Return the blocks that the results do not lie in."""
        of_results = {self._at.get(result.untyped_storage().data_ptr()) for result in results}
        blocks = zip(self._sizes, self._users, strict=True)
        return [
            Temporary(size, users[0] if users else "", users[-1] if users else "")
            for i, (size, users) in enumerate(blocks)
            if i not in of_results
        ]


def watched(
    machine: VirtualMachine, call: Callable[[], list[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[Temporary]]:
    """Return the results of a call, and its temporaries."""
    watch = Watch()
    machine.instrument(watch)
    try:
        results = call()
    finally:
        machine.instrument(None)
    return results, watch.blocks(results)
