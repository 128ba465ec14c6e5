"""The time of planning a GPT-3-shaped chain (96 blocks, width 12288, both ends) on 64 and on 1024 devices.

    python benchmarks/planner.py [--hosts 8 128] [--width 12288] [--batch 512 1536]
    python benchmarks/planner.py --unequal 8 16 [--replicas 1] [--layers 36] [--plans-only]

With --unequal the devices of a fleet are all different, each on a host of its own, and the chain has layers of random
work (the seed is the number of devices). The last rows are all that `penstock plan` asks the planner; --plans-only
leaves them out. --results adds the rows of a run to a file of several, such as benchmarks/results/planner.json.

Every schedule is planned. Prints one line per cluster and schedule: seconds of this process's processor time, and the
plan. The models and devices are stated in `gpt_chain`, `A100` and `unequal_fleet`; nothing is measured but the planner itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from machine import markdown, write_json
from shapes import gpt_chain

from penstock.ir.cluster.cluster import OTHER_HOST, Cluster, Device, LinkClass
from penstock.ir.schedule_names import TRAINING
from penstock.passes.planner.argue import counterfactuals, plan_chain
from penstock.passes.planner.chain import Amount, Chain, Layer, PhaseWork
from penstock.passes.planner.fleet import Fleet, equal_hosts, fleet_of
from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.planner import Planner
from penstock.passes.planner.sparing import without_little_help

# Half of the data sheet's rate of 16-bit products; 80 GiB; NVLink inside a host, 25 GB/s between hosts.
A100 = Device("", "cuda", target="sm_80", flops=1.5e14, bandwidth=1.5e12, spaces=(("hbm", 80 * 2**30),))
# The parts of memory that are tried where nothing fits.
MORE = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
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


def unequal_fleet(count: int, layers: int) -> tuple[Chain, Fleet]:
    """Make a chain of random layers, and a fleet of unequal devices of 1e11 operations per second and more."""
    rng = Random(count)
    chain = Chain(
        tuple(
            Layer(
                f"layer{i}",
                params=4 * weights,
                grads=4 * weights,
                state=4 * weights,
                saved=Amount(0, 4 * values),
                out=Amount(0, values),
                back=Amount(0, values),
                forward=PhaseWork(Amount(0, flops)),
                backward=PhaseWork(Amount(0, 2 * flops)),
                weight=PhaseWork(Amount(0, flops)),
            )
            for i, (flops, weights, values) in enumerate(
                (rng.randint(5 * 10**8, 2 * 10**9), rng.randint(5 * 10**5, 2 * 10**6), rng.randint(30_000, 300_000))
                for _ in range(layers)
            )
        )
    )
    devices = tuple(
        Device(f"cpu:{i}", host=f"h{i}", flops=1e11 * (1 + 0.37 * i * rng.uniform(0.8, 1.2)), bandwidth=1e10 + 2e9 * i)
        for i in range(count)
    )
    return chain, fleet_of(Cluster(devices, classes=(LinkClass(OTHER_HOST, 1e9, 1e-4),)))


def plan_unequal(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan fleets of unequal devices, and print a line for each schedule."""
    rows: list[dict[str, Any]] = []
    print(markdown(("devices", "schedule", "planned in", "batch takes", "at most above the best", "stages"), []))
    for count in arguments.unequal:
        chain, fleet = unequal_fleet(count, arguments.layers)
        planner = Planner(chain, fleet, PlanRequest(64, replicas=arguments.replicas))
        for schedule in arguments.schedules:
            start = time.process_time()
            outcome = planner.best(schedule)
            assert outcome is not None
            seconds, above = time.process_time() - start, outcome.step / outcome.bound - 1
            stages = len(outcome.plan.stages)
            rows.append({"devices": count, "layers": arguments.layers, "schedule": schedule, "seconds": seconds})
            rows[-1] |= {"step": outcome.step, "above": above, "stages": stages, "replicas": arguments.replicas}
            shown = f"{count} | {schedule} | {seconds:.1f} s | {outcome.step:.3f} s | {above:.2%} | {stages}"
            print(f"| {shown} |", flush=True)
        total = sum(row["seconds"] for row in rows if row["devices"] == count)
        print(f"| {count} | all | {total:.1f} s | | | |", flush=True)
        for part, seconds in ({} if arguments.plans_only else explained(chain, fleet, arguments)).items():
            rows.append({"devices": count, "layers": arguments.layers, "part": part, "seconds": seconds})
            print(f"| {count} | {part} | {seconds:.1f} s | | | |", flush=True)
    return rows


