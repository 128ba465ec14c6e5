"""A program: faults that are put into programs, launches and memory on purpose, and what notices each.

Out: a line of JSON: by the name of a fault, what was noticed; and under `sound` what was noticed where there is none, before and after all of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.backends.interface import CompileOptions
from penstock.backends.tvm.cuda.build import build_graphs
from penstock.backends.tvm.cuda.kernels import threads
from penstock.backends.tvm.cuda.load import CudaProgram
from penstock.ir.graph import Graph, Op, Value, signature
from penstock.ir.ops import make
from penstock.ir.types import TensorType

from . import libraries
from .torch_device import DeviceTensor, devices

STRAW = devices()

N, LARGE = 600, 1200
GPU = torch.device("cuda", 0)
# Blocks of 256 threads that LARGE elements take.
_BLOCKS = 5


def graphs() -> list[Graph]:
    """Return a graph with a result, one with two slots, one whose kernel loses its bounds, one whose grid loses a block."""
    x, y, large = (Value(name, TensorType("f32", (n,))) for name, n in (("x", N), ("y", N), ("z", LARGE)))
    negative, root, tanh = make("neg", [x], ["a"]), make("sqrt", [x], ["r"]), make("tanh", [large], ["t"])
    sums = tuple(Op("accum", (v,), (), {"var": name}) for v, name in ((x, "first"), (y, "second")))
    return [
        Graph("s0.plain", (x,), negative.outs, (negative,)),
        Graph("s0.slots", (x, y), (), sums),
        Graph("s0.bounds", (x,), (), (root, Op("accum", root.outs, (), {"var": "first"}))),
        Graph("s0.grid", (large,), tanh.outs, (tanh,)),
    ]


@contextmanager
def smaller_grid() -> Iterator[None]:
    """Leave out the last block of the largest launch."""
    kind = threads.ThreadEmitter
    before = kind.launch
    kind.launch = lambda self, blocks, count: before(self, blocks - (blocks == _BLOCKS), count)
    try:
        yield
    finally:
        kind.launch = before


class Faults:
    """The faults; each method puts one in, and returns what its results differ in."""

    def __init__(self, program: CudaProgram) -> None:
        self.program = program
        self.x = np.linspace(0.5, 2, N, dtype=np.float32)
        # Memory that was never touched by a kernel: another stream, which waits for none.
        stream = ctypes.c_void_p()
        STRAW.check(STRAW.runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1))
        self.side = stream.value or 0

    def on_gpu(self, array: np.ndarray) -> torch.Tensor:
        return torch.empty(array.shape, device=GPU).copy_(torch.from_numpy(array))

    def differs(self, x: torch.Tensor, expected: np.ndarray) -> list[str]:
        found = x.cpu().numpy()
        return [] if np.allclose(found, expected, rtol=1e-5) else ["results differ"]

    def sound(self) -> list[str]:
        x = self.on_gpu(self.x)
        first, second = torch.zeros(N, device=GPU), torch.zeros(N, device=GPU)
        (y,) = self.program.call("s0.plain", [x])
        self.program.call("s0.slots", [x, y, *self.ordered(first, second)])
        return self.differs(y, -self.x) + self.differs(first, self.x) + self.differs(second, -self.x)

    def ordered(self, first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
        named = {"first": first, "second": second}
        return [named[slot.var] for slot in signature(graphs()[1]).slots]

    def missing_wait(self) -> list[str]:
        (y,) = self.program.call("s0.plain", [self.on_gpu(self.x)])
        STRAW.waits = False
        try:
            return self.differs(y, -self.x)
        finally:
            STRAW.waits = True

    def wrong_stream(self) -> list[str]:
        x = self.on_gpu(self.x)
        STRAW.stream = self.side
        (y,) = self.program.call("s0.plain", [x])
        STRAW.stream = 0
        return self.differs(y, -self.x)

    def wrong_slot(self) -> list[str]:
        first, second = torch.zeros(N, device=GPU), torch.zeros(N, device=GPU)
        self.program.call("s0.slots", [self.on_gpu(self.x), self.on_gpu(-self.x), *self.ordered(second, first)])
        return self.differs(first, self.x) + self.differs(second, -self.x)

    def double_free(self) -> list[str]:
        address = ctypes.c_void_p()
        STRAW.runtime.cudaMalloc(ctypes.byref(address), 100)
        codes = [STRAW.runtime.cudaFree(address) for _ in range(2)]
        return [] if codes[1] == 0 else [f"code {codes[1]}"]

    def unaligned_argument(self) -> list[str]:
        # The loader would copy it; here its check is passed by.
        x = torch.zeros(N + 1, device=GPU)[1:]
        self.program._entries["s0.plain"].function(x)
        return []

    def freed_too_early(self) -> list[str]:
        x = self.on_gpu(self.x)
        STRAW.stream = self.side
        (y,) = self.program.call("s0.plain", [x])
        STRAW.stream = 0
        # Freed in the order of the default stream, which does not wait for the other one.
        del x
        torch.zeros(1, device=GPU).item()
        STRAW.runtime.cudaStreamSynchronize(self.side)
        return self.differs(y, -self.x)

    def write_past_the_end(self) -> list[str]:
        first = torch.zeros(N, device=GPU)
        self.program.call("s0.bounds", [self.on_gpu(self.x), first])
        return self.differs(first, np.sqrt(self.x))

    def wrong_grid(self) -> list[str]:
        z = np.linspace(-1, 1, LARGE, dtype=np.float32)
        (y,) = self.program.call("s0.grid", [self.on_gpu(z)])
        return self.differs(y, np.tanh(z))

    def uninitialised_memory(self) -> list[str]:
        first, second = torch.empty(N, device=GPU), torch.zeros(N, device=GPU)
        self.program.call("s0.slots", [self.on_gpu(self.x), self.on_gpu(-self.x), *self.ordered(first, second)])
        return self.differs(first, self.x)

    def leak(self) -> list[str]:
        before = libraries.report(STRAW.runtime, blocks=True)
        STRAW.runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 12345)
        after = libraries.report(STRAW.runtime, blocks=True)
        return [line for line in after if line not in before]

    def wrong_device(self) -> list[str]:
        x = torch.zeros(N, device=torch.device("cuda", 1))
        lying = DeviceTensor(x.held, x.owner, 0)
        self.program.call("s0.plain", [lying])[0].cpu()
        return []

    def copy_past_the_end(self) -> list[str]:
        x = torch.zeros(N, device=GPU)
        host = ctypes.create_string_buffer(8 * N)
        STRAW.runtime.cudaMemcpyAsync(host, x.data_ptr(), 8 * N, 2, None)
        return []


def noticed(fault: Callable[[], list[str]]) -> list[str]:
    """Return what is noticed: errors, reports, differences."""
    said: list[str] = []
    try:
        said += fault()
    except RuntimeError as error:
        said.append(f"error: {str(error).strip().splitlines()[-1]}")
    said += libraries.report(STRAW.runtime)
    STRAW.runtime.straw_clear()
    STRAW.failures.clear()
    return said


def main(folder: Path) -> dict[str, Any]:
    """Put in every fault; return what was noticed of each."""
    os.environ["STRAW_UNGUARDED"] = "sqrtf("
    with smaller_grid():
        built = build_graphs(graphs(), folder / "stage.so", CompileOptions("sm_90"))
    faults = Faults(CudaProgram(built.path, graphs(), GPU))
    before = noticed(faults.sound)
    names = [name for name in vars(Faults) if name not in ("__init__", "on_gpu", "differs", "sound", "ordered")]
    said = {n: noticed(getattr(faults, n)) for n in names if not n.startswith("__")}
    return {**said, "sound": before + noticed(faults.sound)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
