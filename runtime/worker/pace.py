"""Computations that take a given time: schedules are measured in the real runtime, apart from kernels. A measuring
tool, off unless asked for.

In: seconds by kind of computation (F, B, W, P, N, U), or by stage and kind as actions are written: `2U` is U of stage
2, and goes before U of all stages. An action takes at least that long, whatever its kernels take.
B stands for the whole backward. On a stage that has weight gradients apart, W takes its part of it, and B the
remainder. So all schedules do the same work. The results do not change. (The latency of links that belongs to it is the
transport's.)
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Collection, Iterator, Mapping

from penstock.ir.action_kinds import ACTION_KINDS
from penstock.ir.schedule import COMPUTE, Action

# The call of Linux that says how late, in nanoseconds, sleeps of a thread may end. Usually it is 50 microseconds.
_PR_SET_TIMERSLACK = 29
_PARTS = tuple((kind, row.part_of) for kind, row in ACTION_KINDS.items() if row.part_of)


def times_of(pace: Mapping[str, float], stage: int) -> dict[str, float]:
    """Return the seconds of each kind on a stage: those that name the stage go before those of all."""
    return {kind: pace[key] for kind in COMPUTE for key in (kind, f"{stage}{kind}") if key in pace}


def pace_problems(pace: Mapping[str, float], stages: int, latency: float, timeout: float) -> Iterator[str]:
    """Yield the problems of times that the caller asks for."""
    known = {*COMPUTE, *(f"{stage}{kind}" for stage in range(stages) for kind in COMPUTE)}
    for key, seconds in pace.items():
        if key not in known:
            yield f"pace is known of {', '.join(COMPUTE)}, and of stages 0 to {stages - 1} as in 0F, not of {key!r}"
        elif not (math.isfinite(seconds) and seconds >= 0):
            yield f"pace of {key} must be a number of seconds from 0 on, got {seconds}"
    # Stages that no key names have the times of all.
    yield from dict.fromkeys(problem for stage in range(stages) for problem in _part_problems(times_of(pace, stage)))
    if not 0 <= latency < timeout:
        yield f"latency must be a number of seconds from 0 to less than the timeout, got {latency}"


def _part_problems(times: Mapping[str, float]) -> Iterator[str]:
    for part, combined in _PARTS:
        if times.get(part, 0.0) > times.get(combined, math.inf):
            words = ACTION_KINDS[combined].words
            yield (
                f"pace of {combined} is that of the whole {words}, {part} included: {times[combined]:g} is less than "
                f"{times[part]:g}"
            )


class Pace:
    """The least times of the computations of one stage, by kind; `kinds` are those that it has graphs of. `asked` are
    the kinds that have any. The thread that makes it is the one that waits."""

    def __init__(self, pace: Mapping[str, float], kinds: Collection[str]) -> None:
        self._least = dict(pace)
        self.asked = frozenset(pace)
        if pace:
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
        for part, combined in _PARTS:
            if part in kinds and combined in pace:
                self._least[combined] = pace[combined] - pace.get(part, 0.0)

    def least(self, action: Action) -> float:
        return self._least.get(action.kind, 0.0)

    def keep(self, action: Action, started: float) -> None:
        """Wait until the action has taken its time. `started` is on the monotonic clock."""
        left = started + self.least(action) - time.monotonic()
        if left > 0:
            time.sleep(left)
