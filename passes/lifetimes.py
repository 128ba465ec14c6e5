"""lifetimes: drop what is no longer needed, and say what memory that leaves in use. In: a scheduled, wired module. Out: D actions and notes.

`D` stands right after the last action of a microbatch on a stage: its backward and the sends of that, or for a stage without backward its
forward and the sends of that. After F and its sends a microbatch holds exactly what the forward graph saves (ir/memory.py); D drops
that. So the peak is known before anything runs: fixed (weights times versions, gradients, optimiser state, buffers) plus the worst
moment of activations in flight, boundary values and the workspace of one graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.errors import UsageError
from ..ir.graph import Module
from ..ir.memory import Memory, measure_memory
from ..ir.schedule import PER_BATCH, Action, Program

COLUMNS = ("weights", "gradients", "state", "buffers", "activations", "boundary", "workspace", "peak")


@dataclass(frozen=True, slots=True)
class LifetimesOptions:
    """None yet."""


def lifetimes(module: Module, options: LifetimesOptions = LifetimesOptions()) -> Module:
    """Drop what a microbatch holds right after its last use, and predict the peak memory of every rank."""
    found = module.schedule
    if found is None:
        raise UsageError("the module has no schedule", where="lifetimes", hint="run the schedule pass first")
    if any(a.kind == "D" for a in found.actions()):
        raise UsageError("the schedule already has drops", where="lifetimes", hint="the pass runs once, after communicate")
    ranks = {rank: _with_drops(program, found.microbatches) for rank, program in found.ranks.items()}
    result = module.but(schedule=type(found)(found.name, found.microbatches, ranks))
    return result.noted("lifetimes", *(f"rank {rank}: {describe(memory)}" for rank, memory in measure_memory(result).items()))


def memory_table(module: Module) -> dict[int, dict[str, int]]:
    """Predicted bytes of every rank by COLUMNS; `peak` is the largest sum at one moment, so at most the sum of the others."""
    return {rank: {name: getattr(memory, name) for name in COLUMNS} for rank, memory in measure_memory(module).items()}


def _with_drops(program: Program, m: int) -> Program:
    """A microbatch ends with its last action in the batch list, or in the start list when the batch list never mentions it again.
    The batch list repeats every m microbatches, so the last mention of microbatch k is the largest over k, k + m, k + 2m, ...: the one
    in the earliest repetition is not the last. Hence the mention with the smallest number is the latest in time."""
    latest: dict[tuple[int, int], tuple[int, int]] = {}
    for position, action in enumerate(program.batch):
        if action.kind not in PER_BATCH:
            key = (action.stage, action.mb % m)
            # In repetition t the action is of microbatch mb + t * m, so microbatch k meets it in repetition (k - mb) / m.
            latest[key] = max(latest.get(key, (-action.mb, position)), (-action.mb, position))
    ends = {position for _, position in latest.values()}
    batch: list[Action] = []
    for position, action in enumerate(program.batch):
        batch.append(action)
        if position in ends:
            batch.append(Action("D", action.stage, action.mb))
    return Program(program.start, tuple(batch))


def describe(memory: Memory) -> str:
    """One line for people."""
    parts = ((name, getattr(memory, name)) for name in COLUMNS[:-1])
    listed = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts if n)
    return f"peak {format_bytes(memory.peak)} ({listed or 'nothing'}), {memory.in_flight} microbatch{'' if memory.in_flight == 1 else 'es'} in flight"


def format_bytes(count: int) -> str:
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
