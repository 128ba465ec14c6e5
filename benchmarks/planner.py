"""The time of planning a GPT-3-shaped chain (96 blocks, width 12288, both ends) on 64 and on 1024 devices.

    python benchmarks/planner.py [--hosts 8 128] [--width 12288] [--batch 512 1536]
    python benchmarks/planner.py --unequal 8 16 [--replicas 1] [--layers 36] [--plans-only]
    python benchmarks/planner.py --packs

With --packs a perceptron of three layers is planned for three unequal devices as `plan --batch` does it, with passes
and simulation, with several stages on a device and without these.

With --unequal the devices of a fleet are all different, each on a host of its own, and the chain has layers of random
work (the seed is the number of devices). The last rows are all that `penstock plan` asks the planner; --plans-only
leaves them out. --results adds the rows of a run to a file of several, such as benchmarks/results/planner.json.

Every schedule is planned, in a process of its own. Prints one line per cluster and schedule: seconds of that process's
processor time, how much its peak memory grew, and the plan. The run fails where that is more than --promised. The
models and devices are stated in `gpt_chain`, `A100` and `unequal_fleet`; nothing is measured but the planner itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from machine import markdown, write_json
from processes import peak_bytes, resident_bytes
from shapes import gpt_chain

import penstock as ps
from penstock.ir.cluster.cluster import OTHER_HOST, Cluster, Device, LinkClass
from penstock.ir.schedule_names import ALL_SYNCHRONOUS, SYNCHRONOUS, TRAINING
from penstock.passes.costs.prices import shown_seconds
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
    "memory",
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


def apart(work: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Do work in a new process, and add to what it returns how much the memory of that process grew at its peak."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(grown, work, given).result()


def grown(work: Callable[..., dict[str, Any]], given: tuple[Any, ...]) -> dict[str, Any]:
    """Do work, and add to what it returns how much the memory of this process grew at its peak."""
    before = resident_bytes(os.getpid())
    return {**work(*given), "peak": peak_bytes(os.getpid()) - before}


def mib(row: Mapping[str, Any]) -> str:
    """Write how much memory grew; rows of before have no such number."""
    return f"{row['peak'] / 2**20:.0f} MiB" if "peak" in row else ""


def plan_unequal(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan fleets of unequal devices, and print a line for each schedule."""
    rows: list[dict[str, Any]] = []
    print(
        markdown(("devices", "schedule", "planned in", "memory", "batch takes", "at most above the best", "stages"), [])
    )
    for count in arguments.unequal:
        for schedule in arguments.schedules:
            row = apart(search_unequal, count, arguments.layers, arguments.replicas, schedule)
            rows.append(row)
            shown = f"{row['step']:.3f} s | {row['above']:.2%} | {row['stages']}"
            print(f"| {count} | {schedule} | {row['seconds']:.1f} s | {mib(row)} | {shown} |", flush=True)
        total = sum(row["seconds"] for row in rows if row["devices"] == count)
        print(f"| {count} | all | {total:.1f} s | | | | |", flush=True)
        if not arguments.plans_only:
            whole = apart(explained, count, arguments.layers, arguments.replicas, tuple(arguments.schedules))
            for part, seconds in whole["parts"].items():
                rows.append({"devices": count, "layers": arguments.layers, "part": part, "seconds": seconds})
                rows[-1] |= {"peak": whole["peak"]} if part == "whole" else {}
                print(f"| {count} | {part} | {seconds:.1f} s | {mib(rows[-1])} | | | |", flush=True)
    return rows


def search_unequal(count: int, layers: int, replicas: int, schedule: str) -> dict[str, Any]:
    """Plan one schedule for a fleet of unequal devices."""
    chain, fleet = unequal_fleet(count, layers)
    start = time.process_time()
    outcome = Planner(chain, fleet, PlanRequest(64, replicas=replicas)).best(schedule)
    assert outcome is not None
    row = {"devices": count, "layers": layers, "schedule": schedule, "seconds": time.process_time() - start}
    above, stages = outcome.step / outcome.bound - 1, len(outcome.plan.stages)
    return {**row, "step": outcome.step, "above": above, "stages": stages, "replicas": replicas}


def explained(count: int, layers: int, replicas: int, schedules: tuple[str, ...]) -> dict[str, Any]:
    """Plan as the command does, but for simulation, and return the seconds of each part."""
    chain, fleet = unequal_fleet(count, layers)
    wanted = PlanRequest(64, schedules, replicas=replicas)
    times = [time.process_time()]
    result = plan_chain(chain, fleet, wanted)
    times.append(time.process_time())
    for outcome in result.outcomes.values():
        without_little_help(result.planner, outcome)
    times.append(time.process_time())
    counterfactuals(result)
    times.append(time.process_time())
    parts = dict(zip(("plan and devices left out", "sparing", "what if"), np.diff(times).tolist(), strict=True))
    return {"parts": {**parts, "whole": times[-1] - times[0]}}


def plan_packs() -> list[dict[str, Any]]:
    """Plan with several stages on a device and without, and print a line for each."""
    rows = [apart(search_packs, kinds) for kinds in (SYNCHRONOUS, ALL_SYNCHRONOUS)]
    heads, lines = table_of_packs(rows)
    print(markdown(heads, lines))
    return rows


