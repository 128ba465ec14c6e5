"""One rank of a program whose kernels take their predicted time, and whose collectives really happen.

Started by gathers.py, once on each host. A kernel is a sleep of the seconds that the cluster file predicts for it, so
that the cores are free for what carries the packets. Kernels run in the order in which a back end runs them. A
collective begins where it stands, and is waited for in front of the first kernel that reads its result, by the exchange
of the runtime. Tensors hold zeros: results are compared where kernels compute.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.backends.bundle.format import open_bundle
from penstock.ir.collective_calls import CollectiveCall, calls_of, groups_of
from penstock.ir.graph import Graph, Value
from penstock.ir.memory.workspace import kernels_in_order
from penstock.ir.ops import EXCHANGES
from penstock.passes.costs.prices import GraphCost
from penstock.runtime.group.group import RankGroup
from penstock.runtime.state.tensors import CPU
from penstock.runtime.transport.carriers import Carriers
from penstock.runtime.transport.collectives import RankExchange
from penstock.runtime.transport.overdue import Overdue

PORT, TIMEOUT = 29512, 120.0


class TimedProgram:
    """The computations of one rank of a bundle."""

    def __init__(self, bundle: Path, group: RankGroup) -> None:
        self._module, self._rank = open_bundle(bundle).module, group.rank
        circles = group.form_circles(groups_of(self._module), CPU)
        self._carriers = Carriers(circles, group.rank, TIMEOUT, Overdue(TIMEOUT, group.lost))
        self.exchange = RankExchange(self._module, group.rank, TIMEOUT)
        self.exchange.join(self._carriers.groups, self._carriers.devices)
        self._tensors: dict[str, torch.Tensor] = {}
        self._steps = 0

    def run(self, steps: int) -> None:
        """Run so many batches."""
        schedule = self._module.schedule
        assert schedule is not None
        for action in schedule.expand(self._rank, steps, self._steps):
            graph = self._module.stage_graph(action.stage, action.kind)
            if graph is not None:
                self.exchange.enter(action)
                self._run(graph)
        self._steps += steps

    def _run(self, graph: Graph) -> None:
        assert self._module.cluster is not None
        device = self._module.cluster.device(self._module.rank_devices()[self._rank])
        priced, calls = GraphCost.of(graph), {call.op.outs[0].name: call for call in calls_of(graph)}
        seconds = zip(priced.kernels, priced.kernel_seconds(device), strict=True)
        lasts = {id(kernel.ops[0]): s for kernel, s in seconds}
        begun: dict[str, CollectiveCall] = {}
        for ops, reads in kernels_in_order(priced.chosen):
            for name in [name for name in begun if name in reads]:
                self.exchange.wait(begun.pop(name))
            time.sleep(lasts.get(id(ops[0]), 0.0))
            if ops[0].kind in EXCHANGES:
                call = begun[ops[0].outs[0].name] = calls[ops[0].outs[0].name]
                self.exchange.begin(call, self._tensor(call.op.ins[0], "in"), self._tensor(call.op.outs[0], "out"))
        for call in begun.values():
            self.exchange.wait(call)

    def _tensor(self, value: Value, end: str) -> torch.Tensor:
        key = f"{end} {value.name}"
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(value.type.dims, dtype=getattr(torch, _DTYPES[value.type.dtype]))
        return self._tensors[key]


_DTYPES = {"f32": "float32", "f64": "float64"}


def measure(bundles: dict[str, str], group: RankGroup, steps: int) -> dict[str, dict[str, Any]]:
    """Return what the ranks waited for in each bundle, after a first step that does not count."""
    programs = {name: TimedProgram(Path(bundle), group) for name, bundle in bundles.items()}
    rows = {}
    for name, program in programs.items():
        program.run(1)
        dist.barrier()
        waited, sent, begin = program.exchange.waited, program.exchange.sent, time.perf_counter()
        program.run(steps)
        seconds = (time.perf_counter() - begin) / steps
        mine = [program.exchange.waited - waited, program.exchange.sent - sent, seconds]
        ranks = [json.loads(part) for part in group.gather(f"times of {name}", json.dumps(mine).encode())]
        rows[name] = {
            "exposed_s": sum(rank[0] for rank in ranks),
            "bytes": sum(rank[1] for rank in ranks),
            "step_s": max(rank[2] for rank in ranks),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name in ("--rank", "--address", "--bundles", "--steps", "--report"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    rank, span = int(arguments.rank), timedelta(seconds=TIMEOUT)
    group = RankGroup(TCPStore(arguments.address, PORT, 2, rank == 0, span), rank, 2, TIMEOUT)
    group.connect()
    rows = measure(json.loads(arguments.bundles), group, int(arguments.steps))
    if rank == 0:
        Path(arguments.report).write_text(json.dumps(rows), encoding="utf-8")
    group.gather("end", b"")
    group.leave()


if __name__ == "__main__":
    main()
