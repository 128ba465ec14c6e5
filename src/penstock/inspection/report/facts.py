"""All facts of a report, section by section.

In: material. Out: plain data for JSON; a section that the material cannot fill is null.

    summary    the model, its ranks, and predictions           links      messages between ranks
    graph      the graphs (graph_facts)                        schedule   timelines (schedule_facts)
    passes     the changes of every pass (pass_facts)          memory     memory of ranks over time (memory_facts)
    placement  ranks with their share of time and memory,      kernels    kernels and their source (kernel_facts)
               and the reasons                            sharding   layouts and collectives (sharding_facts)

Predictions are those of the simulator. With `plain` they rest on the module alone, so that the same module has the same
page; otherwise on measurements of this machine, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from penstock.calibration.measured import Measured
from penstock.inspection.memory.curves import cache_room
from penstock.ir.graph import PARAM, Module
from penstock.ir.memory.predict import Memory, measure_memory
from penstock.ir.ops.caches import BLOCK
from penstock.ir.schedule import PER_BATCH
from penstock.ir.sharding.tile_messages import moved_bytes
from penstock.passes.manager import count_ops
from penstock.passes.simulator.forecast import binding
from penstock.planning.predict import Predicted, predict, predict_here
from penstock.version import __version__

from .graph_facts import graph_facts
from .kernel_facts import kernel_facts
from .material import Material
from .memory_facts import measured_memory, memory_facts
from .pass_facts import pass_facts
from .schedule_facts import KINDS, measured_facts, planned_facts
from .sharding_facts import sharding_facts
from .strings import Strings


def gather(material: Material, plain: bool = False) -> dict[str, Any]:
    """Collect all facts of the page."""
    module, strings = material.module, Strings({"": 0})
    known = material.predicted if plain else None
    predicted = (known or (predict if plain else predict_here)(module)) if _runs(module) else None
    memory = measure_memory(module) if predicted is not None else {}
    facts = {
        "version": __version__,
        "failure": material.failure,
        "summary": _summary(material, predicted),
        "graph": graph_facts(module, strings),
        "passes": pass_facts(material.steps, strings) or None,
        "placement": _placement(material, predicted, memory) if predicted is not None else None,
        "schedule": _schedule(material, predicted) if predicted is not None else None,
        "memory": memory_facts(memory, predicted.forecast, strings)
        if predicted is not None and "freed" in module.facts
        else None,
        "links": _links(module, predicted, strings) if predicted is not None else None,
        "sharding": sharding_facts(module, material.trace) if module.stages else None,
        "kernels": None,
    }
    if "fused" in module.facts and module.cluster is not None and module.stages:
        facts["kernels"] = kernel_facts(module, material, strings, None if plain else Measured())
    return facts | {"strings": list(strings)}


def _runs(module: Module) -> bool:
    """Return whether a module can be simulated: it has a schedule with its messages, on known devices."""
    return (
        module.schedule is not None and module.cluster is not None and bool(module.stages) and "wired" in module.facts
    )


def _summary(material: Material, predicted: Predicted | None) -> dict[str, Any]:
    module, plan = material.module, material.plan
    params = [v for v in module.vars.values() if v.role == PARAM]
    return {
        "model": module.name,
        "facts": list(module.facts),
        "inputs": [[v.name, str(v.type)] for v in module.inputs],
        "outputs": list(module.outputs),
        "parameters": sum(v.type.size for v in params),
        "parameter_bytes": sum(v.type.nbytes for v in params),
        "parameter_tensors": len(params),
        "operations": count_ops(module),
        "precision": plan.get("precision"),
        "wire": plan.get("wire"),
        "recompute": plan.get("recompute"),
        "schedule": module.schedule.name if module.schedule is not None else None,
        "microbatches": module.schedule.microbatches if module.schedule is not None else None,
        "stages": [[s.index, list(module.devices_of(s.index))] for s in module.stages],
        "rungs": [
            [rung.sizes, rung.seconds, None if rung.turn is None else astuple(rung.turn)] for rung in material.rungs
        ],
        "caches": _caches(module),
        **({} if predicted is None else _predictions(predicted)),
    }


def _caches(module: Module) -> list[int] | None:
    """Return what caches hold: blocks, positions of a block, bytes in all and of a position."""
    rooms = [room for stage in module.stages if (room := cache_room(module, stage.index)) is not None]
    if not rooms:
        return None
    blocks = min(room.blocks for room in rooms)
    return [blocks, BLOCK, sum(room.bytes for room in rooms), sum(room.bytes_per_position for room in rooms)]


def _predictions(predicted: Predicted) -> dict[str, Any]:
    uses = predicted.forecast.simulated.ranks
    total = sum(use.busy + use.waiting + use.idle for use in uses)
    return {
        "step": predicted.step,
        "samples": predicted.forecast.samples,
        "drained": predicted.forecast.drained,
        "bound_by": binding(predicted.forecast),
        "busy": sum(use.busy for use in uses) / total if total else 1.0,
        "measured_graphs": predicted.measured,
        "path": predicted.forecast.simulated.critical_path,
    }


def _placement(material: Material, predicted: Predicted, memory: Mapping[int, Memory]) -> dict[str, Any]:
    module, plan, cluster = material.module, material.plan, material.module.cluster
    assert module.schedule is not None
    assert cluster is not None
    uses = {use.rank: use for use in predicted.forecast.simulated.ranks}
    shares = [share for stage in module.stages for share in module.schedule.shares(stage.index)]
    starts = {entry.get("stage"): entry.get("starts_at") for entry in plan.get("stages", []) if isinstance(entry, dict)}
    ranks = []
    for rank, (stages, name) in enumerate(zip(module.rank_packs(), module.rank_devices(), strict=True)):
        stage = stages[0]
        device, use = cluster.device(name), uses[rank]
        ranks.append(
            {
                "rank": rank,
                "stage": stage,
                "stages": list(stages),
                "device": name,
                "kind": device.kind,
                "host": device.host,
                "threads": device.threads,
                "flops": device.flops,
                "bandwidth": device.bandwidth,
                "capacity": device.memory,
                "starts_at": starts.get(stage) or _first_node(module, stage),
                "share": shares[rank],
                "seconds": predicted.busy[rank],
                "use": [use.busy, use.waiting, use.idle],
                "peak": memory[rank].peak,
                "in_flight": memory[rank].in_flight,
            }
        )
    notes = [[n.origin, n.text] for n in module.notes]
    return {"ranks": ranks, "notes": notes, "schedule": plan.get("schedule"), "planner": plan.get("planner")}


def _first_node(module: Module, stage: int) -> str:
    """Return the source node that a stage begins with."""
    graph = module.stage_graph(stage, "F")
    return (
        next((op.loc for op in graph.ops if op.kind not in ("read", "const") and op.loc), "")
        if graph is not None
        else ""
    )


def _schedule(material: Material, predicted: Predicted) -> dict[str, Any]:
    run = predicted.forecast.simulated
    facts: dict[str, Any] = {
        "kinds": KINDS,
        "microbatches": run.schedule.microbatches,
        "planned": planned_facts(run),
        "measured": None,
    }
    if material.trace is not None:
        facts["measured"] = measured_facts(material.trace, run, facts["planned"])
        facts["measured"]["held"] = measured_memory(material.trace, run, facts["measured"]["at"])
    return facts


def _links(module: Module, predicted: Predicted, strings: Strings) -> dict[str, Any]:
    run = predicted.forecast.simulated
    edges = [
        {
            "from": edge.src,
            "to": edge.dst,
            "phase": edge.phase,
            "per": "batch" if edge.phase in PER_BATCH else "microbatch",
            "values": [[strings[v.name], strings[str(v.type)], moved[v.name]] for v in edge.values],
        }
        for edge in module.edges
        for moved in (moved_bytes(module, edge),)
    ]
    # JSON has no number for the rate of an infinitely fast link.
    uses = [
        [
            use.name,
            use.bandwidth if math.isfinite(use.bandwidth) else None,
            use.nbytes / run.batches,
            use.busy / run.finish if run.finish else 0.0,
        ]
        for use in run.links
    ]
    return {"edges": edges, "links": uses}
