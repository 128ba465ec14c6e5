"""The loader for GPUs: opens a stage that was compiled for a GPU, and calls it with torch tensors on that GPU.

In: the library of a stage, the architecture it is for, the number of the GPU on this host. Out: a StageProgram; tensors
pass without copies, and everything runs on torch's current stream. Nothing is compiled, and nothing of the bundle is
executed but the library, whose hash was checked.

Torch has to be imported before TVM's CUDA runtime is loaded: it brings the CUDA runtime library that TVM's is linked
with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.interface import ALIGNMENT, Exchange
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.run.machine import CUDA, VirtualMachine, load_cuda_runtime
from penstock.ir.graph import Graph
from penstock.support.errors import UsageError

from . import torch_calls

if TYPE_CHECKING:
    import torch


def find_device(architecture: str, number: int, stage: int) -> torch.device:
    """Return the GPU for a stage; UsageError says what the stage needs and what this host has."""
    import torch  # lazy: heavy

    where = f"stage {stage}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        reason = (
            "the installed torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        )
        raise UsageError(f"wants cuda {architecture}; this host has none", where=where, hint=reason)
    if number >= count:
        raise UsageError(
            f"wants cuda {architecture}, device {number} of its host; this host has {count}",
            where=where,
            hint="change the cluster file and compile again",
        )
    capability = torch.cuda.get_device_capability(number)
    digits = re.sub(r"\D", "", architecture)
    required = (int(digits[:-1]), int(digits[-1]))
    # Machine code runs on its own major number, from its minor number on; that of an architecture with a letter only
    # on itself.
    fits = (
        capability == required
        if architecture[-1].isalpha()
        else capability[0] == required[0] and capability[1] >= required[1]
    )
    if not fits:
        name = torch.cuda.get_device_name(number)
        raise UsageError(
            f"wants cuda {architecture}; device {number} of this host is {name}, sm_{capability[0]}{capability[1]}",
            where=where,
            hint=f'compile with arch = "sm_{capability[0]}{capability[1]}"',
        )
    return torch.device("cuda", number)


class CudaProgram(TvmProgram):
    """The functions of one stage's library, on one GPU."""

    boundary = ALIGNMENT

    def __init__(
        self,
        library: Path,
        graphs: Sequence[Graph],
        device: torch.device,
        threads: int = 1,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(library, graphs, threads, device, exchange)

    def _open(self, library: Path) -> VirtualMachine:
        load_cuda_runtime()
        torch_calls.register()
        return VirtualMachine(library, CUDA, self.device.index)

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one graph on the GPU; slots among the arguments are updated in place."""
        import torch  # lazy: heavy

        with torch.cuda.device(self.device):
            # The virtual machine works on torch's current stream; a graph without arguments would not tell it.
            return super().call(graph, args)
