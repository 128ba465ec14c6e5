"""The memory of every rank over a run, as the plan predicts it.

In: a module with a schedule. Out: a Curve per rank.

A point stands after each action of the rank's program: the time at which the action ends in the simulation, the live
bytes, and the bytes that the process holds (ir/memory/predict.py says what is counted). Times are those of the rates in
the module's cluster. Where the module cannot be simulated yet, each action takes one unit of time.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ir.action_kinds import DROP
from penstock.ir.graph import CACHE, Module, stage_vars
from penstock.ir.memory.captured import captured_room
from penstock.ir.memory.predict import Memory, measure_memory, memory_curve
from penstock.ir.ops import BLOCK
from penstock.passes.costs.prices import rank_seconds
from penstock.passes.simulator.forecast import forecast, seconds_of
from penstock.support.errors import UsageError

from .homes import HomeRoom, home_rooms


@dataclass(frozen=True)
class Point:
    """The memory of a rank after one action."""

    seconds: float
    action: str
    live: int
    held: int


@dataclass(frozen=True)
class CacheRoom:
    """The caches of a rank: how many variables, the blocks of each, their bytes, and those of one position of a
    sequence in all of them."""

    variables: int
    blocks: int
    bytes: int
    bytes_per_position: int


@dataclass(frozen=True)
class Curve:
    """The memory of a rank over a run.

    `budget` is the memory of the rank's device, if its cluster states it; `timed` says whether seconds are seconds.
    `caches` is None where there are none. `homes` has a room for each other space that the rank has something in, over
    the same actions. `captured` is what captured calls may keep beside the peak.
    """

    rank: int
    stages: tuple[int, ...]
    device: str
    budget: int | None
    memory: Memory
    points: tuple[Point, ...]
    timed: bool
    caches: CacheRoom | None = None
    homes: tuple[HomeRoom, ...] = ()
    captured: int = 0

    @property
    def most_live(self) -> Point:
        """The first point with the most live bytes."""
        return max(self.points, key=lambda point: point.live)


def memory_curves(module: Module, batches: int = 3) -> tuple[Curve, ...]:
    """Return one curve per rank, for a run of `batches` batches from an empty pipeline to an empty pipeline."""
    if module.schedule is None:
        raise UsageError(
            "the module has no schedule yet", hint="inspect a dump after the pass `lifetimes`, or a bundle"
        )
    memory, times = measure_memory(module), _times(module, batches)
    devices, packs = module.rank_devices(), module.rank_packs()
    curves = []
    for rank in module.schedule.ranks:
        states = list(memory_curve(module, rank, batches))
        at = times[rank] if times is not None else [float(step + 1) for step in range(len(states))]
        points = tuple(
            Point(seconds, str(action), live, held) for seconds, (action, live, held) in zip(at, states, strict=True)
        )
        curves.append(
            Curve(
                rank,
                packs[rank],
                devices[rank],
                _budget(module, devices[rank]),
                memory[rank],
                points,
                times is not None,
                cache_room(module, packs[rank][0]),
                home_rooms(module, rank, [action for action, _, _ in states], at),
                sum(captured_room(module, rank).values()),
            )
        )
    return tuple(curves)


def cache_room(module: Module, stage: int) -> CacheRoom | None:
    """Return the room that the caches of a stage have on one of its ranks. Sequences have as many blocks as the
    smallest of them."""
    held = [module.local_type(var.type, stage) for var in stage_vars(module, stage).values() if var.role == CACHE]
    if not held:
        return None
    each = sum(t.nbytes // (t.dims[0] * BLOCK) for t in held)
    return CacheRoom(len(held), min(t.dims[0] for t in held), sum(t.nbytes for t in held), each)


def _times(module: Module, batches: int) -> dict[int, list[float]] | None:
    """Return the times at which actions end; None where they are unknown, as where the schedule has no drops yet."""
    drops = module.schedule is not None and any(
        action.kind == DROP for program in module.schedule.ranks.values() for action in program.batch
    )
    if module.cluster is None or "wired" not in module.facts or not drops:
        return None

    run = forecast(module, seconds_of(module, rank_seconds(module)), batches)
    return {rank: list(line.finishes) for rank, line in run.simulated.lines.items()}


def _budget(module: Module, name: str) -> int | None:
    return None if module.cluster is None else module.cluster.device(name).memory
