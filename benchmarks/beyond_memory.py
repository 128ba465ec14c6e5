"""A GPT of four times the memory of its devices, trained under a limit of the system, beside the way to the disk.

    python benchmarks/beyond_memory.py --out DIR                 53 million parameters on each device: ten minutes
    python benchmarks/beyond_memory.py --out DIR --rows 1 --width 192 --layers 8 --steps 3

A GPT is trained with AdamW on devices of one thread, whose stages are all elsewhere (`--offload weights`), in a memory
cgroup: the kernel ends what takes more. The cgroup holds the whole run, the process that starts it and those of the
ranks. What a run of a tiny model takes there is measured first. A quarter of the weights, gradients and state of the
model come on top: that is the limit. The losses are compared to the last bit to those of the same stages with all on
the devices and no limit. Under the limit that run has to be ended by the kernel: exit code 1 where it is not.

The first row has one device that runs a batch at once. The second has two, with twice the model: under `wrap` they run
both microbatches of a batch on one stage before the next.

The way is measured by code of its own in turns with the steps, because a disk changes between minutes: two threads, one
that reads what a batch copies in and one that writes what it copies out, in pieces of 4 MiB past the system's cache. A
turn is a measurement and four steps. Copies of the step before may still run when it begins, so it moves all bytes once
before it measures, and the first step behind it does not count. No batch can be faster than the way, nor than the
training without. The larger of the two is the floor of the steps of a turn. `reached` is the median of floor / step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from elsewhere import Way
from machine import load, markdown, processor, system, versions, write_json
from memory_group import CGROUPS, MemoryGroup, enter, held_in

import penstock as ps
from penstock.inspection.memory.curves import memory_curves
from penstock.ir.memory.items import copied_bytes
from penstock.ir.memory.predict import measure_memory
from penstock.ir.schedule import COPIES
from penstock.models import write_gpt
from penstock.support.words import counted

SHARE = 4


class Row(NamedTuple):
    """A run: its schedule, its devices and its microbatches, which share the samples of a batch out."""

    schedule: str
    devices: int
    microbatches: int


ROWS = (Row("interleaved", 1, 1), Row("wrap", 2, 2))
# A turn has so many steps, of which the first does not count. The line that asks for a measurement in front of them.
TURN, ASK = 5, "turn"
# The seconds that a run may take.
LONGEST = 1800


def run_in(
    group: MemoryGroup, bundle: Path, steps: int, between: Callable[[], None] | None = None
) -> dict[str, Any] | None:
    """Train in a group; None where the run was ended. `between` is called in front of each turn, while the run waits."""
    command = [sys.executable, __file__, "--train", str(bundle), "--steps", str(steps), "--group", str(group.path)]
    command += ["--turns"] if between is not None else []
    environment, lines = {**os.environ, "OMP_NUM_THREADS": "1"}, [""]
    with tempfile.TemporaryFile("w+") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        with subprocess.Popen(command, text=True, env=environment, **pipes) as run:  # type: ignore[call-overload]
            limit = threading.Timer(LONGEST, run.kill)
            limit.start()
            try:
                for line in run.stdout:
                    lines.append(line)
                    if line.strip() == ASK and between is not None:
                        between()
                        print(ASK, file=run.stdin, flush=True)
            finally:
                limit.cancel()
        errors.seek(0)
        if run.returncode:
            print((errors.read().strip().splitlines() or ["ended without a word"])[-1], file=sys.stderr)
            return None
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def train(bundle: str, steps: int, group: str, turns: bool) -> None:
    """Train in a group, and print losses, seconds of a step, and the memory of all processes in the group. With `turns`
    it asks for a measurement in front of each turn, and waits for the answer."""
    enter(group)
    with ps.open(bundle, timeout=300) as job:
        vocab, draw = job.module.vars["wte.weight"].type.dims[0], np.random.default_rng(0)
        shapes = {value.name: value.type.dims for value in job.module.data_inputs}
        count = job.module.schedule.microbatches

        def batch() -> dict[str, np.ndarray]:
            return {n: draw.integers(0, vocab, (dims[0] * count, *dims[1:])) for n, dims in shapes.items()}

        losses, seconds = list(job.run(iter([batch()]))), []
        for first in range(0, steps - 1, TURN):
            if turns:
                print(ASK, flush=True)
                sys.stdin.readline()
            given = [batch() for _ in range(min(TURN, steps - 1 - first))]
            begun = time.perf_counter()
            for step in job.steps(given):
                losses += step.losses
                seconds.append(time.perf_counter() - begun)
                begun = time.perf_counter()
        resident = held_in(group)
    print(json.dumps({"losses": losses, "seconds": seconds, "resident": resident}))


def compiled(arguments: argparse.Namespace, row: Row, width: int, offload: str) -> tuple[Path, Any]:
    out = Path(arguments.out)
    model = write_gpt(
        out / f"gpt-{width}.onnx", layers=arguments.layers * row.devices, width=width, heads=4,
        vocab=arguments.vocab if width > 64 else 64, positions=arguments.positions if width > 64 else 16,
        batch=arguments.samples // row.microbatches,
    )  # fmt: skip
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=row.microbatches)
    spill = {"spill": f"{out.resolve()}/"} if offload != "none" else {}
    settings = {"schedule": row.schedule, "packs": arguments.packs, "offload": offload, "recompute": "none", **spill}
    plan = ps.plan(ps.from_onnx(model), ps.Cluster.local(row.devices), training, **settings)
    return ps.compile(plan, out / f"{row.devices}-{width}-{offload}"), plan.module


def measure(arguments: argparse.Namespace, row: Row) -> dict[str, Any]:
    tiny, _ = compiled(arguments, row, 64, "none")
    group = MemoryGroup("tiny")
    base = (run_in(group, tiny, 2) or {})["resident"]
    group.close()
    (whole, module), (away, moved) = (compiled(arguments, row, arguments.width, kind) for kind in ("none", "weights"))
    states = [memory.fixed for memory in measure_memory(module).values()]
    images = dict.fromkeys(COPIES, 0)
    for rank in moved.schedule.ranks:
        for kind, nbytes in copied_bytes(moved, rank).items():
            images[kind] += nbytes
    cap = sum(states) // SHARE
    way = Way(Path(arguments.out), *images.values())
    seconds: list[float] = []

    def measure_way() -> None:
        way.seconds()
        seconds.append(way.seconds())

    limited = MemoryGroup("away", base + cap)
    found = run_in(limited, away, arguments.steps, measure_way)
    kills = limited.kills
    limited.close()
    free = MemoryGroup("whole")
    expected = run_in(free, whole, arguments.steps)
    free.close()
    control = MemoryGroup("control", base + cap)
    ended = run_in(control, whole, 2) is None and control.kills > 0
    control.close()
    assert expected is not None, "the run without a limit failed"
    without = statistics.median(expected["seconds"])
    steps = in_turns(found["seconds"]) if found else []
    step = statistics.median([one for turn in steps for one in turn] or [float("nan")])
    reached = [
        max(floor, without) / statistics.median(turn) for floor, turn in zip(seconds, steps, strict=False) if turn
    ]
    return {
        **row._asdict(),
        "parameters": sum(v.type.size for v in module.vars.values() if v.role == "param"),
        "weights, gradients and state": sum(states),
        "cap": cap,
        "base": base,
        "planned": [curve.memory.peak for curve in memory_curves(moved)],
        "copied in and out": list(images.values()),
        "way seconds": seconds,
        "way bytes per second": sum(way.sizes) / statistics.median(seconds or [float("nan")]),
        "without": without,
        "elsewhere": step,
        "reached": statistics.median(reached or [float("nan")]),
        "reached in turns": reached,
        "steps": arguments.steps,
        "same losses": found is not None and found["losses"] == expected["losses"],
        "kills": kills,
        "control ended": ended,
        "turns": [found and found["seconds"], expected["seconds"]],
    }


def in_turns(seconds: Sequence[float]) -> list[list[float]]:
    """Return the steps of each turn that count: all but its first."""
    return [list(seconds[first + 1 : first + TURN]) for first in range(0, len(seconds), TURN)]


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of runs: what each has, what it took, and how it ended."""
    columns = [_column(row) for row in rows]
    heads = ["", *(f"{row['schedule']}, {counted(row['devices'], 'device')}" for row in rows)]
    return heads, [[name, *(column[name] for column in columns)] for name in columns[0]]


