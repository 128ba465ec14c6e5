"""The chosen plan of drawn clusters beside the best of all plans, run with timed kernels over shaped links.

    python benchmarks/best_of_all.py --json best_of_all.json               continues a file that exists: an hour
    python benchmarks/best_of_all.py --json best_of_all.json --minutes 20  as many cells as can be begun in that time
    python benchmarks/best_of_all.py --json best_of_all.json --only 3-mlp

Twenty clusters are drawn once, with two to four unequal devices. Each device is a host with a network card of a drawn
rate (a network namespace behind a token bucket, namespaces.py; root, iproute2 with tc). In every fourth cluster two
hosts have two equal devices each, and stages may be teams of them. A cell is a cluster and one of three models.

A kernel is a sleep of its predicted time (timed_stages.py), so that devices need no cores. All else is the runtime's
own: schedules, messages, collectives, updates. Ends of messages have the rates that `penstock doctor` measures here.

Plans are listed whose stages begin at seven places of the model: of those where about as much work lies between them,
the ones that fewest bytes cross. Listed are every choice and order of devices, up to two of them on a stage with every
way to share microbatches out, under 1f1b and zb-1f1b, and each order of devices with two stages on each under
interleaved and zb-v; of devices that can be exchanged, one way. Those of the first kind that take at most one and a half
times as long as the fastest by the planner's formulas are simulated, and all others. The best four are run, and two that
are drawn among those of at most one and a half times their time. Beside them runs the chosen plan, that of `penstock
plan --batch`; and where it has teams, the best one without.

Ratios are those of medians of steps, against the fastest rival: below 1 the chosen plan is the fastest. Its cuts may be
at more places, and its teams are not listed. Goals: it takes at most 1.10 of the best rival, in every cell, and
predictions are within 10 % in the median. The exit code is 1 where one is missed, or a cell failed.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from cell_options import begin_cells, cell_parser
from held_back import same_program
from held_back_clusters import parsed
from machine import load as load_of_machine
from machine import markdown, processor, system, versions
from namespaces import Hosts, available
from processes import awake
from shaped_links import PAYLOAD
from truth_runs import batches, load, save

import penstock as ps
from penstock.doctor.examine import examine
from penstock.ir.cluster.cluster import OTHER_HOST, Cluster, Device, Host, LinkClass
from penstock.ir.schedule_names import ALL_SYNCHRONOUS, PACKED, WRAPPED
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.passes.planner.cost import judge as by_formulas
from penstock.passes.planner.packed import judge_packs
from penstock.passes.planner.plan import PipelinePlan, StagePlan
from penstock.passes.planner.refine import SimulatedSteps
from penstock.passes.schedules.schedule import PACK_SCHEDULES
from penstock.runtime.launch.local import thread_environment
from penstock.support.errors import PenstockError

COUNT, SEED, MICROBATCHES = 20, 26, 4
# Devices are this many times as slow as a core of this machine, and by these factors among themselves.
SLOWER, SPEEDS = 8.0, (1.0, 0.75, 0.5, 0.35)
RATES = (12.5e6, 25e6, 50e6)
LATENCY = 100e-6
SCHEDULES = ("1f1b", "zb-1f1b")
BEST, OTHERS, NEAR = 4, 2, 1.5
# Most devices of a stage of the plans that are listed, and the number of places where later stages may begin.
TOGETHER, PLACES = 2, 7
_PORT, _SECONDS = 29600, 300.0
CHOSEN, ALONE = "chosen", "best without teams"


@dataclass(frozen=True)
class Drawn:
    """A cluster: the speed of each host's devices, how many it has, and the bytes per second of its card."""

    number: int
    speeds: tuple[float, ...]
    each: int
    rate: float

    @property
    def hosts(self) -> list[str]:
        return [f"h{i}" for i in range(len(self.speeds))]

    def cluster(self, measured: Cluster) -> Cluster:
        """Return the cluster, with slower devices of the kind that was measured."""
        whole = measured.devices[0]
        devices = tuple(
            _slowed(whole, speed / SLOWER, f"{host}.{i}", host)
            for host, speed in zip(self.hosts, self.speeds, strict=True)
            for i in range(self.each)
        )
        bandwidth = self.rate * PAYLOAD
        hosts = tuple(Host(name, interface="eth0", nic_bandwidth=bandwidth) for name in self.hosts)
        within = tuple(c for c in measured.classes if c.kind != OTHER_HOST)
        return Cluster(devices, hosts=hosts, classes=(*within, LinkClass(OTHER_HOST, bandwidth, LATENCY)))

    def __str__(self) -> str:
        speeds = " ".join(f"{self.each}x{speed:g}" if self.each > 1 else f"{speed:g}" for speed in self.speeds)
        return f"{speeds}, cards of {self.rate / 1e6:g} MB/s"


