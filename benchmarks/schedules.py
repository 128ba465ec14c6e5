"""The promises of schedules, measured in the real runtime with paced computations: time per batch against the formula.

    python benchmarks/schedules.py                                      all rows: ten minutes
    python benchmarks/schedules.py --only 4x6 --json schedules.json     d x m

Every row trains a tiny model on d stages, one worker process each, with m microbatches per batch: real messages over
gloo, real stores, real programs. Only the computations are paced (runtime/worker/pace.py): a forward takes 20 ms, a
whole backward 40 ms, of which weight gradients take 20 ms where they are separate. The workers sleep most of the time,
so that eight of them fit on one or two cores, which are asked not to halt meanwhile (processes.py). Rows with latency
have links on which a message takes as long as a forward. With `/2` behind the name of a schedule each device has two
stages, whose computations take half as long each. With `again` all stages but the last compute their forwards again,
which takes another 20 ms, while they wait for gradients: (m+d-1)(tf+tb+tr) - (d+1) tr. In the control, `in B`,
backwards of all stages take so much longer: (m+d-1)(tf+tb+tr).

The schedules of a row take turns, a few batches each, round after round. A batch's time is from the end of the one
before to its own on the last stage; the row's is the median. `formula` is that of docs/schedules.md, played by the
simulator with the same times and latency. `over` is how much more was measured: the cost of the runtime itself and of
sharing the cores. Live versions are counted by the workers' stores: a schedule that needs another number than its delay
+ 1 makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from machine import load, processor, write_json
from processes import allowed_cores, awake

import penstock as ps
from penstock.ir.grid import time_per_batch
from penstock.ir.schedule import Schedule
from penstock.models import write_mlp
from penstock.passes.schedules.dealing import equal_shares
from penstock.passes.schedules.schedule import PACK_SCHEDULES, build_packs, build_schedule, delay_of
from penstock.runtime.job.job import Job


class Row(NamedTuple):
    """A pipeline to measure under several schedules.

    `latency` is in forwards. The first schedule is the reference of the others. A suffix of a schedule's name says that
    gradients are clipped, for which stages exchange their norms before every update, that each stage is on two
    devices (x2), which share the microbatches, that each device has several stages (/2), or that forwards are computed
    again, ahead of backwards or in them.
    """

    stages: int
    microbatches: int
    latency: float
    schedules: tuple[str, ...]

    @property
    def name(self) -> str:
        again = "-again" if any(name.endswith(AGAIN) for name in self.schedules) else ""
        return f"{self.stages}x{self.microbatches}{again}" + (f"+{self.latency:g}" if self.latency else "")


CLIP, TWICE, AGAIN, INSIDE = " --clip", " x2", " again", " in B"
FLUSH = ("1f1b", "zb-1f1b", "2bw")
ROWS = (
    Row(2, 2, 0, FLUSH),
    Row(4, 4, 0, (*FLUSH, "2bw" + CLIP)),
    Row(4, 8, 0, FLUSH),
    Row(8, 8, 0, (*FLUSH, "2bw" + CLIP)),
    Row(8, 32, 0, ("1f1b", "2bw")),
    Row(2, 4, 0, ("1f1b", "interleaved /2", "interleaved /4", "zb-v /2", "interleaved-2bw /2")),
    Row(2, 8, 0, ("1f1b", "interleaved /2", "interleaved /4", "interleaved-2bw /2")),
    Row(4, 4, 0, ("1f1b", "interleaved /2", "interleaved /4")),
    Row(4, 8, 0, ("1f1b", "interleaved /2", "interleaved /4", "zb-v /2", "interleaved-2bw /2")),
    Row(4, 16, 0, ("1f1b", "interleaved /2", "interleaved /4", "zb-v /2", "interleaved-2bw /2")),
    Row(4, 8, 0, ("1f1b" + INSIDE, "1f1b" + AGAIN)),
    Row(8, 8, 0, ("1f1b" + INSIDE, "1f1b" + AGAIN)),
    Row(8, 32, 0, ("1f1b" + INSIDE, "1f1b" + AGAIN)),
    Row(4, 6, 1, ("2bw", "eager-2bw")),
    Row(2, 8, 0, ("1f1b", "1f1b" + TWICE, "2bw", "2bw" + TWICE)),
)


def compile_row(row: Row, schedule: str, folder: Path) -> Path:
    """Compile one schedule: one product per stage, so that every stage has weights and sends both ways. Two where stages
    compute forwards again."""
    packs, again = packs_of(schedule), schedule.endswith(AGAIN)
    layers = 2 if again else 1
    path = write_mlp(folder / "model.onnx", (4,) * (row.stages * packs * layers + 1), None, seed=1)
    model = ps.from_onnx(path, dims={"batch": 1})
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    clip = 1.0 if schedule.endswith(CLIP) else 0.0
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.01), microbatches=row.microbatches, clip=clip)
    each = 2 if schedule.endswith(TWICE) else 1
    cluster = ps.Cluster.local(each * row.stages)
    kind = kind_of(schedule)
    options = {"replicas": each, "split_at": products[layers::layers], "packs": packs}
    plan = ps.plan(model, cluster, training, schedule=kind, recompute="all" if again else "none", **options)
    return ps.compile(plan, folder / "bundle", backend="numpy")


def open_job(row: Row, schedule: str, folder: Path, pace: dict[str, float]) -> Job:
    """Start the workers of one schedule."""
    bundle, latency = compile_row(row, schedule, folder), row.latency * pace["F"]
    each_pace = {kind: seconds / packs_of(schedule) for kind, seconds in pace.items()}
    if schedule.endswith(AGAIN):
        each_pace["R"] = pace["F"]
    if schedule.endswith(INSIDE):
        each_pace["B"] += pace["F"]
    return ps.open(bundle, data="synthetic", pace=each_pace, latency=latency, audit=True)


def kind_of(name: str) -> str:
    for suffix in (CLIP, TWICE, AGAIN, INSIDE):
        name = name.removesuffix(suffix)
    return name.partition(" /")[0]


def packs_of(name: str) -> int:
    """Return the stages on each device."""
    return int(name.partition(" /")[2] or 1)


def built(name: str, row: Row) -> Schedule:
    """Return the schedule of a contender, with its messages."""
    kind, each = kind_of(name), 2 if name.endswith(TWICE) else 1
    if kind in PACK_SCHEDULES:
        return build_packs(kind, PACK_SCHEDULES[kind].packs(row.stages, packs_of(name)), row.microbatches)
    shares = [equal_shares(each, row.microbatches)] * row.stages
    return build_schedule(kind, row.stages, row.microbatches, shares)


def formula_of(name: str, row: Row, forward: float) -> float:
    """Return the seconds of a batch that docs/schedules.md promises."""
    part, inside = forward / packs_of(name), name.endswith(INSIDE)
    latency = row.latency * forward
    if name.endswith(AGAIN):
        return ((row.microbatches + row.stages - 1) * 4 - row.stages - 1) * forward
    return time_per_batch(built(name, row), part, (3 if inside else 2) * part, part, latency=latency)


def measure(row: Row, forward: float, rounds: int, batches: int) -> list[dict[str, Any]]:
    pace = {"F": forward, "B": 2 * forward, "W": forward}
    times: dict[str, list[float]] = {name: [] for name in row.schedules}
    live: dict[str, int] = {}
    with ExitStack() as stack:
        jobs = {}
        for name in row.schedules:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
            jobs[name] = stack.enter_context(open_job(row, name, folder, pace))
        for number in range(rounds):
            for name, job in jobs.items():
                ends = [step.at for step in job.steps_from_data(batches)]
                times[name] += [b - a for a, b in pairwise(ends)]
            said = ", ".join(f"{name} {statistics.median(times[name]) * 1e3:.0f} ms" for name in jobs)
            print(f"{row.name}: round {number + 1} of {rounds}: {said}", file=sys.stderr)
        for name, job in jobs.items():
            live[name] = max(n for audit in job.audit() for n in audit.live_versions.values())
    lines: list[dict[str, Any]] = []
    for name in row.schedules:
        kind, each = kind_of(name), 2 if name.endswith(TWICE) else 1
        lines.append(
            {
                "stages": row.stages,
                "microbatches": row.microbatches,
                "latency": row.latency,
                "schedule": name,
                "seconds": statistics.median(times[name]),
                "formula": formula_of(name, row, forward),
                "ideal": row.microbatches * 3 * forward / each,
                "live": live[name],
                "versions": delay_of(kind) + 1,
                "times": times[name],
            }
        )
    for line in lines:
        line["speed"] = lines[0]["seconds"] / line["seconds"]
        line["promised"] = lines[0]["formula"] / line["formula"]
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    head = (
        "| d | m | link | schedule | per batch | formula | over | of m(tf+tb) | speed | promised | off | live "
        "versions |"
    )
    rows = [head, "| --- " * 12 + "|"]
    for x in lines:
        first = x["promised"] == 1 and x["speed"] == 1
        ratio = " |  | " if first else f"{x['speed']:.3f} | {x['promised']:.3f} | {x['speed'] / x['promised'] - 1:+.1%}"
        cells = (
            x["stages"],
            x["microbatches"],
            f"{x['latency']:g} tf".removeprefix("1 ") if x["latency"] else "0",
            x["schedule"],
            f"{x['seconds'] * 1e3:.1f} ms",
            f"{x['formula'] * 1e3:.0f} ms",
            f"{x['seconds'] / x['formula'] - 1:+.1%}",
            f"{x['seconds'] / x['ideal']:.3f}",
            ratio,
            x["live"],
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def table_of(lines: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of a table of times beside formulas."""
    head = ["d", "m", "schedule", "per batch", "formula", "over"]
    return head, [
        [
            *(str(x[key]) for key in ("stages", "microbatches", "schedule")),
            f"{x['seconds'] * 1e3:.1f} ms",
            f"{x['formula'] * 1e3:.0f} ms",
            f"{x['seconds'] / x['formula'] - 1:+.1%}",
        ]
        for x in lines
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--forward", type=float, default=0.02, metavar="SECONDS", help="how long a forward takes (default: 0.02)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each schedule (default: 3)")
    parser.add_argument("--batches", type=int, default=9, metavar="N", help="batches per turn (default: 9)")
    parser.add_argument("--only", nargs="+", metavar="DxM", help=f"rows, of {' '.join(row.name for row in ROWS)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if not arguments.only or row.name in arguments.only]
    if not rows:
        parser.error(f"no such row, there are {' '.join(row.name for row in ROWS)}")
    begin, before = time.perf_counter(), load()
    with awake() as is_awake:
        lines = [line for row in rows for line in measure(row, arguments.forward, arguments.rounds, arguments.batches)]
    print(table(lines))
    print(f"took {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    facts: dict[str, Any] = {"forward": arguments.forward, "processor": processor(allowed_cores()), "awake": is_awake}
    facts["load"] = [before, load()]
    write_json(arguments.json, {"facts": facts, "rows": lines})
    return 1 if any(line["live"] != line["versions"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
