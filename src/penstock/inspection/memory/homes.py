"""Items at home in other memory spaces over a run, and why they go there.

In: a module with a schedule, the times at which its actions end. Out: for each space that a rank has something in, the
bytes there after each action, and how many of them are there alone. For each block that goes: from when to when it is
where. For each item that goes: how long it is away, what waits for it then, and what the way takes for a copy of it. An
item goes because it is away for longer than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.ir.action_kinds import COPY_IN, COPY_OUT, LET_GO, SAVED_ITEM
from penstock.ir.graph import Module
from penstock.ir.memory.items import (
    Image,
    ItemClaims,
    copied_bytes,
    home_bytes,
    is_made_later,
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
    takes for it in one direction; gradients that come as zeros take none. `out` is the action that copied it to its
    home, empty where that had not changed, and `back` the one that brings it."""

    stage: int
    item: str
    bytes: int
    away: float
    until: str
    copy: float
    out: str
    back: str


@dataclass(frozen=True)
class Presence:
    """A time that a block spends on the device (`here`), or in the other space alone; `end` is None where the run ends
    before. `number` is the microbatch of a saved set, or the version of weights that have several."""

    stage: int
    item: str
    number: int | None
    bytes: int
    here: bool
    begin: float
    end: float | None


@dataclass(frozen=True)
class HomePoint:
    """The bytes of a rank in another space after one action: those in use there, and those of them that are not on the
    device as well."""

    seconds: float
    action: str
    there: int
    alone: int


@dataclass(frozen=True)
class HomeRoom:
    """The items of a rank that have a home in a memory space: their bytes there, the room that all ranks have, the most
    bytes on the device at once, and those that a batch moves in and out together. A point stands after each action."""

    space: str
    bytes: int
    room: int | None
    on_device: int
    moved_per_batch: int
    points: tuple[HomePoint, ...] = ()
    absences: tuple[Absence, ...] = ()
    stays: tuple[Presence, ...] = ()

    @property
    def most_there(self) -> HomePoint:
        """The first point with the most bytes there."""
        return max(self.points, key=lambda point: point.there)


# Items by stage and name, and a block of one: its microbatch or version as well.
_Items = Mapping[tuple[int, str], Image | SavedSet]
_Block = tuple[int, str, int | None]


@dataclass(frozen=True)
class _Span:
    """A stay by places in the program: after which action it begins, -1 where the run does, and with which it ends.
    `out` is the place of the copy out before it."""

    block: _Block
    here: bool
    begin: int
    end: int | None = None
    out: int | None = None


def home_rooms(module: Module, rank: int, actions: Sequence[Action], ends: Sequence[float]) -> tuple[HomeRoom, ...]:
    """Return what a rank has in each other memory space over a run of these actions, which end at these times."""
    pack = module.rank_packs()[rank]
    items: dict[tuple[int, str], Image | SavedSet] = {
        (stage, item): image for stage in pack for item, image in stage_images(module, stage).items()
    }
    items |= {(stage, SAVED_ITEM): saved for stage in pack if (saved := saved_set(module, stage)) is not None}
    spaces = dict.fromkeys(moved.space for moved in items.values())
    return tuple(
        _room(module, rank, {key: moved for key, moved in items.items() if moved.space == space}, actions, ends)
        for space in spaces
    )


def _room(module: Module, rank: int, items: _Items, actions: Sequence[Action], ends: Sequence[float]) -> HomeRoom:
    """Return what a rank has in the space of these items."""
    assert module.schedule is not None
    space = next(iter(items.values())).space
    sets = {stage: moved for (stage, _), moved in items.items() if isinstance(moved, SavedSet)}
    limit = None if module.cluster is None else module.cluster.space(space, module.rank_devices()[rank]).bytes or None
    spans = list(_spans(items, actions))
    there, alone = _bytes_there(items, actions), _bytes_alone(items, spans, len(actions))
    return HomeRoom(
        space,
        sum(held.get(rank, 0) for (name, _), held in home_bytes(module).items() if name == space),
        limit,
        max(resident_bytes(module, module.schedule.expand(rank, 2), space))
        + sum(saved.nbytes * most_sets_back(actions_of(module.schedule, rank, 2), s) for s, saved in sets.items()),
        sum(copied_bytes(module, rank, space).values())
        + sum(
            sets[a.stage].nbytes
            for a in module.schedule.ranks[rank].batch
            if a.kind in COPIES and moves_saved(a) and a.stage in sets
        ),
        tuple(
            HomePoint(seconds, str(action), *held)
            for seconds, action, *held in zip(ends, actions, there, alone, strict=True)
        ),
        tuple(_absences(module, rank, items, spans, actions, ends)),
        tuple(_stays(items, spans, ends)),
    )


