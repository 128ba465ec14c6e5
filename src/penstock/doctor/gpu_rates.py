"""The rates of the GPUs of this machine, measured as stages use them, for a cluster file.

    python -m penstock.support.processes "gpu rates" FOLDER --side N

In: GPUs that CUDA shows. Out: `GpuRates` of each, and the time of copies between any two that reach each other's
memory, by a process of its own: the caller holds no memory of a GPU afterwards.

    flops           a float32 product of large square matrices, by torch, without tf32
    efficiency      shares of it: products, convolutions and attention in float32, bf16 and f16, by the calls that
                    stages make (backends/tvm/cuda/torch_calls.py); in 16 bits they run on tensor cores
    bandwidth       a long list that is added to another
    overhead        the time that 32 kernels of nothing take more than one, each; call_overhead: the remainder of a call
                    with one. These are kernels of Penstock's own, so they take nvcc. Calls are captured, as in stages
    edges           copies between two GPUs, of several sizes: a line through their times

All times are those of the clock, from the first of many calls until the device is done with the last.

Limits: one shape for each kind of work. GPUs are measured one after the other, so none is held back by another one's
heat or power. Where nvcc is missing, launches stay estimates, and a problem says so.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import msgspec
import torch

from penstock.backends.interface import CompileOptions
from penstock.backends.registry import backend_of
from penstock.backends.tvm.cuda.torch_calls import CALLS
from penstock.ir.cluster.cluster import MEASURED, Cluster, Device
from penstock.ir.graph import Module, Op, Stage, Value
from penstock.ir.ops import complete_attrs, cost_of, make
from penstock.ir.types import TensorType
from penstock.runtime.state.store import TORCH_DTYPES
from penstock.support.entry_points import ENTRY_POINTS
from penstock.support.errors import PenstockError
from penstock.support.hardware import Gpu
from penstock.support.helper_processes import failure, outputs, start
from penstock.support.processes import command_of

from .kernels import launch_graphs, launch_overheads, round_rate
from .links import fit

# The sides of matrices; other sizes follow from it.
SIDE = 4096
_TIMEOUT, _LEAST_SECONDS = 300.0, 0.05
_DTYPES = ("f32", "bf16", "f16")
_COPIES = (4 << 10, 256 << 10, 4 << 20, 64 << 20)


class GpuRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements of one GPU, in the words of a cluster file; launches are 0 where they were not measured."""

    flops: float
    bandwidth: float
    efficiency: dict[str, float]
    overhead: float = 0.0
    call_overhead: float = 0.0


class GpuEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The copies from one GPU to another: bytes per second, and seconds of one without bytes."""

    source: int
    target: int
    bandwidth: float
    latency: float


class HostGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements of all GPUs of a host, by index, and what could not be measured."""

    rates: dict[int, GpuRates] = {}
    edges: list[GpuEdge] = []
    problems: list[str] = []


def measure_gpus(gpus: Sequence[Gpu], side: int = SIDE) -> HostGpus:
    """Measure GPUs in a process of its own. What fails is a problem of the result."""
    problems = []
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as folder:
        try:
            for target in dict.fromkeys(gpu.arch for gpu in gpus):
                _compile_launches(Path(folder) / target, target)
        except (PenstockError, ImportError, OSError) as error:
            problems.append(f"GPUs: launches were not measured: {error}")
        (Path(folder) / "gpus.json").write_bytes(msgspec.json.encode(list(gpus)))
        running = [start([*command_of("gpu rates"), folder, "--side", str(side)], os.environ)]
        written = outputs(running, _TIMEOUT)
        if written is None:
            return HostGpus(problems=[*problems, f"GPUs: measuring did not end within {_TIMEOUT:g} s"])
        if (problem := failure(running, written)) is not None:
            return HostGpus(problems=[*problems, f"GPUs: measuring failed: {(problem.splitlines() or ['?'])[-1]}"])
        measured = msgspec.json.decode(written[0][0], type=HostGpus)
    return msgspec.structs.replace(measured, problems=[*problems, *measured.problems])


def with_gpu_rates(device: Device, rates: GpuRates) -> Device:
    """Return a GPU with measured rates; launches stay estimates where they were not measured."""
    return replace(
        device,
        flops=rates.flops,
        bandwidth=rates.bandwidth,
        overhead=rates.overhead or device.overhead,
        call_overhead=rates.call_overhead or device.call_overhead,
        efficiency=tuple(rates.efficiency.items()),
        source=MEASURED,
    )


# ------------------------------------------------------------------------------------------------ what is measured


