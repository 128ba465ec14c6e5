"""The rates of one device of this machine, measured with kernels of our own, for a cluster file.

    python -m penstock.support.processes yardsticks FOLDER --threads N --part P

`doctor/local.py` takes the few yardsticks of `QUICK`, which compile and run in some seconds, for plans of this
machine without a cluster file.

In: a folder with the compiled yardsticks (`compile_yardsticks`), and a process whose environment has the threads.
Also the part of their time that a quota of the control group leaves them. Out: `Rates` as JSON.

Each yardstick is a graph of one operation. Its time is the lower quartile of repeated calls, as other programs on
the machine only make them longer. Under a quota it is their mean. Being held back costs more than the time in which
nothing runs, as each start is a cold one. From these:

    flops            a float32 product of 1024 x 1024 matrices
    bandwidth        a list of 128 MiB added to another
    efficiency       per family: operations / (seconds * flops), over some shapes that models have; of bytes:
                     bytes / (seconds * bandwidth) (layout in the cache; updates: AdamW in place, of variables that no
                     cache holds)
    cache            the largest working set whose bytes move at more than the middle (geometric) between the rates of
                     small and of large ones; cache_bandwidth is the rate of working sets of a few MB
    overhead         the time that 32 kernels of nothing take more than one, each; call_overhead: the remainder of a
                     call with one

Known limits: shapes of a model may be kinder or worse; memory and caches that other programs use are not there to be
measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.interface import CompileOptions, StageProgram
from penstock.backends.registry import backend_of
from penstock.ir.cluster.cluster import MEASURED, Device
from penstock.ir.graph import GRAD, PARAM, STATE, Graph, Module, Op, Stage, Value, Var, signature
from penstock.ir.ops import cost_of, make
from penstock.ir.types import TensorType
from penstock.support.entry_points import ENTRY_POINTS
from penstock.support.hardware import CoreQuota

if TYPE_CHECKING:
    import torch

# A measurement ends after so many calls and so many seconds.
_CALLS, _SECONDS = 5, 0.12
# Under a quota it goes on for several of its periods, which are 100 ms at most as a rule.
_HELD_BACK = 0.5
_SIDE, _LENGTH = 1024, 1 << 25
# Elements of the variable that is updated: with its gradient and its state more than caches hold.
_UPDATED = 1 << 23
# Floats of a list that is added to another: working sets of 0.5 to 128 MiB.
_WORKING = tuple(1 << n for n in range(16, 25))
# The cache that counts is the one that holds what a layer works on.
_LAYER = (3 << 20, 12 << 20)
# The kernels of two graphs that do next to nothing.
TINY = (1, 33)
# Operands of a yardstick are spread over so many bytes, but for those that measure a place in memory.
_SPREAD, _MOST_SETS = 16 << 20, 16
# Elements of an operand, after which they repeat.
_PERIOD = 1 << 20
# More than this share of the cores at work for other programs spoils measurements.
BUSY = 0.3
_RESTED = ("flops", "bandwidth", "cache", "overhead")
# The yardsticks that say most about models, and compile soonest; the others keep the usual efficiencies. Such a
# measurement ends after fewer seconds. A convolution by squares stands for its gradient for the input, and attention
# for its gradients: they reach the same shares.
QUICK = (
    "large", "forward", "weights", "conv", "conv_weight", "attention", "gelu", "softmax", "layer_norm", "transposed",
    "joined", "update", "sum524288", "sum1048576", "sum4194304", "sum16777216", "tiny1", "tiny33",
)  # fmt: skip
_QUICK_SECONDS = 0.02


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements, in the words of a cluster file."""

    threads: int
    flops: float
    bandwidth: float
    cache: int
    cache_bandwidth: float
    overhead: float
    call_overhead: float
    efficiency: dict[str, float]
    # Operations per second of a product, by element type.
    products: dict[str, float]


@dataclass(frozen=True)
class Yardstick:
    """One graph to time. `key` is the efficiency it is for, or the other rate it measures."""

    name: str
    key: str
    graph: Graph


def yardsticks() -> list[Yardstick]:
    """Return all yardsticks, in the order in which they are run."""
    return [*_products(), *_convolutions(), *_rows(), *_memory(), *_starts()]


def _products() -> list[Yardstick]:
    return [
        _product("large", "flops", _SIDE, _SIDE, _SIDE),
        _product("forward", "products", 512, 256, 1024),
        _product("back", "products", 512, 1024, 256, tb=True),
        _product("weights", "products", 256, 512, 1024, ta=True),
        _product("narrow", "products", 512, 256, 256),
        _product("bf16", "products.bf16", 768, 768, 768, "bf16"),
        _product("f16", "products.f16", 768, 768, 768, "f16"),
    ]


