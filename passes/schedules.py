"""schedule: choose who computes which microbatch when. In: a module split into stage graphs. Out: the same with a Schedule of F, B, U.

A schedule is data: for every stage the list of computations run once at the start and the list run once per batch, both written as for
batch 1, where the m microbatches of the batch are m .. 2m-1 (ir/schedule.py). With d stages, stage s, w = d-1-s:

    1f1b     PipeDream-flush: w forwards, then (F, B) pairs, then w backwards, U; the pipeline is empty between batches.
             (m+d-1)(tf+tb) per batch, at most min(d-s, m) microbatches in flight.
    gpipe    m forwards, then m backwards, U. (m+d-1)(tf+tb) per batch, m in flight.
    2bw      PipeDream-2BW (ICML 2021): w forwards at the very start only, then (F, B) pairs without end; U after the m-th backward.
             m(tf+tb) per batch, at most d-s in flight. The last w forwards of a batch already belong to the next one.
    forward  inference: forwards only.

Backwards run in microbatch order in all of them, so that gradients are summed in the same order and results can be compared bit by bit.
A new schedule is one row of SCHEDULES and one function. `delay` says how many updates the weights of a microbatch are behind
(W(t+1) = W(t) - lr * g(W(t - delay))); whether order and delay fit together is not decided here but by the checker.
Known limit: one rank per stage, and rank r runs stage r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..ir.errors import UsageError
from ..ir.graph import Module
from ..ir.schedule import Action, Program, Schedule


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """`kind` is a row of SCHEDULES; `microbatches` per batch must be the number that autodiff averaged over."""

    kind: str = "1f1b"
    microbatches: int = 1


def forwards(stage: int, first: int, count: int) -> Iterator[Action]:
    return (Action("F", stage, mb) for mb in range(first, first + count))


def backwards(stage: int, first: int, count: int) -> Iterator[Action]:
    return (Action("B", stage, mb) for mb in range(first, first + count))


def pairs(stage: int, forward: int, backward: int, count: int) -> Iterator[Action]:
    """One forward, one backward, `count` times."""
    for i in range(count):
        yield Action("F", stage, forward + i)
        yield Action("B", stage, backward + i)


def order_1f1b(stage: int, stages: int, m: int) -> Program:
    w = min(stages - 1 - stage, m)
    batch = (*forwards(stage, m, w), *pairs(stage, m + w, m, m - w), *backwards(stage, 2 * m - w, w), Action("U", stage, 1))
    return Program((), batch)


def order_gpipe(stage: int, stages: int, m: int) -> Program:
    return Program((), (*forwards(stage, m, m), *backwards(stage, m, m), Action("U", stage, 1)))


def order_2bw(stage: int, stages: int, m: int) -> Program:
    w = stages - 1 - stage
    return Program(tuple(forwards(stage, m, w)), (*pairs(stage, m + w, m, m), Action("U", stage, 1)))


def order_forward(stage: int, stages: int, m: int) -> Program:
    return Program((), tuple(forwards(stage, m, m)))


@dataclass(frozen=True, slots=True)
class Kind:
    """A schedule by name: `order(stage, stages, microbatches)` gives one rank's program; `delay` in updates."""

    order: Callable[[int, int, int], Program]
    delay: int
    trains: bool
    doc: str


SCHEDULES: dict[str, Kind] = {
    "1f1b": Kind(order_1f1b, 0, True, "PipeDream-flush: drained every batch, one weight version, at most d microbatches in flight"),
    "gpipe": Kind(order_gpipe, 0, True, "all forwards, then all backwards: drained every batch, one weight version, m in flight"),
    "2bw": Kind(order_2bw, 1, True, "PipeDream-2BW: never drained, two weight versions, gradients one update late, at most d in flight"),
    "forward": Kind(order_forward, 0, False, "inference: forwards only"),
}


def build_schedule(kind: str, stages: int, microbatches: int) -> Schedule:
    """The schedule of a uniform pipeline in which every stage has forward, backward and update."""
    row = SCHEDULES.get(kind)
    if row is None:
        raise UsageError(f"unknown schedule {kind!r}, expected one of {', '.join(SCHEDULES)}", where="schedule")
    if stages < 1 or microbatches < 1:
        raise UsageError(f"needs at least one stage and one microbatch, got {stages} and {microbatches}", where="schedule")
    return Schedule(kind, microbatches, {s: row.order(s, stages, microbatches) for s in range(stages)})


def schedule(module: Module, options: ScheduleOptions) -> Module:
    """Give every rank its computations. A stage without a backward or update graph (nothing to train there) gets no such action."""
    found = build_schedule(options.kind, max(len(module.stages), 1), options.microbatches)
    trainable = any(module.stage_graph(s.index, "B") for s in module.stages)
    if SCHEDULES[options.kind].trains and not trainable:
        raise UsageError(
            f"schedule {options.kind} trains, but no stage has a backward graph",
            where="schedule",
            hint="run autodiff and split first, or use kind=forward",
        )
    if not SCHEDULES[options.kind].trains and trainable:
        raise UsageError(
            f"schedule {options.kind} never runs a backward, but the module has backward graphs",
            where="schedule",
            hint="leave out autodiff for inference, or use kind=1f1b",
        )
    return module.but(schedule=found.rewrite(lambda a: (a,) if module.stage_graph(a.stage, a.kind) else ()))
