"""Optimiser state in chunks: what is in each, and the actions that move them while a stage is updated.

In: a stage with a rank or ranks of its own. Out: the chunks of its state, and its program with an update in parts:

    CI:c0 CI:c1 CI:c2 .. U:c0 CO:c0 U:c1 CO:c1 L:c0 CI:c3 U:c2 CO:c2 L:c1 CI:c4 .. U .. L:c8 L:c9

At most three chunks are on the device at once: one that comes, one that is updated, one that goes. The first three
come during computations, those that wait for their CO at the end of a batch are let go of during those of the next.

A chunk has parameters in the order of the update. Parameters whose new values cannot be computed apart are in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.ir.action_kinds import COPY_IN, COPY_OUT, LET_GO, UPDATE
from penstock.ir.graph import STATE, Module, touched_vars
from penstock.ir.memory.update_parts import chunk_item, clusters
from penstock.ir.schedule import COMPUTE, HANDS, RECEIVES, Action, Program, Schedule

# The chunks on the device at once, and how many there are of a stage with many parameters.
_RESIDENT, _MANY = 3, 16
# Copies of less than that do not have the bandwidth of a disk.
_LEAST_BYTES = 4 << 20
# Chunks of a stage with fewer bytes than that.
_FEW = 6
# A parameter of so small a share of a chunk joins the one before it in any case: a chunk of its own would be one of the
# three.
_SMALL = 4


def movable_state(module: Module, stage: int) -> list[str]:
    """List the optimiser state of a stage that its update alone touches."""
    kinds = ("read", "write", "accum", "take", "put")
    others = {
        name for kind in COMPUTE if kind != UPDATE for name in touched_vars(module.stage_graph(stage, kind), *kinds)
    }
    mine = touched_vars(module.stage_graph(stage, UPDATE), *kinds)
    return [
        name
        for name, var in module.vars.items()
        if var.role == STATE and var.stage == stage and name in mine and name not in others
    ]


def chunks_of(module: Module, stage: int) -> list[list[str]]:
    """Return the variables of each chunk of a stage's state; none where all would be on the device at once."""
    update, state = module.stage_graph(stage, UPDATE), movable_state(module, stage)
    if update is None or not state:
        return []
    groups = clusters(update, state)
    sizes = [sum(module.local_type(module.vars[name].type, stage).nbytes for name in names) for names in groups]
    total = sum(sizes)
    most = max(total // _MANY, min(_LEAST_BYTES, total // _FEW))
    chunks: list[list[str]] = []
    held: list[int] = []
    # What small parameters have added to the last chunk beyond its size.
    beyond = 0
    for names, size in zip(groups, sizes, strict=True):
        fits = bool(held) and held[-1] + size <= most
        if chunks and (fits or beyond + size <= most // _SMALL):
            chunks[-1] += names
            held[-1] += size
            beyond += 0 if fits else size
        else:
            chunks.append([*names])
            held.append(size)
            beyond = 0
    at_once = max((sum(held[i : i + _RESIDENT]) for i in range(len(held))), default=0)
    return chunks if at_once < total else []


def with_chunks(module: Module, stage: int, chunks: Sequence[Sequence[str]], home: str) -> Module:
    """Return the module with the state of a stage at home in a space, in chunks, and the actions that move it."""
    assert module.schedule is not None
    schedule, variables = module.schedule, dict(module.vars)
    for number, names in enumerate(chunks):
        variables |= {name: replace(variables[name], home=home, chunk=number) for name in names}
    ranks = {
        rank: _in_parts(program, stage, len(chunks)) if stage in schedule.stages_of(rank) else program
        for rank, program in schedule.ranks.items()
    }
    return module.but(vars=variables, schedule=Schedule(schedule.name, schedule.microbatches, ranks))


def _in_parts(program: Program, stage: int, count: int) -> Program:
    """Return the program of a rank with an update in so many parts, and the moves of their chunks."""
    batch = program.batch
    place = next(i for i, a in enumerate(batch) if a.kind == UPDATE and a.stage == stage)
    update = batch[place]
    # An update that stands in the list of the next batch comes before that batch's computations. What leaves and what
    # comes has the batches before and after it, as written there.
    between = (-1, place) if update.mb else (place, len(batch))
    moving, listed = middle_of(batch, *between), list[Action]()
    for i in range(len(batch) + 1):
        if i == moving:
            listed += [_move(LET_GO, stage, 0, number) for number in range(max(0, count - _RESIDENT), count)]
            listed += [_move(COPY_IN, stage, 1, number) for number in range(min(_RESIDENT, count))]
        listed += _parts(update, count) if i == place else ()
        listed += batch[i : i + 1]
    return Program(program.start, tuple(listed))


def _parts(update: Action, count: int) -> Iterator[Action]:
    """Yield the parts of an update, and the moves between them. A chunk is let go of when the one after it is updated:
    by then its copy out has had some time."""
    for number in range(count):
        yield update._replace(item=chunk_item(number))
        yield _move(COPY_OUT, update.stage, update.mb, number)
        if number and number + _RESIDENT - 1 < count:
            yield _move(LET_GO, update.stage, update.mb, number - 1)
            yield _move(COPY_IN, update.stage, update.mb, number + _RESIDENT - 1)


def _move(kind: str, stage: int, batch: int, chunk: int) -> Action:
    return Action(kind, stage, batch, item=chunk_item(chunk))


def middle_of(actions: Sequence[Action], first: int, last: int) -> int:
    """Return the place before the middle one of the computations between two places, and before what it receives."""
    between = [i for i in range(first + 1, last) if actions[i].kind in COMPUTE]
    return ahead_of_receives(actions, between[len(between) // 2] if between else last, first + 1)


def ahead_of_receives(actions: Sequence[Action], at: int, first: int = 0) -> int:
    """Return the place of the first receive of those that stand in front of a place at once, from `first` on."""
    while at > first and actions[at - 1].kind in (*RECEIVES, *HANDS):
        at -= 1
    return at
