"""Predicted and measured memory of the chosen plan, for the clusters of held_back.py that are on one host.

    python benchmarks/held_back_memory.py --json held_back_memory.json         continues a file that exists; an hour
    python benchmarks/held_back_memory.py --json held_back_memory.json --only 3-mlp

Plans are those that `plan --batch` chooses with the committed rates of held_back.py, and none is timed. So nothing
needs quotas or quiet: ranks run a few batches on this host, and the largest resident size of each is compared with its
plan. What a rank takes beside its tensors is that of a small GPT, measured first.

The goal is memory within 10 % everywhere. The exit code is 1 where a rank misses it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cell_options import begin_cells, cell_parser
from held_back import GOALS, MODELS, best, cell_name, cells
from held_back_clusters import Drawn
from machine import markdown, processor, system, versions
from truth import beside_tensors
from truth_runs import FED, batches, beyond_base, load, save

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.runtime.job.job import Job

RATES = Path(__file__).resolve().parent / "results" / "held_back.json"
GOAL, MIB = GOALS["memory"], 1 << 20


def wanted_cells() -> list[tuple[Drawn, str]]:
    return [(drawn, name) for drawn, name in cells() if not drawn.rate]


def measure(drawn: Drawn, name: str, rates: Mapping[str, str]) -> dict[str, Any]:
    """Plan and run a cell, and return planned bytes and peaks of its ranks."""
    write, rows = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="held-back-") as place:
        folder = Path(place)
        plan = best(ps.from_onnx(write(folder / "model.onnx")), rows, drawn.cluster(rates))
        bundle = open_bundle(ps.compile(plan, folder / "bundle"))
        with Job(bundle, timeout=600) as job:
            list(job.run(batches(bundle.module, FED)))
            peaks = beyond_base(job)
    module = bundle.module
    assert module.schedule is not None
    return {
        "cell": cell_name(drawn, name),
        "schedule": module.schedule.name,
        "devices": [list(module.devices_of(stage.index)) for stage in module.stages],
        "replicas": [len(module.devices_of(pack[0])) for pack in module.rank_packs()],
        "planned": [int(row["peak"]) for row in plan.as_dict()["memory"].values()],
        "peaks": peaks,
    }


def ratios(row: Mapping[str, Any], beside: Sequence[float]) -> list[float]:
    """Return predicted over measured memory of each rank. Ranks that sum up gradients take more beside tensors."""
    known = zip(row["planned"], row["replicas"], row["peaks"], strict=True)
    return [(planned + beside[count > 1]) / peak for planned, count, peak in known]


def is_over(row: Mapping[str, Any], beside: Sequence[float]) -> bool:
    """Return whether a rank of a cell misses the goal."""
    return abs(_off(ratios(row, beside)) - 1) > GOAL


def _off(listed: Sequence[float]) -> float:
    return max(listed, key=lambda ratio: abs(ratio - 1))


def table_of(rows: Sequence[Mapping[str, Any]], beside: Sequence[float]) -> tuple[list[str], list[list[str]]]:
    """Return the head and a line for each cell."""
    head = [
        "cluster and model",
        "plan",
        "planned MiB",
        "measured MiB beside the base",
        "predicted / measured, the worst",
    ]
    lines = []
    for row in rows:
        where = " > ".join(" ".join(names) for names in row["devices"])
        columns = [" ".join(f"{nbytes / MIB:.0f}" for nbytes in row[which]) for which in ("planned", "peaks")]
        lines.append([row["cell"], f"{row['schedule']}: {where}", *columns, f"{_off(ratios(row, beside)):.3f}"])
    return head, lines


def verdict(rows: Sequence[Mapping[str, Any]], beside: Sequence[float]) -> str:
    """Say how many ranks reach the goal."""
    every = [abs(ratio - 1) for row in rows for ratio in ratios(row, beside)]
    return (
        f"{sum(off <= GOAL for off in every)} of {len(every)} ranks of {len(rows)} cells within {GOAL:.0%}: "
        f"{statistics.median(every):.1%} off in the median, {max(every):.1%} at worst"
    )


def main() -> int:
    arguments = (parser := cell_parser(__doc__)).parse_args()
    wanted = wanted_cells()
    begin_cells(parser, arguments.only, [cell_name(*cell) for cell in wanted], "")
    report, begin = load(arguments.json), time.monotonic()
    rates = json.loads(RATES.read_text(encoding="utf-8"))["known"]["doctor"]
    if "beside" not in report:
        with tempfile.TemporaryDirectory(prefix="held-back-") as folder:
            report["beside"] = [beside_tensors(Path(folder), replicas) for replicas in (1, 2)]
    report["facts"] = {
        "system": system(),
        "processor": processor(sorted(os.sched_getaffinity(0))),
        "versions": versions("penstock", "torch", "apache-tvm"),
    }
    for drawn, name in wanted:
        cell = cell_name(drawn, name)
        if any(row["cell"] == cell for row in report["rows"]) or (arguments.only and cell not in arguments.only):
            continue
        if time.monotonic() - begin > 60 * arguments.minutes:
            break
        report["rows"].append(row := measure(drawn, name, rates))
        save(arguments.json, report)
        told = " ".join(f"{ratio:.3f}" for ratio in ratios(row, report["beside"]))
        print(f"{cell}: {told}; {time.monotonic() - begin:.0f} s so far", file=sys.stderr, flush=True)
    if not report["rows"]:
        return 0
    print(markdown(*table_of(report["rows"], report["beside"])))
    print(verdict(report["rows"], report["beside"]))
    return int(any(is_over(row, report["beside"]) for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
