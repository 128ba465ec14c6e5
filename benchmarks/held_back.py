"""Plans that are chosen for drawn clusters of unequal devices, beside plans that could have been, all of them run.

    python benchmarks/held_back.py --json held_back.json               continues a file that exists; hours
    python benchmarks/held_back.py --json held_back.json --minutes 20  as many cells as can be begun in that time
    python benchmarks/held_back.py --json held_back.json --only 3-mlp
    python benchmarks/held_back.py --json held_back.json --again       cells over a goal once more

Thirty clusters are drawn once, with two to six devices. Each device is a thread of this machine with a quota on its
processor time, and all quotas together are less than the machine. Every third cluster is one of hosts: each device
has a network namespace, with a network card of a drawn rate (Linux, root, iproute2). Quotas and rates were drawn for
this benchmark, and nothing in the planner was fitted to them. A cell is a cluster and one of three models. A forward of
a microbatch takes a core some 50 ms. The system ends a process's turn at its next tick, and lets it have back what it
left while it waited. So a device that waits between short computations has more of a core than its quota while it
computes: `waiting` in the file says how much, and predictions know it by the period of the quota.

Devices have the rates that `penstock doctor` measures within their quota. Cards have the rate that they were given. The
chosen plan is that of `penstock plan --batch`. Its rivals are the best plan under each other schedule but gpipe, which
takes as long as 1f1b, all devices from the fastest to the slowest, and the other way round, the fastest by itself, the
best plan without the slowest, and the chosen order with one cut a product earlier, and later. One more plan is chosen
with the rates that a plan without a cluster file measures within the quotas. On one host the jobs of all plans are open
at once, and take turns of some steps. Plans of several hosts run one after the other, a rank on each host. Each begins
with steps that are not counted, as they touch new memory. A rival that is a fifth slower than the quickest after a
round runs no further ones; on one host it runs none if its last uncounted step takes half as long again.

The speed of the machine, as products of torch show it, is measured with the rates, and before and after each cell.
Predictions are scaled by how it changed since the rates were measured. A cell does not count where it changed by more
than a tenth meanwhile.

Ratios are those of medians of steps. Steps of one run may be a tenth slower than those of the next, so cells whose
chosen plan is over the goal at worst are run once more, and steps of both runs count (x2 in the table). Memory is the
peak of each rank of the chosen plan beside its prediction, with what a worker takes beside its tensors, which is more
for replicas. Goals: the
chosen plan takes at most 1.05 of the best that was run in the median, and 1.12 at worst. The predicted step is within
10 % in the median, with rates of the quicker measurement within 20 %, and memory within 10 % everywhere. The exit code
is 1 where one is missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from cell_options import begin_cells, cell_parser
from held_back_clusters import CLUSTERS, Drawn, measured_file, missing, quotas_in_use, while_waiting
from held_back_runs import Contest, run_on_hosts, take_turns
from machine import load as load_of_machine
from machine import markdown, processor, speed, system, versions
from truth import beside_tensors
from truth_runs import load, save

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.schedule_names import ALL_SYNCHRONOUS, PACKED, WRAPPED
from penstock.ir.text import print_schedule
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.support.errors import PenstockError

MICROBATCHES = 4
CHOSEN, QUICK = "chosen", "chosen with quick rates"
# How much the speed of the machine may change while a cell runs.
STEADY = 0.1


def _mlp(path: Path) -> Path:
    return write_mlp(path, [1024] * 9, batch=320)


def _gpt(path: Path) -> Path:
    return write_gpt(path, layers=6, width=384, heads=6, vocab=1024, positions=128, batch=2)


def _cnn(path: Path) -> Path:
    return write_cnn(path, channels=(3, 64, 64, 128, 128, 256), size=96, batch=16)


MODELS: dict[str, tuple[Callable[[Path], Path], int]] = {"mlp": (_mlp, 320), "gpt": (_gpt, 2), "cnn": (_cnn, 16)}


# ------------------------------------------------------------------------------------------------ plans


def best(model: ps.Model, rows: int, cluster: Cluster, schedules: Sequence[str] = ALL_SYNCHRONOUS) -> ps.Plan:
    batch = rows * MICROBATCHES
    return ps.plan_best(lambda size: model, cluster, _training(), batch=batch, schedules=schedules, explained=False)


def _training() -> ps.Training:
    return ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-4), microbatches=MICROBATCHES)


def shifted(model: ps.Model, cluster: Cluster, chosen: ps.Plan, by: int) -> ps.Plan | None:
    """Return the plan with the cut in the middle so many products later, None where there is no such plan."""
    module = chosen.module
    schedule = module.schedule
    assert schedule is not None
    if len(module.stages) == 1 or schedule.name in PACKED or len(module.rank_devices()) > len(module.stages):
        return None
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind in ("matmul", "conv")]
    starts = []
    for stage in module.stages[1:]:
        there = {value.name for op in module.graphs[f"s{stage.index}.F"].ops for value in op.outs}
        starts.append(next((i for i, name in enumerate(products) if name in there), len(products)))
    middle = len(starts) // 2
    starts[middle] += by
    if sorted(set(starts)) != starts or not 0 < starts[0] <= starts[-1] < len(products):
        return None
    order = [list(module.devices_of(stage.index)) for stage in module.stages]
    options: dict[str, Any] = {"devices": order, "split_at": [products[i] for i in starts]}
    return ps.plan(model, cluster, _training(), schedule=schedule.name, **options)


def rivals(model: ps.Model, rows: int, cluster: Cluster, chosen: ps.Plan) -> Iterator[tuple[str, ps.Plan]]:
    """Yield the plans beside the chosen one."""
    taken = chosen.module.schedule
    assert taken is not None
    for schedule in ALL_SYNCHRONOUS:
        if schedule not in (taken.name, "gpipe", *WRAPPED):
            yield f"best {schedule}", best(model, rows, cluster, (schedule,))
    ordered = sorted(cluster.devices, key=lambda device: -device.flops)
    if len(ordered) > 2:
        slowest = ordered[-1].name
        rest = Cluster(tuple(ordered[:-1]), hosts=cluster.hosts, classes=cluster.classes)
        yield f"best without {slowest}", best(model, rows, rest)
    for name, order in (("fast first", ordered), ("slow first", ordered[::-1]), ("fastest alone", ordered[:1])):
        plain = [[device.name] for device in order]
        yield name, ps.plan(model, cluster, _training(), devices=plain, schedule="1f1b")
    for name, by in (("a product earlier", -1), ("a product later", 1)):
        plan = shifted(model, cluster, chosen, by)
        if plan is not None:
            yield name, plan


def contenders(model: ps.Model, rows: int, cluster: Cluster, quick: Cluster) -> dict[str, ps.Plan]:
    """Return the plans to run by name. Plans that are another's stand for that one."""
    chosen = best(model, rows, cluster)
    listed: dict[str, ps.Plan] = {CHOSEN: chosen, QUICK: best(model, rows, quick)}
    for name, plan in _fitting(rivals(model, rows, cluster, chosen)):
        listed[name] = plan
    return listed


