"""Training on one GPU: Penstock against eager torch and torch.compile, in bfloat16, from the same ONNX files.

    python benchmarks/gpu.py                         GPT-2 small, BERT-base and ResNet-50: units per second
    python benchmarks/gpu.py --models gpt2-small --libraries none --json gpu.json
    python benchmarks/gpu.py --compile sm_80 sm_90   only make the code for these architectures; needs nvcc alone
    python benchmarks/gpu.py --device cpu --tiny     the benchmark in small, on a processor: what the tests run

Without a GPU it says so and ends with 0. Everything is one process on one device: graphs of one stage, called as a
worker calls them, a step of each contender in turn. A step is a forward and a backward pass and an update, the same
batch again and again. Torch computes under autocast to bfloat16, Penstock with --precision bf16; parameters and
optimiser state are float32 at both. Times are wall time between synchronisations, medians of the rounds. Losses must
agree with those of eager torch step by step, and fall: exit code 1 if not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import model_specs
import numpy as np
import torch
import torch.nn.functional as F
from machine import write_json
from model_contenders import torch_optimizer
from torch_models import build

import penstock as ps
from penstock.backends.interface import CompileOptions, target_of
from penstock.backends.registry import backend_of
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module, signature
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.store import initial_arrays
from penstock.ir.types import numpy_dtype
from penstock.runtime.state.tensors import allocate, fill

_GPT = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "positions": 1024}
SPECS = {
    "gpt2-small": model_specs.Spec("gpt", _GPT, 8, "tokens", 1024, model_specs.ADAMW),
    "bert-base": replace(model_specs.SPECS["bert-base-train"], batch=64),
    "resnet50": replace(model_specs.SPECS["resnet50-train"], batch=64),
}
# Relative to the first loss. Both round to 8 bits, at other places.
LOSS_TOLERANCE = 2e-2
CHECKED_STEPS = 4


@dataclass
class Contender:
    """One way to train. `step` does the work once and returns the loss before the update."""

    name: str
    step: Callable[[], torch.Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: float = float("nan")


def spec_of(name: str, tiny: bool) -> model_specs.Spec:
    return model_specs.small(SPECS[name]) if tiny else SPECS[name]


def feeds_of(spec: model_specs.Spec) -> dict[str, np.ndarray]:
    """Make one batch. A language model is trained on the next token of every position."""
    if spec.kind != "gpt":
        return model_specs.feeds_of(spec)
    feeds = model_specs.feeds_of(replace(spec, optimizer=None))
    feeds["labels"] = np.random.default_rng(2).integers(0, spec.sizes["vocab"], feeds["tokens"].shape)
    return feeds


def plan_of(spec: model_specs.Spec, file: Path, cluster: Cluster, libraries: str) -> Any:
    assert spec.optimizer is not None
    training = ps.Training(loss="cross_entropy", optimizer=spec.optimizer)
    return ps.plan(ps.from_onnx(file), cluster, training, precision="bf16", cuda_libraries=libraries)


# ------------------------------------------------------------------------------------------------ contenders


def penstock_contender(spec: model_specs.Spec, file: Path, folder: Path, cluster: Cluster, libraries: str) -> Contender:
    plan = plan_of(spec, file, cluster, libraries)
    module: Module = plan.module
    backend = backend_of("tvm")
    names = backend.compile_stages(module, [0], folder)[0]
    program = backend.load_stage(module, 0, [folder / name for name in names], cluster.devices[0].threads)
    graphs = {kind: graph for kind in "FBU" if (graph := module.stage_graph(0, kind)) is not None}
    arrays = initial_arrays(module, plan.model.imported.weights, list(module.vars), TYPED)
    buffers = {name: fill(allocate(module.vars[name].type, program.device), array) for name, array in arrays.items()}
    slots = {kind: [buffers[slot.var] for slot in signature(graph).slots] for kind, graph in graphs.items()}
    types = {v.name: v.type for v in module.inputs}
    arrays_in = {name: array.astype(numpy_dtype(types[name].dtype)) for name, array in feeds_of(spec).items()}
    inputs = {name: fill(allocate(types[name], program.device), array) for name, array in arrays_in.items()}

    def step() -> torch.Tensor:
        held = dict(inputs)
        loss = None
        for kind, graph in graphs.items():
            results = program.call(graph.name, [*(held[v.name] for v in graph.ins), *slots[kind]])
            if kind == "F":
                held |= dict(zip((v.name for v in graph.results), results, strict=True))
                loss = held[module.outputs[0]]
        assert loss is not None
        return loss

    return Contender("penstock" if libraries == "torch" else "penstock, own kernels", step)


def torch_contender(spec: model_specs.Spec, file: Path, device: torch.device, compiled: bool) -> Contender:
    model = build(spec.kind, spec.sizes, file).to(device)
    x, labels = (torch.from_numpy(array).to(device) for array in feeds_of(spec).values())
    optimizer = torch_optimizer(spec, model)

    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            y = model(x)
            return F.cross_entropy(y.flatten(0, -2).float(), labels.flatten())

    loss_function = torch.compile(loss_of) if compiled else loss_of

    def step() -> torch.Tensor:
        loss = loss_function(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contender("torch.compile" if compiled else "torch", step)


# ------------------------------------------------------------------------------------------------ measuring


def wrong_losses(contenders: Sequence[Contender]) -> list[str]:
    """Run the first steps of all contenders, and return the faults of their losses."""
    for contender in contenders:
        contender.losses = [float(contender.step()) for _ in range(CHECKED_STEPS)]
    expected = np.array(next(c for c in contenders if c.name == "torch").losses)
    if not expected[-1] < expected[0]:
        return [f"losses do not fall: {expected.tolist()}"]
    for contender in contenders:
        contender.error = float(np.abs(np.array(contender.losses) - expected).max() / expected[0])
    return [
        f"{c.name} is off by {c.error:.1e}, more than {LOSS_TOLERANCE:g}"
        for c in contenders
        if not c.error <= LOSS_TOLERANCE
    ]


def measure(
    name: str, spec: model_specs.Spec, folder: Path, cluster: Cluster, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure one row: all contenders, checked and timed."""
    file = model_specs.write_model(spec, folder / f"{name}.onnx")
    device = torch.device("cuda", 0) if cluster.devices[0].kind == "cuda" else torch.device("cpu")
    contenders = [
        penstock_contender(spec, file, folder, cluster, arguments.libraries),
        torch_contender(spec, file, device, False),
    ]
    if not arguments.no_torch_compile:
        contenders.append(torch_contender(spec, file, device, True))
    wrong = wrong_losses(contenders)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for number in range(arguments.rounds):
        for i in range(len(contenders)):
            contender = contenders[(number + i) % len(contenders)]
            wait()
            begin = time.perf_counter()
            for _ in range(arguments.steps):
                contender.step()
            wait()
            contender.seconds.append((time.perf_counter() - begin) / arguments.steps)
    amount = spec.batch * spec.units
    sides = {
        c.name: {
            f"{spec.unit}_per_s": amount / statistics.median(c.seconds),
            "step_s": c.seconds,
            "losses": c.losses,
            "error": c.error,
        }
        for c in contenders
    }
    return {"model": name, "unit": spec.unit, "per_step": amount, "contenders": sides, "wrong": wrong}


