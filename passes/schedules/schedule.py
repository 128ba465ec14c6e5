"""Choose who computes which microbatch when: the pass `schedule`. In: a module split into stage graphs. Out: the same
with a Schedule of F, B, W, U.

A schedule is data. For every stage it has the list of computations run once at the start and the list run once per
batch. Both are written as for batch 1, where the m microbatches of the batch are m .. 2m-1 (ir/schedule.py). Each file
beside this one has one schedule; packs/ has those of several stages on a rank. There d is the number of stages, s the
stage, and w = d-1-s. The times of a forward and a backward are tf and tb; tw is the part of W in tb, where it is apart.

Backwards run in microbatch order in all schedules. So gradients are summed in the same order, and results can be
compared bit by bit. A new schedule is one file, one row of SCHEDULES, and one name in ir/schedule_names.py. Whether
order and delay fit together is not decided here but by the checker.

A stage on several devices has a rank for each. They make up teams (`Mesh.teams`), mostly of one rank, and the
microbatches of a batch are shared out among these (dealing.py): each team runs the order of the schedule, and leaves
out what is not its own. All ranks of a team do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from penstock.ir.action_kinds import BACKWARD, FORWARD, UPDATE, WEIGHTS
from penstock.ir.batch_shares import updating_stages
from penstock.ir.graph import Module
from penstock.ir.schedule import MOST_MICROBATCHES, PER_BATCH, Action, Program, Schedule
from penstock.ir.schedule_names import NAMES, PACKED, TRAINING
from penstock.support.errors import UsageError

from . import (
    delayed_2bw,
    eager_2bw,
    flush_1f1b,
    forward,
    gpipe,
    zero_bubble,
)
from .dealing import Shares, deal, equal_shares, forwards_ahead, shares_of, weights_behind
from .kind import PackKind, PackPlace, PipelinePlace, ScheduleKind
from .late_updates import update_late
from .packs import interleaved, interleaved_2bw, wrap, wrap_2bw, zero_bubble_v

SCHEDULES: dict[str, ScheduleKind] = {
    "1f1b": flush_1f1b.KIND,
    "gpipe": gpipe.KIND,
    "2bw": delayed_2bw.KIND,
    "eager-2bw": eager_2bw.KIND,
    "zb-1f1b": zero_bubble.KIND,
    "forward": forward.KIND,
}
PACK_SCHEDULES: dict[str, PackKind] = {
    "interleaved": interleaved.KIND,
    "zb-v": zero_bubble_v.KIND,
    "interleaved-2bw": interleaved_2bw.KIND,
    "wrap": wrap.KIND,
    "wrap-2bw": wrap_2bw.KIND,
}
assert tuple(PACK_SCHEDULES) == PACKED, (tuple(PACK_SCHEDULES), PACKED)
assert tuple(SCHEDULES) == NAMES, (tuple(SCHEDULES), NAMES)
assert all(kind.trains == (name in TRAINING) for name, kind in SCHEDULES.items())
# Schedules that compute the same as plain training. Those that are one update late run only on request.


def splits_backward(kind: str) -> bool:
    """Return whether a schedule runs weight gradients apart."""
    row = _row(kind)
    return row is not None and row.splits


def delay_of(kind: str) -> int:
    """Return how many updates the weights of a microbatch are behind under a schedule; 0 under one that is unknown."""
    row = _row(kind)
    return 0 if row is None else row.delay


def _row(kind: str) -> ScheduleKind | PackKind | None:
    return SCHEDULES.get(kind) or PACK_SCHEDULES.get(kind)


def single_like(kind: str) -> str:
    """Return the first schedule of one stage on a rank that computes what this one does: that of the same delay."""
    return next(name for name in TRAINING if SCHEDULES[name].delay == delay_of(kind))


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Options of `schedule`. `kind` is a row of SCHEDULES or PACK_SCHEDULES; `microbatches` a batch must be as many as
    autodiff averaged over. `shares` are how many of them each team runs, stage by stage: as many each as can be if not
    given."""

    kind: str = "1f1b"
    microbatches: int = 1
    shares: tuple[int, ...] = ()


def build_schedule(kind: str, stages: int, microbatches: int, shares: Shares = ()) -> Schedule:
    """Return the schedule of a uniform pipeline in which every stage has forward, backward and update. Without `shares`
    it has one rank per stage."""
    row = SCHEDULES.get(kind)
    if row is None:
        raise UsageError(f"unknown schedule {kind!r}, expected one of {', '.join(SCHEDULES)}", where="schedule")
    _check_size(stages, microbatches)
    dealt = [deal(share) for share in shares or [(microbatches,)] * stages]
    programs = [
        _own_part(row.order(PipelinePlace(stage, ahead, behind), microbatches), set(numbers), microbatches)
        for stage, columns in enumerate(zip(dealt, forwards_ahead(dealt), weights_behind(dealt), strict=True))
        for numbers, ahead, behind in zip(*columns, strict=True)
    ]
    return Schedule(kind, microbatches, dict(enumerate(programs)))


