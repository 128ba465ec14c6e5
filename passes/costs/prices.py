"""Cost model of operations, kernels and transfers: the one place that planning, recomputation, simulation and reports
get seconds and bytes from.

    cost(kernel or operation, device)  ->  seconds, bytes to and from memory
    cost(transfer, link)               ->  seconds, bytes over the link
    graph_seconds(graph, device)           a whole graph of a stage: its kernels, one call
    op_seconds(graph, device)              the same, shared out over the operations, also before kernels are chosen
    rank_seconds(module)                   F, B, W, U, ... of every rank, on its device

The seconds of a kernel come from a `Prices`, which prices one kernel at a time. A source that does not know the kernel
returns None, and the next source is tried:

    Roofline   factor * longer(operations / (rate * efficiency), bytes / (bandwidth * efficiency)) + overhead; knows
               every kernel. In a graph, bytes in a cache (cache_reach.py) move at its rate. `longer` is the longer of
               the two times; for products on a CPU a part of the shorter one is added (`_WAITED`). The factor is 1
               until runs show another (src/penstock/calibration/corrections.py)
    a table    times of kernels that were measured on this machine, by what the kernel does and by device
               (src/penstock/calibration/measured.py)
    a learned model would be one more Prices: it sees the kernel as a graph (`Kernel.body`), `work_of(kernel)` and the
    device

Work is divided by family: products, convolutions, squares, attention, elements, updates (optimisers), layout,
collectives. Squares are convolutions of 3x3 taps for which the back end for CPUs has fewer multiplications. Elements
are work element by element, reductions, rows, windows and lookups. The price of a collective is what happens on its own
device; links are the simulator's business. A device says which share of its rate and of its bandwidth a family reaches
(`Device.efficiency`, measured by `penstock doctor`). For families that it does not list, EFFICIENCY below holds. Keys
are `family` and `family.f16` for operations, and `family.bytes` for memory.

Before stage graphs exist, kernels are those that `fuse` would choose in the whole graph: an operation that would be
done while its operand stands in registers costs its arithmetic and no memory, and a layout change nothing. A cut may
part what was one kernel, which costs a little more.

Limits: the roofline knows one cache, and no shapes but by their bytes (a product of 16 rows or fewer is slower still);
a kernel by itself finds nothing in a cache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol, overload

from penstock.ir.action_kinds import AGAIN, FORWARD
from penstock.ir.cluster.cluster import Device, Link
from penstock.ir.cluster.gpus import sheet_of
from penstock.ir.graph import Graph, Module, Op
from penstock.ir.memo import Derived
from penstock.ir.ops import OPS, cost_of, is_by_squares
from penstock.ir.schedule import COMPUTE, PER_BATCH
from penstock.passes.kernels.divide import Kernel, kernels_of
from penstock.passes.kernels.fuse import choose_kernels
from penstock.support.errors import UsageError

from .cache_reach import bytes_near

PRODUCTS, CONVOLUTIONS, SQUARES, ATTENTION, ELEMENTS, UPDATES, LAYOUT, COLLECTIVES = (
    "products", "convolutions", "squares", "attention", "elements", "updates", "layout", "collectives",
)  # fmt: skip
_OF_KIND = {
    "matmul": PRODUCTS,
    "matmul_q": PRODUCTS,
    "matmul_bytes": PRODUCTS,
    "conv": CONVOLUTIONS,
    "conv_bytes": CONVOLUTIONS,
    "conv_grad_input": CONVOLUTIONS,
    "conv_grad_weight": CONVOLUTIONS,
    "attention": ATTENTION,
    "attention_grad": ATTENTION,
}
_OF_FAMILY = {"optimizer": UPDATES, "layout": LAYOUT, "state": LAYOUT, "source": LAYOUT, "collective": COLLECTIVES}
# The defaults of `Device.efficiency`: shares of `flops` (rate of a large float32 product) and of `bandwidth`.
EFFICIENCY = {
    PRODUCTS: 0.9,
    CONVOLUTIONS: 0.8,
    SQUARES: 1.6,
    ATTENTION: 0.5,
    ELEMENTS: 0.2,
    UPDATES: 0.2,
    LAYOUT: 1.0,
    COLLECTIVES: 0.2,
    f"{PRODUCTS}.bytes": 1.0,
    f"{CONVOLUTIONS}.bytes": 1.0,
    f"{SQUARES}.bytes": 1.0,
    f"{ATTENTION}.bytes": 1.0,
    f"{ELEMENTS}.bytes": 1.0,
    f"{UPDATES}.bytes": 1.3,
    f"{LAYOUT}.bytes": 0.8,
    f"{COLLECTIVES}.bytes": 1.0,
}
# The share of the data sheet's ratio between tensor cores and float32 that work reaches: an estimate.
TENSOR_CORES = 0.7

# The part of the time for its bytes that a product on a CPU waits, while it does not compute: its first rows bring the
# right operand, and with few rows these are a large part. Where bytes take longer, the same of the arithmetic.
_WAITED = 0.6

# The share of the multiplications of direct sums that a convolution by squares of 2x2 outputs needs.
MULTIPLIED_BY_SQUARES = 4 / 9


class Priced(NamedTuple):
    """A price: seconds, and the bytes moved."""

    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """The traffic over a link in one direction: `bytes` travel in so many messages."""

    bytes: float
    messages: int = 1


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of a kernel: operations by (family, element type), bytes to and from memory, and the family with the
    most operations."""

    flops: tuple[tuple[str, str, float], ...]
    bytes: float
    family: str


