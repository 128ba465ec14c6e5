"""The reference back end on devices of straw: a stage for a GPU is interpreted in memory of that GPU, behind what its stream does.

`install()` changes the reference back end of this process. Then everything around stages runs as with a GPU: inputs, messages, sums, readings, saving.
Nothing is compiled, so that a run takes seconds. A computation takes STRAW_SECONDS longer than it has to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu.straw.torch_device import DeviceTensor, devices

from penstock.backends import numpy_backend
from penstock.backends.interface import device_of, stage_graphs
from penstock.ir.graph import Graph, signature
from penstock.ir.types import TensorType

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64, "i32": torch.int32}


class DeviceProgram(numpy_backend.NumpyProgram):
    """The graphs of one stage on a device of straw. A call queues, and returns."""

    def __init__(self, graphs: Sequence[Graph], device: torch.device) -> None:
        super().__init__(graphs)
        self.device = device
        self._types = {g.name: [_type_of(value.type) for value in signature(g).results] for g in graphs}

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one graph; slots among the arguments are updated in place."""
        on_device = [x for x in args if isinstance(x, DeviceTensor)]
        assert len(on_device) == len(args), f"{graph}: an argument is not on {self.device}"
        if not (args or self._types[graph]):
            return []
        results = [devices().empty(dims, dtype, self.device.index) for dims, dtype in self._types[graph]]
        given, made, interpret = [x.held for x in on_device], [x.held for x in results], super().call

        seconds = float(os.environ.get("STRAW_SECONDS", "0"))

        def work() -> None:
            time.sleep(seconds)
            for target, result in zip(made, interpret(graph, given), strict=True):
                target.copy_(result)

        devices().queue(graph, [*on_device, *results], work)
        if os.environ.get("STRAW_FAULT") == "item" and results:
            # A wait that has no place in the loop.
            results[0].reshape(-1)[0].item()
        return list(results)


def _type_of(type: TensorType) -> tuple[tuple[int, ...], torch.dtype]:
    return type.dims, _DTYPES[type.dtype]


def install() -> None:
    """Let the reference back end interpret stages for GPUs on devices of straw."""
    before = numpy_backend.NumpyBackend.load_stage

    def load_stage(
        self: Any,
        module: Any,
        stage: int,
        files: Sequence[Path],
        threads: int = 1,
        device: str | None = None,
        **options: Any,
    ) -> Any:
        home = device_of(module, stage, device)
        if home is None or home.kind != "cuda":
            return before(self, module, stage, files, threads, device, **options)
        return DeviceProgram(stage_graphs(module, stage), torch.device("cuda", int(home.gpu_on_host)))

    numpy_backend.NumpyBackend.load_stage = load_stage  # type: ignore[method-assign]
