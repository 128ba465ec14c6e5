"""The share of the time of messages that a run hid behind its computations.

In: the actions of its ranks with their times, on one clock (a trace). Out: seconds of messages, the part of it that a
receiver stood waiting, and the share that is hidden.

A message is under way from its send on. The time that its receiver waits after that is not hidden; the wait before is
the schedule's, not the link's. The arrival of a message is known only if it was waited for. Another one took what its
link says, latency + bytes / bandwidth, but no longer than until it was taken.

    hidden = 1 - sum of waits / sum of times under way

Known limits: the link's numbers are those of the cluster that was planned for; sums over replicas (AR) are no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.schedule import HANDS, RECEIVES, SENDS, Action
from penstock.ir.sharding.tile_messages import ends_of, message_values

from .trace import Event

# A receive that takes longer than this has waited: to take a message that is there costs less.
_AT_ONCE = 2e-4


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of all messages under way, and how long receivers waited for them."""

    messages: int
    moving: float
    waited: float

    @property
    def hidden(self) -> float | None:
        """The share that is hidden; None where nothing travelled."""
        return 1.0 - self.waited / self.moving if self.moving > 0 else None


# The channel of a message, and its number.
_Message = tuple[str, int, int, int | None, int | None, int]


def overlap_of(ranks: Sequence[Sequence[Event]], module: Module) -> Overlap:
    """Measure the messages of a run; those whose other end is not in the trace are left out."""
    stages, devices = module.rank_stages(), module.rank_devices()
    sent: dict[_Message, float] = {}
    received: list[tuple[_Message, int, float, float]] = []
    for rank, events in enumerate(ranks):
        for text, start, end in events:
            action = Action.parse(text.partition(" ")[0])
            if action.kind in SENDS or action.kind in HANDS:
                sent[(*action.channel(rank), action.mb)] = start
            elif action.kind in RECEIVES:
                assert action.peer is not None
                values = message_values(module, ends_of(action, stages), action.peer, rank)
                nbytes = sum(value.type.nbytes for value in values)
                received.append(((*action.channel(rank), action.mb), nbytes, start, end))
    count, moving, waited = 0, 0.0, 0.0
    for key, nbytes, start, end in received:
        if key not in sent:
            continue
        link = _seconds(module.cluster, devices[key[1]], devices[key[2]], nbytes)
        under_way, wait = max(end - sent[key], 0.0), max(end - max(start, sent[key]), 0.0)
        count += 1
        if wait > _AT_ONCE:
            moving, waited = moving + under_way, waited + wait
        else:
            moving += min(under_way, link)
    return Overlap(count, moving, waited)


def _seconds(cluster: Cluster | None, source: str, target: str, size: int) -> float:
    """Return the time of a message by the description of its link."""
    if cluster is None or source == target:
        return 0.0
    path = cluster.path(source, target)
    return path.latency + max(size / speed for speed in (path.bandwidth, *(rate for _, rate in path.shares)))