class Prices(Protocol):
    """A source of seconds for kernels."""

    def seconds(self, kernel: Kernel, device: Device) -> float | None:
        """Return the seconds of one run of the kernel, its launch included, or None if this source does not know."""


# ------------------------------------------------------------------------------------------------ work


def family_of(op: Op) -> str:
    """Return the family of work that an operation belongs to."""
    if is_by_squares(op):
        return SQUARES
    return _OF_KIND.get(op.kind) or _OF_FAMILY.get(OPS[op.kind].family, ELEMENTS)


def work_of(kernel: Kernel) -> KernelWork:
    """Return the work of a kernel, on whatever device."""
    return _work(kernel.body.ops, kernel.moved)


def _work(ops: Sequence[Op], moved: float) -> KernelWork:
    flops: dict[tuple[str, str], float] = {}
    families: dict[str, float] = {}
    for op in ops:
        count, family = cost_of(op).flops, family_of(op)
        families[family] = families.get(family, 0.0) + count
        if count:
            dtype = (op.ins or op.outs)[0].type.dtype
            flops[family, dtype] = flops.get((family, dtype), 0.0) + count
    # Among operations that compute nothing, any family has precedence over layout.
    main = max(families, key=lambda f: (families[f], f != LAYOUT), default=LAYOUT)
    return KernelWork(tuple((family, dtype, count) for (family, dtype), count in sorted(flops.items())), moved, main)


def efficiency_of(device: Device, family: str, what: str = "") -> float:
    """Return the share of a device's rate that a family reaches: `what` is an element type, or `bytes` for memory."""
    measured = dict(device.efficiency)
    for table in (measured, EFFICIENCY):
        for key in (f"{family}.{what}", family):
            if key in table and not (what == "bytes" and key == family):
                return table[key] * (_on_tensor_cores(device, family, what) if key == family else 1.0)
    return 1.0


def _on_tensor_cores(device: Device, family: str, dtype: str) -> float:
    """Return how many times the rate of float32 a GPU's tensor cores reach for a family in an element type. Estimated:
    of the data sheet's ratio they reach as much more of large products as `TENSOR_CORES` says."""
    if device.kind != "cuda" or family not in (PRODUCTS, CONVOLUTIONS, ATTENTION):
        return 1.0
    speedup = sheet_of(device.target).speedup(dtype)
    return 1.0 if dtype == "tf32" or speedup <= 1 else max(1.0, speedup * TENSOR_CORES)


