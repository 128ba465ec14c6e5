"""Where the chosen plan lands among all plans that could have been chosen, each of them run for real.

    python benchmarks/truth.py --plans --json plans.json         goes on from the file if it is there

A chain of eight equal products trains on two devices of this host, the second with half a core (a control group; root). The plans are those of one device,
and those of two in both orders, cut before each of the products, under 1f1b and under 2bw: 30 plans. The chosen ones are what `ps.plan` gives for a cluster
file that says what the devices are, for each schedule: it may cut elsewhere. Each plan trains for some steps in worker processes, in turns: a round of
all plans, then another one of the best and the chosen ones. The time of a plan is the median of its steps.

Goal: the chosen plan is at most 5 % slower than the best one that was run under the same schedule; exit code 1 otherwise.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truth import load, run, save
from truth_machines import Configuration, quota_groups

import penstock as ps
from penstock.backends.bundle import open_bundle
from penstock.ir.cluster import Cluster, Device
from penstock.models import write_mlp

PRODUCTS, WIDTH, ROWS = 8, 768, 384
SLOW = 0.5
SCHEDULES = ("1f1b", "2bw")
CHOSEN = "chosen"
GOAL = 1.05
FAST_DEVICE = Device("fast", flops=5e10, bandwidth=1e10)
SLOW_DEVICE = Device("slow", flops=5e10 * SLOW, bandwidth=1e10 * SLOW)


@dataclass(frozen=True)
class Candidate:
    """`order` are the devices of the stages; a cut of None is the planner's own."""

    schedule: str
    order: tuple[str, ...]
    cut: str | None

    @property
    def name(self) -> str:
        return f"{self.schedule} {'>'.join(self.order)} {self.cut or CHOSEN}"

    @property
    def configuration(self) -> Configuration:
        return Configuration("mlp", len(self.order), self.schedule, quotas=tuple(SLOW if name == "slow" else 1.0 for name in self.order))

    @property
    def cluster(self) -> Cluster:
        return Cluster(tuple(SLOW_DEVICE if name == "slow" else FAST_DEVICE for name in self.order))


def candidates(model: ps.Model) -> Iterator[Candidate]:
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    for schedule in SCHEDULES:
        yield Candidate(schedule, ("fast",), None)
        for order in (("fast", "slow"), ("slow", "fast")):
            for cut in products[1:]:
                yield Candidate(schedule, order, cut)
        yield Candidate(schedule, ("fast", "slow"), None)


def time_plan(candidate: Candidate, model: ps.Model, rounds: int) -> dict[str, Any]:
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-3), microbatches=4)
    split_at = [candidate.cut] if candidate.cut else []
    plan = ps.plan(model, candidate.cluster, training, schedule=candidate.schedule, split_at=split_at)
    with tempfile.TemporaryDirectory(prefix="truth-") as folder, quota_groups(candidate.configuration) as groups:
        bundle = open_bundle(ps.compile(plan, Path(folder) / "bundle"))
        found = run(candidate.configuration, bundle, groups, rounds)
    starts = [note.text.rpartition(" ")[2] for note in plan.module.notes if note.origin == "partition"]
    return {
        "name": candidate.name,
        "schedule": candidate.schedule,
        "chosen": candidate.cut is None and len(candidate.order) > 1,
        "starts": starts,
        "steps": found["steps"],
    }


def time_plans(path: Path | None, rounds: int) -> int:
    report: dict[str, Any] = load(path)
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in report["rows"]}
    with tempfile.TemporaryDirectory(prefix="truth-") as folder:
        model = ps.from_onnx(write_mlp(Path(folder) / "model.onnx", [WIDTH] * (PRODUCTS + 1), batch=ROWS))
        listed = list(candidates(model))
        again = []
        for turn in (0, 1):
            for candidate in listed if turn == 0 else again:
                row = rows.get(candidate.name)
                if row is not None and row["turns"] > turn:
                    continue
                found = time_plan(candidate, model, rounds)
                steps = [*(row["steps"] if row else []), *found["steps"]]
                rows[candidate.name] = found | {"steps": steps, "turns": turn + 1, "seconds": statistics.median(steps)}
                save(path, {"rows": list(rows.values()), "known": {}})
                print(f"{candidate.name}: {rows[candidate.name]['seconds'] * 1e3:.1f} ms per step", file=sys.stderr, flush=True)
            for schedule in SCHEDULES:
                own = sorted((c for c in listed if c.schedule == schedule), key=lambda c: float(rows[c.name]["seconds"]))
                again += [c for c in own if c in own[:3] or rows[c.name]["chosen"]]
    print(table(rows.values()))
    return int(any(ratio > GOAL for ratio in landings(rows.values()).values()))


def landings(rows: Any) -> dict[str, float]:
    """The chosen plan's time in times of the best one, by schedule."""
    found = {}
    for schedule in SCHEDULES:
        own = [row for row in rows if row["schedule"] == schedule]
        chosen = next(row for row in own if row["chosen"])
        found[schedule] = chosen["seconds"] / min(row["seconds"] for row in own)
    return found


def table(rows: Any) -> str:
    lines = ["| schedule | plan | ms per step | of the best |", "| --- | --- | --- | --- |"]
    for schedule in SCHEDULES:
        own: list[Mapping[str, Any]] = sorted((row for row in rows if row["schedule"] == schedule), key=lambda row: float(row["seconds"]))
        for place, row in enumerate(own):
            if place < 3 or row["chosen"] or place == len(own) - 1:
                told = f"{row['name'].partition(' ')[2]}{' (starts at ' + row['starts'][-1] + ')' if row['chosen'] else ''}, {place + 1} of {len(own)}"
                lines.append(f"| {schedule} | {told} | {row['seconds'] * 1e3:.1f} | {row['seconds'] / own[0]['seconds']:.3f} |")
    return "\n".join(lines)
