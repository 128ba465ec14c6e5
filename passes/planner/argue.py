"""Plan a chain, and explain the plan: its parts, its bottleneck, the devices left out, and counterfactuals; or, where
nothing fits, the nearest change that does.

`plan_chain` returns a `Result` or raises DoesNotFit. `counterfactuals` plans again with one thing changed at a time, by
the schedule of the plan:

    each schedule                      the best plan of it
    recomputation none, all            the best plan with it, where the plan is not such a one
    level 1 of zero                    the best plan whose replicas share optimiser state out, where memory has limits
    without DEVICE                     one for each device that the plan uses, of interchangeable devices just one
    links of X bytes/s twice as fast   one for each speed of links, latency unchanged
    memory without limit               the price of the memory limits
    times of TIMER                     the chain with another chain's times, such as those in bfloat16

More memory and more devices are named with a twentieth of memory to spare (SPARE): the exact count of the passes may be
a little more than the formulas. Known limit: where it is yet more, the passes refuse what was named here.

A device is left out where a plan with it is slower or there is none. The planner tries such plans: the reason says
which holds, and by how much. Of a processor beside a GPU it says why, too (mixed.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from penstock.ir.cluster.cluster import Cluster, Path
from penstock.ir.schedule_names import TRAINING
from penstock.passes.costs.prices import shown_seconds
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.support.errors import DoesNotFit
from penstock.support.words import counted, shown_bytes, shown_rate

from .chain import Chain
from .cost import judge
from .fleet import Fleet, fleet_of
from .mixed import of_another_kind, price_elsewhere
from .plan import Bytes, PipelinePlan, PlanRequest
from .planner import Outcome, Planner, Progress
from .sparing import near

# Where a limit ended the search, or it had only some choices of devices, there may be a plan that it did not see.
_NOTHING_FITS = {
    True: "no plan fits into the memory of the devices",
    False: "no plan was found that fits into the memory of the devices, of which not every choice was tried",
}
# The factor on the memory of the formulas when a hint names how much is enough.
SPARE = 1.05
# The precision of the search for the least memory that is enough.
_ENOUGH = 1.001


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A counterfactual: the step of the plan with one thing changed, or None where no plan was found then; `sure` says
    whether there is none. `devices` are those of the plan of which one was taken away, if that is the change. Where
    only some plans were tried, `bound` is what none takes less than, else 0."""

    name: str
    step: float | None
    sure: bool = True
    devices: tuple[str, ...] = ()
    bound: float = 0.0


@dataclass(frozen=True)
class Result:
    """The result of planning. `outcomes` are the best plans of all schedules that fit, the fastest first. `left_out`
    says of devices why, and `with_idle` has the step of the best plan that uses one, None where none was found."""

    chain: Chain
    fleet: Fleet
    wanted: PlanRequest
    outcomes: Mapping[str, Outcome]
    left_out: Mapping[str, str]
    planner: Planner
    with_idle: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def best(self) -> Outcome:
        return next(iter(self.outcomes.values()))

    @property
    def stopped(self) -> bool:
        """Return whether an interrupt ended the search early. `outcomes` are then the best plans until then."""
        return self.planner.stopped