def bound(ops: Sequence[Op], moved: float, device: Device) -> float:
    """Return a lower bound on the seconds of these operations as one kernel: all arithmetic at the full rate, every
    byte at the full bandwidth."""
    flops = sum(cost_of(op).flops * (MULTIPLIED_BY_SQUARES if is_by_squares(op) else 1) for op in ops)
    return max(flops / device.flops, moved / device.bandwidth)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Analytic prices by the roofline model; knows every kernel. `factor` multiplies the work on a device, but not its
    overheads."""

    factor: Callable[[Device], float] = lambda device: 1.0

    def seconds(self, kernel: Kernel, device: Device) -> float:
        return self.of_work(work_of(kernel), device)

    def of_work(self, work: KernelWork, device: Device, near: float = 0.0) -> float:
        """Return the seconds of a kernel's work, where `near` of its bytes are in a cache."""
        compute = sum(
            count / (device.flops * efficiency_of(device, family, dtype)) for family, dtype, count in work.flops
        )
        share = efficiency_of(device, work.family, "bytes")
        memory = (work.bytes - near) / (device.bandwidth * share)
        if near:
            # A family that gets more out of memory than the yardstick, by more streams at once, gets no more out of a
            # cache.
            memory += near / (device.cache_bandwidth * min(share, 1.0))
        waited = _WAITED if work.family == PRODUCTS and device.kind == "cpu" else 0.0
        return self.factor(device) * (max(compute, memory) + waited * min(compute, memory)) + device.overhead


ROOFLINE = Roofline()


@dataclass
class InTurn:
    """A chain of sources: the first that knows the kernel prices it. Where none knows, the caller takes `last`.

    `known` counts the kernels that a source knew, `unknown` those that none did.
    """

    sources: Sequence[Prices]
    last: Roofline = ROOFLINE
    known: int = 0
    unknown: int = 0
    by_device: Counter[str] = field(default_factory=Counter)

    def seconds(self, kernel: Kernel, device: Device) -> float | None:
        for source in self.sources:
            seconds = source.seconds(kernel, device)
            if seconds is not None:
                self.known += 1
                return seconds
        self.unknown += 1
        self.by_device[device.name] += 1
        return None

    def told(self) -> str:
        """Return a sentence on how many kernels had to be estimated, empty if none."""
        total = self.known + self.unknown
        return (
            f"{self.unknown} of {total} kernels are not in the table of measured times, and are estimated"
            if self.unknown
            else ""
        )


# ------------------------------------------------------------------------------------------------ costs


@overload
def cost(what: Op | Kernel, where: Device, prices: Prices = ...) -> Priced: ...
@overload
def cost(what: Transfer, where: Link, prices: Prices = ...) -> Priced: ...
def cost(what: Op | Kernel | Transfer, where: Device | Link, prices: Prices = ROOFLINE) -> Priced:
    """Return seconds and bytes of a kernel on a device, of an operation as a kernel by itself, or of a transfer over a
    link."""
    if isinstance(what, Transfer):
        assert isinstance(where, Link), f"transfers go over links, got {where}"
        if not what.bytes and not what.messages:
            return Priced(0.0, 0.0)
        return Priced(what.messages * where.latency + what.bytes / where.bandwidth, what.bytes)
    assert isinstance(where, Device), f"kernels run on devices, got {where}"
    kernel = alone(what) if isinstance(what, Op) else what
    return Priced(_ask(prices, kernel, where), kernel.moved)


def alone(op: Op) -> Kernel:
    """Make an operation a kernel by itself: all operands from memory, all results to memory."""
    return Kernel(op.kind, (op,), Graph(op.kind, tuple(dict.fromkeys(op.ins)), op.outs, (op,)))


def _ask(prices: Prices, kernel: Kernel, device: Device) -> float:
    seconds = prices.seconds(kernel, device)
    return _estimates(prices).seconds(kernel, device) if seconds is None else seconds


