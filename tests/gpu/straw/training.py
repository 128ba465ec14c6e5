"""A program: trainings on devices of straw, by ranks in processes of their own, against the same trainings by the interpreter.

In: a folder, and trainings as JSON. Out: a line of JSON: for each the losses of both, and what the drivers of its ranks report: faults, and by device the
waits of its rank's loop and of other threads, its tasks, and the blocks that are left when everything is done; also
what the rank's loop told its streams, the graphs that were launched, and what these did. `copied` counts copies in and out of a batch. `memory` is what metrics say
of each rank with a GPU, and what the plan does: the peak, and the room for captured calls.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from penstock import api
from penstock.backends.bundle.format import open_bundle
from penstock.backends.interface import stage_graphs
from penstock.backends.tvm.cuda.target import device_machine
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.memory.captured import captured_room
from penstock.ir.memory.predict import measure_memory
from penstock.ir.schedule import COPIES
from penstock.ir.training.optimizers import AdamW
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.runtime.job.run import run_bundle


@dataclass(frozen=True)
class Case:
    """One training. `devices` as Cluster.listed takes them; with `shared` all GPUs are the first one. One that is
    `resumed` stops half-way, and goes on from its checkpoint."""

    model: str = "gpt"
    devices: str = "cpu,sm_90"
    schedule: str = "1f1b"
    precision: str = "f32"
    library: str = "none"
    replicas: int = 1
    packs: int = 1
    offload: str = "none"
    split_at: tuple[str, ...] = ()
    microbatches: int = 4
    shared: bool = False
    backend: str = "tvm"
    steps: int = 4
    resumed: bool = False


def write(name: str, folder: Path) -> api.Model:
    """Write a small model."""
    if name == "gpt":
        path = write_gpt(folder / "gpt.onnx", layers=2, width=16, heads=2, vocab=20, positions=8)
    elif name == "wide gpt":
        path = write_gpt(folder / "gpt.onnx", layers=2, width=64, heads=1, vocab=80, positions=64)
    elif name == "mlp":
        path = write_mlp(folder / "mlp.onnx", [32] * 13, batch=4)
    else:
        path = write_cnn(folder / "cnn.onnx", channels=(1, 4, 4), size=8)
    return api.from_onnx(path) if name == "mlp" else api.from_onnx(path, dims={"batch": 4})


def uses_tensor_cores(module: Module) -> bool:
    """Return whether the graphs of a module have products on tensor cores, if they are compiled for a GPU."""
    graphs = [graph for stage in module.stages for graph in stage_graphs(module, stage.index)]
    kernels = [step.kernel for graph in graphs for step in plan_kernels(graph, device_machine("sm_90")).steps]
    return any("tvm_mma_sync" in str(kernel.function) for kernel in kernels)


def losses(case: Case, cluster: Cluster, folder: Path, backend: str) -> list[float]:
    """Train, and return the losses."""
    folder.mkdir(parents=True)
    loss = "mse" if case.model == "mlp" else "cross_entropy"
    training = Training(loss=loss, optimizer=AdamW(lr=1e-3), microbatches=case.microbatches)
    plan = api.plan(
        write(case.model, folder),
        cluster,
        training,
        schedule=case.schedule,
        precision=case.precision,
        cuda_libraries=case.library,
        microbatches=case.microbatches,
        replicas=case.replicas,
        packs=case.packs,
        offload=case.offload,
        split_at=list(case.split_at),
    )
    assert case.model != "wide gpt" or uses_tensor_cores(plan.module)
    bundle = api.compile(plan, folder / "bundle", backend=backend)
    options = {"data": "synthetic", "metrics": folder / "metrics.jsonl", "checkpoint": folder / "checkpoint"}
    if not case.resumed:
        return run_bundle(bundle, steps=case.steps, **options).losses
    half = case.steps // 2
    begun = run_bundle(bundle, steps=half, **options).losses
    return begun + run_bundle(bundle, steps=case.steps - half, resume=folder / "checkpoint", **options).losses


def _numbers(lines: list[str], kind: str) -> dict[str, list[int]]:
    """Return the numbers of lines of one kind, by device."""
    return {d: list(map(int, n)) for d, *n in (line.split()[1:] for line in lines if line.startswith(kind))}


def memory(folder: Path) -> dict[str, dict[str, int]]:
    """Return the memory of ranks with a GPU, as it was and as the plan has it, by their numbers."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    module, said = (
        open_bundle(folder / "bundle").module,
        {key: row[key] for row in rows for key in row if "_bytes" in key},
    )
    return {
        str(rank): {
            "used": said[f"rank{rank}_gpu_bytes"],
            "captured": said.get(f"rank{rank}_captured_bytes", 0),
            "peak": row.peak,
            "room": sum(captured_room(module, rank).values()),
        }
        for rank, row in measure_memory(module).items()
        if f"rank{rank}_gpu_bytes" in said
    }


def copied(folder: Path) -> dict[str, int]:
    """Return the copies between the device and its homes in a batch of each rank that has any."""
    schedule = open_bundle(folder / "bundle").module.schedule
    assert schedule is not None
    counts = {str(rank): sum(a.kind in COPIES for a in program.batch) for rank, program in schedule.ranks.items()}
    return {rank: count for rank, count in counts.items() if count}


def main(folder: Path, cases: list[Case]) -> list[dict[str, object]]:
    """Run trainings; return what there is to say of each."""
    said: list[dict[str, object]] = []
    folder.mkdir(exist_ok=True)
    # The same variables for all trainings: their ranks are forked from one process, which imports once.
    log = folder / "log"
    os.environ["STRAW_LOG"] = str(log)
    for number, case in enumerate(cases):
        place = folder / str(number)
        log.unlink(missing_ok=True)
        cluster = Cluster.listed(case.devices)
        if case.shared:
            devices = tuple(replace(d, gpu="0") if d.kind == "cuda" else d for d in cluster.devices)
            cluster = replace(cluster, devices=devices)
        on_straw = losses(case, cluster, place / "straw", case.backend)
        alike = Cluster.local(len(cluster.devices))
        expected = losses(case, alike, place / "expected", "numpy")
        lines = log.read_text().splitlines() if log.exists() else []
        said.append(
            {
                "losses": on_straw,
                "expected": expected,
                "memory": memory(place / "straw"),
                "copied": copied(place / "straw"),
                "faults": [line for line in lines if not line.startswith(("end ", "work "))],
                "ends": _numbers(lines, "end "),
                "work": _numbers(lines, "work "),
            }
        )
    return said


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), [Case(**case) for case in json.loads(sys.argv[2])])))
