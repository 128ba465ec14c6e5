"""Updates on a device that computes no stage: what they cost under each schedule, and whether losses are those of FSDP2.

    python benchmarks/update_on.py --json update_on.json
    python benchmarks/update_on.py --only losses --model gpt2 --steps 4      losses of a decoder like GPT-2 small

    times     Two stages, and a third device for their updates: a tiny model in real worker processes, whose computations
              take a given time (runtime/worker/pace.py). A forward takes 20 ms, a backward 40 ms. An update takes no
              time on the devices of the stages, and three times a forward and backward on the third. In the controls
              it does not fit behind the next batch: it takes longer, or there are three stages.
    losses    Two replicas of a decoder with `--update-on`, beside FSDP2 with `CPUOffloadPolicy` over gloo, which updates
              on the CPU, too. The control has twice the learning rate.

The rows take turns of some batches each, round after round. A batch's time is from the end of the one before to its end
on the last stage; the row's is the median. *expected* of 1f1b is (m+d-1)(tf+tb) and the update behind it. That of 2bw
is m(tf+tb), or the update and (d-1)(tf+tb) where that is longer: so many microbatches stage 0 computes between new
weights and its next gradients. The exit code is 1 where losses of `--update-on` differ in any bit from those of
training without, or from those of FSDP2 by more than 1e-5, or where those of the control do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from machine import load, markdown, processor, system, versions, write_json
from tensor_parallel import RATE
from zero import RANKS, SIZES, TorchContender, batch, make

import penstock as ps
from penstock.models import write_mlp
from penstock.runtime.job.job import Job

MICROBATCHES, TOLERANCE = 4, 1e-5


class Row(NamedTuple):
    """A pipeline, and how many times a forward and backward its update takes elsewhere (0: it is on its stages)."""

    stages: int
    schedule: str
    times: float

    def expected(self, both: float) -> float:
        """Return the seconds of a batch, where a forward and backward take `both`."""
        update = self.times * both
        fill = (self.stages - 1) * both
        if self.schedule == "2bw":
            return max(MICROBATCHES * both, update + fill)
        return MICROBATCHES * both + fill + update


ROWS = (
    Row(2, "2bw", 0),
    Row(2, "2bw", 3),
    Row(2, "1f1b", 0),
    Row(2, "1f1b", 3),
    # The controls.
    Row(2, "2bw", 5),
    Row(3, "2bw", 0),
    Row(3, "2bw", 3),
)


def open_job(row: Row, folder: Path, forward: float) -> Job:
    """Start the workers of a row."""
    path = write_mlp(folder / "model.onnx", (4,) * (row.stages + 1), None, seed=1)
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=0.01), microbatches=MICROBATCHES)
    options: dict[str, Any] = {"devices": [[f"cpu:{i}"] for i in range(row.stages)], "schedule": row.schedule}
    if row.times:
        options["update_on"] = f"cpu:{row.stages}"
    model = ps.from_onnx(path, dims={"batch": 1})
    plan = ps.plan(model, ps.Cluster.local(row.stages + 1), training, **options)
    bundle = ps.compile(plan, folder / "bundle", backend="numpy")
    pace = {"F": forward, "B": 2 * forward}
    if row.times:
        # The stage of the updates stands behind the others.
        pace[f"{row.stages}U"] = row.times * 3 * forward
    return ps.open(bundle, data="synthetic", pace=pace)


def measure_times(forward: float, rounds: int, batches: int) -> list[dict[str, Any]]:
    """Return what was measured of each row."""
    before = load()
    times: dict[Row, list[float]] = {row: [] for row in ROWS}
    losses: dict[Row, list[float]] = {row: [] for row in ROWS}
    with ExitStack() as stack:
        jobs = {}
        for row in ROWS:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
            jobs[row] = stack.enter_context(open_job(row, folder, forward))
        for _ in range(rounds):
            for row, job in jobs.items():
                steps = list(job.steps_from_data(batches))
                # The first batch behind an empty pipeline is none of a long run.
                times[row] += [b - a for a, b in pairwise([step.at for step in steps])][1:]
                losses[row] += [loss for step in steps for loss in step.losses]
    found = []
    for row in ROWS:
        seconds, here = statistics.median(times[row]), row._replace(times=0)
        found.append(
            {
                "stages": row.stages,
                "schedule": row.schedule,
                "update": row.times,
                "seconds": seconds,
                "expected": row.expected(3 * forward),
                "over_here": seconds / statistics.median(times[here]),
                "same": losses[row] == losses[here],
                "turns": times[row],
                "load": [before, load()],
            }
        )
    return found


def losses_elsewhere(model: str, steps: int, rate: float, folder: Path) -> list[float]:
    """Return the losses of two replicas whose weights a third device updates."""
    example = torch.from_numpy(batch(model, 0)[0][:1])
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=rate, weight_decay=0.01), microbatches=RANKS)
    source = ps.from_torch(make(model), (example,))
    devices = [[f"cpu:{i}" for i in range(RANKS)]]
    cluster = ps.Cluster.local(RANKS + 1)
    plan = ps.plan(source, cluster, training, replicas=RANKS, devices=devices, update_on=f"cpu:{RANKS}")
    bundle = ps.compile(plan, folder / f"rate-{rate:g}")
    with ps.open(bundle) as job:
        names = [value.name for value in job.module.data_inputs]
        return list(job.run(iter([dict(zip(names, batch(model, step), strict=True)) for step in range(steps)])))


def measure_losses(model: str, steps: int, folder: Path) -> dict[str, Any]:
    """Return the losses of all contenders, and how far they are from those of FSDP2."""
    contender = TorchContender("fsdp2, offloaded", model)
    try:
        theirs = contender.run(steps)[1]
    finally:
        contender.close()
    found: dict[str, Any] = {"model": model, "fsdp2": theirs}
    for who, rate in (("elsewhere", RATE), ("control", 2 * RATE)):
        ours = losses_elsewhere(model, steps, rate, folder)
        found[who] = ours
        found[f"{who} error"] = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return found


def table_of(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    head = ["stages", "schedule", "update", "per batch", "expected", "of that on its stages", "losses"]
    lines = [
        [
            str(row["stages"]),
            row["schedule"],
            f"elsewhere, {row['update']:g} (tf+tb)" if row["update"] else "on its stages",
            f"{1e3 * row['seconds']:.1f} ms",
            f"{1e3 * row['expected']:.0f} ms",
            f"{row['over_here']:.3f}",
            "the same" if row["same"] else "OTHERS",
        ]
        for row in rows
    ]
    return head, lines


def table_of_losses(found: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table of losses."""
    head = ["model", "steps", "from FSDP2's", "the control's"]
    return head, [
        [one["model"], str(len(one["fsdp2"])), f"{one['elsewhere error']:.0e}", f"{one['control error']:.0e}"]
        for one in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("times", "losses"))
    parser.add_argument("--forward", type=float, default=0.02, metavar="SECONDS", help="a forward (default: 0.02)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each row (default: 3)")
    parser.add_argument("--batches", type=int, default=10, metavar="N", help="batches per turn (default: 10)")
    parser.add_argument("--model", choices=SIZES, default="tiny", help="what losses are compared of (default: tiny)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps that losses are of (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    facts = {
        "system": system(),
        "processor": processor(sorted(os.sched_getaffinity(0))),
        "versions": versions("penstock", "torch", "numpy", "apache-tvm"),
    }
    known = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    report: dict[str, Any] = {**known, "facts": facts}
    right = True
    if arguments.only != "losses":
        report["rows"] = measure_times(arguments.forward, arguments.rounds, arguments.batches)
        print(markdown(*table_of(report["rows"])))
        right = all(row["same"] for row in report["rows"])
    if arguments.only != "times":
        with tempfile.TemporaryDirectory() as folder:
            found = measure_losses(arguments.model, arguments.steps, Path(folder))
        print(markdown(*table_of_losses([found])))
        others = [one for one in known.get("losses", []) if one["model"] != found["model"]]
        report["losses"] = [*others, found]
        right = right and found["elsewhere error"] <= TOLERANCE < found["control error"]
    write_json(arguments.json, report)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
