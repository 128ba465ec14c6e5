"""The facts of a module in a few tables.

In: a module. Out: a Summary: stages with their work and memory, graphs, messages, notes.

Times are predicted by the rates of the module's cluster, per batch and for the busiest rank; memory is the predicted
peak of the rank that needs most. A module without stages, schedule, devices or messages lacks these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.ir.graph import GRAD, PARAM, Graph, Module, Value, stage_vars
from penstock.ir.ladder.bounds import print_sizes
from penstock.ir.ladder.ladder import Ladder
from penstock.ir.memory.predict import measure_memory
from penstock.ir.memory.workspace import INLINE
from penstock.ir.names import in_words_of_source
from penstock.ir.ops import cost_of
from penstock.ir.ops.caches import BLOCK
from penstock.ir.schedule import COMPUTE, PER_BATCH
from penstock.ir.sharding.tile_messages import moved_bytes
from penstock.passes.costs.prices import rank_seconds
from penstock.passes.simulator.forecast import seconds_of


@dataclass(frozen=True)
class StageFacts:
    """The facts of a stage.

    `stored` are bytes of parameters, buffers and state with all their versions; `flops`, `seconds` and `sent` are of
    one batch.
    """

    stage: int
    devices: tuple[str, ...]
    operations: int
    kernels: int
    parameters: int
    stored: int
    flops: float
    seconds: float | None
    peak: int | None
    sent: int


@dataclass(frozen=True)
class GraphFacts:
    """The facts of a graph; `saved` are bytes."""

    name: str
    operations: int
    kernels: int
    inputs: int
    outputs: int
    saved: int


@dataclass(frozen=True)
class MessageFacts:
    """The values that go from stage to stage in one message: `per` is microbatch or batch."""

    source: int
    target: int
    phase: str
    values: tuple[str, ...]
    nbytes: int
    per: str


@dataclass(frozen=True)
class TurnFacts:
    """The use of caches by a turn of one size: its rows and sequences, and the bytes of keys and values that its rows
    write. Where sequences are as long as the context it reads most: `blocks`, and their bytes in all layers."""

    rows: int
    sequences: int
    written: int
    blocks: int
    read: int


@dataclass(frozen=True)
class RungFacts:
    """A size that a model with bounded dimensions has code for, and the predicted seconds of the busiest rank. `turn`
    is None where there are no caches."""

    sizes: str
    seconds: float | None
    turn: TurnFacts | None = None


@dataclass(frozen=True)
class Summary:
    """The facts of a module; `rungs` are the sizes of its bounded dimensions, the smallest first."""

    name: str
    parameters: int
    tensors: int
    facts: tuple[str, ...]
    inputs: tuple[tuple[str, str, bool], ...]
    outputs: tuple[str, ...]
    schedule: str
    microbatches: int
    ranks: int
    stages: tuple[StageFacts, ...]
    graphs: tuple[GraphFacts, ...]
    messages: tuple[MessageFacts, ...]
    notes: tuple[tuple[str, str], ...]
    rungs: tuple[RungFacts, ...] = ()


def summarize(
    module: Module, renamed: Mapping[str, str] | None = None, ladder: Ladder[Module] | None = None
) -> Summary:
    """Collect the facts of a module. `renamed` are the source's names of what the module spells otherwise, `ladder` has
    the modules of all sizes."""
    renamed = renamed or {}
    params = [v for v in module.vars.values() if v.role == PARAM]
    schedule = module.schedule
    return Summary(
        module.name,
        sum(v.type.size for v in params if v.type.is_static),
        len(params),
        module.facts,
        tuple((renamed.get(v.name, v.name), str(v.type), v in module.data_inputs) for v in module.inputs),
        tuple(renamed.get(name, name) for name in module.outputs),
        schedule.name if schedule is not None else "",
        schedule.microbatches if schedule is not None else 0,
        len(schedule.ranks) if schedule is not None else 0,
        tuple(_stages(module)),
        tuple(
            GraphFacts(g.name, len(g.ops), _kernels(g), len(g.ins), len(g.outs), sum(v.type.nbytes for v in g.saved))
            for g in module.graphs.values()
        ),
        tuple(_messages(module, renamed)),
        tuple((note.origin, in_words_of_source(note.text, renamed)) for note in module.notes),
        () if ladder is None else tuple(rungs_of(ladder)),
    )


def rungs_of(ladder: Ladder[Module]) -> Iterator[RungFacts]:
    """Yield the facts of each size; nothing where no dimension is bounded."""
    for rung in ladder:
        if rung.sizes:
            timed = rung.held.schedule is not None and rung.held.cluster is not None
            seconds = max(busy_seconds(rung.held).values()) if timed else None
            yield RungFacts(print_sizes(rung.sizes), seconds, turn_of(rung.held))


def turn_of(module: Module) -> TurnFacts | None:
    """Return what a turn does with caches, by the operations of a module; None where nothing attends to a cache."""
    ops = [op for graph in module.graphs.values() for op in graph.ops]
    puts, attends = ([op for op in ops if op.kind == kind] for kind in ("put", "attend"))
    if not puts or not attends:
        return None
    rows, (sequences, each) = puts[0].ins[0].type.dims[0], attends[0].ins[5].type.dims
    # A block of a sequence is there once, however often its table names it.
    blocks = min(sequences * each, attends[0].ins[1].type.dims[0])
    written = sum(op.ins[0].type.dims[0] * _per_position(op.outs[0]) for op in puts)
    read = sum(blocks * BLOCK * _per_position(cache) for op in attends for cache in op.ins[1:3])
    return TurnFacts(rows, sequences, written, blocks, read)


def _per_position(cache: Value) -> int:
    """Return the bytes of one position of a sequence in a cache."""
    return cache.type.nbytes // (cache.type.dims[0] * BLOCK)


def busy_seconds(module: Module) -> dict[int, float]:
    """Predict the seconds of a batch in which each rank computes, or is busy with an end of a message."""
    assert module.schedule is not None, "who computes how often is said by the schedule"
    seconds = seconds_of(module, rank_seconds(module))
    return {
        rank: sum(seconds(rank, action) for action in program.batch) for rank, program in module.schedule.ranks.items()
    }


def _kernels(graph: Graph) -> int:
    names = {str(op.attrs["kernel"]) for op in graph.ops if "kernel" in op.attrs}
    return sum(not name.startswith(INLINE) for name in names)


def _stages(module: Module) -> Iterator[StageFacts]:
    schedule = module.schedule
    busy = busy_seconds(module) if schedule is not None and module.cluster is not None else {}
    peaks = {rank: memory.peak for rank, memory in measure_memory(module).items()} if "wired" in module.facts else {}
    members = schedule.members() if schedule is not None else {}
    for stage in module.stages:
        graphs = {kind: graph for kind in COMPUTE if (graph := module.stage_graph(stage.index, kind)) is not None}
        variables = stage_vars(module, stage.index).values()
        ranks = members.get(stage.index, ())
        yield StageFacts(
            stage.index,
            module.devices_of(stage.index),
            sum(len(graph.ops) for graph in graphs.values()),
            sum(map(_kernels, graphs.values())),
            sum(v.type.size for v in variables if v.role == PARAM),
            sum(v.type.nbytes * v.versions for v in variables if v.role != GRAD),
            sum(cost_of(op).flops * _times(module, kind) for kind, graph in graphs.items() for op in graph.ops),
            max((busy[rank] for rank in ranks if rank in busy), default=None),
            max((peaks[rank] for rank in ranks if rank in peaks), default=None),
            sum(
                sum(moved_bytes(module, edge).values()) * _times(module, edge.phase)
                for edge in module.edges
                if edge.src == stage.index
            ),
        )


def _times(module: Module, kind: str) -> int:
    """Return how often all ranks of a stage together run a kind of graph in a batch."""
    return 1 if kind in PER_BATCH or module.schedule is None else module.schedule.microbatches


def _messages(module: Module, renamed: Mapping[str, str]) -> Iterator[MessageFacts]:
    for edge in module.edges:
        values = tuple(f"{_named(v.name, renamed)} {v.type}" for v in edge.values)
        yield MessageFacts(
            edge.src,
            edge.dst,
            edge.phase,
            values,
            sum(moved_bytes(module, edge).values()),
            "batch" if edge.phase in PER_BATCH else "microbatch",
        )


def _named(name: str, renamed: Mapping[str, str]) -> str:
    """Return the name of a value as the source has it, where that is another."""
    if name in renamed:
        return repr(renamed[name])
    value = name.removesuffix(".grad")
    return f"gradient of {renamed[value]!r}" if value in renamed else f"%{name}"
