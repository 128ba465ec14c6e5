"""Items at home in other memory spaces over a run, and why they go there.

In: a module with a schedule, the times at which its actions end. Out: for a rank its bytes at home after each action,
and for each item that goes: how long it is away, what waits for it then, and what the way takes for a copy of it. An
item goes because it is away for longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.ir.action_kinds import COPY_IN, COPY_OUT, LET_GO, SAVED_ITEM
from penstock.ir.graph import Module
from penstock.ir.memory.items import (
    Image,
    ItemClaims,
    copied_bytes,
    home_bytes,
    resident_bytes,
    stage_images,
    users_of,
    version_read,
)
from penstock.ir.memory.saved_sets import SavedSet, most_sets_back, moves_saved, saved_set
from penstock.ir.memory.walk import actions_of
from penstock.ir.schedule import COPIES, Action


@dataclass(frozen=True)
class Absence:
    """An item of a stage that is away from the device for a time, the longest of a run: in seconds, or in actions where
    these have no times. `until` is the computation that waits for it then. `copy` are the seconds that the way alone
    takes for it in one direction; gradients that come as zeros take none."""

    stage: int
    item: str
    bytes: int
    away: float
    until: str
    copy: float


@dataclass(frozen=True)
class HomeRoom:
    """The items of a rank that have a home in another memory space: their bytes there, the room that all ranks have,
    the most bytes on the device at once, and those that a batch moves in and out together. `course` are the bytes that
    are in use at home after each action of a run."""

    space: str
    bytes: int
    room: int | None
    on_device: int
    moved_per_batch: int
    course: tuple[int, ...] = ()
    absences: tuple[Absence, ...] = ()


# Items by stage and name.
_Items = Mapping[tuple[int, str], Image | SavedSet]


def home_room(module: Module, rank: int, actions: Sequence[Action], ends: Sequence[float]) -> HomeRoom | None:
    """Return what a rank has in another memory space over a run of these actions, which end at these times."""
    assert module.schedule is not None
    pack = module.rank_packs()[rank]
    images = {(stage, item): image for stage in pack for item, image in stage_images(module, stage).items()}
    sets = {(stage, SAVED_ITEM): saved for stage in pack if (saved := saved_set(module, stage)) is not None}
    if not images and not sets:
        return None
    items: _Items = {**images, **sets}
    space = next(iter(items.values())).space
    limit = None if module.cluster is None else module.cluster.space(space, module.rank_devices()[rank]).bytes or None
    return HomeRoom(
        space,
        sum(held.get(rank, 0) for held in home_bytes(module).values()),
        limit,
        max(resident_bytes(module, module.schedule.expand(rank, 2)))
        + sum(
            saved.nbytes * most_sets_back(actions_of(module.schedule, rank, 2), stage)
            for (stage, _), saved in sets.items()
        ),
        sum(copied_bytes(module, rank).values())
        + sum(
            sets[a.stage, a.item].nbytes
            for a in module.schedule.ranks[rank].batch
            if a.kind in COPIES and moves_saved(a)
        ),
        tuple(_course(images.values(), sets, actions)),
        tuple(_absences(module, rank, items, actions, ends)),
    )


def _course(
    images: Iterable[Image], sets: Mapping[tuple[int, str], SavedSet], actions: Sequence[Action]
) -> Iterator[int]:
    """Yield the bytes at home after each action: items always, a saved set from its CO to the first that takes it."""
    always, away = sum(image.stored * image.versions for image in images), set[tuple[int, int]]()
    now = always
    for action in actions:
        saved = sets.get((action.stage, SAVED_ITEM))
        key = action.stage, action.mb
        if saved is not None and moves_saved(action) and action.kind == COPY_OUT:
            away.add(key)
            now += saved.nbytes
        elif saved is not None and key in away and action.kind in saved.users:
            away.remove(key)
            now -= saved.nbytes
        yield now


def _absences(
    module: Module, rank: int, items: _Items, actions: Sequence[Action], ends: Sequence[float]
) -> Iterator[Absence]:
    """Yield the longest time that each item is away, the largest item first."""
    longest: dict[tuple[int, str], tuple[float, str]] = {}
    gone: dict[tuple[int, str, object], float] = {}
    claims = ItemClaims()
    for place, action in enumerate(actions):
        key = action.stage, action.item
        if key not in items or action.kind not in (LET_GO, COPY_IN):
            continue
        if not moves_saved(action) and not claims.change(action):
            # It was there before, and still is.
            continue
        # A saved set comes back for its microbatch, a version for whoever reads it.
        which = (*key, action.mb if moves_saved(action) else action.version)
        if action.kind == LET_GO:
            gone[which] = ends[place]
        elif which in gone:
            away = ends[place] - gone.pop(which)
            if away > longest.get(key, (-1.0, ""))[0]:
                longest[key] = away, _awaits(module, items[key], action, actions[place + 1 :])
    for (stage, item), (away, until) in sorted(longest.items(), key=lambda row: (-items[row[0]].nbytes, row[0])):
        moved = items[stage, item]
        nbytes = moved.nbytes if isinstance(moved, SavedSet) else moved.stored
        yield Absence(stage, item, moved.nbytes, away, until, _seconds(module, rank, moved.space, nbytes))


def _awaits(module: Module, moved: Image | SavedSet, came: Action, later: Sequence[Action]) -> str:
    """Name the first computation that takes an item that came."""
    users = moved.users if isinstance(moved, SavedSet) else users_of(module, came.stage, moved)
    for action in later:
        fits = action.mb == came.mb if moves_saved(came) else came.version in (None, version_read(action))
        if action.stage == came.stage and action.computation in users and fits:
            return str(action)
    return ""


def _seconds(module: Module, rank: int, space: str, nbytes: int) -> float:
    """Return what the way of a rank to a space takes for so many bytes."""
    if module.cluster is None or not nbytes:
        return 0.0
    device = module.rank_devices()[rank]
    way = module.cluster.way(device, module.cluster.space(space, device))
    return way.latency + nbytes / way.bandwidth