def _slowed(measured: Device, speed: float, name: str, host: str) -> Device:
    rates = {which: getattr(measured, which) * speed for which in ("flops", "bandwidth", "cache_bandwidth")}
    return replace(measured, name=name, host=host, spaces=(), **rates)


def draw() -> Iterator[Drawn]:
    """Draw the clusters: two to four hosts of unequal devices, or two hosts of two equal devices."""
    chance = random.Random(SEED)
    for number in range(COUNT):
        each = 2 if number % 4 == 3 else 1
        size = 2 if each == 2 else 2 + number % 3
        speeds = tuple(chance.choice(SPEEDS) for _ in range(size))
        yield Drawn(number, speeds, each, chance.choice(RATES))


CLUSTERS = tuple(draw())
MODELS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "mlp": (lambda path: write_mlp(path, [1024] * 9, batch=64), 64),
    "gpt": (lambda path: write_gpt(path, layers=4, width=256, heads=4, vocab=512, positions=128, batch=2), 2),
    "cnn": (lambda path: write_cnn(path, channels=(3, 32, 32, 64, 64), size=48, batch=8), 8),
}

# ------------------------------------------------------------------------------------------------ plans


def every_plan(search: Any) -> Iterator[PipelinePlan]:
    """Yield all plans of one size of microbatches whose stages begin at some places."""
    layers, fleet = search.profile.chain.layers, search.result.planner.fleet
    places, seen = places_of(search), set[tuple[tuple[int, ...], ...]]()
    for groups in _groups(range(len(fleet))):
        alike = tuple(tuple(sorted(fleet.exchangeable[i] for i in group)) for group in groups)
        if alike in seen:
            continue
        seen.add(alike)
        for cuts in combinations(places, len(groups) - 1):
            ends = [0, *cuts, len(layers)]
            for shares in product(*(list(_dealt(MICROBATCHES, len(group))) for group in groups)):
                stages = tuple(
                    StagePlan(a, b, group, share)
                    for (a, b), group, share in zip(pairwise(ends), groups, shares, strict=True)
                )
                for schedule in SCHEDULES:
                    yield PipelinePlan(schedule, search.plan.size, MICROBATCHES, stages)
        if len(groups) > 1 and all(len(group) == 1 for group in groups):
            yield from _packed(search, groups, places, len(layers))


def _packed(search: Any, groups: Sequence[tuple[int, ...]], places: Sequence[int], last: int) -> Iterator[PipelinePlan]:
    """Yield the plans with two stages on each of these devices."""
    for schedule in (kind for kind in PACKED if kind in ALL_SYNCHRONOUS and kind not in WRAPPED):
        packs = PACK_SCHEDULES[schedule].packs(len(groups), 2)
        at = {stage: group for group, stages in zip(groups, packs, strict=True) for stage in stages}
        for cuts in combinations(places, len(at) - 1):
            stages = tuple(
                StagePlan(a, b, at[stage], (MICROBATCHES,)) for stage, (a, b) in enumerate(pairwise([0, *cuts, last]))
            )
            yield PipelinePlan(schedule, search.plan.size, MICROBATCHES, stages)