def _convolutions() -> list[Yardstick]:
    image, filters = ("f32", (8, 64, 28, 28)), ("f32", (64, 64, 3, 3))
    window: dict[str, object] = {"strides": (1, 1), "pads": (1, 1, 1, 1), "dilations": (1, 1)}
    strided = window | {"strides": (2, 2)}
    return [
        _one("conv", "squares", "conv", image, filters, **window),
        _one("conv_input", "squares", "conv_grad_input", image, filters, shape=image[1], **window),
        _one("conv_strided", "convolutions", "conv", image, filters, **strided),
        _one("conv_one_tap", "convolutions", "conv", image, ("f32", (128, 64, 1, 1))),
        _one("conv_weight", "convolutions", "conv_grad_weight", image, image, shape=filters[1], **window),
    ]


def _rows() -> list[Yardstick]:
    heads, stats = ("f32", (4, 8, 128, 64)), ("f32", (4, 8, 128))
    rows, wide = ("f32", (256, 512)), ("f32", (512,))
    ins, scores = [*[heads] * 5, stats, stats], {"scale": 0.125, "causal": True}
    return [
        _one("attention", "attention", "attention", heads, heads, heads, **scores),
        _one("attention_grad", "attention", "attention_grad", *ins, **scores),
        _one("gelu", "elements", "gelu", rows),
        _one("softmax", "elements", "softmax", rows),
        _one("layer_norm", "elements", "layer_norm", rows, wide, wide),
        _one("tanh", "elements", "tanh", rows),
    ]


def _memory() -> list[Yardstick]:
    return [
        _one("transposed", "layout.bytes", "transpose", ("f32", (1024, 1024)), perm=(1, 0)),
        _one("joined", "layout.bytes", "concat", ("f32", (512, 1024)), ("f32", (512, 1024)), axis=1),
        Yardstick("update", "updates.bytes", _update()),
        Yardstick("stream", "bandwidth", _added("stream", _LENGTH)),
        *(Yardstick(f"sum{length}", "cache", _added(f"sum{length}", length)) for length in _WORKING),
    ]


def _starts() -> list[Yardstick]:
    return [Yardstick(graph.name.removeprefix("s0."), "overhead", graph) for graph in launch_graphs()]


def launch_graphs(counts: tuple[int, int] = TINY) -> list[Graph]:
    """Return graphs of kernels that do next to nothing: of few, and of many."""
    graphs = []
    for count in counts:
        x = Value("x0", TensorType("f32", (16,)))
        ops: list[Op] = []
        for i in range(count):
            # A sum over a row ends a kernel: these cannot be one.
            ops.append(make("cumsum", (ops[-1].outs if ops else (x,)), [f"y{i}"], "", axis=0))
        graphs.append(Graph(f"s0.tiny{count}", (x,), ops[-1].outs, tuple(ops)))
    return graphs


def _one(name: str, key: str, kind: str, *types: tuple[str, tuple[int, ...]], **attrs: object) -> Yardstick:
    """Return a yardstick of one operation."""
    ins = tuple(Value(f"x{i}", TensorType(*t)) for i, t in enumerate(types))
    count = {"layer_norm": 3, "attention": 3, "attention_grad": 3, "adamw": 3}.get(kind, 1)
    op = make(kind, ins, [f"y{i}" for i in range(count)], "", **attrs)  # type: ignore[arg-type]
    return Yardstick(name, key, Graph(f"s0.{name}", ins, op.outs, (op,)))


def _product(name: str, key: str, m: int, k: int, n: int, dtype: str = "f32", **attrs: bool) -> Yardstick:
    a = (k, m) if attrs.get("ta") else (m, k)
    b = (n, k) if attrs.get("tb") else (k, n)
    return _one(name, key, "matmul", (dtype, a), (dtype, b), **attrs)


def _update() -> Graph:
    """Return AdamW over one variable, in place, its gradient reads: all in one kernel."""
    kind = TensorType("f32", (_UPDATED,))
    places: list[tuple[str, str]] = [("w", "read"), ("g", "take"), ("m", "read"), ("v", "read")]
    reads = [
        Op(what, (), (Value(name, kind),), {"var": name, "kernel": "k0"} if what == "take" else {"var": name})
        for name, what in places
    ]
    scalars = tuple(Value(name, TensorType("f32", ())) for name in ("c1", "c2", "lr"))
    step = make("adamw", (*(op.outs[0] for op in reads), *scalars), ["w1", "m1", "v1"], "", kernel="k0")
    writes = [
        Op("write", (value,), (), {"var": name, "kernel": "k0"}) for value, name in zip(step.outs, "wmv", strict=True)
    ]
    return Graph("s0.update", scalars, (), (*reads, step, *writes))


