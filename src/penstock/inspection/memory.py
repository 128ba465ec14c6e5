"""The memory of every rank over a run, as the plan predicts it.

In: a module with a schedule. Out: a Curve per rank.

A point stands after each action of the rank's program: the time at which the action ends in the simulation, the live
bytes, and the bytes that the process holds (ir/memory/predict.py says what is counted). Times are those of the rates in
the module's cluster. Where the module cannot be simulated yet, each action takes one unit of time.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ir.action_kinds import DROP
from penstock.ir.graph import Module
from penstock.ir.memory.predict import Memory, measure_memory, memory_curve
from penstock.passes.costs.prices import rank_seconds
from penstock.passes.simulator.forecast import forecast, seconds_of
from penstock.support.errors import UsageError


@dataclass(frozen=True)
class Point:
    """The memory of a rank after one action."""

    seconds: float
    action: str
    live: int
    held: int


@dataclass(frozen=True)
class Curve:
    """The memory of a rank over a run.

    `budget` is the memory of the rank's device, if its cluster states it; `timed` says whether seconds are seconds.
    """

    rank: int
    stage: int
    device: str
    budget: int | None
    memory: Memory
    points: tuple[Point, ...]
    timed: bool

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
    devices, stages = module.rank_devices(), module.rank_stages()
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
                stages[rank],
                devices[rank],
                _budget(module, devices[rank]),
                memory[rank],
                points,
                times is not None,
            )
        )
    return tuple(curves)


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
