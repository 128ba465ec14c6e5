"""Small models on one thread: a bundle in the calling process, the same through a worker process, and onnxruntime.

    python benchmarks/one_process.py                                    all models: about a minute
    python benchmarks/one_process.py --only cnn --rounds 21 --json one_process.json

    mlp        three layers up to 256 wide, 8 samples
    mlp-wide   three layers up to 512 wide, 16 samples
    cnn        two convolutions of up to 16 channels on 28x28, one sample
    attention  two blocks of BERT, 64 wide, 32 positions, one sequence
    deep       six such blocks

All read one ONNX file. `load` is `penstock.load`, `job` is `job.infer` of a job that computes in this process,
`workers` is `job.infer` of a job with a worker process (it counts versions, which a job in this process does not do).
A call has one microbatch. Outputs of all are compared with onnxruntime's first: exit code 1 where they differ.

Contenders take turns of some calls each. The figure of a turn is the median of its calls, that of a contender the
median of its turns, in wall time. Ratios are to onnxruntime: above 1, onnxruntime is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from machine import load, markdown, processor, system, versions, write_json
from turns import in_turn

import penstock as ps
from penstock.models import write_bert, write_cnn, write_mlp

Arrays = dict[str, np.ndarray]
Infer = Callable[[Arrays], Arrays]

TOLERANCE = 1e-4
WARMUP = 20
REFERENCE = "onnxruntime"
_BERT = {"width": 64, "heads": 2, "vocab": 64, "positions": 32}
MODELS: dict[str, Callable[[Path], Path]] = {
    "mlp": lambda path: write_mlp(path, [256, 256, 256, 10], batch=8),
    "mlp-wide": lambda path: write_mlp(path, [512, 512, 512, 10], batch=16),
    "cnn": lambda path: write_cnn(path, 1),
    "attention": lambda path: write_bert(path, 1, layers=2, **_BERT),
    "deep": lambda path: write_bert(path, 1, layers=6, **_BERT),
}


@dataclass(frozen=True)
class Result:
    """The medians of the turns of each contender, in seconds, and its largest error."""

    model: str
    seconds: dict[str, list[float]]
    errors: dict[str, float]

    def median(self, name: str) -> float:
        """Return the figure of a contender."""
        return statistics.median(self.seconds[name])

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, with ratios to onnxruntime."""
        ratios = {name: self.median(name) / self.median(REFERENCE) for name in self.seconds}
        medians = {name: self.median(name) for name in self.seconds}
        return {
            "model": self.model,
            "seconds": self.seconds,
            "medians": medians,
            "ratios": ratios,
            "errors": self.errors,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS), metavar="MODEL", help="models")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of each contender (default: 9)")
    parser.add_argument("--calls", type=int, default=200, metavar="N", help="calls of a turn (default: 200)")
    parser.add_argument("--json", metavar="FILE", help="write the figure of every turn")
    arguments = parser.parse_args()
    facts = {
        "processor": processor(sorted(os.sched_getaffinity(0))),
        "system": system(),
        "versions": versions("penstock", "apache-tvm", "onnxruntime", "numpy", "torch"),
        "load before": load(),
    }
    results = [measure(model, arguments.rounds, arguments.calls) for model in arguments.only]
    facts["load after"] = load()
    for key, value in facts.items():
        print(f"{key:<12} {value}")
    rows = [result.as_dict() for result in results]
    print("\n" + markdown(*table_of(rows)))
    write_json(arguments.json, {"facts": facts, "tolerance": TOLERANCE, "rows": rows})
    return int(any(error > TOLERANCE for result in results for error in result.errors.values()))


def measure(model: str, rounds: int, calls: int) -> Result:
    """Let the contenders compute one model in turns."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder, ExitStack() as jobs:
        path = MODELS[model](Path(folder) / "model.onnx")
        session = _session(path)
        inputs = _inputs(session)
        plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(1, threads=[1]))
        bundle = ps.compile(plan, Path(folder) / "bundle")
        names = [output.name for output in session.get_outputs()]
        contenders: dict[str, Infer] = {
            "load": ps.load(bundle),
            "job": jobs.enter_context(ps.open(bundle)).infer,
            "workers": jobs.enter_context(ps.open(bundle, audit=True)).infer,
            REFERENCE: lambda x: dict(zip(names, session.run(names, x), strict=True)),
        }
        expected = contenders[REFERENCE](inputs)
        errors = {name: _error(infer(inputs), expected) for name, infer in contenders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _, name in in_turn(list(contenders), rounds):
            seconds[name].append(_turn(contenders[name], inputs, calls))
    print(
        f"{model}: {', '.join(f'{n} {statistics.median(s) * 1e3:.3f} ms' for n, s in seconds.items())}", file=sys.stderr
    )
    return Result(model, seconds, errors)


def _turn(infer: Infer, inputs: Arrays, calls: int) -> float:
    for _ in range(WARMUP):
        infer(inputs)
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        infer(inputs)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _inputs(session: onnxruntime.InferenceSession) -> Arrays:
    random, arrays = np.random.default_rng(0), {}
    for one in session.get_inputs():
        whole = one.type == "tensor(int64)"
        drawn = random.integers(0, _BERT["vocab"], one.shape) if whole else random.standard_normal(one.shape)
        arrays[one.name] = drawn if whole else drawn.astype(np.float32)
    return arrays


def _error(outputs: Arrays, expected: Arrays) -> float:
    """Return the largest difference, relative to the largest magnitude of its output."""
    return max(float(np.abs(outputs[n] - x).max() / max(np.abs(x).max(), 1e-30)) for n, x in expected.items())


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of a table: milliseconds of a call, and ratios to onnxruntime."""
    names = list(rows[0]["medians"]) if rows else []
    others = [name for name in names if name != REFERENCE]
    heads = ["model", *(f"{name} ms" for name in names), *(f"{name} / {REFERENCE}" for name in others)]
    return heads, [
        [
            row["model"],
            *(f"{row['medians'][name] * 1e3:.3f}" for name in names),
            *(f"{row['ratios'][name]:.2f}" for name in others),
        ]
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
