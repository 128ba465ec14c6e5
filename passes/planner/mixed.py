"""Reasons for and against devices of another kind than the fastest one: processors beside a GPU.

In: a planner, and the best plan of it. Out: sentences for people. All figures are those of the formulas (cost.py).

A device of another kind that the plan uses is weighed against the best plan without it. One that it does not use comes
with the layers that the best plan with it would put there: what they take there, what they take on the fastest device,
and what their messages take.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.passes.costs.prices import shown_seconds

from .cost import stage_times
from .plan import PipelinePlan
from .planner import Outcome, Planner


def of_another_kind(planner: Planner) -> frozenset[int]:
    """Return the devices that are no GPUs where the fastest device is one, or the other way round."""
    kind = planner.fleet.devices[_fastest(planner)].kind
    return frozenset(i for i, device in enumerate(planner.fleet.devices) if device.kind != kind)


def _fastest(planner: Planner) -> int:
    devices = planner.fleet.devices
    return max(range(len(devices)), key=lambda i: devices[i].flops)


def price_elsewhere(planner: Planner, plan: PipelinePlan, group: frozenset[int]) -> str:
    """Describe what the layers of a plan on some devices take there, on the fastest device, and in messages."""
    table, best = planner.table(plan.size), _fastest(planner)
    here = there = messages = 0.0
    for s, stage in enumerate(plan.stages):
        times = stage_times(table, planner.fleet, plan, s)
        shares = [(n, each) for i, n, each in zip(stage.devices, stage.shares, times.each, strict=True) if i in group]
        here += max((n * each for n, each in shares), default=0.0)
        forward, backward, *_ = table.times(planner.fleet.devices[best])
        once = float(forward[stage.last] - forward[stage.first] + backward[stage.last] - backward[stage.first])
        there += sum(n for n, _ in shares) * once
        neighbours = {*stage.devices, *(plan.stages[s + 1].devices if s + 1 < len(plan.stages) else ())}
        if neighbours & group:
            messages += plan.count * times.trip
    return (
        f"its layers would take {shown_seconds(here)} of a batch there and {shown_seconds(there)} on "
        f"{planner.fleet.devices[best].name}, their messages {shown_seconds(messages)}"
    )


def helping(planner: Planner, outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Yield the devices of another kind that a plan uses, each kind once, with the result of planning without them."""
    unlike = of_another_kind(planner)
    for group in planner.alike():
        used = [i for i in group if i in unlike and i in outcome.plan.devices]
        if not used:
            continue
        name, others = planner.fleet.devices[used[0]].name, frozenset(range(len(planner.fleet))) - {*group}
        other = planner.best(outcome.plan.schedule, others.issuperset)
        if other is None:
            fits = "fits" if planner.sees_all else "was found that fits"
            yield name, f"without it no plan {fits} into the memory of the others"
        elif other.step > outcome.step:
            yield (
                name,
                (f"a batch would take {shown_seconds(other.step)} without it instead of {shown_seconds(outcome.step)}"),
            )
        else:
            yield name, "only when plans are simulated; by the formulas it does not"