def places_of(search: Any) -> list[int]:
    """Return where later stages may begin: in each stretch of about as much work, the place that fewest bytes cross."""
    planner = search.result.planner
    table = planner.table(search.plan.size)
    work = table.times(planner.fleet.devices[0])[0]
    possible = [place for place in range(1, len(search.profile.chain.layers)) if table.cut[place]]
    places = set()
    for stretch in range(PLACES):
        low, high = (work[-1] * (stretch + end) / (PLACES + 1) for end in (0.5, 1.5))
        inside = [place for place in possible if low <= work[place] < high]
        middle = (low + high) / 2
        if inside:
            places.add(min(inside, key=lambda place: (table.crossing[place], abs(work[place] - middle))))
    return sorted(places)


def _groups(devices: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way to put some of the devices on stages in order, at least one."""
    for size in range(1, min(TOGETHER, len(devices)) + 1):
        for group in combinations(devices, size):
            yield (group,)
            yield from ((group, *others) for others in _groups([d for d in devices if d not in group]))


def _dealt(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to share so many microbatches out, at least one to each."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *others) for others in _dealt(total - first, parts - 1))


def carried_out(plan: PipelinePlan, search: Any, model: ps.Model, cluster: Cluster) -> ps.Plan:
    """Run all passes over a plan."""
    names = [device.name for device in search.result.fleet.devices]
    options: dict[str, Any] = {"split_at": [search.profile.starts[stage.first] for stage in plan.stages[1:]]}
    if plan.packs > 1:
        options |= {"devices": [[names[i]] for i in plan.devices], "packs": plan.packs}
    else:
        options["devices"] = [[names[i] for i in stage.devices] for stage in plan.stages]
        options["shares"] = [stage.shares for stage in plan.stages]
    return ps.plan(model, cluster, _training(), schedule=plan.schedule, **options)


def _training() -> ps.Training:
    return ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-4), microbatches=MICROBATCHES)


def contenders(model: ps.Model, rows: int, cluster: Cluster, chance: random.Random) -> tuple[dict[str, ps.Plan], int]:
    """Return the plans to run by name, and how many there are in all."""

    def best(**options: Any) -> ps.Plan:
        batch = rows * MICROBATCHES
        return ps.plan_best(lambda size: model, cluster, _training(), batch=batch, explained=False, **options)

    listed = {CHOSEN: best(), ALONE: best(shard="none")}
    search = listed[ALONE].search
    assert search is not None
    step, listing = _judge(search, cluster), list(every_plan(search))
    plans = sorted((plan for plan in listing if step(plan) < float("inf")), key=step)
    near = [plan for plan in plans[BEST:] if step(plan) <= NEAR * step(plans[0])]
    for number, plan in enumerate(plans[:BEST], 1):
        listed[f"simulated {number}"] = carried_out(plan, search, model, cluster)
    for number, plan in enumerate(chance.sample(near, min(OTHERS, len(near))), 1):
        listed[f"drawn {number}"] = carried_out(plan, search, model, cluster)
    return listed, len(listing)


def _judge(search: Any, cluster: Cluster) -> Callable[[PipelinePlan], float]:
    """Return the seconds of a listed plan by simulation; infinity of those that are far off by the formulas."""
    planner = search.result.planner
    table = planner.table(search.plan.size)
    plain = SimulatedSteps(planner, cluster, most=float("inf"))
    packed = SimulatedSteps(planner, cluster, judge_packs, most=float("inf"))
    formulas = {p: by_formulas(table, planner.fleet, p) for p in every_plan(search) if p.schedule in SCHEDULES}
    least = min(judged.step for judged in formulas.values() if not judged.against)

    def step(plan: PipelinePlan) -> float:
        if plan.schedule not in SCHEDULES:
            return packed.step(plan)
        return plain.step(plan) if formulas[plan].step <= NEAR * least else float("inf")

    return step


# ------------------------------------------------------------------------------------------------ runs


def run(drawn: Drawn, plans: Mapping[str, ps.Plan], folder: Path) -> dict[str, list[float]]:
    """Run all plans one after the other; return the seconds of steps of each."""
    works = []
    for number, (name, plan) in enumerate(plans.items()):
        bundle, file = ps.compile(plan, folder / f"b{number}", backend="numpy"), folder / f"{number}.npz"
        np.savez(file, **next(batches(plan.module, 1)))
        devices = plan.module.rank_devices()
        works.append(
            {"name": name, "bundle": str(bundle), "devices": devices, "port": _PORT + number, "data": str(file)}
        )
    with Hosts(drawn.hosts) as hosts, awake():
        hosts.shape(drawn.rate)
        for work in works:
            work["address"] = hosts.address(drawn.hosts.index(work["devices"][0].split(".")[0]))
        _run_all(drawn, works, hosts, folder)
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in plans}


def _run_all(drawn: Drawn, works: Sequence[Mapping[str, Any]], hosts: Hosts, folder: Path) -> None:
    """Start a process for each device, and wait for all of them. They run the plans one after the other."""
    devices = [f"{host}.{d}" for host in drawn.hosts for d in range(drawn.each)]
    listed, log = folder / "works.json", folder / "log"
    listed.write_text(json.dumps({"works": works, "devices": devices}), encoding="utf-8")
    environment = os.environ | thread_environment(1) | {"GLOO_SOCKET_IFNAME": "eth0"}
    program = [sys.executable, str(Path(__file__).parent / "timed_stages.py"), "--works", str(listed)]
    with log.open("w") as out:
        running = [
            hosts.start(number // drawn.each, [*program, "--out", str(folder), "--device", device], environment, out)
            for number, device in enumerate(devices)
        ]
        try:
            deadline = time.monotonic() + _SECONDS
            while any(process.poll() is None for process in running):
                if time.monotonic() > deadline or any(process.poll() for process in running):
                    break
                time.sleep(0.1)
            failed = any(process.poll() != 0 for process in running)
        finally:
            hosts.end(running)
    if failed:
        raise RuntimeError(f"a device failed or took too long:\n{log.read_text(encoding='utf-8')[-4000:]}")


def _measured() -> str:
    """Return the text of a cluster file of two devices of this machine."""
    report = examine((1, 1))
    assert report is not None
    return report.cluster.to_toml()


def measure(drawn: Drawn, name: str, measured: Cluster) -> dict[str, Any]:
    """Plan and run a cell."""
    write, rows = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="best-of-all-") as place:
        folder, cluster = Path(place), drawn.cluster(measured)
        model = ps.from_onnx(write(folder / "model.onnx"))
        listed, count = contenders(model, rows, cluster, random.Random(cell_name(drawn, name)))
        distinct: dict[str, str] = {}
        for which, plan in listed.items():
            distinct.setdefault(same_program(plan), which)
        times = run(drawn, {which: listed[which] for which in distinct.values()}, folder)
    found = {}
    for which, plan in listed.items():
        ran = distinct[same_program(plan)]
        assert plan.predicted is not None
        assert plan.module.schedule is not None
        found[which] = {
            "schedule": plan.module.schedule.name,
            "devices": [list(plan.module.devices_of(stage.index)) for stage in plan.module.stages],
            "predicted": plan.predicted.step,
            "seconds": statistics.median(times[ran]),
            "steps": times[ran] if ran == which else [],
        }
    cell = cell_name(drawn, name)
    return {"cell": cell, "cluster": str(drawn), "listed": count, "plans": found, "load": load_of_machine()}


def cell_name(drawn: Drawn, model: str) -> str:
    return f"{drawn.number}-{model}"


def cells() -> list[tuple[Drawn, str]]:
    """List every cluster with one model, then with the next."""
    names = list(MODELS)
    return [(drawn, names[(drawn.number + turn) % len(names)]) for turn in range(len(names)) for drawn in CLUSTERS]


# ------------------------------------------------------------------------------------------------ the answer

HEADS = ("cluster and model", "devices", "plans", "run", "chosen", "of the best rival", "predicted / run")
WORST, STEP = 1.10, 0.10


def _rivals(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the listed plans that were run; where the chosen one is among them, that as well."""
    return [plan for name, plan in row["plans"].items() if name not in (CHOSEN, ALONE)]


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what the goals are about: ratios of a cell."""
    chosen, rivals = row["plans"][CHOSEN], _rivals(row)
    quickest = min(plan["seconds"] for plan in rivals)
    return {"chosen": chosen["seconds"] / quickest, "predicted": chosen["predicted"] / chosen["seconds"]}


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    lines = []
    for row in rows:
        chosen, ratios = row["plans"][CHOSEN], figures(row)
        where = f"{chosen['schedule']}: " + " > ".join(" ".join(names) for names in chosen["devices"])
        ran = sum(1 for plan in row["plans"].values() if plan["steps"])
        counts = [str(row["listed"]), str(ran)]
        last = [f"{ratio:.3f}" for ratio in ratios.values()]
        lines.append([row["cell"], row["cluster"], *counts, where, *last])
    return HEADS, lines


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how far off the chosen plan is at worst, and the prediction in the median; and of all that was run."""
    every = [plan["predicted"] / plan["seconds"] for row in rows for plan in row["plans"].values() if plan["steps"]]
    return {
        "worst": max(figures(row)["chosen"] for row in rows),
        "typical": statistics.median(figures(row)["chosen"] for row in rows),
        "step": statistics.median(abs(figures(row)["predicted"] - 1) for row in rows),
        "all": statistics.median(abs(ratio - 1) for ratio in every),
        "runs": len(every),
    }


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    off = errors_of(rows)
    return (
        f"{len(rows)} cells of {len(cells())}: chosen plans take at most {off['worst']:.3f} of the best rival, "
        f"{off['typical']:.3f} in the median; their "
        f"predictions are off by {off['step']:.1%} in the median, those of all {off['runs']:g} plans by {off['all']:.1%}"
    )


def judge(rows: Sequence[Mapping[str, Any]]) -> int:
    """Print the table and how far off the cells are; return 1 where a goal is missed."""
    print(markdown(*table_of(rows)))
    print(verdict(rows))
    off = errors_of(rows)
    return int(off["worst"] > WORST or off["step"] > STEP)


def main() -> int:
    parser = cell_parser(__doc__)
    arguments = parser.parse_args()
    begin_cells(parser, arguments.only, [cell_name(*cell) for cell in cells()], available())
    report: dict[str, Any] = load(arguments.json)
    begin = time.monotonic()
    if "doctor" not in report["known"]:
        print("rates of two devices and their links", file=sys.stderr, flush=True)
        report["known"]["doctor"] = _measured()
    report["facts"] = {
        "system": system(),
        "processor": processor(sorted(os.sched_getaffinity(0))),
        "versions": versions("penstock", "torch"),
    }
    failed = list[str]()
    for drawn, name in cells():
        cell = cell_name(drawn, name)
        if (arguments.only and cell not in arguments.only) or any(row["cell"] == cell for row in report["rows"]):
            continue
        if time.monotonic() - begin > 60 * arguments.minutes:
            break
        try:
            row = measure(drawn, name, parsed(report["known"]["doctor"]))
        except (PenstockError, RuntimeError) as problem:
            failed.append(cell)
            print(f"{cell} failed: {problem}", file=sys.stderr, flush=True)
            continue
        report["rows"].append(row)
        save(arguments.json, report)
        told = ", ".join(f"{key} {ratio:.3f}" for key, ratio in figures(row).items())
        print(f"{cell}: {told}; {time.monotonic() - begin:.0f} s so far", file=sys.stderr, flush=True)
    missed = judge(report["rows"]) if report["rows"] else 0
    return missed or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