def plan_chain(
    chain: Chain,
    cluster: Cluster | Fleet,
    wanted: PlanRequest,
    *,
    explained: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Return the best plan of every schedule. Where none fits, raise DoesNotFit with the nearest change that fits.

    Explaining takes longer than planning, so an error that is not `explained` names no change.
    """
    fleet = cluster if isinstance(cluster, Fleet) else fleet_of(cluster)
    planner = Planner(chain, fleet, wanted, progress)
    outcome_of = dict[str, Outcome]()
    for schedule in wanted.schedules:
        try:
            outcome = planner.best(schedule)
        except KeyboardInterrupt:
            if not outcome_of:
                raise
            planner.stopped = True
        else:
            outcome_of |= {schedule: outcome} if outcome is not None else {}
        if planner.stopped:
            break
    if not outcome_of:
        raise nearest(planner) if explained else DoesNotFit(_NOTHING_FITS[planner.sees_all], where="planner")
    outcomes = dict(sorted(outcome_of.items(), key=lambda item: item[1].step))
    idle = dict[str, tuple[str, float | None]]()
    if not planner.stopped:
        try:
            idle = dict(_left_out(planner, next(iter(outcomes.values()))))
        except KeyboardInterrupt:
            planner.stopped = True
    left_out, with_idle = {name: row[0] for name, row in idle.items()}, {name: row[1] for name, row in idle.items()}
    return Result(chain, fleet, wanted, outcomes, left_out, planner, with_idle)


def _left_out(planner: Planner, best: Outcome) -> Iterator[tuple[str, tuple[str, float | None]]]:
    """Yield the devices that the plan does not use, each with the result of a plan that does, and its step."""
    fleet, used = planner.fleet, frozenset(best.plan.devices)
    idle = [i for i in range(len(fleet)) if i not in used]
    # The same microbatches: a device that helps only with other sizes shows among the plans of those, which the caller
    # has searched.
    again = planner.but(replace(planner.wanted, sizes=(best.plan.size,)))
    groups = planner.alike()
    reasons: dict[int, str] = {}
    steps: dict[int, float | None] = {}
    unlike = of_another_kind(planner)
    run = "a batch" if SCHEDULES[best.plan.schedule].trains else counted(best.plan.count, "microbatch")
    for i in idle:
        group = frozenset(next(g for g in groups if i in g))
        first = min(group)
        if first not in reasons:
            more = len(used & group) + 1
            outcome = again.best(
                best.plan.schedule,
                lambda devices, group=group, more=more: len(devices & group) >= more,  # type: ignore[misc]
            )
            steps[first] = None if outcome is None else outcome.step
            if outcome is None:
                reasons[first] = "no plan that uses it fits" if again.sees_all else "no plan was found that uses it"
            elif outcome.step > best.step and (longer := shown_seconds(outcome.step)) != shown_seconds(best.step):
                reasons[first] = f"{run} would take {longer} with it instead of {shown_seconds(best.step)}"
            else:
                reasons[first] = f"{run} would take as long with it, {shown_seconds(best.step)}"
            if outcome is not None and i in unlike:
                reasons[first] += f": {price_elsewhere(again, outcome.plan, group)}"
        yield fleet.devices[i].name, (reasons[first], steps[first])


# ------------------------------------------------------------------------------------------------ counterfactuals


def counterfactuals(result: Result, others: Mapping[str, Chain] | None = None) -> list[PlanChange]:
    """Plan again with one thing changed at a time. `others` are chains of the same model with other costs, by
    name."""
    fleet, best = result.fleet, result.best
    wanted, schedule = result.wanted, best.plan.schedule
    planner = result.planner
    # These share matrices with the search for the plan, the others do not.
    lost = [replace(_without_one(result, i), name=f"without {name}", devices=of) for of, name, i in _without(result)]
    planner.forget()
    again = planner if planner.is_quick else planner.hurried(best.plan)
    request = again.wanted
    changes = [
        PlanChange(f"schedule {name}", outcome.step) for name, outcome in result.outcomes.items() if name != schedule
    ]
    changes += [
        PlanChange(f"schedule {name}", None, planner.sees_all)
        for name in wanted.schedules
        if name not in result.outcomes
    ]
    for mode in ("none", "all") if SCHEDULES[schedule].trains else ():
        if wanted.recompute != mode and any(stage.recompute != (mode == "all") for stage in best.plan.stages):
            other = again.but(replace(request, recompute=mode))
            stages = tuple(replace(stage, recompute=mode == "all", in_parts=False) for stage in best.plan.stages)
            known = replace(best.plan, stages=stages)
            changes.append(_change(f"recomputation: {mode}", other, schedule, known))
    limited = any(device.memory is not None for device in fleet.devices)
    if limited and not wanted.zero and len(fleet) > 1 and SCHEDULES[schedule].trains:
        shared = replace(best.plan, zero=1 if any(len(stage.devices) > 1 for stage in best.plan.stages) else 0)
        changes.append(_change("level 1 of zero (--zero 1)", again.but(replace(request, zero=1)), schedule, shared))
    changes += lost
    for name, part in _faster(fleet):
        changes.append(_change(name, again.on(part), schedule, best.plan))
    if limited:
        free = fleet.but([replace(device, spaces=()) for device in fleet.devices])
        changes.append(_change("memory without limit", again.on(free), schedule, best.plan))
    for name, costs in (others or {}).items():
        # In another precision a model may become other layers, on which the plan says nothing.
        alike = [layer.name for layer in costs.layers] == [layer.name for layer in result.chain.layers]
        changes.append(_change(name, again.of(costs), schedule, best.plan if alike else None))
    return changes


def _change(name: str, planner: Planner, schedule: str, known: PipelinePlan | None = None) -> PlanChange:
    """Return the change that the request, the devices or the costs of a planner are. Of a plan that is `known` to be
    possible then, only faster ones are searched."""
    below = inf
    # What is computed again in parts is searched only where nothing else fits, so it limits no search.
    if known is not None and not any(stage.in_parts for stage in known.stages):
        judged = judge(planner.table(known.size), planner.fleet, known, planner.wanted.base)
        below = inf if judged.against else judged.step
    outcome = planner.best(schedule, below=below)
    step = outcome.step if outcome is not None else below
    if step == inf:
        return PlanChange(name, None, planner.sees_all)
    return PlanChange(name, step, bound=min(planner.least(schedule), step) if planner.in_haste else 0.0)


def _without_one(result: Result, lost: int) -> PlanChange:
    """Return the change that one device less is. Where planning takes long, its step is that of the best plan that
    was found near this one."""
    planner, plan = result.planner, result.best.plan
    if len(result.fleet) == 1:
        return PlanChange("", None)
    others = planner.without([lost])
    if not planner.is_quick and (outcome := near(planner, plan, {lost})) is not None:
        return PlanChange("", outcome.step, bound=min(others.least(plan.schedule), outcome.step))
    return _change("", others, plan.schedule)


def _without(result: Result) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """Yield used devices that are alike, words for one of them, and its number."""
    fleet, used = result.fleet, set(result.best.plan.devices)
    for group in result.planner.alike():
        used_here = [i for i in group if i in used]
        if used_here:
            name = fleet.devices[used_here[0]].name + _or_another(len(group) - 1)
            devices = tuple(fleet.devices[i].name for i in used_here)
            yield devices, name, used_here[0]


def _or_another(others: int) -> str:
    return "" if not others else " (or the other one like it)" if others == 1 else f" (or one of {others} like it)"


def _faster(fleet: Fleet) -> Iterator[tuple[str, Fleet]]:
    """Yield fleets in which the links of one speed, and the network cards on their way, are twice as fast."""
    speeds = sorted({fleet.path(a, b).bandwidth for a in range(len(fleet)) for b in range(len(fleet)) if a != b})
    for speed in speeds[:4]:

        def path(a: int, b: int, speed: float = speed) -> Path:
            original = fleet.path(a, b)
            if original.bandwidth != speed:
                return original
            return original._replace(
                bandwidth=2 * speed, shares=tuple((name, 2 * rate) for name, rate in original.shares)
            )

        yield f"links of {shown_rate(speed)} twice as fast", Fleet(fleet.devices, path, fleet.trains)


# ------------------------------------------------------------------------------------------------ when nothing fits


def nearest(planner: Planner) -> DoesNotFit:
    """Return the error that says why nothing fits, and which changes would make a plan fit."""
    chain, fleet, wanted = planner.chain, planner.fleet, planner.wanted
    sizes = tuple(b for b in chain.sizes if wanted.batch % b == 0)  # there are no times of other sizes
    every = replace(wanted, sizes=sizes, recompute="auto", schedules=TRAINING)
    delayed = any(SCHEDULES[schedule].delay for schedule in wanted.schedules)
    tries = {
        "recompute activations": replace(wanted, recompute="auto" if wanted.recompute == "none" else wanted.recompute),
        "recompute less (--recompute auto)": replace(
            wanted, recompute="auto" if wanted.recompute == "all" else wanted.recompute
        ),
        "use smaller microbatches": replace(wanted, sizes=sizes),
        "keep one version of the weights (1f1b)" if delayed else "take the schedule 1f1b": replace(
            wanted, schedules=("1f1b",)
        ),
        "share optimiser state out among replicas (--zero 1)": replace(wanted, zero=1 if len(fleet) > 1 else 0),
        "do all of this: --recompute auto, smaller microbatches, 1f1b": replace(every, schedules=("1f1b",)),
    }
    # Inference computes nothing again, and its microbatches are those of the model.
    tries = tries if any(SCHEDULES[schedule].trains for schedule in wanted.schedules) else {}
    current = replace(wanted, sizes=wanted.microbatch_sizes())
    questions = [*tries, "more devices", "more memory"]

    def about(question: str) -> Planner:
        """Return the planner with progress messages that name the question."""
        number, tell = questions.index(question), planner.progress
        if tell is None:
            return planner
        return planner.but(
            progress=lambda _, __, case: tell(number, len(questions), f"nothing fits; {question}? {case}")
        )

    hints = [
        what
        for what, request in tries.items()
        if replace(request, sizes=request.microbatch_sizes()) != current and _fits(about(what).but(request))
    ]
    if (more := _more_devices(about("more devices"))) is not None:
        hints.append(f"add {counted(more, 'device')} like {fleet.devices[0].name}, by estimates")
    what = _NOTHING_FITS[planner.sees_all]
    enough = _least_memory(about("more memory"))
    if enough is None:
        what = (
            f"no plan {'fits' if planner.sees_all else 'was found'}: {wanted.batch} samples per batch do not make "
            f"enough microbatches for {', '.join(wanted.schedules)} on these devices"
        )
    else:
        factor, outcome = enough
        tight = max(
            outcome.judged.memory,
            key=lambda i: outcome.judged.memory[i].total / (fleet.devices[i].memory or float("inf")),
        )
        device, held = fleet.devices[tight], outcome.judged.memory[tight]
        what += (
            f": with {_times(factor)} times of it something would, and then {device.name}, "
            f"which has {shown_bytes(device.memory or 0)}, holds {shown_bytes(held.total)}:{_listed(held)}"
        )
        others = f" and the others {_times(factor * SPARE)} times their memory, {device.name}" if len(fleet) > 1 else ""
        hints.append(f"give {device.name}{others} {_at_least(held.total * SPARE)}")
    return DoesNotFit(what, where="planner", hint="; or ".join(hints))


def _listed(held: Bytes) -> str:
    """Format the memory of a device, a line for each purpose; together they are all of it."""
    parts = {name: shown_bytes(count) for name, count in held.named().items() if count}
    width, digits = max(map(len, parts), default=0), max(map(len, parts.values()), default=0)
    return "".join(f"\n{name.ljust(width)}  {count.rjust(digits)}" for name, count in parts.items())


def _times(factor: float) -> str:
    """Format a factor for people, rounded up."""
    return f"{math.ceil(round(factor * 1000, 6)) / 1000:.3f}" if factor < 100 else f"{math.ceil(factor)}"


def _at_least(count: float) -> str:
    """Format bytes for people, rounded up."""
    tenth = 1.0
    while count >= 1024 * tenth:
        tenth *= 1024
    tenth = max(tenth / 10, 1.0)
    return shown_bytes(math.ceil(math.ceil(count / tenth) * tenth))


def _fits(planner: Planner) -> Outcome | None:
    """Return any plan of any schedule. Schedules with fewer versions go first: they take less."""
    schedules = sorted(planner.wanted.schedules, key=lambda s: SCHEDULES[s].delay)
    return next((outcome for schedule in schedules if (outcome := planner.fits(schedule)) is not None), None)


def _more_devices(planner: Planner) -> int | None:
    """Return the fewest devices like the first with which something fits, and leaves memory to spare; None where thrice
    as many as there are do not help."""
    tight = planner.fleet.with_memory(1 / SPARE)

    def fits(more: int) -> bool:
        return _fits(Planner(planner.chain, _grown(tight, more), planner.wanted, planner.progress)) is not None

    enough = next((n for n in (1, 2, 4, 8, 16, 32) if n <= 3 * len(tight) and fits(n)), None)
    # More devices never hurt, as a plan may leave some out: bisection is right.
    return None if enough is None else bisect_left(range(enough), True, lo=enough // 2 + 1, key=fits)


def _grown(fleet: Fleet, more: int) -> Fleet:
    """Return the fleet with copies of its first device, which are connected as that one is."""
    count = len(fleet)
    copies = [replace(fleet.devices[0], name=f"{fleet.devices[0].name} copy {i + 1}") for i in range(more)]

    def path(a: int, b: int) -> Path:
        a, b = (0 if i >= count else i for i in (a, b))
        return fleet.path(a, b) if a != b else fleet.path(0, 1) if count > 1 else Path(1e9, 1e-4)

    return Fleet((*fleet.devices, *copies), path, fleet.trains)


def _least_memory(planner: Planner) -> tuple[float, Outcome] | None:
    """Return the smallest factor, to one part in a thousand, by which all memories have to grow, and a plan that fits
    then."""
    low, high = 1.0, 2.0
    while (outcome := _fits(planner.but(memory=high))) is None:
        low, high = high, 4 * high
        if high > 1e7:
            return None
    wanted = planner.wanted
    for schedule in sorted(wanted.schedules, key=lambda s: SCHEDULES[s].delay):
        for size in wanted.microbatch_sizes():
            # Most cases need more memory than an earlier one, which a single search shows.
            case = planner.but(replace(wanted, schedules=(schedule,), sizes=(size,)))
            below, above = low, high / _ENOUGH
            if above <= below or (better := _fits(case.but(memory=above))) is None:
                continue
            high, outcome = above, better
            while high / below > _ENOUGH:
                middle = (below * high) ** 0.5
                if (better := _fits(case.but(memory=middle))) is None:
                    below = middle
                else:
                    high, outcome = middle, better
    # Rounded up, so that what is printed is enough.
    return math.ceil(high * 1000) / 1000, outcome
