"""The shapes of the PipeDream-2BW paper, planned and simulated: 2bw against other ways to train.

    python benchmarks/paper_shapes.py [--devices 8 64] [--models 1.3B 2.2B 3.8B] [--batch N ...] [--json FILE]

The other ways are eager-2bw, 1f1b (the paper's flush), gpipe, tensor parallelism, and no pipelining. Nothing runs on
GPUs. Each schedule gets its own depth, replicas, microbatch size and recomputation: the planner's best plans restricted
to it are played event by event (passes/simulator/simulate.py) with the same times, links and network cards, and the fastest
counts. Assumed, as the paper does not say all of it:

    model    24 blocks of width 2048 (1.3 B), 2688 (2.2 B), 3552 (3.8 B), 32 heads, 512 positions, vocabulary 51200; 16
             bits, Adam with 32-bit state; scores of attention are stored, as they were then
    device   V100: 16 GiB, of which 1 GiB is used; 125e12 operations per second of which products reach 40 %; 9e11
             bytes/s of memory
    links    inside a server 2.5e10 bytes/s and 10 us per hop; a network card per server of 10 Gb/s (1.25e9 bytes/s), 50
             us

Two comparisons are formulas, with the same seconds and bytes, the best microbatch size and depth by trying all:

    tensor    every block on t devices: seconds / t, and 4 all-reduces of 2 bytes * samples * positions * width per
              block and microbatch (6 with recomputation), a ring over t devices, exposed; N/t copies, whose gradients
              are summed once per batch. t = N is one copy over all servers; "t <= 8" stays within a server.
    no pipe   d stages of equally many blocks, one microbatch at a time through all of them; N/d copies, gradients
              summed once per batch.
"""

from __future__ import annotations

import argparse
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from machine import write_json
from shapes import gpt_chain

from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.schedule import Action
from penstock.passes.planner.chain import Chain, Table
from penstock.passes.planner.fleet import equal_hosts, fleet_of
from penstock.passes.planner.plan import PipelinePlan, PlanRequest
from penstock.passes.planner.planner import Outcome, Planner
from penstock.passes.schedules.late_updates import sum_late
from penstock.passes.schedules.schedule import SCHEDULES, build_schedule
from penstock.passes.simulator.machine import machine_of
from penstock.passes.simulator.simulate import simulate
from penstock.passes.simulator.wiring import wire_chain

WIDTHS = {"1.3B": 2048, "2.2B": 2688, "3.8B": 3552}
BLOCKS, POSITIONS, HEADS, VOCABULARY = 24, 512, 32, 51200
EFFICIENCY, BASE = 0.4, 2**30
V100 = Device("", "cuda", target="sm_70", flops=1.25e14, bandwidth=9e11, spaces=(("hbm", 16 * 2**30),))
INSIDE, ACROSS = (2.5e10, 1e-5), (1.25e9, 5e-5)
CANDIDATES = 6
PIPELINES = ("2bw", "eager-2bw", "1f1b", "gpipe")


