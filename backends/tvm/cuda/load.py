"""The loader for GPUs: opens a stage that was compiled for a GPU, and calls it with torch tensors on that GPU.

In: the library of a stage, and the GPU of this host that devices.py found for it. Out: a StageProgram; tensors
pass without copies, and everything runs on torch's current stream. Nothing is compiled, and nothing of the bundle is
executed but the library, whose hash was checked.

Torch has to be imported before TVM's CUDA runtime is loaded: it brings the CUDA runtime library that TVM's is linked
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.interface import ALIGNMENT, Exchange, Temporary
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.run.machine import CUDA, VirtualMachine
from penstock.backends.tvm.run.runtime_library import load_cuda_runtime
from penstock.backends.tvm.run.watch import watched
from penstock.ir.graph import Graph

from . import torch_calls
from .captures import Captures, is_wanted

if TYPE_CHECKING:
    import torch


class CudaProgram(TvmProgram):
    """The functions of one stage's library, on one GPU. Captured calls keep `room` bytes at most; without it, what is
    free."""

    boundary = ALIGNMENT

    def __init__(
        self,
        library: Path,
        graphs: Sequence[Graph],
        device: torch.device,
        threads: int = 1,
        exchange: Exchange | None = None,
        carried: Sequence[Path] = (),
        room: int | None = None,
    ) -> None:
        super().__init__(library, graphs, threads, device, exchange, carried)
        self.captures = Captures(self._machine, graphs, device, super().call, room) if is_wanted() else None

    def _open(self, library: Path) -> VirtualMachine:
        load_cuda_runtime()
        torch_calls.register()
        return VirtualMachine(library, CUDA, self.device.index)

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one graph on the GPU; slots among the arguments are updated in place."""
        import torch  # lazy: heavy

        with torch.cuda.device(self.device):
            # The virtual machine works on torch's current stream; a graph without arguments would not tell it.
            return super().call(graph, args) if self.captures is None else self.captures.call(graph, args)

    def watch(self, graph: str, args: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Temporary]]:
        """Run one graph kernel by kernel, and give the memory that it took for itself."""
        import torch  # lazy: heavy

        with torch.cuda.device(self.device):
            return watched(self._machine, lambda: super(CudaProgram, self).call(graph, args))

    def uncaptured(self) -> dict[str, str]:
        """Return why graphs are launched kernel by kernel, though calls may be captured."""
        return {} if self.captures is None else self.captures.reasons()

    def captured_bytes(self) -> int:
        """Return the bytes that captured calls keep."""
        return 0 if self.captures is None else self.captures.taken
