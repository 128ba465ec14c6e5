"""Leave out devices that hardly help. In: a plan. Out: one without devices that make it faster by less than one in a hundred, and what each
of them would have brought: a stage more is messages and waiting that no model knows exactly.

Limit: of more than 32 devices nothing is left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .chain import Chain
from .fleet import Fleet
from .plan import PipelinePlan, PlanRequest
from .planner import Outcome, Planner

# What a device must bring to be used.
LITTLE = 0.01
_MOST, _TOLERANCE = 32, 1e-3


def without_little_help(chain: Chain, fleet: Fleet, wanted: PlanRequest, chosen: Outcome) -> tuple[Outcome, list[str]]:
    """The plan to carry out, and of devices that it does without what they would have brought. Its bound is that of the plan with them."""
    told: list[str] = []
    keep = sorted(chosen.plan.devices)
    schedule, step = chosen.plan.schedule, chosen.step
    wanted = replace(wanted, schedules=(schedule,), tolerance=max(wanted.tolerance, _TOLERANCE))
    while len(fleet) <= _MOST:
        tries = []
        part = fleet.only(keep)
        for group in part.classes():
            mine = [keep[i] for i in group if keep[i] in chosen.plan.devices]
            left = [i for i in keep if not mine or i != mine[-1]]
            if mine and left and (found := Planner(chain, fleet.only(left), wanted).best(schedule)) is not None:
                tries.append((found.step, mine[-1], left, found))
        best = min(tries, key=lambda row: row[0], default=None)
        if best is None or best[0] > step * (1 + LITTLE):
            break
        taken, device, keep, found = best
        told.append(f"{fleet.devices[device].name} would make it only {max(0.0, 1 - chosen.step / taken):.1%} faster")
        chosen = replace(
            found,
            plan=_numbered(found.plan, keep),
            judged=replace(found.judged, memory={keep[i]: held for i, held in found.judged.memory.items()}),
            bound=chosen.bound,
        )
    return chosen, told


def _numbered(plan: PipelinePlan, of: Sequence[int]) -> PipelinePlan:
    """A plan of a part of a fleet in the numbers of the whole."""
    return replace(plan, stages=tuple(replace(s, devices=tuple(of[i] for i in s.devices)) for s in plan.stages))
