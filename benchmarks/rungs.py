"""Bundles with a bounded dimension beside bundles that were compiled for each very size.

In: an ONNX model whose dimensions have names, the sizes of those that stay, and one bound.

    python benchmarks/rungs.py bert.onnx --dim batch=1 --dim 'seq<=512' --results lengths.json
    python benchmarks/rungs.py resnet50 --dim 'batch<=32' --results lengths.json --short
    python benchmarks/rungs.py bert.onnx --dim batch=1 --dim 'seq<=512' --results lengths.json --every

Out: for every size the seconds of one call (on one thread processor time, which other work on the machine disturbs
least), the larger of both errors against onnxruntime, and how many compilers ran
meanwhile. Both bundles are called in turn, and the median of five such pairs counts. Results of all models are kept
in the file: a run that was ended goes on where it was. `--short` measures few sizes, and `--sizes 9,17,100` these
alone. `resnet50` is written by the program itself.

`--every` bounds the ratio of every size by calls of the ladder alone. It takes code for a length to be no faster than
code for a smaller one: a length that is filled up to a rung then takes at most the time of that rung by the time of the
rung before. Code for rows is taken to be no faster for a row than the best size is. Of each step whose bound misses the goal,
the size with the most padding is measured beside a bundle that was compiled for it. A request of every size is compared
with onnxruntime, in the order of sizes, and the jobs that compilers get meanwhile are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import penstock as ps
from penstock.backends.tvm.compile.pool import WorkerPool
from penstock.commands.arguments import bounded_dims_of
from penstock.models import write_resnet
from penstock.support.terminal import table

PAIRS = 5
# The sizes of a short run, as shares of the bound.
SHARES = (0.02, 0.27, 0.53, 0.79, 1.0)
GOAL = 1.1


def main() -> None:
    """Measure all sizes that the results lack, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an ONNX file, or resnet50")
    parser.add_argument("--dim", action="append", default=[], help="NAME=INT, and one NAME<=INT")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--every", action="store_true", help="bound the ratio of every size, and measure the worst")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")])
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-rungs-"))
    model = write_resnet(folder / "resnet50.onnx") if arguments.model == "resnet50" else Path(arguments.model)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {"rows": []}
    measure(model, bounded_dims_of(arguments.dim), folder, arguments, results)
    print_table(results["rows"])
    print(table(*table_of_steps(results.get("steps", []))))


def measure(
    model: Path, dims: Mapping[str, Any], folder: Path, arguments: argparse.Namespace, results: dict[str, Any]
) -> None:
    """Measure each size, and write the results after each."""
    ((name, bound),) = [(name, size) for name, size in dims.items() if not isinstance(size, int)]
    sizes = range(1, bound.most + 1) if name == "batch" else range(min(8, bound.most), bound.most + 1)
    short = sorted({max(sizes[0], round(share * bound.most)) for share in SHARES})
    chosen = arguments.sizes or (short if arguments.short else list(sizes))
    ladder = ps.load(_compiled(model, dims, folder / "ladder", arguments.threads))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    judge = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    if arguments.every:
        with Compilers() as compilers:
            errors = {size: _error_of(ladder, judge, {**dims, name: size}) for size in sizes}
        steps = measured_steps(ladder, [(size, _inputs(judge, {**dims, name: size})) for size in sizes])
        for step in steps:
            step["error"] = max(errors[size] for size in range(step["first"], step["last"] + 1))
            step["compiled"] = compilers.count
        others = [row for row in results.get("steps", []) if row["model"] != model.stem]
        results["steps"] = [*others, *({"model": model.stem, **step} for step in steps)]
        arguments.results.write_text(json.dumps(results, indent=1) + "\n")
        chosen = [step["first"] for step in steps if step["ladder_s"] > GOAL * step["floor_s"]]
    done = {row["size"] for row in results["rows"] if row["model"] == model.stem}
    left = [size for size in chosen if size not in done]
    for size in left:
        fixed = {**dims, name: size}
        # Each has a folder of its own: a library that was loaded once is not read again from its place.
        exact = ps.load(_compiled(model, fixed, folder / f"exact-{size}", arguments.threads))
        inputs = _inputs(judge, fixed)
        error = max(_error_of(one, judge, fixed) for one in (ladder, exact))
        clock = time.process_time if arguments.threads == 1 else time.perf_counter
        with Compilers() as compilers:
            ours, theirs = _pairs(lambda: ladder(inputs), lambda: exact(inputs), clock)  # noqa: B023
        row = {"ladder_s": ours, "exact_s": theirs, "error": error, "compiled": compilers.count}
        results["rows"].append({"model": model.stem, "size": size, **row})
        results["rows"].sort(key=lambda row: (row["model"], row["size"]))
        arguments.results.write_text(json.dumps(results, indent=1) + "\n")
        shutil.rmtree(folder / f"exact-{size}")
        print(f"{name} {size}: {ours * 1e3:.2f} ms, {theirs * 1e3:.2f} ms compiled for it", flush=True)


def measured_steps(ladder: Any, requests: Sequence[tuple[int, Mapping[str, np.ndarray]]]) -> list[dict[str, Any]]:
    """Return the steps of a ladder with processor seconds of a call of each, for requests of all sizes."""
    ((name, _),) = ladder.bundle.ladder.most.items()
    rows = ladder.requests.rows == name
    rungs = {dict(rung.sizes)[name] for rung in ladder.bundle.ladder}
    tops = [(size, inputs) for size, inputs in requests if rows or size in rungs]
    times: dict[int, list[float]] = {size: [] for size, _ in tops}
    for turn in range(PAIRS + 1):
        for size, inputs in tops:
            began = time.process_time()
            ladder(inputs)
            if turn:
                times[size].append(time.process_time() - began)
    return steps_of({size: statistics.median(taken) for size, taken in times.items()}, rows)


