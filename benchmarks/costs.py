"""Costs of stages by passes/costs/prices.py beside measured times: for several models, on one thread of this machine.

    python benchmarks/costs.py                  # with rates measured at the start, as `penstock doctor` does: two
                                                minutes
    python benchmarks/costs.py --cluster FILE   # with the rates of the first device of a cluster file

Columns, in milliseconds of one call of a stage graph:

    measured   the compiled graph, called as a worker does, F and B in turn and U at times: median of processor time
    rates      the roofline with the rates that the doctor measured, of the fused graph
    table      the sum of its kernels, each timed by itself
    guessed    the roofline with the rates of Cluster.local, when nothing was measured
    / ...      that over measured

Processor time of one thread is the clock that other programs change least; they still share caches and memory. No claim
is checked here: the table is the result.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import penstock as ps
from penstock.backends.interface import CompileOptions, StageProgram
from penstock.backends.registry import backend_of
from penstock.doctor.examine import examine
from penstock.inspection.kernels.kernels import kernel_rows
from penstock.inspection.kernels.timing import measure_rows, random_arguments
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import Module
from penstock.models import write_bert, write_cnn, write_gpt, write_mlp
from penstock.passes.costs.prices import GraphCost

Writer = Callable[..., Path]
# How a model is written, its sizes, its loss, and the samples of a call.
MODELS: dict[str, tuple[Writer, dict[str, object], str, int]] = {
    "gpt": (write_gpt, {"layers": 4, "width": 256, "heads": 8, "vocab": 512, "positions": 128}, "cross_entropy", 4),
    "gpt-wide": (
        write_gpt,
        {"layers": 2, "width": 512, "heads": 8, "vocab": 2048, "positions": 64},
        "cross_entropy",
        4,
    ),
    "gpt-32": (write_gpt, {"layers": 3, "width": 384, "heads": 6, "vocab": 1024, "positions": 32}, "cross_entropy", 1),
    "mlp-4": (write_mlp, {"sizes": (512, 2048, 2048, 512)}, "mse", 4),
    "mlp-16": (write_mlp, {"sizes": [1024] * 9}, "mse", 16),
    "mlp-32": (write_mlp, {"sizes": [1024] * 9}, "mse", 32),
    "mlp-64": (write_mlp, {"sizes": [1024] * 9}, "mse", 64),
    "mlp-320": (write_mlp, {"sizes": [1024] * 9}, "mse", 320),
    "cnn": (write_cnn, {"channels": (3, 32, 64, 128), "size": 64}, "cross_entropy", 4),
    "bert": (write_bert, {"layers": 2, "width": 256, "heads": 4, "vocab": 1000, "positions": 128}, "cross_entropy", 4),
}
ROUNDS, MICROBATCHES = 12, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="FILE", help="take the rates of the first device of this file")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    device = Cluster.load(arguments.cluster).devices[0] if arguments.cluster else measured_device()
    guessed = Cluster.local(threads=(1,)).devices[0]
    print(
        f"{'model':10} {'graph':6} {'measured':>9} {'rates':>8} {'/ ms':>5} {'table':>8} {'/ ms':>5} {'guessed':>8} "
        f"{'/ ms':>5}"
    )
    off: dict[str, list[float]] = {"rates": [], "table": [], "guessed": []}
    for name in arguments.models:
        for graph, measured, costs in rows_of(name, device, guessed):
            ratios = {key: seconds / measured for key, seconds in costs.items()}
            for key, ratio in ratios.items():
                off[key].append(abs(ratio - 1))
            cells = " ".join(f"{1e3 * costs[key]:8.3f} {ratios[key]:5.2f}" for key in ("rates", "table", "guessed"))
            print(f"{name:10} {graph:6} {1e3 * measured:9.3f} {cells}", flush=True)
    for key, errors in off.items():
        print(
            f"{key}: off by {100 * statistics.median(errors):.0f} % in the median, {100 * max(errors):.0f} % at "
            f"worst, over {len(errors)} graphs"
        )


def measured_device() -> Device:
    report = examine((1,), say=lambda text: print(text, flush=True))
    assert report is not None
    device = report.cluster.devices[0]
    print(
        f"{device.flops / 1e9:.4g} GFLOP/s, {device.bandwidth / 1e9:.3g} GB/s, cache {device.cache >> 20} MiB "
        f"{device.cache_bandwidth / 1e9:.3g} GB/s"
    )
    print(" ".join(f"{key} {share}" for key, share in device.efficiency), "\n")
    return device


def rows_of(name: str, device: Device, guessed: Device) -> list[tuple[str, float, dict[str, float]]]:
    """Return for every graph of the model on one stage its name, its seconds, and its costs by source."""
    write, sizes, loss, batch = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="penstock-costs-") as text:
        folder = Path(text)
        model = ps.from_onnx(write(folder / "model.onnx", **sizes), dims={"batch": batch})
        training = ps.Training(loss, ps.AdamW(lr=1e-4), MICROBATCHES)
        module = ps.plan(model, Cluster((replace(device, name="cpu:0", spaces=()),)), training).module
        backend = backend_of("tvm")
        files = backend.compile_stages(module, [0], folder, CompileOptions())
        program = backend.load_stage(module, 0, [folder / file for file in files[0]], 1)
        measured = time_graphs(program, module)
        table: dict[str, float] = {}
        for row in measure_rows(kernel_rows(module), module, "tvm", 1):
            table[row.graph] = table.get(row.graph, 0.0) + row.seconds * len(row.names)
    costs = {kind: GraphCost(module.graphs[f"s0.{kind}"]) for kind in measured}
    passed = {kind: cost.moved for kind, cost in costs.items()}
    rows = []
    for kind, seconds in measured.items():
        others = MICROBATCHES * (passed["F"] + passed["B"]) if kind == "U" else passed["F" if kind == "B" else "B"]
        rates = costs[kind].seconds(device, between=others)
        rows.append(
            (kind, seconds, {"rates": rates, "table": table[f"s0.{kind}"], "guessed": costs[kind].seconds(guessed)})
        )
    return rows


def time_graphs(program: StageProgram, module: Module) -> dict[str, float]:
    """Return median seconds of one call. Arguments that graphs have in common are one tensor."""
    graphs = {kind: module.graphs[f"s0.{kind}"] for kind in "FBU"}
    arguments = {kind: random_arguments(graph, module) for kind, graph in graphs.items()}
    times: dict[str, list[float]] = {kind: [] for kind in graphs}
    for _ in range(ROUNDS):
        for kind in (*("F", "B") * MICROBATCHES, "U"):
            begin = time.process_time()
            kept = program.call(graphs[kind].name, arguments[kind])
            times[kind].append(time.process_time() - begin)
            del kept
    return {kind: statistics.median(seconds[2:]) for kind, seconds in times.items()}


if __name__ == "__main__":
    main()