def explained(chain: Chain, fleet: Fleet, arguments: argparse.Namespace) -> dict[str, float]:
    """Plan as the command does, but for simulation, and return the seconds of each part."""
    wanted = PlanRequest(64, tuple(arguments.schedules), replicas=arguments.replicas)
    times = [time.process_time()]
    result = plan_chain(chain, fleet, wanted)
    times.append(time.process_time())
    for outcome in result.outcomes.values():
        without_little_help(result.planner, outcome)
    times.append(time.process_time())
    counterfactuals(result)
    times.append(time.process_time())
    parts = dict(zip(("plan and devices left out", "sparing", "what if"), np.diff(times).tolist(), strict=True))
    return {**parts, "whole": times[-1] - times[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 128], help="hosts of eight devices")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[512, 1536], help="samples per batch, for each number of hosts"
    )
    parser.add_argument("--unequal", type=int, nargs="+", metavar="N", help="fleets of so many unequal devices instead")
    parser.add_argument("--replicas", type=int, default=0, help="the most devices of a stage of these; 0: any number")
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=12288)
    parser.add_argument("--schedules", nargs="+", default=list(TRAINING))
    parser.add_argument("--plans-only", action="store_true", help="without what explains a plan")
    parser.add_argument("--json", metavar="FILE", help="write all rows")
    parser.add_argument("--results", metavar="FILE", help="add all rows to those of other runs")
    arguments = parser.parse_args()
    if arguments.unequal:
        keep(arguments, "unequal", plan_unequal(arguments))
        return
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
            elif (more := next((part for part in MORE if planner.but(memory=part).fits(schedule)), None)) is not None:
                rows[-1]["memory"] = more
            print(f"| {' | '.join(cells(rows[-1]))} |", flush=True)
        total = sum(row["seconds"] for row in rows if row["devices"] == len(fleet))
        print(f"| {len(fleet)} | all | {total:.1f} s | | | | | | |", flush=True)
    keep(arguments, "equal", rows)


def keep(arguments: argparse.Namespace, kind: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a run, and add them to those of other runs."""
    write_json(arguments.json, {"rows": rows})
    if arguments.results:
        path = Path(arguments.results)
        document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_json(arguments.results, document | {kind: [*document.get(kind, ()), *rows]})


def table_of_unequal(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Make the table of unequal devices, of committed rows."""
    lines = []
    for row in rows:
        first = (str(row["devices"]), str(row["layers"]), row.get("schedule", row.get("part", "")))
        plan = (f"{row['step']:.3f} s", f"{row['above']:.2%}", str(row["stages"])) if "step" in row else ("", "", "")
        lines.append((*first, f"{row['seconds']:.1f} s", *plan))
    return ("devices", "layers", "schedule or part", "took", "batch takes", "at most above the best", "stages"), lines


def table_of_equal(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Make the table of equal devices, of committed rows."""
    return HEADS, [cells(row) for row in rows]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Write a line of the table."""
    first = [str(row["devices"]), row["schedule"], f"{row['seconds']:.1f} s"]
    if "step" not in row:
        more = f", but with {row['memory']} times the memory" if "memory" in row else ""
        return [*first, f"no plan was found{more}", *[""] * 5]
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