def _fitting(plans: Iterator[tuple[str, ps.Plan]]) -> Iterator[tuple[str, ps.Plan]]:
    """Yield what can be planned: an order may leave a stage without work, a schedule may have no plan."""
    while True:
        try:
            pair = next(plans, None)
        except PenstockError as problem:
            print(f"  no further rivals: {problem}", file=sys.stderr, flush=True)
            return
        if pair is None:
            return
        yield pair


def same_program(plan: ps.Plan) -> str:
    """Return what two plans share that run the same: programs of ranks, devices and the values of their graphs."""
    module = plan.module
    assert module.schedule is not None
    names = [sorted(v.name for op in graph.ops for v in op.outs) for graph in module.graphs.values()]
    return repr((list(print_schedule(module.schedule)), module.rank_devices(), names))


# ------------------------------------------------------------------------------------------------ cells


def measure(drawn: Drawn, name: str, known: dict[str, Any]) -> dict[str, Any]:
    """Plan and run a cell."""
    write, rows = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="held-back-") as place:
        folder = Path(place)
        model = ps.from_onnx(write(folder / "model.onnx"))
        begin = time.perf_counter()
        listed = contenders(model, rows, drawn.cluster(known["doctor"]), drawn.cluster(known["quick"]))
        planned = time.perf_counter() - begin
        distinct: dict[str, str] = {}
        for which, plan in listed.items():
            distinct.setdefault(same_program(plan), which)
        bundles = {
            which: open_bundle(ps.compile(listed[which], folder / which.replace(" ", "-")))
            for which in distinct.values()
        }
        contest = Contest(
            drawn, rows * MICROBATCHES, folder, keep={distinct[same_program(listed[n])] for n in (CHOSEN, QUICK)}
        )
        times = run_on_hosts(bundles, contest) if drawn.rate else take_turns(bundles, contest)
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
            "memory": [int(row["peak"]) for row in plan.as_dict()["memory"].values()],
        }
    return {
        "cell": cell_name(drawn, name),
        "quotas": drawn.quotas,
        "rate": drawn.rate,
        "planning": planned,
        "plans": found,
        "peaks": contest.peaks,
        "beside": known["memory"],
        "beside summing": known["memory of replicas"],
        "load": load_of_machine(),
    }