def build_packs(kind: str, packs: Sequence[tuple[int, ...]], microbatches: int, share: Sequence[int] = ()) -> Schedule:
    """Return the schedule of ranks that run several stages each. `packs` are the stages of one pipeline's ranks; with
    `share` there are several pipelines beside each other, with so many microbatches each."""
    row = PACK_SCHEDULES.get(kind)
    if row is None:
        what = f"schedule {kind} runs one stage on a rank, rank 0 has {len(packs[0])}"
        raise UsageError(what, where="schedule", hint=f"use {' or '.join(PACK_SCHEDULES)}")
    _check_size(sum(map(len, packs)), microbatches)
    expected = row.packs(len(packs), len(packs[0]))
    if tuple(packs) != expected:
        listed = " / ".join(" ".join(map(str, stages)) for stages in expected)
        raise UsageError(f"schedule {kind} needs the stages {listed} on its ranks", where="schedule")
    share = share or (microbatches,)
    _check_shares(kind, len(packs), share)
    dealt = deal(share)
    programs = [
        _with_numbers(row.order(PackPlace(place, len(packs), stages), len(numbers)), numbers, microbatches)
        for place, stages in enumerate(packs)
        for numbers in dealt
    ]
    return Schedule(kind, microbatches, dict(enumerate(programs)))


def _check_shares(kind: str, ranks: int, share: Sequence[int]) -> None:
    """Refuse shares of pipelines that the schedule has no order for; the hint names what it has an order for."""
    row = PACK_SCHEDULES[kind]
    reason = next((reason for n in share if (reason := row.refused(ranks, n))), "")
    if reason:
        sizes = _legal_sizes(row, ranks, len(share), sum(share))
        beside = f", shared out equally to {len(share)} pipelines" if len(share) > 1 else ""
        ways = [f"give {' or '.join(map(str, sizes))} microbatches{beside}"] if sizes else []
        ways += [f"use schedule {name}" for name in _other_orders(row, ranks, share)][:1]
        raise UsageError(f"schedule {kind} {reason}", where="schedule", hint=", or ".join(ways))


def _other_orders(row: PackKind, ranks: int, share: Sequence[int]) -> Iterator[str]:
    """Yield the schedules of stages dealt round that have an order of such shares: those with the delay of a row, then
    those that drain."""
    for delay in dict.fromkeys((row.delay, 0)):
        for name, other in PACK_SCHEDULES.items():
            if other.delay == delay and not other.folded and all(other.is_legal(ranks, n) for n in share):
                yield name


def _legal_sizes(row: PackKind, ranks: int, pipelines: int, size: int) -> list[int]:
    """Return the size of a batch, if it is legal in equal shares, else the nearest legal sizes below and above."""

    def is_legal(size: int) -> bool:
        return all(row.is_legal(ranks, n) for n in equal_shares(pipelines, size))

    # A legal size is never further up than the fewest that each pipeline may have, and one group more of each.
    most = min(MOST_MICROBATCHES, size + (row.least(ranks) + ranks) * pipelines)
    below = next((n for n in range(size, pipelines - 1, -1) if is_legal(n)), None)
    above = next((n for n in range(size, most + 1) if is_legal(n)), None)
    return list(dict.fromkeys(n for n in (below, above) if n is not None))


def check_several(kind: str, each: int) -> None:
    """Refuse a schedule of several stages on a rank where each rank has one."""
    if kind in PACK_SCHEDULES and each < 2:
        raise UsageError(
            f"schedule {kind} runs several stages on each device, here each has one",
            where="schedule",
            hint=f"use {single_like(kind)}, or put several stages on each, such as --packs 2",
        )


def _with_numbers(program: Program, numbers: Sequence[int], microbatches: int) -> Program:
    """Return the program of a pipeline that runs some microbatches of a batch, written as if there were no others."""

    def numbered(action: Action) -> Action:
        batch, place = divmod(action.mb, len(numbers))
        return action if action.once else action._replace(mb=batch * microbatches + numbers[place])

    return Program(tuple(map(numbered, program.start)), tuple(map(numbered, program.batch)))


