"""Train GPT-2 small with two stages on each of two devices: Penstock's packs beside torch's schedules of the same name.

    python benchmarks/interleaved.py                                  GPT-2 small, interleaved and zb-v
    python benchmarks/interleaved.py --layers 4 --width 128 --heads 4 --vocab 4096 --positions 64      a minute in all

Both are two processes of one thread, one per core, with the same weights, batches and AdamW. torch runs
`ScheduleInterleaved1F1B` and `ScheduleZBVZeroBubble` over gloo, Penstock `--packs 2 --schedule interleaved` and `zb-v`.
Losses of the first steps must agree to 1e-3. Then the contenders of a schedule take turns, as in training.py. Figures
are medians over the turns.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import load, markdown, processor, system, versions, write_json
from processes import Contender, ContenderFailed, allowed_cores
from training import take_turns
from training_shape import Shape, add_shape_arguments, shape_of, write_model

HERE = Path(__file__).parent
SCHEDULES = ("interleaved", "zb-v")
WARMUP = 1
# The largest relative difference of losses.
AGREE = 1e-3


def contenders(schedule: str, shape: Shape, cores: list[int], folder: Path) -> list[Contender]:
    """Return Penstock and torch under one schedule."""
    model, apart = str(write_model(shape, folder / "gpt.onnx")), [[core] for core in cores]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ours = [str(HERE / "penstock_contender.py"), shape.to_json(), model, schedule, str(WARMUP), str(folder / schedule)]
    theirs = [str(HERE / "torch_contender.py"), shape.to_json(), model, schedule, str(WARMUP)]
    return [
        Contender("penstock", [ours], apart, 1),
        Contender("torch", [[*theirs, str(rank), port] for rank in range(2)], apart, 1),
    ]


def measure(schedule: str, shape: Shape, cores: list[int], folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of a step of both, by the median over turns, and their losses."""
    both = contenders(schedule, shape, cores, folder)
    try:
        for contender in both:
            contender.start()
        turns, _ = take_turns(both, steps, rounds)
        losses = {c.name: c.losses for c in both}
        for ours, theirs in zip(losses["penstock"], losses["torch"], strict=True):
            if abs(ours - theirs) > AGREE * abs(theirs):
                raise ContenderFailed(f"{schedule}: losses {ours} of Penstock and {theirs} of torch differ")
        seconds = {name: statistics.median(times) / steps for name, times in turns.items()}
        return {
            "seconds": seconds,
            "turn_s": turns,
            "losses": losses,
            "times_as_fast": seconds["torch"] / seconds["penstock"],
        }
    finally:
        for contender in both:
            contender.stop()


def table_of_schedules(rows: Mapping[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    head = ["schedule", "penstock s", "torch s", "times as fast", "loss difference"]
    lines = []
    for schedule, row in rows.items():
        ours, theirs = row["losses"]["penstock"], row["losses"]["torch"]
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        seconds = [f"{row['seconds'][name]:.2f}" for name in ("penstock", "torch")]
        lines.append([schedule, *seconds, f"{row['times_as_fast']:.2f}", f"{apart:.0e}"])
    return head, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--steps", type=int, default=2, help="optimiser steps in a turn (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--json", metavar="FILE", help="write every measured turn")
    arguments = parser.parse_args()
    shape, cores = shape_of(arguments), allowed_cores()
    if len(cores) < 2:
        print("this benchmark needs two cores to pin processes to", file=sys.stderr)
        return 2
    facts = {
        "processor": processor(cores[:2]),
        "system": f"{system()}, {versions('penstock', 'torch', 'apache-tvm')}",
        "model": f"{shape.model}: {shape.told()}, {shape.microbatches} microbatches of {shape.microbatch_samples}",
        "load before": load(),
    }
    rows = {}
    for schedule in arguments.schedules:
        with tempfile.TemporaryDirectory(prefix="interleaved-") as folder:
            rows[schedule] = measure(schedule, shape, cores[:2], Path(folder), arguments.steps, arguments.rounds)
    for key, value in {**facts, "load after": load()}.items():
        print(f"{key:<12} {value}")
    print(markdown(*table_of_schedules(rows)))
    write_json(arguments.json, {"facts": facts, "schedules": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
