"""Pipelined inference against the bound of its slowest stage, and against onnxruntime and torch on as many threads.

    python benchmarks/inference.py                            all parts: about four minutes
    python benchmarks/inference.py --only paced --json inference.json

    paced   A tiny model on 4 stages, one worker process each, real messages and real requests; a forward takes 20 ms
            (runtime/worker/pace.py), so that four stages fit on one or two cores. The bound is one microbatch per 20 ms. Rows:
            requests of one sample in microbatches of one; requests of 1 to 7 samples in microbatches of 4; one request
            at a time (mode latency), whose bound is 4 forwards per request.
    real    A GPT of 4 blocks, 512 wide, one sequence of 128 tokens per request, on 2 and on 4 stages of one thread
            each. The bound is the forward of the slowest stage while every rank computes forwards without end and no
            messages (src/penstock/calibration/rehearse.py), before and after the turns: cores, caches and memory allow no more, so that
            four stages on two cores have a bound, too. `alone` is the forward of the slowest stage by itself, or those
            of all stages over the cores, whichever is longer. onnxruntime and torch compute in one process with 2
            threads; results are compared with onnxruntime's.
    large   The same with 2 blocks and 16384 tokens of vocabulary on 2 stages: results of 8 MB, which have to get out
            while the last stage computes.

Contenders take turns, round after round. A row's figure is the median over rounds, each from the first request
submitted to the last one answered: filling and draining the pipeline is part of it. The exit code is 1 where results
are not onnxruntime's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from machine import markdown, write_json
from turns import take_turns

import penstock as ps
from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.calibration.rehearse import rehearse
from penstock.models import write_gpt, write_mlp
from penstock.runtime.job.job import Job
from penstock.support.hardware import usable_cores

Run = Callable[[], float]
FORWARD = 0.02
SIZES = {"layers": 4, "width": 512, "heads": 8, "vocab": 512, "positions": 128}
LARGE = SIZES | {"layers": 2, "vocab": 16384}
PARTS = ("paced", "real", "large")
# Largest difference over largest magnitude; both sides compute in float32.
TOLERANCE = 1e-5


def mlp_bundle(folder: Path, stages: int, batch: int) -> Path:
    path = write_mlp(folder / f"mlp{batch}.onnx", (4,) * (stages + 1), None, seed=1)
    model = ps.from_onnx(path, dims={"batch": batch})
    products = [op.outs[0].name for op in model.module.graphs["main"].ops if op.kind == "matmul"]
    plan = ps.plan(model, ps.Cluster.local(stages), split_at=products[1:])
    return ps.compile(plan, folder / f"mlp{batch}", backend="numpy")


def timed(job: Job, requests: list[dict[str, np.ndarray]]) -> float:
    begin = time.perf_counter()
    for _ in job.stream(requests):
        pass
    return time.perf_counter() - begin


def paced(rounds: int, microbatches: int, forward: float) -> list[dict[str, Any]]:
    stages, random = 4, np.random.default_rng(0)
    x = random.standard_normal((4 * microbatches, 4)).astype(np.float32)
    cuts, at = [], 0
    while at < len(x):
        cuts.append(x[at : at + int(random.integers(1, 8))])
        at += len(cuts[-1])
    few = max(microbatches // 8, 2)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        single, four = mlp_bundle(folder, stages, 1), mlp_bundle(folder, stages, 4)
        pace = {"F": forward}
        one = stack.enter_context(ps.open(single, pace=pace))
        packed = stack.enter_context(ps.open(four, pace=pace))
        alone = stack.enter_context(ps.open(single, pace=pace, mode="latency"))
        rows: dict[str, tuple[Run, float]] = {
            "1 sample, microbatches of 1": (
                lambda: timed(one, [{"x": x[i : i + 1]} for i in range(microbatches)]),
                microbatches * forward,
            ),
            "1 to 7 samples, microbatches of 4": (
                lambda: timed(packed, [{"x": c} for c in cuts]),
                microbatches * forward,
            ),
            "1 sample, one at a time": (
                lambda: timed(alone, [{"x": x[i : i + 1]} for i in range(few)]),
                few * stages * forward,
            ),
        }
        times = take_turns({name: run for name, (run, _) in rows.items()}, rounds)
    counts = {
        "1 sample, microbatches of 1": microbatches,
        "1 to 7 samples, microbatches of 4": len(cuts),
        "1 sample, one at a time": few,
    }
    lines = []
    for name, (_, bound) in rows.items():
        seconds = statistics.median(times[name])
        line = {
            "row": name,
            "requests": counts[name],
            "seconds": seconds,
            "bound": bound,
            "of_bound": bound / seconds,
            "times": times[name],
        }
        lines.append({"part": "paced", "stages": stages, **line})
    return lines


def real(part: str, sizes: dict[str, int], split: Sequence[int], rounds: int, requests: int) -> list[dict[str, Any]]:
    import onnxruntime
    import torch
    from torch_models import build

    tokens = np.random.default_rng(0).integers(0, sizes["vocab"], (requests, 1, sizes["positions"]))
    feeds = [{"tokens": t} for t in tokens]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        path = write_gpt(folder / "gpt.onnx", seed=1, **sizes)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        torch.set_num_threads(2)
        module = build("gpt", sizes, path).eval()
        model = ps.from_onnx(path, dims={"batch": 1})
        bundles = {n: open_bundle(ps.compile(ps.plan(model, ps.Cluster.local(n)), folder / f"gpt{n}")) for n in split}
        rehearsed = {n: [forwards(bundle)] for n, bundle in bundles.items()}
        jobs = {n: stack.enter_context(Job(bundle)) for n, bundle in bundles.items()}

        def onnx() -> float:
            begin = time.perf_counter()
            for t in tokens:
                session.run(None, {"tokens": t})
            return time.perf_counter() - begin

        def in_torch() -> float:
            begin = time.perf_counter()
            with torch.inference_mode():
                for t in tokens:
                    module(torch.from_numpy(t))
            return time.perf_counter() - begin

        runs: dict[str, Run] = {stages_row(n): partial(timed, job, feeds) for n, job in jobs.items()}
        runs |= {"onnxruntime, 2 threads": onnx, "torch, 2 threads": in_torch}
        errors: dict[str, float] = {}
        for n, job in jobs.items():
            for t, outputs in zip(tokens[:8], job.stream(feeds[:8]), strict=True):
                reference = session.run(None, {"tokens": t})[0]
                error = float(np.abs(outputs["logits"] - reference).max() / np.abs(reference).max())
                errors[stages_row(n)] = max(errors.get(stages_row(n), 0.0), error)
        for run in runs.values():
            run()  # warm up
        times = take_turns(runs, rounds)
        for n, bundle in bundles.items():
            rehearsed[n].append(forwards(bundle))
    lines = []
    for name in runs:
        seconds = statistics.median(times[name])
        lines.append({"part": part, "row": name, "requests": requests, "seconds": seconds, "times": times[name]})
    for n, line in zip(bundles, lines, strict=False):
        alone, together = (statistics.mean(x) for x in zip(*rehearsed[n], strict=True))
        line |= {
            "bound": requests * together,
            "of_bound": requests * together / line["seconds"],
            "alone": requests * alone,
        }
        line |= {"error": errors[line["row"]], "rehearsed": rehearsed[n]}
    return lines


def stages_row(stages: int) -> str:
    return f"penstock, {stages} stages"


def forwards(bundle: Bundle) -> tuple[float, float]:
    """Return seconds of a microbatch by the ranks' forwards: one rank at a time, and all at once."""
    ranks = range(bundle.world_size)
    each = [rehearse(bundle, [rank], batches=20, seconds=1.0)[0]["F"] for rank in ranks]
    return max(*each, sum(each) / usable_cores()), max(
        row["F"] for row in rehearse(bundle, ranks, batches=20, seconds=2.0)
    )


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for x in lines:
        shares = [f"{x['requests'] / x['bound']:.1f}", f"{x['of_bound']:.3f}"] if "bound" in x else ["-", "-"]
        shares.append(f"{x['alone'] / x['seconds']:.3f}" if "alone" in x else "-")
        rows.append([x["part"], x["row"], x["requests"], f"{x['requests'] / x['seconds']:.1f}", *shares])
    return markdown(["part", "row", "requests", "requests/s", "bound", "of the bound", "of alone"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each row (default: 3)")
    parser.add_argument(
        "--microbatches", type=int, default=160, metavar="N", help="paced: microbatches per turn (default: 160)"
    )
    parser.add_argument(
        "--forward",
        type=float,
        default=FORWARD,
        metavar="SECONDS",
        help="paced: how long a forward takes (default: 0.02)",
    )
    parser.add_argument(
        "--requests", type=int, default=160, metavar="N", help="real, large: requests per turn (default: 160)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    begin, lines = time.perf_counter(), []
    if arguments.only in (None, "paced"):
        lines += paced(arguments.rounds, arguments.microbatches, arguments.forward)
    if arguments.only in (None, "real"):
        lines += real("real", SIZES, (2, 4), arguments.rounds, arguments.requests)
    if arguments.only in (None, "large"):
        lines += real("large", LARGE, (2,), arguments.rounds, arguments.requests)
    print(table(lines))
    print(f"took {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    write_json(arguments.json, {"lines": lines})
    wrong = [x for x in lines if x.get("error", 0.0) > TOLERANCE]
    for x in wrong:
        print(f"{x['part']}, {x['row']}: results differ from onnxruntime's by {x['error']:.1e}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
