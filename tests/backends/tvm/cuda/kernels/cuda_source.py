"""The CUDA source of kernels, run on the CPU: what nvcc gets, compiled by g++, with a coroutine per thread of a block.

In: graphs of one operation. Out: a program that runs their kernels, launch by launch (oracles/cuda/threads.py).
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tvm
from oracles.cuda import threads as cuda_threads
from tvm import tirx

from penstock.backends.tvm.cuda.pipeline import PIPELINE
from penstock.backends.tvm.cuda.target import cuda_target, device_machine
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.ir.graph import Graph, signature
from penstock.runtime.state.tensors import allocate


class SourceProgram:
    """Graphs of one kernel each, from their CUDA source."""

    def __init__(self, graphs: Sequence[Graph], folder: Path) -> None:
        self.device = torch.device("cpu")
        self.kernels = {}
        for i, graph in enumerate(graphs):
            (step,) = plan_kernels(graph, device_machine("sm_90")).steps
            self.kernels[graph.name] = (f"k{i}", graph, step.kernel)
        functions = {
            name: kernel.function.with_attr("global_symbol", name) for name, _, kernel in self.kernels.values()
        }
        target = cuda_target("sm_90")
        with target:
            built = tvm.tirx.build(tvm.IRModule(functions), target=target, pipeline=PIPELINE)
        source = "\n".join(m.inspect_source() for m in built.imports)
        self.found = {kernel.name: kernel for kernel in cuda_threads.kernels_of(source)}
        (folder / "kernels.cpp").write_text(cuda_threads.translated(source))
        command = ["g++", *cuda_threads.FLAGS, "-o", "kernels.so", "kernels.cpp"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        self.library = ctypes.CDLL(str(folder / "kernels.so"))

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
        """Nothing is packed."""

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        name, owner, kernel = self.kernels[graph]
        outs = [allocate(v.type) for v in kernel.outs]
        named = dict(zip(owner.ins, args[: len(owner.ins)], strict=True))
        slots = dict(zip(signature(owner).slots, args[len(owner.ins) :], strict=True))
        given = [*(named[v] for v in kernel.ins), *(slots[slot] for slot in kernel.slots), *outs]
        # Parameter b3 of the function is seen through the flat buffer f3.
        memory = {f"f{p.name[1:]}": tensor for p, tensor in zip(kernel.function.params, given, strict=True)}
        number = 0
        for statement in _statements(kernel.function.body):
            if isinstance(statement, tirx.AllocBuffer):
                size, kind = int(statement.buffer.shape[0]), getattr(torch, str(statement.buffer.dtype))
                memory[statement.buffer.name] = torch.full((size,), 77, dtype=kind)
            elif isinstance(statement, tirx.AttrStmt):
                self._launch(
                    f"{name}_kernel" + (f"_{number}" if number else ""),
                    memory,
                    int(statement.value),
                    int(statement.body.value),
                )
                number += 1
        found = dict(zip(kernel.outs, outs, strict=True))
        return [found[v] for v in owner.outs]

    def _launch(self, name: str, memory: dict[str, torch.Tensor], blocks: int, threads: int) -> None:
        kernel = self.found[name]
        pointers = [ctypes.c_void_p(memory[p.removesuffix("_ptr")].data_ptr()) for _, p in kernel.parameters]
        values = (ctypes.c_void_p * max(len(pointers), 1))(*map(ctypes.addressof, pointers))
        self.library.launch(getattr(self.library, f"run_{name}"), values, blocks, threads, int(kernel.together))


def _statements(body: Any) -> list[Any]:
    return [s for part in body.seq for s in _statements(part)] if isinstance(body, tirx.SeqStmt) else [body]
