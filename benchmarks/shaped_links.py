"""Training on four hosts with slow network cards, against `penstock simulate` of a cluster file that states their rate.

    python benchmarks/shaped_links.py                                   all rows: about three minutes
    python benchmarks/shaped_links.py --rates 25 --schedules 2bw --json links.json

Hosts are network namespaces (namespaces.py; root, iproute2 with tc), each with one rank that torchrun starts as
`penstock run`. A token bucket (tc tbf) lets so many MB per second out of each host and into it. The model is an MLP on
4 stages whose messages are 1 MB, and which computes little, because all hosts share the cores of this machine and a
cluster file does not say so. Computations and the kernel's work for frames, buckets and a bridge fit into two cores up
to some 50 MB/s. With faster cards cores run short, and steps take longer than predicted.

Predicted: `penstock simulate --cluster FILE --costs measured`, every rank by itself (`--costs table` for further rates,
from the same measurement). The file states the rate of the card less the share of frame headers (8948 bytes of 9014 are
ours), 100 us of latency, and nothing that comes from a run. Measured: the median of the steps in the metrics, after the
first three. The exit code is 1 where the two are more than 15 % apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from machine import write_json
from namespaces import JUMBO, Hosts, available, torchrun

import penstock as ps
from penstock.models import write_mlp

STAGES, WIDTH, ROWS, MICROBATCHES = 4, 256, 1024, 8
# The payload's share of a frame: the headers of IP and TCP are in it, that of Ethernet is before it.
PAYLOAD = (JUMBO - 52) / (JUMBO + 14)
GOAL = 0.15
SKIPPED = 3
SECONDS = 180.0
NAMES = [f"n{i + 1}" for i in range(STAGES)]


def cluster_file(folder: Path, rate: float) -> Path:
    """Write a cluster of hosts with one device each, and cards of so many bytes per second."""
    lines = ["[links]", f'other-host = {{ bandwidth = {rate * PAYLOAD:.0f}, latency = "100 us" }}']
    for i, name in enumerate(NAMES):
        lines += ["[[host]]", f'name = "{name}"', f"nic_bandwidth = {rate * PAYLOAD:.0f}", 'interface = "eth0"']
        lines += ["[[device]]", f'name = "cpu:{i}"', f'host = "{name}"', "threads = 1"]
    path = folder / f"cluster-{rate:.0f}.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_bundle(folder: Path, schedule: str, rate: float) -> Path:
    path = write_mlp(folder / "mlp.onnx", (WIDTH,) * (STAGES + 1), batch=ROWS, seed=1)
    model = ps.from_onnx(path)
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-3), microbatches=MICROBATCHES)
    cluster = ps.Cluster.load(cluster_file(folder, rate))
    plan = ps.plan(model, cluster, training, schedule=schedule, recompute="none", split_at=products[1:])
    return ps.compile(plan, folder / f"bundle-{schedule}")


def predict(bundle: Path, cluster: Path, costs: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock", "simulate", str(bundle), "--cluster", str(cluster), "--costs", costs]
    done = subprocess.run(
        [*command, "--batches", "8", "--json"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    prediction: dict[str, Any] = json.loads(done.stdout)
    return prediction


def run(hosts: Hosts, bundle: Path, data: Path, steps: int, folder: Path) -> list[float]:
    """Return seconds of steps under torchrun, one rank per host."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    training = ["run", str(bundle), "--data", str(data), "--steps", str(steps), "--metrics", str(metrics)]
    torchrun(hosts, training, folder / "log", SECONDS)
    return [json.loads(line)["step_s"] for line in metrics.read_text(encoding="utf-8").splitlines()][SKIPPED:]


def measure(schedules: Sequence[str], rates: Sequence[float], steps: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as place, Hosts(NAMES) as hosts:
        folder, random = Path(place), np.random.default_rng(0)
        data, samples = folder / "data.npz", ROWS * MICROBATCHES
        x = random.standard_normal((samples, WIDTH)).astype(np.float32)
        np.savez(data, x=x, labels=random.integers(0, WIDTH, samples))
        for schedule in schedules:
            bundle = make_bundle(folder, schedule, rates[0])
            for number, rate in enumerate(rates):
                hosts.shape(rate)
                predicted = predict(bundle, cluster_file(folder, rate), "table" if number else "measured")
                times = run(hosts, bundle, data, steps, folder)
                step = statistics.median(times)
                row = {
                    "schedule": schedule,
                    "rate": rate,
                    "measured_s": step,
                    "predicted_s": predicted["step_s"],
                    "times": times,
                }
                row |= {
                    "ratio": predicted["step_s"] / step,
                    "spread": [min(times), max(times)],
                    "bound_by": predicted["bound_by"],
                }
                row |= {"busy": [rank["busy"] for rank in predicted["ranks"]]}
                rows.append(row)
                print(f"{schedule}, {rate / 1e6:g} MB/s: {row['ratio']:.3f}", file=sys.stderr, flush=True)
    return rows


def table(lines: Sequence[dict[str, Any]]) -> str:
    rows = ["| schedule | cards MB/s | predicted ms | measured ms | ratio | bound by |", "| --- " * 6 + "|"]
    for x in lines:
        times = f"{x['predicted_s'] * 1e3:.1f} | {x['measured_s'] * 1e3:.1f} | {x['ratio']:.3f}"
        rows.append(f"| {x['schedule']} | {x['rate'] / 1e6:g} | {times} | {x['bound_by'].partition(':')[0]} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[12.5, 25, 50],
        metavar="MB/s",
        help="of the cards (default: 12.5 25 50)",
    )
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "2bw"], metavar="KIND", help="(default: 1f1b 2bw)")
    parser.add_argument(
        "--steps",
        type=int,
        default=14,
        metavar="N",
        help=f"steps of a run, of which the first {SKIPPED} do not count (default: 14)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.steps <= SKIPPED:
        parser.error(f"--steps must be more than {SKIPPED}")
    if reason := available():
        print(f"no network namespaces: {reason}", file=sys.stderr)
        return 1
    lines = measure(arguments.schedules, [rate * 1e6 for rate in arguments.rates], arguments.steps)
    print(table(lines))
    write_json(arguments.json, {"lines": lines})
    worst = max(abs(x["ratio"] - 1) for x in lines)
    print(f"predictions are off by {worst:.1%} at worst, {GOAL:.0%} are allowed", file=sys.stderr)
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main())
