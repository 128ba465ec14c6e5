"""The accuracy of simulation: step time and peak memory of real runs, predicted and measured.

    python benchmarks/truth.py --json truth.json                 all configurations; continues a file that exists
    python benchmarks/truth.py --only gpt-2-1f1b --json x.json
    python benchmarks/truth.py --plans --json plans.json         every plan of a small model on two unequal devices

Every configuration trains a small GPT, MLP or convolutional network in real worker processes on this host. Devices are
made unequal by threads, by quotas on processor time (a control group for each rank; Linux, cgroup v1, root) or by one
core for all ranks. Links are made slow by injected latency, or by a token bucket on the loopback device of a network
namespace of their own (root). A configuration that this host cannot make is named and left out.

Predictions are those of `passes/simulator/simulate.py` and `ir/memory/predict.py`, from four sources. Seconds of each kind of action are
measured rank by rank with no other rank running (src/penstock/calibration/rehearse.py; under the same quota), in turns with the runs, as
the speed of a host drifts. The slowdown of ranks that compute at once is measured with two, or as many as there are.
The cost of messages over loopback is measured with a model that computes next to nothing, and the memory of a worker
beside its tensors with a small GPT. Nothing comes from the runs. Three ranks on two cores share them in the simulation
as they do here.

Step time is the median over the run of the time from one update to the next on the last stage (over two steps, as
patterns of 2bw may take two batches to recur). Peak memory is that of a run whose batches are sent to the workers, as
plans count them, beyond a worker's memory before it loads its stage. Ratios are predicted / measured. Exit code 1 when
the goals are missed: step time within 10 % in the median and 20 % at worst, memory within 10 % everywhere.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

from truth_machines import Configuration, missing, prefixes, quota_groups, shaped
from truth_plans import time_plans
from truth_runs import BATCHES, FED, batches, beyond_base, load, memory_of, run, save

import penstock as ps
from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.calibration.rehearse import rehearse
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.schedule import RECEIVES, SENDS, Action
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.passes.simulator.machine import Route, Seat, SimulatedMachine, TransportModel
from penstock.passes.simulator.simulate import simulate
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec
from penstock.support.hardware import usable_cores

SIMULATED = 14
# Ranks talk over sockets, though they could share memory.
SOCKETS = {"PENSTOCK_SHARED_MEMORY": "0"}


def _gpt(path: Path) -> Path:
    return write_gpt(path, layers=4, width=320, heads=5, vocab=2048, positions=128, batch=8)


def _mlp(path: Path) -> Path:
    return write_mlp(path, [512, *[1024] * 6, 16], batch=512)


def _cnn(path: Path) -> Path:
    return write_cnn(path, channels=(3, 32, 64, 128), size=48, classes=10, batch=32)


MODELS: dict[str, Callable[[Path], Path]] = {"gpt": _gpt, "mlp": _mlp, "cnn": _cnn}


C = Configuration
CONFIGURATIONS = (
    C("gpt", 1, "1f1b"),
    C("gpt", 2, "1f1b"),
    C("gpt", 2, "gpipe"),
    C("gpt", 2, "2bw"),
    C("gpt", 2, "zb-1f1b"),
    C("gpt", 2, "1f1b", recompute="all"),
    C("gpt", 2, "2bw", latency=0.05),
    C("gpt", 2, "eager-2bw", latency=0.05),
    C("gpt", 2, "1f1b", quotas=(1.0, 0.5)),
    C("gpt", 2, "2bw", quotas=(0.5, 1.0)),
    C("gpt", 2, "1f1b", rate=5e7),
    C("gpt", 2, "2bw", one_core=True),
    C("gpt", 3, "1f1b"),
    C("gpt", 3, "2bw"),
    C("mlp", 1, "1f1b", threads=(2,)),
    C("mlp", 2, "1f1b"),
    C("mlp", 2, "2bw", recompute="all", quotas=(1.0, 0.4)),
    C("mlp", 2, "eager-2bw", latency=0.02),
    C("mlp", 2, "1f1b", threads=(2, 1)),
    C("mlp", 3, "gpipe", microbatches=6),
    C("mlp", 3, "2bw", rate=1e8),
    C("cnn", 2, "1f1b"),
    C("cnn", 2, "gpipe", recompute="all"),
    C("cnn", 2, "2bw", quotas=(0.7, 0.7)),
    C("cnn", 3, "zb-1f1b"),
)


# ------------------------------------------------------------------------------------------- compile, rehearse, predict


def make_plan(configuration: Configuration, folder: Path) -> ps.Plan:
    model = ps.from_onnx(MODELS[configuration.model](folder / "model.onnx"))
    speeds = [configuration.thread_count(r) * configuration.quota(r) for r in range(configuration.stages)]
    devices = [
        Device(f"cpu:{r}", threads=configuration.thread_count(r), flops=5e10 * s, bandwidth=1e10 * s)
        for r, s in enumerate(speeds)
    ]
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-4), microbatches=configuration.microbatches)
    return ps.plan(
        model, Cluster(tuple(devices)), training, schedule=configuration.schedule, recompute=configuration.recompute
    )


def calibrate(folder: Path) -> dict[str, float]:
    """Measure the costs of messages and workers on this host, with two stages that hardly compute.

    These are seconds of the rank for a message, latency, seconds a byte that a send writes at once, and bytes per
    second; and the memory of a worker beside its tensors.
    """
    sends, trips = {}, {}
    for rows in (16, 16384, 65536):
        path = write_mlp(folder / f"small{rows}.onnx", (16, 16, 16), batch=rows)
        model = ps.from_onnx(path)
        products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
        training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-4), microbatches=2)
        plan = ps.plan(model, Cluster.local(2), training, recompute="none", split_at=products[1:])
        bundle = open_bundle(ps.compile(plan, folder / f"small{rows}"))
        with Job(bundle, data=DataSpec(), trace=True) as job:
            list(job.steps_from_data(20))
            events = [{action: (start, end) for action, start, end in trace} for trace in job.traces]
        size = rows * 16 * 4
        sends[size], trips[size] = [], []
        for rank, other in ((0, 1), (1, 0)):
            last = 0.0
            for text, (start, end) in events[rank].items():
                action, before = Action.parse(text), last
                last = end
                if action.kind in SENDS:
                    # Work before an action, such as posting receives, is counted for the next one in rehearsals, too.
                    sends[size].append(end - before)
                    receiving, got = events[other][f"{action.peer}R{action.kind[1]}{action.mb}<{rank}"]
                    if receiving < start:
                        trips[size].append(got - start)
    small, middle, large = sorted(sends)
    send = {size: statistics.median(times) for size, times in sends.items()}
    trip = {size: statistics.median(times) for size, times in trips.items()}
    return {
        "message": send[small],
        "latency": max(0.0, trip[small] - send[small]),
        "writing": max(0.0, (send[middle] - send[small]) / (middle - small)),
        "bandwidth": (large - small) / max(1e-9, trip[large] - trip[small]),
        "buffer": large,
        "memory": beside_tensors(folder),
    }


def beside_tensors(folder: Path, replicas: int = 1) -> float:
    """Return the bytes that the ranks of a small GPT take beside its tensors.

    These are the module, its code, and libraries loaded on first use; of replicas also connections of gloo and what
    goes through them.
    """
    model = ps.from_onnx(
        write_gpt(folder / "little.onnx", layers=2, width=64, heads=2, vocab=256, positions=32, batch=4)
    )
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-4), microbatches=4)
    plan = ps.plan(model, Cluster.local(2), training, recompute="none", replicas=replicas)
    bundle = open_bundle(ps.compile(plan, folder / "little"))
    expected = [row["peak"] for row in plan.as_dict()["memory"].values()]
    with Job(bundle) as job:
        list(job.run(batches(bundle.module, FED)))
        return statistics.mean(peak - n for peak, n in zip(beyond_base(job), expected, strict=True))


def rehearse_alone(
    configuration: Configuration, bundle: Bundle, groups: Mapping[int, Path], seconds: float
) -> list[dict[str, float]]:
    """Return seconds of every rank by itself."""
    starts = prefixes(configuration, groups)
    return [rehearse(bundle, [rank], seconds=seconds, prefixes=starts)[0] for rank in range(configuration.stages)]


def speeds_together(
    configuration: Configuration, bundle: Bundle, known: dict[str, Any], seconds: float, folder: Path
) -> tuple[float, ...]:
    """Return the speed of a core while 1, 2, ... of the ranks compute, compared with one alone.

    Entries of `known` are not measured again.
    """
    # Measured with one thread for each rank and no quotas: the slowdown counts as a property of the host and the model.
    cores = 1 if configuration.one_core else usable_cores()
    threads = sum(configuration.thread_count(rank) for rank in range(configuration.stages))
    speeds = [1.0]
    for busy in range(2, max(cores, threads) + 1):
        key = f"{busy} of {configuration.model} on {cores}"
        if key not in known:
            if any(configuration.thread_count(rank) > 1 for rank in range(configuration.stages)):
                plain = replace(configuration, threads=())
                bundle = open_bundle(ps.compile(make_plan(plain, folder), folder / "plain"))
            pinned = prefixes(configuration, {})
            ranks = [rank % configuration.stages for rank in range(busy)]
            once = {rank: rehearse(bundle, [rank], seconds=seconds, prefixes=pinned)[0] for rank in sorted(set(ranks))}
            together = rehearse(bundle, ranks, seconds=busy * seconds, prefixes=pinned)
            slowed = [
                once[rank][kind] / row[kind] for rank, row in zip(ranks, together, strict=True) for kind in ("F", "B")
            ]
            known[key] = statistics.mean(slowed) * busy / min(busy, cores)
        speeds.append(min(1.0, known[key]))
    return tuple(speeds)


def predict(
    configuration: Configuration,
    bundle: Bundle,
    alone: Sequence[Mapping[str, float]],
    speeds: tuple[float, ...],
    loopback: Mapping[str, float],
) -> dict[str, Any]:
    module = bundle.module
    assert module.schedule is not None
    sizes = {(e.phase, e.src, e.dst): sum(v.type.nbytes for v in e.values) for e in module.edges}
    host, cores = ("core 0", 1) if configuration.one_core else ("here", usable_cores())
    seats = {
        rank: Seat(
            host,
            cores,
            threads=configuration.thread_count(rank),
            quota=configuration.quota(rank),
            writing=loopback["writing"],
            buffer=loopback["buffer"],
            reading=loopback["writing"],
            copying=loopback["writing"],
            speeds=speeds,
        )
        for rank in range(configuration.stages)
    }

    def route(source: int, target: int) -> Route:
        direct = (f"{source}>{target}", loopback["bandwidth"])
        return Route(
            (direct, ("loopback", configuration.rate)) if configuration.rate else (direct,),
            loopback["latency"],
            shared=not configuration.rate,
        )

    def seconds(rank: int, action: Action) -> float:
        result = alone[rank].get(action.kind, 0.0)
        return result + loopback["message"] if action.kind in (*SENDS, *RECEIVES) else result

    machine = SimulatedMachine(route, seats, TransportModel(late=configuration.latency))
    result = simulate(module.schedule, SIMULATED, seconds, lambda phase, a, b: sizes[phase, a, b], machine)
    return {"step_s": result.step_seconds, "busy": [1 - use.bubble for use in result.ranks]}


# ------------------------------------------------------------------------------------------------ measure


def measure(configuration: Configuration, known: dict[str, Any], seconds: float, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="truth-") as place, quota_groups(configuration) as groups:
        folder = Path(place)
        plan = make_plan(configuration, folder)
        bundle = open_bundle(ps.compile(plan, folder / "bundle"))
        more = known["host"]["memory"]
        expected = {int(rank): row["peak"] + more for rank, row in plan.as_dict()["memory"].items()}
        speeds = speeds_together(configuration, bundle, known, seconds, folder)
        rehearsed, runs = [], []
        for _ in range(rounds):
            rehearsed.append(rehearse_alone(configuration, bundle, groups, seconds))
            runs.append(run(configuration, bundle, groups))
        peaks = memory_of(configuration, bundle, groups)
    alone = [
        {kind: statistics.mean(row[kind] for row in rows) for kind in rows[0]} for rows in zip(*rehearsed, strict=True)
    ]
    predicted = predict(configuration, bundle, alone, speeds, known["sockets" if configuration.rate else "host"])
    steps = [step for times in runs for step in times]
    step = statistics.median(steps)
    return {
        "name": configuration.name,
        "predicted_s": predicted["step_s"],
        "measured_s": step,
        "spread": [min(steps), max(steps)],
        "ratio": predicted["step_s"] / step,
        "busy": predicted["busy"],
        "alone": alone,
        "speeds": speeds,
        "memory": [
            {"rank": rank, "predicted": expected[rank], "measured": peak, "ratio": expected[rank] / peak}
            for rank, peak in enumerate(peaks)
        ],
    }


# ------------------------------------------------------------------------------------------------ the report


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the errors of predictions: median and worst of step times, worst of memory."""
    steps = [abs(row["ratio"] - 1) for row in rows]
    memory = [abs(rank["ratio"] - 1) for row in rows for rank in row["memory"]]
    return {"median": statistics.median(steps), "worst": max(steps), "memory": max(memory)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| configuration | predicted ms | measured ms | ratio | memory, ratio by rank |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        memory = ", ".join(f"{rank['ratio']:.3f}" for rank in row["memory"])
        lines.append(
            f"| {row['name']} | {row['predicted_s'] * 1e3:.1f} | {row['measured_s'] * 1e3:.1f} | {row['ratio']:.3f} | "
            f"{memory} |"
        )
    return "\n".join(lines)


def in_shaped_space(
    configuration: Configuration, report: dict[str, Any], seconds: float, rounds: int
) -> dict[str, Any]:
    """Measure in a process of a network namespace of its own."""
    space = f"truth-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="truth-") as place:
        path = Path(place) / "one.json"
        save(path, {"rows": [], "known": report["known"]})
        subprocess.run(["sh", "-c", shaped(configuration.rate, space)], check=True)
        try:
            command = [sys.executable, __file__, "--inside", configuration.name, "--json", str(path)]
            # The ranks are to use the link, though they could share memory.
            command = ["ip", "netns", "exec", space, *command, "--seconds", str(seconds), "--rounds", str(rounds)]
            subprocess.run(command, check=True, env=os.environ | SOCKETS)
        finally:
            subprocess.run(["ip", "netns", "del", space], check=True)
        inside = load(path)
    report["known"] = inside["known"]
    (row,) = inside["rows"]
    return dict(row)


def calibrated(report: dict[str, Any], path: Path | None) -> None:
    """Measure this host's costs, unless the report has them, and print them."""
    if "host" not in report["known"]:
        with tempfile.TemporaryDirectory(prefix="truth-") as folder:
            report["known"]["host"] = calibrate(Path(folder))
        with tempfile.TemporaryDirectory(prefix="truth-") as folder, patch.dict(os.environ, SOCKETS):
            report["known"]["sockets"] = calibrate(Path(folder))
        save(path, report)
    for place in ("host", "sockets"):
        costs = report["known"][place]
        line = (
            f"{place}: a message takes {costs['message'] * 1e6:.0f} us of its rank at each end "
            f"and {costs['latency'] * 1e6:.0f} us more to arrive; {costs['writing'] * 1e9:.2f} ns a byte to write, "
            f"{costs['bandwidth'] / 1e9:.2f} GB/s; {costs['memory'] / 2**20:.1f} MiB beside tensors"
        )
        print(line, file=sys.stderr)


def measure_all(wanted: Sequence[Configuration], report: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Add rows to the report for configurations without one."""
    begin = time.perf_counter()
    options = {"seconds": arguments.seconds, "rounds": arguments.rounds}
    for configuration in wanted:
        if any(row["name"] == configuration.name for row in report["rows"]):
            continue
        if reason := "" if arguments.inside else missing(configuration):
            print(f"{configuration.name}: left out: {reason}", file=sys.stderr)
            continue
        apart = bool(configuration.rate) and not arguments.inside
        row = (
            in_shaped_space(configuration, report, **options)
            if apart
            else measure(configuration, report["known"], **options)
        )
        report["rows"].append(row)
        save(arguments.json, report)
        memory = ", ".join(f"{rank['ratio']:.3f}" for rank in row["memory"])
        figures = (
            f"predicted {row['predicted_s'] * 1e3:.1f} ms, measured {row['measured_s'] * 1e3:.1f} ms, "
            f"{row['ratio']:.3f}; memory {memory}"
        )
        print(
            f"{configuration.name}: {figures}; {time.perf_counter() - begin:.0f} s so far", file=sys.stderr, flush=True
        )


def judge(rows: Sequence[Mapping[str, Any]]) -> int:
    """Print the table and the errors of predictions, and return the exit code."""
    order = {c.name: i for i, c in enumerate(CONFIGURATIONS)}
    print(table(sorted(rows, key=lambda row: order.get(row["name"], len(order)))))
    errors = verdict(rows)
    print(
        f"{len(rows)} configurations: step time off by {errors['median']:.1%} in the median, "
        f"{errors['worst']:.1%} at worst; "
        f"memory by {errors['memory']:.1%} at worst"
    )
    return int(errors["median"] > 0.10 or errors["worst"] > 0.20 or errors["memory"] > 0.10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(c.name for c in CONFIGURATIONS)}"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all numbers; configurations that are in it are not run again"
    )
    parser.add_argument("--calibrate", action="store_true", help="only measure what messages over loopback cost")
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="how long to measure a rank by itself (default: 1)"
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help=f"runs of {BATCHES} batches (default: 2)")
    parser.add_argument("--plans", action="store_true", help="run every plan of a small model instead (truth_plans.py)")
    parser.add_argument("--inside", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # Being terminated leaves no groups and network namespaces behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if arguments.plans:
        return time_plans(arguments.json)
    names = [arguments.inside] if arguments.inside else arguments.only
    unknown = set(arguments.only) - {c.name for c in CONFIGURATIONS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    report = load(arguments.json)
    calibrated(report, arguments.json)
    if arguments.calibrate:
        return 0
    measure_all([c for c in CONFIGURATIONS if not names or c.name in names], report, arguments)
    return judge(report["rows"]) if report["rows"] and not arguments.inside else 0


if __name__ == "__main__":
    sys.exit(main())