def _added(name: str, length: int) -> Graph:
    """Return the addition of a list to a variable, in place: no memory is taken for a result."""
    x = Value("x0", TensorType("f32", (length,)))
    return Graph(f"s0.{name}", (x,), (), (Op("accum", (x,), (), {"var": name}),))


@cache
def _module(names: tuple[str, ...] = ()) -> Module:
    """Return the yardsticks of the names, or all, as one stage."""
    roles = {"w": PARAM, "g": GRAD, "m": STATE, "v": STATE}
    vars = {name: Var(name, TensorType("f32", (_UPDATED,)), role, 0) for name, role in roles.items()}
    lists = {"stream": _LENGTH} | {f"sum{length}": length for length in _WORKING}
    vars |= {name: Var(name, TensorType("f32", (length,)), GRAD, 0) for name, length in lists.items()}
    return Module(
        "yardsticks",
        vars=vars,
        graphs={y.graph.name: y.graph for y in yardsticks() if not names or y.name in names},
        stages=(Stage(0, "cpu:0"),),
    )


def compile_yardsticks(folder: Path, names: Sequence[str] = (), jobs: int | None = None) -> None:
    """Compile the graphs that `measure` runs, for this machine's processor: those of the names, else all."""
    files = backend_of("tvm").compile_stages(_module(tuple(names)), [0], folder, CompileOptions(jobs=jobs))
    (folder / "files.json").write_text(json.dumps(files[0]), encoding="utf-8")


def measure(folder: Path, threads: int, part: float = 1.0, names: Sequence[str] = ()) -> Rates:
    """Run all yardsticks, or those of the names, in this process. It must have that many threads, and no more than that
    part of their time."""
    files = [folder / name for name in json.loads((folder / "files.json").read_text(encoding="utf-8"))]
    program = backend_of("tvm").load_stage(_module(tuple(names)), 0, files, threads)
    seconds = _QUICK_SECONDS if names else _SECONDS
    sticks = [y for y in yardsticks() if not names or y.name in names]
    return rates_of({y.name: _seconds(program, y, threads, part, seconds) for y in sticks}, threads)


