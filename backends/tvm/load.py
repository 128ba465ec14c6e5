"""Loading a compiled stage and calling it with torch tensors.

In: the library of a stage. Out: a StageProgram. Torch tensors go to TVM's virtual machine as they are and come back as torch tensors, without
copies. The interpreter lock is released during a call.

Compiled code moves aligned vectors and does not check: an argument that is not on a 64-byte boundary would end the process. Such an input
is copied; a slot, which is updated in place and must not be copied, is an error.

Limits: one caller at a time per program. The number of threads is a property of the process: TVM reads it once, before the first parallel loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.ir.errors import UsageError, VerifyError
from penstock.ir.graph import Graph, Signature, signature

from ..interface import ALIGNMENT
from .group import PACKED
from .tiles import allow_tiles

if TYPE_CHECKING:
    import torch

_THREADS: list[int] = []


def function_name(graph: str) -> str:
    """The name in the library of a graph's function: `s0.F` becomes `s0_F`."""
    return "".join(c if c.isalnum() else "_" for c in graph)


def pack_name(function: str) -> str:
    """The function that packs operands for this one."""
    return f"{function}_pack"


def has_packed(graph: Graph) -> bool:
    """Whether kernels of the graph may take operands packed; its library has a function for packing then."""
    return any(op.attrs.get(PACKED) for op in graph.ops)


def set_threads(threads: int) -> None:
    """Fix the number of threads of this process's TVM. It has to come before TVM is loaded, and cannot change afterwards."""
    if threads < 1:
        raise UsageError(f"{threads} threads", hint="give at least 1")
    if _THREADS and _THREADS[0] != threads:
        raise UsageError(
            f"this process runs its compiled code with {_THREADS[0]} threads, {threads} were asked for",
            hint="start one process per stage",
        )
    if not _THREADS:
        _THREADS.append(threads)
        os.environ["TVM_NUM_THREADS"] = str(threads)
        os.environ.setdefault("TVM_BIND_THREADS", "0")


class _Entry(NamedTuple):
    """A graph's function, and how to call it."""

    function: Any
    signature: Signature
    arguments: int
    results: int


class TvmProgram:
    """The functions of one stage's library."""

    def __init__(self, library: Path, graphs: Sequence[Graph], threads: int = 1, device: torch.device | None = None) -> None:
        import torch

        self.device = device or torch.device("cpu")
        set_threads(threads)
        self._machine: Any = self._open(library)
        # Only now: it loads TVM's runtime.
        from tvm_ffi import get_global_func

        self._entries = {g.name: self._entry(g) for g in graphs}
        self._packs = {g.name: self._machine[pack_name(function_name(g.name))] for g in graphs if has_packed(g)}
        self._tensor, self._taken = torch.Tensor, torch.utils.dlpack.from_dlpack
        # Iterating over results in TVM's own array costs as much as a small kernel.
        self._item: Any = get_global_func("ffi.ArrayGetItem")
        self._held: dict[str, tuple[list[int], list[torch.Tensor]]] = {}

    def _entry(self, graph: Graph) -> _Entry:
        sig = signature(graph)
        return _Entry(self._machine[function_name(graph.name)], sig, len(sig.ins) + len(sig.slots), len(sig.results))

    def _open(self, library: Path) -> Any:
        # Only now: TVM reads the number of threads when it is loaded.
        import tvm
        from tvm.runtime.vm import VirtualMachine

        if not allow_tiles() and "+amx" in library.name:
            raise UsageError(
                "the stage was compiled for tile registers (AMX), which this machine does not have or does not give to this process",
                where=library.name,
                hint="compile the bundle on this machine, or with `--target skylake-avx512`",
            )
        return VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one graph; slots among the arguments are updated in place."""
        function, sig, count, results = self._entries[graph]
        if len(args) != count:
            raise VerifyError(f"takes {len(sig.ins)} inputs and {len(sig.slots)} slots, got {len(args)} tensors", where=f"graph {graph}")
        for x in args:
            if x.data_ptr() % ALIGNMENT or not x.is_contiguous():
                args = [self._aligned(graph, sig, i, x) for i, x in enumerate(args)]
                break
        if graph in self._packs:
            args = [*args, *self._packed(graph, args[len(sig.ins) :])]
        found = function(*args)
        # Results come back as torch tensors if any argument was one.
        tensor, taken = self._tensor, self._taken
        if results == 1:
            return [found if isinstance(found, tensor) else taken(found)]
        item = self._item
        return [x if isinstance(x, tensor) else taken(x) for x in (item(found, i) for i in range(results))]

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
        """Pack now what the graph's kernels want packed; calls with the same tensors need not do it again."""
        if graph in self._packs:
            sig = self._entries[graph].signature
            ready = [self._aligned(graph, sig, len(sig.ins) + i, x) for i, x in enumerate(slots)]
            self._held[graph] = ([x.data_ptr() for x in ready], list(self._packs[graph](*ready)))

    def _packed(self, graph: str, slots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        where, packed = self._held.get(graph, (None, []))
        return packed if where == [x.data_ptr() for x in slots] else list(self._packs[graph](*slots))

    @staticmethod
    def _aligned(graph: str, sig: Signature, i: int, x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() % ALIGNMENT == 0 and x.is_contiguous():
            return x
        if i < len(sig.ins):
            # A fresh tensor is contiguous and, from torch's allocator, aligned.
            return x.new_empty(x.shape).copy_(x)
        slot = sig.slots[i - len(sig.ins)]
        raise VerifyError(
            f"the buffer of @{slot.var} is not contiguous on a {ALIGNMENT}-byte boundary",
            where=f"graph {graph}",
            hint="align views in flat buffers",
        )
