"""How long it takes to compile a GPT-2-small-shaped training bundle, with an empty cache and with a full one, and on what the time goes.

    python benchmarks/compile_time.py                                    GPT-2 small, two stages, 2bw: half a minute
    python benchmarks/compile_time.py --torch                            torch.compile of the same training step beside it: minutes more
    python benchmarks/compile_time.py --layers 2 --width 128 --heads 4 --vocab 4096 --positions 64

Every compile is a process of its own with a cache folder of its own: cold (nothing in the cache), kernels (all kernels are in the cache, as
they are when only the order of operations changed), warm (nothing changed). Wall seconds from the start of the interpreter to the finished
bundle, the median of the rounds; and processor seconds of all its processes, which other work on the machine changes little.

    import     interpreter, Penstock, the ONNX reader
    frontend   the model file into IR
    passes     IR into the graphs of stages
    lowering   groups, keys of the cache, looking them up
    kernels    TIR, LLVM, object files; in parallel
    link       Relax and g++, one library per stage; in parallel
    bundle     weights, hashes, flushing to disk

torch.compile is timed as its users meet it: the first step of training (forward and backward of one microbatch, with an empty cache) less a
later one; torch has the whole model in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

BEGIN = time.perf_counter()
PHASES = ("import", "frontend", "passes", "lowering", "kernels", "link", "bundle")
STATES = ("cold", "kernels", "warm")


def compile_once(shape_text: str, model_file: str, schedule: str, bundle: Path, jobs: int | None) -> dict[str, Any]:
    """Compile in this process, as `penstock compile` does; seconds by phase."""
    from dataclasses import replace

    from turns import Shape

    import penstock as ps
    import penstock.frontends.onnx
    from penstock.backends.bundle_writer import write_bundle
    from penstock.backends.interface import CompileOptions, stage_graphs
    from penstock.backends.tvm.build import Builder, Part

    marks = [BEGIN, time.perf_counter()]
    shape = Shape.from_json(shape_text)
    model = ps.from_onnx(model_file)
    marks.append(time.perf_counter())
    cluster = ps.Cluster.local(2)
    cluster = replace(cluster, devices=tuple(replace(device, threads=1) for device in cluster.devices))
    optimizer = ps.AdamW(lr=shape.lr, weight_decay=shape.weight_decay)
    training = ps.Training(loss="cross_entropy", optimizer=optimizer, microbatches=shape.microbatches)
    plan = ps.plan(model, cluster, training, schedule=schedule, precision=shape.precision)
    marks.append(time.perf_counter())
    with tempfile.TemporaryDirectory() as scratch, Builder(CompileOptions(jobs=jobs)) as builder:
        parts = {
            s.index: Part(stage_graphs(plan.module, s.index), Path(scratch) / f"s{s.index}.{builder.cpu}.so") for s in plan.module.stages
        }
        builder.build(list(parts.values()))
        built = time.perf_counter()
        files = {stage: [part.out] for stage, part in parts.items()}
        write_bundle(bundle, plan.module, files, model.imported.weights, backend="tvm", plan=plan.as_dict(), reference=plan.reference)
    marks += [built, time.perf_counter()]
    counts = builder.counts
    took = [b - a for a, b in pairwise(marks)]
    return {
        **dict(zip(PHASES[:3], took, strict=False)),
        "lowering": took[3] - counts.kernels_s - counts.link_s,
        "kernels": counts.kernels_s,
        "link": counts.link_s,
        "bundle": took[4],
        "processor": processor_seconds(),
        "found": f"{counts.compiled} of {counts.kernels} kernels compiled" if counts.kernels else "libraries found",
    }


def torch_once(shape_text: str) -> dict[str, Any]:
    """First training step under torch.compile, and a later one."""
    import torch
    from torch_contender import Part, loss_of
    from turns import Shape

    shape = Shape.from_json(shape_text)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = Part(shape, 0, shape.layers)
    forward = torch.compile(lambda x, y: loss_of(model(x), y))
    tokens = torch.randint(shape.vocab, (2, shape.microbatch_samples, shape.positions))

    def step() -> tuple[float, float]:
        begin, spent = time.perf_counter(), processor_seconds()
        forward(tokens[0], tokens[1]).backward()
        return time.perf_counter() - begin, processor_seconds() - spent

    first = step()
    later = min(step() for _ in range(2))
    return {"torch.compile": first[0] - later[0], "torch.compile processor": first[1] - later[1]}


def processor_seconds() -> float:
    """Of this process and those it has seen end."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in spent)


