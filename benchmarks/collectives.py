"""Collectives of two processes on this machine beside those of torch.distributed over gloo.

    python benchmarks/collectives.py [--repeats N] [--json FILE]

Prints, per size in bytes, the median microseconds of an all_reduce and of an all_gather: through shared memory, through
our own messages over gloo, and by torch's own over gloo; and the ratio of the first to the last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import load, markdown, processor, system, versions, write_json

from penstock.ir.collective_calls import calls_of, groups_of
from penstock.ir.graph import Graph, Mesh, Module, Stage, Value
from penstock.ir.ops import make
from penstock.ir.schedule import Action
from penstock.ir.types import TensorType
from penstock.runtime.group.group import RankGroup, host_store, join_store
from penstock.runtime.transport.carriers import Carriers
from penstock.runtime.transport.collectives import RankExchange
from penstock.runtime.transport.overdue import Overdue

SIZES = (64, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20)
RANKS = 2


def module_of(sizes: tuple[int, ...]) -> Module:
    """Return a graph with an all_reduce and an all_gather of every size."""
    ops = []
    for size in sizes:
        x = Value(f"x{size}", TensorType("f32", (size // 4,)))
        ops += [make("all_reduce", [x], [f"sum{size}"], over="tp")]
        ops += [make("all_gather", [x], [f"all{size}"], over="tp", axis=0, size=RANKS * size // 4)]
    graph = Graph("s0.F", tuple({v: None for op in ops for v in op.ins}), (), tuple(ops))
    mesh = Mesh("s0", (("tp", RANKS),), tuple(f"cpu:{i}" for i in range(RANKS)))
    return Module("m", meshes=(mesh,), stages=(Stage(0, "s0"),), graphs={graph.name: graph})


def timed(call: Callable[[], object], repeats: int) -> float:
    """Return the median microseconds of a call that all ranks make together."""
    times = []
    for _ in range(5):
        call()
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


def measure(rank: int, port: int, near: bool, repeats: int, answers: Any) -> None:
    """Measure as one rank."""
    torch.set_num_threads(1)
    os.environ["PENSTOCK_SHARED_MEMORY"] = str(int(near))
    group = RankGroup(join_store(port, RANKS, 60), rank, RANKS, 60)
    group.connect()
    module = module_of(SIZES)
    exchange = RankExchange(module, rank, 60)
    carriers = Carriers(group.form_circles(groups_of(module), torch.device("cpu")), rank, 60, Overdue(60, group.lost))
    exchange.join(carriers.groups)
    exchange.enter(Action("F", 0, 0))
    rows = []
    for call in calls_of(module.graphs["s0.F"]):
        x, out = torch.ones(call.op.ins[0].type.dims), torch.empty(call.op.outs[0].type.dims)
        number = max(10, min(repeats, repeats * (256 << 10) // x.nbytes))

        def own(call: Any = call, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            exchange.begin(call, x, out)
            exchange.wait(call)

        def theirs(call: Any = call, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            if call.op.kind == "all_reduce":
                dist.all_reduce(x)
            else:
                dist.all_gather_into_tensor(out, x)

        rows.append((call.op.kind, x.nbytes, timed(own, number), timed(theirs, number) if near else 0.0))
    group.gather("end", b"")
    if rank == 0:
        answers.put(rows)


def run(near: bool, repeats: int) -> list[tuple[str, int, float, float]]:
    """Measure with two processes."""
    context = multiprocessing.get_context("spawn")
    store, answers = host_store(RANKS, 60), context.Queue()
    processes = [
        context.Process(target=measure, args=(rank, store.port, near, repeats, answers)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    rows: list[tuple[str, int, float, float]] = answers.get(timeout=300)
    for process in processes:
        process.join(30)
    return rows


def table_of(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    head = ["collective", "bytes", "shared memory us", "our messages us", "torch us", "torch / shared memory"]
    lines = [
        [
            row["collective"],
            f"{row['bytes']:,}",
            *(f"{row[key]:.0f}" for key in ("shared_us", "messages_us", "torch_us")),
            f"{row['torch_us'] / row['shared_us']:.1f}",
        ]
        for row in rows
    ]
    return head, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    before = load()
    shared, messages = run(True, arguments.repeats), run(False, arguments.repeats)
    rows = [
        {"collective": kind, "bytes": size, "shared_us": own, "messages_us": over_gloo, "torch_us": theirs}
        for (kind, size, own, theirs), (_, _, over_gloo, _) in zip(shared, messages, strict=True)
    ]
    print(markdown(*table_of(rows)))
    if arguments.json:
        facts = {
            "system": system(),
            "processor": processor(sorted(os.sched_getaffinity(0))),
            "versions": versions("penstock", "torch", "numpy"),
            "load": [before, load()],
        }
        write_json(arguments.json, {"facts": facts, "rows": rows})


if __name__ == "__main__":
    main()
