"""Predicted memory of every rank. In: a module with a schedule. Out: bytes by purpose, and the peak of their sum.

What is counted, per stage:
    weights      parameters, times the versions kept              gradients, state, buffers    one copy each
                 (of state that has a home in another space, what is on the device at once: items.py)
    activations  what the forward graph saves (inputs of the module among it), for each microbatch between its F and its
                 D; where weight gradients are apart (W), what W takes of it and of B, until W
    boundary     values that came from other stages or go to them, from their receive or computation until they are
                 consumed or sent; what is exchanged once per batch, until the update
    data         batches of the stage's inputs that wait in host memory, and blocks of collectives (exchanges.py); for a
                 stage on a GPU, the buffers on the device that copies and messages go through (passages.py); what
                 saved sets go through on their way to another space (saved_sets.py)
    workspace    temporaries inside one graph (workspace.py), and blocks that are free at the moment
After F and its sends a microbatch holds exactly what F saves, after B and its sends what W takes, after W nothing: the
runtime does the same.

Results and temporaries of compiled graphs come from an allocator that keeps a freed block for the next one of exactly
that size. So what it holds is, for each size, the most blocks of that size at once; the walk counts them. Memory of
received values and of inputs is used again in the same way. Receives are posted ahead, and have their memory from then
on; on a GPU it is pinned memory of the host, which is not counted, until they have come. What is sent stays until the
next send of its channel, small messages until there are a few of them. Values that share a message (ir/messages.py) are
one block. Known limits: scratch memory inside kernels and rounding to pages need more. The interpreter and its
libraries are not counted: a worker measures them before it loads its variables. `planned_account` is exact, block by
block and action by action, but for receives of batches that a program has yet to give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from penstock.ir.action_kinds import UPDATE
from penstock.ir.graph import COPY, GRAD, PARAM, STATE, Module, Var, stage_vars, stepped_vars
from penstock.ir.memo import Derived
from penstock.ir.schedule import COMPUTE, READERS, SAVERS, Action, Schedule

from .account import BEFORE, Account, Life, Version
from .exchanges import exchange_bytes
from .items import is_brought, is_let_go, resident_bytes, stage_images
from .passages import passage_bytes
from .saved_sets import saved_set
from .touches import Accesses
from .walk import Walk, actions_of

BATCHES = 3
# Batches handed to the workers and not finished yet. Under 2bw the update of a batch needs the one after it; two more
# keep the pipe full.
BATCHES_AHEAD = 4
_PURPOSES = {PARAM: "weights", COPY: "weights", GRAD: "gradients", STATE: "state"}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one stage; `peak` is the largest sum at one moment, `in_flight` the most microbatches that hold
    activations. `workspace` is what is held at that moment beside values of microbatches and variables."""

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
    schedule = module.schedule
    rows = module.kept.once(_MEMORY, lambda: _measured(module, schedule))
    return dict(rows)


def _measured(module: Module, schedule: Schedule) -> dict[int, Memory]:
    table = {}
    for rank in schedule.ranks:
        row = _summed([_stage_memory(module, rank, stage) for stage in schedule.stages_of(rank)])
        most = _most_resident(module, rank)
        table[rank] = replace(row, state=row.state + most, peak=row.peak + most)
    return table


def _most_resident(module: Module, rank: int) -> int:
    """Return the most bytes of items that are on the device of a rank at once."""
    if module.schedule is None or not any(var.home for var in module.vars.values()):
        return 0
    return max(resident_bytes(module, actions_of(module.schedule, rank, BATCHES)), default=0)


def _summed(rows: Sequence[Memory]) -> Memory:
    """Return the memory of a rank: blocks that were given back are kept, so it is the sum over its stages."""
    if len(rows) == 1:
        return rows[0]
    return Memory(rows[0].stage, *map(sum, zip(*[astuple(row)[1:] for row in rows], strict=True)))


def _stage_memory(module: Module, rank: int, stage: int) -> Memory:
    assert module.schedule is not None
    graphs = [g for kind in COMPUTE if (g := module.stage_graph(stage, kind))]
    fixed = {"weights": 0, "gradients": 0, "state": 0, "buffers": 0}
    for var in (var for var in stage_vars(module, stage).values() if not var.home):
        fixed[purpose_of(var)] += module.local_type(var.type, stage).nbytes * var.versions
    inputs = {v.name for graph in graphs for v in graph.ins}
    fed = module.local_values((v for v in module.data_inputs if v.name in inputs), stage)
    batch = module.schedule.microbatches * sum(v.type.nbytes for v in fed)
    # One more than are ahead: a batch counts as finished when the loss is known, and stages before that one still work
    # on it.
    data = passage_bytes(module, rank, fed) if _on_gpu(module, rank) else (BATCHES_AHEAD + 1) * batch
    data += exchange_bytes(module, rank, stage)
    data += 0 if (saved := saved_set(module, stage)) is None else saved.gathered
    walk = Walk(module, stage, rank, posts=not _on_gpu(module, rank))
    for _ in walk.follow(a for a in actions_of(module.schedule, rank, BATCHES) if a.stage == stage):
        pass
    return Memory(
        stage,
        **fixed,
        activations=walk.activations,
        boundary=walk.boundary,
        data=data,
        workspace=walk.workspace,
        peak=sum(fixed.values()) + data + walk.peak,
        in_flight=walk.in_flight,
    )


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
    posts, actions = not _on_gpu(module, rank), actions_of(module.schedule, rank, batches)
    walks = {stage: Walk(module, stage, rank, posts=posts, lives=True) for stage in module.schedule.stages_of(rank)}
    ways = {stage: walk.follow([a for a in actions if a.stage == stage]) for stage, walk in walks.items()}
    held = []
    for step, action in enumerate(actions, BEFORE):
        walks[action.stage].step = step
        next(ways[action.stage])
        saved = sum(walk.now[True] for walk in walks.values())
        passing = sum(walk.now[False] + walk.coming for walk in walks.values())
        blocks = sum(pool.bytes for walk in walks.values() for pool in walk.pools)
        held.append((saved, passing, blocks - saved - passing))
    for way in ways.values():
        next(way, None)
    row = measure_memory(module)[rank]
    away = row.fixed + row.data - _most_resident(module, rank)
    lives = tuple(life for walk in walks.values() for life in walk.finish())
    return Course(tuple(actions), tuple(held), lives, tuple(away + n for n in resident_bytes(module, actions)))


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
    stage = module.rank_stages()[rank]
    walk, actions = Walk(module, stage, rank, posts=not _on_gpu(module, rank), lives=True), list[Action]()
    for first, batches in runs:
        actions += walk.follow(actions_of(module.schedule, rank, batches, first))
    newest = runs[0][0] if runs else 0
    variables = [*_variable_lives(module, stage), *_item_lives(module, stage, actions)]
    lives = with_uses(module, stage, newest, actions, [*variables, *walk.finish()])
    workspace = {kind: tuple(blocks) for kind, blocks in walk.workspaces.items()}
    return Account(
        rank, tuple(actions), tuple(lives), tuple(_versions(module, rank, stage, newest, actions)), workspace
    )


