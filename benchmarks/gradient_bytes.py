"""Bytes at sockets that replicas send for their gradients, beside torch's FSDP2 over gloo.

    python benchmarks/gradient_bytes.py                        half a minute; root and iproute2

Two processes train a decoder, one sequence each, in a network namespace of their own, so that nothing else sends over its
loopback. Its counter of sent bytes is read in front of a backward and behind it, between meetings of both ranks, so it has
all that both sent, packets and headers included. Penstock runs at `--zero 2` without shared memory, as between hosts, and
its backward exchanges gradients alone. FSDP2 keeps weights whole between forward and backward
(`reshard_after_forward=False`), so its backward exchanges gradients alone, too. Both leave each rank its part of the sum.
P are the bytes of the parameters, which are those of the gradients.

Gloo makes a reduce-scatter of torch out of an all-reduce, which is twice the bytes. The control is Penstock at level 0,
whose sum is whole on both ranks. Exit code 1: Penstock sends more than 0.55 of FSDP2's bytes, or its control does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from machine import load, markdown, processor, system, versions, write_json
from namespaces import Hosts, available
from tensor_parallel import Decoder
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional as F
from zero import fully_sharded

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.action_kinds import BACKWARD, SUM
from penstock.ir.schedule import Action
from penstock.runtime.group.group import RankGroup
from penstock.runtime.launch.local import thread_environment
from penstock.runtime.messages.control import DataSpec, RunCommand, Setup, Stop
from penstock.runtime.messages.status import Status
from penstock.runtime.worker.executor import HANDLERS, Executor
from penstock.runtime.worker.worker import Worker

# Vocabulary, positions, width, heads, layers.
SIZES = (1024, 16, 256, 4, 4)
RANKS, STEPS, MOST, PORT, TIMEOUT = 2, 3, 0.55, 29514, 120.0
FSDP2 = "fsdp2"
# What gives the bytes of a contender: of a backward at level 2; at level 0, of the sum behind it.
LEVELS = {"level 2": 2, "level 0": 0}


def sent_bytes() -> int:
    """Return the bytes that have been sent over loopback in this namespace."""
    (row,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(row.split()[9])


class Counted:
    """The bytes that all ranks send during calls, each between two meetings."""

    def __init__(self, meet: Callable[[], object]) -> None:
        self._meet, self.calls = meet, list[int]()

    def __call__(self, call: Callable[[], None]) -> None:
        self._meet()
        before = sent_bytes()
        self._meet()
        call()
        self._meet()
        self.calls.append(sent_bytes() - before)


def train_fsdp2(rank: int) -> list[int]:
    """Train with FSDP2, and return the bytes of each backward."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    module, optimizer = fully_sharded(Decoder(*SIZES), again=False)
    counted = Counted(dist.barrier)
    for step in range(STEPS):
        drawn = torch.from_numpy(np.random.default_rng(step).integers(0, SIZES[0], (RANKS, SIZES[1] + 1)))
        tokens, labels = drawn[rank : rank + 1, :-1], drawn[rank : rank + 1, 1:]
        loss = F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
        counted(loss.backward)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return counted.calls


def train_penstock(rank: int, bundle: str) -> list[int]:
    """Train a bundle, and return the bytes of each backward, with the sum behind it where there is one."""
    group = RankGroup(TCPStore("127.0.0.1", PORT, RANKS, rank == 0, timedelta(seconds=TIMEOUT)), rank, RANKS, TIMEOUT)
    counted = Counted(dist.barrier)
    backward, begin_sum = HANDLERS[BACKWARD], HANDLERS[SUM]

    def sum_up(executor: Executor, action: Action) -> None:
        begin_sum(executor, action)
        executor.finish_sum(action)

    def whole_sum(executor: Executor, action: Action) -> None:
        counted(lambda: sum_up(executor, action))
        # It belongs to the backward before it.
        last = counted.calls.pop()
        counted.calls[-1] += last

    HANDLERS[BACKWARD] = lambda executor, action: counted(lambda: backward(executor, action))
    HANDLERS[SUM] = whole_sum
    worker = Worker(
        open_bundle(bundle, rank),
        rank,
        group,
        Setup(bundle, TIMEOUT, DataSpec()),
        lambda *report: None,
        lambda wait: None,
        Status(None, rank),
    )
    worker.obey(RunCommand(0, STEPS))
    worker.obey(Stop())
    return counted.calls


