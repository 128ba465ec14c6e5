"""Saved sets in another space between forward and backward: the saved sets that `offload` moves, and when.

In: a wired schedule. Out: stages whose saved sets have a home, and the actions that move them:

    F CO .. L .. CI .. B          in the program of a rank:   0F4 0CO4:a0 0B1 0L4:a0 .. 0CI4:a0 0F7 0B4

A program says when each set is used next, also over the seam between two batches. A set whose microbatch goes backward
soon stays. Another goes out during the computation that follows its forward, and comes in during the one ahead of its
backward. So one or two sets that go and two that come are on the device, however many microbatches are in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.ir.action_kinds import BACKWARD, COPY_IN, COPY_OUT, FORWARD, LET_GO, SAVED_ITEM
from penstock.ir.graph import Module
from penstock.ir.memory.saved_sets import moves_saved, saved_set
from penstock.ir.schedule import COMPUTE, HANDS, RECEIVES, SENDS, Action, Program, Schedule

# A set is away during the computations between F and B but for the first, when it goes, and the last, when it comes.
_FEWEST_BETWEEN = 3
# The lists of batches that are looked at: a backward follows its forward within two.
_LISTS = 3
# The batches of a run in which each microbatch has to have all of its moves.
_RUN = 5
_MOVED = ((FORWARD, ""), (COPY_OUT, SAVED_ITEM), (LET_GO, SAVED_ITEM), (COPY_IN, SAVED_ITEM), (BACKWARD, ""))


# Numbers of microbatches in their batch, by stage.
Numbers = Mapping[int, Collection[int]]


def with_saved_sets(module: Module, homes: Mapping[int, str], moving: Numbers | None = None) -> Module:
    """Return the module with the saved sets of some stages at home in a space, and the actions that move them: those of
    all microbatches, or of some by number. Stages where nothing is away long enough stay as they are."""
    assert module.schedule is not None
    stages = tuple(replace(stage, home=homes.get(stage.index, stage.home)) for stage in module.stages)
    away, schedule = module.but(stages=stages), module.schedule
    for stage in homes:
        if saved_set(away, stage) is not None:
            schedule = _moved(schedule, stage, None if moving is None else moving.get(stage, ()))
    away_from = {a.stage for a in schedule.actions() if a.item == SAVED_ITEM}
    stages = tuple(stage if stage.index in away_from else replace(stage, home="") for stage in away.stages)
    return module.but(stages=stages, schedule=schedule)


def without_saved_sets(module: Module, stages: Collection[int]) -> Module:
    """Return the module with the saved sets of some stages on the device."""
    assert module.schedule is not None
    return without_moves(
        module, {(stage, number) for stage in stages for number in range(module.schedule.microbatches)}
    )


def without_moves(module: Module, staying: Collection[tuple[int, int]]) -> Module:
    """Return the module with some sets on the device, by stage and number in the batch. A stage of which nothing moves
    has no home."""
    schedule = module.schedule
    if not staying or schedule is None:
        return module
    m = schedule.microbatches
    moving = schedule.rewrite_ranks(
        lambda _, action: () if moves_saved(action) and (action.stage, action.mb % m) in staying else (action,)
    )
    away_from = {action.stage for action in moving.actions() if moves_saved(action)}
    stages = tuple(stage if stage.index in away_from else replace(stage, home="") for stage in module.stages)
    return module.but(stages=stages, schedule=moving)


@dataclass(frozen=True, slots=True)
class AwaySets:
    """The sets of the same stages and microbatches that some ranks have elsewhere, by stage and number in the batch:
    those that are away during most computations first."""

    ranks: tuple[int, ...]
    sets: tuple[tuple[int, int], ...]


def longest_away(module: Module) -> list[AwaySets]:
    """List the sets that are elsewhere. Replicas have other microbatches, the ranks of a team the same."""
    assert module.schedule is not None
    schedule, groups = module.schedule, dict[tuple[tuple[int, int], ...], list[int]]()
    for rank in schedule.ranks:
        waits, gone, computed = dict[tuple[int, int], int](), dict[tuple[int, int], int](), 0
        for a in schedule.expand(rank, _LISTS):
            computed += a.kind in COMPUTE
            if a.item == SAVED_ITEM and a.kind == COPY_OUT:
                gone[a.stage, a.mb] = computed
            elif a.item == SAVED_ITEM and a.kind == COPY_IN:
                key = a.stage, a.mb % schedule.microbatches
                waits[key] = max(waits.get(key, 0), computed - gone[a.stage, a.mb])
        if waits:
            groups.setdefault(tuple(sorted(waits, key=lambda key: (-waits[key], key))), []).append(rank)
    return [AwaySets(tuple(ranks), sets) for sets, ranks in groups.items()]


def _moved(schedule: Schedule, stage: int, numbers: Collection[int] | None) -> Schedule:
    m = schedule.microbatches
    moving = range(m) if numbers is None else numbers
    ranks = {
        rank: _with_moves(program, stage, m, moving) if stage in schedule.stages_of(rank) else program
        for rank, program in schedule.ranks.items()
    }
    return Schedule(schedule.name, m, ranks)


def _with_moves(program: Program, stage: int, per_batch: int, moving: Collection[int]) -> Program:
    """Return a program with the moves of microbatches of a batch that are away long enough. One that would be moved in
    part, at the begin of a run, stays."""
    numbers = set(moving)
    while numbers:
        moved = _Lists(program, stage, per_batch, numbers).inserted()
        if not (broken := set(_moved_in_part(moved, stage, per_batch))):
            return moved
        numbers -= broken
    return program


def _moved_in_part(program: Program, stage: int, per_batch: int) -> Iterator[int]:
    """Yield the numbers in their batch of microbatches that have some of their moves, or in another order."""
    seen: dict[int, list[tuple[str, str]]] = {}
    for action in Schedule("", per_batch, {0: program}).expand(0, _RUN):
        if action.stage == stage and (action.kind, action.item) in _MOVED:
            seen.setdefault(action.mb, []).append((action.kind, action.item))
    for microbatch, kinds in seen.items():
        if tuple(kinds) not in (_MOVED, (_MOVED[0], _MOVED[-1])):
            yield microbatch % per_batch


@dataclass(slots=True)
class _Insertions:
    """The actions to put before and behind those of a list, by their places."""

    before: dict[int, list[Action]] = field(default_factory=dict)
    behind: dict[int, list[Action]] = field(default_factory=dict)

    def into(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        listed: list[Action] = []
        for i, action in enumerate(actions):
            listed += [*self.before.get(i, ()), action, *self.behind.get(i, ())]
        return tuple(listed)


class _Lists:
    """The list of the start and those of some batches, one after the other, and where moves stand in them."""

    def __init__(self, program: Program, stage: int, per_batch: int, numbers: Collection[int]) -> None:
        self._program, self._stage, self._per_batch, self._numbers = program, stage, per_batch, numbers
        self._offset = len(program.start)
        shifted = (a.shifted(batch, per_batch) for batch in range(_LISTS) for a in program.batch)
        self._actions = [*program.start, *shifted]
        self._start, self._batch = _Insertions(), _Insertions()

    def inserted(self) -> Program:
        """Return the program with the moves of forwards in the list of a batch, and in the start."""
        length = len(self._program.batch)
        for at in (*range(self._offset, self._offset + length), *range(self._offset)):
            action = self._actions[at]
            mine = (action.kind, action.stage) == (FORWARD, self._stage)
            if mine and action.mb % self._per_batch in self._numbers:
                self._move(at, action)
        return Program(self._start.into(self._program.start), self._batch.into(self._program.batch))

    def _move(self, at: int, forward: Action) -> None:
        """Put the moves of a forward where they belong. Lists of batches have theirs by forwards in them."""
        actions = self._actions
        ends = (BACKWARD, self._stage, forward.mb)
        after = range(at + 1, len(actions))
        back = next((i for i in after if (actions[i].kind, actions[i].stage, actions[i].mb) == ends), None)
        between = [] if back is None else [i for i in range(at + 1, back) if actions[i].kind in COMPUTE]
        if len(between) < _FEWEST_BETWEEN:
            return
        coming = between[-1]
        while actions[coming - 1].kind in (*RECEIVES, *HANDS):
            coming -= 1
        starts = at < self._offset
        for place, kind, behind in (
            (self._last_send(at), COPY_OUT, True),
            (self._last_send(between[0]), LET_GO, True),
            (coming, COPY_IN, False),
        ):
            self._put(place, Action(kind, self._stage, forward.mb, item=SAVED_ITEM), behind=behind, starts=starts)

    def _put(self, place: int, move: Action, *, behind: bool, starts: bool) -> None:
        if place < self._offset:
            into = self._start
        else:
            batch, place = divmod(place - self._offset, len(self._program.batch))
            move, into = move._replace(mb=move.mb - batch * self._per_batch), self._batch
        if starts and into is self._batch:
            # The forward of the same number in the list of a batch has it there, but for an L that comes sooner.
            listed = (move for moves in self._batch.behind.values() for move in moves)
            if move.kind != LET_GO or move in listed:
                return
            place, into = self._offset - 1, self._start
        if move.mb >= 0:
            (into.behind if behind else into.before).setdefault(place, []).append(move)

    def _last_send(self, at: int) -> int:
        """Return the place of the last send that follows an action at once, so that no peer waits for a copy."""
        while at + 1 < len(self._actions) and self._actions[at + 1].kind in SENDS:
            at += 1
        return at
