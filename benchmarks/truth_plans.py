"""The rank of the chosen plan among all plans that could have been chosen, each of them run for real.

    python benchmarks/truth.py --plans --json plans.json         continues a file that exists

A chain of eight equal products trains on two devices of this host, the second with half a core (a control group; root).
The plans are those of one device, and those of two in both orders, cut before each of the products, under 1f1b and
under 2bw: 30 plans. Two more for each schedule are chosen, for a cluster that `penstock doctor` measured here, the slow
device within its quota. `ps.plan` takes devices in their order but may cut anywhere; the planner (`penstock plan
--batch`) chooses everything. Each plan trains for some steps in worker processes, in turns: a round of all plans, then
two more of the best and the chosen ones. The time of a plan is the median of its steps; predicted is the figure of
`penstock plan`.

Goal: the planner's plan is at most 5 % slower than the best one that was run under the same schedule; exit code 1
otherwise.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from truth_machines import Configuration, prefixes, quota_groups
from truth_runs import batches, load, run, save

import penstock as ps
from penstock import plan_best
from penstock.backends.bundle.format import open_bundle
from penstock.doctor.examine import examine
from penstock.ir.cluster.cluster import Cluster
from penstock.models import write_mlp
from penstock.planning.predict import predict
from penstock.runtime.messages.control import DataSpec

PRODUCTS, WIDTH, ROWS, MICROBATCHES = 8, 1024, 512, 4
SLOW = 0.5
SCHEDULES = ("1f1b", "2bw")
CUT, PLANNED = "cut by ps.plan", "planner's"
GOAL = 1.05
TURNS = 3


@dataclass(frozen=True)
class Candidate:
    """A plan to run.

    `order` are the devices of the stages; `cut` is a place, or the name of the pass that chooses it.
    """

    schedule: str
    order: tuple[str, ...]
    cut: str

    @property
    def name(self) -> str:
        return f"{self.schedule} {'>'.join(self.order)} {self.cut}"


def measured_here() -> Cluster:
    """Measure the two devices with the doctor.

    The fast one is measured beside another that computes, the slow one within its quota, where half a core does less
    than half of the work of a whole one.
    """
    report = examine((1, 1), say=_say)
    assert report is not None
    _say("\n".join(report.problems))
    alone = Configuration("mlp", 1, "forward", quotas=(SLOW,))
    with quota_groups(alone) as groups, tempfile.TemporaryDirectory(prefix="truth-") as folder:
        file = Path(folder) / "slow.toml"
        command = [
            *prefixes(alone, groups)[0],
            sys.executable,
            "-m",
            "penstock",
            "doctor",
            "--threads",
            "1",
            "--cluster-out",
            str(file),
        ]
        subprocess.run(command, stdout=sys.stderr, check=True, timeout=300)
        slow = replace(Cluster.load(file).devices[0], name="slow", spaces=())
    return Cluster((replace(report.cluster.devices[0], name="fast", spaces=()), slow), classes=report.cluster.classes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def told_cluster(cluster: Cluster) -> str:
    fast = cluster.device("fast")
    slow = cluster.device("slow").flops / fast.flops
    return (
        f"the slow device does {slow:.2f} of the products of the fast one; a core: {fast.flops / 1e9:.0f} GFLOP/s, "
        f"{fast.bandwidth / 1e9:.1f} GB/s, {fast.message_overhead * 1e6:.0f} us and "
        f"{1e9 / fast.socket_bandwidth:.2f} ns per byte for an end of a message"
    )


def candidates(model: ps.Model) -> Iterator[Candidate]:
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    for schedule in SCHEDULES:
        yield Candidate(schedule, ("fast",), "alone")
        for order in (("fast", "slow"), ("slow", "fast")):
            for cut in products[1:]:
                yield Candidate(schedule, order, cut)
        yield Candidate(schedule, ("fast", "slow"), CUT)
        yield Candidate(schedule, ("fast", "slow"), PLANNED)


def time_plan(candidate: Candidate, model: ps.Model, whole: Cluster) -> dict[str, Any]:
    cluster = replace(whole, devices=tuple(whole.device(name) for name in candidate.order))
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-3), microbatches=MICROBATCHES)
    if candidate.cut == PLANNED:
        batch = ROWS * MICROBATCHES
        plan = plan_best(
            lambda size: model, cluster, training, batch=batch, schedules=(candidate.schedule,), recompute="none"
        )
    else:
        split_at = [] if candidate.cut in (CUT, "alone") else [candidate.cut]
        plan = ps.plan(model, cluster, training, schedule=candidate.schedule, split_at=split_at)
    order = plan.module.rank_devices()
    configuration = Configuration(
        "mlp", len(order), candidate.schedule, quotas=tuple(SLOW if name == "slow" else 1.0 for name in order)
    )
    with tempfile.TemporaryDirectory(prefix="truth-") as folder, quota_groups(configuration) as groups:
        bundle = open_bundle(ps.compile(plan, Path(folder) / "bundle"))
        # From a file: making random numbers would be work of the first stage that no plan counts.
        file = Path(folder) / "data.npz"
        np.savez(file, **next(batches(bundle.module, 1)))
        steps = run(configuration, bundle, groups, DataSpec(str(file)))
    starts = [
        note.text.rpartition(" ")[2]
        for note in plan.module.notes
        if note.origin == "partition" and " starts at " in note.text
    ]
    description = f"{'>'.join(order)}{' from ' + ', '.join(starts[1:]) if starts[1:] else ''}"
    expected = predict(plan.module).step
    return {
        "name": candidate.name,
        "schedule": candidate.schedule,
        "cut": candidate.cut,
        "told": description,
        "steps": steps,
        "predicted": expected,
    }


def time_plans(path: Path | None) -> int:
    report: dict[str, Any] = load(path)
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in report["rows"]}
    with tempfile.TemporaryDirectory(prefix="truth-") as folder:
        model = ps.from_onnx(write_mlp(Path(folder) / "model.onnx", [WIDTH] * (PRODUCTS + 1), batch=ROWS))
        listed = list(candidates(model))
        if "cluster" not in report["known"]:
            report["known"]["cluster"] = measured_here().to_toml()
            save(path, report)
        (Path(folder) / "cluster.toml").write_text(report["known"]["cluster"], encoding="utf-8")
        cluster = Cluster.load(Path(folder) / "cluster.toml")
        print(told_cluster(cluster), file=sys.stderr, flush=True)
        again: list[Candidate] = []
        for turn in range(TURNS):
            for candidate in listed if turn == 0 else again:
                row = rows.get(candidate.name)
                if row is not None and row["turns"] > turn:
                    continue
                result = time_plan(candidate, model, cluster)
                steps = [*(row["steps"] if row else []), *result["steps"]]
                rows[candidate.name] = result | {"steps": steps, "turns": turn + 1, "seconds": statistics.median(steps)}
                save(path, report | {"rows": list(rows.values())})
                print(
                    f"{candidate.name}: {rows[candidate.name]['seconds'] * 1e3:.1f} ms per step",
                    file=sys.stderr,
                    flush=True,
                )
            again = []
            for schedule in SCHEDULES:
                ranking = sorted(
                    (c for c in listed if c.schedule == schedule), key=lambda c: float(rows[c.name]["seconds"])
                )
                again += [c for c in ranking if c in ranking[:3] or c.cut in (CUT, PLANNED)]
    print(table(rows.values()))
    return int(any(ratio > GOAL for ratio in landings(rows.values()).values()))


def landings(rows: Any) -> dict[str, float]:
    """Return the planner's time over that of the best plan, by schedule."""
    ratios = {}
    for schedule in SCHEDULES:
        plans = [row for row in rows if row["schedule"] == schedule]
        chosen = next(row for row in plans if row["cut"] == PLANNED)
        ratios[schedule] = chosen["seconds"] / min(row["seconds"] for row in plans)
    return ratios


def table(rows: Any) -> str:
    lines = [
        "| schedule | plan | place | ms per step | of the best | predicted ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for schedule in SCHEDULES:
        ranking: list[Mapping[str, Any]] = sorted(
            (row for row in rows if row["schedule"] == schedule), key=lambda row: float(row["seconds"])
        )
        for place, row in enumerate(ranking):
            chosen = row["cut"] in (CUT, PLANNED, "alone")
            if place < 3 or chosen or place == len(ranking) - 1:
                description = f"{row['cut'] + ': ' if chosen else ''}{row['told']}"
                cells = (
                    schedule,
                    description,
                    f"{place + 1} of {len(ranking)}",
                    f"{row['seconds'] * 1e3:.1f}",
                    f"{row['seconds'] / ranking[0]['seconds']:.3f}",
                    f"{row['predicted'] * 1e3:.1f}",
                )
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