def with_uses(module: Module, stage: int, newest: int, actions: Sequence[Action], lives: Sequence[Life]) -> list[Life]:
    """Return the same blocks with the actions that use their contents, in the order in which they were taken."""
    values: dict[tuple[int | None, str], list[int]] = {}
    buffers: dict[tuple[str, int], list[int]] = {}
    for step, access in enumerate(Accesses(module, stage, newest).follow(actions)):
        for name in access.values:
            values.setdefault((access.owner, name), []).append(step)
        for buffer in access.buffers:
            buffers.setdefault(buffer, []).append(step)
    result = []
    for life in lives:
        touched = (
            buffers.get((life.names[0], life.copy), [])
            if life.owner is None
            else [s for n in life.names for s in values.get((life.owner, n), ())]
        )
        end = len(actions) if life.given_at is None else life.given_at
        result.append(life._replace(uses=tuple(sorted({s for s in touched if life.taken_at <= s <= end}))))
    return sorted(result, key=lambda life: (life.taken_at, life.names, life.copy, life.owner or 0))


def purpose_of(var: Var) -> str:
    """Return the column of a variable."""
    return _PURPOSES.get(var.role, "buffers")


def saved_values(module: Module, stage: int) -> frozenset[str]:
    """Return the values that a computation saves for a later one. A block with one of them counts as activations, other
    blocks as boundary."""
    graphs = (module.stage_graph(stage, kind) for kind in SAVERS)
    return frozenset(v.name for graph in graphs if graph is not None for v in graph.saved)


def _variable_lives(module: Module, stage: int) -> Iterator[Life]:
    for var in (var for var in stage_vars(module, stage).values() if not var.home):
        size = module.local_type(var.type, stage).nbytes
        for copy in range(var.versions if size else 0):
            yield Life(purpose_of(var), (var.name,), None, size, BEFORE, None, copy)


def _item_lives(module: Module, stage: int, actions: Sequence[Action]) -> Iterator[Life]:
    """Yield the stays on the device of variables that have a home."""
    for item, image in stage_images(module, stage).items():
        ends = [step for step, a in enumerate(actions) if is_let_go(a) and a.item == item]
        for begun in (step for step, a in enumerate(actions) if is_brought(a) and a.item == item):
            ended = next((end for end in ends if end > begun), None)
            for var in image.variables.values():
                if var.type.nbytes:
                    yield Life(purpose_of(var), (var.name,), None, var.type.nbytes, begun, ended)


def _versions(module: Module, rank: int, stage: int, newest: int, actions: Sequence[Action]) -> Iterator[Version]:
    """Yield the versions of the parameters that updates step: the first version of a run, and those that the run makes.
    Batch t reads version t - delay; the last action of that batch that does so retires it."""
    assert module.schedule is not None
    per_batch = module.schedule.microbatches
    # As written for batch 1.
    oldest = min(
        (a.version for a in module.schedule.ranks[rank].batch if a.kind in READERS and a.version is not None), default=1
    )
    last = {
        a.version: i
        for i, a in enumerate(actions)
        if a.kind in READERS and a.version == a.batch(per_batch) + oldest - 1
    }
    written_at = {a.version: i for i, a in enumerate(actions) if a.kind == UPDATE and not a.item}
    if not any(a.kind in READERS for a in actions):
        # What no microbatch reads retires as the next update begins.
        last = {version - 1: i for version, i in written_at.items() if version is not None}
    for name in sorted(stepped_vars(module) & stage_vars(module, stage).keys()):
        for version, written in ((newest, BEFORE), *((v, i) for v, i in written_at.items() if v is not None)):
            yield Version(name, version, version % module.vars[name].versions, written, last.get(version))


def _on_gpu(module: Module, rank: int) -> bool:
    place = module.rank_devices()[rank]
    return module.cluster is not None and any(d.name == place and d.kind == "cuda" for d in module.cluster.devices)
