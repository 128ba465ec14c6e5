"""Drop values after their last use, and predict the peak memory of every rank: the pass `lifetimes`.

In: a scheduled, wired module. Out: D actions and notes.

`D` stands right after the last action of a microbatch on a stage: its backward and the sends of that, or for a stage
without backward its forward and the sends of that. After F and its sends a microbatch holds exactly what the forward
graph saves (ir/memory/predict.py); D drops that. So the peak is known before anything runs: fixed (weights times
versions, gradients, optimiser state, buffers) plus the worst moment of activations in flight, boundary values and the
workspace of one graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ir.action_kinds import DROP
from penstock.ir.graph import Module
from penstock.ir.memory.predict import Memory, measure_memory
from penstock.ir.schedule import Action, Program, Schedule
from penstock.support.errors import UsageError
from penstock.support.words import counted, shown_bytes

COLUMNS = ("weights", "gradients", "state", "buffers", "activations", "boundary", "data", "workspace", "peak")


@dataclass(frozen=True, slots=True)
class LifetimesOptions:
    """Options of `lifetimes`, which has none."""


def lifetimes(module: Module, options: LifetimesOptions = LifetimesOptions()) -> Module:
    """Drop what a microbatch holds right after its last use, and predict the peak memory of every rank."""
    schedule = module.schedule
    if schedule is None:
        raise UsageError("the module has no schedule", where="lifetimes", hint="run the schedule pass first")
    if any(a.kind == DROP for a in schedule.actions()):
        raise UsageError(
            "the schedule already has drops", where="lifetimes", hint="the pass runs once, after communicate"
        )
    ranks = {rank: _with_drops(program, schedule.microbatches) for rank, program in schedule.ranks.items()}
    result = module.but(schedule=Schedule(schedule.name, schedule.microbatches, ranks))
    return result.noted(
        "lifetimes", *(f"rank {rank}: {describe(memory)}" for rank, memory in measure_memory(result).items())
    )


def memory_table(module: Module) -> dict[int, dict[str, int]]:
    """Return the predicted bytes of every rank by COLUMNS. `peak` is the largest sum at one moment, so at most the sum
    of the other columns."""
    return {rank: {name: getattr(memory, name) for name in COLUMNS} for rank, memory in measure_memory(module).items()}


def _with_drops(program: Program, m: int) -> Program:
    """Insert D after the last action of each microbatch.

    The batch list repeats every m microbatches: microbatch k meets an action written for k' in repetition (k - k') / m,
    if that is not negative. So among actions for k', k' + m, ... the smallest number is met last.
    """
    last: dict[tuple[int, int], tuple[int, int]] = {}
    for position, action in enumerate(program.batch):
        if not action.once:
            key = (action.stage, action.mb % m)
            last[key] = max(last.get(key, (-action.mb, position)), (-action.mb, position))
    ends = {position for _, position in last.values()}
    batch = [b for position, a in enumerate(program.batch) for b in _dropped_if(position in ends, a)]
    first = {key: -negative for key, (negative, _) in last.items()}
    final = {(a.stage, a.mb): i for i, a in enumerate(program.start) if a.mb < first.get((a.stage, a.mb % m), a.mb + 1)}
    start = [b for i, a in enumerate(program.start) for b in _dropped_if(final.get((a.stage, a.mb)) == i, a)]
    return Program(tuple(start), tuple(batch))


def _dropped_if(last: bool, action: Action) -> tuple[Action, ...]:
    return (action, Action(DROP, action.stage, action.mb)) if last else (action,)


def describe(memory: Memory) -> str:
    """Describe the predicted memory in one line for people."""
    parts = ((name, getattr(memory, name)) for name in COLUMNS[:-1])
    listed = ", ".join(f"{name} {shown_bytes(n)}" for name, n in parts if n)
    return (
        f"peak {shown_bytes(memory.peak)} ({listed or 'nothing'}), {counted(memory.in_flight, 'microbatch')} in flight"
    )
