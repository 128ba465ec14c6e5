"""Seconds of a forward that saves values for its backward, beside those of one that saves nothing.

    python benchmarks/saved_memory.py --out DIR --json saved_memory.json          a minute and a half

The model, its device and its rates are those of budgets.py. The plan that keeps everything and the one that computes
everything again are rehearsed in turns, each a rank by itself. Clocks are those of the thread, so other work of the
machine counts little. What a forward saves, or one that is made again, is in no cache when it is written.

As in budgets.py, measured over estimated seconds of the plan that keeps everything correct the estimates of the other.
`no price` is the estimate of that without a price for saved values. Exit code 1 where the price does not come closer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from budgets import SIZES, Budgets
from machine import load, markdown, processor, system, versions, write_json

from penstock.backends.bundle.format import open_bundle
from penstock.calibration.rehearse import rehearse_here
from penstock.passes.costs.prices import rank_seconds, saved_seconds

PLANS = {"kept": "none", "all": "all"}


def measured(folder: Path, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Return processor seconds of each kind of computation of both plans, medians of turns."""
    torch.set_num_threads(1)
    time.monotonic = time.thread_time
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in PLANS}
    for _ in range(rounds):
        for name, listed in turns.items():
            listed.append(rehearse_here(open_bundle(folder / name, 0), 0, 2, seconds, lambda: None))
    return {
        name: {kind: statistics.median(row[kind] for row in listed) for kind in ("F", "R", "B") if kind in listed[0]}
        for name, listed in turns.items()
    }


def estimated(folder: Path) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the estimated seconds of forwards of both plans, and the part that is for saved values."""
    rows = {}
    for name in PLANS:
        module = open_bundle(folder / name).module
        assert module.cluster is not None
        device = module.cluster.device(module.rank_devices()[0])
        for kind in ("F", "R"):
            if (graph := module.stage_graph(0, kind)) is not None:
                rows[name, kind] = rank_seconds(module)[0, kind], saved_seconds(graph, device)
    return rows


def rows_of(
    times: dict[str, dict[str, float]], estimates: dict[tuple[str, str], tuple[float, float]]
) -> list[dict[str, Any]]:
    """Return what was measured and estimated of forwards: what they save is kept, is not, or is made by them again."""
    kept, saved = estimates["kept", "F"]
    listed = []
    for (name, kind), words in zip(estimates, ("all is kept", "all is made again", "made again"), strict=True):
        seconds, part = estimates[name, kind]
        listed.append(
            {
                "forward": words,
                "measured": times[name][kind],
                "predicted": seconds * times["kept"]["F"] / kept,
                "no price": (seconds - part) * times["kept"]["F"] / (kept - saved),
            }
        )
    return listed


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    head = ["forward", "measured", "predicted", "predicted / measured", "with no price"]
    return head, [
        [
            row["forward"],
            f"{row['measured'] * 1e3:.2f} ms",
            f"{row['predicted'] * 1e3:.2f} ms",
            f"{row['predicted'] / row['measured']:.3f}",
            f"{row['no price'] / row['measured']:.3f}",
        ]
        for row in rows
    ]


def is_closer(rows: list[dict[str, Any]]) -> bool:
    """Return whether the price brings predictions of what is not kept closer to what was measured."""
    far, farther = (sum(abs(row[name] / row["measured"] - 1) for row in rows[1:]) for name in ("predicted", "no price"))
    return far < farther


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="a folder of bundles (default: one for temporary files)")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each plan (default: 7)")
    parser.add_argument("--seconds", type=float, default=0.8, help="of a turn (default: 0.8)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        arguments.out = arguments.out or temporary
        budgets = Budgets(arguments)
        for name, recompute in PLANS.items():
            budgets.bundle(name, recompute=recompute)
        rows = rows_of(measured(budgets.out, arguments.rounds, arguments.seconds), estimated(budgets.out))
    print(markdown(*table_of(rows)))
    facts = [processor(sorted(os.sched_getaffinity(0))), system(), versions("torch", "numpy"), f"load {load()}"]
    write_json(arguments.json, {"machine": facts, "rows": rows})
    return 0 if is_closer(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
