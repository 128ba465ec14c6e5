"""The rates of the GPUs of this machine, measured as stages use them, for a cluster file.

    python -m penstock.support.processes "gpu rates" FOLDER --side N

In: GPUs that the driver lists. Out: `GpuRates` of each, and the time of copies between any two that reach each other's
memory, by a process of its own: the caller holds no memory of a GPU afterwards. Torch numbers GPUs in an order of its
own, so each is found by its UUID, and its architecture is checked, as for stages (backends/tvm/cuda/devices.py).

    flops           a float32 product of large square matrices, by torch; without tf32, as in stages
    efficiency      shares of it: products, convolutions and attention in float32, bf16 and f16, by the calls that
                    stages make (backends/tvm/cuda/torch_calls.py); in 16 bits they run on tensor cores
    bandwidth       a long list that is added to another
    overhead        the time that 40 kernels of nothing take more than 8, each; call_overhead: the remainder of a call
                    with 8. These are kernels of Penstock's own, so they take nvcc. Each is launched by itself: no call
                    is captured as a CUDA graph
    edges           copies between two GPUs, of several sizes: a line through their times
    copies          from pinned memory of the host to the first GPU that has rates, and back: a line, too

All times are those of the clock, from the first of many calls until the device is done with the last. Operands are
random numbers, as a GPU computes zeros with less power, and so faster.

What fails is left out, and a problem names it: a share, launches, an edge, copies, or a GPU. A GPU without flops or
bandwidth has no rates. Where nvcc is missing, launches stay estimates.

Limits: one shape for each kind of work. GPUs are measured one after the other, so none is held back by another one's
heat or power.
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
from penstock.backends.tvm.cuda.devices import find_device
from penstock.backends.tvm.cuda.load import CudaProgram
from penstock.backends.tvm.cuda.torch_calls import CALLS, keep_float32
from penstock.ir.cluster.cluster import MEASURED, Cluster, Device
from penstock.ir.graph import Module, Op, Stage, Value
from penstock.ir.ops import complete_attrs, cost_of, make
from penstock.ir.types import TensorType
from penstock.runtime.state.tensors import TORCH_DTYPES
from penstock.support.entry_points import ENTRY_POINTS
from penstock.support.errors import PenstockError, UsageError
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
# The kernels of two graphs.
_LAUNCHED = (8, 40)
# Without these a GPU has no rates.
_NEEDED = ("flops", "bandwidth")


class GpuRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements of one GPU, in the words of a cluster file; launches are None where they were not measured."""

    flops: float
    bandwidth: float
    efficiency: dict[str, float]
    overhead: float | None = None
    call_overhead: float | None = None


class GpuEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The copies from one GPU to another: bytes per second, and seconds of one without bytes."""

    source: int
    target: int
    bandwidth: float
    latency: float


class HostGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements of all GPUs of a host, by index, and what could not be measured. `copies` are bytes per second
    and seconds of copies between the host's memory and a GPU."""

    rates: dict[int, GpuRates] = {}
    edges: list[GpuEdge] = []
    problems: list[str] = []
    copies: tuple[float, float] | None = None


def measure_gpus(gpus: Sequence[Gpu], side: int = SIDE) -> HostGpus:
    """Measure GPUs in a process of its own. What fails is a problem of the result."""
    problems = []
    with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as folder:
        for target in dict.fromkeys(gpu.arch for gpu in gpus):
            try:
                _compile_launches(Path(folder) / target, target)
            except (PenstockError, ImportError, OSError) as error:
                problems.append(f"GPUs: launches on {target} were not measured: {error}")
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
        overhead=device.overhead if rates.overhead is None else rates.overhead,
        call_overhead=device.call_overhead if rates.call_overhead is None else rates.call_overhead,
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
    """Return the rates that seconds mean: of the work, which may lack shares, of `bandwidth`, and of launches if they
    are there."""
    rates = {key: cost_of(op).flops / seconds[key] for key, op in work(side).items() if key in seconds}
    flops = rates.pop("flops")
    efficiency = {key: round_rate(rate / flops) for key, rate in rates.items()}
    # Two lists are read, and one is written.
    measured = GpuRates(round_rate(flops), round_rate(3.0 * 4 * _length(side) / seconds["bandwidth"]), efficiency)
    if not all(f"tiny{count}" in seconds for count in _LAUNCHED):
        return measured
    overhead, call_overhead = map(round_rate, launch_overheads(seconds, _LAUNCHED))
    return msgspec.structs.replace(measured, overhead=overhead, call_overhead=call_overhead)


def _length(side: int) -> int:
    return 4 * side * side


def measure_gpu(device: torch.device, side: int) -> tuple[dict[str, float], list[str]]:
    """Return the seconds of the work on one GPU, and of the list that is added to another; and what failed."""
    makers = {key: partial(_call, op) for key, op in work(side).items()}
    makers["bandwidth"] = partial(_addition, _length(side))
    seconds, problems = {}, []
    with torch.cuda.device(device):
        for key, make_call in makers.items():
            try:
                seconds[key] = _time(make_call(device), device)
            except RuntimeError as error:
                kind, _, dtype = key.partition(".")
                problems.append(f"{kind} in {dtype or 'f32'} not measured: {_words(error)}")
    return seconds, problems


