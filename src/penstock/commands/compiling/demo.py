"""`penstock demo`: the whole way once, on this machine.

A small GPT is written as ONNX, planned, compiled for two local CPU devices, and trained on the text that comes with the
package; the loss must fall. The compiled stages are timed side by side, without messages. The step that is predicted
from these times is compared with the run. They are timed once more after it: where the machine has another speed then,
the comparison says so. Model, bundle, dumps, data and metrics stay in one folder.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from penstock.commands.arguments import add_settings, settings_from
from penstock.ir.schedule_names import TRAINING
from penstock.planning.options import BuildOptions, PlanOptions
from penstock.support.errors import UsageError, VerifyError
from penstock.support.hardware import load, usable_cores
from penstock.support.settings import POSITIVE, setting
from penstock.support.terminal import Progress, say

if TYPE_CHECKING:
    import numpy as np

LAYERS, WIDTH, HEADS, VOCAB, POSITIONS = 6, 256, 4, 256, 64
SEQUENCES, MICROBATCHES, STAGES = 2, 4, 2
LEARNING_RATE = 3e-4
# Steps before those that are compared with the prediction: caches and buffers are filled.
_WARM_UP = 5
# How much longer or shorter a step may be by the times after the run before that is told.
_STEADY = 0.1


@dataclass(frozen=True)
class DemoOptions:
    """Settings of the demonstration."""

    out: str = setting(
        "demo-out",
        "folder for model, bundle, dumps and metrics (default: demo-out)",
        flags=("-o", "--out"),
        shown="DIR",
    )
    steps: int = setting(120, "optimiser steps (default: 120)", check=POSITIVE, shown="N")
    schedule: str = setting("2bw", "default: 2bw", choices=TRAINING)
    backend: str = setting("tvm", "default: tvm", choices=("tvm", "numpy"))


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock demo`, which are settings alone."""
    add_settings(parser, DemoOptions)


def run(arguments: Namespace) -> int:
    """Check the settings of the compiler's cache, then run the demonstration."""
    from penstock.backends.registry import check_cache  # lazy: heavy

    options = settings_from(DemoOptions, arguments)
    check_cache(options.backend)
    return run_demo(options)


