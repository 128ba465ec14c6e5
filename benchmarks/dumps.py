"""The cost of a dump: `penstock compile` of a GPT with `--dump-ir` and without, in turns, each a process of its own.

    python benchmarks/dumps.py                              12 layers, two stages, 2bw: some minutes
    python benchmarks/dumps.py --layers 2 --rounds 3

    cold     nothing in the cache
    warm     the libraries and their sources are in the cache, as after a compile with a dump
    first    the libraries are in the cache, their sources not yet

Figures are wall seconds from the start of the interpreter to its end, and processor seconds of all its processes, which
other work on the machine changes little; medians of the rounds. Both ways take turns, and the first of a round
alternates. Bytecode of modules is kept, as Python does by default. The exit code is 1 where a dump adds more than
`--most` to the processor seconds of a cold or a warm compile. The first dump after a compile without one makes the
texts of all kernels, once. Without `--dump-ir` no part of dumping is even imported (tests/inspection/dump/test_folder.py).
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import load, system, write_json

STATES = ("cold", "warm", "first")
COMPILE = [
    "--devices",
    "2",
    "--loss",
    "cross_entropy",
    "--optimizer",
    "adamw",
    "--lr",
    "1e-3",
    "--microbatches",
    "4",
    "--schedule",
    "2bw",
]


def compile_once(model: Path, folder: Path, cache: Path, dump: Path | None) -> tuple[float, float]:
    """Return wall and processor seconds of one compile. If it fails, end with its output."""
    words = [sys.executable, "-m", "penstock", "compile", str(model), "-o", str(folder / "bundle"), *COMPILE]
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PENSTOCK_DUMP", "PYTHONDONTWRITEBYTECODE")
    }
    begin, spent = time.perf_counter(), processor_seconds()
    done = subprocess.run(
        [*words, *(["--dump-ir", str(dump)] if dump else [])],
        env={**environment, "PENSTOCK_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.perf_counter() - begin, processor_seconds() - spent
    if done.returncode:
        raise SystemExit(done.stderr)
    return took


def processor_seconds() -> float:
    """Return processor seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from penstock.models import write_gpt

    sizes = {name: getattr(arguments, name) for name in ("layers", "width", "heads", "vocab", "positions")}
    model, dump = folder / "gpt.onnx", folder / "dump"
    write_gpt(model, batch=2, **sizes)
    caches = {"off": folder / "without", "on": folder / "with"}
    times: dict[str, dict[str, list[tuple[float, float]]]] = {state: {"off": [], "on": []} for state in STATES}
    for state in STATES:
        for number in range(arguments.cold_rounds if state != "warm" else arguments.rounds):
            for way in ("off", "on") if number % 2 == 0 else ("on", "off"):
                cache = caches["off" if state == "first" else "on"]
                if state == "cold":
                    cache = caches[way]
                    shutil.rmtree(cache, ignore_errors=True)
                elif state == "first" and way == "on":
                    cache = folder / "copy"
                    shutil.rmtree(cache, ignore_errors=True)
                    shutil.copytree(caches["off"], cache)
                times[state][way].append(compile_once(model, folder, cache, dump if way == "on" else None))
                wall, processor = times[state][way][-1]
                print(f"{state} {way}: {wall:.2f} s, of processors {processor:.2f} s", file=sys.stderr)
    files = [path for path in dump.rglob("*") if path.is_file()]
    return {"states": times, "files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def middle(result: dict[str, Any], state: str, way: str) -> tuple[float, float]:
    """Return medians of wall and processor seconds."""
    walls, processors = zip(*result["states"][state][way], strict=True)
    return statistics.median(walls), statistics.median(processors)


def added(result: dict[str, Any], state: str) -> tuple[float, float]:
    """Return the wall and processor seconds that a dump adds, as parts of those of the compile without it."""
    off, on = middle(result, state, "off"), middle(result, state, "on")
    return on[0] / off[0] - 1, on[1] / off[1] - 1


def report(result: dict[str, Any]) -> None:
    print(f"{'':6}  {'off s':>8}  {'on s':>8}  {'added':>7}  {'processor s':>11}  {'on s':>8}  {'added':>7}  rounds")
    for state in STATES:
        off, on, more = middle(result, state, "off"), middle(result, state, "on"), added(result, state)
        row = f"{state:6}  {off[0]:8.2f}  {on[0]:8.2f}  {more[0]:7.1%}  {off[1]:11.2f}  {on[1]:8.2f}  {more[1]:7.1%}"
        print(f"{row}  {len(result['states'][state]['on'])}")
    for state in STATES:
        ways = {way: sorted(spent for _, spent in result["states"][state][way]) for way in ("off", "on")}
        ranges = ", ".join(f"{way} {times[0]:.2f} to {times[-1]:.2f}" for way, times in ways.items())
        means = {way: statistics.mean(times) for way, times in ways.items()}
        print(
            f"{state:6}  processor seconds of rounds: {ranges}; a dump adds {means['on'] / means['off'] - 1:.1%} to "
            "their mean"
        )
    print(f"the folder: {result['files']} files, {result['bytes'] / 2**20:.1f} MiB")


def main() -> int:
    arguments = _arguments()
    print(f"{system()}, {len(os.sched_getaffinity(0))} cores, load {load()}")
    with tempfile.TemporaryDirectory(prefix="dumps-") as folder:
        result = measure(arguments, Path(folder))
    print(f"load after {load()}\n")
    report(result)
    write_json(arguments.json, result)
    return int(any(added(result, state)[1] > arguments.most for state in ("cold", "warm")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("width", 256), ("heads", 8), ("vocab", 1024), ("positions", 128)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--rounds", type=int, default=15, help="compiles of each kind with a full cache (default: 15)")
    parser.add_argument("--cold-rounds", type=int, default=5, help="with an empty one, and first dumps (default: 5)")
    parser.add_argument("--most", type=float, default=0.1, help="what a dump may add (default: 0.1)")
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
