"""The ways between ranks, and how bytes move through them.

A pair moves one message at a time and queues the others. Pairs that share links compete for them (sharing.py), and a
receiver that reads competes for the cores of its host (cores.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .cores import Cores
from .machine import Seat
from .result import LinkUse, Message
from .sharing import Resource, Sharing


@dataclass(slots=True, eq=False)
class RankPair:
    """The way from one rank to another, or around a ring. One message or sum moves at a time, up to `cap` bytes per
    second, and shares `demands`."""

    latency: float
    cap: float
    demands: tuple[tuple[Resource, float], ...]
    uses: tuple[tuple[LinkUse, int], ...]
    free: float = 0.0
    moving: bool = False
    queue: deque[Callable[[float], None]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class MessageChannel:
    """Messages of one phase between two ranks, by microbatch. A send in `sent` has no posted receive yet, a receive in
    `posted` no send. `parcel` are the bytes of the largest part that is handed on by itself."""

    source: int
    target: int
    nbytes: float
    parcel: float
    pair: RankPair
    # The time of the rank for a send whose message moves already; None if it moves after the send. The second field is
    # true if reading the message takes time.
    writing: float | None
    reads: bool
    sent: dict[int, tuple[float, int]] = field(default_factory=dict)
    posted: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, Message] = field(default_factory=dict)
    awaited: int = -1


def move(
    sharing: Sharing,
    pair: RankPair,
    size: float,
    now: float,
    arrive: Callable[[float, float], None],
    reader: tuple[int, Cores, Seat] | None = None,
) -> None:
    """Move bytes through a pair when it is free. `arrive` is called with the times when they began to move and when
    they are there."""
    if not pair.demands and reader is None:
        begun = max(now, pair.free)
        pair.free = begun + size / pair.cap
        for use, times in pair.uses:
            use.nbytes += size * times
            use.busy += pair.free - begun
        arrive(begun, pair.free + pair.latency)
        return

    def begin(time: float) -> None:
        left = 2

        def finish(at: float) -> None:
            nonlocal left
            left -= 1
            if not left:
                pair.moving = False
                arrive(time, at + pair.latency)
                if pair.queue:
                    pair.queue.popleft()(at)

        for use, times in pair.uses:
            use.nbytes += size * times
            if not pair.demands:
                use.busy += size / pair.cap
        pair.moving = True
        if reader is not None and size > 0:
            target, cores, seat = reader
            cores.begin(time, target, size * seat.reading, finish, 1, seat.quota, alone=1.0)
        else:
            finish(time)
        if size > 0 and (pair.demands or pair.cap < math.inf):
            sharing.begin(time, size, pair.demands, finish, cap=pair.cap)
        else:
            finish(time)

    if pair.moving:
        pair.queue.append(begin)
    else:
        begin(now)
