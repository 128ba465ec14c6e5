"""Weights in two versions, in another memory space while the rank computes with others: the moves of them.

In: the program of a rank that runs several stages, in a schedule that begins a batch before the last one ends. Out: the
same with the moves of weights, each of which names a version. Of batch t of stage 2, with version t:

    2CI2@1:w  2F4@1 2F5@1 ..  2L2@1:w          a visit of forwards
    2CI2@1:w  2B4@1 2B5@1 ..  2L2@1:w          a visit of backwards
    2CI2@2:w  2CI2@3:w 2U2@3  2L2@2:w 2CO2@3:w ..  2L2@3:w

Forwards of a batch stand between backwards of the one before, so each kind has visits of its own: runs of computations
of one stage and batch. Weights come in the middle of the visit before of that kind, and go behind the last computation,
as nothing changed them. Where forwards and backwards of a batch follow each other closely, their stays are one.

An update reads the newest version and makes the next one. The newest comes in the middle of the visit that ends with
the update; for the next there is room from the update until its copy is at home, in the middle of the next visit.
Both versions of a stage are on the device around its update alone, or where forwards and backwards meet at that stage.

Four copies of all weights move per batch where a stage runs all microbatches of it in one visit: in for F, for B and
for U, out after U.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.ir.action_kinds import COPY_IN, COPY_OUT, FORWARD, LET_GO, UPDATE, WEIGHTS_ITEM
from penstock.ir.graph import Module
from penstock.ir.memory.items import stage_images
from penstock.ir.schedule import READERS, Action, Program
from penstock.passes.memory.chunks import ahead_of_receives
from penstock.support.errors import UsageError

from .gradients import put_gradients

# The lists that are looked at behind each other, and the one of them whose moves are taken. A stay reaches from one
# visit into the next, and a visit is within two lists: three on each side are enough for all that are taken.
_LISTS, _TAKEN = 7, 3


@dataclass(slots=True)
class _Stay:
    """A stay of a version of a stage's weights on the device: it comes in front of one place, goes behind another."""

    stage: int
    batch: int
    version: int
    comes: int
    goes: int

    def moved(self, kind: str) -> Action:
        return Action(kind, self.stage, self.batch, self.version, item=WEIGHTS_ITEM)


