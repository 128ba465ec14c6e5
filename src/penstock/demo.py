"""`penstock demo`: the whole way once, on this machine. A small GPT is written as ONNX, planned, compiled for two local CPU devices, and
trained on the text that comes with the package; the loss must fall. Leaves model, bundle, dumps, data and metrics in one folder.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from importlib import resources
from pathlib import Path
from shlex import quote

import numpy as np

from penstock.arguing import print_plan
from penstock.support.errors import UsageError, VerifyError
from penstock.support.terminal import Progress, say

LAYERS, WIDTH, HEADS, VOCAB, POSITIONS = 6, 256, 4, 256, 64
SEQUENCES, MICROBATCHES, STAGES = 2, 4, 2
LEARNING_RATE = 3e-4


def text_samples(count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` stretches of the shipped text as byte values, and for each position the byte that follows."""
    text = np.frombuffer(resources.files("penstock").joinpath("demo_text.txt").read_bytes(), dtype=np.uint8).astype(
        np.int64
    )
    starts = np.random.default_rng(seed).integers(0, len(text) - length, size=count)
    windows = text[starts[:, None] + np.arange(length + 1)]
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def run_demo(out: Path, *, steps: int, schedule: str, backend: str) -> int:
    """Run it all; exit code 0 when the loss fell."""
    from penstock import api
    from penstock.frontends.training import Training
    from penstock.inspection.dump import Dump
    from penstock.ir.cluster.cluster import Cluster
    from penstock.ir.training.optimizers import AdamW
    from penstock.models import write_gpt
    from penstock.runtime.job.run import run_bundle

    started = time.monotonic()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use the folder: {error}", where=str(out)) from error
    path = write_gpt(
        out / "gpt.onnx", layers=LAYERS, width=WIDTH, heads=HEADS, vocab=VOCAB, positions=POSITIONS, batch=None
    )
    model = api.from_onnx(path, dims={"batch": SEQUENCES})
    params = sum(v.type.size for v in model.module.vars.values() if v.role == "param")
    say(f"1. wrote {path}: {LAYERS} layers, width {WIDTH}, {params / 1e6:.1f} million parameters")

    training = Training(loss="cross_entropy", optimizer=AdamW(lr=LEARNING_RATE), microbatches=MICROBATCHES)
    dumps = out / "dumps"
    dump = Dump(dumps)
    plan = api.plan(model, Cluster.local(STAGES), training, schedule=schedule, dump=dump, progress=Progress("passes"))
    say("2. planned:")
    print_plan(plan)
    bundle = api.compile(plan, out / "bundle", backend=backend, dump=dump, progress=Progress("compile"))
    say(f"3. compiled {bundle}")

    tokens, labels = text_samples(SEQUENCES * MICROBATCHES * steps, POSITIONS, seed=0)
    np.savez(out / "data.npz", tokens=tokens, labels=labels)
    say(f"4. training {steps} steps of {SEQUENCES * MICROBATCHES} sequences on {STAGES} processes with {schedule}")
    metrics = out / "metrics.jsonl"
    run_bundle(bundle, data=str(out / "data.npz"), steps=steps, metrics=metrics, checkpoint=out / "checkpoint")
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    tail = max(1, min(5, len(losses) // 4))
    before, after = float(np.mean(losses[:tail])), float(np.mean(losses[-tail:]))
    print(
        f"loss {before:.3f} -> {after:.3f} (means of the first and last {tail} of {len(losses)} steps), "
        f"{time.monotonic() - started:.0f} s in all"
    )
    print(f"model {path}\nbundle {out / 'bundle'}\ndumps {dumps}\nmetrics {metrics}\ncheckpoint {out / 'checkpoint'}")
    command = "penstock" if shutil.which("penstock") else f"{quote(sys.executable)} -m penstock"
    before_versions, after_versions = (
        quote(str(next(dumps.glob(f"*_{name}.ir")))) for name in ("schedule", "weight-versions")
    )
    say(
        f"look around:\n  {command} inspect {quote(str(out / 'bundle'))} --schedule\n  {command} diff {before_versions} {after_versions}"
    )
    if not after < before:
        raise VerifyError(
            f"the loss did not fall: {before:.3f} at the start, {after:.3f} at the end", hint="run more --steps"
        )
    return 0
