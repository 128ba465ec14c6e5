"""Why a plan is as it is: what `penstock plan` prints, and what goes into plan.json.

In: a plan, and if the planner chose it the search behind it. Out: a table of ranks with their seconds and their share of the bottleneck,
their memory by purpose, the step that the simulator predicts for the program, what limits it, how far it is from the bound, why devices
were left out, and what would change it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock import api
from penstock.calibration.measured import Measured, stage_times
from penstock.grading import Corrected, best_prices, corrected, known_times
from penstock.ir.graph import Module
from penstock.passes.costs.prices import rank_seconds, shown_seconds
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.planning import Search, first_reason
from penstock.simulating import BATCHES, Forecast, binding, forecast, seconds_of
from penstock.support.terminal import table
from penstock.support.words import counted, shown_bytes

# Of more devices a bundle's plan says nothing of what would be otherwise: each change is a plan made anew.
_FEW_DEVICES = 16


@dataclass(frozen=True)
class Predicted:
    """What the simulator says of a planned program. `busy` are seconds per batch of every rank's computations,
    of which so many kinds were `measured`."""

    forecast: Forecast
    step: float
    busy: dict[int, float]
    measured: int = 0
    correction: Corrected | None = None

    @property
    def pace(self) -> float:
        return max(self.busy.values(), default=0.0)


def predict(module: Module, plain: bool = False) -> Predicted:
    """Simulate a planned module on its own cluster, with all that is known on this machine: times of its stages that were measured, else
    estimates. With `plain` estimates alone, which depend on the module only."""
    if plain:
        times, estimated, correction = rank_seconds(module), 0, None
    else:
        times, estimated = stage_times(module, Measured(store=known_times()), best_prices())
        correction = corrected() if estimated else None
    seconds = seconds_of(module, times)
    made = forecast(module, seconds, BATCHES)
    assert module.schedule is not None
    busy = {rank: sum(seconds(rank, a) for a in program.batch) for rank, program in module.schedule.ranks.items()}
    return Predicted(made, made.step, busy, 0 if plain else len(times) - estimated, correction)


# ------------------------------------------------------------------------------------------------ for people


def print_argument(plan: api.Plan) -> None:
    """All there is to say about a plan."""
    print_plan(plan)
    if plan.search is not None:
        for line in argument(plan.search):
            print(line)


def print_plan(plan: api.Plan) -> None:
    """The plan and what is predicted of it."""
    module, predicted = plan.module, predict(plan.module)
    print_ranks(module, predicted)
    for note in module.notes:
        if note.origin in ("placement", "partition", "schedule", "recompute"):
            print(f"{note.origin}: {note.text}")
    step, samples = predicted.step, predicted.forecast.samples
    print(
        f"predicted: {shown_seconds(step)} per batch of {counted(samples, 'sample')}, {samples / step:.1f} samples/s, "
        f"{1 - _busy(predicted):.0%} of the ranks' time idle"
    )
    if predicted.measured:
        print(
            f"the {'time' if predicted.measured == 1 else 'times'} of {counted(predicted.measured, 'stage graph')} come from runs "
            "on this machine"
        )
    if predicted.correction is not None:
        runs = predicted.correction.runs
        print(
            f"estimates of this machine are corrected by {predicted.correction.factor:.2f}, from {counted(runs, 'graded run')}"
        )
    print(f"limited by: {binding(predicted.forecast)}")


def print_ranks(module: Module, predicted: Predicted) -> None:
    from penstock.passes.memory.lifetimes import memory_table

    memory, schedule = memory_table(module), module.schedule
    assert schedule is not None
    columns = list(next(iter(memory.values())))
    shares = [share for s in module.stages for share in schedule.shares(s.index)]
    rows = [
        [
            stage,
            device,
            shares[rank],
            f"{predicted.busy[rank] * 1e3:.3f} ms",
            f"{predicted.busy[rank] / predicted.pace:.0%}" if predicted.pace else "-",
            *(shown_bytes(memory[rank][c]) for c in columns),
        ]
        for rank, (stage, device) in enumerate(zip(module.rank_stages(), module.rank_devices(), strict=True))
    ]
    print(
        f"{module.name}: schedule {schedule.name}, {counted(schedule.microbatches, 'microbatch')} per batch, predicted time per "
        "batch and peak memory"
    )
    print(table(["stage", "device", "microbatches", "time", "of slowest", *columns], rows))


def _busy(predicted: Predicted) -> float:
    whole = sum(u.busy + u.waiting + u.idle for u in predicted.forecast.found.ranks)
    return sum(u.busy for u in predicted.forecast.found.ranks) / whole if whole else 1.0


def argument(search: Search) -> Iterator[str]:
    """The planner's reasons, a line each."""
    chosen, profile, result = search.chosen, search.profile, search.result
    plan = chosen.plan
    grain = (
        ""
        if len(profile.starts) == profile.operations
        else f" (of {profile.operations} operations, the longest {profile.largest:.1%} of the work)"
    )
    yield (
        f"planner: {counted(plan.size, 'sample')} per microbatch, {counted(plan.count, 'microbatch')}; chosen over "
        f"{counted(len(profile.starts), 'layer')}{grain}"
    )
    if profile.left_out:
        sizes = " or ".join(map(str, profile.left_out))
        yield f"planner: not tried: microbatches of {sizes} samples, with which the model has other operations"
    yield f"planner: {shown_seconds(chosen.step)} per batch by its formulas, limited by {chosen.judged.binding}; {_bound(search)}"
    if (found := search.refined.get(plan.schedule)) is not None and found.outcome.plan == plan:
        yield f"planner: the fastest of {counted(found.tried, 'plan')} simulated: {shown_seconds(found.step)} per batch"
    if search.more_memory > 1:
        yield (
            f"planner: its estimates of memory are up to {search.more_memory - 1:.0%} more than the devices have; by the exact count of "
            "the passes the plan fits"
        )
    for schedule, reason in search.refused.items():
        if schedule not in result.outcomes:
            continue
        what = f"the fastest plan of {schedule}" if schedule == plan.schedule else schedule
        yield f"planner: {what} would take {shown_seconds(result.outcomes[schedule].step)}, but it was refused: {first_reason(reason)}"
    if SCHEDULES[plan.schedule].delay:
        yield f"planner: under {plan.schedule} gradients are one update late, which is not what plain training computes; --schedule 1f1b is"
    yield from (f"planner: left out: {line}" for line in search.little)
    if chosen.plan.devices == result.best.plan.devices:
        yield from (f"planner: left out: {name}, because {reason}" for name, reason in result.left_out.items())
    elif others := [name for name in search.left_out if not any(line.startswith(f"{name} ") for line in search.little)]:
        yield f"planner: not used: {', '.join(others)}"
    usual = result.outcomes[plan.schedule].step
    if (same := _against(usual, chosen.step)) != "the same":
        yield f"planner: by its formulas another plan of {plan.schedule} is {same}, {shown_seconds(usual)}, {_passed_over(search)}"
    # Formulas are compared with formulas: what was chosen by simulation may be slower by them.
    yield f"planner: with one thing changed in what was given, by its formulas, against {shown_seconds(usual)}:"
    for change in search.what_if:
        if change.name.removeprefix("schedule ") in search.refused:
            continue
        told = (
            "nothing fits" if change.step is None else f"{shown_seconds(change.step)} ({_against(change.step, usual)})"
        )
        simulated = search.refined.get(change.name.removeprefix("schedule "))
        if simulated is not None and change.step is not None and change.step < usual:
            told += f", but {shown_seconds(simulated.step)} simulated"
        yield f"what if: {change.name}: {told}"


