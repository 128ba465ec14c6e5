"""The part of the sums of gradients that a pipeline hides where replicas share optimiser state out (`--zero 1`).

    python benchmarks/sums_behind.py                           both schedules: a minute
    python benchmarks/sums_behind.py --rate 20 --json sums_behind.json

Two stages of two replicas each, on four hosts: network namespaces behind a token bucket (namespaces.py; root, iproute2
with tc). Everything is the runtime's own. Computations are timed: each forward and backward takes at least a given time
and sleeps for what is left of it (`Setup.pace`), so the cores are free for the network. A sum takes about a third of the
computations of a batch on the link.

Under 2bw a sum has the next batch to hide behind. Under 1f1b, the control, the update follows at once. `sums` is what
ranks stood waiting for sums, `gathers` for the new weights that the update gathers, which no schedule hides. Figures are
of the rank that waited longest. Exit code 1: under 2bw ranks wait for sums longer than 3 % of a step, or under 1f1b for
less than 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from machine import load, markdown, processor, system, versions, write_json
from namespaces import Hosts, available
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.schedule import Action
from penstock.models import write_mlp
from penstock.runtime.group.group import RankGroup
from penstock.runtime.launch.local import thread_environment
from penstock.runtime.messages.control import DataSpec, RunCommand, Setup, Stop
from penstock.runtime.messages.status import Status
from penstock.runtime.worker.executor import Executor
from penstock.runtime.worker.worker import Worker

NAMES = ("n0", "n1", "n2", "n3")
WIDTH, LAYERS, ROWS, MICROBATCHES = 1024, 4, 4, 8
# Seconds of a forward and a backward. An update takes what it takes.
PACE = {"F": 0.05, "B": 0.1}
SCHEDULES = ("2bw", "1f1b")
MOST, LEAST = 0.03, 0.10
PORT, TIMEOUT = 29513, 120.0


def make_bundle(folder: Path, schedule: str) -> Path:
    """Compile the model: two stages of two layers each, with as many parameters."""
    model = ps.from_onnx(write_mlp(folder / "mlp.onnx", (WIDTH,) * (LAYERS + 1), batch=ROWS, seed=1))
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-3), microbatches=MICROBATCHES)
    settings = {"schedule": schedule, "replicas": 2, "zero": 1, "split_at": (products[LAYERS // 2],), "stages": 2}
    return ps.compile(ps.plan(model, ps.Cluster.local(4), training, **settings), folder / schedule, backend="numpy")


def run_rank(arguments: argparse.Namespace) -> None:
    """Train as one rank, and let rank 0 write the report."""
    rank, steps, span = int(arguments.rank), arguments.steps, timedelta(seconds=TIMEOUT)
    group = RankGroup(TCPStore(arguments.address, PORT, len(NAMES), rank == 0, span), rank, len(NAMES), TIMEOUT)
    waited = 0.0
    usual = Executor.finish_sum

    def finish(executor: Executor, action: Action) -> None:
        nonlocal waited
        begin = time.perf_counter()
        usual(executor, action)
        waited += time.perf_counter() - begin

    Executor.finish_sum = finish  # type: ignore[method-assign]
    setup = Setup(arguments.bundle, TIMEOUT, DataSpec(), pace=PACE)
    worker = Worker(
        open_bundle(arguments.bundle, rank),
        rank,
        group,
        setup,
        lambda *report: None,
        lambda wait: None,
        Status(None, rank),
    )
    worker.obey(RunCommand(0, 2))
    group.gather("begun", b"")
    before, began, waited = worker.exchange.waited, time.perf_counter(), 0.0
    worker.obey(RunCommand(2, steps))
    seconds = (time.perf_counter() - began) / steps
    mine = [seconds, waited / steps, (worker.exchange.waited - before - waited) / steps]
    ranks = [json.loads(part) for part in group.gather("times", json.dumps(mine).encode())]
    if rank == 0:
        names = ("step_s", "sums_s", "gathers_s")
        row = {name: max(of_rank[i] for of_rank in ranks) for i, name in enumerate(names)}
        Path(arguments.report).write_text(json.dumps(row), encoding="utf-8")
    worker.obey(Stop())


def run(hosts: Hosts, bundle: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Return seconds of a step, and those that ranks waited in it."""
    report, log = folder / "report.json", folder / "log"
    environment = os.environ | thread_environment(1) | {"GLOO_SOCKET_IFNAME": "eth0"}
    words = ["--bundle", str(bundle), "--address", hosts.address(0), "--report", str(report), "--steps", str(steps)]
    with log.open("w") as out:
        running = [
            hosts.start(i, [sys.executable, __file__, *words, "--rank", str(i)], environment, out)
            for i in range(len(NAMES))
        ]
        try:
            failed = [process.args for process in running if process.wait(TIMEOUT)]
        finally:
            hosts.end(running)
    if failed:
        raise RuntimeError(f"a rank failed:\n{log.read_text()}")
    row: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return row


def measure(rate: float, steps: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as place, Hosts(NAMES) as hosts:
        folder = Path(place)
        bundles = {schedule: make_bundle(folder, schedule) for schedule in SCHEDULES}
        hosts.shape(rate)
        for schedule, bundle in bundles.items():
            row = run(hosts, bundle, steps, folder)
            # Half of a stage's gradients leave each rank.
            link = LAYERS // 2 * WIDTH * WIDTH * 4 / 2 / rate
            rows.append({"schedule": schedule, **row, "link_s": link, "share": row["sums_s"] / row["step_s"]})
    return rows


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    head = ["schedule", "step ms", "a sum on the link ms", "waited for sums ms", "of the step", "for new weights ms"]
    lines = [
        [
            row["schedule"],
            *(f"{1e3 * row[name]:.0f}" for name in ("step_s", "link_s", "sums_s")),
            f"{row['share']:.1%}",
            f"{1e3 * row['gathers_s']:.0f}",
        ]
        for row in rows
    ]
    return head, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rate", type=float, default=20.0, metavar="MB/s", help="of the network cards (default: 20)")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="(default: 12)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    for name in ("--rank", "--address", "--bundle", "--report"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return 0
    if reason := available():
        print(f"no network namespaces: {reason}", file=sys.stderr)
        return 1
    before = load()
    rows = measure(arguments.rate * 1e6, arguments.steps)
    print(markdown(*table_of(rows)))
    facts = {
        "system": system(),
        "processor": processor([*os.sched_getaffinity(0)]),
        "versions": versions("torch", "numpy"),
        "load": [before, load()],
    }
    if arguments.json:
        write_json(arguments.json, {"facts": facts, "rate": arguments.rate, "rows": rows})
    hidden, shown = (row["share"] for row in rows)
    return int(hidden > MOST or shown < LEAST)


if __name__ == "__main__":
    sys.exit(main())
