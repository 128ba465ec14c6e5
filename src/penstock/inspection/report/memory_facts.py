"""The memory of every rank over time, as data, at the simulator's times.

    {"rank", "fixed": {purpose: bytes}, "variables": [[name, role, versions, bytes], ...],
     "points": [time, activations, boundary, free, items, ... flat],
     "lives": [name, owner, purpose, bytes, from, to, ... flat],
     "homes": [{"space", "room", "points": [time, alone, also, ... flat],
                "stays": [item, owner, bytes, here, from, to, ... flat],
                "absences": [[item, bytes, ticks, until, ticks of a copy, out, back], ...]}, ...]}

`fixed` does not change: weights, gradients, optimiser state, buffers, and waiting data. `items` are weights, gradients
and state that come from another space and go. `homes` are the spaces that the rank has something in, and why items go
(inspection/memory/homes.py): bytes that are there alone, and those that are on the device also. A stay is a time of a
block on the device (`here` is 1) or in the space alone; its owner is a microbatch or a version, or none. The sum at a
point is the memory that the process holds by memory_curve. `free` are blocks that are unused between calls: temporaries
of graphs, and memory kept for the next microbatch. `lives` are the blocks of values of microbatches (those of batch t
under -1 - t), with the times between which they live; `to` is -1 where the run ends first. A message of several values
has the name of the first, and their number. Times are ticks of schedule_facts.

Limit: of a long program only the first lives are kept (`_MOST`), and the points and stays until then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.inspection.memory.homes import Absence, HomeRoom, Presence, home_rooms
from penstock.ir.action_kinds import SAVED_ITEM
from penstock.ir.graph import stage_vars
from penstock.ir.memory.account import Life
from penstock.ir.memory.items import resident_bytes
from penstock.ir.memory.predict import Memory, most_resident
from penstock.ir.schedule import COMPUTE, Action
from penstock.passes.simulator.forecast import Forecast
from penstock.passes.simulator.result import Simulated

from .material import RunTrace
from .schedule_facts import ticks
from .strings import Strings

PURPOSES = ("weights", "gradients", "state", "buffers", "data")
_PASSING = ("activations", "boundary")
# Where the plan counts items that come and go, at the most.
_COMING = "state"
# The most lives of values that are kept, of all ranks together.
_MOST = 12000


def memory_facts(rows: Mapping[int, Memory], forecast: Forecast, strings: Strings) -> list[dict[str, Any]]:
    """Return one entry per rank; `rows` are the results of `measure_memory`."""
    return [_rank_facts(rank, row, forecast, _MOST // len(rows), strings) for rank, row in rows.items()]


def _rank_facts(rank: int, row: Memory, forecast: Forecast, most: int, strings: Strings) -> dict[str, Any]:
    module, course = forecast.module, forecast.courses[rank]
    finishes = [ticks(time) for time in forecast.simulated.lines[rank].finishes]
    resident = list(resident_bytes(module, course.actions))
    points: list[int] = []
    last: tuple[int, ...] = ()
    for finish, blocks, items in zip(finishes, course.held, resident, strict=True):
        if (held := (*blocks, items)) != last:
            points += finish, *held
            last = held
    lives = sorted(course.lives, key=lambda life: life.taken_at)
    end = finishes[-1] if finishes else 0
    if len(lives) > most:
        end = finishes[lives[most].taken_at]
        points = points[: 5 * sum(time <= end for time in points[::5])]
    # A variable that several stages of the rank have a copy of is there as often. Those with a home come and go.
    variables = [v for stage in module.rank_packs()[rank] for v in stage_vars(module, stage).values() if not v.home]
    return {
        "rank": rank,
        "fixed": {
            purpose: getattr(row, purpose) - (most_resident(module, rank) if purpose == _COMING else 0)
            for purpose in PURPOSES
        },
        "variables": [[strings[v.name], v.role, v.versions, v.type.nbytes * v.versions] for v in variables],
        "points": points,
        "lives": [number for life in lives[:most] for number in _flat(life, finishes, strings)],
        "homes": [
            _home_facts(home, end, strings)
            for home in home_rooms(module, rank, course.actions, forecast.simulated.lines[rank].finishes)
        ],
    }


def _home_facts(home: HomeRoom, end: int, strings: Strings) -> dict[str, Any]:
    """Return the facts of a space until an end."""
    points: list[int] = []
    for point in home.points:
        held = [point.alone, point.there - point.alone]
        if ticks(point.seconds) <= end and held != points[-2:]:
            points += ticks(point.seconds), *held
    stays: list[int] = []
    for stay in home.stays:
        if ticks(stay.begin) <= end:
            owner, to = strings[_owner(stay)], -1 if stay.end is None else ticks(stay.end)
            stays += strings[_shown(stay)], owner, stay.bytes, int(stay.here), ticks(stay.begin), to
    rows = [[strings[_shown(a)], a.bytes, ticks(a.away), a.until, ticks(a.copy), a.out, a.back] for a in home.absences]
    return {"space": home.space, "room": home.room, "points": points, "stays": stays, "absences": rows}


def _shown(moved: Absence | Presence) -> str:
    return f"{moved.item} of stage {moved.stage}"


def _owner(stay: Presence) -> str:
    if stay.number is None:
        return ""
    return f"{'microbatch' if stay.item == SAVED_ITEM else 'version'} {stay.number}"


def _flat(life: Life, finishes: list[int], strings: Strings) -> tuple[int, ...]:
    assert life.owner is not None
    name = life.names[0] if len(life.names) == 1 else f"{life.names[0]} and {len(life.names) - 1} more"
    end = -1 if life.given_at is None else finishes[life.given_at]
    return strings[name], life.owner, _PASSING.index(life.purpose), life.nbytes, finishes[life.taken_at], end


def measured_memory(trace: RunTrace, planned: Simulated, at: Sequence[int]) -> list[list[int]]:
    """Return the bytes of values that each rank of a traced run held, [time, bytes, ... flat], at times of the plan.

    Memory held during an action stands where the plan has that action, if batch at[0] of the run is batch at[1] of the
    plan. It reaches as far around that batch as the run did the same actions in the same order.
    """
    return [_laid_out(trace.held.get(rank, ()), _stops(trace, planned, rank, at)) for rank in sorted(trace.actions)]


def _stops(trace: RunTrace, planned: Simulated, rank: int, at: Sequence[int]) -> list[tuple[float, float]]:
    """Return pairs of times of the run and of the plan that belong together: beginnings and ends of computations."""
    run = [(action, start, start + seconds) for action, start, seconds in trace.actions[rank] if action.kind in COMPUTE]
    plan = [timed for timed in planned.timed(rank) if timed[0].kind in COMPUTE]
    per_batch = planned.schedule.microbatches

    def label(action: Action, batches: int) -> tuple[str, int]:
        return action.kind, action.shifted(batches, per_batch).mb

    run_labels = [label(action, at[1] - at[0]) for action, _, _ in run]
    plan_labels = [label(action, 0) for action, _, _ in plan]
    begin = next((i for i, (action, _, _) in enumerate(run) if action.batch(per_batch) == at[0]), None)
    if begin is None or run_labels[begin] not in plan_labels:
        return []
    ahead = plan_labels.index(run_labels[begin]) - begin
    first = last = begin
    while first > 0 and first + ahead > 0 and run_labels[first - 1] == plan_labels[first + ahead - 1]:
        first -= 1
    while (
        last + 1 < len(run) and last + 1 + ahead < len(plan) and run_labels[last + 1] == plan_labels[last + 1 + ahead]
    ):
        last += 1
    pairs = zip(run[first : last + 1], plan[first + ahead : last + 1 + ahead], strict=True)
    return [pair for (_, *run_times), (_, *plan_times) in pairs for pair in zip(run_times, plan_times, strict=True)]


def _laid_out(held: Sequence[tuple[float, int]], stops: Sequence[tuple[float, float]]) -> list[int]:
    if not held or not stops:
        return []
    before = [size for time, size in held if time <= stops[0][0]]
    flat = [ticks(stops[0][1]), int(before[-1]) if before else 0]
    # The run may have no time between two actions, and the plan some.
    runs, plans = zip(*stops, strict=True)
    for time, size in held:
        if stops[0][0] < time <= stops[-1][0]:
            place = bisect_left(runs, time)
            whole = runs[place] - runs[place - 1]
            share = (time - runs[place - 1]) / whole if whole > 0 else 1.0
            moment = ticks(plans[place - 1] + share * (plans[place] - plans[place - 1]))
            if flat[-1] != int(size):
                flat += [moment, int(size)]
    return [*flat, ticks(stops[-1][1]), flat[-1]]
