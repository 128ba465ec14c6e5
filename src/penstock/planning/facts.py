"""A plan as plain data, as in plan.json of a bundle and `penstock plan --json`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from penstock.ir.batch_shares import microbatch_size, updating_stages
from penstock.ir.cluster.cluster import CLASSES, MEASURED, THREAD_FLOPS, Cluster, Device, class_between
from penstock.ir.cluster.gpus import usual_settings
from penstock.ir.cluster.spaces import FILE, SPACE_WAYS, Space
from penstock.ir.graph import Module
from penstock.passes.communicate.wire import WireOptions
from penstock.passes.costs.prices import EFFICIENCY
from penstock.passes.manager import Call, print_pipeline
from penstock.passes.memory.lifetimes import memory_table
from penstock.passes.memory.offload import OffloadOptions
from penstock.passes.memory.recompute import RecomputeOptions
from penstock.passes.partition.chain import chain_of, params_behind, positions_of
from penstock.passes.partition.modules import MODULE, modules_of_stages
from penstock.passes.rewrite.precision import PrecisionOptions
from penstock.passes.sharding.replicas.zero import ZeroOptions
from penstock.passes.sharding.shard import ShardOptions
from penstock.passes.simulator.forecast import binding
from penstock.passes.training.update_on import UpdateOnOptions

from .choice import AS_LONG, RUN, Contribution, Objective, Search, TeamWay, compare, passed_over
from .hints import stage_starts
from .predict import Predicted

# For more devices than these a bundle's plan has no `what_if`: each change is planned anew.
_FEW_DEVICES = 16


# The figures of a device that predictions are made of, by the name they have in the output.
_RATES = {
    "products": "flops",
    "memory": "bandwidth",
    "cache": "cache_bandwidth",
    "kernels": "overhead",
    "calls": "call_overhead",
    "ends of messages": "shared_overhead",
    "copies": "copy_bandwidth",
    "sockets": "socket_bandwidth",
}
# What a figure is assumed to be is in `Device` and EFFICIENCY; others stand in the cluster file.
ASSUMED, _GIVEN = "assumed", "given"


def sources_of(device: Device) -> dict[str, list[str]]:
    """Return the figures of a device by where they come from: measured on it, given in a cluster file, or assumed.
    Shares of the rate that families of work reach are figures, too."""
    usual = Device(device.name, threads=device.threads, flops=THREAD_FLOPS * device.threads)
    if device.kind == "cuda":
        usual = replace(usual, **usual_settings(device.target))  # type: ignore[arg-type]
    known = device.source or _GIVEN
    sources: dict[str, list[str]] = {}
    for name, field in _RATES.items():
        is_usual = getattr(device, field) == getattr(usual, field)
        sources.setdefault(ASSUMED if is_usual else known, []).append(name)
    shares = {key.partition(".")[0] for key, _ in device.efficiency}
    for family in dict.fromkeys(key.partition(".")[0] for key in EFFICIENCY):
        sources.setdefault(known if family in shares else ASSUMED, []).append(f"share of {family}")
    return sources


def rates_facts(module: Module) -> dict[str, Any]:
    """Return the sources of the figures of every device, and of the classes of links."""
    cluster = module.cluster
    assert cluster is not None
    return {
        "devices": {device.name: sources_of(device) for device in cluster.devices},
        "links": sources_of_links(cluster),
    }


def sources_of_links(cluster: Cluster) -> dict[str, str]:
    """Return the source of the rates of every class of links. Those of a file are measured where all devices are that
    such links connect."""
    known = {c.kind: MEASURED if _are_measured(cluster.devices, c.kind) else _GIVEN for c in cluster.classes}
    return {kind: known.get(kind, ASSUMED) for kind in CLASSES}


def _are_measured(devices: Sequence[Device], kind: str) -> bool:
    """Return whether the rates of all devices that links of a class connect were measured; where there is none, those
    of all devices."""
    ends = [device for pair in combinations(devices, 2) if class_between(*pair) == kind for device in pair]
    return all(device.source for device in ends or devices)


def describe_plan(
    module: Module, reference: Module, calls: Sequence[Call], predicted: Predicted, search: Search | None = None
) -> dict[str, Any]:
    """Return a planned module as plain data; `reference` is the model before `partition`, `calls` are all passes."""
    schedule, starts = module.schedule, stage_starts(reference, module)
    assert schedule is not None
    modules = _modules_facts(reference, calls, starts)
    return {
        "model": module.name,
        "pipeline": print_pipeline(calls),
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "samples_per_microbatch": microbatch_size(module),
        "precision": next(
            (call.options.compute for call in calls if isinstance(call.options, PrecisionOptions)), "f32"
        ),
        "wire": next((call.options.dtype for call in calls if isinstance(call.options, WireOptions)), "f32"),
        "recompute": next((call.options.mode for call in calls if isinstance(call.options, RecomputeOptions)), "none"),
        **_offload_facts(module, calls),
        **_mesh_facts(calls),
        **_update_facts(calls),
        "stages": [
            {
                "stage": s.index,
                "starts_at": starts[s.index],
                "devices": list(module.devices_of(s.index)),
                "shares": replica_shares(module, s.index),
                **modules.get(s.index, {}),
            }
            for s in module.stages
            if s.index not in updating_stages(module)
        ],
        "memory": {str(rank): dict(row) for rank, row in memory_table(module).items()},
        "notes": [f"{note.origin}: {note.text}" for note in module.notes],
        "predicted": predicted_facts(predicted),
        **({} if search is None else {"planner": planner_facts(search)}),
    }


def replica_shares(module: Module, stage: int) -> list[int]:
    """Return the microbatches of a batch that each replica of a stage runs: a device, or a team of them."""
    assert module.schedule is not None
    shares = module.schedule.shares(stage)
    return [shares[team[0]] for team in module.mesh_of(stage).teams()]


def _modules_facts(
    reference: Module, calls: Sequence[Call], starts: Sequence[str | None]
) -> dict[int, dict[str, list[str]]]:
    """Return the modules of every stage, where stages are cut between modules."""
    split_by = next((call.options.split_by for call in calls if call.name == "partition"), "")
    if split_by != MODULE:
        return {}
    chain = chain_of(reference)
    position = positions_of(chain)
    places = [position[name] for name in starts if name is not None]
    stages = [sum(i >= place for place in places) for i in range(len(chain))]
    modules = modules_of_stages(chain, params_behind(reference), stages)
    return {stage: {"modules": names} for stage, names in enumerate(modules)}


def _mesh_facts(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the axes of the stages' devices and the given layouts; nothing of a plan without a mesh."""
    options = next((call.options for call in calls if isinstance(call.options, ShardOptions)), None)
    level = next((call.options.level for call in calls if isinstance(call.options, ZeroOptions)), 0)
    zero = {"zero": level} if level else {}
    if options is None:
        return {}
    # Stages with unlike numbers of replicas have no mesh in common: their devices say it.
    placed = next((call.options.mesh for call in calls if call.name == "partition"), options.mesh)
    return {**({"mesh": placed} if placed else {}), "shard": list(options.given), **zero}


