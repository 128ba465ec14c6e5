"""Exported models in one process, a call of Penstock and one of onnxruntime in turn, on one thread and on two.

    python benchmarks/beside_onnxruntime.py --exporter PYTHON           the twenty models of exports.toml: five minutes
    python benchmarks/beside_onnxruntime.py --models FOLDER             every .onnx file there, exports.toml or not
    python benchmarks/beside_onnxruntime.py --exporter PYTHON --only lcnet-050 --threads 2 --json beside.json

PYTHON has torch, timm, torchvision, transformers and onnxscript: export_models.py runs in it, and writes the models
that FOLDER lacks (without `--models`: a temporary one).

Both read one file and get one input. Penstock computes through `penstock.load`, with onnxruntime's number of threads.
Outputs are compared first: exit code 1 where they differ. Each number of threads has a process of its own, because
TVM's threads are counted once in a process. A turn is some calls; its figure is their median, that of a contender the
median of its turns: in processor time of the process on one thread, which other work on the machine disturbs least, in
wall time on several. The speedup is onnxruntime's time over Penstock's: above 1 Penstock is faster. Its bound is onnxruntime's time over the
shortest that the model's work allows on these threads (bounds.py); there is none without g++.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from bounds import described, measure_rates, work_of
from machine import load, markdown, processor, system, versions, write_json
from peak import RegisterLoop, register_loop
from turns import in_turn

import penstock as ps

Arrays = dict[str, np.ndarray]
Row = dict[str, Any]

# Relative to the largest magnitude of an output. Random weights in deep networks are not well conditioned.
TOLERANCE = 1e-3
# Whole numbers of an input are below this: the smallest vocabulary of exports.toml.
BELOW = 2000
TURN_S, FEWEST_CALLS, MOST_CALLS = 0.12, 3, 200
PENSTOCK, OTHER = "penstock", "onnxruntime"
OF_BYTES = ("matmul_bytes", "conv_bytes", "matmul_q")
HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exporter", metavar="PYTHON", help="a Python that makes the models of exports.toml")
    parser.add_argument("--models", metavar="FOLDER", type=Path, help="where ONNX files lie, and are made")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="models, by the names of their files")
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2], metavar="N", help="threads (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each contender (default: 7)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of outputs, relative to the largest")
    parser.add_argument("--json", metavar="FILE", help="write every turn; rows there of other runs stay")
    parser.add_argument("--measure", type=int, metavar="N", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.exporter or arguments.models):
        parser.error("where the models come from is missing: --exporter PYTHON, --models FOLDER, or both")
    with ExitStack() as stack:
        folder = arguments.models or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmarks-")))
        if arguments.exporter:
            _export(arguments.exporter, folder, arguments.only)
        paths = [
            path for path in sorted(folder.glob("*.onnx")) if arguments.only is None or path.stem in arguments.only
        ]
        if arguments.measure:
            print(json.dumps(measure(paths, arguments.measure, arguments.rounds)))
            return 0
        facts = {
            "processor": processor(sorted(os.sched_getaffinity(0))),
            "system": system(),
            "versions": versions("penstock", "apache-tvm", "onnxruntime", "numpy", "torch"),
            "load before": load(),
        }
        rows = [row for threads in arguments.threads for row in _in_process(folder, threads, arguments)]
        rows = _with_earlier(rows, arguments.json)
    facts["load after"] = load()
    for key, value in facts.items():
        print(f"{key:<12} {value}")
    print("\n" + markdown(*table_of(rows)) + "\n\n" + "\n".join(means_of(rows)))
    write_json(arguments.json, {"facts": facts, "tolerance": arguments.tolerance, "rows": rows})
    return int(any(row["error"] > arguments.tolerance for row in rows) or not rows)


def _export(python: str, folder: Path, only: Sequence[str] | None) -> None:
    names = ["--only", *only] if only is not None else []
    subprocess.run([python, str(HERE / "export_models.py"), str(folder), *names], check=True, stdout=sys.stderr)


def _in_process(folder: Path, threads: int, arguments: argparse.Namespace) -> list[Row]:
    """Measure in a process of this number of threads."""
    words = ["--models", str(folder), "--measure", str(threads), "--rounds", str(arguments.rounds)]
    names = ["--only", *arguments.only] if arguments.only is not None else []
    command = [sys.executable, str(Path(__file__).resolve()), *words, *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _with_earlier(rows: Sequence[Row], path: str | None) -> list[Row]:
    """Return the rows, and those of a file for other models and numbers of threads, in order."""
    earlier = json.loads(Path(path).read_text(encoding="utf-8"))["rows"] if path and Path(path).exists() else []
    by = {(row["threads"], row["model"]): row for row in (*earlier, *rows)}
    return [by[key] for key in sorted(by)]


def measure(paths: Sequence[Path], threads: int, rounds: int) -> list[Row]:
    """Let both compute every model in turns, in this process."""
    loop = register_loop()
    return [_measure(path, threads, rounds, loop) for path in paths]


def _measure(path: Path, threads: int, rounds: int, loop: RegisterLoop | None) -> Row:
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        session = _session(path, threads)
        inputs = _inputs(session)
        plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(1, threads=[threads]))
        model = ps.load(ps.compile(plan, Path(folder) / "bundle"))
        names = [output.name for output in session.get_outputs()]
        expected = dict(zip(names, session.run(names, inputs), strict=True))
        error = _error(model(inputs), expected)
        runs: dict[str, Callable[[], object]] = {
            PENSTOCK: lambda: model(inputs),
            OTHER: lambda: session.run(names, inputs),
        }
        clock = time.process_time if threads == 1 else time.perf_counter
        calls = {name: _calls(run) for name, run in runs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _, name in in_turn(list(runs), rounds):
            seconds[name].append(_turn(runs[name], calls[name], clock))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    row = {"model": path.stem, "threads": threads, "seconds": seconds, "medians": medians, "error": error}
    row["speedup"] = medians[OTHER] / medians[PENSTOCK]
    work, cores = work_of(plan.module), sorted(os.sched_getaffinity(0))[:threads]
    # The rate of multiply-adds of floats bounds no products of bytes.
    bounded = loop is not None and not any(
        op.kind in OF_BYTES for graph in plan.module.graphs.values() for op in graph.ops
    )
    row |= described(work, measure_rates(loop, cores, work) if bounded and loop is not None else None)
    if bounded:
        row["bound"] = medians[OTHER] / row["shortest_s"]
    figures = ", ".join(f"{name} {time * 1e3:.3f} ms" for name, time in medians.items())
    print(f"{path.stem}, {_threads(threads)}: {figures}: {row['speedup']:.2f}", file=sys.stderr)
    return row


def _calls(run: Callable[[], object]) -> int:
    """Return how many calls make a turn."""
    run()
    begin = time.perf_counter()
    run()
    return max(FEWEST_CALLS, min(MOST_CALLS, round(TURN_S / (time.perf_counter() - begin))))


def _turn(run: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    for _ in range(max(1, calls // 8)):
        run()
    times = []
    for _ in range(calls):
        begin = clock()
        run()
        times.append(clock() - begin)
    return statistics.median(times)


def _session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _inputs(session: onnxruntime.InferenceSession) -> Arrays:
    random, arrays = np.random.default_rng(0), {}
    for one in session.get_inputs():
        whole = one.type == "tensor(int64)"
        drawn = random.integers(0, BELOW, one.shape) if whole else random.standard_normal(one.shape)
        arrays[one.name] = drawn if whole else drawn.astype(np.float32)
    return arrays


def _error(outputs: Arrays, expected: Arrays) -> float:
    """Return the largest difference, relative to the largest magnitude of its output."""
    return max(float(np.abs(outputs[n] - x).max() / max(np.abs(x).max(), 1e-30)) for n, x in expected.items())


def table_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and lines of a table, a line per model: by number of threads milliseconds, the speedup and the
    bound on it."""
    counts = sorted({row["threads"] for row in rows})
    by = {(row["model"], row["threads"]): row for row in rows}
    heads = ["model"]
    for count in counts:
        heads += [f"{PENSTOCK} ms, {_threads(count)}", f"{OTHER} ms", "speedup", "bound"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        line = [model]
        for count in counts:
            row = by.get((model, count))
            if row is None:
                line += [""] * 4
                continue
            line += [f"{row['medians'][name] * 1e3:.2f}" for name in (PENSTOCK, OTHER)] + [f"{row['speedup']:.2f}"]
            line.append(f"{row['bound']:.2f}" if "bound" in row else "-")
        lines.append(line)
    return heads, lines


def means_of(rows: Sequence[Row]) -> list[str]:
    """Return for each number of threads a sentence about the whole list."""
    sentences = []
    for count in sorted({row["threads"] for row in rows}):
        speedups = {row["model"]: row["speedup"] for row in rows if row["threads"] == count}
        mean = math.exp(statistics.fmean(map(math.log, speedups.values())))
        bounds = [row["bound"] for row in rows if row["threads"] == count and "bound" in row]
        behind = [name for name, speedup in speedups.items() if speedup < 1]
        said = f"behind on {len(behind)}: {', '.join(behind)}" if behind else "behind on none"
        sentences.append(f"{_threads(count)}: geometric mean {mean:.2f} over {len(speedups)} models, {said}")
        if bounds:
            least = ", ".join(f"{goal} is possible on {sum(bound >= goal for bound in bounds)}" for goal in (1.0, 1.3))
            most = statistics.geometric_mean(bounds)
            sentences.append(f"{_threads(count)}: geometric mean of {len(bounds)} bounds {most:.2f}; {least}")
    return sentences


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
