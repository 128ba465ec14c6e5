"""The gain of reading ahead: a training step with the thread that reads data (runtime/worker/feeds.py), and without it.

    python benchmarks/data.py                           all rows: about a minute
    python benchmarks/data.py --only slow --json data.json

One rank trains a small MLP on images (12288 numbers a sample, 64 samples a microbatch, 4 microbatches a step) with the
worker's code, in this process, on one thread. Data come from a file, whose pages are in memory. Rows:

    npz           samples of a mapped .npz in order: a copy of adjacent bytes
    npz-shuffle   the same with --shuffle: samples are gathered from all over the file
    parquet       a .parquet, shuffled; the column is in memory since it was opened (left out without pyarrow)
    slow          the shuffled .npz behind a source that makes every read of a microbatch wait: for half of its
                  computation, for as long, and for twice as long (`slow-0.5`, `slow-1`, `slow-2`), as a disk or network
                  would

Both ways take turns, round after round; figures are medians over rounds. `read` is the time of reading a step's
microbatches by themselves, `rest` that of the step less that of reading. Without the thread a step takes rest + read.
With it, it cannot take less than the longer of the two: `bound`. Another test checks that both ways give the same
arrays (tests/runtime/worker/test_feeds.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import msgspec
import numpy as np
import torch
from machine import markdown, write_json

import penstock as ps
from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.models import write_mlp
from penstock.runtime.data.samples import Samples, data_spec
from penstock.runtime.group.group import RankGroup, host_store
from penstock.runtime.messages.control import DataSpec, Record, RunCommand, Setup
from penstock.runtime.messages.defaults import AHEAD
from penstock.runtime.messages.status import Status
from penstock.runtime.worker.worker import Worker

WIDTHS, ROWS, MICROBATCHES, SAMPLES = (12288, 128, 10), 64, 4, 2048
WAITS = {"slow-0.5": 0.5, "slow-1": 1.0, "slow-2": 2.0}
NAMES = ("npz", "npz-shuffle", "parquet", *WAITS)
TIMEOUT = 60.0


class Slow:
    """Samples of a source that lets every microbatch wait, once for all of its inputs."""

    def __init__(self, samples: Samples, seconds: float, slow: str) -> None:
        self._samples, self._seconds, self._slow = samples, seconds, slow

    def microbatch(self, mb: int, name: str) -> np.ndarray:
        if name == self._slow:
            time.sleep(self._seconds)
        return self._samples.microbatch(mb, name)


class Training:
    """One rank in this process. Its data and its reading ahead can be changed between runs."""

    def __init__(self, bundle: Bundle, spec: DataSpec) -> None:
        group = RankGroup(host_store(1, TIMEOUT), 0, 1, TIMEOUT)
        setup = Setup(str(bundle.path), TIMEOUT, spec)
        self._worker = Worker(bundle, 0, group, setup, self._take, self._refuse, Status(None, 0))
        self.samples: Samples = self._worker.samples

    def steps(self, first: int, count: int, samples: Samples, ahead: int) -> float:
        """Run steps, and return seconds per step."""
        self._worker.samples = samples
        self._worker.setup = msgspec.structs.replace(self._worker.setup, prefetch=ahead)
        begin = time.perf_counter()
        self._worker.obey(RunCommand(first, count))
        return (time.perf_counter() - begin) / count

    def _take(self, message: Record, arrays: Mapping[str, np.ndarray]) -> None:
        pass

    @staticmethod
    def _refuse(wait: bool) -> None:
        raise AssertionError("all batches come from the data")

    def leave(self) -> None:
        self._worker.group.leave()


def reading(samples: Samples, first: int, count: int) -> float:
    """Return seconds of reading a step's microbatches, with the copy that the thread takes."""
    begin = time.perf_counter()
    for mb in range(first * MICROBATCHES, (first + count) * MICROBATCHES):
        for name in ("x", "labels"):
            np.array(samples.microbatch(mb, name))
    return (time.perf_counter() - begin) / count


def write_data(folder: Path) -> dict[str, Path]:
    """Write the same samples in every available format."""
    random = np.random.default_rng(0)
    arrays = {
        "x": random.standard_normal((SAMPLES, WIDTHS[0])).astype(np.float32),
        "labels": random.integers(0, WIDTHS[-1], SAMPLES),
    }
    files = {"npz": folder / "data.npz"}
    np.savez(files["npz"], **arrays)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return files
    columns = {
        "x": pyarrow.FixedSizeListArray.from_arrays(arrays["x"].reshape(-1), WIDTHS[0]),
        "labels": arrays["labels"],
    }
    files["parquet"] = folder / "data.parquet"
    parquet.write_table(pyarrow.table(columns), files["parquet"], compression="none")
    return files


def measure(name: str, bundle: Bundle, files: Mapping[str, Path], rounds: int, steps: int) -> dict[str, Any]:
    training = Training(bundle, data_spec(files["parquet" if name == "parquet" else "npz"], name != "npz", 0))
    samples, wait, first = training.samples, 0.0, 0

    def run(ahead: int) -> float:
        nonlocal first
        first += steps
        return training.steps(first - steps, steps, samples, ahead)

    warm = min(run(0) for _ in range(3))
    if name in WAITS:
        wait = WAITS[name] * warm / MICROBATCHES
        samples = Slow(samples, wait, "x")
    times: dict[str, list[float]] = {"read": [], "without": [], "with": []}
    for number in range(rounds):
        times["read"].append(reading(samples, first, steps))
        for way in ("without", "with") if number % 2 else ("with", "without"):
            times[way].append(run(AHEAD if way == "with" else 0))
    training.leave()
    usual = {way: statistics.median(seconds) for way, seconds in times.items()}
    computing = max(usual["without"] - usual["read"], 0.0)
    return {
        "row": name,
        "wait_s": wait,
        **usual,
        "rest": computing,
        "bound": max(computing, usual["read"]),
        "times": times,
    }


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for x in lines:
        cells = [f"{x[key] * 1e3:.1f}" for key in ("read", "rest", "without", "with", "bound")]
        rows.append([x["row"], *cells, f"{x['without'] / x['with']:.3f}", f"{x['bound'] / x['with']:.3f}"])
    return markdown(["row", "read ms", "rest ms", "without ms", "with ms", "bound ms", "gain", "of the bound"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=list(NAMES), metavar="ROW", help=f"of {', '.join(NAMES)}; slow is all three"
    )
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each way (default: 7)")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="steps per turn (default: 12)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    wanted = [name for name in NAMES if name in arguments.only or ("slow" in arguments.only and name in WAITS)]
    if unknown := set(arguments.only) - {*NAMES, "slow"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        folder = Path(place)
        model = ps.from_onnx(write_mlp(folder / "mlp.onnx", WIDTHS, batch=ROWS, seed=1))
        training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=1e-4), microbatches=MICROBATCHES)
        bundle = open_bundle(ps.compile(ps.plan(model, ps.Cluster.local(1), training), folder / "bundle"))
        files = write_data(folder)
        for name in wanted:
            if name == "parquet" and name not in files:
                print("parquet: left out: no pyarrow", file=sys.stderr)
                continue
            lines.append(measure(name, bundle, files, arguments.rounds, arguments.steps))
            print(
                f"{name}: {lines[-1]['without'] / lines[-1]['with']:.2f} times as fast with reading ahead",
                file=sys.stderr,
                flush=True,
            )
    print(table(lines))
    write_json(arguments.json, {"lines": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
