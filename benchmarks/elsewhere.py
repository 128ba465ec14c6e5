"""A training whose optimiser state is elsewhere, beside the very same without, and beside the way to the disk.

    python benchmarks/elsewhere.py --out DIR                        50 million parameters: about a minute and a half
    python benchmarks/elsewhere.py --out DIR --width 256 --rounds 2 --steps 2

A model of linear layers is trained with AdamW on one device of one thread, with `--offload state` and without. Homes and
bundles are in DIR, so its disk is what is measured. Losses are compared to the last bit: exit code 1 where they differ.

The way is measured by code of its own, in the same rounds: two threads, one that reads a file of as many bytes as the
state has and one that writes another, both by the system's cache, in pieces of 4 MiB. No batch can move its state in
less time, and none can be faster than the training without. The larger of the two is the floor of a step, and `reached`
is floor / step. The contenders take turns of some steps each, and figures are medians of turns.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from machine import load, markdown, processor, system, versions, write_json

import penstock as ps
from penstock.inspection.memory.curves import memory_curves
from penstock.ir.memory.predict import measure_memory
from penstock.models import write_mlp

PIECE, SAMPLES = 4 << 20, 2
WAYS = ("none", "state")


class Way:
    """The way to a disk: two files of so many bytes, one to read and one to write."""

    def __init__(self, folder: Path, read: int, written: int) -> None:
        self.sizes = [-(-nbytes // PIECE) * PIECE for nbytes in (read, written)]
        flags = os.O_RDWR | os.O_TMPFILE | getattr(os, "O_DIRECT", 0)
        self.files = [os.open(folder, flags, 0o600) for _ in range(2)]
        self.memory = [mmap.mmap(-1, PIECE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in self.files]
        for file, size in zip(self.files, self.sizes, strict=True):
            os.posix_fallocate(file, 0, size)
            self.write(file, self.memory[0], size)

    def write(self, file: int, memory: mmap.mmap, size: int) -> None:
        for start in range(0, size, PIECE):
            assert os.pwrite(file, memory, start) == PIECE

    def read(self, file: int, memory: mmap.mmap, size: int) -> None:
        for start in range(0, size, PIECE):
            assert os.preadv(file, [memory], start) == PIECE

    def seconds(self) -> float:
        """Return how long it takes to read all of one file, and to write all of the other meanwhile."""
        begun = time.perf_counter()
        with ThreadPoolExecutor(2) as threads:
            both = zip((self.read, self.write), self.files, self.memory, self.sizes, strict=True)
            for done in [threads.submit(move, file, memory, size) for move, file, memory, size in both]:
                done.result()
        return time.perf_counter() - begun


class Contender:
    """A training with its state on the device, or elsewhere."""

    def __init__(self, arguments: argparse.Namespace, offload: str) -> None:
        out = Path(arguments.out)
        model = write_mlp(out / "model.onnx", [arguments.width] * (arguments.layers + 1), batch=SAMPLES)
        training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3), microbatches=arguments.microbatches)
        spill = {"spill": f"{out.resolve()}/"} if offload != "none" else {}
        plan = ps.plan(ps.from_onnx(model), ps.Cluster.local(1), training, offload=offload, **spill)
        bundle = ps.compile(plan, out / f"bundle-{offload}")
        self.job, self.step, self.losses = ps.open(bundle), 0, list[float]()
        (self.curve,), self.planned = memory_curves(plan.module), measure_memory(plan.module)[0].peak
        self.shapes = {value.name: value.type.dims for value in plan.module.data_inputs}
        self.microbatches = arguments.microbatches

    def seconds(self, count: int) -> float:
        """Train so many steps; return the time of one."""
        draw = np.random.default_rng(self.step)
        batches = [
            {
                name: draw.standard_normal((dims[0] * self.microbatches, *dims[1:])).astype("f4")
                for name, dims in self.shapes.items()
            }
            for _ in range(count)
        ]
        self.step += count
        begun = time.perf_counter()
        self.losses += self.job.run(iter(batches))
        return (time.perf_counter() - begun) / count

    @property
    def peak(self) -> int:
        return self.job.peak_bytes[0] - self.job.base_bytes[0]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both trainings and the way in turns; the first turn warms up."""
    without, elsewhere = (Contender(arguments, offload) for offload in WAYS)
    (home,) = elsewhere.curve.homes
    way = Way(Path(arguments.out), home.bytes, home.bytes)
    rows: list[tuple[float, float, float]] = []
    for _ in range(arguments.rounds + 1):
        rows.append((way.seconds(), without.seconds(arguments.steps), elsewhere.seconds(arguments.steps)))
    moving, whole, away = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    found = {
        "state bytes": home.bytes,
        "state on device": home.on_device,
        "way seconds": moving,
        "way bytes per second": sum(way.sizes) / moving,
        "without": whole,
        "elsewhere": away,
        "reached": max(moving, whole) / away,
        "same losses": without.losses == elsewhere.losses,
        "peak without": without.peak,
        "peak elsewhere": elsewhere.peak,
        "planned without": without.planned,
        "planned elsewhere": elsewhere.planned,
        "turns": rows[1:],
    }
    without.job.close()
    elsewhere.job.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="a folder on the disk that is measured (default: one for temporary files)")
    for name, value in (("width", 2048), ("layers", 12), ("microbatches", 4), ("rounds", 5), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", help="write the figures here, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.out is None:
            arguments.out = folder
        found = measure(arguments)
    cores = sorted(os.sched_getaffinity(0))
    print(f"{processor(cores)}; {system()}; {versions('torch', 'numpy')}; load {load()}")
    mib = 1 << 20
    print(
        markdown(
            ["", "seconds", "peak MiB", "planned MiB"],
            [
                [
                    "without",
                    f"{found['without']:.3f}",
                    f"{found['peak without'] / mib:.0f}",
                    f"{found['planned without'] / mib:.0f}",
                ],
                [
                    "elsewhere",
                    f"{found['elsewhere']:.3f}",
                    f"{found['peak elsewhere'] / mib:.0f}",
                    f"{found['planned elsewhere'] / mib:.0f}",
                ],
                ["the way", f"{found['way seconds']:.3f}", "", ""],
            ],
        )
    )
    print(
        f"state {found['state bytes'] / mib:.0f} MiB, {found['state on device'] / mib:.0f} of it on the device; the way "
        f"moves {found['way bytes per second'] / 1e6:.0f} MB/s; reached {found['reached']:.2f} of what it allows; losses "
        f"{'are the same' if found['same losses'] else 'DIFFER'}"
    )
    if arguments.json:
        write_json(arguments.json, {"arguments": vars(arguments), "machine": [processor(cores), system()], **found})
    return 0 if found["same losses"] else 1


if __name__ == "__main__":
    sys.exit(main())
