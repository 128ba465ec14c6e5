"""Weights and gradients of the stages of a pack, in another memory space while the rank computes other stages.

In: a wired schedule whose ranks run several stages. Out: parameters and gradients with a home, and the actions that
move them. One batch after the other, that is in the program of a rank:

    CI:w F F F .. L:w             a visit that reads the weights: no copy out, they did not change
    CI:w CI:g B B B U CO:w L:g L:w        a visit that ends with the update

A *visit* is a run of computations of one stage. Weights come in the middle of the visit before, and go in the middle of
the one after, so two stages have theirs on the device at once. A device with room for more keeps more of them until
their next visit (stays.py). That holds over the end of a batch, too. There the next
batch claims once more what is there, and the one before ends its claim: `CI1:w L0:w`. The first batch of a run brings
them.

Gradients come with the first backward and go with the update: they are zero between, so nothing is copied. Where a
stage runs all microbatches of a batch before the next, weights come for F and for B and go after U. The last two stages
of a rank are still there for B, and the first two for F, so of three the middle one never goes. Updates that wait for
other stages are at the end, and bring weights once more.

In a schedule that begins a batch before the last one ends there are two versions of the weights. That is another
file's: versions.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import COPY_IN, COPY_OUT, LET_GO, UPDATE, WEIGHTS_ITEM
from penstock.ir.graph import GRAD, PARAM, REPLICAS, Module, stage_vars, stepped_vars, summed_vars, touched_vars
from penstock.ir.memory.items import stage_images
from penstock.ir.schedule import COMPUTE, READERS, Action, Program, Schedule
from penstock.passes.memory.chunks import ahead_of_receives, middle_of

from .gradients import put_gradients
from .stays import FEWEST, kept_until_next
from .versions import with_versions_moved


@dataclass(frozen=True, slots=True)
class _Visit:
    """A run of computations of one stage, by their places."""

    stage: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stay:
    """A stay of a stage's weights on the device, by the places that it begins and ends in front of."""

    stage: int
    comes: int
    goes: int


def movable_weights(module: Module, stage: int) -> list[str]:
    """List the parameters and gradients that one stage alone touches. Those stay of which there is another number of
    versions than updates make: parameters that none writes, and gradients in two buffers. Gradients that replicas sum
    up stay, too: other ranks read them."""
    summed = summed_vars(module, stage) if module.mesh_of(stage).sizes.get(REPLICAS, 1) > 1 else ()
    touched = [_touched(module, other.index) for other in module.stages if other.index != stage]
    mine, versions = _touched(module, stage), _versions(module, stage)
    return [
        name
        for name, var in module.vars.items()
        if var.role in (PARAM, GRAD)
        and var.stage == stage
        and var.versions == (versions if var.role == PARAM else 1)
        and name in mine
        and name not in summed
        and not any(name in names for names in touched)
    ]


def _versions(module: Module, stage: int) -> int:
    """Return the number of versions of what an update of a stage makes."""
    return max(
        (module.vars[name].versions for name in stepped_vars(module) & stage_vars(module, stage).keys()), default=1
    )


def _touched(module: Module, stage: int) -> set[str]:
    kinds = ("read", "write", "accum", "take", "put")
    return {name for kind in COMPUTE for name in touched_vars(module.stage_graph(stage, kind), *kinds)}


def runs_batch_by_batch(schedule: Schedule) -> bool:
    """Return whether all that belongs to a batch stands in its own list."""
    m = schedule.microbatches
    return all(not p.start and all(a.batch(m) == 1 for a in p.batch if not a.item) for p in schedule.ranks.values())


def with_weights(module: Module, homes: Mapping[int, str], rooms: Mapping[int, int]) -> Module:
    """Return the module with the weights and gradients of some stages at home in a space, and the actions that move
    them. Ranks have `rooms` for the weights of so many stages at once, those that are not named for two. Where some
    have more, weights that go from no rank have no other home."""
    schedule = module.schedule
    assert schedule is not None
    away = _with_homes(module, homes)
    if not runs_batch_by_batch(schedule):
        ranks = {rank: with_versions_moved(away, program, homes) for rank, program in schedule.ranks.items()}
        return away.but(schedule=Schedule(schedule.name, schedule.microbatches, ranks))
    moves = {rank: _Moves(away, p.batch, homes, rooms.get(rank, FEWEST)) for rank, p in schedule.ranks.items()}
    if rooms:
        homes = {stage: home for stage, home in homes.items() if any(stage in one.going for one in moves.values())}
        away = _with_homes(module, homes)
    ranks = {rank: _with_moves(away, program, homes, moves[rank]) for rank, program in schedule.ranks.items()}
    return away.but(schedule=Schedule(schedule.name, schedule.microbatches, ranks))


def _with_homes(module: Module, homes: Mapping[int, str]) -> Module:
    homes_of = {name: home for stage, home in homes.items() for name in movable_weights(module, stage)}
    variables = {name: replace(var, home=homes_of.get(name, var.home)) for name, var in module.vars.items()}
    return module.but(vars=variables)