def _column(found: Mapping[str, Any]) -> dict[str, str]:
    mib, (into, out) = 1 << 20, found["copied in and out"]
    listed = [
        ["microbatches of a batch", str(found["microbatches"])],
        ["parameters", f"{found['parameters'] / 1e6:.0f} million"],
        ["weights, gradients and state", f"{found['weights, gradients and state'] / mib:.0f} MiB"],
        ["what the limit leaves for them", f"{found['cap'] / mib:.0f} MiB"],
        ["planned at the worst moment of each rank", f"{' and '.join(f'{p / mib:.0f}' for p in found['planned'])} MiB"],
        ["a batch copies in and out", f"{into / mib:.0f} and {out / mib:.0f} MiB"],
        ["seconds of a step with all on the device, no limit", f"{found['without']:.2f}"],
        [
            "seconds of the way alone for these copies",
            f"{statistics.median(found['way seconds'] or [float('nan')]):.2f}",
        ],
        ["seconds of a step under the limit", f"{found['elsewhere']:.2f}"],
        ["floor / step; the goal is 0.8", f"{found['reached']:.2f}"],
        ["of single turns", " ".join(f"{turn:.2f}" for turn in sorted(found["reached in turns"]))],
        [f"losses of {found['steps']} steps", "the same to the last bit" if found["same losses"] else "DIFFER"],
        ["all on the device under the limit", "ended by the kernel" if found["control ended"] else "NOT ENDED"],
    ]
    return dict(listed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="a folder on the disk that is measured (default: one for temporary files)")
    sizes = {"width": 512, "layers": 16, "packs": 17, "vocab": 2048, "positions": 32, "samples": 4, "steps": 50}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", type=int, default=len(ROWS), help="the first rows (default: all)")
    parser.add_argument("--json", help="write the figures here, too")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.steps, arguments.group, arguments.turns)
        return 0
    if arguments.steps < 3:
        parser.error("--steps has to be 3 or more: the first step, and the first of a turn, do not count")
    if not os.access(CGROUPS, os.W_OK):
        parser.error(f"{CGROUPS} is no place for memory cgroups of version 1")
    with tempfile.TemporaryDirectory() as folder:
        arguments.out = arguments.out or folder
        rows = [measure(arguments, row) for row in ROWS[: arguments.rows]]
    cores = sorted(os.sched_getaffinity(0))
    machine = [processor(cores), system(), versions("torch", "numpy"), f"load {load()}"]
    print("; ".join(machine))
    print(markdown(*table_of(rows)))
    if arguments.json:
        kept = {name: value for name, value in vars(arguments).items() if name in sizes}
        write_json(arguments.json, {"arguments": kept, "machine": machine, "rows": rows})
    return 0 if all(row["same losses"] and row["control ended"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
