"""Messages that simulated ranks hand on while they still come.

In: the lines of all ranks. Out: for a message that begins to move, the messages that go on with it, and when; for one
that arrives, when all of it can be there.

A tile travels in parcels between processors of unlike hosts. So what is handed on sets out when the first parcel of
all that it is made of has come. It is there no sooner than one parcel behind the last of these. Elsewhere a tile goes
whole: that is one parcel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .moving import MessageChannel
from .result import RankTimeline

# A message that is handed on: its phase, the stages, and its number.
_Unit = tuple[str, int, int, int]


@dataclass(slots=True, eq=False)
class RelayedLink:
    """The messages from one rank to another of its team, and what they are made of. `positions` are those of the last
    receive of that in the rank's line, as they go on from there. What has begun, what has arrived and when, and what
    waits for that is kept by number."""

    channel: MessageChannel
    is_whole: bool = False
    positions: dict[int, int] = field(default_factory=dict)
    sources: dict[int, tuple[MessageChannel, ...]] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    arrived: dict[int, list[float]] = field(default_factory=dict)
    waiting: dict[int, tuple[float, Callable[[float], None]]] = field(default_factory=dict)

    def parcel_seconds(self, channel: MessageChannel) -> float:
        """Return how long a parcel takes on a channel."""
        rate = min((use.bandwidth for use, _ in channel.pair.uses), default=channel.pair.cap)
        return (channel.nbytes if self.is_whole else channel.parcel) / rate + channel.pair.latency

    def end(self, mb: int, end: float) -> float:
        """Return when a message is there that has moved until `end`."""
        return max(end, max(self.arrived.pop(mb)) + self.parcel_seconds(self.channel))


class Relays:
    """All that ranks hand on in a simulation. `homes` are the stages of ranks, `receive` and `hand` the codes
    of these steps; `goes_whole` says of which way nothing is handed on in parcels, from one rank to another."""

    def __init__(
        self,
        homes: Mapping[int, int],
        lines: Iterable[RankTimeline],
        receive: int,
        hand: int,
        goes_whole: Callable[[int, int], bool],
    ) -> None:
        self._links: dict[MessageChannel, RelayedLink] = {}
        self._from: dict[tuple[MessageChannel, int], list[RelayedLink]] = {}
        for line in lines:
            if not any(step.code == hand for step in line.steps):
                continue
            come: dict[_Unit, list[MessageChannel]] = {}
            last: dict[_Unit, int] = {}
            for position, (step, mb) in enumerate(zip(line.steps, line.numbers, strict=True)):
                if step.code not in (receive, hand):
                    continue
                a = step.action
                unit = a.phase, a.stage, a.other(homes), mb
                if step.code == receive:
                    come.setdefault(unit, []).append(step.channel)
                    last[unit] = position
                else:
                    link = self._links.setdefault(step.channel, RelayedLink(step.channel))
                    link.positions[mb] = last[unit]
                    link.sources[mb] = tuple(come[unit])
                    link.is_whole = any(goes_whole(way.source, way.target) for way in (step.channel, *come[unit]))
                    for source in link.sources[mb]:
                        self._from.setdefault((source, mb), []).append(link)

    def __bool__(self) -> bool:
        return bool(self._links)

    def begun(self, channel: MessageChannel, mb: int, now: float) -> list[tuple[RelayedLink, float]]:
        """Return the messages that set out because this one begins to move, and when."""
        out = []
        for link in self._from.get((channel, mb), ()):
            link.begun[mb] = link.begun.get(mb, 0) + 1
            if link.begun[mb] == len(link.sources[mb]):
                del link.begun[mb]
                out.append((link, now + max(map(link.parcel_seconds, link.sources[mb]))))
        return out

    def arrived(self, channel: MessageChannel, mb: int, end: float, again: Callable[[float], None]) -> float | None:
        """Return when a message is there that has moved until `end`; None where that depends on others: `again` is
        called then."""
        here = self._links.get(channel)
        if here is not None and mb in here.sources:
            if len(here.arrived.get(mb, ())) < len(here.sources[mb]):
                here.waiting[mb] = end, again
                return None
            end = here.end(mb, end)
            del here.sources[mb]
        for link in self._from.pop((channel, mb), ()):
            link.arrived.setdefault(mb, []).append(end)
            if mb in link.waiting and len(link.arrived[mb]) == len(link.sources[mb]):
                moved, later = link.waiting.pop(mb)
                later(moved)
        return end
