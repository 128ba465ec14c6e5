"""Predicted memory of every rank. In: a module with a schedule. Out: bytes by purpose, and the peak of their sum.

What is counted, of all stages of a rank together:
    weights      parameters, times the versions kept              gradients, state, buffers    one copy each
                 (of state that has a home in another space, what is on the device at once: items.py)
    activations  what the forward graph saves (inputs of the module among it), for each microbatch between its F and its
                 D; where weight gradients are apart (W), what W takes of it and of B, until W
    boundary     values that came from other stages or go to them, from their receive or computation until they are
                 consumed or sent; what is exchanged once per batch, until the update
    data         batches of the stage's inputs that wait in host memory, and what collectives keep (exchanges.py); for a
                 stage on a GPU, the buffers on the device that copies and messages go through (passages.py); what
                 saved sets go through on their way to another space (saved_sets.py)
    workspace    temporaries inside one graph (workspace.py), blocks that are free at the moment, and scratch memory of
                 kernels of convolutions (scratch.py)
After F and its sends a microbatch holds exactly what F saves, after B and its sends what W takes, and after W what B
has yet to send. Then it holds nothing. The runtime does the same.

Results and temporaries of compiled graphs come from an allocator that keeps a freed block for the next one of exactly
that size. So what it holds is, for each size, the most blocks of that size at once; the walk counts them. Memory of
received values and of inputs is used again in the same way. Receives are posted ahead, and have their memory from then
on; on a GPU it is pinned memory of the host, which is not counted, until they have come. What is sent stays until the
next send of its channel, small messages until there are a few of them. Values that share a message (ir/messages.py) are
one block. Known limits: scratch memory inside other kernels and rounding to pages need more. So do copies of variables
that a graph changes before it last needs what it read, such as the 8 bytes of `step` in updates of --zero. The
interpreter and its libraries are not counted: a worker measures them before it loads its variables. `planned_account`
is exact, block by block and action by action, but for scratch memory, such copies, and receives of batches that a
program has yet to give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.ir.action_kinds import BACKWARD, UPDATE
from penstock.ir.batch_shares import share_of
from penstock.ir.graph import COPY, GRAD, PARAM, STATE, Module, Value, Var, stage_vars, stepped_vars
from penstock.ir.memo import Derived
from penstock.ir.schedule import COMPUTE, READERS, Action

from .account import BEFORE, Account, Life, Version
from .exchanges import exchange_bytes, ring_bytes
from .items import ItemClaims, is_brought, is_let_go, resident_bytes, stage_images
from .passages import passage_bytes
from .saved_sets import saved_set
from .scratch import scratch_bytes
from .touches import Accesses
from .walk import Walk, actions_of

BATCHES = 3
# Batches handed to the workers and not finished yet. Under 2bw the update of a batch needs the one after it; two more
# keep the pipe full.
BATCHES_AHEAD = 4
_PURPOSES = {PARAM: "weights", COPY: "weights", GRAD: "gradients", STATE: "state"}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank; `stage` is its first, `peak` the largest sum at one moment. `in_flight` are the most
    microbatches that hold activations, of each of its stages. `workspace` is what is held at that moment beside values
    of microbatches and variables."""

    stage: int
    weights: int
    gradients: int
    state: int
    buffers: int
    activations: int
    boundary: int
    data: int
    workspace: int
    peak: int
    in_flight: int

    @property
    def fixed(self) -> int:
        return self.weights + self.gradients + self.state + self.buffers

    def at_peak(self) -> dict[str, int]:
        """Return the bytes at the peak by purpose; they add up to it. Blocks that were given back are kept, so what
        activations take at most is held then, too; what is left of all blocks beside them and messages counts as
        workspace."""
        blocks = self.peak - self.fixed - self.data
        activations = min(self.activations, blocks)
        boundary = min(self.boundary, blocks - activations)
        bytes_of = {"weights": self.weights, "gradients": self.gradients, "state": self.state, "buffers": self.buffers}
        bytes_of |= {"activations": activations, "boundary": boundary, "data": self.data}
        return bytes_of | {"workspace": blocks - activations - boundary}


