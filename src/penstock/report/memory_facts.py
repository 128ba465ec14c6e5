"""What every rank's memory holds over time, as data, at the simulator's times.

    {"rank", "fixed": {purpose: bytes}, "variables": [[name, role, versions, bytes], ...], "points": [time, activations, boundary, free, ... flat],
     "lives": [name, owner, purpose, bytes, from, to, ... flat]}

`fixed` does not change: weights, gradients, optimiser state, buffers, and data that wait. The sum at a point is what memory_curve says the process holds;
`free` are blocks that nobody uses between calls: temporaries of graphs, and memory kept for the next microbatch. `lives` are the blocks of values of
microbatches (those of batch t under -1 - t), with the times between which they live; `to` is -1 where the run ends first. A message of several values
has the name of the first, and their number. Times are ticks of schedule_facts.

Limit: of a long program no more than so many lives are kept, those of its beginning, and the points until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.ir.graph import Module, stage_vars
from penstock.ir.lives import Life
from penstock.ir.memory import Memory
from penstock.ir.memory_walk import Walk, actions_of
from penstock.report.material import Trace
from penstock.report.schedule_facts import TICKS, ticks
from penstock.report.strings import Strings
from penstock.runtime.simulated import Simulated

PURPOSES = ("weights", "gradients", "state", "buffers", "data")
_PASSING = ("activations", "boundary")
# Lives of values, of all ranks together.
_MOST = 12000


def memory_facts(module: Module, rows: Mapping[int, Memory], found: Simulated, strings: Strings) -> list[dict[str, Any]]:
    """One entry per rank; `rows` is what `measure_memory` says of them."""
    return [_rank_facts(module, rank, row, found, _MOST // len(rows), strings) for rank, row in rows.items()]


def _rank_facts(module: Module, rank: int, row: Memory, found: Simulated, most: int, strings: Strings) -> dict[str, Any]:
    assert module.schedule is not None
    assert module.cluster is not None
    on_gpu = module.cluster.device(module.rank_devices()[rank]).kind == "cuda"
    walk = Walk(module, module.rank_stages()[rank], posts=not on_gpu, lives=True)
    finishes = [ticks(time) for time in found.lines[rank].finishes]
    points: list[int] = []
    for finish, _ in zip(finishes, walk.follow(actions_of(module.schedule, rank, found.batches)), strict=True):
        saved, passing = walk.now[True], walk.now[False] + walk.coming
        now = [saved, passing, sum(pool.bytes for pool in walk.pools) - saved - passing]
        if points[-3:] != now:
            points += [finish, *now]
    lives = sorted(walk.finish(), key=lambda life: life.taken)
    if len(lives) > most:
        end = finishes[lives[most].taken]
        points = points[: 4 * sum(time <= end for time in points[::4])]
    variables = stage_vars(module, module.rank_stages()[rank]).values()
    return {
        "rank": rank,
        "fixed": {purpose: getattr(row, purpose) for purpose in PURPOSES},
        "variables": [[strings(v.name), v.role, v.versions, v.type.nbytes * v.versions] for v in variables],
        "points": points,
        "lives": [number for life in lives[:most] for number in _flat(life, finishes, strings)],
    }


def _flat(life: Life, finishes: list[int], strings: Strings) -> tuple[int, ...]:
    assert life.owner is not None
    name = life.names[0] if len(life.names) == 1 else f"{life.names[0]} and {len(life.names) - 1} more"
    given = -1 if life.given is None else finishes[life.given]
    return strings(name), life.owner, _PASSING.index(life.purpose), life.nbytes, finishes[life.taken], given


def measured_memory(trace: Trace, timeline: Mapping[str, Any]) -> list[list[int]]:
    """Bytes of values that each rank of a traced run held, [time, bytes, ... flat], in the part of it that a timeline shows."""
    origin = timeline["origin"]
    end = max((line[i + 4] + line[i + 5] for line in timeline["lines"] for i in range(0, len(line), 6)), default=0)
    rows = []
    for rank in timeline["ranks"]:
        flat: list[int] = []
        for time, size in trace.held.get(rank, ()):
            at = round(time * TICKS) - origin
            if at > end:
                break
            # What was held before the shown part is where its curve begins.
            if at <= 0:
                flat = [0, int(size)]
            elif flat[-1:] != [int(size)]:
                flat += [at, int(size)]
        rows.append(flat)
    return rows
