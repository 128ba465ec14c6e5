"""The loader: opens the library of a compiled stage and calls it with torch tensors.

In: the library of a stage, and the runtime that its bundle carries, if any. Out: a StageProgram. Torch tensors go to
TVM's virtual machine as they are and come back as torch tensors, without copies. The interpreter lock is released
during a call.

Kernels for CPUs trust their tensors. The loader checks devices, memory and strides. An input that is not contiguous is
copied; a slot, which is updated in place, is refused. A graph's function in the machine checks types and shapes of its
inputs before it does anything, and the loader those of its slots, which are mostly bound once. On a GPU each kernel
checks its operands. Code for a CPU takes tensors at any address. Code for a GPU (cuda/load.py) moves aligned vectors,
so that addresses are checked, too.

Limits: one caller at a time per program. The number of threads is a property of the process: TVM reads it once, before
the first parallel loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.backends.interface import Exchange, Temporary
from penstock.backends.tvm.symbols import function_name, has_packed, pack_name
from penstock.backends.tvm.tile_permission import allow_tiles
from penstock.ir.graph import Graph, Signature, Slot, signature, slot_types
from penstock.ir.types import LONG_NAMES, TensorType
from penstock.support.errors import UsageError, VerifyError

from .callers import call_from_lasting_thread
from .forms import GraphForms, PackedForms, forms_of
from .machine import VirtualMachine
from .meetings import Meetings
from .runtime_library import load_runtime
from .watch import watched

if TYPE_CHECKING:
    import torch

_THREADS: list[int] = []
_is_contiguous, _address = methodcaller("is_contiguous"), methodcaller("data_ptr")
# The errors of TVM for arguments of other types: the machine raises the first two, kernels for GPUs the third.
_MISTYPED = (ValueError, RuntimeError, TypeError)


def set_threads(threads: int) -> None:
    """Fix the number of threads of this process's TVM. It has to come before TVM is loaded, and cannot change
    afterwards."""
    if threads < 1:
        raise UsageError(f"{threads} threads", hint="give at least 1")
    if _THREADS and _THREADS[0] != threads:
        raise UsageError(
            f"this process runs its compiled code with {_THREADS[0]} threads, {threads} were asked for",
            hint="start a process for each number, as `penstock.open` does",
        )
    if not _THREADS:
        _THREADS.append(threads)
        os.environ["TVM_NUM_THREADS"] = str(threads)
        os.environ.setdefault("TVM_BIND_THREADS", "0")


def allows_threads(threads: int) -> bool:
    """Return whether `set_threads` would take this number."""
    return not _THREADS or _THREADS[0] == threads


class _Entry(NamedTuple):
    """A graph's function, and the facts that a call needs, prepared beforehand: a small kernel takes no longer than a
    few lines of Python."""

    function: Any
    arguments: int
    results: int
    signature: Signature
    types: tuple[TensorType, ...]
    # The dtype and the sizes of each slot.
    slots: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class TvmProgram:
    """The functions of one stage's library."""

    # Addresses of tensors are multiples of this.
    boundary = 1

    def __init__(
        self,
        library: Path,
        graphs: Sequence[Graph],
        threads: int = 1,
        device: torch.device | None = None,
        exchange: Exchange | None = None,
        carried: Sequence[Path] = (),
    ) -> None:
        import torch  # lazy: heavy

        self.device = device or torch.device("cpu")
        # Reading the kind is quicker than comparing devices, and there is one CPU.
        self._is_here: Callable[[torch.Tensor], bool] = (
            attrgetter("is_cpu") if self.device.type == "cpu" else lambda x: x.device == self.device
        )
        set_threads(threads)
        self._threads = threads
        # TVM reads the number of threads when it is loaded.
        load_runtime(carried)
        # The machine looks functions up when it opens a library.
        self._meetings = Meetings(graphs, exchange)
        self._machine = self._open(library)
        from tvm_ffi import from_dlpack, get_global_func  # lazy: heavy

        self._handed_over = from_dlpack
        self._entries = {g.name: self._entry(g) for g in graphs}
        self._taken = torch.utils.dlpack.from_dlpack
        packing = [g.name for g in graphs if has_packed(g)]
        self._forms = PackedForms(
            {name: self._forms_of(name) for name in packing},
            {name: self._sizes(name) for name in packing},
            lambda: self._description(packing[0]),
        )
        # Iterating over results in TVM's own array costs as much as a small kernel.
        self._item: Any = get_global_func("ffi.ArrayGetItem")

    def _forms_of(self, graph: str) -> GraphForms:
        name, text = function_name(graph), self._taken(self._description(graph))
        return forms_of(bytes(text.tolist()), lambda number: self._machine[pack_name(name, number)])

    def _description(self, graph: str) -> Any:
        """Return what the library says of the operands of a graph."""
        return self._machine[pack_name(function_name(graph))]()

    def _sizes(self, graph: str) -> list[int]:
        """Return the bytes of each slot of a graph."""
        entry = self._entries[graph]
        return [t.nbytes for t in entry.types[len(entry.signature.ins) :]]

    def _entry(self, graph: Graph) -> _Entry:
        sig, of_slots = signature(graph), slot_types(graph)
        types = (*(v.type for v in sig.ins), *(of_slots[slot] for slot in sig.slots))
        function = self._meetings.around(graph.name, self._machine[function_name(graph.name)])
        import torch  # lazy: heavy

        slots = tuple((getattr(torch, LONG_NAMES[t.dtype]), t.dims) for t in types[len(sig.ins) :])
        return _Entry(function, len(types), len(sig.results), sig, types, slots)

    def _open(self, library: Path) -> VirtualMachine:
        if not allow_tiles() and "+amx" in library.name:
            raise UsageError(
                "the stage was compiled for tile registers (AMX), "
                "which this machine does not have or does not give to this process",
                where=library.name,
                hint="compile the bundle on this machine, or with `--target skylake-avx512`",
            )
        return VirtualMachine(library)

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one graph; slots among the arguments are updated in place."""
        function, count, results, sig, *_ = self._entries[graph]
        if len(args) != count:
            raise VerifyError(
                f"takes {len(sig.ins)} inputs and {len(sig.slots)} slots, got {len(args)} tensors",
                where=f"graph {graph}",
            )
        self._look(graph, args)
        if self.boundary > 1 or not all(map(_is_contiguous, args)):
            args = self._fitting(graph, args)
        self._check_slots(graph, args[len(sig.ins) :])
        try:
            forms = self._forms.made(graph, args[len(sig.ins) :]) if graph in self._forms.graphs else ()
            returned = function(*args, *forms)
        except _MISTYPED:
            if (error := self._mistyped(graph, args)) is not None:
                raise error from None
            raise
        return self._results(returned, results, count)

    def _results(self, returned: Any, results: int, arguments: int) -> list[torch.Tensor]:
        if results == 1:
            # Results come as torch tensors if any argument was one.
            return [returned] if arguments else [self._taken(returned)]
        item = self._item
        parts = [item(returned, i) for i in range(results)]
        return parts if arguments else [self._taken(x) for x in parts]

    def watch(self, graph: str, args: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Temporary]]:
        """Run one graph, and give the memory that it took for itself."""
        return watched(self._machine, lambda: self.call(graph, args))

    def uncaptured(self) -> dict[str, str]:
        """Return nothing: no CPU launches graphs."""
        return {}

    def captured_bytes(self) -> int:
        """Return nothing: no CPU launches graphs."""
        return 0

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> frozenset[int]:
        """Pack the operands that the graph's kernels take packed; calls with the same tensors need not pack them again.
        Graphs that pack the same tensors alike share what is packed. Return the places of the slots that calls do not
        read as they are."""
        if graph not in self._forms.graphs:
            return frozenset()
        sig = self._entries[graph].signature
        ready = self._ready(graph, slots)
        try:
            return self._forms.hold(graph, ready)
        except _MISTYPED:
            if (error := self._mistyped(graph, ready, len(sig.ins))) is not None:
                raise error from None
            raise

    def unread(self, slots: Mapping[str, Sequence[str]]) -> set[str]:
        """Return the variables that calls of these graphs do not read once they are held, by the names of slots."""
        packing = {graph: names for graph, names in slots.items() if graph in self._forms.graphs}
        return self._forms.unread(packing) - {name for graph in slots.keys() - packing.keys() for name in slots[graph]}

    def hold_all(self, slots: Mapping[str, Sequence[str]], tensor: Callable[[str], torch.Tensor]) -> Iterator[str]:
        """Hold several graphs; yield each variable that they do not read any more as soon as that is so."""
        packing = {graph: names for graph, names in slots.items() if graph in self._forms.graphs}
        places = {name: (graph, i) for graph, names in packing.items() for i, name in enumerate(names)}

        def ready(name: str) -> torch.Tensor:
            graph, place = places[name]
            sig, x = self._entries[graph].signature, tensor(name)
            self._look(graph, [x], len(sig.ins) + place)
            return self._as_slot(sig.slots[place], x, graph)

        try:
            yield from self._forms.hold_all(packing, ready)
        except _MISTYPED:
            for graph, names in packing.items():
                arguments = [tensor(name) for name in names]
                if (error := self._mistyped(graph, arguments, len(self._entries[graph].signature.ins))) is not None:
                    raise error from None
            raise

    def stand_in(self, graph: str, place: int) -> torch.Tensor:
        """Return a tensor without memory for a slot that calls do not read, of a graph that is held."""
        entry = self._entries[graph]
        return self._forms.stand_in(entry.types[len(entry.signature.ins) + place])

    def bind(self, graph: str, slots: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Return a graph as a function of its inputs alone: the slots, often far more than inputs, are checked once."""
        function, count, results, sig, *_ = self._entries[graph]
        ready = self._ready(graph, slots)
        self._check_slots(graph, ready)
        forms = self._forms.held(graph, ready) if graph in self._forms.graphs else []
        # Handing a torch tensor over takes longer than a tensor of TVM's.
        held = [self._handed_over(x.detach()) for x in (*ready, *(forms or ()))] if self.boundary == 1 else []

        def call(ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            # A call looks at all, and says what does not fit.
            known = forms is not None and self.boundary == 1 and len(ins) == len(sig.ins)
            if not known or not (all(map(self._is_here, ins)) and all(map(_address, ins))):
                return self.call(graph, [*ins, *ready])
            if not all(map(_is_contiguous, ins)):
                ins = [x.contiguous() for x in ins]
            try:
                returned = function(*ins, *held)
            except _MISTYPED:
                if (error := self._mistyped(graph, [*ins, *ready])) is not None:
                    raise error from None
                raise
            return self._results(returned, results, count)

        # A stage of one thread starts no others.
        return call if self._threads == 1 else partial(call_from_lasting_thread, call)

    def bind_arrays(
        self, graph: str, slots: Sequence[torch.Tensor]
    ) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]] | None:
        """Return a graph as a function of arrays alone; None if it packs anew in each call, or if NumPy has not all of
        its types. Tensors of torch on the way are code and memory that are in no cache behind a model's kernels."""
        function, _, results, sig, *_ = self._entries[graph]
        dtypes = {value.type.dtype for value in (*sig.ins, *sig.results)}
        if self.boundary > 1 or self.device.type != "cpu" or "bf16" in dtypes or not sig.ins:
            return None
        ready = self._ready(graph, slots)
        self._check_slots(graph, ready)
        forms = self._forms.held(graph, ready) if graph in self._forms.graphs else []
        if forms is None:
            return None
        hand_over, item = self._handed_over, self._item
        held = [hand_over(x.detach()) for x in (*ready, *forms)]

        def call(ins: Sequence[np.ndarray]) -> list[np.ndarray]:
            returned = function(*map(hand_over, ins), *held)
            parts = [returned] if results == 1 else [item(returned, i) for i in range(results)]
            return [np.from_dlpack(part) for part in parts]

        return call if self._threads == 1 else partial(call_from_lasting_thread, call)

    def _ready(self, graph: str, slots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Check all slots of a graph."""
        sig = self._entries[graph].signature
        if len(slots) != len(sig.slots):
            raise VerifyError(f"has {len(sig.slots)} slots, got {len(slots)} tensors", where=f"graph {graph}")
        self._look(graph, slots, len(sig.ins))
        return [self._as_slot(slot, x, graph) for slot, x in zip(sig.slots, slots, strict=True)]

    def _check_slots(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
        """Check the types of all slots, which the machine does not, and kernels for CPUs neither."""
        entry = self._entries[graph]
        if self.boundary > 1 or all(
            x.dtype == kind and x.shape == dims for x, (kind, dims) in zip(slots, entry.slots, strict=True)
        ):
            return
        error = self._mistyped(graph, slots, len(entry.signature.ins))
        assert error is not None, "a slot has another type"
        raise error

    def _look(self, graph: str, args: Sequence[torch.Tensor], first: int = 0) -> None:
        """Check the places of tensors, which the machine does not. They are the arguments from `first` on."""
        if not all(map(self._is_here, args)):
            i, x = next((i, x) for i, x in enumerate(args, first) if not self._is_here(x))
            raise VerifyError(f"argument {i} is on {x.device}, the stage is on {self.device}", where=f"graph {graph}")
        if not all(map(_address, args)):
            # Tensors without elements need no memory.
            for i, x in enumerate(args, first):
                if x.numel() and not x.data_ptr():
                    raise VerifyError(
                        f"argument {i} has no memory", where=f"graph {graph}", hint="was its storage given back?"
                    )

    def _mistyped(self, graph: str, args: Sequence[torch.Tensor], first: int = 0) -> VerifyError | None:
        """Return the error for the first argument of another type than the graph's, if there is one."""
        for i, (x, t) in enumerate(zip(args, self._entries[graph].types[first:], strict=True), first):
            if (str(x.dtype), tuple(x.shape)) != (f"torch.{LONG_NAMES[t.dtype]}", t.dims):
                return VerifyError(f"argument {i} must be {t}, it is {x.dtype}{list(x.shape)}", where=f"graph {graph}")
        return None

    def _fits(self, x: torch.Tensor) -> bool:
        return x.is_contiguous() and (self.boundary == 1 or x.data_ptr() % self.boundary == 0)

    def _fitting(self, graph: str, args: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the arguments, with copies for inputs that do not fit."""
        if all(map(self._fits, args)):
            return args
        sig = self._entries[graph].signature
        inputs, slots = args[: len(sig.ins)], args[len(sig.ins) :]
        # A fresh tensor is contiguous and, from torch's allocator, aligned.
        copies = [x if self._fits(x) else x.new_empty(x.shape).copy_(x) for x in inputs]
        return [*copies, *(self._as_slot(slot, x, graph) for slot, x in zip(sig.slots, slots, strict=True))]

    def _as_slot(self, slot: Slot, x: torch.Tensor, graph: str) -> torch.Tensor:
        if self._fits(x):
            return x
        where = f" on a {self.boundary}-byte boundary" if self.boundary > 1 else ""
        raise VerifyError(
            f"the buffer of @{slot.var} is not contiguous{where}",
            where=f"graph {graph}",
            hint="align views in flat buffers",
        )