def work(side: int) -> dict[str, Op]:
    """Return the operations that are timed, by the efficiency that each is for; `flops` is the yardstick."""
    window: dict[str, object] = {"strides": (1, 1), "pads": (1, 1, 1, 1), "dilations": (1, 1)}
    ops = {"flops": _op("matmul", "f32", (side, side), (side, side))}
    for dtype in _DTYPES:
        end = "" if dtype == "f32" else f".{dtype}"
        image, heads = (max(1, side // 128), 64, 28, 28), (max(1, side // 512), 8, max(16, side // 4), 64)
        ops[f"products{end}"] = _op("matmul", dtype, (side // 2, side), (side, side))
        ops[f"convolutions{end}"] = _op("conv", dtype, image, (64, 64, 3, 3), **window)
        ops[f"attention{end}"] = _op("attention", dtype, heads, heads, heads, scale=0.125, causal=True)
    return ops


def _op(kind: str, dtype: str, *shapes: tuple[int, ...], **attrs: object) -> Op:
    ins = tuple(Value(f"x{i}", TensorType(dtype, shape)) for i, shape in enumerate(shapes))
    outs = [f"y{i}" for i in range(3 if kind == "attention" else 1)]
    return make(kind, ins, outs, "", **attrs)  # type: ignore[arg-type]


def rates_of_gpu(seconds: Mapping[str, float], side: int) -> GpuRates:
    """Return the rates that seconds mean: of the work, of `stream`, and of launches if they are there."""
    rates = {key: cost_of(op).flops / seconds[key] for key, op in work(side).items()}
    flops = rates.pop("flops")
    efficiency = {key: round_rate(rate / flops) for key, rate in rates.items()}
    # Two lists are read, and one is written.
    bandwidth = 3.0 * 4 * _length(side) / seconds["stream"]
    launches = launch_overheads(seconds) if "tiny1" in seconds else (0.0, 0.0)
    return GpuRates(round_rate(flops), round_rate(bandwidth), efficiency, *map(round_rate, launches))


def _length(side: int) -> int:
    return 4 * side * side


def measure_gpu(gpu: Gpu, side: int) -> dict[str, float]:
    """Return the seconds of the work on one GPU, and of the list that is added to another."""
    device = torch.device("cuda", gpu.index)
    with torch.cuda.device(device):
        seconds = {key: _time(_call(op, device), device) for key, op in work(side).items()}
        more = torch.ones(_length(side), device=device)
        return seconds | {"stream": _time(partial(torch.zeros_like(more).add_, more), device)}


def measure_launches(gpu: Gpu, folder: Path) -> dict[str, float]:
    """Return the seconds of the compiled graphs of a folder; none if there are none."""
    if not (folder / "files.json").exists():
        return {}
    module, device = _launches(gpu.arch, str(gpu.index)), torch.device("cuda", gpu.index)
    files = [folder / name for name in json.loads((folder / "files.json").read_text(encoding="utf-8"))]
    with torch.cuda.device(device):
        program, x = backend_of("tvm").load_stage(module, 0, files), torch.zeros(16, device=device)
        return {name.removeprefix("s0."): _time(partial(program.call, name, [x]), device) for name in module.graphs}


def _call(op: Op, device: torch.device) -> Callable[[], object]:
    """Return the call that a stage makes for an operation, on operands of its own."""
    ins, outs = (
        [torch.zeros(v.type.dims, dtype=TORCH_DTYPES[v.type.dtype], device=device) for v in values]
        for values in (op.ins, op.outs)
    )
    attrs, function = complete_attrs(op), CALLS[op.kind]
    # Nothing reads the statistics of attention in a forward pass alone.
    return lambda: function(attrs, [outs[0], *[None] * (len(outs) - 1)], *ins)


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, one of many behind each other."""
    for _ in range(3):
        call()
    count = 1
    while True:
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize(device)
        spent = time.perf_counter() - begin
        if spent >= _LEAST_SECONDS:
            return spent / count
        count *= 2


def _launches(target: str, gpu: str) -> Module:
    """Return graphs of kernels that do next to nothing, for a GPU."""
    device = Device("cuda:0", "cuda", target=target, gpu=gpu)
    graphs = {graph.name: graph for graph in launch_graphs()}
    return Module("launches", graphs=graphs, stages=(Stage(0, device.name),), cluster=Cluster((device,)))


def _compile_launches(folder: Path, target: str) -> None:
    folder.mkdir()
    files = backend_of("tvm").compile_stages(_launches(target, "0"), [0], folder, CompileOptions())
    (folder / "files.json").write_text(json.dumps(files[0]), encoding="utf-8")


def measure_edges(count: int) -> list[GpuEdge]:
    """Measure copies between any two GPUs that reach each other's memory."""
    edges = []
    for source, target in combinations(range(count), 2):
        if torch.cuda.can_device_access_peer(source, target):
            times = []
            for size in _COPIES:
                here, there = (torch.device("cuda", index) for index in (source, target))
                x, y = (torch.zeros(size, dtype=torch.uint8, device=device) for device in (here, there))
                with torch.cuda.device(here):
                    times.append((size, _time(partial(y.copy_, x), here)))
            bandwidth, latency = map(round_rate, fit(times))
            edges.append(GpuEdge(source, target, bandwidth, latency))
    return edges


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog=f"{ENTRY_POINTS['begin']} 'gpu rates'", description="Rates of GPUs, as JSON.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--side", type=int, default=SIDE)
    arguments = parser.parse_args(argv)
    gpus = msgspec.json.decode((arguments.folder / "gpus.json").read_bytes(), type=list[Gpu])
    print(msgspec.json.encode(_measured(gpus, arguments.folder, arguments.side)).decode())


def _measured(gpus: Sequence[Gpu], folder: Path, side: int) -> HostGpus:
    if not torch.cuda.is_available():
        return HostGpus(
            problems=["GPUs: torch sees none, so they were not measured and stages on them cannot run here"]
        )
    rates, problems = {}, []
    for gpu in gpus:
        seconds = measure_gpu(gpu, side)
        try:
            seconds |= measure_launches(gpu, folder / gpu.arch)
        except (PenstockError, RuntimeError, OSError) as error:
            problems.append(f"cuda:{gpu.index}: launches were not measured: {str(error).splitlines()[-1]}")
        rates[gpu.index] = rates_of_gpu(seconds, side)
    return HostGpus(rates, measure_edges(len(gpus)), problems)