_MEMORY = Derived[dict[int, Memory]](__name__, "memory")


def measure_memory(module: Module) -> dict[int, Memory]:
    """Return one row per rank. A schedule without drops counts as one that drops after the last computation of a
    microbatch."""
    assert module.schedule is not None, "memory needs a schedule"
    ranks = module.schedule.ranks
    rows = module.kept.once(_MEMORY, lambda: {rank: rank_memory(module, rank) for rank in ranks})
    return dict(rows)


def most_resident(module: Module, rank: int) -> int:
    """Return the most bytes of items that are on the device of a rank at once."""
    if module.schedule is None or not any(var.home for var in module.vars.values()):
        return 0
    return max(resident_bytes(module, actions_of(module.schedule, rank, BATCHES)), default=0)


def rank_memory(module: Module, rank: int) -> Memory:
    """Return the row of one rank."""
    schedule = module.schedule
    assert schedule is not None, "memory needs a schedule"
    stages = schedule.stages_of(rank)
    fixed = {"weights": 0, "gradients": 0, "state": most_resident(module, rank), "buffers": 0}
    for stage in stages:
        for var in (var for var in stage_vars(module, stage).values() if not var.home):
            fixed[purpose_of(var)] += module.local_type(var.type, stage).nbytes * var.versions
    # One that several stages of the rank take waits once.
    fed = {value.name: value for stage in stages for value in _fed_values(module, stage)}.values()
    batch = len(share_of(module, rank)) * sum(v.type.nbytes for v in fed)
    # One more than are ahead: a batch counts as finished when the loss is known, and stages before that one still work
    # on it.
    data = passage_bytes(module, rank, fed) if _on_gpu(module, rank) else (BATCHES_AHEAD + 1) * batch
    data += exchange_bytes(module, rank, stages) + ring_bytes(module, rank, stages)
    sets = [saved for stage in stages if (saved := saved_set(module, stage)) is not None]
    # A GPU copies each value of a set by itself.
    data += 0 if _on_gpu(module, rank) else sum(saved.gathered for saved in sets)
    walk, scratch = _walk(module, rank), rank_scratch(module, rank)
    for _ in walk.follow(actions_of(schedule, rank, BATCHES)):
        pass
    return Memory(
        min(stages, default=0),
        **fixed,
        activations=walk.activations,
        boundary=walk.boundary,
        data=data,
        workspace=walk.workspace + scratch,
        peak=sum(fixed.values()) + data + walk.peak + scratch,
        in_flight=walk.in_flight,
    )


def rank_scratch(module: Module, rank: int) -> int:
    """Return the scratch memory that kernels of a rank keep; on a GPU it is not counted."""
    assert module.schedule is not None, "memory needs a schedule"
    if module.cluster is None or _on_gpu(module, rank):
        return 0
    stages, device = module.schedule.stages_of(rank), module.cluster.device(module.rank_devices()[rank])
    graphs = [graph for stage in stages for kind in COMPUTE if (graph := module.stage_graph(stage, kind)) is not None]
    trained = any(module.stage_graph(stage.index, BACKWARD) for stage in module.stages)
    return scratch_bytes(graphs, device.threads, trained)


def _fed_values(module: Module, stage: int) -> tuple[Value, ...]:
    """Return the inputs of the module that a stage takes, with the types that a rank has of them."""
    graphs = (graph for kind in COMPUTE if (graph := module.stage_graph(stage, kind)))
    inputs = {v.name for graph in graphs for v in graph.ins}
    return module.local_values((v for v in module.data_inputs if v.name in inputs), stage)


def _walk(module: Module, rank: int, *, lives: bool = False) -> Walk:
    """Return a walk over the program of a rank, which runs all of its stages."""
    assert module.schedule is not None, "memory needs a schedule"
    return Walk(module, module.schedule.stages_of(rank), rank, posts=not _on_gpu(module, rank), lives=lives)


