"""The explanation of an operation and its place.

In: a Subject and a name. Out: a Why: facts alone, which views/text.py prints.

    sources     the nodes of the model that the operations came from
    changes     the changes every pass made to them (history.py)
    parts       the operations as they are now: stage, devices, kernel with its work and time
    followers   operations of the backward pass that belong to them, by graph
    crossings   values of theirs that go from stage to stage, with their bytes
    reasons     of the stages they are on (reasons.py)

The times of a kernel are its roofline on the stage's device, and its measured time if it was measured on this machine
(`inspect --measure`). For the other devices of the cluster there is the roofline: work over rate, bytes over bandwidth,
whichever is more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.calibration.measured import Measured
from penstock.inspection.kernels.kernels import KernelRow, kernel_rows
from penstock.ir.graph import Module, graph_stage
from penstock.ir.memory.workspace import is_inline
from penstock.ir.schedule import PER_BATCH
from penstock.ir.sharding.between_meshes import edge_values
from penstock.ir.sharding.tile_messages import moved_bytes
from penstock.ir.text import print_op
from penstock.passes.costs.prices import bound
from penstock.passes.kernels.divide import Kernel

from .finding import NODE, PATH, OpPlace, Target, find, look_up, stage_and_devices
from .history import PassChange, PipelineRecord, changes, find_before, record_of
from .reasons import stage_reasons
from .sources import SourceNode, source_of
from .subject import Subject


@dataclass(frozen=True)
class KernelUse:
    """The kernel that an operation is a part of.

    `calls` are per batch, of this kernel alone; seconds are of one call. `alike` counts the other kernels that differ
    in names only.
    """

    label: str
    operations: tuple[str, ...]
    alike: int
    calls: int
    flops: float
    moved: float
    roofline_s: float
    measured_s: float | None
    elsewhere: dict[str, float]


@dataclass(frozen=True)
class OperationUse:
    """One operation of the program.

    Without a kernel it is computed where it is read, or is a read of a variable; `fused` says whether kernels were
    chosen. `follows` names the first result of the forward operation that an operation of the backward pass belongs to.
    """

    graph: str
    position: int
    text: str
    stage: int | None
    devices: tuple[str, ...]
    kernel: KernelUse | None
    fused: bool
    follows: str = ""


@dataclass(frozen=True)
class Crossing:
    """A value that goes to another stage: the bytes of one message, and the messages per batch."""

    value: str
    type: str
    source: int
    target: int
    phase: str
    nbytes: int
    times: int


@dataclass(frozen=True)
class Why:
    """The explanation of a name."""

    kind: str
    name: str
    sources: tuple[SourceNode, ...]
    parts: tuple[OperationUse, ...]
    followers: dict[str, int]
    crossings: tuple[Crossing, ...]
    reasons: dict[int, tuple[str, ...]]
    record: str
    changes: tuple[PassChange, ...]


def why(subject: Subject, name: str) -> Why:
    """Explain a name; raise UsageError where neither the program nor a module before it has it."""
    spelled = subject.source_names
    target = look_up(subject.module, name, spelled)
    record = record_of(subject)
    if target is None:
        before = find_before(record, name)
        # `find` is called for its error.
        target = Target(before.kind, before.name, ()) if before is not None else find(subject.module, name, spelled)
        nodes = before.places if before is not None else ()
    else:
        nodes = target.places
    return explain(subject, target, record, nodes)


def explain(subject: Subject, target: Target, record: PipelineRecord, nodes: Sequence[OpPlace]) -> Why:
    """Explain operations that were found; `nodes` are those whose sources are named."""
    module = subject.module
    # For a node or a path, operations that compute come before those that are only read.
    wide = target.kind in (NODE, PATH)
    parts = tuple(sorted(_parts(subject, target.places), key=lambda part: wide and part.kernel is None))
    stages = sorted({part.stage for part in parts if part.stage is not None})
    return Why(
        target.kind,
        target.name,
        tuple(
            source_of(subject.bundle, module, loc)
            for loc in dict.fromkeys(place.op.loc for place in nodes if place.op.loc)
        ),
        parts,
        dict(_followers(module, target.places)),
        tuple(_crossings(module, target.places)),
        {stage: stage_reasons(module, stage, subject.plan) for stage in stages},
        record.origin,
        changes(record, target),
    )


# ------------------------------------------------------------------------------------------------ the operations now


def _parts(subject: Subject, places: Sequence[OpPlace]) -> Iterator[OperationUse]:
    module = subject.module
    fused = "fused" in module.facts and module.cluster is not None
    rows = {(row.graph, name): row for row in kernel_rows(module) for name in row.names} if fused else {}
    measured = _measured(subject) if rows else {}
    for place in places:
        op = place.op
        stage, devices = stage_and_devices(module, place.graph, op)
        kernel = str(op.attrs.get("kernel", ""))
        row = rows.get((place.graph, kernel or f"op{place.position}")) if not is_inline(op) else None
        use = _use(row, kernel or f"op{place.position}", module, measured) if row is not None else None
        yield OperationUse(
            place.graph, place.position, print_op(op), stage, devices, use, fused, str(op.attrs.get("of", ""))
        )


def _use(row: KernelRow, name: str, module: Module, measured: dict[str, float]) -> KernelUse:
    assert module.cluster is not None
    others = {d.name: bound(row.body.ops, row.moved, d) for d in module.cluster.devices if d.name != row.device.name}
    return KernelUse(
        f"{row.graph}/{name}",
        tuple(op.kind for op in row.ops),
        len(row.names) - 1,
        row.calls_per_batch // len(row.names),
        row.flops,
        row.moved,
        row.roofline_s,
        measured.get(row.label),
        others,
    )


def _measured(subject: Subject) -> dict[str, float]:
    """Return the seconds of kernels that were timed on this machine, by the label of their row."""
    table = Measured(subject.backend)
    timed = {
        row.label: table.seconds(Kernel(row.names[0], row.ops, row.body), row.device)
        for row in kernel_rows(subject.module)
    }
    return {label: seconds for label, seconds in timed.items() if seconds is not None}


def _followers(module: Module, places: Sequence[OpPlace]) -> Iterator[tuple[str, int]]:
    results = {v.name for place in places for v in place.op.outs}
    places_of_target = {(place.graph, place.position) for place in places}
    for graph in module.graphs.values():
        number = sum(
            op.attrs.get("of") in results and (graph.name, i) not in places_of_target for i, op in enumerate(graph.ops)
        )
        if number:
            yield graph.name, number


def _crossings(module: Module, places: Sequence[OpPlace]) -> Iterator[Crossing]:
    """Yield the values that operations send to other stages or receive from them."""
    results = {v for place in places for v in place.op.outs}
    operands = {(graph_stage(place.graph), v) for place in places for v in place.op.ins}
    microbatches = module.schedule.microbatches if module.schedule is not None else 1
    for edge in module.edges:
        ends, moved = (
            (edge_values(module, edge, edge.src), edge_values(module, edge, edge.dst)),
            moved_bytes(module, edge),
        )
        for value, left, arrived in zip(edge.values, *ends, strict=True):
            if left in results or (edge.dst, arrived) in operands:
                times = 1 if edge.phase in PER_BATCH else microbatches
                yield Crossing(value.name, str(value.type), edge.src, edge.dst, edge.phase, moved[value.name], times)