def steps_of(seconds: Mapping[int, float], rows: bool) -> list[dict[str, Any]]:
    """Return the steps of a ladder, each with the least time that code for its sizes could take.

    In: seconds of a call by size, ascending: of every size of rows, of every rung of a length. A step of a length is
    all sizes that are filled up to one rung.
    """
    best_row = min(taken / size for size, taken in seconds.items())
    steps = []
    before: int | None = None
    for size, taken in seconds.items():
        first = size if rows or before is None else before + 1
        if rows:
            floor = size * best_row
        else:
            # A length that is a rung is not filled up: code for it is the rung's.
            floor = taken if before is None or first == size else seconds[before]
        steps.append({"first": first, "last": size, "ladder_s": taken, "floor_s": floor})
        before = size
    return steps


def _compiled(model: Path, dims: Mapping[str, Any], out: Path, threads: int) -> Path:
    cluster = ps.Cluster.local(threads=(threads,))
    return ps.compile(ps.plan(ps.from_onnx(model, dims=dims), cluster), out)


def _inputs(judge: onnxruntime.InferenceSession, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return inputs of some sizes: small whole numbers, and ones for masks."""
    rng = np.random.default_rng(0)
    inputs = {}
    for value in judge.get_inputs():
        shape = [sizes[n] if isinstance(n, str) else n for n in value.shape]
        if "float" in value.type:
            inputs[value.name] = rng.normal(size=shape).astype(np.float32)
        elif "mask" in value.name:
            inputs[value.name] = np.ones(shape, np.int64)
        else:
            inputs[value.name] = rng.integers(0, 2 if "type" in value.name else 1000, shape)
    return inputs


def _error_of(ladder: Any, judge: onnxruntime.InferenceSession, sizes: Mapping[str, int]) -> float:
    """Return the error of one request against onnxruntime."""
    inputs = _inputs(judge, sizes)
    outputs = [output.name for output in judge.get_outputs()]
    return _error(ladder(inputs), dict(zip(outputs, judge.run(outputs, inputs), strict=True)))


def _error(answer: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Return the largest difference, by the largest element of each output."""
    return max(float(np.max(np.abs(answer[n] - x)) / max(np.max(np.abs(x)), 1e-30)) for n, x in expected.items())


def _pairs(
    first: Callable[[], object], second: Callable[[], object], clock: Callable[[], float]
) -> tuple[float, float]:
    """Return the median seconds of two calls that take turns, by a clock."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for call in (first, second):
        call()
    for _ in range(PAIRS):
        for call, times in zip((first, second), seconds, strict=True):
            began = clock()
            call()
            times.append(clock() - began)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


class Compilers:
    """A count of jobs that are given to compilers."""

    count = 0

    def __enter__(self) -> Compilers:
        self._run = WorkerPool.run

        def counting(pool: WorkerPool, jobs: Any, *more: Any, **named: Any) -> Any:
            self.count += len(jobs)
            return self._run(pool, jobs, *more, **named)

        WorkerPool.run = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        WorkerPool.run = self._run  # type: ignore[method-assign]


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return a table of all sizes: the head and the lines."""
    lines = [
        (
            row["model"],
            str(row["size"]),
            f"{row['ladder_s'] * 1e3:.2f}",
            f"{row['exact_s'] * 1e3:.2f}",
            f"{row['ladder_s'] / row['exact_s']:.3f}",
            f"{row['error']:.1e}",
            str(row["compiled"]),
        )
        for row in rows
    ]
    return ("model", "size", "ladder ms", "exact ms", "ratio", "error", "compiled"), lines


def table_of_steps(steps: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return a table of the bounds of every size: a line for each model."""
    lines = []
    for model in dict.fromkeys(step["model"] for step in steps):
        mine = [step for step in steps if step["model"] == model]
        count = {id(step): step["last"] - step["first"] + 1 for step in mine}
        within = sum(count[id(step)] for step in mine if step["ladder_s"] <= GOAL * step["floor_s"])
        worst = max(mine, key=lambda step: step["ladder_s"] / step["floor_s"])
        sizes = f"{mine[0]['first']} to {mine[-1]['last']}"
        largest = f"{worst['ladder_s'] / worst['floor_s']:.3f} ({worst['first']} to {worst['last']})"
        error, compiled = f"{max(step['error'] for step in mine):.1e}", str(max(step["compiled"] for step in mine))
        lines.append((model, sizes, str(len(mine)), f"{within} of {sum(count.values())}", largest, error, compiled))
    head = ("model", "sizes", "steps", "sizes within 1.1 by the bound", "largest bound", "largest error", "compiled")
    return head, lines


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print all sizes, and the worst of them."""
    print(table(*table_of(rows)))
    ratios = {(row["model"], row["size"]): row["ladder_s"] / row["exact_s"] for row in rows}
    worst = max(ratios, key=ratios.__getitem__)
    within = sum(ratio <= 1.1 for ratio in ratios.values())
    print(f"worst: {ratios[worst]:.3f} at {worst}; {within} of {len(ratios)} sizes within 10 %")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