def _seconds(program: StageProgram, stick: Yardstick, threads: int, part: float, least: float) -> float:
    """Time one yardstick for `least` seconds or more. With one thread that is processor time, which other programs
    change little; the time of several threads is that of the clock. Under a quota it is processor time in any case: so
    much of it takes as long as the quota needs to grant it."""
    clock = time.process_time if threads == 1 or part < 1 else time.perf_counter
    import torch  # lazy: heavy

    graph = stick.graph
    enough = least if part == 1 else _HELD_BACK * threads * part
    source = torch.Generator().manual_seed(0)
    variables = [slot.var for slot in signature(graph).slots]
    types = {v.name: v.type for v in graph.ins} | {name: _module().vars[name].type for name in variables}

    def operands() -> list[torch.Tensor]:
        """Return operands: old and new values of a variable are one tensor, as where it has one version."""
        tensors = {n: _operand(t, source) for n, t in types.items()}
        return [*(tensors[v.name] for v in graph.ins), *(tensors[name] for name in variables)]

    # One after the other, so that operands are not where the last call has left them, as little as in a model.
    each = sum(t.nbytes for t in types.values())
    sets = [operands() for _ in range(1 if stick.key in _RESTED else max(1, min(_MOST_SETS, _SPREAD // max(each, 1))))]
    for args in sets:
        program.call(graph.name, args)
    times: list[float] = []
    spent = 0.0
    while len(times) < _CALLS or spent < enough:
        args = sets[len(times) % len(sets)]
        begin = clock()
        results = program.call(graph.name, args)
        times.append(clock() - begin)
        spent += times[-1]
        del results  # freeing results is not the kernel's time
    return sorted(times)[len(times) // 4] if part == 1 else statistics.fmean(times) / (threads * part)


def _operand(kind: TensorType, source: torch.Generator) -> torch.Tensor:
    """Return elements from 0.1 to 1; those of long lists repeat."""
    import torch  # lazy: heavy

    from penstock.runtime.state.tensors import TORCH_DTYPES  # lazy: heavy

    elements = torch.rand(min(kind.size, _PERIOD), generator=source).mul_(0.9).add_(0.1).to(TORCH_DTYPES[kind.dtype])
    return elements.repeat(-(-kind.size // _PERIOD))[: kind.size].reshape(kind.dims)


# ------------------------------------------------------------------------------------------------ from seconds to rates


def rates_of(seconds: dict[str, float], threads: int) -> Rates:
    """Return the rates that the seconds of the yardsticks mean. Work without a yardstick among them has no
    efficiency."""
    by_key: dict[str, list[Yardstick]] = {}
    for stick in (y for y in yardsticks() if y.name in seconds):
        by_key.setdefault(stick.key, []).append(stick)
    flops_of = {y.name: sum(cost_of(op).flops for op in y.graph.ops) for y in yardsticks()}
    bytes_of = {y.name: float(sum(v.type.nbytes for v in (*y.graph.ins, *y.graph.outs))) for y in yardsticks()}
    # Four variables are read and written; the gradient is zeroed.
    bytes_of["update"] = 8.0 * 4 * _UPDATED
    # Two lists are read, and one is written.
    working = {y.name: 2 * bytes_of[y.name] for y in yardsticks() if y.key in ("bandwidth", "cache")}
    bytes_of |= {name: 1.5 * count for name, count in working.items()}
    overhead, call = launch_overheads(seconds)

    def rate(key: str, amount: dict[str, float]) -> float:
        """Return the rate over all yardsticks of a key, the cost of a call beside the kernel left out."""
        spent = sum(max(seconds[y.name] - call, 0.05 * seconds[y.name]) for y in by_key[key])
        return sum(amount[y.name] for y in by_key[key]) / spent

    curve = [
        (int(working[f"sum{n}"]), bytes_of[f"sum{n}"] / max(seconds[f"sum{n}"] - call, 0.05 * seconds[f"sum{n}"]))
        for n in _WORKING
        if f"sum{n}" in seconds
    ]
    flops = rate("flops", flops_of)
    # A quick measurement takes the largest working set.
    bandwidth = rate("bandwidth", bytes_of) if "bandwidth" in by_key else curve[-1][1]
    cache, cache_bandwidth = _cache_of(curve, bandwidth)
    near = cache_bandwidth or bandwidth
    efficiency: dict[str, float] = {
        key: rate(key, flops_of) / flops
        for key in ("products", "products.bf16", "products.f16", "convolutions", "squares", "attention", "elements")
        if key in by_key
    }
    efficiency["layout.bytes"] = rate("layout.bytes", bytes_of) / near
    efficiency["updates.bytes"] = rate("updates.bytes", bytes_of) / bandwidth
    return Rates(
        threads, round_rate(flops), round_rate(bandwidth), cache, round_rate(cache_bandwidth), round_rate(overhead),
        round_rate(call), {key: round_rate(share) for key, share in efficiency.items()},
        {"f32": round_rate(flops)}
        | {d: round_rate(rate(f"products.{d}", flops_of)) for d in ("bf16", "f16") if f"products.{d}" in by_key},
    )  # fmt: skip


def launch_overheads(seconds: Mapping[str, float], counts: tuple[int, int] = TINY) -> tuple[float, float]:
    """Return what a kernel takes beside its work, and a call beside its kernels, by the times of `launch_graphs`."""
    few, many = counts
    overhead = max(0.0, (seconds[f"tiny{many}"] - seconds[f"tiny{few}"]) / (many - few))
    return overhead, max(0.0, seconds[f"tiny{few}"] - few * overhead)


def _cache_of(curve: Sequence[tuple[int, float]], far: float) -> tuple[int, float]:
    """Return size and rate of the cache that a layer works in, from (working set, rate) in rising order; zeros where
    memory is as fast."""
    near = statistics.median(rate for size, rate in curve if _LAYER[0] <= size <= _LAYER[1])
    if near < 1.5 * far:
        return 0, 0.0
    size = 0
    for working, rate in curve:
        if rate < (near * far) ** 0.5:
            break
        size = working
    return size, near


def round_rate(number: float) -> float:
    """Round to three digits: there is no more in a measurement."""
    return float(f"{number:.3g}")


def granted(quota: CoreQuota | None, threads: int) -> float:
    """Return the part of their time that so many threads get, which are busy at once."""
    return 1.0 if quota is None else min(1.0, quota.cores / threads)


def within(quota: CoreQuota | None, threads: int, device: Device) -> Device:
    """Return the device with its part of a quota, that so many threads share."""
    part = granted(quota, threads)
    return replace(device, quota=part, quota_period=quota.period if quota is not None and part < 1 else 0.0)


def with_rates(device: Device, rates: Rates) -> Device:
    """Return the device with measured rates."""
    return replace(
        device, flops=rates.flops, bandwidth=rates.bandwidth, cache=rates.cache, cache_bandwidth=rates.cache_bandwidth,
        overhead=rates.overhead,
        call_overhead=rates.call_overhead, efficiency=tuple(rates.efficiency.items()), source=MEASURED,
    )  # fmt: skip


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{ENTRY_POINTS['begin']} yardsticks", description="Rates of this machine, as JSON."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--part", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    import torch  # lazy: heavy

    torch.set_num_threads(arguments.threads)
    print(msgspec.json.encode(measure(arguments.folder, arguments.threads, arguments.part)).decode())
