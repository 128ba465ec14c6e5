"""Times of the actions of a rank with a GPU, by events of the GPU.

In: actions, as the rank tells its GPU to do them. Out: their times on the host's monotonic clock, some time later: the
rank reads them when the GPU has got there, and does not wait.

An action is from where the GPU could begin with it to where it was done with it. For a receive that is the time that
the GPU stood waiting. The rank's own times would say when it told the GPU, which is long before.

Events give differences in milliseconds as f32. So each end counts from the end before, and the first one from an event
that the rank waits for when a run begins. Known limit: over a run, the clocks of GPU and host may drift apart by some
millionths.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from penstock.ir.schedule import Action
from penstock.runtime.state.device_copies import is_reached


class _Timed(NamedTuple):
    action: Action
    begin: torch.cuda.Event
    end: torch.cuda.Event


class DeviceTimes:
    """The times of one rank's actions. `take` gets an action, and its begin and end in seconds."""

    def __init__(self, device: torch.device, take: Callable[[Action, float, float], None]) -> None:
        self._device, self._take = device, take
        self._timed: deque[_Timed] = deque()
        self._last: torch.cuda.Event | None = None
        self._at = 0.0

    def start(self) -> None:
        """Begin a run, whose first action comes next: wait for the GPU, and read both clocks."""
        self._last = self.mark()
        self._last.synchronize()
        self._at = time.monotonic()

    def mark(self) -> torch.cuda.Event:
        """Return an event that has a time, behind what the GPU was told to do."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end(self, action: Action, begin: torch.cuda.Event) -> None:
        """Say that all of an action was begun, behind the event `begin`."""
        self._timed.append(_Timed(action, begin, self.mark()))

    def look(self) -> None:
        """Hand over the times of actions that the GPU is done with."""
        while self._timed and is_reached(self._timed[0].end):
            action, begin, end = self._timed.popleft()
            assert self._last is not None
            self._at += _seconds(self._last, end)
            self._last = end
            self._take(action, self._at - _seconds(begin, end), self._at)

    def settle(self) -> None:
        """Wait for all actions, and hand their times over."""
        if self._timed:
            self._timed[-1].end.synchronize()
        self.look()


def _seconds(earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
    return float(earlier.elapsed_time(later)) / 1e3
