"""One device of runs whose kernels take their predicted time, while all else is what the runtime does.

Started by best_of_all.py, once for each device. In: a file that lists plans, each with its bundle, its devices in the
order of ranks, and where they meet; and all devices. Out: for each plan a file with the seconds of its steps, by its
rank 0. A plan begins when all devices are done with the one before.

The worker, its schedule, messages and collectives are the runtime's own. A call of a graph sleeps for the seconds that
the plan counts for it, and its results are zeros. A collective begins where it stands, and is waited for in front of the
first kernel that reads its result.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.backends.bundle.format import open_bundle
from penstock.backends.interface import Exchange, StageProgram, stage_graphs
from penstock.backends.numpy_backend import NumpyProgram
from penstock.ir.collective_calls import CollectiveCall, calls_of
from penstock.ir.graph import Graph, Module, Value, graph_kind
from penstock.ir.memory.workspace import kernels_in_order
from penstock.ir.ops import EXCHANGES
from penstock.ir.types import numpy_dtype
from penstock.passes.costs.prices import GraphCost, rank_seconds, timed_kind
from penstock.runtime.group.group import RankGroup
from penstock.runtime.messages.control import DataSpec, Record, RunCommand, Setup, Step, Stop
from penstock.runtime.messages.status import Status
from penstock.runtime.transport.collectives import RankExchange
from penstock.runtime.worker.worker import Worker

TIMEOUT, WARM, STEPS = 120.0, 2, 6
# The call of Linux that says how late, in nanoseconds, sleeps of a thread may end.
_PR_SET_TIMERSLACK = 29


class Work(NamedTuple):
    """What a device runs of a plan: the name that it has, the bundle, the devices by rank, and the meeting point."""

    name: str
    bundle: str
    devices: Sequence[str]
    address: str
    port: int
    data: str


class _Kernel(NamedTuple):
    """A kernel: the values it reads, its seconds, and the collective that it is."""

    reads: Mapping[str, None]
    seconds: float
    call: CollectiveCall | None


class TimedStage(NumpyProgram):
    """The graphs of a stage, each of which takes its predicted time and computes nothing."""

    def __init__(self, module: Module, rank: int, stage: int, exchange: Exchange) -> None:
        graphs = stage_graphs(module, stage)
        super().__init__(graphs, exchange)
        self._meeting = exchange
        assert module.cluster is not None
        device, whole = module.cluster.device(module.rank_devices()[rank]), rank_seconds(module)
        listed = {graph.name: GraphCost.of(graph).kernel_seconds(device) for graph in graphs}
        of_kind: dict[str, float] = {}
        for name, seconds in listed.items():
            of_kind[graph_kind(name)] = of_kind.get(graph_kind(name), 0.0) + sum(seconds)
        self._kernels = {}
        for graph in graphs:
            kind = graph_kind(graph.name)
            # The plan counts more than kernels: calls, and what is in no cache.
            scale = whole[rank, timed_kind(module, stage, kind)] / of_kind[kind] if of_kind[kind] else 0.0
            self._kernels[graph.name] = _kernels(graph, [second * scale for second in listed[graph.name]])
        self._results = {graph.name: [(v.type.dims, _torch_type(v)) for v in graph.results] for graph in graphs}
        self._moved: dict[str, torch.Tensor] = {}

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sleep as long as the kernels would take, and do the collectives."""
        at, begun = time.perf_counter(), dict[str, CollectiveCall]()
        for kernel in self._kernels[graph]:
            for name in [name for name in begun if name in kernel.reads]:
                _sleep_until(at)
                self._meeting.wait(begun.pop(name))
                at = max(at, time.perf_counter())
            if kernel.call is None:
                at += kernel.seconds
                continue
            _sleep_until(at)
            out = kernel.call.op.outs[0]
            self._meeting.begin(kernel.call, self._tensor(kernel.call.op.ins[0], "in"), self._tensor(out, "out"))
            at = max(at, time.perf_counter())
            begun[out.name] = kernel.call
        _sleep_until(at)
        for call in begun.values():
            self._meeting.wait(call)
        return [torch.zeros(dims, dtype=dtype) for dims, dtype in self._results[graph]]

    def _tensor(self, value: Value, end: str) -> torch.Tensor:
        key = f"{end} {value.name}"
        if key not in self._moved:
            self._moved[key] = torch.zeros(value.type.dims, dtype=_torch_type(value))
        return self._moved[key]


def _kernels(graph: Graph, seconds: Sequence[float]) -> list[_Kernel]:
    """Return the kernels of a graph in the order in which a back end runs them."""
    priced, calls = GraphCost.of(graph), {call.op.outs[0].name: call for call in calls_of(graph)}
    known = {id(kernel.ops[0]): each for kernel, each in zip(priced.kernels, seconds, strict=True)}
    kernels = [
        _Kernel(reads, known.pop(id(ops[0]), 0.0), calls[ops[0].outs[0].name] if ops[0].kind in EXCHANGES else None)
        for ops, reads in kernels_in_order(priced.chosen)
    ]
    assert not any(known.values()), f"{graph.name} has kernels that take time and do not run"
    return kernels


def _torch_type(value: Value) -> torch.dtype:
    return torch.from_numpy(np.empty(0, numpy_dtype(value.type.dtype))).dtype


def _sleep_until(at: float) -> None:
    if (left := at - time.perf_counter()) > 0:
        time.sleep(left)


class TimedWorker(Worker):
    """A worker whose stages take their predicted time."""

    def _load_programs(self, exchange: RankExchange) -> dict[int, StageProgram]:
        return {stage: TimedStage(self.whole, self.rank, stage, exchange) for stage in self.entry.stages}


def run(work: Work, device: str) -> list[float]:
    """Run the plan as one of its devices; return seconds of steps where this rank knows them."""
    rank, count, span = work.devices.index(device), len(work.devices), timedelta(seconds=TIMEOUT)
    store = TCPStore(work.address, work.port, count, rank == 0, span)
    group, ends = RankGroup(store, rank, count, TIMEOUT), list[float]()

    def note(message: Record, arrays: Mapping[str, Any]) -> None:
        if isinstance(message, Step):
            ends.append(message.at)

    setup = Setup(work.bundle, TIMEOUT, DataSpec(work.data))
    worker = TimedWorker(
        open_bundle(Path(work.bundle), rank), rank, group, setup, note, _ask_nobody, Status(None, rank)
    )
    worker.obey(RunCommand(0, WARM + STEPS))
    told = [json.loads(part) for part in group.gather("steps", json.dumps(ends).encode())]
    worker.obey(Stop())
    longest: list[float] = max(told, key=len)
    return [b - a for a, b in pairwise(longest[WARM - 1 :])]


def _ask_nobody(wait: bool) -> None:
    """Receive nothing: batches come from a file."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name in ("--device", "--works", "--out"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    # Sleeps end when they should, not up to 50 us later.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    listed, out = json.loads(Path(arguments.works).read_text(encoding="utf-8")), Path(arguments.out)
    for row in listed["works"]:
        work = Work(**row)
        if arguments.device in work.devices:
            seconds = run(work, arguments.device)
            if work.devices[0] == arguments.device:
                (out / f"{work.name}.json").write_text(json.dumps(seconds), encoding="utf-8")
        _meet(out, work.name, arguments.device, listed["devices"])


def _meet(folder: Path, name: str, device: str, devices: Sequence[str]) -> None:
    """Return when all devices are done with a plan."""
    (folder / f"{name} {device}.done").touch()
    deadline = time.monotonic() + TIMEOUT
    while not all((folder / f"{name} {other}.done").exists() for other in devices):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all devices are done with {name}")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
