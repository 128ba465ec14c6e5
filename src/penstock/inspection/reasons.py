"""The reasons for a stage's cut and device.

In: a module, and plan.json if there is one. Out: sentences, with the planner's numbers.

They come from the notes of passes and from plan.json: its prediction for the stage's ranks, and the planner's record of
the plans it did not choose. A plan without a search (`--stages`, `--split-at`) has no such alternatives, and a sentence
says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.ir.graph import Module
from penstock.passes.costs.prices import by_simulation, shown_seconds
from penstock.support.errors import VerifyError
from penstock.support.words import counted

# The passes that decide where and how an operation is computed.
_DECIDING = ("placement", "partition", "update-on", "recompute", "libraries")


def stage_reasons(module: Module, stage: int, plan: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the planner's reasons for a stage."""
    try:
        return tuple(_reasons(module, stage, plan))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise VerifyError(
            f"plan.json is not as `penstock compile` writes it: {error!r}", hint="compile the model again"
        ) from error


def _reasons(module: Module, stage: int, plan: Mapping[str, Any]) -> Iterator[str]:
    for cut in plan.get("stages", ()):
        if cut["stage"] == stage and cut["starts_at"] is not None:
            yield f"stage {stage} begins with {cut['starts_at']}"
    if predicted := plan.get("predicted"):
        yield from _load(module, stage, predicted)
    yield from (f"{note.origin}: {note.text}" for note in module.notes if note.origin in _DECIDING)
    if not plan:
        return
    planner = plan.get("planner")
    if planner is None:
        yield "no plans were compared: stages or cuts were asked for (--batch lets the planner choose)"
        return
    yield from _alternatives(plan, planner)


def _load(module: Module, stage: int, predicted: Mapping[str, Any]) -> Iterator[str]:
    busy = {int(rank): float(seconds) for rank, seconds in predicted["busy_s"].items()}
    slowest = max(busy.values(), default=0.0)
    for rank, stages in enumerate(module.rank_packs()):
        if stage in stages and slowest:
            yield (
                f"rank {rank} computes {shown_seconds(busy[rank])} per batch, {busy[rank] / slowest:.0%} of the "
                "busiest rank"
            )
    yield (
        f"a batch is predicted to take {shown_seconds(float(predicted['step_s']))}, limited by "
        f"{predicted['limited_by']}"
    )


def _teams(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what plans take whose tensors are split over teams of devices, a line for each size."""
    for row in rows:
        ways = row["devices_of_a_team"]
        what = "no tensor parallelism" if ways == 1 else f"{ways} ways of tensor parallelism"
        if row["step_s"] is None:
            yield f"{what}: {row['reason']}"
        else:
            by = shown_seconds(float(row["step_s"])) + " by the formulas"
            time = by if row.get("by_formulas") else by_simulation(float(row["step_s"]))
            yield f"{what}: {time}{' (taken)' if row['taken'] else ''}"


def _alternatives(plan: Mapping[str, Any], planner: Mapping[str, Any]) -> Iterator[str]:
    step, schedule = float(planner["step_s"]), planner.get("formulas_of", plan.get("schedule", ""))
    objective = planner.get("objective")
    unit = "batch" if objective is None else counted(objective["microbatches"], "microbatch")
    if objective is not None:
        for name, row in objective["plans"].items():
            alone, many = shown_seconds(row["latency_s"]), shown_seconds(row["pace_s"])
            yield (
                f"for {name} {'it is' if name == objective['name'] else 'it would be'} "
                f"{counted(len(row['devices']), 'stage')} on {', '.join(row['devices'])}: "
                f"{alone} from input to output, {many} for each in a run"
            )
    if "formulas_of" in planner:
        yield f"{plan.get('schedule')} with several stages on a device was faster than {schedule}, by simulation"
    for kind, row in planner.get("packs", {}).items():
        time = by_simulation(float(row["step_s"]))
        yield f"{row['stages_on_a_device']} stages on each device, {kind}: {time}{' (taken)' if row['taken'] else ''}"
    yield from _teams(planner.get("teams", ()))
    # A plan chosen by simulation may be slower by the formulas than the best plan by them, which is compared below.
    usual = float(planner["schedules"].get(schedule, step))
    if planner["proven"]:
        yield (
            f"by the planner's formulas no plan of {schedule} for what was given is faster than its "
            f"{shown_seconds(step)} per {unit}"
        )
    else:
        bound = shown_seconds(float(planner["bound_s"]))
        yield (
            f"the planner's formulas give {shown_seconds(step)} per {unit}, and no plan of {schedule} takes less "
            f"than {bound} by them"
        )
    if "passed_over" in planner:
        yield f"by these formulas another plan of {schedule} takes {shown_seconds(usual)}, {planner['passed_over']}"
    changes, simulated = planner.get("what_if", {}), planner.get("simulated", {})
    alone = f" of {schedule} with one stage on a device" if "formulas_of" in planner else ""
    yield f"with one thing changed in what was given, by the formulas, against {shown_seconds(usual)}{alone}:"
    for kind, seconds in planner["schedules"].items():
        if kind != schedule and kind not in planner["refused"] and f"schedule {kind}" not in changes:
            yield f"what if: schedule {kind}: {_against(float(seconds), usual, unit)}"
    for kind, reason in planner["refused"].items():
        yield f"refused: {kind}: {str(reason).splitlines()[0]}"
    for name, seconds in changes.items():
        kind = name.removeprefix("schedule ")
        if kind in planner["refused"]:
            continue
        nothing = "no plan was found" if name in planner.get("unsure", ()) else "nothing fits"
        outcome = nothing if seconds is None else _against(float(seconds), usual, unit)
        if name in planner.get("no_less_s", ()):
            outcome += f" at most, and no less than {shown_seconds(planner['no_less_s'][name])} under {schedule}"
        if kind in simulated and seconds is not None and float(seconds) < usual:
            seconds_there = simulated[kind]
            outcome += f", but {by_simulation(None if seconds_there is None else float(seconds_there))}"
        yield f"what if: {name}: {outcome}"
    if planner["left_out"]:
        yield f"{counted(len(planner['left_out']), 'device')} left out: {', '.join(planner['left_out'])}"


def _against(other: float, step: float, unit: str) -> str:
    return f"{shown_seconds(other)} per {unit}, {other / step - 1:+.1%}"
