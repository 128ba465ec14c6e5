"""The time to compile a GPT-2-small-shaped training bundle, by phase, with an empty cache and with a full one.

    python benchmarks/compile_time.py                 GPT-2 small, two stages, 2bw: half a minute
    python benchmarks/compile_time.py --torch --tvm   also torch.compile, and inference by TVM's default pipeline:
                                                      minutes
    python benchmarks/compile_time.py --mesh tp=2 --shard preset:megatron
                                                      one stage, split over two devices
    python benchmarks/compile_time.py --layers 2 --width 128 --heads 4 --vocab 4096 --positions 64

Every compile is a process of its own with its own cache folder: cold (an empty cache), kernels (all kernels are in the
cache, as after a change of the order of operations alone), warm (nothing changed). The figures are wall seconds from
the start of the interpreter to the finished bundle, the median of the rounds; and processor seconds of all its
processes, which other work on the machine changes little.

    import     interpreter, Penstock, the ONNX reader
    frontend   the model file into IR
    passes     IR into the graphs of stages
    lowering   groups, keys of the cache, looking them up
    kernels    TIR, LLVM, object files; in parallel
    link       Relax and g++, one library per stage; in parallel
    bundle     weights, hashes, flushing to disk

With --mesh and --shard the share of the passes that split tensors, `shard` and `localize` with what verifies them, is
printed as well.

torch.compile is timed as its users see it: the first step of training (forward and backward of one microbatch, with an
empty cache) less a later one. torch has the whole model in one process.

With --tvm inference of the same file is compiled for one process: by Penstock to a bundle, with an empty cache; by
TVM's importer and `tvm.compile` with its default pipeline to a shared library. Both count the wall time of the whole
process. With --torch it is also compiled by torch.compile: the first call less a later one. With --run the compiled
models are called once, and results are compared with onnxruntime's: only for small models, as TVM's default kernels are
plain loops.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import load, system, write_json

BEGIN = time.perf_counter()
PHASES = ("import", "frontend", "passes", "lowering", "kernels", "link", "bundle")
STATES = ("cold", "kernels", "warm")
INFERENCE = "inference"
# The passes that split tensors.
SPLITTING = ("shard", "localize")


class PassClock:
    """The seconds of every pass, with what verifies it: a display of progress, which is told each pass as it begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._begin = "", 0.0

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._begin
        self._name, self._begin = what, now


def compile_once(
    shape_text: str, model_file: str, schedule: str, bundle: Path, jobs: int | None, mesh: str, shard: str
) -> dict[str, Any]:
    """Compile in this process, as `penstock compile` does, and return seconds by phase."""
    from dataclasses import replace

    from training_shape import Shape

    import penstock as ps
    import penstock.frontends.onnx
    from penstock.backends.bundle.writer import Provenance, write_bundle
    from penstock.backends.interface import CompileOptions, stage_graphs
    from penstock.backends.tvm.compile.build import LibraryBuilder, LibraryPart

    marks = [BEGIN, time.perf_counter()]
    shape = Shape.from_json(shape_text)
    model = ps.from_onnx(model_file)
    marks.append(time.perf_counter())
    infers = schedule == INFERENCE
    cluster = ps.Cluster.local(1 if infers else 2)
    cluster = replace(cluster, devices=tuple(replace(device, threads=1) for device in cluster.devices))
    optimizer = ps.AdamW(lr=shape.lr, weight_decay=shape.weight_decay)
    training = ps.Training(loss="cross_entropy", optimizer=optimizer, microbatches=shape.microbatches)
    clock = PassClock()
    plan = ps.plan(
        model,
        cluster,
        None if infers else training,
        schedule="1f1b" if infers else schedule,
        precision=shape.precision,
        mesh=mesh,
        shard=shard or (),
        progress=clock,
    )
    marks.append(time.perf_counter())
    with tempfile.TemporaryDirectory() as scratch, LibraryBuilder(CompileOptions(jobs=jobs)) as builder:
        parts = {
            s.index: LibraryPart(stage_graphs(plan.module, s.index), Path(scratch) / f"s{s.index}.{builder.cpu}.so")
            for s in plan.module.stages
        }
        builder.build(list(parts.values()))
        built = time.perf_counter()
        files = {stage: [part.out] for stage, part in parts.items()}
        write_bundle(
            bundle,
            plan.module,
            files,
            model.imported.weights,
            backend="tvm",
            plan=plan.as_dict(),
            provenance=Provenance(reference=plan.reference),
        )
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
        "splitting": sum(clock.seconds.get(name, 0.0) for name in SPLITTING),
        "found": f"{counts.compiled} of {counts.kernels} kernels compiled" if counts.kernels else "libraries found",
    }


def torch_once(shape_text: str, model_file: str, infers: str) -> dict[str, Any]:
    """Time the first step under torch.compile, of training or of inference, less a later one."""
    import torch
    from torch_contender import loss_of
    from torch_models import build
    from training_shape import Shape

    shape = Shape.from_json(shape_text)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = build(shape.model, shape.sizes, Path(model_file))
    tokens = torch.randint(shape.vocab, (2, shape.microbatch_samples, shape.positions))
    if infers == INFERENCE:
        run = torch.compile(model.eval())

        def once() -> object:
            with torch.inference_mode():
                return run(tokens[0])
    else:
        forward = torch.compile(lambda x, y: loss_of(model(x), y))

        def once() -> object:
            return forward(tokens[0], tokens[1]).backward()

    def step() -> tuple[float, float]:
        begin, spent = time.perf_counter(), processor_seconds()
        once()
        return time.perf_counter() - begin, processor_seconds() - spent

    first = step()
    later = min(step() for _ in range(2))
    return {"seconds": first[0] - later[0], "processor": first[1] - later[1]}


