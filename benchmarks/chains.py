"""One sender to three hosts with slow network cards: a chain of hosts, against one host after the other.

    python benchmarks/chains.py                       half a minute
    python benchmarks/chains.py --json chains.json

Hosts are network namespaces (namespaces.py; root, iproute2 with tc), each with one rank that torchrun starts as
`penstock run`. A token bucket lets 12.5 MB per second, 100 Mbit, out of each host and into it. The first stage lies on
one host, the second on three, each of which has some columns of its weight, and takes the whole value of 8 MiB.

The time of a message is from the start of its first send to the end of its last receive, as traces of the ranks have
them; all clocks are that of this machine. It is given in times that one copy takes on one card. Predicted: `simulate`
of the same bundle. The exit code is 1 where the chain takes more than 1.2, one by one less than 2.7, or a prediction is
more than 15 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from machine import write_json
from namespaces import Hosts, available, torchrun
from shaped_links import PAYLOAD, SECONDS, cluster_file

import penstock as ps
from penstock.ir.schedule import HANDS, RECEIVES, Action
from penstock.models import write_mlp
from penstock.passes.communicate import senders
from penstock.passes.simulator.forecast import forecast

RATE, ROWS, WIDTH = 12.5e6, 2048, 1024
NAMES = ["n1", "n2", "n3", "n4"]
NBYTES = ROWS * WIDTH * 4
MOST, LEAST, GOAL = 1.2, 2.7, 0.15
STEPS, SKIPPED = 6, 2


def planned(folder: Path, *, chain: bool) -> ps.Plan:
    """Return the plan of a product on one host and one on three. Without a chain it is as if none were clearly sooner."""
    model = ps.from_onnx(write_mlp(folder / "mlp.onnx", (16, WIDTH, 12), batch=ROWS, seed=1))
    last = [op for op in model.module.graphs["main"].ops if op.kind == "matmul"][-1]
    weight = next(value.name for value in last.ins if value.name != last.ins[0].name)
    clearly, senders.CLEARLY = senders.CLEARLY, senders.CLEARLY if chain else 0.0
    try:
        return ps.plan(
            model,
            ps.Cluster.load(cluster_file(folder, RATE)),
            ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-3), microbatches=1),
            schedule="gpipe",
            stages=2,
            mesh="tp=1;tp=3",
            recompute="none",
            split_at=(last.outs[0].name,),
            shard=(f"{weight}=[_,/tp]",),
        )
    finally:
        senders.CLEARLY = clearly


def predicted(plan: ps.Plan) -> float:
    """Return the seconds between the first send and the last receive of a simulated step."""
    run = forecast(plan.module, lambda rank, action: 0.0, batches=STEPS).simulated
    times: dict[int, list[float]] = {}
    for rank, line in run.lines.items():
        for at in range(len(line.steps)):
            action = line.action(at, plan.module.schedule.microbatches) if plan.module.schedule else None
            if action is not None and action.phase == "F" and action.peer is not None and action.kind not in HANDS:
                times.setdefault(action.mb, []).append(line.finishes[at] if rank else line.starts[at])
    return statistics.median(max(line) - min(line) for line in list(times.values())[SKIPPED:])


def measured(hosts: Hosts, plan: ps.Plan, folder: Path) -> list[float]:
    """Return the seconds of every message under torchrun, one rank per host."""
    random = np.random.default_rng(0)
    np.savez(
        folder / "data.npz",
        x=random.standard_normal((ROWS, 16)).astype(np.float32),
        labels=random.integers(0, 12, ROWS),
    )
    bundle, trace = ps.compile(plan, folder / "bundle"), folder / "trace.json"
    command = ["run", str(bundle), "--data", str(folder / "data.npz"), "--steps", str(STEPS), "--trace", str(trace)]
    torchrun(hosts, command, folder / "log", SECONDS)
    starts: dict[int, list[float]] = {}
    ends: dict[int, list[float]] = {}
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] != "X":
            continue
        try:
            action = Action.parse(event["name"].partition(" ")[0])
        except ValueError:
            continue
        if action.phase != "F" or action.peer is None:
            continue
        if action.kind in RECEIVES:
            ends.setdefault(action.mb, []).append(event["ts"] + event["dur"])
        elif action.kind not in HANDS:
            starts.setdefault(action.mb, []).append(event["ts"])
    return [(max(ends[mb]) - min(starts[mb])) / 1e6 for mb in sorted(starts)][SKIPPED:]


def measure() -> list[dict[str, Any]]:
    rows = []
    once = NBYTES / (RATE * PAYLOAD)
    with Hosts(NAMES) as hosts:
        hosts.shape(RATE)
        for way in ("chain", "one by one"):
            with tempfile.TemporaryDirectory(prefix="penstock-") as place:
                plan = planned(Path(place), chain=way == "chain")
                foretold, times = predicted(plan), measured(hosts, plan, Path(place))
            row = {"way": way, "copies": statistics.median(times) / once, "predicted": foretold / once}
            rows.append({**row, "times": times})
            print(f"{way:12} {row['copies']:6.2f} copies, predicted {row['predicted']:6.2f}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    if why := available():
        parser.error(f"there can be no network namespaces here: {why}")
    rows = measure()
    if arguments.json:
        write_json(arguments.json, {"rows": rows, "bytes": NBYTES, "rate": RATE})
    chain, apart = rows
    close = all(abs(row["predicted"] / row["copies"] - 1) <= GOAL for row in rows)
    return int(not (chain["copies"] <= MOST and apart["copies"] >= LEAST and close))


if __name__ == "__main__":
    sys.exit(main())
