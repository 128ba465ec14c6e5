"""A program: samples of rows of the op table, or of tensor cores, compiled for a GPU and run on a device of straw, against the interpreter.

In: a folder, and names of rows. Out: a line of JSON: what differs, what the driver reports, the blocks that are left after the samples have run once,
after they have run twice, and when the program is gone; and how many samples ran.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch  # brings the devices of straw  # noqa: F401
from oracles.cuda.products import products
from oracles.judge import wrong_results
from samples import Sample, samples_of
from tvm_ffi import get_global_func

from penstock.backends.interface import CompileOptions
from penstock.backends.tvm.cuda.build import build_graphs
from penstock.backends.tvm.cuda.devices import find_device
from penstock.backends.tvm.cuda.load import CudaProgram
from penstock.ir.graph import Graph
from penstock.ir.ops import make
from penstock.ir.types import FLOATS

from . import libraries
from .torch_device import devices

STRAW = devices()


def main(folder: Path, kinds: list[str], most: int, library: str = "none") -> dict[str, object]:
    """Run samples of rows; return what there is to say."""
    fitting = {kind: [s for s in samples(kind) if library == "none" or has_call(s)] for kind in kinds}
    chosen = [s for kind in kinds for s in fitting[kind][:most]]
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(chosen)]
    if library != "none":
        graphs = [by_library(g, library) for g in graphs]
    built = build_graphs(graphs, folder / "stage.so", CompileOptions("sm_90"))
    program = CudaProgram(built.path, graphs, find_device("sm_90", "0", 0))
    wrong, blocks = [], []
    for _ in range(2):
        with np.errstate(all="ignore"):
            for s, g in zip(chosen, graphs, strict=True):
                wrong += [f"{s} {w}" for w in wrong_results(program, g, s.arrays())]
        blocks.append(held())
    del program
    blocks.append(held())
    return {"wrong": wrong, "report": libraries.report(STRAW.runtime), "blocks": blocks, "samples": len(chosen)}


def by_library(graph: Graph, library: str) -> Graph:
    """The graph with its operation left to a library. Its statistics of attention are others with the same meaning: the logarithm of the sum of all
    e^score."""
    (op,) = graph.ops
    call = op.with_attrs(library=library)
    if op.kind != "attention":
        return replace(graph, ops=(call,))
    y, largest, total = op.outs
    logarithm = make("log", [total], ["logarithm"])
    whole = make("add", [largest, *logarithm.outs], ["whole"])
    return replace(graph, ops=(call, logarithm, whole), outs=(y, *whole.outs))


def samples(kind: str) -> Sequence[Sample]:
    """Return the samples of a row, or those for tensor cores."""
    return products("bf16", "f16") if kind == "tensor cores" else samples_of(kind)


def has_call(s: Sample) -> bool:
    """Return whether a library computes a sample."""
    return s.dtype in FLOATS and all(v.type.size for v in (*s.op.ins, *s.op.outs))


def held() -> int:
    """Return the number of blocks that are allocated when everything is done, less what TVM keeps for later."""
    gc.collect()
    get_global_func("vm.builtin.memory_manager.clear")()
    STRAW.runtime.cudaDeviceSynchronize()
    return sum(line.startswith("leak") for line in libraries.report(STRAW.runtime, blocks=True))


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[4:], int(sys.argv[2]), sys.argv[3])))
