"""A program: a traced training of two stages on devices of straw, whose computations take a given time, and one that has too little memory.

Out: a line of JSON: the actions of each rank with begin and duration in seconds, the last row of metrics, and the error of the second training.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gpu.straw.training import write

from penstock import api
from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.training.optimizers import AdamW
from penstock.runtime.job.run import run_bundle
from penstock.support.errors import PenstockError

STEPS = 2


def main(folder: Path) -> dict[str, object]:
    """Train twice."""
    training = Training(loss="cross_entropy", optimizer=AdamW(lr=1e-3), microbatches=4)
    plan = api.plan(write("gpt", folder), Cluster.listed("sm_90,sm_90"), training, schedule="1f1b", microbatches=4)
    bundle = api.compile(plan, folder / "bundle", backend="numpy")
    run_bundle(bundle, steps=STEPS, trace=folder / "trace.json", metrics=folder / "metrics.jsonl")
    entries = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    ranks = [[(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in entries if e["pid"] == rank] for rank in range(2)]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    os.environ["STRAW_MEMORY"] = "200000"
    try:
        run_bundle(bundle, steps=STEPS)
        error = ""
    except PenstockError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {"ranks": ranks, "memory": {k: v for row in rows for k, v in row.items() if "gpu" in k}, "error": error}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