def text_samples(count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` stretches of the shipped text as byte values, and for each position the byte that follows."""
    from importlib import resources  # lazy: heavy

    import numpy as np  # lazy: heavy

    text = np.frombuffer(resources.files("penstock").joinpath("demo_text.txt").read_bytes(), dtype=np.uint8).astype(
        np.int64
    )
    starts = np.random.default_rng(seed).integers(0, len(text) - length, size=count)
    windows = text[starts[:, None] + np.arange(length + 1)]
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def run_demo(options: DemoOptions) -> int:
    """Run the demonstration; return exit code 0 when the loss fell."""
    import shutil  # lazy: heavy

    import numpy as np  # lazy: heavy

    started, out = time.monotonic(), Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use the folder: {error.strerror or error}", where=str(out)) from error
    path, predicted = _compiled(out, options)
    losses, seconds = _trained(out, options)
    tail = max(1, min(5, len(losses) // 4))
    before, after = float(np.mean(losses[:tail])), float(np.mean(losses[-tail:]))
    print(
        f"loss {before:.3f} -> {after:.3f} (means of the first and last {tail} of {len(losses)} steps), "
        f"{time.monotonic() - started:.0f} s in all"
    )
    dumps, metrics = out / "dumps", out / "metrics.jsonl"
    print(f"model {path}\nbundle {out / 'bundle'}\ndumps {dumps}\nmetrics {metrics}\ncheckpoint {out / 'checkpoint'}")
    print(grade(predicted, seconds, _predicted(out / "bundle")))
    command = "penstock" if shutil.which("penstock") else f"{quote(sys.executable)} -m penstock"
    before_versions, after_versions = (
        quote(str(next(dumps.glob(f"*_{name}.ir")))) for name in ("schedule", "weight-versions")
    )
    say(
        f"look around:\n  {command} inspect {quote(str(out / 'bundle'))} --schedule\n  {command} diff "
        f"{before_versions} {after_versions}"
    )
    if not after < before:
        raise VerifyError(
            f"the loss did not fall: {before:.3f} at the start, {after:.3f} at the end", hint="run more --steps"
        )
    return 0


def grade(predicted: float, seconds: list[float], behind: float) -> str:
    """Compare the predicted step with the median of those that were run, without the first ones. `behind` is the step
    that times of the stages after the run predict: it tells whether they are as before."""
    measured = statistics.median(seconds[min(len(seconds) // 2, _WARM_UP) :])
    others = load() - STAGES
    crowded = f"; other programs keep {others:.1f} of {usable_cores()} cores busy" if others >= 1 else ""
    changed = (
        f"; timed again after the run, stages are not as before: a step would take {behind * 1e3:.1f} ms"
        if abs(behind / predicted - 1) > _STEADY
        else ""
    )
    return (
        f"a step was predicted to take {predicted * 1e3:.1f} ms and took {measured * 1e3:.1f} ms (median), "
        f"{measured / predicted:.2f} times as long{crowded}{changed}"
    )


def _predicted(bundle: Path) -> float:
    """Time the stages of a bundle side by side, and predict the seconds of a step."""
    from penstock.backends.bundle.format import open_bundle  # lazy: heavy
    from penstock.calibration.rehearse import rehearse  # lazy: heavy
    from penstock.planning.predict import predict_timed  # lazy: heavy

    opened = open_bundle(bundle)
    return predict_timed(opened.module, rehearse(opened, range(STAGES))).step


def _compiled(out: Path, options: DemoOptions) -> tuple[Path, float]:
    """Write the model and its bundle; return the path of the model, and the predicted seconds of a step."""
    from penstock.doctor.local import measured_cluster  # lazy: heavy
    from penstock.frontends.training import Training  # lazy: heavy
    from penstock.inspection.dump import Dump  # lazy: heavy
    from penstock.ir.cluster.cluster import Cluster  # lazy: heavy
    from penstock.ir.training.optimizers import AdamW  # lazy: heavy
    from penstock.models import write_gpt  # lazy: heavy
    from penstock.planning.build import build  # lazy: heavy
    from penstock.planning.explain import plan_lines  # lazy: heavy
    from penstock.planning.model import from_onnx  # lazy: heavy
    from penstock.planning.pipeline import plan_model  # lazy: heavy
    from penstock.planning.watching import Feedback  # lazy: heavy

    path = write_gpt(
        out / "gpt.onnx", layers=LAYERS, width=WIDTH, heads=HEADS, vocab=VOCAB, positions=POSITIONS, batch=None
    )
    model = from_onnx(path, dims={"batch": SEQUENCES})
    params = sum(v.type.size for v in model.module.vars.values() if v.role == "param")
    say(f"1. wrote {path}: {LAYERS} layers, width {WIDTH}, {params / 1e6:.1f} million parameters")

    training = Training(loss="cross_entropy", optimizer=AdamW(lr=LEARNING_RATE), microbatches=MICROBATCHES)
    dump, cluster = Dump(out / "dumps"), measured_cluster(Cluster.local(STAGES), say)
    planned = PlanOptions(schedule=options.schedule)
    plan = plan_model(model, cluster, training, planned, Feedback(dump, Progress("passes")))
    say("2. planned:")
    for line in plan_lines(plan):
        print(line)
    bundle = build(plan, out / "bundle", BuildOptions(options.backend), Feedback(dump, Progress("compile")))
    say(f"3. compiled {bundle}, and timed its stages side by side")
    predicted = _predicted(bundle)
    print(f"predicted by these times: {predicted * 1e3:.1f} ms per step")
    return path, predicted


def _trained(out: Path, options: DemoOptions) -> tuple[list[float], list[float]]:
    """Train the bundle, and return the loss and the seconds of every step."""
    import numpy as np  # lazy: heavy

    from penstock.runtime.job.run import run_bundle  # lazy: heavy

    steps, schedule = options.steps, options.schedule
    tokens, labels = text_samples(SEQUENCES * MICROBATCHES * steps, POSITIONS, seed=0)
    np.savez(out / "data.npz", tokens=tokens, labels=labels)
    say(f"4. training {steps} steps of {SEQUENCES * MICROBATCHES} sequences on {STAGES} processes with {schedule}")
    metrics = out / "metrics.jsonl"
    run_bundle(out / "bundle", data=str(out / "data.npz"), steps=steps, metrics=metrics, checkpoint=out / "checkpoint")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["loss"] for row in rows], [row["step_s"] for row in rows]