def _estimates(prices: Prices) -> Roofline:
    """Return the roofline that prices kernels which a source does not know."""
    return prices if isinstance(prices, Roofline) else prices.last if isinstance(prices, InTurn) else ROOFLINE


# ------------------------------------------------------------------------------------------------ graphs


@dataclass(frozen=True)
class GraphCost:
    """A graph divided into kernels once, to be priced on any number of devices.

    Kernels are those of its annotations, else those that `fuse` would choose.
    """

    graph: Graph

    @classmethod
    def of(cls, graph: Graph) -> GraphCost:
        """Return the cost of a graph, kept with the graph for those that are priced again and again."""
        return graph.keep(_COST, cls)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        return kernels_of(self.chosen)

    @cached_property
    def chosen(self) -> Graph:
        """The graph with its kernels."""
        return self.graph if any("kernel" in op.attrs for op in self.graph.ops) else choose_kernels(self.graph)

    @cached_property
    def _alike(self) -> tuple[list[Kernel], list[int]]:
        """One kernel of each group that differs in names only, and for every kernel the number of its group."""
        number: dict[str, int] = {}
        first: list[Kernel] = []
        which = []
        for kernel in self.kernels:
            if kernel.key not in number:
                number[kernel.key] = len(first)
                first.append(kernel)
            which.append(number[kernel.key])
        return first, which

    def kernel_seconds(self, device: Device, prices: Prices = ROOFLINE, between: float = 0.0) -> list[float]:
        """Return the seconds of each kernel. Others touch `between` bytes before the graph runs again."""
        first, which = self._alike
        known = [None if isinstance(prices, Roofline) else prices.seconds(kernel, device) for kernel in first]
        near = bytes_near(self.kernels, device.cache if device.cache_bandwidth else 0, between)
        result = []
        for i, close in zip(which, near, strict=True):
            price = known[i]
            result.append(_estimates(prices).of_work(self._work[i], device, close) if price is None else price)
        return result

    @cached_property
    def _work(self) -> list[KernelWork]:
        return [work_of(kernel) for kernel in self._alike[0]]

    @cached_property
    def moved(self) -> float:
        """The bytes that all kernels touch."""
        return sum(kernel.moved for kernel in self.kernels)

    def seconds(self, device: Device, prices: Prices = ROOFLINE, between: float = 0.0) -> float:
        """Return the seconds of one call of the graph."""
        return device.call_overhead + sum(self.kernel_seconds(device, prices, between))

    def op_seconds(self, device: Device, prices: Prices = ROOFLINE) -> list[float]:
        """Return, for each operation of the graph, its part of the seconds of its kernel.

        Shares are as its work by itself, and what is computed where it is read costs nothing. They sum up to the
        kernels' seconds; the overhead of the call is not in them.
        """
        position = {id(op): i for i, op in enumerate(self.chosen.ops)}
        parts = [0.0] * len(position)
        for kernel, seconds in zip(self.kernels, self.kernel_seconds(device, prices), strict=True):
            weights = _weights(kernel, device)
            total = sum(weights)
            for op, weight in zip(kernel.ops, weights, strict=True):
                parts[position[id(op)]] = seconds * weight / total if total else seconds / len(weights)
        return parts


_COST = Derived[GraphCost](__name__, "cost")


def _weights(kernel: Kernel, device: Device) -> list[float]:
    """Return what each operation adds to its kernel: its arithmetic, and memory for operands that the kernel does not
    make."""
    defined = {v for op in kernel.ops for v in op.outs}
    kept = set(kernel.body.outs)
    free = replace(device, overhead=0.0)
    weights = []
    for op in kernel.ops:
        moved = sum(v.type.nbytes for v in op.ins if v not in defined) + sum(
            v.type.nbytes for v in op.outs if v in kept
        )
        if op.kind in ("accum", "write", "take"):
            moved += (op.ins or op.outs)[0].type.nbytes
        weights.append(ROOFLINE.of_work(_work((op,), moved), free))
    return weights


