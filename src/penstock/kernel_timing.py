"""What kernels cost on this machine: each compiled by itself, and called again and again with the same random operands.

In: rows of the report on kernels. Out: the rows with the median time of a call. With one thread that is processor time, which other work on the
machine changes little; several threads, or a GPU, are timed by the clock, because their processor time is not the time that a call takes. What
fits into a cache is found there: the sum over a stage is at most what the stage takes, up to noise.

The roofline of measured rows is that of this machine, not of the device in the plan: the rate of a large matrix product, and of a sum of two long
lists, compiled and measured in the same way. A kernel whose operands fit into a cache can be faster than that.

Operands are legal by construction: floats in [0.1, 1), indices in range.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.interface import CompileOptions, Progress, StageProgram, backend_of
from penstock.ir.cluster import Device
from penstock.ir.graph import Graph, Module, Value, signature, slot_of
from penstock.ir.ops import make
from penstock.ir.types import FLOATS, TensorType
from penstock.kernel_report import KernelRow
from penstock.passes.cost import bound

if TYPE_CHECKING:
    import torch

# A measurement ends after so many calls or so many seconds, whichever is later, but never goes past the last number of calls.
_CALLS, _SECONDS, _MOST_CALLS = 5, 0.05, 500
# Of the yardsticks: too large for caches, small enough for a glance.
_SIDE, _LENGTH = 1024, 1 << 24


def check_devices(rows: Sequence[KernelRow], module: Module, backend: str) -> None:
    """UsageError where this host lacks the device of a stage that is to be measured: before minutes are spent on compiling."""
    maker = backend_of(backend)
    for stage in sorted({row.stage for row in rows}):
        maker.check_host(module, stage)


def measure_rows(
    rows: Sequence[KernelRow], module: Module, backend: str, threads: int, progress: Progress | None = None
) -> list[KernelRow]:
    """The rows with measured times, and with rooflines by measured rates."""
    report = progress or (lambda done, total, what: None)
    maker = backend_of(backend)
    graphs = {f"s{row.stage}.{i}": replace(row.body, name=f"s{row.stage}.{i}") for i, row in enumerate(rows)}
    stages = sorted({row.stage for row in rows})
    yardsticks = {f"s{stage}.{name}": graph for stage in stages for name, graph in _yardsticks().items()}
    apart = module.but(graphs=graphs | {name: replace(graph, name=name) for name, graph in yardsticks.items()})
    measured: dict[int, float] = {}
    devices: dict[int, Device] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as folder:
        files = maker.compile_stages(apart, stages, Path(folder), CompileOptions(progress=progress))
        for stage in stages:
            program = maker.load_stage(apart, stage, [Path(folder) / name for name in files[stage]], threads)
            clock = _clock_of(program, threads)
            report(len(measured), len(rows), "what this machine can do")
            seconds = {name: _median_call(program, apart.graphs[f"s{stage}.{name}"], module, clock) for name in _yardsticks()}
            planned = next(row.device for row in rows if row.stage == stage)
            devices[stage] = replace(planned, flops=2.0 * _SIDE**3 / seconds["product"], bandwidth=3.0 * 4 * _LENGTH / seconds["stream"])
            for i, row in enumerate(rows):
                if row.stage == stage:
                    report(len(measured), len(rows), row.label)
                    measured[i] = _median_call(program, graphs[f"s{stage}.{i}"], module, clock)
    report(len(rows), len(rows), "measured")
    return [
        replace(row, measured_s=measured[i], roofline_s=bound(row.flops, row.moved, devices[row.stage]), device=devices[row.stage])
        for i, row in enumerate(rows)
    ]


def _yardsticks() -> dict[str, Graph]:
    """Kernels that do nothing but multiply, and nothing but move."""
    square, long = TensorType("f32", (_SIDE, _SIDE)), TensorType("f32", (_LENGTH,))
    graphs = {}
    for name, kind, operand in (("product", "matmul", square), ("stream", "add", long)):
        ins = (Value("a", operand), Value("b", operand))
        op = make(kind, ins, ["c"], "")
        graphs[name] = Graph(name, ins, op.outs, (op,))
    return graphs


def _clock_of(program: StageProgram, threads: int) -> Callable[[], float]:
    if program.device.type == "cpu":
        return time.process_time if threads == 1 else time.perf_counter

    import torch

    def after_all_work() -> float:
        torch.cuda.synchronize(program.device)
        return time.perf_counter()

    return after_all_work


def _median_call(program: StageProgram, graph: Graph, module: Module, clock: Callable[[], float]) -> float:
    args = [x.to(program.device) for x in random_arguments(graph, module)]
    program.hold(graph.name, args[len(graph.ins) :])
    program.call(graph.name, args)
    times: list[float] = []
    while len(times) < _CALLS or (sum(times) < _SECONDS and len(times) < _MOST_CALLS):
        begin = clock()
        kept = program.call(graph.name, args)
        times.append(clock() - begin)
        del kept  # freeing results is not the kernel's time
    return statistics.median(times)


def random_arguments(graph: Graph, module: Module) -> list[torch.Tensor]:
    """Tensors for a call. Floats are in [0.1, 1): variances, logarithms and divisors are legal. `latest` and `next` of a variable with one
    version are one tensor, as at run time."""
    import torch

    source = torch.Generator().manual_seed(0)
    limits = _index_limits(graph)
    types = {slot: (op.outs or op.ins)[0].type for op in graph.ops if (slot := slot_of(op)) is not None}
    limits_of_vars = {op.var: limits[op.outs[0]] for op in graph.ops if op.kind == "read" and op.outs[0] in limits}
    sig = signature(graph)
    args = [_random(v.type, limits.get(v), source) for v in sig.ins]
    single: dict[str, Any] = {}
    for slot in sig.slots:
        drawn = _random(types[slot], limits_of_vars.get(slot.var), source)
        if slot.slot and module.vars[slot.var].versions == 1:
            drawn = single.setdefault(slot.var, drawn)
        args.append(drawn)
    return args


def _random(t: TensorType, below: int | None, source: torch.Generator) -> torch.Tensor:
    import torch

    from penstock.runtime.store import TORCH_DTYPES

    dtype = getattr(torch, {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(t.dtype, "int64"))
    if t.dtype in FLOATS:
        return torch.rand(t.dims, generator=source).mul_(0.9).add_(0.1).to(dtype)
    high = 2 if t.dtype == "bool" else below if below is not None else 5
    return torch.randint(high, t.dims, generator=source).to(TORCH_DTYPES[t.dtype])


def _index_limits(graph: Graph) -> dict[Value, int]:
    """How large values may be that are used as indices, traced back through whatever is done to them first."""
    limits: dict[Value, int] = {}

    def limit(value: Value, below: int) -> None:
        limits[value] = min(below, limits.get(value, below))

    for op in reversed(graph.ops):
        axis = op.attrs.get("axis", 0)
        assert isinstance(axis, int)
        if op.kind == "gather":
            limit(op.ins[1], op.ins[0].type.dims[axis])
        elif op.kind == "gather_grad":
            limit(op.ins[1], op.outs[0].type.dims[axis])
        elif op.kind in ("cross_entropy", "cross_entropy_grad"):
            limit(op.ins[1], op.ins[0].type.dims[-1])
        elif op.outs and op.outs[0] in limits:
            for v in op.ins:
                if v.type.dtype not in (*FLOATS, "bool"):
                    limit(v, limits[op.outs[0]])
    return limits