def _passed_over(search: Search) -> str:
    """Why the best plan by the formulas was not taken."""
    found = search.refined.get(search.chosen.plan.schedule)
    if found is not None and found.outcome.plan == search.chosen.plan:
        return "but not when it is simulated"
    return "but with devices that hardly help" if search.little else "but it was refused"


def _bound(search: Search) -> str:
    chosen = search.chosen
    best = search.result.outcomes.get(chosen.plan.schedule, chosen)
    if best.step < chosen.step:
        return "not the fastest by these"
    if chosen.proven(search.result.wanted.tolerance):
        return f"by these no plan of {chosen.plan.schedule} for what was given is faster"
    told = f"no plan takes less than {shown_seconds(chosen.bound)}, {chosen.gap():.1%} less"
    return told + (
        ""
        if chosen.layout.complete
        else f"; of a fleet of this size not every choice was tried, {chosen.layout.name} were best"
    )


def _against(other: float, chosen: float) -> str:
    ratio = other / chosen
    if abs(ratio - 1) < 5e-4:
        return "the same"
    return f"{ratio - 1:.1%} slower" if ratio > 1 else f"{1 - ratio:.1%} faster"


# ------------------------------------------------------------------------------------------------ for programs


def predicted_facts(predicted: Predicted) -> dict[str, Any]:
    """What the simulator says. In the plan of a bundle that is plain, so that a bundle depends on what it was made of alone."""
    return {
        "step_s": predicted.step,
        "samples_per_s": predicted.forecast.samples / predicted.step if predicted.step else None,
        "drained_s": predicted.forecast.drained,
        "busy_s": {str(rank): seconds for rank, seconds in predicted.busy.items()},
        "limited_by": binding(predicted.forecast),
        "correction": predicted.correction.factor if predicted.correction is not None else None,
        "measured": predicted.measured,
    }


def planner_facts(search: Search) -> dict[str, Any]:
    """What the planner found, for plan.json. `passed_over` is why another plan of the schedule that is faster by the
    formulas was not taken, if there is one."""
    chosen = search.chosen
    other = _against(search.result.outcomes[chosen.plan.schedule].step, chosen.step) != "the same"
    return {
        "step_s": chosen.step,
        "bound_s": chosen.bound,
        "proven": chosen.proven(search.result.wanted.tolerance),
        "layout": chosen.layout.name,
        "limited_by": chosen.judged.binding,
        "schedules": {kind: outcome.step for kind, outcome in search.result.outcomes.items()},
        "refused": dict(search.refused),
        "left_out": search.left_out,
        **({"passed_over": _passed_over(search)} if other else {}),
        **({"simulated": {kind: found.step for kind, found in search.refined.items()}} if search.refined else {}),
        **({"what_if": _steps(search)} if len(search.result.fleet.devices) <= _FEW_DEVICES else {}),
    }


def _steps(search: Search) -> dict[str, float | None]:
    return {change.name: change.step for change in search.what_if}


def as_json(plan: api.Plan) -> str:
    """The plan with what would change it."""
    found = plan.as_dict() | {"predicted": predicted_facts(predict(plan.module))}
    if plan.search is not None:
        found["planner"]["what_if"] = _steps(plan.search)
    return json.dumps(found, indent=2, sort_keys=True)
