"""The processor time that a rank within a quota saves up while it waits.

In: when its actions begin, and what they take within its quota. Out: what they take then.

Linux grants a quota by periods. In each one a control group may compute for its part, at the full speed of a core, and
then stands still until the next one. So a rank that computes all the time goes as fast as its quota, on average. A rank
that waited finds its part of the period unused, and at first computes at full speed.

Actions begin anywhere in a period. Let q be the quota and P the period. After a long wait a rank has R seconds of the
period before it, and may compute for min(R, qP) of them. On average over R that is q(1 - q)P/2 more than it has at an
even pace. An action also ends in the part of a period in which the rank runs, which is as much again. So a wait saves
(1 - q)P seconds at most, at the pace of the quota.

Known limits: these are averages, and actions that take about a period each may take half as long again. While a rank
uses what it saved, its core counts as taken by its quota alone. What a rank reads beside its computations uses nothing
of it. A run from an empty pipeline begins with nothing saved.
"""

from __future__ import annotations

from collections.abc import Mapping

from .machine import Seat


class SavedTime:
    """The seconds of its actions that a rank need not take, because it waited. It begins with none, as in the middle of
    a long run of a rank that does not wait."""

    def __init__(self, seat: Seat) -> None:
        self._most = (1 - seat.quota) * seat.period
        # The parts of their seconds that actions take at full speed: computations, and ends of messages, which are the
        # work of one thread, and may have the quota of all.
        self._parts = seat.quota, min(1.0, seat.quota * seat.threads)
        self._saved = self._busy_until = 0.0

    def shortened(self, now: float, lasts: float, *, is_message: bool = False) -> float:
        """Return the seconds of an action that begins now, and takes `lasts` of a rank that never waits."""
        self._saved = min(self._most, self._saved + max(0.0, now - self._busy_until))
        used = min(self._saved, lasts * (1 - self._parts[is_message]))
        self._saved -= used
        self._busy_until = now + lasts - used
        return lasts - used


def savings(seats: Mapping[int, Seat]) -> dict[int, SavedTime]:
    """Return what ranks save up, of those that have a quota with a period."""
    return {rank: SavedTime(seat) for rank, seat in seats.items() if seat.quota < 1 and seat.period}
