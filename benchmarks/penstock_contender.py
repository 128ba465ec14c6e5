"""Penstock as a contender: the ONNX file, compiled for two CPU devices of one thread each, trained by the public API.

    python penstock_contender.py SHAPE_JSON MODEL.onnx SCHEDULE WARMUP BUNDLE

The worker processes do all the computing; this one sends batches and collects losses.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from training_shape import MOMENTUM, Shape, batches
from turns import serve

import penstock as ps
from penstock.ir.schedule_names import PACKED


def compile_model(shape: Shape, model_file: str, schedule: str, bundle: Path) -> dict[str, object]:
    """Write the bundle. No part of the model stays in this process."""
    cluster = ps.Cluster.local(2)
    cluster = replace(cluster, devices=tuple(replace(device, threads=1) for device in cluster.devices))
    if shape.has_images:
        optimizer: ps.AdamW | ps.Momentum = ps.Momentum(lr=shape.lr, beta=MOMENTUM, weight_decay=shape.weight_decay)
    else:
        optimizer = ps.AdamW(lr=shape.lr, weight_decay=shape.weight_decay)
    training = ps.Training(loss="cross_entropy", optimizer=optimizer, microbatches=shape.microbatches)
    begin = time.perf_counter()
    packs = 2 if schedule in PACKED else 1
    model = ps.from_onnx(model_file)
    plan = ps.plan(model, cluster, training, schedule=schedule, precision=shape.precision, packs=packs)
    ps.compile(plan, bundle)
    predicted = " + ".join(f"{row['peak'] / 2**20:.0f}" for row in plan.as_dict()["memory"].values())
    return {"compiled in s": round(time.perf_counter() - begin, 1), "predicted peak of tensors, MiB": predicted}


def main() -> None:
    shape, model_file, schedule, warmup = Shape.from_json(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    bundle = Path(sys.argv[5])
    about = compile_model(shape, model_file, schedule, bundle)
    name = "x" if shape.has_images else "tokens"
    data = ({name: inputs, "labels": labels} for inputs, labels in batches(shape))
    with ps.open(bundle, timeout=600) as job:

        def run(steps: int) -> list[float]:
            return [float(loss) for loss in job.run(islice(data, steps))]

        about["losses"] = run(warmup)
        serve({f"rank {rank}": pid for rank, pid in enumerate(job.workers.process_ids())}, about, run)


if __name__ == "__main__":
    main()
