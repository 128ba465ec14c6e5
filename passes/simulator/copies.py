"""Copies of items between memory spaces in a simulation: CI and CO begin one, and who needs its end waits.

In: for each such action of a rank a `Copy`: its way, its bytes, and the computations that touch the item. A rank moves
one item at a time in each direction. What ranks of a host share on their ways to a space they share by direction. A
computation that touches an item waits for its CI, and L for its CO. Nothing moves for what is there already, or is not
made yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.ir.action_kinds import COPY_IN, COPY_OUT, SAVED_ITEM, WEIGHTS_ITEM
from penstock.ir.cluster.spaces import CARD
from penstock.ir.graph import Module
from penstock.ir.memory.items import (
    ItemClaims,
    is_brought,
    is_let_go,
    is_made_later,
    stage_images,
    users_of,
    version_read,
)
from penstock.ir.memory.saved_sets import moves_saved, saved_set
from penstock.ir.schedule import COPIES, Action, Schedule

from .machine import Copy, Route
from .moving import RankPair, move
from .result import Message
from .sharing import Sharing

# The last copy of an item in one direction: rank, stage, kind, item, and the microbatch that a saved set is of or the
# version.
_Key = tuple[int, int, str, str, int]
# The first number of the key of a lane, whose rank and direction follow.
_LANE = -2


def copies_of(module: Module) -> Callable[[int, Action], Copy]:
    """Return what each action that copies moves, over the ways of the module's cluster."""
    cluster, devices = module.cluster, module.rank_devices()
    images = {
        (stage.index, item): image
        for stage in module.stages
        for item, image in stage_images(module, stage.index).items()
    }
    moved = {key: (image.space, image.stored, users_of(module, key[0], image)) for key, image in images.items()}
    for stage in module.stages:
        if (saved := saved_set(module, stage.index)) is not None:
            moved[stage.index, SAVED_ITEM] = (saved.space, saved.nbytes, saved.users)

    def copied(rank: int, action: Action) -> Copy:
        if (stored := moved.get((action.stage, action.item))) is None or cluster is None:
            return Copy()
        name, nbytes, users = stored
        way, inwards = cluster.way(devices[rank], cluster.space(name, devices[rank])), action.kind == COPY_IN
        # A card is shared on the way to any space.
        ends = ((end, "space" if end.startswith(CARD) else name, rate) for end, rate in way.shares)
        shares = ((f"{far}>{end}" if inwards else f"{end}>{far}", rate) for end, far, rate in ends)
        return Copy(Route(tuple(shares), way.latency), float(nbytes), users)

    return copied


class _Begun(NamedTuple):
    """A copy that has begun: its end, infinite while that is unknown, and what to tell of it."""

    ends: float
    message: Message | None


class Copies:
    """The copies of all ranks. `wake` gives a rank another turn at a time."""

    def __init__(
        self, schedule: Schedule, copied: Callable[[int, Action], Copy], wake: Callable[[float, int], None]
    ) -> None:
        self._copied, self._wake = copied, wake
        # The items that computations touch, by rank, stage and computation.
        self._touched: dict[tuple[int, int, str], list[str]] = {}
        self._lanes: dict[tuple[int, ...], Route] = {}
        for rank, program in schedule.ranks.items():
            for action in (*program.start, *program.batch):
                if action.kind in COPIES:
                    copy = copied(rank, action)
                    self._lanes[_lane(rank, action)] = copy.route
                    for user in copy.users if action.kind == COPY_IN else ():
                        items = self._touched.setdefault((rank, action.stage, user), [])
                        items += [action.item] if action.item not in items else []
        # With several versions of an item the numbers that an action has in the run count.
        moving = [a for program in schedule.ranks.values() for a in (*program.start, *program.batch) if a.item]
        self._microbatches = schedule.microbatches if any(a.version is not None for a in moving) else None
        self._claims = {rank: ItemClaims() for rank in schedule.ranks}
        self._begun: dict[_Key, _Begun] = {}
        self._awaited: set[_Key] = set()

    def lanes(self) -> Iterator[tuple[tuple[int, ...], Route]]:
        """Yield the way of every rank in each direction, with its key."""
        yield from self._lanes.items()

    def begin(
        self,
        place: tuple[int, int, int],
        action: Action,
        now: float,
        sharing: Sharing,
        pairs: dict[tuple[int, ...], RankPair],
    ) -> None:
        """Begin the copy of an action at a place: rank, position and the number that it has there."""
        rank, position, number = place
        action = self._in_run(action, number)
        key = self._key(rank, action, action.kind, action.item)
        if is_brought(action) and not moves_saved(action) and not self._claims[rank].change(action):
            return
        self._begun[key] = _Begun(math.inf, None)

        def arrive(begun: float, end: float) -> None:
            self._begun[key] = _Begun(end, Message(rank, position, now, now, now, begun, end))
            if key in self._awaited:
                self._awaited.remove(key)
                self._wake(end, rank)

        nbytes = self._copied(rank, action).nbytes
        if not nbytes or is_made_later(action):
            # Gradients come as zeros: nothing goes through the lane.
            arrive(now, now)
            return
        move(sharing, pairs[_lane(rank, action)], nbytes, now, arrive)

    def waits(
        self, place: tuple[int, int, int], action: Action, now: float, messages: dict[tuple[int, int], Message]
    ) -> bool:
        """Return whether an action at a place has to wait for a copy. One that it has waited for is entered in
        `messages`."""
        rank, position, number = place
        action = self._in_run(action, number)
        if is_let_go(action):
            # A claim that is not the last one ends at once.
            waiting = self._claims[rank].count(action) <= 1
            keys = [self._key(rank, action, COPY_OUT, action.item)] if waiting else []
        else:
            items = self._touched.get((rank, action.stage, action.computation), ())
            keys = [self._key(rank, action, COPY_IN, item) for item in items]
        if any(self._waits_for(key, (rank, position), now, messages) for key in keys):
            return True
        if is_let_go(action) and not moves_saved(action):
            self._claims[rank].change(action)
        return False

    def _in_run(self, action: Action, number: int) -> Action:
        m = self._microbatches
        return action if m is None else action.shifted((number - action.mb) // (1 if action.once else m), m)

    def _key(self, rank: int, action: Action, kind: str, item: str) -> _Key:
        if item == SAVED_ITEM:
            return rank, action.stage, kind, item, action.mb
        # Without moves that name a version there is one of each item, whatever computations read.
        version = version_read(action) if item == WEIGHTS_ITEM and self._microbatches is not None else None
        return rank, action.stage, kind, item, -1 if version is None else version

    def _waits_for(
        self,
        key: _Key,
        place: tuple[int, int],
        now: float,
        messages: dict[tuple[int, int], Message],
    ) -> bool:
        rank, begun = place[0], self._begun.get(key)
        if begun is None or begun.ends < now:
            return False
        if begun.message is None:
            self._awaited.add(key)
            return True
        if begun.ends > now:
            self._wake(begun.ends, rank)
            return True
        messages[place] = begun.message
        return False


def _lane(rank: int, action: Action) -> tuple[int, ...]:
    return _LANE, rank, COPIES.index(action.kind)