def measure_launches(target: str, device: torch.device, folder: Path) -> dict[str, float]:
    """Return the seconds of the compiled graphs of a folder; none if there are none."""
    if not (folder / "files.json").exists():
        return {}
    module = _launches(target, str(device.index))
    files = [folder / name for name in json.loads((folder / "files.json").read_text(encoding="utf-8"))]
    with torch.cuda.device(device):
        program, x = backend_of("tvm").load_stage(module, 0, files), torch.randn(16, device=device)
        assert isinstance(program, CudaProgram)
        program.captures = None
        return {name.removeprefix("s0."): _time(partial(program.call, name, [x]), device) for name in module.graphs}


def _call(op: Op, device: torch.device) -> Callable[[], object]:
    """Return the call that a stage makes for an operation, on random operands."""
    ins = [torch.randn(v.type.dims, dtype=TORCH_DTYPES[v.type.dtype], device=device) for v in op.ins]
    out = torch.empty(op.outs[0].type.dims, dtype=TORCH_DTYPES[op.outs[0].type.dtype], device=device)
    attrs, function = complete_attrs(op), CALLS[op.kind]
    # Nothing reads the statistics of attention in a forward pass alone.
    return lambda: function(attrs, [out, *[None] * (len(op.outs) - 1)], *ins)


def _addition(length: int, device: torch.device) -> Callable[[], object]:
    """Return the addition of a random list to another."""
    total, more = (torch.randn(length, device=device) for _ in range(2))
    return partial(total.add_, more)


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
    graphs = {graph.name: graph for graph in launch_graphs(_LAUNCHED)}
    return Module("launches", graphs=graphs, stages=(Stage(0, device.name),), cluster=Cluster((device,)))


def _compile_launches(folder: Path, target: str) -> None:
    folder.mkdir()
    files = backend_of("tvm").compile_stages(_launches(target, "0"), [0], folder, CompileOptions())
    (folder / "files.json").write_text(json.dumps(files[0]), encoding="utf-8")


def measure_edges(devices: Mapping[int, torch.device]) -> tuple[list[GpuEdge], list[str]]:
    """Measure copies between any two GPUs, given by index, that reach each other's memory; return what failed, too."""
    edges, problems = [], []
    for (source, here), (target, there) in combinations(devices.items(), 2):
        try:
            if torch.cuda.can_device_access_peer(here.index, there.index):
                edges.append(GpuEdge(source, target, *map(round_rate, fit(_copies(here, there)))))
        except RuntimeError as error:
            problems.append(f"cuda:{source}: copies to cuda:{target} not measured: {_words(error)}")
    return edges, problems


def _copies(here: torch.device, there: torch.device) -> list[tuple[int, float]]:
    """Return sizes and seconds of copies from one GPU to another."""
    times = []
    for size in _COPIES:
        x = torch.randint(256, (size,), dtype=torch.uint8).to(here)
        y = torch.empty(size, dtype=torch.uint8, device=there)
        with torch.cuda.device(here):
            times.append((size, _time(partial(y.copy_, x), here)))
    return times


def measure_host_copies(devices: Mapping[int, torch.device]) -> tuple[tuple[float, float] | None, list[str]]:
    """Measure copies from pinned memory to the first GPU and back, one way; return what failed, too."""
    for index, device in sorted(devices.items())[:1]:
        times = []
        try:
            for size in _COPIES:
                on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
                there = torch.empty(size, dtype=torch.uint8, device=device)
                times.append((size, _time(partial(_there_and_back, on_host, there), device) / 2))
        except RuntimeError as error:
            return None, [f"cuda:{index}: copies to and from the host not measured: {_words(error)}"]
        bandwidth, latency = map(round_rate, fit(times))
        return (bandwidth, latency), []
    return None, []


def _there_and_back(on_host: torch.Tensor, there: torch.Tensor) -> None:
    there.copy_(on_host, non_blocking=True)
    on_host.copy_(there, non_blocking=True)


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
    keep_float32()
    rates, devices, problems = {}, {}, []
    for gpu in gpus:
        name = f"cuda:{gpu.index}"
        try:
            device = find_device(gpu.arch, gpu.uuid or str(gpu.index), 0)
            seconds, failed = measure_gpu(device, side)
        except (UsageError, RuntimeError) as error:
            problems.append(f"{name}: not measured: {_words(error)}")
            continue
        problems += [f"{name}: {text}" for text in failed]
        if missing := [key for key in _NEEDED if key not in seconds]:
            problems.append(f"{name}: not measured: no rates without {' and '.join(missing)}")
            continue
        try:
            seconds |= measure_launches(gpu.arch, device, folder / gpu.arch)
        except (PenstockError, RuntimeError, OSError) as error:
            problems.append(f"{name}: launches not measured: {_words(error)}")
        rates[gpu.index], devices[gpu.index] = rates_of_gpu(seconds, side), device
    edges, failed = measure_edges(devices)
    copies, missed = measure_host_copies(devices)
    return HostGpus(rates, edges, [*problems, *failed, *missed], copies)


def _words(error: Exception) -> str:
    """Return the first line of what an error says; the name of its type where it says nothing."""
    said = error.what if isinstance(error, PenstockError) else str(error)
    return next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