def shown_seconds(seconds: float) -> str:
    """Format seconds for people: milliseconds, seconds, hours, days or years. Infinity says that there is no end."""
    if seconds < 3600:
        return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"
    if not math.isfinite(seconds):
        return "no end"
    units = {"hours": 3600.0, "days": 86400.0, "years": 365.25 * 86400}
    name, size = [(name, size) for name, size in units.items() if seconds >= size][-1]
    return f"{seconds / size:.1f} {name}" if seconds < 1000 * units["years"] else "more than 1000 years"


def by_simulation(seconds: float | None) -> str:
    """Say what a simulation found; without a finite number none of the plans was legal and fitted."""
    if seconds is None or not math.isfinite(seconds):
        return "no plan of it is legal and fits when simulated"
    return f"{shown_seconds(seconds)} simulated"


def graph_seconds(graph: Graph, device: Device, prices: Prices = ROOFLINE) -> float:
    """Return the seconds of one call of a graph on a device."""
    return GraphCost(graph).seconds(device, prices)


def op_seconds(graph: Graph, device: Device, prices: Prices = ROOFLINE) -> list[float]:
    """Return the seconds of each operation of a graph as a part of its kernel, in order."""
    return GraphCost.of(graph).op_seconds(device, prices)


def timed_kind(module: Module, stage: int, kind: str) -> str:
    """Return the name of a computation among those of its rank."""
    return f"{stage}{kind}" if module.packs else kind


def _placed_stages(module: Module) -> list[tuple[int, int, str]]:
    """Return every stage with its ranks: rank, stage, device."""
    ranks = zip(module.rank_packs(), module.rank_devices(), strict=True)
    return [(rank, stage, name) for rank, (stages, name) in enumerate(ranks) for stage in stages]


def rank_seconds(module: Module, prices: Prices = ROOFLINE) -> dict[tuple[int, str], float]:
    """Return the seconds of one call of each graph of every rank on its device, by rank and kind (F, B, W, P, N, U).
    Where ranks run several stages, kinds name them, as in 2F."""
    if module.cluster is None:
        raise UsageError(
            "the module names no devices",
            where=f"@{module.name}",
            hint="cost needs a bundle, or a dump after `partition`",
        )
    seconds: dict[tuple[int, str], float] = {}
    microbatches = module.schedule.microbatches if module.schedule is not None else 1
    for rank, stage, name in _placed_stages(module):
        graphs = {
            kind: GraphCost.of(graph) for kind in COMPUTE if (graph := module.stage_graph(stage, kind)) is not None
        }
        # Microbatch after microbatch, each graph finds in the cache what the other graphs left there. A graph that runs
        # once per batch finds little.
        moved = {kind: priced.moved for kind, priced in graphs.items()}
        microbatch = sum(count for kind, count in moved.items() if kind not in PER_BATCH)
        device = module.cluster.device(name)
        for kind, priced in graphs.items():
            others = microbatch * microbatches if kind in PER_BATCH else microbatch - moved[kind]
            spent = priced.seconds(device, prices, others)
            if kind in (FORWARD, AGAIN) and microbatch > device.cache:
                spent += saved_seconds(priced.graph, device)
            seconds[rank, timed_kind(module, stage, kind)] = spent
    return seconds


def saved_seconds(graph: Graph, device: Device) -> float:
    """Return the seconds that a forward takes longer because what it saves is in no cache when it is written: it is
    read before, and written back later. Temporaries have memory that was touched a moment before."""
    return written_seconds(sum(value.type.nbytes for value in graph.saved if value not in graph.ins), device)


def written_seconds(nbytes: float, device: Device) -> float:
    """Return the seconds that bytes take beside the kernel that writes them, where no cache has their place."""
    return 2 * nbytes / device.bandwidth if device.cache_bandwidth else 0.0
