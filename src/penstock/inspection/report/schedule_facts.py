"""The timelines of all ranks, as data: planned, and measured where there is a trace, in the same form.

    planned   {"batches": [first, count], "anchors": [start of each batch],
               "lines": [[kind, number, version, peer, start, duration, ...] of each rank, flat],
               "copies": [[action, kind, number, once per batch, start, until awaited, ...] of each rank, flat]}
    measured  the same without copies; `compared` are [rank, kind, planned, measured] in seconds, the medians of all
              computations; `at` is [batch of the run, batch of the plan]: the two that the page aligns at first, from
              the middle of both, since a run's first batches warm up

A copy between memory spaces begins with its action, and is awaited by another (inspection/views/schedule_grid.py).
Times are whole tenths of a microsecond. `kind` is a place in `kinds`, `number` that of the microbatch or batch; a
missing version or peer is -1. A batch begins with its first forward: there two timelines are aligned, whatever came
before.

Limits: at most `_MOST` actions are kept, whole batches in the order of time, of a trace those in the middle of the run;
drops take no time and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from penstock.inspection.views.schedule_grid import copies
from penstock.ir.action_kinds import FORWARD, SUM
from penstock.ir.grid import Timed
from penstock.ir.schedule import COMPUTE, COPIES, HANDS, RECEIVES, SENDS, Action
from penstock.passes.simulator.result import Simulated

from .material import RunTrace

# The report shows these; it writes a kind as its number in this list.
KINDS = (*COMPUTE, *SENDS, *RECEIVES, *HANDS, SUM, *COPIES)
TICKS = 1e7
_MOST = 24000
_MOST_BATCHES = 24

# An action, its start and the seconds that it takes.
_Took = tuple[Action, float, float]


def ticks(seconds: float) -> int:
    """Return seconds as whole tenths of a microsecond."""
    return round(seconds * TICKS)


def planned_facts(simulated: Simulated) -> dict[str, Any]:
    """Return the timeline of a simulation."""
    per_batch = simulated.schedule.microbatches
    timed = {rank: [Timed(*row) for row in simulated.timed(rank)] for rank in simulated.lines}
    facts = _timeline(
        {rank: [(a, start, end - start) for a, start, end in line] for rank, line in timed.items()},
        per_batch,
        range(simulated.batches),
    )
    first, count = facts["batches"]
    run, origin = range(first, first + count), facts["origin"]
    return facts | {"copies": [list(_copies(timed[rank], per_batch, run, origin)) for rank in facts["ranks"]]}


def _copies(line: Sequence[Timed], per_batch: int, run: range, origin: int) -> Iterator[str | int]:
    """Yield the copies of a rank in some batches, flat."""
    for action, begins, awaited in copies(line):
        if action.batch(per_batch) in run:
            yield from (str(action), KINDS.index(action.kind), action.mb, int(action.once))
            yield from (ticks(begins) - origin, ticks(awaited - begins))


def measured_facts(trace: RunTrace, planned: Simulated, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the timeline of a run, and its computation times beside the planned ones; `shown` are the facts of the
    plan.
    """
    per_batch = planned.schedule.microbatches
    batches = [action.batch(per_batch) for line in trace.actions.values() for action, _, _ in line]
    run = range(min(batches), 1 + max(batches))
    facts = _timeline(trace.actions, per_batch, run, middle=True)
    middle = facts["batches"][0] + facts["batches"][1] // 2
    at = [middle, min(middle, shown["batches"][1] // 2)]
    return facts | {"compared": list(_compared(trace.actions, planned)), "of": run.stop, "at": at}


def _timeline(
    lines: Mapping[int, Iterable[_Took]], per_batch: int, batches: range, middle: bool = False
) -> dict[str, Any]:
    """Return some batches of a run: its first ones, or those in its middle."""
    shown = {rank: [timed for timed in line if timed[0].kind in KINDS] for rank, line in sorted(lines.items())}
    per_batch_actions = sum(map(len, shown.values())) / max(len(batches), 1)
    count = max(1, min(len(batches), _MOST_BATCHES, int(_MOST // max(per_batch_actions, 1))))
    begin = batches.start + ((len(batches) - count) // 2 if middle else 0)
    run = range(begin, begin + count)
    kept = {rank: [timed for timed in line if timed[0].batch(per_batch) in run] for rank, line in shown.items()}
    forwards: dict[int, float] = {}
    for line in kept.values():
        for action, start, _ in line:
            if action.kind == FORWARD:
                batch = action.batch(per_batch)
                forwards[batch] = min(start, forwards.get(batch, start))
    origin = min((start for line in kept.values() for _, start, _ in line), default=0.0)
    return {
        "batches": [begin, count],
        "anchors": [ticks(forwards.get(batch, origin) - origin) for batch in run],
        "origin": ticks(origin),
        "lines": [[number for timed in line for number in _flat(timed, origin)] for line in kept.values()],
        "ranks": list(kept),
    }


def _flat(timed: _Took, origin: float) -> tuple[int, ...]:
    action, start, seconds = timed
    version = -1 if action.version is None else action.version
    peer = -1 if action.peer is None else action.peer
    return KINDS.index(action.kind), action.mb, version, peer, ticks(start - origin), ticks(seconds)


def _compared(measured: Mapping[int, Iterable[_Took]], planned: Simulated) -> Iterable[list[Any]]:
    for rank, line in sorted(measured.items()):
        measured_times: dict[str, list[float]] = {}
        for action, _, seconds in line:
            measured_times.setdefault(action.kind, []).append(seconds)
        planned_times: dict[str, list[float]] = {}
        for action, start, end in planned.timed(rank):
            planned_times.setdefault(action.kind, []).append(end - start)
        yield from (
            [rank, kind, median(planned_times[kind]), median(measured_times[kind])]
            for kind in COMPUTE
            if kind in measured_times and kind in planned_times
        )
