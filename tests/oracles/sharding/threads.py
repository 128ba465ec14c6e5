"""The ranks of a mesh as threads of one process, whose collectives are done as the interpreter does them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock

import numpy as np
import torch

from penstock.backends.interface import CompileOptions
from penstock.backends.registry import backend_of
from penstock.ir.collective_calls import CollectiveCall
from penstock.ir.graph import COORDINATE, Mesh, Module
from penstock.ir.interpreter.collectives import COLLECTIVES

SECONDS = 60


class _Meeting:
    """Operands of collectives by their number and the place of a rank. All ranks begin collectives in one order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.barrier = Barrier(len(mesh.devices), timeout=SECONDS)
        self.lock = Lock()
        self.operands: dict[tuple[str, int], np.ndarray] = {}


class ThreadExchange:
    """The exchange of one rank."""

    def __init__(self, meeting: _Meeting, place: int) -> None:
        self.meeting, self.place = meeting, place
        self.outs: dict[str, torch.Tensor] = {}

    def begin(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        with self.meeting.lock:
            self.meeting.operands[call.key, self.place] = x.numpy().copy()
        self.outs[call.key] = out

    def wait(self, call: CollectiveCall) -> None:
        self.meeting.barrier.wait()
        group = self.meeting.mesh.group(self.place, call.over)
        operands = [self.meeting.operands[call.key, place] for place in group]
        result = COLLECTIVES[call.op.kind](operands, call.attrs)[group.index(self.place)]
        self.outs.pop(call.key).copy_(torch.from_numpy(result.copy()))
        self.meeting.barrier.wait()


def run_compiled(
    local: Module, parts: Sequence[dict[str, np.ndarray]], folder: Path, backend: str
) -> list[list[np.ndarray]]:
    """Compile the forward graph of the only stage, and return its results on every place of the mesh."""
    mesh, graph = local.mesh_of(0), local.graphs["s0.F"]
    names = backend_of(backend).compile_stages(local, [0], folder, CompileOptions(jobs=1))[0]
    meeting = _Meeting(mesh)

    def run(place: int) -> list[np.ndarray]:
        exchange = ThreadExchange(meeting, place)
        program = backend_of(backend).load_stage(local, 0, [folder / name for name in names], exchange=exchange)
        at = mesh.coordinates(place)
        given = {f"{COORDINATE}{axis}": np.array(i, np.int64) for axis, i in at.items()} | parts[place]
        args = [torch.from_numpy(given[v.name].copy()) for v in graph.ins]
        return [x.numpy().copy() for x in program.call("s0.F", args)]

    with ThreadPoolExecutor(len(mesh.devices)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(run, place) for place in range(len(mesh.devices))]]
