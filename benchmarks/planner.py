"""The time of planning a GPT-3-shaped chain (96 blocks, width 12288, both ends) on 64 and on 1024 devices.

    python benchmarks/planner.py [--hosts 8 128] [--width 12288] [--batch 512 1536]

Every schedule is planned. Prints one line per cluster and schedule: seconds of this process's processor time, and the
plan. The models and devices are stated in `gpt_chain` and `A100`; nothing is measured but the planner itself.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from machine import markdown, write_json
from shapes import gpt_chain

from penstock.ir.cluster.cluster import Device
from penstock.ir.schedule_names import TRAINING
from penstock.passes.planner.fleet import equal_hosts, fleet_of
from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.planner import Planner

# Half of the data sheet's rate of 16-bit products; 80 GiB; NVLink inside a host, 25 GB/s between hosts.
A100 = Device("", "cuda", target="sm_80", flops=1.5e14, bandwidth=1.5e12, spaces=(("hbm", 80 * 2**30),))
HEADS = (
    "devices",
    "schedule",
    "planned in",
    "batch takes",
    "of the bound",
    "stages",
    "replicas",
    "microbatches",
    "stages that recompute",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 128], help="hosts of eight devices")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[512, 1536], help="samples per batch, for each number of hosts"
    )
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=12288)
    parser.add_argument("--schedules", nargs="+", default=list(TRAINING))
    parser.add_argument("--json", metavar="FILE", help="write all rows")
    arguments = parser.parse_args()
    chain = gpt_chain(arguments.layers, arguments.width, positions=2048, vocabulary=50257)
    rows: list[dict[str, Any]] = []
    print(markdown(HEADS, []), flush=True)
    for hosts, batch in zip(arguments.hosts, arguments.batch, strict=True):
        fleet = fleet_of(equal_hosts(hosts, 8, A100, (2.5e11, 5e-6), (2.5e10, 1e-5)))
        planner = Planner(chain, fleet, PlanRequest(batch))
        for schedule in arguments.schedules:
            start = time.process_time()
            outcome = planner.best(schedule)
            rows.append({"devices": len(fleet), "schedule": schedule, "seconds": time.process_time() - start})
            if outcome is not None:
                plan = outcome.plan
                rows[-1] |= {
                    "step": outcome.step,
                    "of_bound": outcome.bound / outcome.step,
                    "stages": len(plan.stages),
                    "replicas": sorted({len(stage.devices) for stage in plan.stages}),
                    "microbatches": [plan.count, plan.size],
                    "recompute": sum(stage.recompute for stage in plan.stages),
                }
            print(f"| {' | '.join(cells(rows[-1]))} |", flush=True)
        total = sum(row["seconds"] for row in rows if row["devices"] == len(fleet))
        print(f"| {len(fleet)} | all | {total:.1f} s | | | | | | |", flush=True)
    write_json(arguments.json, {"rows": rows})


def cells(row: dict[str, Any]) -> list[str]:
    """Write a line of the table."""
    first = [str(row["devices"]), row["schedule"], f"{row['seconds']:.1f} s"]
    if "step" not in row:
        return [*first, "no plan is legal and fits", *[""] * 5]
    count, size = row["microbatches"]
    replicas = ", ".join(map(str, row["replicas"]))
    return [
        *first,
        f"{row['step']:.2f} s",
        f"{row['of_bound']:.0%}",
        str(row["stages"]),
        replicas,
        f"{count} of {size}",
        str(row["recompute"]),
    ]


if __name__ == "__main__":
    main()