def pooled(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell that was run once more: steps of all its runs count."""
    plans = {name: dict(plan) for name, plan in new["plans"].items()}
    if {n: (p["schedule"], p["devices"]) for n, p in plans.items()} != {
        n: (p["schedule"], p["devices"]) for n, p in old["plans"].items()
    }:
        raise ValueError(f"{old['cell']} has other plans than before: it must be left out of the file and run anew")
    ran = [name for name, plan in plans.items() if plan["steps"]]
    stands_for = {
        name: name if name in ran else next(r for r in ran if new["plans"][r]["seconds"] == plan["seconds"])
        for name, plan in plans.items()
    }
    for name in ran:
        plans[name]["steps"] = old["plans"][name]["steps"] + plans[name]["steps"]
    for name, plan in plans.items():
        plan["seconds"] = statistics.median(plans[stands_for[name]]["steps"])
    speeds = {kind: [*old.get("speeds", {}).get(kind, [1.0]), *more] for kind, more in new.get("speeds", {}).items()}
    return {**new, "plans": plans, "runs": old.get("runs", 1) + 1, "speeds": speeds}


def cell_name(drawn: Drawn, model: str) -> str:
    return f"{drawn.number}-{model}"


def cells() -> list[tuple[Drawn, str]]:
    """List every cluster with one model, then with the next."""
    names = list(MODELS)
    return [
        (drawn, names[(drawn.number + drawn.number // 3 + turn) % len(names)])
        for turn in range(len(names))
        for drawn in CLUSTERS
    ]


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what the goals are about: ratios of a cell."""
    plans = row["plans"]
    quickest = min(plan["seconds"] for plan in plans.values())
    memory = [
        (planned + beside) / peak
        for planned, beside, peak in zip(plans[CHOSEN]["memory"], _beside(row), row["peaks"], strict=False)
        if peak
    ]
    return {
        "chosen": plans[CHOSEN]["seconds"] / quickest,
        "quick": plans[QUICK]["seconds"] / quickest,
        "predicted": plans[CHOSEN]["predicted"] / plans[CHOSEN]["seconds"] / _speed(row, "doctor"),
        "predicted quick": plans[QUICK]["predicted"] / plans[QUICK]["seconds"] / _speed(row, "quick"),
        "memory": max(memory, key=lambda ratio: abs(ratio - 1), default=1.0),
    }


def _speed(row: Mapping[str, Any], kind: str) -> float:
    """Return the speed of the machine beside that of when rates of this kind were measured, in the mean of all runs."""
    return statistics.mean(row.get("speeds", {}).get(kind, [1.0]))


def _beside(row: Mapping[str, Any]) -> list[float]:
    """Return what each rank of the chosen plan takes beside its tensors: more where replicas sum up gradients."""
    devices: list[list[str]] = row["plans"][CHOSEN]["devices"]
    ranks = {name: len(stage) for stage in devices for name in stage}
    return [row["beside"] if count == 1 else row["beside summing"] for count in ranks.values()]


HEADS = (
    "cluster and model", "quotas", "cards MB/s", "plans", "chosen", "of the best", "with quick rates",
    "predicted / run", "with quick rates", "memory",
)  # fmt: skip


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    lines = []
    for row in rows:
        ratios, chosen = figures(row), row["plans"][CHOSEN]
        where = " > ".join(" ".join(names) for names in chosen["devices"])
        ran = sum(1 for plan in row["plans"].values() if plan["steps"])
        cards = f"{row['rate'] / 1e6:g}" if row["rate"] else "-"
        shares = " ".join(f"{quota:g}" for quota in row["quotas"])
        memory = f"{ratios['memory']:.3f}" if row["peaks"] else "-"
        last = [f"{ratios[key]:.3f}" for key in ("chosen", "quick", "predicted", "predicted quick")]
        counted = f"{ran} x{row['runs']}" if "runs" in row else str(ran)
        lines.append([row["cell"], shares, cards, counted, f"{chosen['schedule']}: {where}", *last, memory])
    return HEADS, lines


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what the goals are about, over all cells."""
    every = [figures(row) for row in rows]

    def off(key: str) -> list[float]:
        return [abs(ratios[key] - 1) for ratios in every]

    return {
        "typical": statistics.median(off("chosen")),
        "worst": max(off("chosen")),
        "step": statistics.median(off("predicted")),
        "quick step": statistics.median(off("predicted quick")),
        "memory": max(off("memory")),
    }


GOALS = {"typical": 0.05, "worst": 0.12, "step": 0.10, "quick step": 0.20, "memory": 0.10}


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    off = errors_of(rows)
    return (
        f"{len(rows)} cells of {len(cells())}: chosen plans take {off['typical']:.1%} more than the best in the median, "
        f"{off['worst']:.1%} at worst; predictions are off by {off['step']:.1%} in the median, with quick rates by "
        f"{off['quick step']:.1%}; memory by {off['memory']:.1%} at worst"
    )


def judge(rows: Sequence[Mapping[str, Any]]) -> int:
    """Print the table and how far off the cells are; return 1 where a goal is missed."""
    print(markdown(*table_of(rows)))
    print(verdict(rows))
    return int(any(errors_of(rows)[key] > goal for key, goal in GOALS.items()))


# ------------------------------------------------------------------------------------------------ the command


def rates_of(report: dict[str, Any], path: Path | None) -> None:
    """Measure devices of every quota, and what a worker takes beside its tensors, unless the report has them."""
    known = report["known"]
    for name, replicas in (("memory", 1), ("memory of replicas", 2)):
        if name not in known:
            with tempfile.TemporaryDirectory(prefix="held-back-") as folder:
                known[name] = beside_tensors(Path(folder), replicas)
            save(path, report)
    for kind in ("doctor", "quick"):
        rates = known.setdefault(kind, {})
        for quota in (0.0, *quotas_in_use()):
            if f"{quota:g}" not in rates:
                known.setdefault("speeds", {}).setdefault(kind, []).append(speed())
                what = f"a device with {quota:g} of a core" if quota else "two devices and their links"
                print(f"rates of {what} ({kind})", file=sys.stderr, flush=True)
                rates[f"{quota:g}"] = measured_file(quota, kind)
                save(path, report)
    if "waiting" not in known:
        known["waiting"] = {f"{quota:g}": while_waiting(quota) for quota in quotas_in_use()}
        save(path, report)


def main() -> int:
    parser = cell_parser(__doc__)
    parser.add_argument(
        "--again", action="store_true", help="run cells of FILE once more whose chosen plan is over the goal at worst"
    )
    parser.add_argument("--list", action="store_true", help="print the cells and their clusters")
    arguments = parser.parse_args()
    wanted = cells()
    if arguments.list:
        print("\n".join(f"{cell_name(*cell)}: {cell[0]}" for cell in wanted))
        return 0
    begin_cells(parser, arguments.only, [cell_name(*cell) for cell in wanted], missing())
    report: dict[str, Any] = load(arguments.json)
    begin = time.monotonic()
    rates_of(report, arguments.json)
    report["facts"] = {
        "system": system(),
        "processor": processor(sorted(os.sched_getaffinity(0))),
        "versions": versions("penstock", "torch", "apache-tvm"),
    }
    for drawn, name in wanted:
        cell = cell_name(drawn, name)
        known = next((row for row in report["rows"] if row["cell"] == cell), None)
        is_over = known is not None and figures(known)["chosen"] - 1 > GOALS["worst"]
        if (arguments.only and cell not in arguments.only) or is_over != arguments.again or (known and not is_over):
            continue
        if time.monotonic() - begin > 60 * arguments.minutes:
            break
        before = speed()
        row = measure(drawn, name, report["known"])
        after = speed()
        if abs(after / before - 1) > STEADY:
            print(f"{cell}: not counted, as the machine has {after / before:.2f} of its speed before", file=sys.stderr)
            continue
        now = (before + after) / 2
        at_rates = report["known"].get("speeds", {})
        row["speeds"] = {kind: [now / statistics.median(measured)] for kind, measured in at_rates.items()}
        if known is None:
            report["rows"].append(row)
        else:
            row = pooled(known, row)
            report["rows"][report["rows"].index(known)] = row
        save(arguments.json, report)
        ratios = figures(row)
        told = ", ".join(f"{key} {ratio:.3f}" for key, ratio in ratios.items())
        print(f"{cell}: {told}; {time.monotonic() - begin:.0f} s so far", file=sys.stderr, flush=True)
    return judge(report["rows"]) if report["rows"] else 0


if __name__ == "__main__":
    sys.exit(main())
