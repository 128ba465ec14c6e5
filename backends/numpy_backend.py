"""The reference back end: a stage runs in the NumPy interpreter. For tests, and for machines without TVM.

There is nothing to compile: the program of a stage is the text of its module, which the bundle holds anyway, so
`compile_stages` gives no files. Slow by design; exact in what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.collective_calls import calls_of
from penstock.ir.graph import Graph, Module, Op, Slot, signature
from penstock.ir.interpreter.graphs import run_member
from penstock.ir.types import numpy_dtype
from penstock.support.errors import VerifyError

from .interface import DEFAULTS, CompileOptions, Exchange, StageProgram, stage_graphs, without_exchange

if TYPE_CHECKING:
    import torch


class NumpyBackend:
    """A back end that runs stages in the interpreter."""

    def compile_stages(
        self, module: Module, stages: Sequence[int], out_dir: Path, options: CompileOptions = DEFAULTS
    ) -> dict[int, tuple[str, ...]]:
        """Return no files."""
        return dict.fromkeys(stages, ())

    def check_host(self, module: Module, stage: int, device: str | None = None) -> None:
        """Accept every host: stages are interpreted, whatever device they are for."""

    def prepare(self) -> None:
        """Prepare nothing: importing this module is enough."""

    def allows(self, threads: int) -> bool:
        """Allow any number: the interpreter starts no threads."""
        return True

    def load_stage(
        self,
        module: Module,
        stage: int,
        files: Sequence[Path],
        threads: int = 1,
        device: str | None = None,
        *,
        exchange: Exchange | None = None,
    ) -> StageProgram:
        """Load the graphs of a stage into a program."""
        return NumpyProgram(stage_graphs(module, stage), exchange)


class SlotStore:
    """The interpreter's view of the buffers that a call was given: reads see them, updates change them in place."""

    def __init__(self, slots: dict[Slot, np.ndarray]) -> None:
        self._slots = slots
        self._written: list[tuple[np.ndarray, np.ndarray]] = []

    def read(self, var: str, slot: str) -> np.ndarray:
        """Return the value of a variable."""
        return self._slots[Slot(var, slot)]

    def write(self, var: str, value: np.ndarray) -> None:
        """Remember the new value of a variable."""
        # Written when the graph is done: `latest` and `next` may be one buffer, and reads mean the old value.
        self._written.append((self._slots[Slot(var, "next")], value))

    def accumulate(self, var: str, value: np.ndarray) -> None:
        """Add to an accumulator."""
        self._slots[Slot(var, "")] += value

    def take(self, var: str) -> np.ndarray:
        """Return the value of an accumulator, and set the accumulator to zeros."""
        buffer = self._slots[Slot(var, "")]
        value = buffer.copy()
        buffer.fill(0)
        return value

    def replace(self, var: str, value: np.ndarray) -> None:
        """Give a cache its new elements. Nothing but the operation that does so reads it."""
        np.copyto(self._slots[Slot(var, "latest")], value)

    def finish(self) -> None:
        """Copy the new values into their buffers."""
        for buffer, value in self._written:
            np.copyto(buffer, value)


class NumpyProgram:
    """The graphs of one stage, interpreted. Collectives are waited for where they stand."""

    def __init__(self, graphs: Sequence[Graph], exchange: Exchange | None = None) -> None:
        import torch  # lazy: heavy

        self.device = torch.device("cpu")
        self._exchange = exchange
        self._collectives = {call.key: call for graph in graphs for call in calls_of(graph)}
        self._graphs = {g.name: g for g in graphs}
        self._signatures = {g.name: signature(g) for g in graphs}

    def uncaptured(self) -> dict[str, str]:
        return {}

    def captured_bytes(self) -> int:
        return 0

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> frozenset[int]:
        """Hold nothing: operands are used as they are, and all of them are read."""
        return frozenset()

    def unread(self, slots: Mapping[str, Sequence[str]]) -> set[str]:
        """Return nothing: every variable is read."""
        return set()

    def hold_all(self, slots: Mapping[str, Sequence[str]], tensor: Callable[[str], torch.Tensor]) -> Iterator[str]:
        """Hold nothing."""
        return iter(())

    def stand_in(self, graph: str, place: int) -> torch.Tensor:
        """Return no stand-in: every slot is read."""
        raise VerifyError(f"slot {place} is read", where=f"graph {graph}")

    def bind(self, graph: str, slots: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Return a graph as a function of its inputs alone."""
        return lambda ins: self.call(graph, [*ins, *slots])

    def bind_arrays(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
        """Return None: values are checked as tensors."""

    def watch(self, graph: str, args: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        """Run a graph; NumPy does not tell what memory it takes."""
        return self.call(graph, args), None

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a graph; slots among the arguments are updated in place."""
        sig = self._signatures[graph]
        arrays = [array_of(x) for x in args]
        store = SlotStore(dict(zip(sig.slots, arrays[len(sig.ins) :], strict=True)))
        # Copied before the updates: a result may be what was read from a buffer that an update writes over.
        computed = run_member(self._graphs[graph], arrays[: len(sig.ins)], store, partial(self._meet, graph))
        results = [np.array(result, order="C") for result in computed]
        store.finish()
        return [tensor_of(result) for result in results]

    def _meet(self, graph: str, op: Op, operand: np.ndarray) -> np.ndarray:
        call = self._collectives[f"{graph} {op.outs[0].name}"]
        if self._exchange is None:
            raise without_exchange(call)
        result = np.empty(op.outs[0].type.dims, operand.dtype)
        self._exchange.begin(call, tensor_of(np.array(operand, order="C")), tensor_of(result))
        self._exchange.wait(call)
        return result


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return an array that shares the memory of a tensor; bf16 goes through its bits, which torch does not share with
    NumPy."""
    import torch  # lazy: heavy

    return (
        tensor.view(torch.int16).numpy().view(numpy_dtype("bf16")) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares the memory of an array; bf16 goes through its bits."""
    import torch  # lazy: heavy

    if array.dtype == numpy_dtype("bf16"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
