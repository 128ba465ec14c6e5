"""Answer requests with a pipeline: in order, from several threads, and for latency.

Compiles a BERT-like classifier from ONNX for two stages and sends it requests of one to seven sequences. They come all
as a stream, whose answers are in order; from several threads at once, each of which waits for its answer; and one at a
time. Small requests share microbatches.

Prints sequences per second of the first two and the latency of the third. Fails unless every answer is onnxruntime's
within 1e-4, request by request.

Takes about a minute on two cores (README.md).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnxruntime

import penstock as ps
from penstock.models import write_bert

VOCAB, POSITIONS, CLASSES = 1000, 64, 8
Arrays = dict[str, np.ndarray]


def worst(answers: list[Arrays], expected: list[np.ndarray]) -> float:
    """Return the largest difference from the expected answers, relative to the largest score."""
    if len(answers) != len(expected) or any(
        answer["y"].shape != wanted.shape for answer, wanted in zip(answers, expected, strict=True)
    ):
        return float("inf")
    scale = max(abs(wanted).max() for wanted in expected)
    return float(max(abs(answer["y"] - wanted).max() for answer, wanted in zip(answers, expected, strict=True)) / scale)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep model and bundle in this folder (default: keep nothing)")
    parser.add_argument(
        "--model",
        type=Path,
        help="an ONNX model with input `tokens` and output `y`, such as one that another run of this kept",
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--backend",
        default="tvm",
        choices=("tvm", "numpy"),
        help="numpy interprets stages instead of compiling them: slow steps, at once",
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    random = np.random.default_rng(0)
    requests = [
        {"tokens": random.integers(0, VOCAB, (random.integers(1, 8), POSITIONS))} for _ in range(options.requests)
    ]
    sequences = sum(len(request["tokens"]) for request in requests)

    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {
            "layers": options.layers,
            "width": options.width,
            "heads": 4,
            "vocab": VOCAB,
            "positions": POSITIONS,
            "classes": CLASSES,
        }
        path = write_bert(folder / "bert.onnx", **sizes)
        judge = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        expected = [judge.run(["y"], request)[0] for request in requests]
        # Without training settings the bundle is for inference; the batch dimension is that of a microbatch.
        model = ps.from_onnx(options.model or path, dims={"batch": 4})
        bundle = ps.compile(ps.plan(model, ps.Cluster.local(2)), folder / "bundle", backend=options.backend)

        print(f"{len(requests)} requests, {sequences} sequences", file=sys.stderr)
        off = {}
        with ps.open(bundle) as job:
            job.infer(requests[0])  # workers have loaded everything when it is answered
            started = time.perf_counter()
            off["stream"] = worst(list(job.stream(requests)), expected)
            print(f"a stream: {sequences / (time.perf_counter() - started):.0f} sequences per second")
            with ThreadPoolExecutor(options.threads) as threads:
                started = time.perf_counter()
                answers = list(threads.map(lambda request: job.submit(request).result(timeout=60), requests))
                print(
                    f"{options.threads} threads: {sequences / (time.perf_counter() - started):.0f} sequences per second"
                )
            off["threads"] = worst(answers, expected)

        with ps.open(bundle, mode="latency") as job:
            job.infer(requests[0])
            answers, seconds = [], []
            for request in requests:
                started = time.perf_counter()
                answers.append(job.infer(request))
                seconds.append(time.perf_counter() - started)
            off["latency"] = worst(answers, expected)
            middle, slow = np.percentile(seconds, (50, 99))
            print(f"one at a time: {middle * 1e3:.1f} ms in the median, {slow * 1e3:.1f} ms at the 99th percentile")

    print(f"largest difference from onnxruntime, relative to the largest score: {max(off.values()):.1e}")
    if wrong := [name for name, difference in off.items() if difference > 1e-4]:
        sys.exit(f"answers are not onnxruntime's: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
