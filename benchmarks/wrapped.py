"""Weights that are elsewhere while a device computes other stages: the simulator's seconds of a batch beside a run's.

    python benchmarks/wrapped.py --json wrapped.json                    ten minutes
    python benchmarks/wrapped.py --width 64 --rounds 1 --batches 3

Each row trains linear layers with `--offload weights` in worker processes. Only the computations are paced
(runtime/worker/pace.py): the forward of a stage takes a given time, its backward twice as long, and its update half of
it. Copies are real, of real weights and state, in a folder on the disk. In some rows computations hide the copies, in
the control they do not: a forward takes as good as no time.

A prediction is that of the simulator, with the bandwidth of the disk and the times that the same computations took
without moves, which are those given or what kernels take. The disk is measured in turns with the batches, by code of
its own (elsewhere.py). A batch's time is from the end of the one before to its own; the row's
is the median. `copies` are the seconds that the disk alone takes for the copies of a batch. The goal is a prediction
within 10 % in all rows that hide their copies. Losses are compared to the last bit with those of training without
moves: exit code 1 where they differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from elsewhere import Way
from machine import load, markdown, processor, system, versions, write_json

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.cluster.spaces import Space
from penstock.ir.memory.items import copied_bytes
from penstock.ir.schedule import COMPUTE, Action
from penstock.models import write_mlp
from penstock.planning.predict import predict_timed
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec

LAYERS, MOVED, WITHIN = 2, 32 << 20, 0.1


class Row(NamedTuple):
    """A pipeline: its devices, the stages of each, its microbatches, the seconds of a stage's forward, its schedule."""

    devices: int
    packs: int
    microbatches: int
    forward: float
    schedule: str = "interleaved"

    @property
    def pace(self) -> dict[str, float]:
        return {"F": self.forward, "B": 2 * self.forward, "U": self.forward / 2}


ROWS = (
    Row(1, 4, 1, 0.06),
    Row(1, 4, 4, 0.06),
    Row(2, 3, 2, 0.06),
    Row(2, 3, 3, 0.06),
    Row(2, 4, 4, 0.06),
    # Two versions of the weights.
    Row(1, 4, 1, 0.06, "interleaved-2bw"),
    Row(2, 3, 2, 0.06, "interleaved-2bw"),
    Row(2, 4, 3, 0.06, "interleaved-2bw"),
    # All microbatches on one stage before the next.
    Row(2, 3, 8, 0.06, "wrap"),
    Row(2, 3, 8, 0.06),
    Row(2, 3, 8, 0.06, "wrap-2bw"),
    # The control.
    Row(1, 4, 1, 0.0001),
)


def plan(row: Row, folder: Path, width: int, offload: str) -> ps.Plan:
    """Plan a row: so many layers in each stage."""
    stages = row.devices * row.packs
    path = write_mlp(folder / "model.onnx", (width,) * (stages * LAYERS + 1), None, seed=1)
    model = ps.from_onnx(path, dims={"batch": 1})
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.001), microbatches=row.microbatches)
    cluster = replace(ps.Cluster.local(row.devices), spaces=(Space("disk", path=f"{folder.resolve()}/"),))
    options: dict[str, Any] = {"schedule": row.schedule, "packs": row.packs, "split_at": products[LAYERS::LAYERS]}
    return ps.plan(model, cluster, training, recompute="none", offload=offload, **options)


def copied(planned: ps.Plan) -> int:
    """Return the bytes that all ranks copy in a batch."""
    module = planned.module
    return sum(sum(copied_bytes(module, rank).values()) for rank in range(len(module.rank_packs())))


def computed(job: Job) -> dict[str, float]:
    """Return the seconds that computations of a traced run took, by stage and kind, by the median."""
    spent: dict[str, list[float]] = {}
    for name, begun, ended in (event for trace in job.traces for event in trace):
        action = Action.parse(name)
        if action.kind in COMPUTE:
            spent.setdefault(f"{action.stage}{action.kind}", []).append(ended - begun)
    return {key: statistics.median(seconds) for key, seconds in spent.items()}


def predicted(planned: ps.Plan, times: dict[str, float], bandwidth: float) -> float:
    """Predict the seconds of a batch whose computations take these times."""
    module = planned.module
    assert module.cluster is not None
    spaces = tuple(replace(space, bandwidth=bandwidth) for space in module.cluster.spaces)
    of_ranks = [times] * len(module.rank_packs())
    return predict_timed(module.but(cluster=replace(module.cluster, spaces=spaces)), of_ranks).step


def measure(row: Row, folder: Path, width: int, rounds: int, batches: int) -> dict[str, Any]:
    """Run a row in turns with the same without moves, and the disk."""
    before = load()
    plans = {offload: plan(row, folder, width, offload) for offload in ("weights", "none")}
    way, ways, times, losses = Way(folder, MOVED, MOVED), list[float](), list[float](), dict[str, list[float]]()
    with ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for offload, planned in plans.items():
            bundle = ps.compile(planned, folder / offload, backend="numpy")
            options: dict[str, Any] = {"data": DataSpec(), "pace": row.pace, "trace": offload == "none"}
            jobs[offload] = stack.enter_context(Job(open_bundle(bundle), **options))
        for _ in range(rounds):
            ways.append(way.seconds())
            for offload, job in jobs.items():
                steps = list(job.steps_from_data(batches))
                losses.setdefault(offload, []).extend(loss for step in steps for loss in step.losses)
                if offload == "weights":
                    # The first batch behind an empty pipeline is none of a long run.
                    times += [b - a for a, b in pairwise([step.at for step in steps])][1:]
        given = computed(jobs["none"])
    bandwidth = MOVED / statistics.median(ways)
    moved = copied(plans["weights"])
    return {
        "schedule": row.schedule,
        "devices": row.devices,
        "packs": row.packs,
        "microbatches": row.microbatches,
        "forward": row.forward,
        "moved": moved,
        "copies": moved / 2 / bandwidth,
        "bandwidth": bandwidth,
        "computed": given,
        "predicted": predicted(plans["weights"], given, bandwidth),
        "seconds": statistics.median(times),
        "same": losses["weights"] == losses["none"],
        "turns": times,
        "load": [before, load()],
    }


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    head = [
        "schedule", "devices", "stages of each", "microbatches", "forward", "a batch copies", "the disk alone", "predicted",
        "measured", "predicted / measured", "losses",
    ]  # fmt: skip
    return head, [
        [
            row["schedule"],
            str(row["devices"]),
            str(row["packs"]),
            str(row["microbatches"]),
            f"{row['forward'] * 1e3:g} ms",
            f"{row['moved'] / 2**20:.0f} MiB",
            f"{row['copies'] * 1e3:.0f} ms",
            f"{row['predicted'] * 1e3:.0f} ms",
            f"{row['seconds'] * 1e3:.0f} ms",
            f"{row['predicted'] / row['seconds']:.3f}",
            "the same" if row["same"] else "OTHERS",
        ]
        for row in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder on the disk (default: one for temporary files)")
    parser.add_argument("--width", type=int, default=384, help="of layers (default: 384)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each row (default: 3)")
    parser.add_argument("--batches", type=int, default=8, metavar="N", help="batches per turn (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    for row in ROWS:
        with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
            rows.append(measure(row, Path(folder), arguments.width, arguments.rounds, arguments.batches))
    print(markdown(*table_of(rows)))
    facts = [processor(sorted(os.sched_getaffinity(0))), system(), versions("torch", "numpy")]
    write_json(arguments.json, {"machine": facts, "rows": rows})
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
