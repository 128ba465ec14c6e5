"""Run an update on which ranks have to agree as late as is legal, so that no rank waits for the rest.

In: the schedule of F, B (and W) and U that a generator made. Out: the same with the sum of gradients over the teams of
a stage (AR), P and N right behind the last backward of a batch. Under a schedule with a delay, U stands right before
the first forward that reads the version it makes. By then the results of other stages have arrived long ago. With a
delay of one batch that is within the batch after (ir/schedule.py). Without a delay U comes right behind, as before.

An update that waits needs the gradients of its batch kept apart from those of the next; weight-versions sees to that.
Modules without AR, P and N are left alone, and so are stages whose update takes nothing from others.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.ir.action_kinds import FORWARD, NORM_PARTS, PARTS, SUM, UPDATE
from penstock.ir.graph import Module, summed_vars
from penstock.ir.schedule import ADDERS, BATCH_ORDER, Action, Program, Schedule

# The actions before the update of a batch that make it the same on all ranks.
_AGREEING = tuple(kind for kind in BATCH_ORDER if kind != UPDATE)


def update_late(module: Module, schedule: Schedule, delay: int) -> Schedule:
    """Return the schedule with AR, P and N of the stages that have them, and with updates as late as these need."""
    teams = schedule.teams()
    summing = {s.index for s in module.stages if len(teams[s.index]) > 1 and summed_vars(module, s.index)}
    kinds = {
        s.index: [k for k in _AGREEING if (s.index in summing if k == SUM else module.stage_graph(s.index, k))]
        for s in module.stages
    }
    waits = {s.index for s in module.stages if s.index in summing or _waits(module, s.index)}
    # A stage without forwards has no weights that one reads.
    waiting = {stage for stage in waits if module.stage_graph(stage, FORWARD)} if delay else set()
    ranks = {
        rank: _agreeing(program, schedule.microbatches, delay, kinds, waiting)
        for rank, program in schedule.ranks.items()
    }
    return Schedule(schedule.name, schedule.microbatches, ranks)


def sum_late(schedule: Schedule, delay: int) -> Schedule:
    """Return the schedule with late sums where there is no module. Every stage on several ranks sums up its gradients,
    and nothing else waits for other ranks."""
    teams = schedule.teams()
    summing = {stage for stage, listed in teams.items() if len(listed) > 1}
    kinds = {stage: [SUM] if stage in summing else [] for stage in teams}
    waiting = summing if delay else set()
    ranks = {
        rank: _agreeing(program, schedule.microbatches, delay, kinds, waiting)
        for rank, program in schedule.ranks.items()
    }
    return Schedule(schedule.name, schedule.microbatches, ranks)


def _waits(module: Module, stage: int) -> bool:
    """Return whether an update takes what another stage hands out."""
    update = module.stage_graph(stage, UPDATE)
    own_names = {
        v.name for kind in (PARTS, NORM_PARTS) if (graph := module.stage_graph(stage, kind)) for v in graph.outs
    }
    return update is not None and any(v.name not in own_names for v in update.ins)


def _agreeing(program: Program, m: int, delay: int, kinds: Mapping[int, list[str]], waiting: set[int]) -> Program:
    """Return one rank's lists, which are written for batch 1, with AR, P and N. U of stages that wait stands where its
    version is needed."""
    packed = len({a.stage for a in program.batch}) > 1
    batch = _in_turn(program, delay, kinds, waiting) if packed else _in_place(program, kinds, waiting)
    for update in (a for a in program.batch if a.kind == UPDATE and a.stage in waiting):
        _insert_late(batch, update, m, delay, {*ADDERS, *kinds[update.stage]})
    return Program(program.start, tuple(batch))


def _in_place(program: Program, kinds: Mapping[int, list[str]], waiting: set[int]) -> list[Action]:
    """Return the batch of a rank with one stage, without updates that wait. AR, P and N stand where U stood."""
    batch: list[Action] = []
    for action in program.batch:
        if action.kind == UPDATE:
            batch += [Action(kind, action.stage, action.mb) for kind in kinds[action.stage]]
        batch += [] if action.kind == UPDATE and action.stage in waiting else [action]
    return batch


def _in_turn(program: Program, delay: int, kinds: Mapping[int, list[str]], waiting: set[int]) -> list[Action]:
    """Return the batch of a rank with several stages, without updates that wait. AR of a stage comes behind its last
    gradient. P of all stages come behind all, then N: stages of a rank take each other's results. Without a delay U of
    all come then; with one they stay where they are."""
    updates = {a.stage: a for a in program.batch if a.kind == UPDATE}
    last = {a.stage: i for i, a in enumerate(program.batch) if a.kind in ADDERS}
    batch: list[Action] = []
    for i, action in enumerate(program.batch):
        stage = action.stage
        if action.kind != UPDATE or (delay and stage not in waiting):
            batch.append(action)
        if last.get(stage) == i and stage in updates and SUM in kinds[stage]:
            batch.append(Action(SUM, stage, updates[stage].mb))
    batch += [Action(k, a.stage, a.mb) for k in _AGREEING for a in updates.values() if k != SUM and k in kinds[a.stage]]
    return batch if delay else [*batch, *updates.values()]


def _insert_late(batch: list[Action], update: Action, m: int, delay: int, before: set[str]) -> None:
    """Insert an update in front of the first forward that reads its version, behind actions of kinds that come `before`
    it.

    One forward of the stage in this list is the first of its batch. It reads the version that the update of the batch 1
    + delay before made.
    """
    stage = update.stage
    beginning = min((a.mb % m for a in batch if (a.kind, a.stage) == (FORWARD, stage)), default=0)
    at, first = next(
        (i, a) for i, a in enumerate(batch) if (a.kind, a.stage) == (FORWARD, stage) and a.mb % m == beginning
    )
    number = first.mb // m - 1 - delay
    done = max(i for i, a in enumerate(batch) if a.stage == stage and a.kind in before)
    # The beginning of this list is the end of the one before, where all numbers are larger by one. Where forwards run
    # so far ahead that the version cannot exist yet, the update stays in its place. The checker reports the problem.
    in_time = number == 0 or (number == 1 and at > done)
    batch.insert(
        *((at, update._replace(mb=number)) if in_time else (len(batch), update._replace(mb=min(number, 0) + 1)))
    )
