"""Facts of a module whose tensors are split over devices.

In: a module in local form, and perhaps the whole program before it with the layouts that it was given. Out:
SplitFacts: how every variable and input lies, with its bytes; every collective of the stage graphs; sums for each
graph. A collective has the bytes that a rank sends in it, its time, the operations that it stands between, and given
layouts that would avoid it (avoiding.py).

Bytes of collectives are those that the runtime sends (ir/collective_calls.py). Gradients that `AR` sums over replicas,
and messages between stages, are none of them. Without a schedule every rank counts for one microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import ACTION_KINDS
from penstock.ir.collective_calls import CollectiveCall, calls_of, sent_bytes
from penstock.ir.graph import Graph, Module, Value
from penstock.ir.ops import integer
from penstock.ir.types import TensorType
from penstock.passes.sharding.given import mesh_text
from penstock.passes.simulator.exchanges import Routes, collective_seconds, collective_times
from penstock.passes.simulator.machine import machine_of
from penstock.support.errors import UsageError

from .avoiding import avoiding_layouts

INPUT = "input"


@dataclass(frozen=True)
class TensorLayout:
    """The layout of a variable or an input on the devices of a stage. Without a stage every rank has it. Bytes count
    all versions of a variable; those of `copies` are of all devices together."""

    name: str
    role: str
    stage: int | None
    whole: str
    local: str
    device_bytes: int
    whole_bytes: int
    copies: int


@dataclass(frozen=True)
class CollectiveUse:
    """A collective of a stage graph: its result, the ranks that meet, and the bytes that each of them sends. It stands
    `behind` the operation that makes its operand, and `reader` is the first one that reads its result. `seconds` are
    predicted for one time, where links are known, and `exposed` those of them that kernels do not hide. The layouts of
    `avoided_by`, given before others, leave it out."""

    graph: str
    kind: str
    over: tuple[str, ...]
    members: int
    result: str
    per: str
    sent: int
    behind: str
    reader: str
    reason: str
    seconds: float | None
    exposed: float | None
    avoided_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphTraffic:
    """The collectives of a graph together. A rank sends `sent` bytes in one run, and `batch` bytes in a batch if it
    runs most microbatches; `ranks` are the bytes of all ranks in a batch."""

    graph: str
    per: str
    kinds: Mapping[str, int]
    sent: int
    batch: int
    ranks: int


@dataclass(frozen=True)
class SplitFacts:
    """All of it. A rank sends at most `rank_bytes` in collectives of a batch, all ranks together `all_bytes`."""

    meshes: tuple[str, ...]
    tensors: tuple[TensorLayout, ...]
    collectives: tuple[CollectiveUse, ...]
    graphs: tuple[GraphTraffic, ...]
    rank_bytes: int
    all_bytes: int


def split_facts(module: Module, whole: Module | None = None, given: Sequence[str] = ()) -> SplitFacts:
    """Return how tensors of a module in local form lie, and what its collectives send. `whole` is the program before it
    was cut, whose layouts are those `given` and what follows from them."""
    if not module.is_local:
        raise UsageError(
            "no tensor of the module is split over devices",
            hint="inspect a bundle that was compiled with --mesh, or a dump after the pass `localize`",
        )
    uses = tuple(use for stage in module.stages for use in _collectives(module, stage.index))
    if whole is not None and given:
        avoiding = avoiding_layouts(whole, mesh_text(module), given, [use.result for use in uses])
        uses = tuple(replace(use, avoided_by=avoiding.get(use.result, ())) for use in uses)
    traffic = {stage.index: tuple(_traffic(module, stage.index, uses)) for stage in module.stages}
    graphs = tuple(graph for of_stage in traffic.values() for graph in of_stage)
    return SplitFacts(
        tuple(_mesh_line(module, stage.index) for stage in module.stages),
        tuple(_tensors(module)),
        uses,
        graphs,
        max((sum(graph.batch for graph in of_stage) for of_stage in traffic.values()), default=0),
        sum(graph.ranks for graph in graphs),
    )


def _mesh_line(module: Module, stage: int) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in module.mesh_of(stage).axes)
    return f"stage {stage} ({axes}): {' '.join(module.devices_of(stage))}"


# ------------------------------------------------------------------------------------------------ tensors


def _tensors(module: Module) -> Iterator[TensorLayout]:
    for var in module.vars.values():
        yield _layout(module, var.name, var.role, var.stage, var.type, var.versions)
    for value in module.inputs:
        for stage in module.stages:
            if any(value.name == x.name for graph in _graphs(module, stage.index) for x in graph.ins):
                yield _layout(module, value.name, INPUT, stage.index, value.type, 1)


def _layout(module: Module, name: str, role: str, stage: int | None, t: TensorType, versions: int) -> TensorLayout:
    local = t if stage is None else module.local_type(t, stage)
    devices = len(module.rank_devices() if stage is None else module.devices_of(stage))
    held = local.nbytes * versions
    return TensorLayout(name, role, stage, str(t), str(local), held, t.nbytes * versions, held * devices)


# ------------------------------------------------------------------------------------------------ collectives


def _graphs(module: Module, stage: int) -> Iterator[Graph]:
    for kind in ACTION_KINDS:
        if (graph := module.stage_graph(stage, kind)) is not None:
            yield graph


def _per(graph: str) -> str:
    return ACTION_KINDS[graph.partition(".")[2]].per


def _collectives(module: Module, stage: int) -> Iterator[CollectiveUse]:
    mesh, route, first = module.mesh_of(stage), _routes(module), module.ranks_of(stage)[0]
    for graph in _graphs(module, stage):
        times = {} if route is None else collective_times(module, route, first, graph.name.partition(".")[2], stage)
        for call in calls_of(graph):
            members = len(mesh.group(0, call.over))
            yield CollectiveUse(
                graph.name,
                call.op.kind,
                call.over,
                members,
                call.op.outs[0].name,
                _per(graph.name),
                sent_bytes(call.op, members),
                _behind(graph, call),
                _reader(graph, call.op.outs[0]),
                _reason(graph, call),
                None if route is None else collective_seconds(module, stage, call.op, route),
                times[call.op.outs[0].name].exposed if call.op.outs[0].name in times else None,
            )


def _routes(module: Module) -> Routes | None:
    """Return the ways between ranks; None where the module names no devices."""
    if module.cluster is None:
        return None
    return machine_of(module.cluster, dict(enumerate(module.rank_devices()))).route


def _reason(graph: Graph, call: CollectiveCall) -> str:
    """Say why ranks exchange something here."""
    maker, reader, over = _behind(graph, call), _reader(graph, call.op.outs[0]), " and ".join(call.over)
    match call.op.kind:
        case "all_reduce" if call.attrs["by"] == "max":
            return f"the largest element lies on one rank along {over}"
        case "all_reduce":
            return f"{maker} is a sum over what is split along {over}"
        case "reduce_scatter":
            return f"{maker} is a sum over what is split along {over}, and {reader} takes a part of it"
        case "all_gather":
            return f"{reader} takes dimension {integer(call.attrs['axis'])} whole, which is split along {over}"
        case "all_to_all":
            split, join = integer(call.attrs["split"]), integer(call.attrs["join"])
            return f"{reader} takes dimension {split} split along {over}, and not {join}"
    return f"{reader} takes elements of neighbours along {over}"


def _behind(graph: Graph, call: CollectiveCall) -> str:
    (operand,) = call.op.ins
    makers = [op for op in graph.ops if operand in op.outs]
    return f"{makers[0].kind} %{operand.name}" if makers else f"input %{operand.name}"


def _reader(graph: Graph, result: Value) -> str:
    for op in graph.ops:
        if result in op.ins:
            return f"{op.kind} %{op.outs[0].name}" if op.outs else f"{op.kind} @{op.var}"
    return "returned" if result in graph.outs else "saved" if result in graph.saved else "nobody"


def _traffic(module: Module, stage: int, uses: tuple[CollectiveUse, ...]) -> Iterator[GraphTraffic]:
    ranks = len(module.devices_of(stage))
    shares = module.schedule.shares(stage) if module.schedule is not None else [1] * ranks
    for graph in _graphs(module, stage):
        mine = [use for use in uses if use.graph == graph.name]
        if mine:
            per, sent = _per(graph.name), sum(use.sent for use in mine)
            runs = shares if per == "microbatch" else [1] * ranks
            kinds = Counter(use.kind for use in mine)
            yield GraphTraffic(graph.name, per, dict(kinds), sent, sent * max(runs), sent * sum(runs))