@dataclass(frozen=True, slots=True)
class Course:
    """The memory that a rank holds over a run. `held` are, after each action, bytes of values that are saved, of those
    that pass through, and of blocks that are free then; `always` those of variables and data. `lives` are the blocks
    of values as they come and go."""

    actions: tuple[Action, ...]
    held: tuple[tuple[int, int, int], ...]
    lives: tuple[Life, ...]
    always: tuple[int, ...]


def memory_course(module: Module, rank: int, batches: int) -> Course:
    """Return the course of memory over a run of a rank, from an empty pipeline to an empty one."""
    assert module.schedule is not None, "memory needs a schedule"
    walk, actions, held = _walk(module, rank, lives=True), actions_of(module.schedule, rank, batches), []
    for _ in walk.follow(actions):
        saved, passing = walk.now[True], walk.now[False] + walk.coming
        blocks = sum(pool.bytes for pool in walk.pools)
        held.append((saved, passing, blocks - saved - passing))
    row = measure_memory(module)[rank]
    away = row.fixed + row.data + rank_scratch(module, rank) - most_resident(module, rank)
    always = tuple(away + n for n in resident_bytes(module, actions))
    return Course(tuple(actions), tuple(held), tuple(walk.finish()), always)


def memory_curve(module: Module, rank: int, batches: int) -> Iterator[tuple[Action, int, int]]:
    """Yield after each action of a run the bytes that live, and the bytes that the process holds. Freed blocks of
    results and messages are kept for the next ones. Variables and data are included, as `measure_memory` counts them;
    temporaries of a graph are held from its first call on, and live during it."""
    course = memory_course(module, rank, batches)
    for action, (saved, passing, free), always in zip(course.actions, course.held, course.always, strict=True):
        yield action, always + saved + passing, always + saved + passing + free


def planned_account(module: Module, rank: int, runs: Sequence[tuple[int, int]]) -> Account:
    """Account for the memory of a rank, block by block. `runs` lists the first batch and the number of batches of runs
    that follow each other. Each run begins and ends with an empty pipeline. Checkpoints divide a training into such
    runs.
    """
    assert module.schedule is not None, "memory needs a schedule"
    stages = module.schedule.stages_of(rank)
    walk, actions = _walk(module, rank, lives=True), list[Action]()
    for first, batches in runs:
        actions += walk.follow(actions_of(module.schedule, rank, batches, first))
    newest = runs[0][0] if runs else 0
    lives, versions, workspace = walk.finish(), list[Version](), dict[str, tuple[int, ...]]()
    for stage in stages:
        lives += [*_variable_lives(module, stage), *_item_lives(module, stage, actions)]
        versions += _versions(module, rank, stage, newest, actions)
        for computed, blocks in walk.stages[stage].workspaces.items():
            workspace[called_graph(stages, stage, computed)] = tuple(blocks)
    return Account(
        rank, tuple(actions), tuple(with_uses(module, stages, newest, actions, lives)), tuple(versions), workspace
    )


def called_graph(pack: Sequence[int], stage: int, computed: str) -> str:
    """Name a graph that a rank calls: with the stage, where the rank runs several."""
    return computed if len(pack) == 1 else f"s{stage}.{computed}"


