"""The tries of a search: sizes of microbatches, and plans for the passes, one after another, until they accept one.

The planner works with estimates. Where the passes refuse the plan that is best by these, the next best is tried. These
are other schedules, plans for somewhat less memory than there is, and plans without replicas. Then come plans with less
memory for devices whose stages turned out too large. Where nothing fits by estimates, plans for more memory are tried,
because the exact count of the passes may be less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from heapq import merge

from penstock.passes.planner.argue import Result
from penstock.passes.planner.chain import Chain
from penstock.passes.planner.fleet import Fleet
from penstock.passes.planner.plan import PipelinePlan as Chosen
from penstock.passes.planner.plan import PlanRequest
from penstock.passes.planner.planner import Outcome, Planner
from penstock.passes.planner.refine import Refined
from penstock.passes.planner.sparing import without_little_help
from penstock.support.errors import DoesNotFit, UsageError

# Sizes of microbatches that are tried if none are given: each is one more import of the model.
MOST_SIZES = 5
# Where stages turn out too large, plans are tried for less memory on their devices, by the missing bytes and a little
# more. That happens so many times from the memory that there is, and from more memory, because an estimate may be too
# large elsewhere.
CORRECTIONS = 6
_MARGIN = 1.005
_BEGUN_WITH = (1.0, 1.1)
# Parts of the memory that a plan is tried again for, where the plan for all of it does not fit.
LESS_MEMORY = (0.95, 0.85, 0.7)
# Multiples of the memory that plans are tried for, where nothing fits by estimates: the exact count of the passes may
# be less.
MORE_MEMORY = (1.05, 1.1, 1.2)

# A schedule, a plan of it, and devices that it does without although they would help a little.
Try = tuple[str, Outcome, list[str]]


def sizes_of(batch: int, fixed: int | None) -> tuple[int, ...]:
    """Return the samples per microbatch to try: the size that the model has, or divisors of the batch, evenly among its
    powers of two and the like."""
    if fixed is not None:
        if batch % fixed:
            raise UsageError(
                f"a batch of {batch} samples cannot be made of microbatches of {fixed}, the size that the model is "
                "read with",
                hint=f"give a --batch that {fixed} divides, or another size by --dim; where the first dimension of "
                "the model is symbolic and no --dim binds it, the planner chooses",
            )
        return (fixed,)
    divisors = [b for b in range(1, batch + 1) if batch % b == 0]
    if len(divisors) <= MOST_SIZES:
        return tuple(divisors)
    step = (len(divisors) - 1) / (MOST_SIZES - 1)
    return tuple(sorted({divisors[round(i * step)] for i in range(MOST_SIZES)}))


def other_sizes(batch: int) -> tuple[int, ...]:
    """Return divisors of the batch that are not among those that are tried first: the small ones, where none of these
    fits into memory."""
    first = sizes_of(batch, None)
    return tuple([b for b in range(1, batch + 1) if batch % b == 0 and b not in first][:MOST_SIZES])


def with_more_memory(chain: Chain, fleet: Fleet, wanted: PlanRequest) -> Iterator[tuple[Result, float]]:
    """Return the best plan of every schedule in the least of more memory in which there is one, the fastest first; and
    how many times the memory that is."""
    results = list[tuple[Result, float]]()
    for schedule in wanted.schedules:
        for part in MORE_MEMORY:
            planner = Planner(chain, fleet.with_memory(part), wanted)
            if (outcome := planner.best(schedule)) is not None:
                results.append((Result(chain, planner.fleet, wanted, {schedule: outcome}, {}, planner), part))
                break
    return iter(sorted(results, key=lambda row: row[0].best.step))


def tries(
    result: Result,
    spared: Mapping[str, tuple[Outcome, list[str]]],
    refined: Mapping[str, Refined],
    too_large: Mapping[Chosen, DoesNotFit],
) -> Iterator[Try]:
    """Yield plans to be carried out, until the passes accept one.

    Each schedule contributes the best plan by simulation, where there is one, and the best by the formulas. Plans for
    somewhat less memory follow, because the planner works with estimates. Plans without replicas come last, because
    their rules are simpler. The fastest of what the schedules have next comes first. Then, by schedule, there are plans
    with less memory for devices whose stages were `too_large` in those before.
    """
    every = len(refined) == len(spared)
    known = {kind: refined[kind].step if every else spared[kind][0].step for kind in spared}

    def step_of(one: Try) -> float:
        schedule, outcome, _ = one
        best = (spared[schedule][0], refined[schedule].outcome) if schedule in refined else (spared[schedule][0],)
        return known[schedule] if outcome in best else outcome.step

    # A search for less memory begins when all plans that are faster were refused.
    in_order = sorted(spared, key=known.__getitem__)
    yield from merge(*(_of_schedule(schedule, result, spared, refined) for schedule in in_order), key=step_of)
    for schedule, part in ((schedule, part) for part in _BEGUN_WITH for schedule in result.outcomes):
        fleet = result.fleet.with_memory(part)
        for _ in range(CORRECTIONS):
            best = Planner(result.chain, fleet, result.wanted).best(schedule)
            if best is None:
                break
            yield schedule, best, []
            if best.plan not in too_large:
                break
            fleet = _corrected(fleet, best.plan, too_large[best.plan])


def _of_schedule(
    schedule: str, result: Result, spared: Mapping[str, tuple[Outcome, list[str]]], refined: Mapping[str, Refined]
) -> Iterator[Try]:
    """Yield the plans of a schedule: for all of the memory, for less, and without replicas."""
    outcome, little = spared[schedule]
    if schedule in refined and refined[schedule].outcome.plan != outcome.plan:
        yield schedule, refined[schedule].outcome, little
    yield schedule, outcome, little
    least = LESS_MEMORY if any(device.memory for device in result.fleet.devices) else ()
    shared = len(outcome.plan.stages) < len(outcome.plan.devices)
    alone = replace(result.wanted, replicas=1)
    for wanted, part in [
        *((result.wanted, part) for part in least),
        *((alone, part) for part in (1.0, *least) if shared),
    ]:
        planner = Planner(result.chain, result.fleet.with_memory(part), wanted)
        if (best := planner.best(schedule)) is not None:
            # A device that hardly helps stays where its memory is wanted.
            yield schedule, *without_little_help(planner, best)


def _corrected(fleet: Fleet, plan: Chosen, error: DoesNotFit) -> Fleet:
    """Return a fleet with less memory on the devices of the stages that need more than they have, so that the formulas
    give them less."""
    parts = {
        device: 1 / (error.excess[number] * _MARGIN)
        for number in error.excess
        for device in plan.stages[number].devices
    }
    devices = enumerate(fleet.devices)
    return fleet.but(
        [replace(d, spaces=tuple((name, int(size * parts.get(i, 1))) for name, size in d.spaces)) for i, d in devices]
    )
