"""The part of collectives that computations hide where replicas share all variables out (`--zero 3`), over a slow link.

    python benchmarks/gathers.py                               all rows: two minutes
    python benchmarks/gathers.py --rate 30 --json gathers.json

Two hosts are network namespaces behind a token bucket (namespaces.py; root, iproute2 with tc), each with one rank of one
thread that torchrun starts as `penstock run --trace`. The model is an MLP whose layers are matrices of one size. Each
rank gathers the other half of a weight twice per step, forward and backward, and hands on half of its gradient.
Computations of a layer take longer than its collectives.

Rows with timed kernels have the same programs and the same network, and each kernel is a sleep of its predicted time
(timed_kernels.py): a product takes 1.5 times what a gather takes on the link. In the other rows ranks compute, on the
cores that carry the packets, too. There the cluster file states the rate of a product that was measured before.

One bundle is compiled as usual, the other without the pass `overlap`. A share is the seconds for which ranks waited for
results of collectives, of those that their bytes take on the link. Where ranks compute, both are of the whole run, its
first steps included, and losses are compared bit by bit. Beside them stands what the plan says of its collectives: bytes,
and seconds that are exposed (`penstock inspect --sharding`).

Exit code 1: losses differ, or with timed kernels more than a quarter of the time is waited for with the pass, or less
than 0.65 of it without; or bytes are not those of the plan within 2 %, or seconds of waiting not within 15 % of the time
on the link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from machine import load, processor, system, versions, write_json
from namespaces import Hosts, available, torchrun

import penstock as ps
from penstock.inspection.sharding.layouts import split_facts
from penstock.models import write_mlp
from penstock.passes import pipelines
from penstock.passes.pipelines import PipelineEntry
from penstock.runtime.launch.local import thread_environment

LAYERS, WIDTH, ROWS = 8, 1024, 4096
NAMES = ("n1", "n2")
WITH, WITHOUT, TIMED = "with overlap", "without", "timed kernels, "
# Bytes of the part of a weight that a rank lacks, and operations of a product.
HALF, PRODUCT = WIDTH * WIDTH * 4 // 2, 2.0 * ROWS * WIDTH * WIDTH
# Timed products take longer than a gather on the link, by this.
SLOWER = 1.5
MOST, LEAST = 0.25, 0.65
SECONDS = 300.0
# What bytes may differ from the plan by, and seconds of waiting, as a part of those on the link.
BYTES, WAITING = 0.02, 0.15


def cluster_file(folder: Path, name: str, rate: float, flops: float) -> Path:
    """Write a cluster of two hosts with one device each, and cards of so many bytes per second."""
    lines = ["[links]", f'other-host = {{ bandwidth = {rate:.0f}, latency = "100 us" }}']
    for i, host in enumerate(NAMES):
        lines += ["[[host]]", f'name = "{host}"', f"nic_bandwidth = {rate:.0f}", 'interface = "eth0"']
        lines += ["[[device]]", f'name = "cpu:{i}"', f'host = "{host}"', "threads = 1"]
        lines += [f"flops = {flops:.0f}"]
    path = folder / f"cluster-{name}.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def measured_flops() -> float:
    """Return the operations per second of a product of the model on one core."""
    x, w, times = torch.rand(ROWS, WIDTH), torch.rand(WIDTH, WIDTH), []
    torch.set_num_threads(1)
    for _ in range(7):
        begin = time.perf_counter()
        torch.mm(x, w)
        times.append(time.perf_counter() - begin)
    return PRODUCT / statistics.median(times)


def make_bundle(folder: Path, name: str, cluster: Path, backend: str = "tvm") -> Path:
    """Compile the model for two replicas that share all variables out, with or without the pass."""
    model = ps.from_onnx(write_mlp(folder / "mlp.onnx", (WIDTH,) * (LAYERS + 1), batch=ROWS, seed=1))
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-3), microbatches=2)
    usual = pipelines._overlap
    if name == WITHOUT:
        pipelines._overlap = lambda options: PipelineEntry("overlap", {}, "", wanted=False)
    try:
        plan = ps.plan(model, ps.Cluster.load(cluster), training, replicas=2, zero=3)
        return ps.compile(plan, folder / f"bundle-{backend}-{name.split()[0]}", backend=backend)
    finally:
        pipelines._overlap = usual


def planned(bundle: Path, steps: int) -> dict[str, float]:
    """Return the bytes of collectives by the plan, and the seconds of waiting for them, of all ranks and steps."""
    module = ps.open(bundle).module
    facts, schedule = split_facts(module), module.schedule
    assert schedule is not None
    # Each microbatch is run by one rank of a stage, and the collectives of a rank's graph wait once for each.
    waiting = sum(use.exposed or 0.0 for use in facts.collectives) * schedule.microbatches
    return {"planned_bytes": steps * facts.all_bytes, "planned_exposed_s": steps * waiting}


def run(hosts: Hosts, bundle: Path, data: Path, steps: int, folder: Path, rate: float) -> dict[str, Any]:
    """Return losses, the median step, and for all ranks the seconds of collectives on the link, and those waited for."""
    metrics, trace = folder / "metrics.jsonl", folder / "trace.json"
    metrics.unlink(missing_ok=True)
    options = ["--data", str(data), "--steps", str(steps), "--metrics", str(metrics), "--trace", str(trace)]
    torchrun(hosts, ["run", str(bundle), *options], folder / "log", SECONDS)
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    (totals,) = [row for row in rows if any(key.endswith("_exposed_s") for key in row)]
    exposed = sum(value for key, value in totals.items() if key.endswith("_exposed_s"))
    names = [key.removesuffix("_exposed_s") for key in totals if key.endswith("_exposed_s")]
    return {
        "losses": [row["loss"] for row in rows if "loss" in row],
        "step_s": statistics.median(row["step_s"] for row in rows if "step_s" in row),
        "link_s": sum(totals[f"{name}_bytes"] for name in names) / rate,
        "exposed_s": exposed,
    }


def run_timed(
    hosts: Hosts, bundles: dict[str, Path], steps: int, folder: Path, rate: float
) -> dict[str, dict[str, Any]]:
    """Return the same of programs whose kernels take their predicted time."""
    report, log = folder / "timed.json", folder / "timed.log"
    environment = os.environ | thread_environment(1) | {"GLOO_SOCKET_IFNAME": "eth0"}
    words = ["--bundles", json.dumps({name: str(path) for name, path in bundles.items()}), "--report", str(report)]
    program = [sys.executable, str(Path(__file__).parent / "timed_kernels.py"), "--address", hosts.address(0)]
    with log.open("w") as out:
        running = [
            hosts.start(i, [*program, *words, "--steps", str(steps), "--rank", str(i)], environment, out)
            for i in range(len(NAMES))
        ]
        try:
            failed = [process.args for process in running if process.wait(SECONDS)]
        finally:
            hosts.end(running)
    if failed:
        raise RuntimeError(f"the run with timed kernels failed:\n{log.read_text()}")
    rows = json.loads(report.read_text(encoding="utf-8"))
    return {name: {**row, "link_s": row["bytes"] / rate} for name, row in rows.items()}


def measure(rate: float, steps: int) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as place, Hosts(NAMES) as hosts:
        folder, random = Path(place), np.random.default_rng(0)
        data, samples = folder / "data.npz", ROWS * 2
        x = random.standard_normal((samples, WIDTH)).astype(np.float32)
        np.savez(data, x=x, labels=random.integers(0, WIDTH, samples))
        computed = cluster_file(folder, "computed", rate, measured_flops())
        timed = cluster_file(folder, "timed", rate, PRODUCT / (SLOWER * HALF / rate))
        bundles = {name: make_bundle(folder, name, computed) for name in (WITH, WITHOUT)}
        sleeping = {name: make_bundle(folder, name, timed, "numpy") for name in (WITH, WITHOUT)}
        hosts.shape(rate)
        rows = {f"{TIMED}{name}": row for name, row in run_timed(hosts, sleeping, steps, folder, rate).items()}
        for name, bundle in sleeping.items():
            rows[f"{TIMED}{name}"] |= planned(bundle, steps)
        rows |= {name: run(hosts, bundle, data, steps, folder, rate) for name, bundle in bundles.items()}
        for row in rows.values():
            row["share"] = row["exposed_s"] / row["link_s"]
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| order | step ms | on the link s | waited for s | share | by the plan |", "| --- " * 6 + "|"]
    for name, row in rows.items():
        times = f"{row['step_s'] * 1e3:.0f} | {row['link_s']:.1f} | {row['exposed_s']:.2f}"
        plan = f"{row['planned_exposed_s'] / row['link_s']:.0%}" if "planned_exposed_s" in row else "-"
        lines.append(f"| {name} | {times} | {row['share']:.0%} | {plan} |")
    return "\n".join(lines)


def is_as_planned(row: dict[str, Any]) -> bool:
    """Return whether bytes and waiting are those of the plan."""
    off = abs(row["exposed_s"] - row["planned_exposed_s"]) / row["link_s"]
    return off <= WAITING and abs(row["bytes"] / row["planned_bytes"] - 1) <= BYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rate", type=float, default=40.0, metavar="MB/s", help="of the network cards (default: 40)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="(default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if reason := available():
        print(f"no network namespaces: {reason}", file=sys.stderr)
        return 1
    before = load()
    rows = measure(arguments.rate * 1e6, arguments.steps)
    print(table(rows))
    facts = {
        "system": system(),
        "processor": processor([*os.sched_getaffinity(0)]),
        "versions": versions("torch", "numpy", "apache-tvm"),
    }
    loads = {"load": [before, load()]}
    write_json(arguments.json, {"facts": facts, "rate": arguments.rate, **loads, "rows": rows})
    same = rows[WITH]["losses"] == rows[WITHOUT]["losses"]
    print(f"losses are {'the same bit for bit' if same else 'NOT the same'}", file=sys.stderr)
    met = rows[f"{TIMED}{WITH}"]["share"] <= MOST and rows[f"{TIMED}{WITHOUT}"]["share"] >= LEAST
    expected = all(is_as_planned(rows[f"{TIMED}{name}"]) for name in (WITH, WITHOUT))
    return int(not same or not met or not expected)


if __name__ == "__main__":
    sys.exit(main())