def _update_facts(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the devices that run updates alone; nothing where stages run their own."""
    options = next((call.options for call in calls if isinstance(call.options, UpdateOnOptions)), None)
    return {} if options is None else {"update_on": ",".join(options.devices)}


def _offload_facts(module: Module, calls: Sequence[Call]) -> dict[str, Any]:
    """Return what has its home in another memory space, and which: a folder, or the name of a space of the cluster."""
    options = next((call.options for call in calls if isinstance(call.options, OffloadOptions)), None)
    if options is None or module.cluster is None:
        return {}
    # A space of the cluster file goes by its name; one that --spill made has a folder and a bandwidth, nothing else.
    bandwidth, latency = SPACE_WAYS[FILE]
    named = [s for s in module.cluster.spaces if s.name == options.space and "/" in s.path]
    plain = [replace(space, bandwidth=bandwidth, latency=latency) for space in named]
    folders = [space.path for space in plain if space == Space(space.name, path=space.path)]
    return {"offload": options.what, "spill": folders[0] if folders else options.space}


def predicted_facts(predicted: Predicted) -> dict[str, Any]:
    """Return a prediction as plain data. The plan of a bundle has a plain prediction, so that a bundle depends on its
    sources alone."""
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
    """Return the findings of the planner. `passed_over` is why another plan of the schedule that is faster by the
    formulas was not taken, if there is one. Where packs were taken, figures of formulas are those of the best plan with
    one stage on a device, and `formulas_of` is its schedule."""
    chosen = search.chosen
    other = compare(search.result.outcomes[chosen.plan.schedule].step, chosen.step) != AS_LONG
    return {
        "step_s": chosen.step,
        "bound_s": chosen.bound,
        "proven": chosen.proven(search.result.wanted.tolerance),
        "layout": chosen.layout.name,
        "limited_by": chosen.judged.binding,
        "schedules": {kind: outcome.step for kind, outcome in search.result.outcomes.items()},
        "refused": dict(search.refused),
        "left_out": search.left_out,
        **({} if search.objective is None else {"objective": objective_facts(search.objective)}),
        **({"passed_over": passed_over(search)} if other else {}),
        **(
            {"simulated": _finite({kind: refined.step for kind, refined in search.refined.items()})}
            if search.refined
            else {}
        ),
        **({"packs": packs_facts(search)} if search.packs else {}),
        **({} if search.taken is None else {"formulas_of": chosen.plan.schedule}),
        **({"teams": [_way(way) for way in search.ways]} if search.ways else {}),
        **({"stopped": True} if search.result.stopped else {}),
        **(changes_facts(search) if len(search.result.fleet.devices) <= _FEW_DEVICES else {}),
    }


def objective_facts(objective: Objective) -> dict[str, Any]:
    """Return the objective of a plan for inference, and what the plans for both take. `step_s` of the planner is that
    of `microbatches`."""
    plans = {
        name: {
            "devices": list(plan.devices),
            "latency_s": plan.latency,
            "pace_s": plan.pace,
            "bound_s": plan.bound,
            "proven": plan.proven,
        }
        for name, plan in objective.plans.items()
    }
    return {"name": objective.name, "microbatches": 1 if objective.name == "latency" else RUN, "plans": plans}


def packs_facts(search: Search) -> dict[str, Any]:
    """Return the best plans with several stages on a device that were found: seconds by simulation, and bytes of
    activations."""
    names = [device.name for device in search.result.fleet.devices]
    return {
        kind: {
            "stages_on_a_device": packed.plan.packs,
            "step_s": packed.step,
            "activations": {names[i]: held.activations for i, held in packed.memory.items()},
            "taken": packed == search.taken,
        }
        for kind, packed in search.packs.items()
    }


def _way(way: TeamWay) -> dict[str, Any]:
    """Return what plans take whose tensors are split over teams of a size, as plain data."""
    return {
        "devices_of_a_team": way.size,
        "step_s": way.step,
        "taken": way.taken,
        **({"layouts": way.layouts} if way.layouts else {}),
        **({} if way.simulated else {"by_formulas": True}),
        **({"reason": way.reason} if way.reason else {}),
    }


def _finite(steps: Mapping[str, float]) -> dict[str, float | None]:
    """Return null for schedules of which no plan could be simulated, as JSON knows no infinity."""
    return {kind: step if math.isfinite(step) else None for kind, step in steps.items()}


def changes_facts(search: Search) -> dict[str, Any]:
    """Return what would change the plan, and what every device contributes. Of the changes that are `unsure` no plan
    was found, and there may be one. Of those with a bound `no_less_s`, only some plans were tried."""
    bounds = {change.name: change.bound for change in search.what_if if change.bound}
    unsure = [change.name for change in search.what_if if change.step is None and not change.sure]
    return {
        "what_if": changed_steps(search),
        "against_s": search.usual,
        **({"unsure": unsure} if unsure else {}),
        **({"no_less_s": bounds} if bounds else {}),
        "devices": [_contribution(row) for row in search.contributions],
    }


def _contribution(row: Contribution) -> dict[str, Any]:
    """Return the contribution of a device as plain data."""
    return {
        "device": row.device,
        "used": row.used,
        "effect": row.effect,
        "step_with_s": row.with_it,
        "step_without_s": row.without_it,
        "gain": row.gain,
        **({"reason": row.reason} if row.reason else {}),
    }


def changed_steps(search: Search) -> dict[str, float | None]:
    """Return the seconds of a batch after each counterfactual change of the plan, by the name of the change."""
    return {change.name: change.step for change in search.what_if}
