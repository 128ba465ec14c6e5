"""Plans whose devices split tensors, beside the best plans of single devices, both really run.

    python benchmarks/chosen_teams.py --json chosen_teams.json            four models on two cores: some ten minutes
    python benchmarks/chosen_teams.py --only mlp --rounds 2 --json x.json

    gpt    six layers, 384 wide, 6 heads, 128 positions, vocabulary of 1,024, 8 sequences
    mlp    eight layers of 1,024, 512 samples
    cnn    five convolutions of up to 256 channels, 96 pixels wide, 16 images
    tiny   three layers of 64, 64 samples, a model of computations that take microseconds

Two devices are the two cores of this machine, a thread each. Plans are those of `penstock plan --batch`, without a
cluster file, so with the rates that the machine is measured with in seconds; or with those of `--cluster`, say of
`penstock doctor`. One plan is searched over single devices and over teams, the other over single devices alone
(`--shard none`), and a third over teams alone (`--mesh tp=2`). Jobs of all are open at once, and take turns of some
steps. A batch is read from a file. Seconds are medians of all steps but the first of each turn.

The exit code is 1 where the chosen plan takes more than a twentieth longer than another.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from machine import load as load_of_machine
from machine import markdown, processor, system, versions
from truth_runs import batches, load, save
from turns import in_turn

import penstock as ps
from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.doctor.local import measured_cluster
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.text import print_graph, print_schedule
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec

STEPS, WORST, MINUTES = 8, 1.05, 10
Writer = Callable[[Path, int], Path]


def _gpt(path: Path, batch: int) -> Path:
    return write_gpt(path, layers=6, width=384, heads=6, vocab=1024, positions=128, batch=batch)


def _cnn(path: Path, batch: int) -> Path:
    return write_cnn(path, channels=(3, 64, 64, 128, 128, 256), size=96, batch=batch)


MODELS: dict[str, tuple[Writer, int]] = {
    "gpt": (_gpt, 8),
    "mlp": (lambda path, batch: write_mlp(path, [1024] * 9, batch=batch), 512),
    "cnn": (_cnn, 16),
    "tiny": (lambda path, batch: write_mlp(path, [64, 64, 64, 10], batch=batch), 64),
}
CHOSEN = "chosen"
WAYS: dict[str, dict[str, Any]] = {CHOSEN: {}, "single devices": {"shard": "none"}, "teams": {"mesh": "tp=2"}}


def plans_of(name: str, cluster: Cluster, folder: Path) -> dict[str, ps.Plan]:
    """Plan a model in each of the ways."""
    write, batch = MODELS[name]
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    known: dict[int, ps.Model] = {}

    def model(size: int) -> ps.Model:
        if size not in known:
            known[size] = ps.from_onnx(write(folder / f"{size}.onnx", size))
        return known[size]

    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-4))
    return {
        way: ps.plan_best(model, cluster, training, batch=batch, sizes=sizes, explained=False, **options)
        for way, options in WAYS.items()
    }


def text_of(plan: ps.Plan) -> str:
    """Describe a plan in a few words: schedule, microbatches, and the devices of each stage."""
    module = plan.module
    assert module.schedule is not None
    stages = " > ".join("+".join(module.devices_of(stage.index)) for stage in module.stages)
    mesh = f" {','.join(f'{a}={n}' for a, n in module.meshes[0].axes)}" if module.meshes else ""
    return f"{module.schedule.name} of {module.schedule.microbatches}: {stages}{mesh}"


def program_of(plan: ps.Plan) -> str:
    """Return what two plans share that run the same: graphs, schedule and devices as text."""
    module = plan.module
    assert module.schedule is not None
    graphs = [print_graph(graph) for graph in module.graphs.values()]
    return "\n".join([*graphs, *print_schedule(module.schedule), *module.rank_devices()])


def run(bundles: Mapping[str, Bundle], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return seconds of steps of all bundles, in turns."""
    times: dict[str, list[float]] = {name: [] for name in bundles}
    with ExitStack() as stack:
        jobs = {}
        for name, bundle in bundles.items():
            file = folder / f"{name}.npz"
            np.savez(file, **next(batches(bundle.module, 1)))
            jobs[name] = stack.enter_context(Job(bundle, timeout=60 * MINUTES, data=DataSpec(str(file))))
            list(jobs[name].steps_from_data(2))
        for _, name in in_turn(list(jobs), rounds):
            ends = [step.at for step in jobs[name].steps_from_data(STEPS)]
            times[name] += [b - a for a, b in pairwise(ends)]
    return times


def measure(name: str, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """Plan and run a model in all ways. Ways with one program run it once."""
    with tempfile.TemporaryDirectory(prefix="chosen-teams-") as place:
        folder = Path(place)
        begin = time.perf_counter()
        plans = plans_of(name, cluster, folder)
        planned = time.perf_counter() - begin
        programs = {way: program_of(plan) for way, plan in plans.items()}
        first: dict[str, str] = {}
        for way, program in programs.items():
            first.setdefault(program, way)
        bundles = {way: open_bundle(ps.compile(plans[way], folder / way.replace(" ", "-"))) for way in first.values()}
        times = run(bundles, rounds, folder)
    ways = {}
    for way, plan in plans.items():
        assert plan.predicted is not None
        ways[way] = {
            "plan": text_of(plan),
            "predicted": plan.predicted.step,
            "seconds": statistics.median(times[first[programs[way]]]),
            "steps": times.get(way, []),
        }
    return {"model": name, "planning": planned, "ways": ways, "load": load_of_machine()}


HEADS = ("model", "way", "plan", "ms of a step", "of the chosen", "predicted / run")


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the heads and lines of the table."""
    lines = []
    for row in rows:
        chosen = row["ways"][CHOSEN]["seconds"]
        for way, found in row["ways"].items():
            seconds, predicted = found["seconds"], found["predicted"]
            ratios = [f"{seconds / chosen:.2f}", f"{predicted / seconds:.2f}"]
            lines.append([row["model"], way, found["plan"], f"{seconds * 1e3:.2f}", *ratios])
    return HEADS, lines


def judge(rows: Sequence[Mapping[str, Any]]) -> int:
    """Print the table; return 1 where a chosen plan is much slower than another."""
    print(markdown(*table_of(rows)))
    quickest = [min(found["seconds"] for found in row["ways"].values()) for row in rows]
    return int(any(row["ways"][CHOSEN]["seconds"] > WORST * best for row, best in zip(rows, quickest, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures; models that are in it stay")
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each plan (default: 6)")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="two devices and their rates")
    arguments = parser.parse_args()
    report = load(arguments.json)
    report.pop("known", None)
    cluster = Cluster.load(arguments.cluster) if arguments.cluster else measured_cluster(Cluster.local(2))
    report["facts"] = {
        "system": system(),
        "processor": processor(sorted(os.sched_getaffinity(0))),
        "versions": versions("penstock", "torch", "apache-tvm"),
    }
    for name in arguments.only:
        if any(row["model"] == name for row in report["rows"]):
            continue
        report["rows"].append(measure(name, cluster, arguments.rounds))
        save(arguments.json, report)
        print(f"{name}: measured", file=sys.stderr, flush=True)
    return judge(report["rows"]) if report["rows"] else 0


if __name__ == "__main__":
    sys.exit(main())