def with_uses(
    module: Module, stages: Sequence[int], newest: int, actions: Sequence[Action], lives: Sequence[Life]
) -> list[Life]:
    """Return the same blocks with the actions that use their contents, in the order in which they were taken."""
    # Values by owner and name. Those that no stage of the rank makes by stage, too: each has its own block of them.
    values: dict[tuple[int | None, str, int | None], list[int]] = {}
    buffers: dict[tuple[int, str, int], list[int]] = {}
    graphs = (graph for stage in stages for kind in COMPUTE if (graph := module.stage_graph(stage, kind)))
    results = {v.name for graph in graphs for v in graph.results}
    for stage in stages:
        steps = [step for step, action in enumerate(actions) if action.stage == stage]
        accesses = Accesses(module, stage, newest).follow(actions[step] for step in steps)
        for step, access in zip(steps, accesses, strict=True):
            for name in access.values:
                values.setdefault((access.owner, name, None if name in results else stage), []).append(step)
            for buffer in access.buffers:
                buffers.setdefault((stage, *buffer), []).append(step)
    result = []
    for life in lives:
        touched = (
            buffers.get((life.stage, life.names[0], life.copy), [])
            if life.owner is None
            else [
                step
                for name in life.names
                for step in values.get((life.owner, name, None if name in results else life.stage), ())
            ]
        )
        end = len(actions) if life.given_at is None else life.given_at
        result.append(life._replace(uses=tuple(sorted({s for s in touched if life.taken_at <= s <= end}))))
    return sorted(result, key=lambda life: (life.taken_at, life.names, life.copy, life.owner or 0, life.stage))


def purpose_of(var: Var) -> str:
    """Return the column of a variable."""
    return _PURPOSES.get(var.role, "buffers")


def _variable_lives(module: Module, stage: int) -> Iterator[Life]:
    for var in (var for var in stage_vars(module, stage).values() if not var.home):
        size = module.local_type(var.type, stage).nbytes
        for copy in range(var.versions if size else 0):
            yield Life(purpose_of(var), (var.name,), None, size, BEFORE, None, copy, stage=stage)


def _item_lives(module: Module, stage: int, actions: Sequence[Action]) -> Iterator[Life]:
    """Yield the stays on the device of variables that have a home, each version by itself."""
    begun: dict[tuple[str, int | None], int] = {}
    stays: list[tuple[str, int | None, int, int | None]] = []
    images, claims = stage_images(module, stage), ItemClaims()
    for step, action in enumerate(actions):
        if action.stage != stage or action.item not in images or not (is_brought(action) or is_let_go(action)):
            continue
        match claims.change(action):
            case 1:
                begun[action.item, action.version] = step
            case -1:
                stays.append((action.item, action.version, begun.pop((action.item, action.version)), step))
    stays += [(item, version, step, None) for (item, version), step in begun.items()]
    for item, version, first, last in stays:
        copy = (version or 0) % images[item].versions
        for var in images[item].variables.values():
            if var.type.nbytes:
                yield Life(purpose_of(var), (var.name,), None, var.type.nbytes, first, last, copy, stage=stage)


def _versions(module: Module, rank: int, stage: int, newest: int, actions: Sequence[Action]) -> Iterator[Version]:
    """Yield the versions of the parameters that updates step: the first version of a run, and those that the run makes.
    Batch t reads version t - delay; the last action of that batch that does so retires it."""
    assert module.schedule is not None
    per_batch = module.schedule.microbatches
    reads = [a for a in module.schedule.ranks[rank].batch if a.stage == stage and a.kind in READERS]
    # As written for batch 1.
    oldest = min((a.version for a in reads if a.version is not None), default=1)
    ours = [(step, a) for step, a in enumerate(actions) if a.stage == stage]
    last = {a.version: step for step, a in ours if a.kind in READERS and a.version == a.batch(per_batch) + oldest - 1}
    written_at = {a.version: step for step, a in ours if a.kind == UPDATE and not a.item}
    if not any(a.kind in READERS for _, a in ours):
        # What no microbatch reads retires as the next update begins.
        last = {version - 1: i for version, i in written_at.items() if version is not None}
    for name in sorted(stepped_vars(module) & stage_vars(module, stage).keys()):
        for version, written in ((newest, BEFORE), *((v, i) for v, i in written_at.items() if v is not None)):
            yield Version(name, version, version % module.vars[name].versions, written, last.get(version))


def _on_gpu(module: Module, rank: int) -> bool:
    place = module.rank_devices()[rank]
    return module.cluster is not None and any(d.name == place and d.kind == "cuda" for d in module.cluster.devices)
