"""From a model file to a trained model in Python: plan, compile, train on two processes with 2bw, save, go on.

python train_mlp.py [FOLDER]          leaves model, bundle and checkpoint there (default: train-mlp-out)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.models import write_mlp

FEATURES, WIDTH, CLASSES, MICROBATCH, MICROBATCHES = 16, 512, 4, 16, 4


def batches(count: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Points whose class is the coordinate that is farthest from zero among the first four."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        x = random.normal(size=(MICROBATCH * MICROBATCHES, FEATURES)).astype(np.float32)
        yield {"x": x, "labels": np.abs(x[:, :CLASSES]).argmax(axis=1)}


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "train-mlp-out")
    model = ps.from_onnx(write_mlp(out / "model.onnx", [FEATURES, WIDTH, WIDTH, WIDTH, CLASSES]), dims={"batch": MICROBATCH})
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=MICROBATCHES)
    plan = ps.plan(model, ps.Cluster.local(2), training, schedule="2bw")
    print(plan.to_json())
    bundle = ps.compile(plan, out / "bundle")
    with ps.open(bundle) as job:
        losses = list(job.run(batches(200, seed=0)))
        print(f"200 steps: loss {np.mean(losses[:10]):.3f} -> {np.mean(losses[-10:]):.3f}")
        job.save(out / "checkpoint")
    with ps.open(bundle, resume=out / "checkpoint") as job:
        losses = list(job.run(batches(50, seed=1)))
        print(f"50 more, after a restart: loss {np.mean(losses):.3f}")


if __name__ == "__main__":
    main()