def _check_size(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise UsageError(
            f"needs at least one stage and one microbatch, got {stages} and {microbatches}", where="schedule"
        )
    if microbatches > MOST_MICROBATCHES:
        raise UsageError(f"a batch has at most {MOST_MICROBATCHES} microbatches, got {microbatches}", where="schedule")


def _own_part(program: Program, own: Set[int], microbatches: int) -> Program:
    """Return what one rank does of the program of its stage; the update of a batch comes as soon as its own part of the
    batch is done."""

    def kept(actions: Iterable[Action]) -> list[Action]:
        return [a for a in actions if a.kind not in PER_BATCH and a.mb % microbatches in own]

    batch = kept(program.batch)
    done = max((i for i, a in enumerate(batch, 1) if a.kind != FORWARD), default=0)
    updates = [a for a in program.batch if a.kind in PER_BATCH]
    return Program(tuple(kept(program.start)), (*batch[:done], *updates, *batch[done:]))


def _for_all(built: Schedule, teams: Iterable[Iterable[Sequence[int]]]) -> Schedule:
    """Return a schedule that has the program of each team, in order, as one of their ranks. `teams` are the places of
    the ranks of each team, by stage."""
    programs, listed, first = dict[int, Program](), iter(built.ranks.values()), 0
    for stage in teams:
        placed = {first + place: program for team, program in zip(stage, listed, strict=False) for place in team}
        programs |= sorted(placed.items())
        first += len(placed)
    return Schedule(built.name, built.microbatches, programs)


def schedule(module: Module, options: ScheduleOptions) -> Module:
    """Assign the computations to every rank. A stage without a backward, weight gradient or update graph gets no such
    action."""
    result = _of_packs(module, options) if module.packs or options.kind in PACKED else _of_teams(module, options)
    trainable = any(module.stage_graph(s.index, BACKWARD) for s in module.stages)
    row = _row(options.kind)
    assert row is not None
    trains = not isinstance(row, ScheduleKind) or row.trains
    if trains and not trainable:
        raise UsageError(
            f"schedule {options.kind} trains, but no stage has a backward graph",
            where="schedule",
            hint="run autodiff and split first, or use kind=forward",
        )
    parted = any(module.stage_graph(s.index, WEIGHTS) for s in module.stages)
    if parted and not row.splits:
        raise UsageError(
            f"schedule {options.kind} runs whole backwards, but the module has weight gradients apart",
            where="schedule",
            hint="leave out split-backward, or use kind=zb-1f1b",
        )
    if not trains and trainable:
        raise UsageError(
            f"schedule {options.kind} never runs a backward, but the module has backward graphs",
            where="schedule",
            hint="leave out autodiff for inference, or use kind=1f1b",
        )
    result = _with_updaters(module, result.rewrite(lambda a: (a,) if module.stage_graph(a.stage, a.kind) else ()))
    return module.but(schedule=update_late(module, result, row.delay))


def _with_updaters(module: Module, schedule: Schedule) -> Schedule:
    """Return the schedule with the ranks of stages that only update weights of others (training/update_on.py)."""
    ranks = {
        rank: Program((), (Action(UPDATE, stage, 1),))
        for stage in updating_stages(module)
        for rank in module.ranks_of(stage)
    }
    return Schedule(schedule.name, schedule.microbatches, {**schedule.ranks, **ranks})


def _of_teams(module: Module, options: ScheduleOptions) -> Schedule:
    """Return the schedule of ranks that run one stage each."""
    updaters = updating_stages(module)
    teams = [module.mesh_of(s.index).teams() for s in module.stages if s.index not in updaters]
    _check_size(len(teams), options.microbatches)
    shares = shares_of(options.shares, list(map(len, teams)), options.microbatches)
    return _for_all(build_schedule(options.kind, len(teams), options.microbatches, shares), teams)


def _of_packs(module: Module, options: ScheduleOptions) -> Schedule:
    """Return the schedule of ranks that may run several stages."""
    check_several(options.kind, max(map(len, module.packs), default=1))
    updaters = {(stage,) for stage in updating_stages(module)}
    packs = [pack for pack in dict.fromkeys(module.rank_packs()) if pack not in updaters]
    teams = [module.mesh_of(stages[0]).teams() for stages in packs]
    shares = {*shares_of(options.shares, list(map(len, teams)), options.microbatches)}
    if len(shares) > 1:
        what = f"schedule {options.kind} runs whole pipelines beside each other, and shares differ between stages"
        raise UsageError(what, where="schedule", hint="give every stage the same shares, or use 1f1b")
    return _for_all(build_packs(options.kind, packs, options.microbatches, shares.pop()), teams)