def print_row(row: dict[str, Any]) -> None:
    ours = next(iter(row["contenders"].values()))[f"{row['unit']}_per_s"]
    for name, side in row["contenders"].items():
        rate = side[f"{row['unit']}_per_s"]
        print(
            f"| {row['model']} | {name} | {rate:,.0f} {row['unit']}/s | penstock is {ours / rate:.2f} times as fast |"
        )
    for problem in row["wrong"]:
        print(f"WRONG {row['model']}: {problem}")


# ------------------------------------------------------------------------------------------------ without a GPU


def compile_only(
    names: Sequence[str], architectures: Sequence[str], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Make the code of all models for architectures, and report its time and size."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            spec = spec_of(name, arguments.tiny)
            file = model_specs.write_model(spec, Path(scratch) / f"{name}.onnx")
            for architecture in architectures:
                cluster = Cluster.listed(architecture)
                module = plan_of(spec, file, cluster, arguments.libraries).module
                folder = Path(scratch) / f"{name}-{architecture}"
                folder.mkdir()
                begin = time.perf_counter()
                options = CompileOptions(target_of(module, 0, "host"))
                (library,) = backend_of("tvm").compile_stages(module, [0], folder, options)[0]
                ops = [op for graph in module.graphs.values() if graph.name.startswith("s0.") for op in graph.ops]
                kernels = {
                    (op.attrs["kernel"]) for op in ops if not str(op.attrs.get("kernel", "inline")).startswith("inline")
                }
                row = {
                    "model": name,
                    "architecture": architecture,
                    "seconds": round(time.perf_counter() - begin, 1),
                    "bytes": (folder / library).stat().st_size,
                    "library_calls": sum(op.attrs.get("library") == "torch" for op in ops),
                    "kernels": len(kernels),
                }
                rows.append(row)
                print(
                    f"{name} for {architecture}: {row['seconds']} s, {row['bytes'] / 1e6:.1f} MB, "
                    f"{row['library_calls']} library calls",
                    flush=True,
                )
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SPECS), default=list(SPECS))
    parser.add_argument(
        "--libraries", choices=("torch", "none"), default="torch", help="who computes contractions (default: torch)"
    )
    parser.add_argument("--compile", nargs="+", metavar="ARCH", help="only compile, for these architectures")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the benchmark itself (default: cuda)"
    )
    parser.add_argument("--tiny", action="store_true", help="the same models in small")
    parser.add_argument("--no-torch-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps of a contender in a round (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    arguments = parser.parse_args(words)
    if arguments.compile:
        rows = compile_only(arguments.models, arguments.compile, arguments)
    elif arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured (--compile ARCH makes the code without one)")
        return 0
    else:
        rows = []
        cluster = Cluster.local(1)
        if arguments.device == "cuda":
            major, minor = torch.cuda.get_device_capability(0)
            cluster = Cluster.listed(f"sm_{major}{minor}")
            print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
        for name in arguments.models:
            with tempfile.TemporaryDirectory() as scratch:
                rows.append(measure(name, spec_of(name, arguments.tiny), Path(scratch), cluster, arguments))
            print_row(rows[-1])
    write_json(arguments.json, {"rows": rows})
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
