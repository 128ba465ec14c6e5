"""Measurement of kernels on this machine: each is compiled alone, and called repeatedly with the same random operands.

In: rows of the report on kernels. Out: the rows with the median time of a call. With one thread that is processor time,
which other work on the machine changes little. Several threads, or a GPU, are timed by the clock, because their
processor time is not the time of a call. Operands that fit into a cache stay there: the sum over a stage is at most the
time of the stage, up to noise.

The roofline of measured rows is that of this machine, not of the device in the plan: the rate of a large matrix
product, and of a sum of two long lists, compiled and measured in the same way. A kernel whose operands fit into a cache
can be faster than that.

Operands are legal by construction: indices are in range. Floats are positive, in [0.1, 1), where a logarithm, a root, a
divisor or a variance is computed from them. All others lie around 0, in [-1, 1). Operands of products and convolutions
lie closer, so that their sums of many terms have a variance of about 1, as in a trained model. Sums of positive numbers
would be large, and functions of them flat: exponentials, gelu and softmax would then take paths, and times, that they
do not take in a model.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.interface import CompileOptions, Progress, StageProgram
from penstock.backends.registry import backend_of
from penstock.ir.cluster.cluster import Device
from penstock.ir.collective_calls import calls_of
from penstock.ir.graph import Graph, Module, Value, signature, slot_of
from penstock.ir.ops import OPS, cost_of, make
from penstock.ir.types import FLOATS, TensorType
from penstock.passes.costs.prices import bound

from .kernels import KernelRow

if TYPE_CHECKING:
    import torch

# A measurement ends after this many calls or seconds, whichever is later, but after _MOST_CALLS calls at the latest.
_CALLS, _SECONDS, _MOST_CALLS = 5, 0.05, 500
# Sizes of the yardsticks: too large for caches, small enough to measure quickly.
_SIDE, _LENGTH = 1024, 1 << 24
# The ranges of floats, and the operands (by position) that have to be positive for a result to be a number.
_AROUND, _ABOVE = (-1.0, 1.0), (0.1, 1.0)
_POSITIVE = {
    "log": (0,), "sqrt": (0,), "rsqrt": (0,), "pow": (0,), "div": (1,), "rem": (1,), "batch_norm": (4,),
    "layer_norm_grad": (4,), "layer_norm_grad_weight": (3,),
    "attention_grad": (6,), "sgd": (2,), "momentum": (3,), "adamw": (3, 4, 5, 6),
}  # fmt: skip
_ALWAYS_POSITIVE = ("exp", "sigmoid", "softmax", "abs")
_SUMS = ("matmul", "conv", "conv_grad_input", "conv_grad_weight")


def check_devices(rows: Sequence[KernelRow], module: Module, backend: str) -> None:
    """Raise UsageError where this host lacks the device of a measured stage, before minutes are spent on compiling."""
    maker = backend_of(backend)
    for stage in sorted({row.stage for row in rows}):
        maker.check_host(module, stage)


def measure_rows(
    rows: Sequence[KernelRow], module: Module, backend: str, threads: int, progress: Progress | None = None
) -> list[KernelRow]:
    """Return the rows with measured times, and with rooflines by measured rates. Collectives take several ranks, and
    are not measured."""
    report = progress or (lambda done, total, what: None)
    maker = backend_of(backend)
    graphs = {
        f"s{row.stage}.{i}": replace(row.body, name=f"s{row.stage}.{i}")
        for i, row in enumerate(rows)
        if not calls_of(row.body)
    }
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
            seconds = {
                name: _median_call(program, apart.graphs[f"s{stage}.{name}"], module, clock) for name in _yardsticks()
            }
            planned = next(row.device for row in rows if row.stage == stage)
            devices[stage] = replace(
                planned, flops=2.0 * _SIDE**3 / seconds["product"], bandwidth=3.0 * 4 * _LENGTH / seconds["stream"]
            )
            for i, row in enumerate(rows):
                if row.stage == stage and f"s{stage}.{i}" in graphs:
                    report(len(measured), len(rows), row.label)
                    measured[i] = _median_call(program, graphs[f"s{stage}.{i}"], module, clock)
    report(len(rows), len(rows), "measured")
    return [
        replace(
            row,
            measured_s=measured.get(i),
            roofline_s=bound(row.body.ops, row.moved, devices[row.stage]),
            device=devices[row.stage],
        )
        for i, row in enumerate(rows)
    ]


def _yardsticks() -> dict[str, Graph]:
    """Return a kernel that only multiplies and one that only moves data."""
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
        results = program.call(graph.name, args)
        times.append(clock() - begin)
        del results  # freeing results is not the kernel's time
    return statistics.median(times)


def random_arguments(graph: Graph, module: Module) -> list[torch.Tensor]:
    """Draw tensors for a call. `latest` and `next` of a variable with one version are one tensor, as at run time."""
    import torch

    source = torch.Generator().manual_seed(0)
    limits, ranges = _index_limits(graph), _ranges(graph)
    ranges_of_vars = {
        op.var: ranges[op.outs[0]] for op in graph.ops if op.outs and op.outs[0] in ranges and slot_of(op) is not None
    }
    types = {slot: (op.outs or op.ins)[0].type for op in graph.ops if (slot := slot_of(op)) is not None}
    limits_of_vars = {op.var: limits[op.outs[0]] for op in graph.ops if op.kind == "read" and op.outs[0] in limits}
    sig = signature(graph)
    args = [_random(v.type, limits.get(v), ranges.get(v, _AROUND), source) for v in sig.ins]
    single: dict[str, Any] = {}
    for slot in sig.slots:
        drawn = _random(types[slot], limits_of_vars.get(slot.var), ranges_of_vars.get(slot.var, _AROUND), source)
        if slot.slot and module.vars[slot.var].versions == 1:
            drawn = single.setdefault(slot.var, drawn)
        args.append(drawn)
    return args


def _random(t: TensorType, below: int | None, within: tuple[float, float], source: torch.Generator) -> torch.Tensor:
    import torch

    from penstock.runtime.state.tensors import TORCH_DTYPES  # lazy: heavy

    dtype = TORCH_DTYPES[t.dtype]
    if t.dtype in FLOATS:
        low, high = within
        return torch.rand(t.dims, generator=source).mul_(high - low).add_(low).to(dtype)
    limit = 2 if t.dtype == "bool" else below if below is not None else 5
    return torch.randint(limit, t.dims, generator=source).to(dtype)


def _ranges(graph: Graph) -> dict[Value, tuple[float, float]]:
    """Return the ranges of floats that are not just around 0, traced back from the operations that need them."""
    ranges: dict[Value, tuple[float, float]] = {}

    def restrict(values: Iterable[Value], within: tuple[float, float]) -> None:
        for v in values:
            # A positive range takes precedence, then the range nearest to 0.
            ranges[v] = (
                _ABOVE
                if _ABOVE in (within, ranges.get(v))
                else min(within, ranges.get(v, within), key=lambda ends: ends[1])
            )

    for op in reversed(graph.ops):
        restrict((op.ins[i] for i in _POSITIVE.get(op.kind, ()) if i < len(op.ins)), _ABOVE)
        needed = {ranges[v] for v in op.outs if v in ranges}
        square = op.kind == "mul" and len(set(op.ins)) == 1
        if _ABOVE in needed:
            restrict(() if square or op.kind in _ALWAYS_POSITIVE else op.ins, _ABOVE)
        elif op.kind in _SUMS:
            terms = cost_of(op).flops / 2 / max(op.outs[0].type.size, 1)
            most = min(1.0, (9 / max(terms, 1.0)) ** 0.25)
            restrict(op.ins, (-most, most))
        elif needed and (op.kind == "cast" or OPS[op.kind].family == "layout"):
            restrict(op.ins, min(needed, key=lambda ends: ends[1]))
    return ranges


def _index_limits(graph: Graph) -> dict[Value, int]:
    """Return upper limits of values that are used as indices, traced back through the operations before."""
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