def _bytes_there(items: _Items, actions: Sequence[Action]) -> Iterator[int]:
    """Yield the bytes at home after each action: a saved set from its CO to the first that takes it, other items
    always. Of an item with several versions there is one at first, and one more with each copy."""
    versions = {key: 1 for key, moved in items.items() if isinstance(moved, Image)}
    now, away = sum(_stored(items[key]) for key in versions), set[tuple[int, int]]()
    for action in actions:
        moved, saved = items.get((action.stage, action.item)), items.get((action.stage, SAVED_ITEM))
        if moved is not None and action.kind == COPY_OUT:
            if isinstance(moved, SavedSet):
                away.add((action.stage, action.mb))
                now += moved.nbytes
            elif action.version is not None and versions[action.stage, action.item] < moved.versions:
                versions[action.stage, action.item] += 1
                now += moved.stored
        elif (action.stage, action.mb) in away and isinstance(saved, SavedSet) and action.kind in saved.users:
            away.remove((action.stage, action.mb))
            now -= saved.nbytes
        yield now


def _bytes_alone(items: _Items, spans: Sequence[_Span], count: int) -> Iterator[int]:
    """Yield the bytes that are at home, and not on the device, after each of so many actions."""
    changes = Counter[int]()
    for span in spans:
        nbytes = 0 if span.here else _stored(items[span.block[:2]])
        changes[max(span.begin, 0)] += nbytes
        changes[count if span.end is None else span.end] -= nbytes
    yield from accumulate(changes[place] for place in range(count))


def _spans(items: _Items, actions: Sequence[Action]) -> Iterator[_Span]:
    """Yield the stays of the blocks of a rank. What a microbatch has on the device is among the values of the rank."""
    claims = ItemClaims()
    here, away, copied = dict[_Block, int](), dict[_Block, _Span](), dict[_Block, int]()
    for place, action in enumerate(actions):
        if action.kind not in (LET_GO, COPY_IN, COPY_OUT) or (action.stage, action.item) not in items:
            continue
        moved = items[action.stage, action.item]
        block = action.stage, action.item, action.mb if moves_saved(action) else action.version
        if action.kind == COPY_OUT:
            copied[block] = place
            if isinstance(moved, Image) and action.version is not None:
                # Its home is that of the oldest version.
                oldest = away.pop((action.stage, action.item, action.version - moved.versions), None)
                yield from _ended(oldest, place)
            continue
        if not moves_saved(action) and not claims.change(action):
            # It was there before, and still is.
            continue
        if action.kind == LET_GO:
            yield from _ended(_Span(block, True, here.pop(block)) if block in here else None, place)
            away[block] = _Span(block, False, place, out=copied.pop(block, None))
            continue
        yield from _ended(away.pop(block, None if is_made_later(action) else _Span(block, False, -1)), place)
        copied.pop(block, None)
        if not moves_saved(action):
            here[block] = place
    yield from away.values()
    yield from (_Span(block, True, place) for block, place in here.items())


def _ended(span: _Span | None, place: int) -> Iterator[_Span]:
    if span is not None:
        yield _Span(span.block, span.here, span.begin, place, span.out)


def _stored(moved: Image | SavedSet) -> int:
    """Return the bytes that a block of an item has at home."""
    return moved.nbytes if isinstance(moved, SavedSet) else moved.stored


def _stays(items: _Items, spans: Sequence[_Span], ends: Sequence[float]) -> Iterator[Presence]:
    """Yield the stays of all blocks with their times. Gradients that are zeros are nowhere but on the device."""
    for span in spans:
        moved = items[span.block[:2]]
        nbytes = moved.nbytes if span.here else _stored(moved)
        if nbytes:
            begin, end = 0.0 if span.begin < 0 else ends[span.begin], None if span.end is None else ends[span.end]
            yield Presence(*span.block, nbytes, span.here, begin, end)


def _absences(
    module: Module,
    rank: int,
    items: _Items,
    spans: Sequence[_Span],
    actions: Sequence[Action],
    ends: Sequence[float],
) -> Iterator[Absence]:
    """Yield the longest time that each item is away between two uses, the largest item first."""
    longest: dict[tuple[int, str], tuple[float, _Span]] = {}
    for span in spans:
        if span.here or span.begin < 0 or span.end is None or actions[span.end].kind != COPY_IN:
            continue
        away = ends[span.end] - ends[span.begin]
        if away > longest.get(span.block[:2], (-1.0, span))[0]:
            longest[span.block[:2]] = away, span
    for (stage, item), (away, span) in sorted(longest.items(), key=lambda row: (-items[row[0]].nbytes, row[0])):
        moved = items[stage, item]
        assert span.end is not None
        back = actions[span.end]
        yield Absence(
            stage,
            item,
            moved.nbytes,
            away,
            _awaits(module, moved, back, actions[span.end + 1 :]),
            _seconds(module, rank, moved.space, _stored(moved)),
            "" if span.out is None else str(actions[span.out]),
            str(back),
        )


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
