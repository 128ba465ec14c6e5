"""The cores of one host in a simulation, shared by the threads that compute on them.

In: computations and the work of moving bytes, as they begin. Out: the end of each, as events on the simulation's
heap.

Linux gives a thread that wakes up an idle core if there is one. A core that falls idle takes over a thread that
waits for another one. Otherwise a thread waits for its turn: the running thread changes at a tick of the clock. So of
three threads on two cores two have half a core each, in turns, and not all of them two thirds. Where all cores are
busy, a message waits for a turn before it is read. The simulation does the same:

* A computation of n threads takes n places, each on the core with the fewest. Of the places of a core one runs, the
  others wait, and at every `TURN` the next one's turn has come.
* A burst with a quota, or with several threads, gets its part of a core all the time. It is as much as in equal parts,
  and no more than its quota. The parts of a parallel computation are divided beforehand, so that it goes as its slowest
  thread does.
* Threads that are busy at once slow each other down though each has a core. `speeds` are those of a core while 1, 2,
  ... threads are busy, compared with one.

Known limits: turns are those of the usual kernel; no thread is preferred for having slept; quotas and threads of one
computation take no turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Seconds between ticks of the clock: 250 Hz, what distributions set. A slice of the scheduler is shorter, but ends at a
# tick.
TURN = 4e-3

Push = Callable[[float, "Burst | Core", int], None]


@dataclass(slots=True, eq=False)
class Core:
    """One core. Of `turns` the first burst runs, `steady` ones get their part all the time. `ticks` says that a tick is
    on the heap."""

    owner: Cores
    turns: list[Burst] = field(default_factory=list)
    steady: list[Burst] = field(default_factory=list)
    ticks: bool = False

    def __len__(self) -> int:
        return len(self.turns) + len(self.steady)

    def list_of(self, burst: Burst) -> list[Burst]:
        return self.steady if burst.steady else self.turns


@dataclass(slots=True, eq=False)
class Burst:
    """Work under way: `left` in seconds that it takes where each of its threads gets `alone` of a core. All threads of
    its rank may have `limit` cores. `stamp` marks the one end that still holds."""

    owner: Cores
    rank: int
    left: float
    alone: float
    limit: float
    done: Callable[[float], None]
    steady: bool
    places: list[Core] = field(default_factory=list)
    rate: float = 0.0
    at: float = 0.0
    stamp: int = 0


class Cores:
    """The cores of a host. `push(time, what, stamp)` puts an event onto the heap. Its owner calls `event` when its time
    comes, and `settle` when all that happens at one moment is done."""

    def __init__(self, count: int, speeds: Sequence[float], push: Push) -> None:
        self._speeds, self._push = speeds, push
        self._cores = [Core(self) for _ in range(count)]
        self._bursts: dict[Burst, None] = {}
        self.unsettled = False

    def begin(
        self,
        now: float,
        rank: int,
        work: float,
        done: Callable[[float], None],
        threads: int,
        quota: float,
        alone: float | None = None,
    ) -> None:
        """Start `work` > 0 seconds of work, which it takes where each of its threads gets `alone` of a core: its quota
        by default."""
        limit = quota * threads if quota < 1 else math.inf
        burst = Burst(
            self, rank, work, quota if alone is None else alone, limit, done, quota < 1 or threads > 1, at=now
        )
        for _ in range(threads):
            core = min(self._cores, key=len)
            burst.places.append(core)
            core.list_of(burst).append(burst)
        self._bursts[burst] = None
        self.unsettled = True

    def event(self, now: float, what: Burst | Core, stamp: int) -> None:
        """Handle an event that was pushed: a tick, or an end, which is passed over if it does not hold."""
        if isinstance(what, Core):
            what.ticks = False
            what.turns.extend(what.turns[:1])
            del what.turns[:1]
            self.unsettled = True
        elif stamp == what.stamp:
            self._end(now, what)

    def _end(self, now: float, burst: Burst) -> None:
        for core in burst.places:
            core.list_of(burst).remove(burst)
        del self._bursts[burst]
        for core in self._cores:
            fullest = max(self._cores, key=len)
            if not len(core) and len(fullest) > 1:
                moved = (fullest.turns or fullest.steady).pop()
                moved.places[moved.places.index(fullest)] = core
                core.list_of(moved).append(moved)
        self.unsettled = True
        burst.done(now)

    def settle(self, now: float) -> None:
        """Push new rates, and new ends where a rate is another one."""
        self.unsettled = False
        for core in self._cores:
            if len(core.turns) > 1 and not core.ticks:
                core.ticks = True
                self._push((math.floor(now / TURN + 1e-9) + 1) * TURN, core, 0)
        for burst, rate in self._rates().items():
            if rate != burst.rate:
                burst.left = max(0.0, burst.left - burst.rate * (now - burst.at))
                burst.at, burst.rate = now, rate
                burst.stamp += 1
                if rate:
                    self._push(now + burst.left / rate, burst, burst.stamp)

    def _rates(self) -> dict[Burst, float]:
        threads: dict[int, int] = {}
        for burst in self._bursts:
            threads[burst.rank] = threads.get(burst.rank, 0) + len(burst.places)
        rates = dict.fromkeys(self._bursts, math.inf)

        def grant(burst: Burst, part: float) -> None:
            rates[burst] = min(rates[burst], part / burst.alone)

        for core in self._cores:
            # The least demand first: the remaining ones share the unused part.
            free, waiting = 1.0, sorted(core.steady, key=lambda burst: burst.limit / threads[burst.rank])
            while waiting:
                burst = waiting.pop(0)
                part = min(burst.limit / threads[burst.rank], free / (len(waiting) + 1 + len(core.turns)))
                free -= part
                grant(burst, part)
            for position, burst in enumerate(core.turns):
                grant(burst, 0.0 if position else free)
        busy = sum(len(burst.places) * burst.alone for burst in self._bursts)
        return {
            burst: rate * self._slowed(busy) / self._slowed(len(burst.places) * burst.alone)
            for burst, rate in rates.items()
        }

    def _slowed(self, busy: float) -> float:
        """Return the factor on all speeds while so many threads are busy."""
        if not self._speeds or busy <= 1:
            return 1.0
        if busy >= len(self._speeds):
            return self._speeds[-1]
        below = int(busy)
        return self._speeds[below - 1] + (busy - below) * (self._speeds[below] - self._speeds[below - 1])