def search_packs(schedules: Sequence[str]) -> dict[str, Any]:
    """Plan a perceptron of three layers on three devices, each on a host of its own, that compute unequally fast."""
    from penstock.models import write_mlp

    devices = tuple(Device(f"cpu:{i}", host=f"h{i}", flops=flops) for i, flops in enumerate((3e9, 2e9, 1e9)))
    cluster = Cluster(devices, classes=(LinkClass(OTHER_HOST, 1e9, 1e-4),))
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3))
    with TemporaryDirectory() as folder:
        path = write_mlp(Path(folder) / "model.onnx", (256, 512, 512, 64))
        start = time.process_time()
        plan = ps.plan_best(
            lambda size: ps.from_onnx(path, dims={"batch": size}),
            cluster,
            training,
            batch=64,
            sizes=(4, 8, 16, 32, 64),
            schedules=schedules,
            shard="none",
        )
        seconds = time.process_time() - start
    assert plan.search is not None
    assert plan.module.schedule is not None
    tried, chosen = [*plan.search.packs], plan.module.schedule.name
    return {"tried": tried, "seconds": seconds, "step": plan.predicted.step, "chosen": chosen}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 128], help="hosts of eight devices")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[512, 1536], help="samples per batch, for each number of hosts"
    )
    parser.add_argument("--unequal", type=int, nargs="+", metavar="N", help="fleets of so many unequal devices instead")
    parser.add_argument("--packs", action="store_true", help="several stages on a device instead")
    parser.add_argument("--replicas", type=int, default=0, help="the most devices of a stage of these; 0: any number")
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=12288)
    parser.add_argument("--schedules", nargs="+", default=list(TRAINING))
    parser.add_argument("--plans-only", action="store_true", help="without what explains a plan")
    parser.add_argument("--promised", type=float, default=1024, metavar="MIB", help="fail where memory grows by more")
    parser.add_argument("--json", metavar="FILE", help="write all rows")
    parser.add_argument("--results", metavar="FILE", help="add all rows to those of other runs")
    arguments = parser.parse_args()
    if arguments.unequal:
        return keep(arguments, "unequal", plan_unequal(arguments))
    if arguments.packs:
        return keep(arguments, "packs", plan_packs())
    rows: list[dict[str, Any]] = []
    print(markdown(HEADS, []), flush=True)
    for hosts, batch in zip(arguments.hosts, arguments.batch, strict=True):
        for schedule in arguments.schedules:
            rows.append(apart(search_equal, hosts, batch, arguments.layers, arguments.width, schedule))
            print(f"| {' | '.join(cells(rows[-1]))} |", flush=True)
        total = sum(row["seconds"] for row in rows if row["devices"] == 8 * hosts)
        print(f"| {8 * hosts} | all | {total:.1f} s | | | | | | | |", flush=True)
    return keep(arguments, "equal", rows)


def search_equal(hosts: int, batch: int, layers: int, width: int, schedule: str) -> dict[str, Any]:
    """Plan one schedule of a GPT for hosts of eight equal devices."""
    chain = gpt_chain(layers, width, positions=2048, vocabulary=50257)
    fleet = fleet_of(equal_hosts(hosts, 8, A100, (2.5e11, 5e-6), (2.5e10, 1e-5)))
    start = time.process_time()
    planner = Planner(chain, fleet, PlanRequest(batch))
    outcome = planner.best(schedule)
    row: dict[str, Any] = {"devices": len(fleet), "schedule": schedule, "seconds": time.process_time() - start}
    if outcome is not None:
        plan = outcome.plan
        row |= {
            "step": outcome.step,
            "of_bound": outcome.bound / outcome.step,
            "stages": len(plan.stages),
            "replicas": sorted({len(stage.devices) for stage in plan.stages}),
            "microbatches": [plan.count, plan.size],
            "recompute": sum(stage.recompute for stage in plan.stages),
        }
    elif (more := next((part for part in MORE if planner.but(memory=part).fits(schedule)), None)) is not None:
        row["memory"] = more
    return row


def keep(arguments: argparse.Namespace, kind: str, rows: list[dict[str, Any]]) -> int:
    """Write the rows of a run, add them to those of other runs, and return the exit status."""
    write_json(arguments.json, {"rows": rows})
    if arguments.results:
        path = Path(arguments.results)
        document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_json(arguments.results, document | {kind: [*document.get(kind, ()), *rows]})
    above = [row for row in rows if row.get("peak", 0) > arguments.promised * 2**20]
    for row in above:
        print(f"{row['devices']} devices, {row.get('schedule', row.get('part'))}: {mib(row)} are more than promised")
    return 1 if above else 0


def table_of_unequal(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Make the table of unequal devices, of committed rows."""
    lines = []
    for row in rows:
        first = (str(row["devices"]), str(row["layers"]), row.get("schedule", row.get("part", "")))
        plan = (f"{row['step']:.3f} s", f"{row['above']:.2%}", str(row["stages"])) if "step" in row else ("", "", "")
        lines.append((*first, f"{row['seconds']:.1f} s", mib(row), *plan))
    heads = (
        "devices",
        "layers",
        "schedule or part",
        "took",
        "memory",
        "batch takes",
        "at most above the best",
        "stages",
    )
    return heads, lines


def table_of_equal(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Make the table of equal devices, of committed rows."""
    return HEADS, [cells(row) for row in rows]


def table_of_packs(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Make the table of plans with several stages on a device, of committed rows."""
    lines = [
        (
            ", ".join(row["tried"]) or "none",
            f"{row['seconds']:.1f} s",
            mib(row),
            shown_seconds(row["step"]),
            row["chosen"],
        )
        for row in rows
    ]
    return ("schedules for packs that are tried", "took", "memory", "batch takes", "chosen"), lines


def cells(row: Mapping[str, Any]) -> list[str]:
    """Write a line of the table."""
    first = [str(row["devices"]), row["schedule"], f"{row['seconds']:.1f} s", mib(row)]
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
    raise SystemExit(main())