def _with_moves(module: Module, program: Program, stages: Collection[int], moves: _Moves) -> Program:
    batch = program.batch
    before: dict[int, list[Action]] = {}
    behind: dict[int, list[Action]] = {}
    for place, action in moves.of(stages):
        before.setdefault(place, []).append(action)
    put_gradients(module, batch, stages, before, behind)
    listed: list[Action] = []
    for i in range(len(batch) + 1):
        listed += before.get(i, ())
        listed += batch[i : i + 1]
        listed += behind.get(i, ())
    return Program(program.start, tuple(listed))


# The lists that are looked at behind each other, and the one of them whose moves are taken.
_LISTS, _TAKEN = 5, 2


class _Moves:
    """The moves of weights in the batch list of a rank, that has room for those of so many stages."""

    def __init__(self, module: Module, batch: Sequence[Action], stages: Collection[int], room: int) -> None:
        assert module.schedule is not None
        m = module.schedule.microbatches
        self.batch = batch
        # The place in the lists behind each other where the one in question begins.
        self.first = _TAKEN * len(batch)
        self.actions = [action.shifted(k, m) for k in range(_LISTS) for action in batch]
        self.visits = list(_visits(module, self.actions, stages))
        self.sizes = {visit.stage: stage_images(module, visit.stage)[WEIGHTS_ITEM].stored for visit in self.visits}
        self.stays = sorted(self._stays(room), key=lambda stay: stay.comes)

    @property
    def going(self) -> set[int]:
        """The stages whose weights go in each batch."""
        return {stay.stage for stay in self.stays if self.first < stay.goes <= self.first + len(self.batch)}

    def of(self, stages: Collection[int]) -> Iterator[tuple[int, Action]]:
        """Yield the moves of the weights of these stages, each with the place that it stands in front of.

        Copies out are ahead of what goes, and that of what comes, but at the beginning, where the claim of the batch
        before ends."""
        first, length = self.first, len(self.batch)
        stays = [stay for stay in self.stays if stay.stage in stages]
        for stay in stays:
            if stay.comes < first < stay.goes:
                yield 0, _moved(COPY_IN, stay.stage, 1)
                yield 0, _moved(LET_GO, stay.stage, 0)
        moving = {visit.stage for visit in self.visits}.intersection(stages)
        for place, action in enumerate(self.batch):
            if action.stage in moving and action.kind == UPDATE and not action.item:
                yield place + 1, _moved(COPY_OUT, action.stage, 1)
        for stay in stays:
            if first < stay.goes <= first + length:
                yield stay.goes - first, _moved(LET_GO, stay.stage, 1)
        for stay in stays:
            if first <= stay.comes < first + length:
                yield stay.comes - first, _moved(COPY_IN, stay.stage, 1)

    def _stays(self, room: int) -> Iterator[_Stay]:
        """Yield the stays of weights on the device, in a run whose batches are all like the one in question."""
        lists = range(self.first, self.first + len(self.batch))
        period = [k for k, visit in enumerate(self.visits) if visit.places[0] in lists]
        if not period:
            return
        kept = kept_until_next([self.visits[k].stage for k in period], self.sizes, room)
        here: dict[int, int] = {}
        for k, visit in enumerate(self.visits):
            if visit.stage not in here:
                here[visit.stage] = _ahead_of_visit(self.actions, self.visits, k)
            if (k - period[0]) % len(period) not in kept:
                yield _Stay(visit.stage, here.pop(visit.stage), _ahead_of_visit(self.actions, self.visits, k + 2))
        for stage, comes in here.items():
            yield _Stay(stage, comes, len(self.actions) + 1)


def _ahead_of_visit(actions: Sequence[Action], visits: Sequence[_Visit], k: int) -> int:
    """Return the place where what comes for a visit begins, and what is not needed any more goes."""
    if k > len(visits):
        return len(actions) + 1
    if k == 0:
        return ahead_of_receives(actions, visits[0].places[0])
    return middle_of(actions, visits[k - 1].places[0] - 1, visits[k - 1].places[-1] + 1)


def _visits(module: Module, actions: Sequence[Action], stages: Collection[int]) -> Iterator[_Visit]:
    moving = {stage for stage in stages if WEIGHTS_ITEM in stage_images(module, stage)}
    visit: list[int] = []
    for i, action in enumerate(actions):
        # A backward that reads no weights may yet get an R that does.
        if action.stage not in moving or action.kind not in (*READERS, UPDATE):
            continue
        if visit and actions[visit[-1]].stage != action.stage:
            yield _Visit(actions[visit[0]].stage, tuple(visit))
            visit = []
        visit.append(i)
    if visit:
        yield _Visit(actions[visit[0]].stage, tuple(visit))


def _moved(kind: str, stage: int, batch: int) -> Action:
    return Action(kind, stage, batch, item=WEIGHTS_ITEM)
