"""Calls of graphs that were captured: one launch of a CUDA graph in place of a launch for each kernel.

In: a call of a stage's graph, with its tensors. Out: its results. What a captured call touches lies where it lay when
it was captured:

    variables   by their addresses: every weight version and every copy of gradients has captured calls of its own
    inputs      what another graph of the stage made lies in the results of a captured call, and is read there. All
                other inputs are copied into memory of the captured call, in one step each
    results     memory of the captured call. While any tensor of an earlier launch lies in them, a call takes another
                captured one, so there are as many as microbatches are in flight. Small results that no graph of the
                stage takes are handed on as copies: a batch's losses are kept to its end
    temporaries kept for the captured call, so that no other call gets them

Calls are captured where `PENSTOCK_CUDA_GRAPHS=1` asks for it: no capture has met a GPU. A call is captured once it
comes with addresses that came before. The stage has to update its weights before, so that all of its graphs have the
memory they need. A stage that does not update weights itself has many calls before. Nothing is executed by a capture:
where it fails, the call is made as it was before, and nothing more is captured. Where an interrupt ends it, that goes
on, and calls may be captured behind it. Calls that are not captured say why (`reasons`).

The plan of the stage says how many bytes all captured calls may keep (ir/memory/captured.py), and no call is captured
that would take more. What a library takes during a capture is counted behind it.

Limits: a graph with collectives is never captured, as ranks wait for each other in it. The temporaries of several
captured calls share no memory. Graphs without variables of the same addresses, such as those that are brought from
the host for each batch, are not captured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.backends.tvm.run.machine import VirtualMachine
from penstock.backends.tvm.run.runtime_library import forget_cuda_error
from penstock.ir.action_kinds import UPDATE
from penstock.ir.graph import Graph, graph_kind, signature, slot_types
from penstock.ir.memory.captured import MOST_CALLS, in_pages, made_values, never_captured
from penstock.ir.types import LONG_NAMES
from penstock.support.errors import UsageError
from penstock.support.words import shown_bytes

if TYPE_CHECKING:
    import torch

    # Calls a graph by its name, with all of its tensors.
    Direct = Callable[[str, Sequence[torch.Tensor]], list[torch.Tensor]]

VARIABLE = "PENSTOCK_CUDA_GRAPHS"
_ALLOCATE = "vm.builtin.alloc_storage"
# The sets of addresses that are remembered for a graph.
_KNOWN = 4 * MOST_CALLS
# Results of so many bytes are handed on as copies where no graph of the stage takes them.
_SMALL = 4096
# Memory that has to be free for a capture, as a multiple of what it takes.
_SPARE = 2
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_is_contiguous, _address = methodcaller("is_contiguous"), methodcaller("data_ptr")


class _Allocation(NamedTuple):
    """A block that a call of a graph takes from the machine's pool: its arguments, and its bytes."""

    arguments: tuple[Any, ...]
    nbytes: int


class _Blocks:
    """An observer of the machine. It writes down the blocks that a call takes, and counts kernels and calls of
    libraries. With `keeps` it holds the blocks: no later kernel of the call has one then."""

    def __init__(self, *, keeps: bool) -> None:
        self.kernels, self._keeps = 0, keeps
        self.taken: list[Any] = []
        self.allocations: list[_Allocation] = []

    def __call__(self, function: Any, name: str, before: bool, result: Any, *args: Any) -> int:
        if name == _ALLOCATE and not before:
            if self._keeps:
                self.taken.append(result)
            self.allocations.append(_Allocation(args, int(args[1][0])))
        elif before and not name.startswith("vm."):
            self.kernels += 1
        return 0


class CapturedCall:
    """A captured call. `staged` are its inputs from elsewhere, by place; `blocks` is all memory that it works in. The
    results at the places in `copied` are handed on as copies."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        staged: Mapping[int, torch.Tensor],
        results: list[torch.Tensor],
        copied: Container[int],
        blocks: Any,
    ) -> None:
        self._graph, self._staged, self.results, self._blocks = graph, staged, results, blocks
        self._copied = [place in copied for place in range(len(results))]
        self._storages = [x.untyped_storage() for x in results]
        self._unused = list(map(_uses, self._storages))

    def is_free(self) -> bool:
        """Return whether no tensor lies in its results."""
        return list(map(_uses, self._storages)) == self._unused

    def launch(self, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it on these inputs, on the current stream."""
        for place, staged in self._staged.items():
            staged.copy_(ins[place])
        self._graph.replay()
        return [x.clone() if copied else x.detach() for x, copied in zip(self.results, self._copied, strict=True)]


def _uses(storage: Any) -> int:
    """Return how many tensors lie in a storage."""
    import torch  # lazy: heavy

    return int(torch._C._storage_Use_Count(storage._cdata))


