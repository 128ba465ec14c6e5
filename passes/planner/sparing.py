"""Leave out devices that hardly help.

In: a plan. Out: one without devices that make it faster by less than one in a hundred, and the gain that each of them
would bring. A stage more is messages and waiting that no model knows exactly.

Limit: of more than 32 devices nothing is left out here.
"""

from __future__ import annotations

from dataclasses import replace

from .planner import Outcome, Planner

# The least gain for which a device is used.
LITTLE = 0.01
_MOST, _TOLERANCE = 32, 1e-3


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
    while len(fleet) <= _MOST:
        tries = []
        for group in fleet.only(keep).classes():
            mine = [keep[i] for i in group if keep[i] in chosen.plan.devices]
            if mine and len(keep) > 1:
                gone = {i for i in range(len(fleet)) if i not in keep} | {mine[-1]}
                outcome = planner.without(gone).best(schedule, below=step * (1 + LITTLE))
                tries += [(outcome.step, mine[-1], outcome)] if outcome is not None else []
        best = min(tries, key=lambda row: row[0], default=None)
        if best is None:
            break
        shorter_step, device, outcome = best
        keep.remove(device)
        notes.append(
            f"{fleet.devices[device].name} would make it only {max(0.0, 1 - chosen.step / shorter_step):.1%} faster"
        )
        chosen = replace(outcome, bound=chosen.bound)
    return chosen, notes