def make_bundle(folder: Path, level: int) -> Path:
    torch.manual_seed(0)
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=RANKS)
    source = ps.from_torch(Decoder(*SIZES), (torch.zeros(1, SIZES[1], dtype=torch.int64),))
    settings = {"replicas": RANKS, "stages": 1, "zero": level}
    plan = ps.plan(source, ps.Cluster.local(RANKS), training, **settings)
    return ps.compile(plan, folder / f"level-{level}", backend="numpy")


def run(hosts: Hosts, who: str, bundle: Path | None, folder: Path) -> float:
    """Return the bytes that both ranks of a contender send for the gradients of a step, the median of its steps."""
    report, log = folder / "report.json", folder / "log"
    environment = os.environ | thread_environment(1) | {"GLOO_SOCKET_IFNAME": "lo", "PENSTOCK_SHARED_MEMORY": "0"}
    words = [sys.executable, __file__, "--report", str(report), "--bundle", str(bundle or FSDP2)]
    with log.open("w") as out:
        running = [hosts.start(0, [*words, "--rank", str(rank)], environment, out) for rank in range(RANKS)]
        try:
            failed = [process.args for process in running if process.wait(TIMEOUT)]
        except subprocess.TimeoutExpired:
            failed = [who]
        finally:
            hosts.end(running)
    if failed:
        raise RuntimeError(f"{who} failed:\n{log.read_text()}")
    return statistics.median(json.loads(report.read_text(encoding="utf-8")))


def measure() -> list[dict[str, Any]]:
    nbytes = sum(p.numel() for p in Decoder(*SIZES).parameters()) * 4
    with tempfile.TemporaryDirectory(prefix="penstock-") as place, Hosts(("one",)) as hosts:
        folder = Path(place)
        sent = {FSDP2: run(hosts, FSDP2, None, folder)}
        sent |= {who: run(hosts, who, make_bundle(folder, level), folder) for who, level in LEVELS.items()}
    return [
        {"contender": who, "bytes": count, "parameters": nbytes, "of_fsdp2": count / sent[FSDP2]}
        for who, count in sent.items()
    ]


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    head = ["contender", "bytes of both ranks in a step", "of P", "of FSDP2's"]
    lines = [
        [
            row["contender"],
            f"{row['bytes']:,.0f}",
            f"{row['bytes'] / row['parameters']:.3f}",
            f"{row['of_fsdp2']:.3f}",
        ]
        for row in rows
    ]
    return head, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    for name in ("--rank", "--bundle", "--report"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank = int(arguments.rank)
        calls = train_fsdp2(rank) if arguments.bundle == FSDP2 else train_penstock(rank, arguments.bundle)
        if rank == 0:
            Path(arguments.report).write_text(json.dumps(calls), encoding="utf-8")
        return 0
    if reason := available():
        print(f"no network namespaces: {reason}", file=sys.stderr)
        return 1
    rows = measure()
    print(markdown(*table_of(rows)))
    if arguments.json:
        facts = {
            "system": system(),
            "processor": processor([*os.sched_getaffinity(0)]),
            "versions": versions("torch", "numpy"),
            "load": load(),
        }
        write_json(arguments.json, {"facts": facts, "rows": rows})
    share = {row["contender"]: row["of_fsdp2"] for row in rows}
    return int(share["level 2"] > MOST or share["level 0"] <= MOST)


if __name__ == "__main__":
    sys.exit(main())