def cluster_of(devices: int) -> Cluster:
    return equal_hosts(max(1, devices // 8), min(devices, 8), V100, INSIDE, ACROSS)


def chain_of(model: str) -> Chain:
    return gpt_chain(
        BLOCKS, WIDTHS[model], positions=POSITIONS, vocabulary=VOCABULARY, heads=HEADS, efficiency=EFFICIENCY
    )


def play(chain: Chain, cluster: Cluster, plan: PipelinePlan) -> float:
    """Simulate a plan, and return its seconds per batch in a long run."""
    table, stages = Table(chain, plan.size), plan.stages
    schedule = build_schedule(plan.schedule, len(stages), plan.count, [stage.shares for stage in stages])
    wired = wire_chain(sum_late(schedule, SCHEDULES[plan.schedule].delay))
    devices = dict(enumerate(cluster.devices[i] for i in plan.devices))

    def seconds(rank: int, action: Action) -> float:
        stage = stages[action.stage]
        row = [float(column[stage.last] - column[stage.first]) for column in table.times(devices[rank])]
        again = row[3] if stage.recompute else 0.0
        return {"F": row[0], "B": row[1] + again, "U": row[4]}.get(action.kind, 0.0)

    def nbytes(phase: str, source: int, target: int) -> float:
        return float(table.out[stages[source].last] if phase == "F" else table.back[stages[target].last])

    def reduced(stage: int) -> float:
        return float(table.grads[stages[stage].last] - table.grads[stages[stage].first])

    batches = 4 if SCHEDULES[plan.schedule].delay else 3
    return simulate(
        wired, batches, seconds, nbytes, machine_of(cluster, {r: d.name for r, d in devices.items()}), reduced=reduced
    ).step_seconds


def ring(nbytes: float, devices: int, spread: int, per_host: int = 8) -> float:
    """Return seconds of an all-reduce over `devices`.

    If it leaves a server at all, `spread` rings cross each network card.
    """
    if devices == 1:
        return 0.0
    crosses = devices * spread > per_host
    bandwidth, latency = (ACROSS[0] / spread, ACROSS[1]) if crosses else INSIDE
    return 2 * (devices - 1) * (latency + nbytes / devices / bandwidth)


def totals(chain: Chain, b: int) -> tuple[float, float, float, Table]:
    """Return seconds of a microbatch forward and backward, of a second forward, and of an update, on one device."""
    table = Table(chain, b)
    row = [float(column[-1]) for column in table.times(V100)]
    return row[0] + row[1], row[3], row[4], table


def tensor_parallel(chain: Chain, model: str, devices: int, batch: int, sizes: list[int]) -> tuple[float, str]:
    """Return the best of all microbatch sizes and these numbers of devices per copy."""
    best = (float("inf"), "does not fit")
    width, params = WIDTHS[model], sum(x.params for x in chain.layers)
    states = sum(x.params + x.grads + x.state for x in chain.layers)
    for t in sizes:
        copies = devices // t
        for b in [b for b in range(1, batch // copies + 1) if batch % (b * copies) == 0]:
            both, again, update, table = totals(chain, b)
            for recompute in (False, True):
                saved = (
                    BLOCKS * int(table.out[1]) + int(table.saved[2] - table.saved[1]) // t
                    if recompute
                    else int(table.saved[-1]) // t
                )
                if states // t + saved + BASE > V100.spaces[0][1]:
                    continue
                exchange = (6 if recompute else 4) * BLOCKS * ring(2.0 * b * POSITIONS * width, t, 1)
                count = batch // (b * copies)
                step = (
                    count * ((both + (again if recompute else 0.0)) / t + exchange)
                    + ring(params / t, copies, t)
                    + update / t
                )
                best = min(best, (step, f"t={t} x {copies}, {count} of {b}" + (", recompute" if recompute else "")))
    return best


def no_pipelining(chain: Chain, devices: int, batch: int) -> tuple[float, str]:
    """Send one microbatch at a time through d stages of equally many blocks. The ends are on the first and last."""
    best = (float("inf"), "does not fit")
    for d in [d for d in (1, 2, 3, 4, 6, 8, 12, 24) if devices % d == 0]:
        copies, each = devices // d, BLOCKS // d
        for b in [b for b in range(1, batch // copies + 1) if batch % (b * copies) == 0]:
            both, _, update, table = totals(chain, b)
            cuts = [0, *(1 + each * s for s in range(1, d)), BLOCKS + 2]
            parts = list(pairwise(cuts))
            held = [
                sum(int(x[last] - x[first]) for x in (table.params, table.grads, table.state, table.saved))
                for first, last in parts
            ]
            if max(held) + BASE <= V100.spaces[0][1]:
                trips = sum(2 * (INSIDE[1] + float(table.out[c]) / INSIDE[0]) for c in cuts[1:-1])
                count = batch // (b * copies)
                grads = max(float(table.grads[last] - table.grads[first]) for first, last in parts)
                best = min(
                    best,
                    (count * (both + trips) + ring(grads, copies, d) + update / d, f"d={d} x {copies}, {count} of {b}"),
                )
    return best


@cache
def planned(
    model: str, devices: int, batch: int, schedule: str, recompute: str = "auto"
) -> tuple[float, float, str] | None:
    """Return predicted and simulated seconds of a schedule's plan, and its description.

    The plan is the one of several candidates that the simulation finds fastest. They are the best of the cost model in
    each layout (the replicas on one server, and their number).
    """
    chain, cluster = chain_of(model), cluster_of(devices)
    planner = Planner(chain, fleet_of(cluster), PlanRequest(batch, (schedule,), recompute, base=BASE))
    best: dict[str, Outcome] = {}
    for outcome in planner.candidates(schedule, 1.0 if devices <= 8 else 1.5):
        best.setdefault(outcome.layout.name, outcome)
    if not best:
        return None
    tried = {outcome.plan: outcome for outcome in list(best.values())[:CANDIDATES]}
    played = {plan: play(chain, cluster, plan) for plan in tried}
    plan = min(played, key=lambda plan: played[plan])
    counts = sorted({len(stage.devices) for stage in plan.stages})
    again = sum(stage.recompute for stage in plan.stages)
    text = f"d={len(plan.stages)} x {'/'.join(map(str, counts))}, {plan.count} of {plan.size}" + (
        f", recompute {again}" if again else ""
    )
    return tried[plan].step, played[plan], text


def summary(lines: list[dict[str, Any]]) -> str:
    """Write one row per case: samples per second of each way, and the speed of 2bw over others."""
    ways = [*PIPELINES, "tensor, t <= 8", "tensor, t = N", "no pipelining"]
    cases: dict[tuple[int, str, int], dict[str, float]] = {}
    for line in lines:
        cases.setdefault((line["devices"], line["model"], line["batch"]), {})[line["how"]] = (
            line["batch"] / line["step"]
        )
    heads = ["devices", "model", "batch", *ways, "2bw / 1f1b", "2bw / gpipe", "2bw / tensor, t <= 8"]
    rows = [heads, ["---"] * len(heads)]
    for case, speeds in cases.items():
        ratios = [speeds["2bw"] / speeds[how] if speeds[how] else inf for how in ("1f1b", "gpipe", "tensor, t <= 8")]
        rows.append(
            [
                *map(str, case),
                *(f"{speeds[how]:.1f}" if how in speeds else "" for how in ways),
                *(f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def ways_of(model: str, devices: int, batch: int, schedules: list[str]) -> list[tuple[str, float, float, str]]:
    """Return for each way to train its name, simulated seconds, seconds by its formula, and a description."""
    rows: list[tuple[str, float, float, str]] = []
    for schedule in schedules:
        plan = planned(model, devices, batch, schedule)
        rows.append((schedule, plan[1], plan[0], plan[2]) if plan else (schedule, inf, 0.0, "does not fit"))
    chain, powers = chain_of(model), [t for t in (1, 2, 4, 8, 16, 32, 64) if t <= devices]
    step, text = tensor_parallel(chain, model, devices, batch, powers[:4])
    rows.append(("tensor, t <= 8", step, step, text))
    if devices > 8:
        step, text = tensor_parallel(chain, model, devices, batch, [devices])
        rows.append(("tensor, t = N", step, step, text))
    step, text = no_pipelining(chain, devices, batch)
    return [*rows, ("no pipelining", step, step, text)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--models", nargs="+", default=list(WIDTHS))
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[],
        help="samples per batch (64, 512 for 8 devices; 128, 512, 2048 for 64)",
    )
    parser.add_argument("--schedules", nargs="+", default=list(PIPELINES), choices=PIPELINES)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    lines = []
    print("| devices | model | batch | how | plan | samples/s | 2bw is faster by | formula / simulation |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for devices in arguments.devices:
        for model in arguments.models:
            for batch in arguments.batch or ([64, 512] if devices <= 8 else [128, 512, 2048]):
                rows = ways_of(model, devices, batch, arguments.schedules)
                for how, step, formula, text in rows:
                    ratio = step / rows[0][1]
                    line = {
                        "devices": devices,
                        "model": model,
                        "batch": batch,
                        "how": how,
                        "plan": text,
                        "step": step,
                        "formula": formula,
                        "ratio": ratio,
                    }
                    lines.append(line)
                    compared = f"{formula / step:.3f}" if how in PIPELINES and step < inf else ""
                    speed = f"{batch / step:.1f}" if step < inf else ""
                    print(
                        f"| {devices} | {model} | {batch} | {how} | {text} | {speed} | "
                        f"{f'{ratio:.2f}' if speed else ''} | {compared} |",
                        flush=True,
                    )
    for model in arguments.models:
        pair = [planned(model, 8, 512, "2bw", mode) for mode in ("none", "all")] if 8 in arguments.devices else []
        if all(pair) and pair:
            print(
                f"\nrecomputation everywhere, 2bw, {model}, 8 devices, batch 512: {pair[1][1] / pair[0][1]:.2f} times "
                f"as long ({pair[0][2]}; {pair[1][2]})"
            )
    print(f"\n{summary(lines)}")
    write_json(arguments.json, {"lines": lines})


if __name__ == "__main__":
    main()