def child(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run this file as a process of its own; what it printed, and its wall time."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments], env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True, text=True
    )
    return {**json.loads(done.stdout), "total": time.perf_counter() - begin}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from turns import Shape

    from penstock.models import write_gpt

    shape = Shape(**{name: getattr(arguments, name) for name in Shape.__dataclass_fields__})
    sizes = {name: getattr(shape, name) for name in ("layers", "width", "heads", "vocab", "positions", "seed")}
    model = folder / "gpt.onnx"
    write_gpt(model, batch=shape.microbatch_samples, **sizes)
    found: dict[str, list[dict[str, Any]]] = {state: [] for state in STATES}
    for number in range(arguments.rounds):
        cache = folder / f"cache{number}"
        for state in STATES:
            if state == "kernels":
                _forget_libraries(cache)
            words = ["compile", shape.to_json(), str(model), arguments.schedule, str(folder / "bundle"), str(arguments.jobs or 0)]
            row = child(words, {"PENSTOCK_CACHE": str(cache)})
            row["import"] += row["total"] - sum(row[phase] for phase in PHASES)  # the interpreter before its first line, and its end
            found[state].append(row)
            print(f"{state}: {row['total']:.1f} s", file=sys.stderr)
    result: dict[str, Any] = {"states": found}
    if arguments.torch:
        result |= child(["torch", shape.to_json()], {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")})
    return result


def _forget_libraries(cache: Path) -> None:
    """Delete linked stages; their content is the only one that starts as a shared library does."""
    libraries = [path for path in (cache / "tvm").iterdir() if path.read_bytes()[32:36] == b"\x7fELF"]
    assert libraries, "no library was kept"
    for path in libraries:
        path.unlink()


def report(result: dict[str, Any]) -> None:
    heads = ["", "total s", *PHASES, "processor s"]
    lines = [heads]
    for state, rows in result["states"].items():
        middle = {key: statistics.median(row[key] for row in rows) for key in ("total", *PHASES, "processor")}
        lines.append([state, *(f"{middle[key]:.2f}" for key in ("total", *PHASES, "processor"))])
    for line in lines:
        print("  ".join(cell.ljust(8) if i == 0 else cell.rjust(11) for i, cell in enumerate(line)))
    for state, rows in result["states"].items():
        totals = ", ".join(f"{row['total']:.1f}" for row in rows)
        print(f"{state}: {rows[0]['found']}, totals {totals} s")
    if "torch.compile" in result:
        cold = statistics.median(row["total"] for row in result["states"]["cold"])
        seconds, processor = result["torch.compile"], result["torch.compile processor"]
        print(f"torch.compile, first step less a later one: {seconds:.1f} s ({seconds / cold:.1f} times ours), processor {processor:.1f} s")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        what, *words = sys.argv[2:]
        # What libraries print must not mix with the answer.
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        if what == "torch":
            answer = torch_once(*words)
        else:
            answer = compile_once(words[0], words[1], words[2], Path(words[3]), int(words[4]) or None)
        print(json.dumps(answer), file=out, flush=True)
        return 0
    arguments = _arguments()
    cores = len(os.sched_getaffinity(0))
    print(f"Python {platform.python_version()}, {cores} cores, load {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory(prefix="compile-time-") as folder:
        result = measure(arguments, Path(folder))
    print(f"load after {os.getloadavg()[0]:.2f}\n")
    report(result)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    from turns import Shape

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, spec in Shape.__dataclass_fields__.items():
        kind = type(spec.default)
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=spec.default, help=f"default: {spec.default}")
    parser.add_argument("--schedule", default="2bw", help="default: 2bw")
    parser.add_argument("--rounds", type=int, default=1, help="compiles of each kind (default: 1)")
    parser.add_argument("--jobs", type=int, help="processes to compile with (default: one per core)")
    parser.add_argument("--torch", action="store_true", help="time torch.compile, too")
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