def tvm_once(model_file: str, library: str, runs: str) -> dict[str, Any]:
    """Compile with TVM's importer and default pipeline to a shared library.

    With `runs`, also compute the largest relative difference of its results from onnxruntime's.
    """
    import onnx
    import tvm
    from tvm.relax.frontend.onnx import from_onnx

    # Weights stay parameters: none of them is folded or written into the library.
    module = from_onnx(onnx.load(model_file), keep_params_in_input=True)
    module, weights = tvm.relax.frontend.detach_params(module)
    executable = tvm.compile(module, target=tvm.target.Target.from_device(tvm.cpu()))
    executable.export_library(library)
    answer: dict[str, Any] = {"processor": processor_seconds()}
    if runs:
        import numpy as np
        import onnxruntime

        session = onnxruntime.InferenceSession(model_file, providers=["CPUExecutionProvider"])
        x = session.get_inputs()[0]
        tokens = np.zeros(x.shape, np.int64)
        machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
        result = machine["main"](tvm.runtime.tensor(tokens), *weights["main"])
        exact = session.run(None, {x.name: tokens})[0]
        answer["error"] = float(np.abs(result.numpy() - exact).max() / np.abs(exact).max())
    return answer


def processor_seconds() -> float:
    """Return processor seconds of this process and its children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in spent)


def child(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run this file as a process of its own, and return its printed answer and its wall time."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return {**json.loads(done.stdout), "total": time.perf_counter() - begin}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from training_shape import shape_of, write_model

    shape = shape_of(arguments)
    model = write_model(shape, folder / f"{shape.model}.onnx")
    rows_by_state: dict[str, list[dict[str, Any]]] = {state: [] for state in STATES}
    for number in range(arguments.rounds):
        cache = folder / f"cache{number}"
        for state in STATES:
            if state == "kernels":
                _forget_libraries(cache)
            words = [
                "compile",
                shape.to_json(),
                str(model),
                arguments.schedule,
                str(folder / "bundle"),
                str(arguments.jobs or 0),
                arguments.mesh,
                arguments.shard,
            ]
            row = child(words, {"PENSTOCK_CACHE": str(cache)})
            row["import"] += row["total"] - sum(
                row[phase] for phase in PHASES
            )  # the interpreter before its first line, and its end
            rows_by_state[state].append(row)
            print(f"{state}: {row['total']:.1f} s", file=sys.stderr)
    result: dict[str, Any] = {"states": rows_by_state}
    by_torch = ["torch", shape.to_json(), str(model)]
    if arguments.torch:
        result["training"] = {
            "torch.compile": child([*by_torch, "training"], {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")})
        }
    if arguments.tvm:
        words = ["compile", shape.to_json(), str(model), INFERENCE, str(folder / "inference"), str(arguments.jobs or 0)]
        words += ["", ""]
        inference = {"penstock": child(words, {"PENSTOCK_CACHE": str(folder / "inference-cache")})}
        inference["tvm"] = child(["tvm", str(model), str(folder / "tvm.so"), "runs" if arguments.run else ""], {})
        if arguments.torch:
            inference["torch.compile"] = child(
                [*by_torch, INFERENCE], {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inference-inductor")}
            )
        result["inference"] = {
            name: row | {"seconds": row.get("seconds", row["total"])} for name, row in inference.items()
        }
    return result


def _forget_libraries(cache: Path) -> None:
    """Delete linked stages, the only files in the cache that begin as a shared library does."""
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
        if splitting := statistics.median(row["splitting"] for row in rows):
            share = statistics.median(row["splitting"] / row["total"] for row in rows)
            print(f"{state}: {' and '.join(SPLITTING)} take {splitting:.2f} s, {share:.0%} of the total")
    ours = {"training": statistics.median(row["total"] for row in result["states"]["cold"])}
    for what in (name for name in ("training", "inference") if name in result):
        for name, row in result[what].items():
            ours.setdefault(what, row["seconds"])  # Penstock comes first
            print(
                f"{what} by {name}: {row['seconds']:.1f} s ({row['seconds'] / ours[what]:.1f} times ours), processor "
                f"{row['processor']:.1f} s"
            )


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        what, *words = sys.argv[2:]
        # Output of libraries must not mix with the answer.
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        if what == "torch":
            answer = torch_once(*words)
        elif what == "tvm":
            answer = tvm_once(*words)
        else:
            answer = compile_once(words[0], words[1], words[2], Path(words[3]), int(words[4]) or None, *words[5:])
        print(json.dumps(answer), file=out, flush=True)
        return 0
    arguments = _arguments()
    print(f"{system()}, {len(os.sched_getaffinity(0))} cores, load {load()}")
    with tempfile.TemporaryDirectory(prefix="compile-time-") as folder:
        result = measure(arguments, Path(folder))
    print(f"load after {load()}\n")
    report(result)
    write_json(arguments.json, result)
    return 0


def _arguments() -> argparse.Namespace:
    from training_shape import add_shape_arguments

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--schedule", default="2bw", help="default: 2bw")
    parser.add_argument("--mesh", default="", help="axes of the devices of a stage, such as tp=2")
    parser.add_argument("--shard", default="", help="layouts, such as preset:megatron")
    parser.add_argument("--rounds", type=int, default=1, help="compiles of each kind (default: 1)")
    parser.add_argument("--jobs", type=int, help="processes to compile with (default: one per core)")
    parser.add_argument("--torch", action="store_true", help="time torch.compile, too")
    parser.add_argument(
        "--tvm", action="store_true", help="compile inference, too, by Penstock and by TVM's default pipeline"
    )
    parser.add_argument("--run", action="store_true", help="call what TVM compiled and compare with onnxruntime")
    parser.add_argument("--json", metavar="FILE", help="write every figure")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