@dataclass
class _Calls:
    """The calls of one graph. `inner` are the places of inputs that other graphs of the stage make, `copied` those of
    results that are handed on as copies. `reason` says why no further call is captured, `note` why the last one was
    not, and `direct` is how many were not."""

    graph: Graph
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    inner: frozenset[int]
    copied: frozenset[int]
    reason: str = ""
    allocations: list[_Allocation] | None = None
    seen: set[tuple[int, ...]] = field(default_factory=set)
    captured: dict[tuple[int, ...], list[CapturedCall]] = field(default_factory=dict)
    inputs: int = 0
    note: str = ""
    direct: int = 0

    def number(self) -> int:
        """Return how many captured calls there are."""
        return sum(map(len, self.captured.values()))


class Captures:
    """The captured calls of one stage on a GPU. `direct` calls a graph kernel by kernel. `taken` are the bytes that
    captured calls keep, `room` the most that they may; without it, what is free."""

    def __init__(
        self,
        machine: VirtualMachine,
        graphs: Sequence[Graph],
        device: torch.device,
        direct: Direct,
        room: int | None = None,
    ) -> None:
        import torch  # lazy: heavy

        self._machine, self._device, self._direct, self._room = machine, device, direct, room
        self.taken = 0
        results = made_values(graphs)
        inputs = {value.name for graph in graphs for value in signature(graph).ins}
        self._calls = {graph.name: _calls_of(graph, results, inputs) for graph in graphs}
        self._updates = {graph.name for graph in graphs if graph_kind(graph.name) == UPDATE}
        # The updates that have to come before anything is captured.
        self._ahead = set(self._updates)
        # Where results of captured calls lie.
        self._settled: set[int] = set()
        self._side: Any = None
        self._pools: dict[int, Any] = {}
        self._stream: Callable[[], int] = lambda: int(torch.cuda.current_stream(device).cuda_stream)

    def reasons(self) -> dict[str, str]:
        """Return why graphs are launched kernel by kernel, for those of which a call was refused, or which have had
        many calls and no captured one."""
        rare = {
            name: calls.note for name, calls in self._calls.items() if calls.direct > MOST_CALLS and not calls.captured
        }
        reasons = {name: reason for name, calls in self._calls.items() if (reason := calls.reason or rare.get(name))}
        numbers = self.numbers()
        for name in filter(numbers.get, reasons):
            reasons[name] = f"beside {numbers[name]} captured calls, {reasons[name]}"
        return reasons

    def numbers(self) -> dict[str, int]:
        """Return how many captured calls each graph has."""
        return {name: calls.number() for name, calls in self._calls.items()}

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call a graph, by a captured call if there is one."""
        calls = self._calls[graph]
        self._ahead.discard(graph)
        if (calls.reason and not calls.captured) or not self._fit(calls, args):
            return self._direct(graph, args)
        if calls.allocations is None:
            return self._measured(calls, args)
        if self._ahead and calls.direct < MOST_CALLS:
            return self._uncaptured(calls, args)
        addresses = list(map(_address, args))
        if not all(addresses[place] in self._settled for place in calls.inner):
            calls.note = "it takes results of calls that are not captured"
            return self._uncaptured(calls, args)
        bound = (a for place, a in enumerate(addresses) if place >= calls.inputs or place in calls.inner)
        key = (self._stream(), *bound)
        for captured in calls.captured.get(key, ()):
            if captured.is_free():
                return captured.launch(args)
        if calls.reason:
            return self._uncaptured(calls, args)
        if key not in calls.seen:
            calls.seen.add(key)
            calls.note = "its tensors have not come with the same addresses twice"
            if len(calls.seen) > _KNOWN:
                calls.reason = f"its tensors have come with {_KNOWN} sets of addresses"
            return self._uncaptured(calls, args)
        return self._capture(calls, key, args)

    def _uncaptured(self, calls: _Calls, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        calls.direct += 1
        return self._direct(calls.graph.name, args)

    def _fit(self, calls: _Calls, args: Sequence[torch.Tensor]) -> bool:
        """Return whether arguments are those of the graph. A direct call says what is wrong, or makes copies."""
        return (
            list(map(_dtype, args)) == calls.dtypes
            and list(map(_shape, args)) == calls.shapes
            and all(map(_is_contiguous, args))
            and all(x.device == self._device for x in args)
        )

    def _measured(self, calls: _Calls, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call a graph for the first time, and write down what it takes from the pool."""
        name = calls.graph.name
        blocks = _Blocks(keeps=False)
        self._machine.instrument(blocks)
        try:
            results = self._direct(name, args)
        finally:
            self._machine.instrument(None)
        calls.allocations = blocks.allocations
        steps = 1 + calls.inputs - len(calls.inner)
        if not calls.reason and blocks.kernels <= steps:
            calls.reason = f"it has {blocks.kernels} kernels, a captured call of it takes {steps} steps"
        return results

    def _capture(self, calls: _Calls, key: tuple[int, ...], args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Capture a call and launch it; where that cannot be, call the graph."""
        name, before = calls.graph.name, self._free()
        needed = self._needed(calls, args)
        calls.reason = self._refusal(calls, needed, before)
        if calls.reason:
            return self._direct(name, args)
        captured = self._captured(calls, key, args)
        if captured is None:
            return self._direct(name, args)
        # The pool may have had some of it; libraries may have taken more.
        self.taken += max(needed, before - self._free())
        calls.captured.setdefault(key, []).append(captured)
        self._settled |= {x.data_ptr() for x in captured.results if x.numel()}
        return captured.launch(args)

    def _needed(self, calls: _Calls, args: Sequence[torch.Tensor]) -> int:
        """Return what a captured call keeps."""
        assert calls.allocations is not None
        blocks = (allocation.nbytes for allocation in calls.allocations)
        return sum(map(in_pages, (*blocks, *(args[place].nbytes for place in self._outer(calls)))))

    def _refusal(self, calls: _Calls, needed: int, free: int) -> str:
        if calls.number() >= MOST_CALLS:
            return f"it has {MOST_CALLS} captured calls, and comes with other addresses still"
        if self._room is not None and self.taken + needed > self._room:
            return (
                f"the plan leaves {shown_bytes(self._room)} for captured calls of the stage, which have "
                f"{shown_bytes(self.taken)}, and another takes {shown_bytes(needed)}"
            )
        return f"a captured call takes {needed} bytes, {free} are free" if free < _SPARE * needed else ""

    def _free(self) -> int:
        import torch  # lazy: heavy

        return int(torch.cuda.mem_get_info(self._device)[0])

    def _captured(self, calls: _Calls, key: tuple[int, ...], args: Sequence[torch.Tensor]) -> CapturedCall | None:
        """Capture a call; None, with the reason, where that fails."""
        import torch  # lazy: heavy

        graph, blocks, failure = torch.cuda.CUDAGraph(), _Blocks(keeps=True), ""
        staged: dict[int, torch.Tensor] = {}
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if key[0] not in self._pools:
            self._pools[key[0]] = torch.cuda.graph_pool_handle()
        results: list[torch.Tensor] = []
        try:
            self._reserve(calls)
            staged = {place: torch.empty_like(args[place]) for place in self._outer(calls)}
            self._machine.instrument(blocks)
            with torch.cuda.stream(self._side), _capturing(graph, self._pools[key[0]], self._device):
                results = self._direct(calls.graph.name, [staged.get(place, x) for place, x in enumerate(args)])
        except Exception as error:  # told as the reason; a call that is not captured raises it if it is the call's
            failure = _words(error)
        finally:
            self._machine.instrument(None)
        if failure:
            forget_cuda_error()
            # Another capture would most likely fail as well.
            for other in self._calls.values():
                other.reason = other.reason or f"{calls.graph.name} could not be captured"
            calls.reason = f"it could not be captured: {failure}"
        elif any(_lies_in(x, other) for x in results for other in (*args, *staged.values())):
            calls.reason = "it hands on an argument as its result"
        return None if calls.reason else CapturedCall(graph, staged, results, calls.copied, blocks.taken)

    def _outer(self, calls: _Calls) -> list[int]:
        """Return the places of inputs that no graph of the stage makes."""
        return [place for place in range(calls.inputs) if place not in calls.inner]

    def _reserve(self, calls: _Calls) -> None:
        """Let the pool have the blocks that a call takes: nothing may be allocated during a capture."""
        from tvm_ffi import get_global_func  # lazy: heavy

        assert calls.allocations is not None
        allocate = get_global_func(_ALLOCATE)
        blocks = [allocate(*allocation.arguments) for allocation in calls.allocations]
        del blocks


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether calls may be captured."""
    wanted = environment.get(VARIABLE, "0")
    if wanted not in ("0", "1"):
        raise UsageError(f"{VARIABLE} must be 0 or 1, got {wanted!r}")
    return wanted == "1"


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Capture what the current stream is told. However that ends, the stream is in no capture afterwards, and torch's
    allocator is in none either."""
    try:
        # Other threads wait for copies meanwhile.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        yield
    except BaseException:
        # A capture that broke says so as it ends; the first error says why.
        with suppress(RuntimeError):
            _end_capture(graph, pool, device)
        raise
    _end_capture(graph, pool, device)


def _end_capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    import torch  # lazy: heavy

    try:
        graph.capture_end()
    except RuntimeError:
        # Torch ends the capture of the stream, and raises the error of that before its allocator is told. Where the
        # allocator was told, it raises, and the graph gives the pool back.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise


def _calls_of(graph: Graph, results: set[str], inputs: set[str]) -> _Calls:
    import torch  # lazy: heavy

    sig, of_slots = signature(graph), slot_types(graph)
    types = [*(value.type for value in sig.ins), *(of_slots[slot] for slot in sig.slots)]
    inner = frozenset(place for place, value in enumerate(sig.ins) if value.name in results)
    small = (value.name not in inputs and value.type.nbytes <= _SMALL for value in sig.results)
    copied = frozenset(place for place, each in enumerate(small) if each)
    dtypes, shapes = [getattr(torch, LONG_NAMES[t.dtype]) for t in types], [t.dims for t in types]
    return _Calls(graph, dtypes, shapes, inner, copied, never_captured(graph), inputs=len(sig.ins))


def _lies_in(x: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(x.numel()) and 0 <= x.data_ptr() - other.data_ptr() < other.nbytes


def _words(error: BaseException) -> str:
    """Return the last line of what an error says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
