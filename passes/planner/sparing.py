"""Leave out devices that hardly help.

In: a plan. Out: one without devices that make it faster by less than one in a hundred, and the gain that each of them
would bring. A stage more is messages and waiting that no model knows exactly.

Limit: of more than 32 devices nothing is left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .chain import Chain
from .fleet import Fleet
from .plan import PipelinePlan, PlanRequest
from .planner import Outcome, Planner

# The least gain for which a device is used.
LITTLE = 0.01
_MOST, _TOLERANCE = 32, 1e-3


def without_little_help(chain: Chain, fleet: Fleet, wanted: PlanRequest, chosen: Outcome) -> tuple[Outcome, list[str]]:
    """Return the plan to carry out, and a note on the gain of each device left out. Its bound is that of the plan with
    them."""
    notes: list[str] = []
    keep = sorted(chosen.plan.devices)
    schedule, step = chosen.plan.schedule, chosen.step
    # Where nothing fits but by recomputation in parts, a plan on fewer devices does not either.
    recompute = "parts" if any(stage.in_parts for stage in chosen.plan.stages) else wanted.recompute
    tolerance = max(wanted.tolerance, _TOLERANCE)
    wanted = replace(wanted, schedules=(schedule,), tolerance=tolerance, recompute=recompute)
    planner = Planner(chain, fleet, wanted)
    while len(fleet) <= _MOST:
        tries = []
        part = fleet.only(keep)
        for group in part.classes():
            mine = [keep[i] for i in group if keep[i] in chosen.plan.devices]
            left = [i for i in keep if not mine or i != mine[-1]]
            if mine and left:
                outcome = planner.on(fleet.only(left)).best(schedule, below=step * (1 + LITTLE))
                tries += [(outcome.step, mine[-1], left, outcome)] if outcome is not None else []
        best = min(tries, key=lambda row: row[0], default=None)
        if best is None:
            break
        shorter_step, device, keep, outcome = best
        notes.append(
            f"{fleet.devices[device].name} would make it only {max(0.0, 1 - chosen.step / shorter_step):.1%} faster"
        )
        chosen = replace(
            outcome,
            plan=_numbered(outcome.plan, keep),
            judged=replace(outcome.judged, memory={keep[i]: held for i, held in outcome.judged.memory.items()}),
            bound=chosen.bound,
        )
    return chosen, notes


def _numbered(plan: PipelinePlan, of: Sequence[int]) -> PipelinePlan:
    """Return a plan of a part of a fleet in the numbers of the whole."""
    return replace(plan, stages=tuple(replace(s, devices=tuple(of[i] for i in s.devices)) for s in plan.stages))
