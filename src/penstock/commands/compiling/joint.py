"""`penstock plan --workload FILE.json` for profiles of layers: stages with tensor and data parallel degrees.

Out: the plan with the least time per sample that the search reached, and how far from the optimum it can be.
"""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from collections import Counter
from typing import TYPE_CHECKING

from penstock.support.errors import UsageError
from penstock.support.terminal import PATIENCE, Progress, say, table, terminal_width
from penstock.support.words import shown_bytes

if TYPE_CHECKING:
    from penstock.passes.placement.joint.profiles import JointPlan
    from penstock.passes.placement.joint.reading import Profiles


def run(arguments: Namespace, data: object) -> None:
    """Plan the layers of a file, and print the stages."""
    from penstock.passes.placement.joint.reading import read_profiles  # lazy: heavy
    from penstock.passes.placement.joint.search import plan_jointly  # lazy: heavy

    profiles = read_profiles(data, arguments.workload)
    flags = ["--any"] if arguments.any else []
    flags += ["--objective latency"] if arguments.objective == "latency" else []
    if flags:
        raise UsageError(
            f"{', '.join(flags)} with profiles of layers: they are planned for throughput, in contiguous stages"
        )
    line = Progress("plan", after=PATIENCE)
    plan = plan_jointly(profiles.problem, progress=lambda done, total, what: line(min(done, total - 1), total, what))
    line.close()
    if arguments.json:
        print(json.dumps(as_json(profiles, plan)))
    else:
        print(as_text(profiles, plan))
        for note in plan.notes:
            say(note)


def as_json(profiles: Profiles, plan: JointPlan) -> dict[str, object]:
    """Return all of a plan; times and bytes in the units of the file."""
    from penstock.passes.placement.joint.profiles import stage_costs  # lazy: heavy

    stages = [
        {
            "tensor_parallel": stage.tensor,
            "data_parallel": stage.data,
            "time": cost.total,
            "compute": cost.compute,
            "gradients": cost.gradients,
            "transfer": cost.boundary,
            "memory": cost.memory,
            "in_flight": cost.in_flight,
            "nodes": {str(profiles.ids[layer]): option for layer, option in sorted(stage.options.items())},
        }
        for stage, cost in zip(plan.stages, stage_costs(plan.problem, plan.stages), strict=True)
    ]
    about = {"objective": "throughput", "value": plan.value, "bound": plan.bound, "gap": plan.gap}
    return about | {"optimal": plan.gap == 0, "stages": stages, "notes": list(plan.notes)}


def as_text(profiles: Profiles, plan: JointPlan) -> str:
    """Return a line with the time of a plan, a table of stages, and the nodes of each."""
    from penstock.passes.placement.joint.profiles import stage_costs  # lazy: heavy

    sure = (
        "the optimum"
        if plan.gap == 0
        else f"at most {plan.gap:.2%} above the optimum, which is at least {plan.bound:.9g}"
    )
    header = ["stage", "devices", "tensor", "data", "nodes", "time", "of which gradients", "transfers", "memory"]
    cells: list[list[object]] = []
    lists = []
    for i, (stage, cost) in enumerate(zip(plan.stages, stage_costs(plan.problem, plan.stages), strict=True)):
        cells.append(
            [
                i,
                stage.devices,
                stage.tensor,
                stage.data,
                len(stage.options),
                f"{cost.total:.6g}",
                f"{cost.gradients:.3g}",
                f"{cost.boundary:.3g}",
                shown_bytes(cost.memory),
            ]
        )
        options = ", ".join(f"{count} x {name}" for name, count in sorted(Counter(stage.options.values()).items()))
        nodes = " ".join(str(profiles.ids[layer]) for layer in sorted(stage.options))
        text = f"stage {i} ({options}): {nodes}"
        lists.append(textwrap.fill(text, terminal_width() or 140, subsequent_indent="    ", break_long_words=False))
    used = sum(stage.devices for stage in plan.stages)
    first = f"time per sample: {plan.value:.12g} on {used} of {plan.problem.devices} devices, {sure}"
    return "\n".join([first, table(header, cells), *lists])