@dataclass(frozen=True, slots=True)
class _Visit:
    """A run of computations of one stage and batch, by their places; an update is one by itself."""

    stage: int
    batch: int
    version: int
    places: tuple[int, ...]
    updates: bool = False

    @property
    def middle(self) -> int:
        return self.places[len(self.places) // 2]


# Moves by place: those in front of the action there, and those behind it.
_Moves = tuple[dict[int, list[Action]], dict[int, list[Action]]]


def with_versions_moved(module: Module, program: Program, stages: Collection[int]) -> Program:
    """Insert the moves of the weights and gradients of some stages."""
    assert module.schedule is not None
    batch, m = program.batch, module.schedule.microbatches
    moving = {stage for stage in stages if WEIGHTS_ITEM in stage_images(module, stage)}
    unrolled = [action.shifted(k, m) for k in range(_LISTS) for action in batch]
    before, behind = _moves_of_weights(unrolled, moving, m, len(batch))
    first = _TAKEN * len(batch)
    moves: _Moves = ({}, {})
    for of_all, of_list in zip((before, behind), moves, strict=True):
        for place in range(len(batch)):
            of_list[place] = [action.shifted(-_TAKEN, m) for action in of_all.get(first + place, ())]
    put_gradients(module, batch, stages, *moves)
    listed = _listed(batch, moves)
    return Program(_started(program, listed, m), tuple(listed))


def _listed(batch: Sequence[Action], moves: _Moves) -> list[Action]:
    before, behind = moves
    return [
        action
        for place, middle in enumerate(batch)
        for action in (*before.get(place, ()), middle, *behind.get(place, ()))
    ]


def _started(program: Program, listed: Sequence[Action], m: int) -> tuple[Action, ...]:
    """Return the start of the program with what moves then: what lists in front of the first one would do for batches
    that are run."""
    start: list[Action] = []
    waiting = list(program.start)
    most = max(action.batch(m) for action in listed)
    for back in range(most - 1, 0, -1):
        for action in (action.shifted(-back, m) for action in listed if action.batch(m) > back):
            if action.item == WEIGHTS_ITEM:
                start.append(action)
            elif action.item:
                # Other items have their moves in the start already.
                continue
            elif action in waiting:
                at = waiting.index(action) + 1
                start += waiting[:at]
                waiting = waiting[at:]
            else:
                raise UsageError(
                    f"the schedule does not begin with {action}, as it goes on",
                    where="offload",
                    hint="--schedule interleaved, or --offload state",
                )
    return (*start, *waiting)


def _moves_of_weights(actions: Sequence[Action], moving: Collection[int], m: int, length: int) -> _Moves:
    """Return the moves of weights of a rank, whose lists are of such a length. What goes is ahead of what comes."""
    forwards = _visits(actions, moving, m, lambda action: action.kind == FORWARD)
    backwards = _visits(actions, moving, m, lambda action: action.kind in (*READERS, UPDATE) and action.kind != FORWARD)
    makers = {(visit.stage, visit.version): visit.places[0] for visit in backwards if visit.updates}
    moves: _Moves = ({}, {})
    before, behind = moves
    for stay in _joined([stay for visits in (forwards, backwards) for stay in _stays(actions, visits, makers)]):
        behind.setdefault(stay.goes, []).append(stay.moved(LET_GO))
        before.setdefault(stay.comes, []).append(stay.moved(COPY_IN))
    for last, visit, following in zip(backwards, backwards[1:], backwards[2:], strict=False):
        if visit.updates:
            # A list has no actions of the batch before the one that its first updates belong to.
            _put_update(actions, (last, visit, following), (visit.batch + 1) * length - 1, moves)
    for listed in before.values():
        listed.sort(key=lambda action: action.kind != LET_GO)
    return moves


def _visits(
    actions: Sequence[Action], moving: Collection[int], m: int, belongs: Callable[[Action], bool]
) -> list[_Visit]:
    visits: list[_Visit] = []
    for place, action in enumerate(actions):
        if action.stage not in moving or action.item or not belongs(action):
            continue
        assert action.version is not None
        visit = _Visit(action.stage, action.batch(m), action.version, (place,), action.kind == UPDATE)
        if visits and not visit.updates and _is_same(visits[-1], visit):
            visit = _Visit(visit.stage, visit.batch, visit.version, (*visits.pop().places, place))
        visits.append(visit)
    return visits


def _is_same(one: _Visit, other: _Visit) -> bool:
    return (one.stage, one.batch, one.updates) == (other.stage, other.batch, other.updates)


def _stays(
    actions: Sequence[Action], visits: Sequence[_Visit], makers: Mapping[tuple[int, int], int]
) -> Iterator[_Stay]:
    """Yield the stays of visits that read: each begins in the middle of the visit before that reads, or behind the
    update that makes its version. `makers` are the places of updates."""
    readers = [visit for visit in visits if not visit.updates]
    for k, visit in enumerate(readers):
        comes = ahead_of_receives(actions, readers[k - 1].middle if k else visit.places[0])
        comes = max(comes, makers.get((visit.stage, visit.version), -1) + 1)
        yield _Stay(visit.stage, visit.batch, visit.version, comes, visit.places[-1])


def _joined(stays: Sequence[_Stay]) -> list[_Stay]:
    """Join the stays of the same weights that touch each other."""
    joined: list[_Stay] = []
    last: dict[tuple[int, int], _Stay] = {}
    for stay in sorted(stays, key=lambda stay: stay.comes):
        earlier = last.get((stay.stage, stay.batch))
        if earlier is not None and stay.comes <= earlier.goes + 1:
            earlier.goes = max(earlier.goes, stay.goes)
        else:
            last[stay.stage, stay.batch] = stay
            joined.append(stay)
    return joined


def _put_update(actions: Sequence[Action], visits: tuple[_Visit, _Visit, _Visit], latest: int, moves: _Moves) -> None:
    """Add the moves around an update, between two visits: of what it reads, and of what it makes, which goes behind the
    `latest` place at most."""
    before, behind = moves
    last, update, following = visits
    (place,) = update.places
    old, new = (
        _Stay(update.stage, update.batch, update.version - 1, ahead_of_receives(actions, last.middle), place),
        _Stay(update.stage, update.batch, update.version, place, min(following.middle, latest)),
    )
    before.setdefault(old.comes, []).append(old.moved(COPY_IN))
    before.setdefault(new.comes, []).append(new.moved(COPY_IN))
    behind.setdefault(old.goes, []).extend((old.moved(LET_GO), new.moved(COPY_OUT)))
    if len(following.places) > 1 and not following.updates and new.goes < latest:
        before.setdefault(ahead_of_receives(actions, new.goes), []).append(new.moved(LET_GO))
    else:
        behind.setdefault(new.goes, []).append(new.moved(LET_GO))
