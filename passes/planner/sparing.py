"""Leave out devices that hardly help, and plan without one device.

In: a plan. Out: one without devices that make it faster by less than one in a hundred, and the gain that each of them
would bring. A stage more is messages and waiting that no model knows exactly.

Where planning is quick, plans without a device are searched like all others. In larger fleets that would take as long
as planning, for each device. There plans `near` the given one are searched: with the same microbatches, and with the
matrices of the whole fleet. Devices are left out only of those few that are missed least
where the stages stay as they are.

Limit: of more than 32 devices nothing is left out here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

from .plan import PipelinePlan
from .planner import Outcome, Planner

# The least gain for which a device is used.
LITTLE = 0.01
_MOST, _TOLERANCE = 32, 1e-3
# The most devices, those that are missed least by stages that stay as they are, without which plans are searched.
_SEARCHED = 3


def near(planner: Planner, plan: PipelinePlan, lost: Collection[int], below: float = inf) -> Outcome | None:
    """Return a good plan without some devices that takes less than `below`, if one was found: by the same schedule,
    with the same microbatches."""
    hurried = planner.hurried(plan)
    outcome, others = closed_up(hurried, plan, lost, below), hurried.without(lost)
    # A search passes over what is better than its limit by less than its tolerance.
    limit = below / (1 - others.wanted.tolerance) if outcome is None else outcome.step
    better = others.best(plan.schedule, below=limit)
    return outcome if better is None or better.step >= below else better


def closed_up(planner: Planner, plan: PipelinePlan, lost: Collection[int], below: float = inf) -> Outcome | None:
    """Return the best of the plans that take less than `below` and whose stages have the devices of one without those
    that are lost, in the same order."""
    groups = [tuple(i for i in stage.devices if i not in lost) for stage in plan.stages]
    groups = [group for group in groups if group]
    return planner.in_groups(plan.schedule, plan.size, groups, below=below) if groups else None


def without_little_help(planner: Planner, chosen: Outcome) -> tuple[Outcome, list[str]]:
    """Return the plan to carry out, and a note on the gain of each device left out. Its bound is that of the plan with
    them."""
    notes: list[str] = []
    fleet, keep = planner.fleet, sorted(chosen.plan.devices)
    schedule, step = chosen.plan.schedule, chosen.step
    # Where nothing fits but by recomputation in parts, a plan on fewer devices does not either.
    recompute = "parts" if any(stage.in_parts for stage in chosen.plan.stages) else planner.wanted.recompute
    tolerance = max(planner.wanted.tolerance, _TOLERANCE)
    planner = planner.but(replace(planner.wanted, schedules=(schedule,), tolerance=tolerance, recompute=recompute))
    while len(keep) > 1 and len(fleet) <= _MOST:
        classes = fleet.only(keep).classes()
        used = [[keep[i] for i in group if keep[i] in chosen.plan.devices] for group in classes]
        best = _least_missed(planner, chosen, keep, [devices[-1] for devices in used if devices], step * (1 + LITTLE))
        if best is None:
            break
        device, outcome = best
        keep.remove(device)
        notes.append(
            f"{fleet.devices[device].name} would make it only {max(0.0, 1 - chosen.step / outcome.step):.1%} faster"
        )
        chosen = replace(outcome, bound=chosen.bound)
    return chosen, notes


def _least_missed(
    planner: Planner, chosen: Outcome, keep: Collection[int], devices: Sequence[int], below: float
) -> tuple[int, Outcome] | None:
    """Return the one of some devices without which a plan takes least, and that plan; None where all take more than
    `below`. No plan has other devices than those to `keep`."""
    plan = chosen.plan
    gone = {*range(len(planner.fleet))} - {*keep}
    if planner.is_quick:
        tries = {i: planner.without({*gone, i}).best(plan.schedule, below=below) for i in devices}
    else:
        tries = {i: closed_up(planner, plan, {i}) for i in devices}
        least = sorted(devices, key=lambda i: inf if (x := tries[i]) is None else x.step)[:_SEARCHED]
        tries = {i: near(planner, plan, gone | {i}, below) for i in least}
    fitting = {i: outcome for i, outcome in tries.items() if outcome is not None}
    device = min(fitting, key=lambda i: fitting[i].step, default=None)
    return None if device is None else (device, fitting[device])
